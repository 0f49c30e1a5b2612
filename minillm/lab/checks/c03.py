"""Lesson 03: the naive loop, the choice of a token, and how many tokens go through the model."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minillm.bench.harness import Job, run
from minillm.config import Config
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.work import Work, Wrong, same
from minillm.model import Llama
from minillm.params import SamplingParams
from minillm.request import make_request
from minillm.stages import naive

CONFIG = Config(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    norm_eps=1e-5,
    rope_theta=10000.0,
    context=256,
)
INF = float("inf")


# ---- the loop


def tiny(eos: tuple[int, ...] = ()) -> Llama:
    """A random Llama in float64; the same weights for all end tokens."""
    return Llama.random(replace(CONFIG, eos=eos), seed=3, dtype=torch.float64)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = seeds.rng(seed)
    return [[draw.randrange(CONFIG.vocab_size) for _ in range(n)] for n in lengths]


def greedy(model: Llama, prompt: list[int], n_new: int) -> list[int]:
    """What the package's naive stage makes."""
    request = make_request(prompt, SamplingParams(max_tokens=n_new), model.config, None, model.config.context)
    return [event.token for event in naive.run(model, request) if event.token is not None]


@dataclass
class Pass:
    """What one call of the model was given, and which rows then went through the head."""

    tokens: list[int]
    positions: list[int]
    hidden: Tensor  # [T, d]
    head: list[Tensor] = field(default_factory=list)  # [M, d] each


@contextmanager
def watched(model: Llama) -> Iterator[list[Pass]]:
    passes: list[Pass] = []

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> None:
        given = dict(zip(("tokens", "positions", "attend"), args, strict=False)) | kwargs
        tokens, positions = (given[name].flatten().tolist() for name in ("tokens", "positions"))
        passes.append(Pass(tokens, positions, hidden.reshape(-1, hidden.shape[-1])))

    def before_head(module: Any, args: tuple[Any, ...]) -> None:
        if passes:
            passes[-1].head.append(args[0].reshape(-1, args[0].shape[-1]))

    hooks = [model.register_forward_hook(after, with_kwargs=True), model.head.register_forward_pre_hook(before_head)]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def new_ids(work: Work, model: Llama, prompt: list[int], n_new: int) -> list[int]:
    """The learner's list, of the right types."""
    got = work.call("generate", model, prompt, n_new)
    if got is None:
        raise Wrong("generate returned None: is a `return` missing?")
    if not isinstance(got, list):
        raise Wrong(f"generate returned {type(got).__name__}; it must be a list of the new ids")
    for token in got:
        if type(token) is not int:
            raise Wrong(f"the list holds {type(token).__name__}; it must hold Python ints (int(...) makes one)")
    if n_new < len(prompt) < len(got) and got[: len(prompt)] == prompt:
        raise Wrong("the prompt came back too; return the new ids alone")
    return got


@holds(
    "03",
    "generate",
    "the prompt stays as it is, and the new ids alone come back, as ints in a list",
    hint="`text = prompt` is another name for the same list, `list(prompt)` a copy; int(...) makes a number of a "
    "tensor; cut the prompt off at the end",
)
def right_kinds(work: Work) -> None:
    for prompt in prompts(7, 4):
        new_ids(work, tiny(), prompt, 2)


@holds(
    "03",
    "generate",
    "one new token is the best one after the whole prompt",
    hint="read the logits of the last row, and take the best along the vocabulary: argmax(-1), then int(...)",
)
def one_token(work: Work) -> None:
    model = tiny()
    for prompt in prompts(7, 1, 2, 12):
        same(new_ids(work, model, prompt, 1), greedy(model, prompt, 1), f"the new ids after prompt {prompt}")


@holds(
    "03",
    "generate",
    "every pass is fed the whole text so far, and there is one for each new token",
    hint="line(text, 0, device) with everything: nothing is kept between passes; and no pass after the last token",
)
def whole_text(work: Work) -> None:
    for prompt in prompts(7, 1, 4):
        model = tiny()
        with watched(model) as passes:
            new_ids(work, model, prompt, 5)
        text = prompt + greedy(model, prompt, 5)
        for i, found in enumerate(passes[:5]):
            told = f"the text that pass {i + 1} is fed, after a prompt of {len(prompt)}"
            same(found.tokens, text[: len(prompt) + i], told)
        if len(passes) != 5:
            raise Wrong(f"{len(passes)} passes for 5 new tokens; each pass makes one, and nothing follows the last")


@holds(
    "03",
    "generate",
    "positions run from 0 over the whole text, in every pass",
    hint="new tokens go on counting after the prompt, from position 0 (the text may look right without)",
)
def whole_positions(work: Work) -> None:
    for prompt in prompts(7, 1, 4):
        model = tiny()
        with watched(model) as passes:
            new_ids(work, model, prompt, 5)
        for i, found in enumerate(passes):
            same(found.positions, list(range(len(found.tokens))), f"the positions of pass {i + 1}")
        if not passes:
            raise Wrong("the model was never called")


@holds(
    "03",
    "generate",
    "the last row goes through the head, and no other",
    hint="hidden[-1:] is the last row with its dimension kept; the head over all T rows is T times the work",
)
def last_row(work: Work) -> None:
    for prompt in prompts(7, 3):
        model = tiny()
        with watched(model) as passes:
            new_ids(work, model, prompt, 4)
        for i, found in enumerate(passes):
            where = f"pass {i + 1} over {len(found.tokens)} tokens"
            rows = torch.cat(found.head) if found.head else found.hidden[:0]
            if len(rows) != 1:
                raise Wrong(f"{where}: {len(rows)} rows went through the head; it must be 1, the last")
            if not torch.equal(rows[0], found.hidden[-1]):
                row = [j for j, hidden in enumerate(found.hidden) if torch.equal(hidden, rows[0])]
                told = f"row {row[0]}" if row else "something that is no row of the hidden states"
                raise Wrong(f"{where}: the head was given {told}; it must be the last row, {len(found.hidden) - 1}")
        if not passes:
            raise Wrong("the model was never called")


@holds(
    "03",
    "generate",
    "equal to the naive stage at every step, for every number of new tokens",
    hint="one list that grows by one id a pass; nothing is left over from an earlier call",
)
def equals_the_stage(work: Work) -> None:
    model = tiny()
    for prompt in prompts(5, 1, 9, 2, 20, seed=1):
        expected = greedy(model, prompt, 9)
        for n_new in (9, 1, 2, 3, 4, 5, 6, 7, 8):
            got = new_ids(work, model, prompt, n_new)
            same(got, expected[:n_new], f"the new ids after a prompt of {len(prompt)}, n_new = {n_new}")


def check_end(got: list[int], expected: list[int], eos: tuple[int, ...]) -> None:
    end = expected[-1]
    if got == expected[:-1]:
        raise Wrong(f"the end token {end} is missing: it ends the text, and it is returned too")
    if got == [*expected, end]:
        raise Wrong(f"the end token {end} comes twice at the end; it must come once")
    if len(got) > len(expected) and got[: len(expected)] == expected:
        raise Wrong(f"it went on after the end token {end} (eos is {eos}): {len(got)} ids, expected {len(expected)}")
    same(got, expected, f"the new ids with eos {eos}")


@holds(
    "03",
    "generate",
    "an end token stops it at once, and is returned, once",
    hint="append first, then ask whether the new token is in model.config.eos, then stop",
)
def stops(work: Work) -> None:
    for prompt in prompts(5, 9, 1, 6, seed=2):
        free = greedy(tiny(), prompt, 6)
        for k, end in enumerate(free):
            if end in free[:k]:
                continue
            got = new_ids(work, tiny((end,)), prompt, 6)
            check_end(got, free[: k + 1], (end,))


@holds(
    "03",
    "generate",
    "any of several end tokens stops it; one in the prompt does not; with none it goes on to the limit",
    hint="`token in model.config.eos`, for the new token alone; the tuple may be empty, or hold more than one",
)
def stops_only_there(work: Work) -> None:
    for prompt in prompts(8, 5, 11, seed=4):
        free = greedy(tiny(), prompt, 6)
        same(new_ids(work, tiny(), prompt, 6), free, "the new ids with no end token")
        never = [token for token in range(CONFIG.vocab_size) if token not in free and token not in prompt]
        end = next(token for k, token in enumerate(free) if k > 0 and token not in free[:k])
        eos = (never[0], end, never[1])
        check_end(new_ids(work, tiny(eos), prompt, 6), free[: free.index(end) + 1], eos)
        inside = next(token for token in prompt if token not in free)
        got = new_ids(work, tiny((inside,)), prompt, 6)
        if got != free and got == free[: len(got)]:
            raise Wrong(f"it stopped after {len(got)} tokens, because the end token {inside} is in the prompt")
        same(got, free, f"the new ids with the end token {inside} in the prompt")
        last = next(token for token in reversed(prompt) if token not in free)
        got = new_ids(work, tiny((last,)), [*prompt, last], 6)
        expected = greedy(tiny((last,)), [*prompt, last], 6)
        if got != expected and got == expected[: len(got)]:
            raise Wrong(
                f"it stopped after {len(got)} new tokens, because the prompt's last token {last} is an end token; a "
                "prompt that ends with one goes on all the same: only a new token can end the text"
            )
        same(got, expected, f"the new ids after a prompt that ends with the end token {last}")


# ---- the choice

GRID = 400  # values of u, evenly spread


def shares(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The exact probability of each token, in plain Python."""
    best = max(logits)
    weights = [math.exp((x - best) / temperature) for x in logits]
    kept = sorted(range(len(weights)), key=lambda i: -weights[i])  # stable: lower ids first among equals
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        whole = math.fsum(weights[i] for i in kept)
        inside: list[int] = []
        for i in kept:
            if inside and math.fsum(weights[j] for j in inside) >= top_p * whole:
                break
            inside.append(i)
        kept = inside
    whole = math.fsum(weights[i] for i in kept)
    left = set(kept)
    return [weights[i] / whole if i in left else 0.0 for i in range(len(weights))]


def row(n: int, seed: int, spread: float = 1.5, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(n, generator=seeds.generator(seed), dtype=torch.float64) * spread).to(dtype)


def an_int(work: Work, logits: Tensor, temperature: float, top_k: int, top_p: float, u: float) -> int:
    token = work.call("choose", logits, temperature, top_k, top_p, u)
    if token is None:
        raise Wrong("choose returned None: is a `return` missing?")
    if type(token) is not int:
        raise Wrong(f"choose returned {type(token).__name__}; it must be a Python int (int(...) makes one)")
    return token


def pick(work: Work, logits: Tensor, temperature: float, top_k: int, top_p: float, u: float) -> int:
    """The learner's token, of the right type and within the vocabulary."""
    token = an_int(work, logits, temperature, top_k, top_p, u)
    told = settings(temperature, top_k, top_p)
    if not 0 <= token < len(logits):
        told = f"{told}, u = {u:.6g}: token {token}, but ids run from 0 to {len(logits) - 1}; "
        if token == an_int(work, logits, temperature, top_k, top_p, 0.0) == len(logits):
            raise Wrong(f"{told}no token came, nor does one at u = 0: are all weights 0, or NaN?")
        raise Wrong(f"{told}does the running sum reach 1, or u go up to the sum?")
    return token


def settings(temperature: float, top_k: int, top_p: float) -> str:
    return f"temperature {temperature:g}, top_k {top_k}, top_p {top_p:g}"


def all_come(work: Work) -> None:
    """With nothing filtered every token comes for some u of a grid, however they are shared out."""
    logits = torch.tensor([0.5, 0.0, 1.0, 0.7], dtype=torch.float64)
    came = {pick(work, logits, 1.0, 0, 1.0, (i + 0.5) / 40) for i in range(40)}
    if missing := sorted(set(range(4)) - came):
        raise Wrong(
            f"logits {logits.tolist()}, {settings(1.0, 0, 1.0)}: token {missing[0]} never comes, for any u; at top_k 0 "
            "and top_p 1 nothing may be filtered"
        )


def draws(run: Callable[[Work], None]) -> Callable[[Work], None]:
    """A property of draws. Where tokens are missing with no filter on, that is told in place of all that follows."""

    def tried(work: Work) -> None:
        try:
            run(work)
        except Wrong:
            all_come(work)
            raise

    return tried


def sweep(work: Work, logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> None:
    """u over a grid: every token must come for its share of it, give or take one grid point."""
    expected = shares(logits.tolist(), temperature, top_k, top_p)
    told = settings(temperature, top_k, top_p)
    counts = [0] * len(expected)
    for i in range(GRID):
        u = (i + 0.5) / GRID
        token = pick(work, logits, temperature, top_k, top_p, u)
        if expected[token] == 0:
            kept = [t for t, share in enumerate(expected) if share > 0]
            raise Wrong(f"{told}: token {token} came at u = {u:g}, but is filtered out; what is left: {kept}")
        counts[token] += 1
    for token, (count, share) in enumerate(zip(counts, expected, strict=True)):
        if abs(count - GRID * share) > 1 + 1e-6:
            raise Wrong(f"{told}: token {token} should come for {share:.1%} of all u, and comes for {count / GRID:.1%}")


@holds(
    "03",
    "choose",
    "a Python int comes back, and the row of logits stays as it was",
    hint="int(...) makes a number of a tensor. `/=` and `logits[...] = ` write into the caller's row; `.double()` of a "
    "float64 tensor is no copy",
)
def not_changed(work: Work) -> None:
    for dtype in (torch.float64, torch.float32):
        for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.5), (4, 0.7)):
            for temperature in (0.0, 0.5):
                an_int(work, row(8, 3, dtype=dtype), temperature, top_k, top_p, 0.3)


@holds(
    "03",
    "choose",
    "temperature 0 takes the best token, whatever the others say",
    hint="handle temperature 0 first: dividing by it makes infinities and NaN; argmax takes the lowest id among equals",
)
def greedy_choice(work: Work) -> None:
    for seed, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16)):
        logits = row(40, seed, dtype=dtype)
        for top_k, top_p, u in ((0, 1.0, 0.0), (0, 1.0, 0.999), (3, 0.1, 0.5), (40, 0.9, 0.7)):
            got = pick(work, logits, 0.0, top_k, top_p, u)
            same(got, int(logits.argmax()), f"the token at {settings(0.0, top_k, top_p)}, u = {u:g}")
    equals = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    same(pick(work, equals, 0.0, 0, 1.0, 0.9), 1, "the token at temperature 0, where ids 1, 3 and 4 are equal")
    same(pick(work, equals[:1].clone(), 0.0, 0, 1.0, 0.9), 0, "the token of a vocabulary of one")


@holds(
    "03",
    "choose",
    "top_k 0 and top_p 1 keep every token, however small its weight",
    hint="at top_p 1 nothing may be filtered: is top_p taken as a share of the sum of the weights, which need not be "
    "1? Sums are rounded, so it is safe to filter for `top_p < 1` only",
)
def nothing_filtered(work: Work) -> None:
    all_come(work)
    for logits, small in (([-40.0, 0.0], 0), ([-60.0, -80.0, 1.0], 0)):
        same(
            pick(work, torch.tensor(logits, dtype=torch.float64), 1.0, 0, 1.0, 0.0),
            small,
            f"the token of logits {logits} at {settings(1.0, 0, 1.0)}, u = 0: its stretch is tiny, and begins there",
        )


@holds(
    "03",
    "choose",
    "the temperature divides the logits, and every token gets its share of u",
    hint="weights exp(logit / temperature), their running sum, and the token in whose stretch u lies",
)
@draws
def temperature_divides(work: Work) -> None:
    for seed, temperature in enumerate((1.0, 0.4, 2.5)):
        sweep(work, row(9, seed), temperature)
    sweep(work, row(6, 5, dtype=torch.float32), 0.7)


@holds(
    "03",
    "choose",
    "top_k keeps the k most likely, 0 or a large k keeps all, and what is left is renormalised",
    hint="after a filter the weights no longer sum to what they did: stretch u over the sum of what is left",
)
@draws
def top_k_filters(work: Work) -> None:
    for top_k in (1, 2, 5, 9, 12, 0):
        sweep(work, row(9, 10 + top_k), 1.3, top_k=top_k)


@holds(
    "03",
    "choose",
    "top_k keeps exactly k also among equals: the lower ids",
    hint="comparing with the k-th largest keeps everything equal to it; sort with stable=True and cut by place instead",
)
@draws
def top_k_ties(work: Work) -> None:
    equals = torch.zeros(5, dtype=torch.float64)
    sweep(work, equals, 1.0, top_k=2)
    mixed = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    sweep(work, mixed, 1.0, top_k=3)
    sweep(work, mixed, 1.0, top_k=5)


@holds(
    "03",
    "choose",
    "top_p keeps the smallest set whose share is at least top_p: the token that crosses the line stays",
    hint="drop a token if the weight of all tokens before it already reaches the share; the best one always stays",
)
@draws
def top_p_filters(work: Work) -> None:
    for seed, top_p in enumerate((0.05, 0.3, 0.6, 0.9, 0.99, 1.0)):
        sweep(work, row(9, 20 + seed), 1.0, top_p=top_p)
    equals = torch.zeros(4, dtype=torch.float64)  # a quarter each, exactly: the line falls between two tokens
    for top_p in (0.25, 0.5, 0.75, 0.2501, 0.7499, 1e-9):
        sweep(work, equals, 1.0, top_p=top_p)
    sweep(work, torch.tensor([0.0, 3.0, -1.0], dtype=torch.float64), 1.0, top_p=0.0)


@holds(
    "03",
    "choose",
    "top_p is a share of what top_k left, at the temperature asked for",
    hint="in this order: temperature, top_k, then top_p against the sum of what top_k left",
)
@draws
def both_filters(work: Work) -> None:
    halves = torch.tensor([math.log(x) for x in (0.5, 0.25, 0.25)], dtype=torch.float64)
    sweep(work, halves, 1.0, top_k=2, top_p=0.6)  # 0.5 of 0.75 is enough
    for seed, (temperature, top_k, top_p) in enumerate(((0.5, 6, 0.9), (2.0, 4, 0.7), (1.5, 3, 0.95), (3.0, 8, 0.5))):
        sweep(work, row(10, 30 + seed), temperature, top_k, top_p)


@holds(
    "03",
    "choose",
    "stretches lie in order of ids, with their left end and without their right one",
    hint="sum up in order of ids, not of likelihood; searchsorted with right=True finds the first sum above u",
)
@draws
def in_order(work: Work) -> None:
    equals = torch.zeros(4, dtype=torch.float64)
    for token in range(4):
        same(pick(work, equals, 1.0, 0, 1.0, token / 4), token, f"the token of four equals at u = {token / 4}")
    banned = torch.tensor([-INF, 0.0, 0.0, -INF], dtype=torch.float64)
    same(pick(work, banned, 1.0, 0, 1.0, 0.0), 1, "the token at u = 0, where id 0 has no weight")
    same(pick(work, banned, 1.0, 0, 1.0, 0.5), 2, "the token at u = 0.5, where ids 0 and 3 have no weight")
    rising = row(5, 1).sort().values
    same(pick(work, rising, 1.0, 1, 1.0, 0.0), 4, "the token at u = 0, where top_k 1 leaves id 4 alone")
    draw = seeds.rng(0)
    for seed in range(40):
        logits = row(12, 50 + seed)
        stretch(work, logits, draw.choice((0.5, 1.0, 2.0)), draw.choice((0, 5)), draw.choice((0.8, 1.0)), draw.random())


def stretch(
    work: Work, logits: Tensor, temperature: float, top_k: int, top_p: float, u: float, slack: float = 1e-9
) -> None:
    """The token must own the stretch in which u lies."""
    expected = shares(logits.tolist(), temperature, top_k, top_p)
    token = pick(work, logits, temperature, top_k, top_p, u)
    below = math.fsum(expected[:token])
    if expected[token] == 0 or not below - slack <= u <= below + expected[token] + slack:
        sums = [math.fsum(expected[: t + 1]) for t in range(len(expected))]
        right = next(t for t, top in enumerate(sums) if top > u)
        raise Wrong(
            f"{settings(temperature, top_k, top_p)}, {logits.dtype}: at u = {u:.8g} token {token} came, with a stretch "
            f"of {below:.4f} to {below + expected[token]:.4f}; expected token {right}"
        )


@holds(
    "03",
    "choose",
    "a temperature near 0 or very large makes no NaN, and a banned token (-inf) stays out",
    hint="subtract the largest logit before dividing: the best token then has weight exp(0) = 1, and none overflows",
)
@draws
def extremes(work: Work) -> None:
    for dtype in (torch.float64, torch.float32):
        logits = row(9, 70, spread=40.0, dtype=dtype)
        logits[4] = -INF
        for temperature in (1e-3, 1e-40, 1e-308):
            for u in (0.25, 0.5, 1 - 2**-24):  # not 0: where stretches begin is another property
                for top_k, top_p in ((0, 1.0), (3, 0.9)):
                    got = pick(work, logits, temperature, top_k, top_p, u)
                    told = f"the token at {settings(temperature, top_k, top_p)}, u = {u:g}"
                    same(got, int(logits.argmax()), told)
    warm = torch.tensor([3.0, -INF, 1.0, -2.0], dtype=torch.float64)
    sweep(work, warm, 1e30)
    sweep(work, warm, 1.0, top_p=0.999)


@holds(
    "03",
    "choose",
    "float32 and bfloat16 logits are widened first: large vocabularies and the largest u come out right",
    hint="logits.double() before everything else: a running sum in bfloat16 has 8 significant bits",
)
@draws
def widened(work: Work) -> None:
    draw = seeds.rng(1)
    for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.bfloat16)):
        logits = row(2000, 80 + seed, dtype=dtype)
        for u in (0.0, 1 - 2**-24, *(draw.random() for _ in range(8))):
            stretch(work, logits, 1.0, 0, 1.0, u, slack=1e-5)
        stretch(work, logits, 0.8, 200, 0.9, draw.random(), slack=1e-5)


# ---- the count


def asked(work: Work, n: int, m: int) -> Any:
    """The learner's count, once it is no float; the simplest example says so."""
    got = work.call("tokens_computed", n, m)
    if isinstance(got, float):
        no_float(work)
        raise Wrong(f"tokens_computed({n}, {m}) is the float {got!r}; it must be an int")
    return got


@holds(
    "03",
    "tokens_computed",
    "it is a whole number",
    hint="`/` makes a float, even where nothing is left over: m (m - 1) is even, so m * (m - 1) // 2 is exact",
)
def no_float(work: Work) -> None:
    got = work.call("tokens_computed", 7, 3)
    if isinstance(got, float):
        raise Wrong(f"tokens_computed(7, 3): expected {7 + 8 + 9}, got {got!r}, a float; it must be an int")
    if got is None:
        raise Wrong("tokens_computed(7, 3) is None: is a `return` missing?")
    if type(got) is not int:
        raise Wrong(f"tokens_computed(7, 3) is {type(got).__name__}; it must be an int")


@holds(
    "03",
    "tokens_computed",
    "it is the sum of the lengths of all passes",
    hint="pass 1 pushes the prompt alone, and the last new token is never fed: n + (n + 1) + ... + (n + m - 1)",
)
def sum_of_lengths(work: Work) -> None:
    for n, m in ((7, 3), (1, 1), (7, 1), (1, 2), (5, 9), (100, 40), (7, 256)):
        got = asked(work, n, m)
        same(got, sum(range(n, n + m)), f"tokens_computed({n}, {m})")


@holds(
    "03",
    "tokens_computed",
    "it is what the counters count while the naive stage runs",
    hint="count the tokens of each pass on paper for a prompt of 2 and 3 new tokens: 2, 3, 4",
)
def equals_the_counters(work: Work) -> None:
    model = tiny()
    for prompt, m in zip(prompts(2, 7, 13, seed=6), (3, 6, 10), strict=True):
        got = asked(work, len(prompt), m)
        counted = run(model, "naive", [Job(tuple(prompt), m)]).tokens_pushed
        same(got, counted, f"tokens_computed({len(prompt)}, {m})")


@holds(
    "03",
    "tokens_computed",
    "it is exact for large texts too",
    hint="m (m - 1) is even, so m * (m - 1) // 2 is exact; `/` makes a float, which holds 53 bits, and int(...) comes "
    "too late",
)
def exact(work: Work) -> None:
    for n, m in ((3, 4), (10**9 + 7, 10**6 + 3), (10**15 + 1, 10**5 + 1)):
        got = asked(work, n, m)
        same(got, n * m + sum(range(m)), f"tokens_computed({n}, {m})")
