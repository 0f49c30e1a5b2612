"""Properties of lesson 04: with the cache a model computes exactly what it computes without, whatever the pieces."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from minillm import attention
from minillm.attention import SelfAttend
from minillm.config import Config
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.work import Work, Wrong, same
from minillm.model import Llama

L, H, HKV, D = 3, 4, 2, 8
TINY = Config(
    vocab_size=64,
    d_model=32,
    n_layers=L,
    n_heads=H,
    n_kv_heads=HKV,
    head_dim=D,
    d_ff=48,
    norm_eps=1e-5,
    rope_theta=10000.0,
    context=256,
    tied=True,
)
EXACT = 1e-9  # float64: two orders of the same sum lie about 1e-15 apart
POISON = 1e4  # a mask hides any number, only not NaN

# name: layers, key-value heads, head dim, from each model's config.json; bytes per token at 2 bytes a number
MODELS = {
    "SmolLM2-135M": (30, 3, 64, 23_040),
    "SmolLM2-360M": (32, 5, 64, 40_960),
    "SmolLM2-1.7B": (24, 32, 64, 196_608),
    "TinyLlama-1.1B": (22, 4, 64, 22_528),
    "Llama-3.2-1B": (16, 8, 64, 32_768),
    "Llama-3.2-3B": (28, 8, 128, 114_688),
    "Qwen3-0.6B": (28, 8, 128, 114_688),
    "Mistral-7B": (32, 8, 128, 131_072),
    "Llama-2-7B": (32, 32, 128, 524_288),
}


@cache
def tiny() -> Llama:
    """A random Llama in float64: wide enough that an error of a program cannot pass for rounding."""
    return Llama.random(TINY, seed=4, dtype=torch.float64)


def uncached(model: Llama, tokens: Sequence[int]) -> Tensor:
    """Hidden states [n, d] of a whole text, all of it computed at once and nothing kept: the truth."""
    positions = torch.arange(len(tokens))
    return model(torch.tensor(tokens), positions, SelfAttend(positions))


def memories(size: int, fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """K and V memories [L, Hkv, S, D] of the tiny model."""
    shape = (L, HKV, size, D)
    return torch.full(shape, fill, dtype=torch.float64), torch.full(shape, fill, dtype=torch.float64)


def random_text(draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(TINY.vocab_size) for _ in range(n)]


def random_pieces(draw: random.Random, n: int) -> list[int]:
    """n cut into pieces of 1 to 6."""
    pieces: list[int] = []
    while sum(pieces) < n:
        pieces.append(min(draw.randint(1, 6), n - sum(pieces)))
    return pieces


def span(start: int, stop: int) -> str:
    return f"position {start}" if stop == start + 1 else f"positions {start} to {stop - 1}"


def step(work: Work, text: Sequence[int], start: int, stop: int, k: Tensor, v: Tensor, what: str) -> None:
    """Computes positions start .. stop-1 of a text with the learner's CachedAttend, and compares hidden states."""
    positions = torch.arange(start, stop)
    attend = work.call("CachedAttend", k, v, positions, changes=(0, 1))
    try:
        with sdpa_in_words():
            hidden = tiny()(torch.tensor(text[start:stop]), positions, attend)
    except Wrong:
        raise
    except Exception as error:
        raise Wrong(f"{what}, {span(start, stop)}: {work.explain('CachedAttend', error)}") from error
    expected = uncached(tiny(), text[:stop])[start:]
    same(hidden, expected, f"{what}, {span(start, stop)}: hidden states [T, d]", EXACT)


def in_pieces(work: Work, text: Sequence[int], pieces: Sequence[int], k: Tensor, v: Tensor, what: str) -> None:
    start = 0
    for n in pieces:
        step(work, text, start, start + n, k, v, what)
        start += n


# ---- kv_bytes_per_token


@holds(
    "04",
    "kv_bytes_per_token",
    "the bytes of nine known models",
    hint="two tensors (K and V), in every layer, for every key-value head, D numbers of `itemsize` bytes each",
)
def known_models(work: Work) -> None:
    for name, (layers, heads, dim, expected) in MODELS.items():
        got = work.call("kv_bytes_per_token", layers, heads, dim, 2)
        what = f"{name}, bytes per token at 2 bytes a number"
        if isinstance(got, int | float):
            if got * layers == expected:
                raise Wrong(f"{what}: expected {expected}, got {got}: that is one layer's share, there are {layers}")
            if got * 4 == expected:
                raise Wrong(f"{what}: expected {expected}, got {got}: a quarter; these are numbers of K, not bytes")
            if got * 2 == expected:
                raise Wrong(f"{what}: expected {expected}, got {got}: half of it; are K and V both counted, in bytes?")
            if isinstance(got, float) and got == expected:
                raise Wrong(f"{what}: {got} is a float; bytes are whole numbers, so no division is needed")
        same(got, expected, what)


@holds(
    "04",
    "kv_bytes_per_token",
    "what the memories of K and V really take",
    hint="compare with `nbytes` of a tensor [L, Hkv, S, D], twice, divided by S; `itemsize` is 4 in float32",
)
def real_memories(work: Work) -> None:
    draw = seeds.rng(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int8):
        layers, heads, dim, size = (draw.randint(1, 9) for _ in range(4))
        memory = torch.empty(layers, heads, size, dim, dtype=dtype)
        got = work.call("kv_bytes_per_token", layers, heads, dim, dtype.itemsize)
        same(got, 2 * memory.nbytes // size, f"{layers} layers, {heads} heads, head dim {dim}, {dtype}: bytes")


# ---- store


def stored(work: Work, memory: Tensor, positions: Tensor, new: Tensor) -> None:
    """Calls the learner's store, and compares all of the memory, position by position first."""
    before = memory.clone()
    expected = memory.clone()
    for t, p in enumerate(positions.tolist()):
        for h in range(memory.shape[0]):
            expected[h, p] = new[t, h]
    work.call("store", memory, positions, new, changes=(0,))
    if len(positions) and torch.equal(memory.nan_to_num(7e7), before.nan_to_num(7e7)):
        raise Wrong("the memory is as it was: store must write into it in place, and returns nothing")
    for t, p in enumerate(positions.tolist()):
        what = f"new[{t}] belongs at position {p} of every head; memory[:, {p}] [Hkv, D]"
        same(memory[:, p], expected[:, p], what, 0.0)
    rest = [p for p in range(memory.shape[1]) if p not in positions.tolist()]
    for p in rest:
        same(memory[:, p], expected[:, p], f"position {p} was not to be written; memory[:, {p}] [Hkv, D]", 0.0)


@holds(
    "04",
    "store",
    "each new token lands at its own position, in every head",
    hint="memory has the heads first, [Hkv, S, D], and new has the tokens first, [T, Hkv, D]: transpose, do not "
    "reshape; index the axis S with the tensor `positions`; position 0 is a place like any other",
)
def lands(work: Work) -> None:
    generator = seeds.generator(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    for start, T in ((0, 7), (7, 1), (4, 3), (3, 2), (0, 1)):
        stored(work, torch.zeros(2, 12, 4, dtype=torch.float64), torch.arange(start, start + T), draw(T, 2, 4))
    stored(work, torch.full((3, 8, 4), 5.0, dtype=torch.float64), torch.arange(2, 5), draw(3, 3, 4))


@holds(
    "04",
    "store",
    "in any order, with gaps, into places that hold anything",
    hint="positions need not be a run: where new[t] goes, positions[t] says, and nothing else; write, do not add to "
    "what is there",
)
def any_order(work: Work) -> None:
    generator = seeds.generator(1)
    for i in range(12):
        heads, size, dim = (int(torch.randint(1, 9, (1,), generator=generator)) for _ in range(3))
        T = int(torch.randint(1, size + 1, (1,), generator=generator))
        positions = torch.randperm(size, generator=generator)[:T]
        new = torch.randn(T, heads, dim, generator=generator, dtype=torch.float64)
        fill = float("nan") if i % 2 else POISON
        stored(work, torch.full((heads, size, dim), fill, dtype=torch.float64), positions, new)


@holds(
    "04",
    "store",
    "writes in place: one layer of a large memory, and nothing else of it",
    hint="write with `memory[...] = ...`; a copy (clone, torch.cat, torch.where) is thrown away when store returns",
)
def in_place(work: Work) -> None:
    generator = seeds.generator(2)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        whole = torch.full((L, HKV, 9, D), POISON, dtype=dtype)
        new = torch.randn(4, HKV, D, generator=generator, dtype=torch.float64).to(dtype)
        stored(work, whole[1], torch.arange(2, 6), new)
        for layer in (0, 2):
            same(whole[layer], torch.full((HKV, 9, D), POISON, dtype=dtype), f"layer {layer} was not to be written", 0)


# ---- CachedAttend


def right_store(memory: Tensor, positions: Tensor, new: Tensor) -> None:
    memory[:, positions] = new.transpose(0, 1)


@contextmanager
def sdpa_in_words() -> Iterator[None]:
    """Inside the block `attention.sdpa` says in words when K, V and the mask do not fit, as torch does not."""
    ours = attention.sdpa

    def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        for name, x in (("K", k), ("V", v)):
            if isinstance(mask, Tensor) and x.dim() == 3 and x.shape[0] != mask.shape[-1]:
                if x.shape[1] == mask.shape[-1]:  # without sizes: then it is told once
                    raise Wrong(
                        f"attention.sdpa was given {name} as [Hkv, S, D], as it lies in the memory; it wants "
                        "[S, Hkv, D], so transpose heads and positions"
                    )
                raise Wrong(
                    f"attention.sdpa was given {name} {list(x.shape)} and a mask [T, S] of {list(mask.shape)}; "
                    "it wants K and V as [S, Hkv, D]"
                )
        return ours(q, k, v, mask)

    with patch.object(attention, "sdpa", sdpa):
        yield


def ask(make: Callable[..., Any], start: int, T: int, room: int) -> Tensor:
    """Which positions T new tokens from `start` on look at, found by asking: [T, 1, room], above 0 where they do.

    All keys are alike, so every visible position weighs the same; the value of position p is 1 in dimension p.
    """
    marks = torch.eye(room, dtype=torch.float64)  # [S, D = S]
    k_memory = torch.zeros(1, 1, room, room, dtype=torch.float64)
    v_memory = marks.clone().view(1, 1, room, room)
    v_memory[:, :, start : start + T] = 0.0  # not stored yet
    zeros = torch.zeros(T, 1, room, dtype=torch.float64)
    attend = make(k_memory, v_memory, torch.arange(start, start + T))
    with sdpa_in_words():
        return attend(0, zeros, zeros.clone(), marks[start : start + T, None].clone())


def looks_at(make: Callable[..., Any], start: int, T: int) -> Tensor:
    """The mask [T, S] that an Attend made by `make(k_memory, v_memory, positions)` really uses; S is start + T."""
    return ask(make, start, T, start + T)[:, 0] > 0


@holds(
    "04",
    "CachedAttend",
    "K and V land in the memory of their own layer, as they came",
    hint="in __call__, store k in k_memory[layer] and v in v_memory[layer]; k comes rotated, and stays as it is",
    uses={"store": right_store},
)
def kept_as_they_came(work: Work) -> None:
    generator = seeds.generator(3)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    for layer, start, T in ((1, 0, 5), (2, 5, 1), (1, 4, 3), (0, 1, 2)):
        k_memory, v_memory = draw(L, HKV, 9, D), draw(L, HKV, 9, D)  # of an older text
        before_k, before_v = k_memory.clone(), v_memory.clone()
        positions = torch.arange(start, start + T)
        q, k, v = draw(T, H, D), draw(T, HKV, D), draw(T, HKV, D)
        given = [x.clone() for x in (q, k, v)]
        attend = work.call("CachedAttend", k_memory, v_memory, positions, changes=(0, 1))
        with sdpa_in_words():
            out = attend(layer, q, k, v)
        fits(out, q, "the answer [T, H, D]")
        for name, now, then in zip("qkv", (q, k, v), given, strict=True):
            same(now, then, f"{name} after the call (it must not be changed)", 0.0)
        what = f"after a call for layer {layer} with {span(start, start + T)}"
        if torch.equal(k_memory, before_k) and torch.equal(v_memory, before_v):
            raise Wrong(f"{what}: neither memory has changed; nothing was stored")
        for name, memory, before, new, other in (
            ("k", k_memory, before_k, k, v),
            ("v", v_memory, before_v, v, k),
        ):
            for i in range(L):
                if i != layer and not torch.equal(memory[i], before[i]):
                    raise Wrong(f"{what}: the {name} memory of layer {i} was written, which is another layer's")
            if torch.equal(memory[layer][:, positions], other.transpose(0, 1)):
                raise Wrong(f"{what}: the {name} memory holds {'v' if name == 'k' else 'k'}")
            expected = before.clone()
            for t in range(T):
                expected[layer, :, start + t] = new[t]
            same(memory, expected, f"{what}: the {name} memory [L, Hkv, S, D]", 0.0)


def fits(got: Any, like: Tensor, what: str) -> None:
    """Type, shape and dtype alone."""
    if not isinstance(got, Tensor) or (got.shape, got.dtype) != (like.shape, like.dtype):
        same(got, like, what)


@holds(
    "04",
    "CachedAttend",
    "each new token looks at every position up to its own, and at no other",
    hint="store first, then read positions 0 .. last, both included; compare positions, not row numbers: a mask built "
    "from the T rows alone (tril, is_causal=True) begins at the top left, as if the first new token were position 0",
    uses={"store": right_store},
)
def up_to_its_own(work: Work) -> None:
    make = partial(work.call, "CachedAttend", changes=(0, 1))
    for start, T in ((0, 7), (7, 1), (4, 3), (0, 1), (5, 4), (2, 2)):
        room = start + T + 2  # two more places hold an older text
        out = ask(make, start, T, room)
        fits(out, torch.zeros(T, 1, room, dtype=torch.float64), f"the answer to {span(start, start + T)} [T, H, D]")
        for t, row in enumerate(out[:, 0]):
            seen = (row != 0).nonzero().flatten().tolist()
            expected = list(range(start + t + 1))
            if seen != expected:
                raise Wrong(
                    f"new tokens at {span(start, start + T)}: the one at position {start + t} looks at positions "
                    f"{seen}; it must look at {expected}"
                )


@holds(
    "04",
    "CachedAttend",
    "7 tokens cut in all 64 ways: at every step the uncached model's hidden states",
    hint="each layer has its own memory; store before you read; read from position 0, not only this step's tokens; "
    "keys were rotated at their own positions and are never rotated again",
    uses={"store": right_store},
)
def every_split(work: Work) -> None:
    text = random_text(seeds.rng(4), 7)
    for cuts in range(64):
        pieces, run = [], 1
        for i in range(6):
            if cuts >> i & 1:
                pieces.append(run)
                run = 0
            run += 1
        pieces.append(run)
        in_pieces(work, text, pieces, *memories(7), f"7 tokens cut as {' + '.join(map(str, pieces))}")


@holds(
    "04",
    "CachedAttend",
    "places that are not written yet may hold any number (1e4 here)",
    hint="read only positions 0 .. last, and hide by position; zeros in free places are luck, not a rule",
    uses={"store": right_store},
)
def poisoned(work: Work) -> None:
    draw = seeds.rng(5)
    for _ in range(6):
        n = draw.randint(1, 24)
        k, v = memories(n + draw.randint(0, 5), POISON)
        in_pieces(work, random_text(draw, n), random_pieces(draw, n), k, v, "a memory full of 1e4")


@holds(
    "04",
    "CachedAttend",
    "places after the last position are not read at all (NaN here)",
    hint="cut the memory to S = last position + 1 before attention: a weight of 0 times NaN is NaN, so a mask over the "
    "whole memory is not enough, and it would cost time for every free place",
    uses={"store": right_store},
)
def never_read(work: Work) -> None:
    draw = seeds.rng(6)
    for _ in range(4):
        n = draw.randint(2, 16)
        k, v = memories(n + draw.randint(1, 5), float("nan"))
        in_pieces(work, random_text(draw, n), random_pieces(draw, n), k, v, "a memory full of NaN")


@holds(
    "04",
    "CachedAttend",
    "two texts in turn, each with its own memories, and a third in the memories of the first",
    hint="everything that lasts longer than a step lives in the two memories that are handed in: keep nothing in the "
    "class or in a global name",
    uses={"store": right_store},
)
def in_turn(work: Work) -> None:
    draw = seeds.rng(7)
    for _ in range(3):
        texts = [random_text(draw, 12), random_text(draw, 12)]
        own = [memories(12, POISON), memories(12, POISON)]
        start = 0
        for n in random_pieces(draw, 12):
            for i, name in enumerate(("the first of two texts in turn", "the second of two texts in turn")):
                step(work, texts[i], start, start + n, *own[i], name)
            start += n
        text = random_text(draw, 8)
        in_pieces(work, text, random_pieces(draw, 8), *own[0], "a new text in memories that held another")


# ---- generate

GIVEN = ("tokens", "positions", "attend")  # what the model is called with


class RightAttend:
    def __init__(self, k_memory: Tensor, v_memory: Tensor, positions: Tensor):
        self.memories, self.positions = (k_memory, v_memory), positions

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(int(self.positions.max()) + 1)
        for memory, new in zip(self.memories, (k, v), strict=True):
            right_store(memory[layer], self.positions, new)
        keys, values = (memory[layer][:, places].transpose(0, 1) for memory in self.memories)
        return attention.sdpa(q, keys, values, attention.visible(self.positions, places))


PARTS = {"store": right_store, "CachedAttend": RightAttend}


@contextmanager
def watched(model: Llama) -> Iterator[list[tuple[list[int], list[int], Tensor]]]:
    """What the model was given and what it answered inside the block: tokens, positions and hidden states, by step."""
    steps: list[tuple[list[int], list[int], Tensor]] = []

    def see(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> None:
        given = dict(zip(GIVEN, args, strict=False)) | kwargs
        steps.append((given["tokens"].tolist(), given["positions"].tolist(), hidden))

    hook = model.register_forward_hook(see, with_kwargs=True)
    try:
        yield steps
    finally:
        hook.remove()


@cache
def truth(prompt: tuple[int, ...], n_new: int) -> tuple[int, ...]:
    """The most likely tokens after a prompt, each by a fresh pass over the whole text."""
    tokens = list(prompt)
    for _ in range(n_new):
        tokens.append(int(tiny().logits(uncached(tiny(), tokens)[-1:]).argmax()))
    return tuple(tokens[len(prompt) :])


def cases() -> list[tuple[list[int], int]]:
    draw = seeds.rng(8)
    sizes = [(7, 4), (1, 1), (1, 6), (5, 1), *((draw.randint(2, 20), draw.randint(2, 9)) for _ in range(6))]
    return [(random_text(draw, n), n_new) for n, n_new in sizes]


def called(work: Work, prompt: list[int], n_new: int) -> Any:
    """What the learner's generate returns on the tiny model, once it feeds it lines of numbers."""

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(GIVEN, args, strict=False)) | kwargs
        not_empty(given.get("tokens"))
        for name in ("tokens", "positions"):
            if not isinstance(given.get(name), Tensor):
                raise Wrong(f"the model was given {type(given.get(name)).__name__} for {name}; it takes a tensor [T]")
            if given[name].dim() != 1 or given[name].dtype != torch.int64:
                shape, dtype = list(given[name].shape), given[name].dtype
                raise Wrong(f"the model was given {name} {shape} of {dtype}; one text is a line [T] of torch.int64")

    def not_empty(given: Any) -> None:
        if isinstance(given, Tensor) and given.numel() == 0:
            raise Wrong(
                "a step has no tokens: `computed` equals len(tokens). Set it before the new token is appended, "
                "for that one is not computed yet: the next step does it"
            )

    own = work.function("CachedAttend")

    def attend(*args: Any, **kwargs: Any) -> Any:  # made before the model is called, it sees an empty step first
        not_empty(kwargs["positions"] if "positions" in kwargs else args[-1] if args else None)
        return own(*args, **kwargs)

    hook = tiny().register_forward_pre_hook(look, with_kwargs=True)
    try:
        with sdpa_in_words(), work.replaced({"CachedAttend": attend}):
            return work.call("generate", tiny(), prompt, n_new)
    finally:
        hook.remove()


@holds(
    "04",
    "generate",
    "the uncached model's tokens, for prompts of many lengths",
    hint="the next token is the argmax of the logits after the last row, hidden[-1:]; feed tokens[computed:] and give "
    "back the new tokens alone, as a list of int",
    uses=PARTS,
)
def right_tokens(work: Work) -> None:
    for prompt, n_new in cases():
        what = f"{n_new} new tokens after a prompt of {len(prompt)}"
        got = called(work, list(prompt), n_new)
        same(got, list(truth(tuple(prompt), n_new)), what)
        for i, token in enumerate(got):
            if type(token) is not int:
                raise Wrong(f"{what}: entry {i} is a {type(token).__name__}; it must be an int (`int(...)` makes one)")


@holds(
    "04",
    "generate",
    "each token goes through the model once, in order, and the last new one not at all",
    hint="keep a counter of the tokens computed so far; each step feeds tokens[computed:], then computed is "
    "len(tokens) as it was: the whole prompt first, its last token included, then one at a time",
    uses=PARTS,
)
def once(work: Work) -> None:
    for prompt, n_new in cases():
        with watched(tiny()) as steps:
            got = called(work, list(prompt), n_new)
        pushed, needed = [tokens for tokens, _, _ in steps], len(prompt) + n_new - 1
        if sum(pushed, []) != whole(prompt, n_new, got)[:needed]:
            raise Wrong(push_words(pushed, prompt, n_new, got))


def whole(prompt: list[int], n_new: int, got: Any) -> list[int]:
    """The text as the learner's generate has it; a prompt that is given back too is told elsewhere."""
    return [*prompt, *(got[-n_new:] if isinstance(got, list) else [])]


def push_words(pushed: list[list[int]], prompt: list[int], n_new: int, got: Any) -> str:
    """How many tokens went through the model, and from which step on they are not the next ones of the text."""
    sizes, p = [len(tokens) for tokens in pushed], len(prompt)
    words = (
        f"a prompt of {p} and {n_new} new tokens: {sum(sizes)} tokens went through the model, in steps of {sizes}; "
        f"it takes {p} + {n_new} - 1 = {p + n_new - 1}"
    )
    text, start = whole(prompt, n_new, got), 0
    for i, tokens in enumerate(pushed, 1):
        if text[start : start + len(tokens)] != tokens:
            return (
                f"{words}.\nStep {i} pushed {tokens}, and must push {text[start : start + 1] if start else prompt}: "
                f"before it, {start} tokens have gone through the model, and `computed` is their number"
            )
        start += len(tokens)
    return words


@holds(
    "04",
    "generate",
    "rotary positions go on where the last step ended",
    hint="the positions of a step are computed .. len(tokens)-1, not 0 .. T-1: they turn the keys (RoPE), say where K "
    "and V are kept, and say who may look at whom",
    uses=PARTS,
)
def positions_go_on(work: Work) -> None:
    for prompt, n_new in cases():
        with watched(tiny()) as steps:
            called(work, list(prompt), n_new)
        start = 0
        for i, (tokens, positions, _) in enumerate(steps, 1):
            what = f"a prompt of {len(prompt)}, step {i}: the positions given to the model"
            same(positions, list(range(start, start + len(tokens))), what)
            start += len(tokens)


@holds(
    "04",
    "generate",
    "at every step the uncached model's hidden states, to the last digits of float64",
    hint="K and V need a memory each, of the model's own dtype, and both must last from step to step; CachedAttend is "
    "made anew for each step, with the same memories and the new positions",
    uses=PARTS,
)
def exact(work: Work) -> None:
    for prompt, n_new in cases():
        with watched(tiny()) as steps:
            got = called(work, list(prompt), n_new)
        text, start = whole(prompt, n_new, got), 0
        for i, (tokens, _, hidden) in enumerate(steps, 1):
            stop = start + len(tokens)
            if text[start:stop] != tokens:
                raise Wrong(push_words([tokens for tokens, _, _ in steps], prompt, n_new, got))  # told above
            what = f"a prompt of {len(prompt)}, step {i}, {span(start, stop)}: hidden states [T, d]"
            same(hidden, uncached(tiny(), text[:stop])[start:], what, EXACT)
            start = stop
        if not steps:
            raise Wrong("the model was never called")


@holds(
    "04",
    "generate",
    "requests in turn share no memory",
    hint="make the memories inside generate, anew for each call, and begin with computed = 0; a global name or a "
    "default argument (`cache={}`) outlives the request",
    uses=PARTS,
)
def nothing_shared(work: Work) -> None:
    draw = seeds.rng(9)
    first, second = random_text(draw, 6), random_text(draw, 14)
    for i, prompt in enumerate((first, second, first, [*first, 3], first[:2]), 1):
        what = f"request {i} of five in turn, a prompt of {len(prompt)}: its new tokens"
        same(called(work, list(prompt), 5), list(truth(tuple(prompt), 5)), what)
