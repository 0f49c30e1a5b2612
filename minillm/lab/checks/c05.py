"""Lesson 05: a long prompt in chunks. Where they begin, who sees whom, what a step costs, and the one loop."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from traceback import walk_tb
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from minillm import attention
from minillm.attention import SelfAttend
from minillm.batch import line
from minillm.bench.harness import Job, run
from minillm.cache import KVCache
from minillm.config import Config
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.work import Work, Wrong, same
from minillm.model import Llama

TINY = Config(
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
NEW = 3  # tokens that follow a prompt
EXAMPLE = (7, 4)  # the lesson's
EVERY_SPLIT = [(n, m) for n in range(1, 13) for m in range(1, n + 3)]  # also chunks larger than the prompt


# ---- the uncached model, which knows nothing of chunks


@cache
def tiny() -> Llama:
    """Random weights in float64: what differs by more than rounding differs for a reason."""
    return Llama.random(TINY, seed=5, dtype=torch.float64)


@seeds.cache
def prompt_of(n: int) -> list[int]:
    draw = seeds.rng(n)
    return [draw.randrange(TINY.vocab_size) for _ in range(n)]


@cache
def hidden_states(tokens: tuple[int, ...]) -> Tensor:
    """Of all tokens in one go, without a KV cache: [T, d]."""
    ids, positions = line(tokens, 0, tiny().device)
    return tiny()(ids, positions, SelfAttend(positions))


@cache
def naive(prompt: tuple[int, ...], n_new: int) -> list[int]:
    """The new tokens, the whole text again for each."""
    tokens = list(prompt)
    for _ in range(n_new):
        tokens.append(int(tiny().logits(hidden_states(tuple(tokens))[-1:]).argmax()))
    return tokens[len(prompt) :]


def pieces(n: int, m: int) -> list[tuple[int, int]]:
    return [(start, min(start + m, n) - start) for start in range(0, n, m)]


# ---- chunks


def asked_for(work: Work, n: int, m: int) -> list[tuple[int, int]]:
    """What the learner's `chunks` returns, once it is a list of pairs of whole numbers."""
    got, what = work.call("chunks", n, m), f"chunks({n}, {m})"
    if got is None:
        raise Wrong(f"{what} is None: is a `return` missing?")
    if not isinstance(got, list):
        raise Wrong(f"{what} is {type(got).__name__}; it must be a list of pairs (start, size)")
    for i, pair in enumerate(got):
        if not isinstance(pair, tuple) or len(pair) != 2 or any(type(number) is not int for number in pair):
            raise Wrong(f"{what}: entry {i} is {pair!r}; it must be a tuple (start, size) of two whole numbers")
    return got


@holds(
    "05",
    "chunks",
    "7 tokens in chunks of 4 are (0, 4) and (4, 3)",
    hint="each entry is (start, size): where the chunk begins, and how many tokens it has (not where it ends)",
)
def the_running_example(work: Work) -> None:
    same(asked_for(work, 7, 4), [(0, 4), (4, 3)], "chunks(7, 4)")


@holds(
    "05",
    "chunks",
    "every position from 0 to n - 1 is in exactly one chunk, for n = 1..12 and m = 1..n + 2",
    hint="the last chunk may be short: n // m chunks drop it, and m tokens in it are too many",
)
def each_position_once(work: Work) -> None:
    for n, m in EVERY_SPLIT:
        got = asked_for(work, n, m)
        covered = [p for start, size in got for p in range(start, start + size)]
        if covered == list(range(n)):
            continue
        said = f"chunks({n}, {m}) is {got}"
        if missing := sorted(set(range(n)) - set(covered)):
            raise Wrong(f"{said}: position {missing[0]} is in no chunk")
        if beyond := [p for p in covered if not 0 <= p < n]:
            raise Wrong(f"{said}: position {beyond[0]} is beyond the prompt, whose last one is {n - 1}")
        twice = [p for p in range(n) if covered.count(p) > 1]
        raise Wrong(f"{said}: position {twice[0]} is in two chunks" if twice else f"{said}: not in order")


@holds(
    "05",
    "chunks",
    "no chunk has more than m tokens, and only the last has fewer",
    hint="take m tokens as long as there are m: the smaller one comes last, and there are ceil(n / m) in all",
)
def full_but_the_last(work: Work) -> None:
    draw = seeds.rng(0)
    for n, m in [*EVERY_SPLIT, *((draw.randint(1, 500), draw.randint(1, 200)) for _ in range(50))]:
        same(asked_for(work, n, m), pieces(n, m), f"chunks({n}, {m})")


# ---- chunk_mask


def whole_mask(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def of_shape(work: Work, start: int, size: int) -> Tensor:
    """The learner's mask, once it is a bool tensor of the right shape; its values may be wrong."""
    mask, what = work.call("chunk_mask", start, size), f"chunk_mask({start}, {size})"
    if mask is None:
        raise Wrong(f"{what} is None: is a `return` missing?")
    if not isinstance(mask, Tensor):
        raise Wrong(f"{what} is {type(mask).__name__}; it must be a tensor of shape {[size, start + size]}")
    if mask.dtype != torch.bool or mask.shape != (size, start + size):
        same(mask, torch.empty(size, start + size, dtype=torch.bool), what)
    return mask


@holds(
    "05",
    "chunk_mask",
    "the second chunk of the seven tokens: 3 queries by 7 keys",
    hint="the chunk's own tokens are the queries; the keys are all tokens so far, those of earlier chunks included, "
    "and none after the row's own token",
)
def the_second_chunk(work: Work) -> None:
    expected = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()
    same(work.call("chunk_mask", 4, 3), expected, "chunk_mask(4, 3)")


@holds(
    "05",
    "chunk_mask",
    "it is rows start .. start + size - 1 of the whole prompt's mask",
    hint="row t is the token at position start + t: the triangle ends in the bottom right corner, not in the top left",
)
def rows_of_the_whole(work: Work) -> None:
    draw = seeds.rng(1)
    cases = [(start, size) for n, m in EVERY_SPLIT for start, size in pieces(n, m)]
    for start, size in [*cases, *((draw.randint(0, 60), draw.randint(1, 40)) for _ in range(30))]:
        mask = of_shape(work, start, size)
        same(mask, whole_mask(start + size)[start:], f"chunk_mask({start}, {size})")


@holds(
    "05",
    "chunk_mask",
    "over all chunks of a prompt, n (n + 1) / 2 scores are visible, whatever m is",
    hint="the token at position p sees p + 1 tokens, itself included, however the prompt was cut",
)
def nothing_seen_twice_or_never(work: Work) -> None:
    for n, m in EVERY_SPLIT:
        seen = sum(int(of_shape(work, start, size).sum()) for start, size in pieces(n, m))
        if seen != n * (n + 1) // 2:
            raise Wrong(
                f"a prompt of {n} in chunks of {m}: {seen} scores are visible in all, and {n * (n + 1) // 2} must be"
            )


class MaskedAttend:
    """Attention over a KVCache, with the mask that somebody else made."""

    def __init__(self, memory: KVCache, positions: Tensor, mask: Tensor):
        self.memory, self.positions, self.mask = memory, positions, mask

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.memory.store(layer, self.positions, k, v)
        return attention.sdpa(q, *self.memory.read(layer, self.mask.shape[-1]), self.mask)


@holds(
    "05",
    "chunk_mask",
    "with it, the model computes the same hidden states as without chunks, for every split",
    hint="a token must see all tokens of earlier chunks, the earlier ones of its own chunk, itself, and none after it",
)
def the_same_hidden_states(work: Work) -> None:
    for n, m in EVERY_SPLIT:
        expected = hidden_states(tuple(prompt_of(n)))
        with poisoned(float("nan")):
            memory = KVCache(tiny(), n)
        for start, size in pieces(n, m):
            ids, positions = line(prompt_of(n)[start : start + size], start, tiny().device)
            mask = of_shape(work, start, size)
            hidden = tiny()(ids, positions, MaskedAttend(memory, positions, mask))
            compare(hidden, expected, positions.tolist(), f"a prompt of {n} in chunks of {m}, with chunk_mask")


# ---- peak_scores

PARTS = {"chunks": pieces}  # what a learner's own functions may call


@holds(
    "05",
    "peak_scores",
    "7 tokens in chunks of 4 with 9 heads: 189",
    hint="a step makes heads x queries x keys scores; look at each chunk's own queries and keys, then take the largest",
    uses=PARTS,
)
def the_peak_of_the_example(work: Work) -> None:
    same(work.call("peak_scores", 7, 4, 9), 9 * 3 * 7, "peak_scores(7, 4, 9)")


@holds(
    "05",
    "peak_scores",
    "the largest of all steps, for n = 1..12 and m = 1..n + 2",
    hint="heads x m x n is a bound that a short last chunk does not reach; and the last chunk need not be the largest",
    uses=PARTS,
)
def the_largest_step(work: Work) -> None:
    for heads in (1, 4):
        for n, m in EVERY_SPLIT:
            expected = max(heads * size * (start + size) for start, size in pieces(n, m))
            same(work.call("peak_scores", n, m, heads), expected, f"peak_scores({n}, {m}, {heads})")


@holds(
    "05",
    "peak_scores",
    "what is counted in the running model, step by step",
    hint="the mask hides scores, but they are computed all the same: count queries x keys, not what is visible",
    uses=PARTS,
)
def as_counted(work: Work) -> None:
    for n, m in [(7, 4), (9, 8), (12, 3), (12, 12), (30, 16), (33, 16), (40, 64)]:
        done = run(tiny(), "chunked", [Job(tuple(prompt_of(n)), 1)], {"chunk": m})
        counted = max(step.scores for step in done.counts.steps) // TINY.n_layers
        what = f"peak_scores({n}, {m}, {TINY.n_heads}), counted in the model"
        same(work.call("peak_scores", n, m, TINY.n_heads), counted, what)


# ---- generate


@dataclass
class Seen:
    """What the model was asked in each step, and what it answered."""

    tokens: list[list[int]] = field(default_factory=list)
    positions: list[list[int]] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    rows: int = 0  # that went through the head

    @property
    def sizes(self) -> list[int]:
        return [len(step) for step in self.tokens]


@contextmanager
def watching(model: Llama, most: int, what: str) -> Iterator[Seen]:
    """Raises Wrong inside the block after that many steps."""
    seen = Seen()

    def stepped(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> None:
        asked = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        seen.tokens.append(asked["tokens"].flatten().tolist())
        seen.positions.append(asked["positions"].flatten().tolist())
        seen.hidden.append(hidden.detach().clone().flatten(0, -2))
        if len(seen.tokens) == most:
            at, before = seen.positions[-1], seen.positions[-2]
            told = "the same positions again and again" if at == before else "without an end"
            raise Wrong(f"{what}: {most} steps, {told}, the last at {at}: does `computed` grow after each step?")

    def headed(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.rows += args[0].numel() // TINY.d_model

    hooks = (model.register_forward_hook(stepped, with_kwargs=True), model.head.register_forward_pre_hook(headed))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def poisoned(value: float) -> Iterator[None]:
    """Memory that nobody wrote holds `value`, not zeros."""
    init = KVCache.__init__

    def spoiled(self: KVCache, model: Llama, *shape: int) -> None:
        init(self, model, *shape)
        self.k.fill_(value)
        self.v.fill_(value)

    with patch.object(KVCache, "__init__", spoiled):
        yield


def ask(work: Work, prompt: list[int], n_new: int, m: int) -> tuple[Any, Seen, str]:
    """What the learner's `generate` returns, what it did, and its name for messages."""
    what = f"generate(model, a prompt of {len(prompt)}, {n_new}, {m})"
    given = list(prompt)
    with watching(tiny(), 2 * (len(prompt) + n_new) + 20, what) as seen:
        try:
            got = work.call("generate", tiny(), given, n_new, m, changes=(0,))  # no copy of the model
        except Wrong as wrong:
            if given != prompt:  # whatever came of it
                raise Wrong("generate changed its argument number 2, the prompt; work on a copy") from wrong.__cause__
            raise Wrong(f"{wrong}{why(wrong.__cause__)}") from wrong.__cause__
    return got, seen, what


def why(error: BaseException | None) -> str:
    """What a learner should look at, where an exception comes out of a function of ours."""
    if isinstance(error, AssertionError) and "at least one token" in str(error):
        return "\nthe slice of tokens was empty: does `computed` grow by what was in the step, and not by m?"
    modules = {frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)} if error else set()
    if isinstance(error, IndexError) and KVCache.__module__ in modules:
        return "\na position is beyond the cache: has the cache room for the prompt and the new tokens?"
    return ""


def ids(got: Any, prompt: list[int], n_new: int) -> list[int]:
    """The new tokens, once they are ints in a list."""
    if got is None:
        raise Wrong("generate returned None: is a `return` missing?")
    if not isinstance(got, list):
        raise Wrong(f"generate returned {type(got).__name__}; it must be a list of token ids")
    if bad := [token for token in got if type(token) is not int]:
        raise Wrong(f"the list holds {type(bad[0]).__name__}; token ids must be whole numbers: int(...)")
    if len(got) == len(prompt) + n_new and got[: len(prompt)] == prompt:
        raise Wrong(f"generate gives the prompt back too; return the {n_new} new tokens alone")
    return got


def same_text(got: Any, prompt: list[int], n_new: int, what: str) -> None:
    same(ids(got, prompt, n_new), naive(tuple(prompt), n_new), what)


def compare(hidden: Tensor, expected: Tensor, positions: Sequence[int], what: str) -> None:
    """Hidden states [T, d] of some positions against those of the whole text."""
    for row, p in zip(hidden, positions, strict=True):
        off = (row - expected[p]).abs().max().item()
        if not off <= 1e-9:  # NaN too
            told = "is NaN" if off != off else f"differs by {off:.2g} from the uncached model's"
            raise Wrong(f"{what}: the hidden state at position {p} {told}")


def right_sizes(prompt: list[int], n_new: int, m: int) -> list[int]:
    return [size for _, size in pieces(len(prompt), m)] + [1] * (n_new - 1)


def check_sizes(seen: Seen, prompt: list[int], n_new: int, m: int, what: str) -> None:
    """The fewest steps of at most m tokens."""
    expected = right_sizes(prompt, n_new, m)
    if seen.sizes != expected:
        raise Wrong(f"{what}: the steps had {seen.sizes} tokens, and must have {expected}")


def check_places(seen: Seen, prompt: list[int], n_new: int, m: int, what: str) -> None:
    """Steps of the right size hold the right positions: else that is told, not what comes of it."""
    if seen.sizes == right_sizes(prompt, n_new, m):
        positions = [p for step in seen.positions for p in step]
        same(positions, list(range(len(prompt) + n_new - 1)), f"{what}: positions, all steps together")


def check_steps(seen: Seen, prompt: list[int], n_new: int, m: int, what: str) -> None:
    """Every token once, at its own position, in the fewest steps of at most m."""
    check_sizes(seen, prompt, n_new, m, what)
    check_places(seen, prompt, n_new, m, what)
    text = [*prompt, *naive(tuple(prompt), n_new)][:-1]
    same([t for step in seen.tokens for t in step], text, f"{what}: tokens fed, all steps together")


@holds(
    "05",
    "generate",
    "it ends, leaves the prompt as it is, and gives the new tokens alone, as ints in a list",
    hint="after each step `computed` grows by what was in it. `tokens = prompt` is another name for the same list, "
    "`list(prompt)` a copy; int(...) makes a number of a tensor; cut the prompt off at the end",
    uses=PARTS,
)
def right_kinds(work: Work) -> None:
    n, m = EXAMPLE
    got, _, _ = ask(work, prompt_of(n), NEW, m)
    ids(got, prompt_of(n), NEW)


@holds(
    "05",
    "generate",
    "7 tokens in chunks of 4 and 3 new tokens: steps of 4, 3, 1 and 1 tokens",
    hint="two chunks, and the first new token comes out of the second; the last new token is never fed back",
    uses=PARTS,
)
def the_steps_of_the_example(work: Work) -> None:
    _, seen, what = ask(work, prompt_of(7), 3, 4)
    check_sizes(seen, prompt_of(7), 3, 4, what)


@holds(
    "05",
    "generate",
    "every token goes through the model once, at its own position, at most m in a step",
    hint="positions go on where the chunk before ended: line(new, start, ...) with start counted in tokens",
    uses=PARTS,
)
def each_token_once(work: Work) -> None:
    for n, m in [EXAMPLE, *EVERY_SPLIT]:
        _, seen, what = ask(work, prompt_of(n), NEW, m)
        check_steps(seen, prompt_of(n), NEW, m, what)


@holds(
    "05",
    "generate",
    "the text is that of the uncached model, for n = 1..12 and m = 1..n + 2",
    hint="a token is sampled from the last row of the last chunk, and from no other chunk",
    uses=PARTS,
)
def the_same_text(work: Work) -> None:
    for n, m in [EXAMPLE, *EVERY_SPLIT]:
        got, seen, what = ask(work, prompt_of(n), NEW, m)
        if ids(got, prompt_of(n), NEW) != naive(tuple(prompt_of(n)), NEW):
            check_places(seen, prompt_of(n), NEW, m, what)
        same_text(got, prompt_of(n), NEW, what)


@holds(
    "05",
    "generate",
    "every hidden state is that of the uncached model, with NaN in all memory that nobody wrote",
    hint="one KVCache for the whole text, made before the loop; each chunk stores its K and V before anyone looks",
    uses=PARTS,
)
def every_step_equal(work: Work) -> None:
    for n, m in [EXAMPLE, *EVERY_SPLIT]:
        expected = hidden_states((*prompt_of(n), *naive(tuple(prompt_of(n)), NEW)[:-1]))
        with poisoned(float("nan")):
            _, seen, what = ask(work, prompt_of(n), NEW, m)
        check_places(seen, prompt_of(n), NEW, m, what)
        for hidden, positions in zip(seen.hidden, seen.positions, strict=True):
            beyond = [p for p in positions if not 0 <= p < len(expected)]
            if beyond:
                raise Wrong(f"{what}: a token at position {beyond[0]}; the last one fed is at {len(expected) - 1}")
            compare(hidden, expected, positions, what)
        if (fed := sorted({p for step in seen.positions for p in step})) != list(range(len(expected))):
            raise Wrong(f"{what}: tokens were fed at positions {fed}, and must be at 0 .. {len(expected) - 1}")


@holds(
    "05",
    "generate",
    "the head reads one row for each new token",
    hint="logits cost a product over the whole vocabulary: ask for hidden[-1:], and only when no prompt token is left",
    uses=PARTS,
)
def one_row_each(work: Work) -> None:
    for n, m in [EXAMPLE, (1, 1), (9, 8), (12, 3), (12, 20)]:
        _, seen, what = ask(work, prompt_of(n), NEW, m)
        if seen.rows != NEW:
            raise Wrong(f"{what}: {seen.rows} rows went through the head, and {NEW} would do")


@holds(
    "05",
    "generate",
    "one text after another, of random lengths and chunks, leaves no trace",
    hint="nothing may be kept between two calls: no cache and no list outside the function",
    uses=PARTS,
)
def no_trace(work: Work) -> None:
    draw = seeds.rng(2)
    cases = [(prompt_of(EXAMPLE[0]), NEW, EXAMPLE[1])]
    for _ in range(25):
        prompt = [draw.randrange(TINY.vocab_size) for _ in range(draw.randint(1, 40))]
        cases.append((prompt, draw.randint(1, 6), draw.randint(1, 48)))
    for prompt, n_new, m in cases:
        with poisoned(draw.choice([float("nan"), 1e4])):
            got, seen, what = ask(work, prompt, n_new, m)
        check_places(seen, prompt, n_new, m, what)
        same_text(got, prompt, n_new, what)
        check_steps(seen, prompt, n_new, m, what)
