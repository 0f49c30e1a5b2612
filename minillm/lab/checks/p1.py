"""Problem set 1, lessons 00 to 02: four-bit weights out of a file, and attention that counts distances (ALiBi)."""

import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from minillm.lab.checking import holds
from minillm.lab.checks.c01 import write
from minillm.lab.seeds import generator, rng
from minillm.lab.work import Work, Wrong, same

# ---- read_weight


POWERS = tuple(2.0**n for n in range(-6, 4))  # scales with which a product is exact in any dtype


def packed(
    draw: random.Random, rows: int, groups: int, size: int, scales: tuple[float, ...] = POWERS, twins: bool = False
) -> dict[str, Tensor]:
    """Random bytes [rows, groups * size / 2] and scales [rows, groups], under the endings of their names.

    With `twins` both halves of a byte are equal: then their order does not matter, and a mistake in it is told, and
    costs points, where it belongs.
    """
    raw = draw.randbytes(rows * groups * size // 2)
    numbers = torch.tensor([17 * (byte & 15) if twins else byte for byte in raw], dtype=torch.uint8)
    scale = torch.tensor([draw.choice(scales) for _ in range(rows * groups)]).to(torch.float16)
    return {".packed": numbers.reshape(rows, -1), ".scale": scale.reshape(rows, groups)}


Nibbles = Callable[[Tensor], tuple[Tensor, Tensor]]


def unpacked(
    parts: dict[str, Tensor],
    nibbles: Nibbles = lambda byte: (byte & 15, byte >> 4),
    lay: Callable[[Tensor, Tensor], Tensor] = lambda a, b: torch.stack((a, b), -1).flatten(-2),
    signed: Callable[[Tensor], Tensor] = lambda x: x - 8,
    spread: Callable[[Tensor, int], Tensor] = lambda scale, size: scale.repeat_interleave(size, 1),
) -> Tensor:
    """The weights [rows, cols] in float32; each argument is one of the steps, and may be a wrong one."""
    byte, scale = parts[".packed"].int(), parts[".scale"].float()
    whole = lay(*nibbles(byte))
    return signed(whole).float() * spread(scale, whole.shape[1] // scale.shape[1])


# what people do instead, in words
MIXED_UP: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "that is the right weight if column 2j were in the HIGH four bits": partial(
        unpacked, nibbles=lambda byte: (byte >> 4, byte & 15)
    ),
    "that is the right weight if all low halves came first, then all high ones: columns 2j and 2j + 1 share a byte": (
        partial(unpacked, lay=lambda a, b: torch.cat((a, b), -1))
    ),
    "the 8 is not taken off: the four bits are 0 to 15 and stand for -8 to 7": partial(unpacked, signed=lambda x: x),
    "the four bits were read as a signed number (two's complement); here 8 stands for 0": partial(
        unpacked, signed=lambda x: torch.where(x > 7, x - 16, x)
    ),
    "the scales are laid out in turn (column % groups); a group is a run of neighbouring columns": partial(
        unpacked, spread=lambda scale, size: scale.repeat(1, size)
    ),
    "the product was taken in float16": lambda parts: (
        unpacked(parts, spread=lambda scale, size: torch.ones(1)).half()
        * parts[".scale"].repeat_interleave(2 * parts[".packed"].shape[1] // parts[".scale"].shape[1], 1)
    ).float(),
    "every row has the first row's scales": partial(
        unpacked, spread=lambda scale, size: scale[:1].repeat_interleave(size, 1)
    ),
    "every group has the scale of the first": partial(
        unpacked, spread=lambda scale, size: scale[:, :1].repeat_interleave(size * scale.shape[1], 1)
    ),
}


def same_weight(got: object, parts: dict[str, Tensor], what: str) -> None:
    """To the last bit: a number of four bits times one of eleven is exact in float32."""
    try:
        same(got, unpacked(parts), what, 0.0)
    except Wrong as wrong:
        for words, other in MIXED_UP.items():
            if isinstance(got, Tensor) and got.dtype == torch.float32 and torch.equal(got, other(parts)):
                raise Wrong(f"{wrong}; {words}") from wrong
        raise


def read(work: Work, tensors: dict[str, Tensor], name: str, pad: int = 0) -> object:
    """What the learner's function reads out of a file of these tensors, in this order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write(path, tensors, {"format": "pt"} if pad else None, pad)
        return work.call("read_weight", path, name)


def named(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name + ending: tensor for ending, tensor in parts.items()}


def size_of(parts: dict[str, Tensor]) -> str:
    rows, groups = parts[".scale"].shape
    return f"{rows} rows, {2 * parts['.packed'].shape[1]} columns in {groups} groups"


@holds(
    "p1",
    "read_weight",
    "one row, one group: two weights in a byte, the lower four bits first, and 8 stands for 0",
    hint="`byte & 15` and `byte >> 4` are the halves; they are weights number 2j and 2j + 1. Take the 8 off as a wider "
    "integer or as a float: in uint8, 3 - 8 is 251.",
)
def one_group(work: Work) -> None:
    draw = rng(1)
    for cols in (2, 4, 2 * draw.randint(3, 8)):
        parts = packed(draw, 1, 1, cols, scales=(0.5, 1.0, 2.0))
        same_weight(read(work, named("w", parts), "w"), parts, f"bytes {parts['.packed'][0].tolist()}: weights")


@holds(
    "p1",
    "read_weight",
    "each row and each group of columns has its own scale",
    hint="the group size is cols / groups: column c belongs to group c // size. `repeat_interleave(size, 1)` spreads "
    "the scales [rows, groups] to [rows, cols].",
)
def many_groups(work: Work) -> None:
    draw = rng(2)
    for _ in range(12):
        parts = packed(draw, draw.randint(1, 6), draw.randint(1, 5), 2 * draw.randint(1, 9))
        same_weight(read(work, named("w", parts), "w"), parts, f"{size_of(parts)}: weights")


@holds(
    "p1",
    "read_weight",
    "wherever the two parts lie in the file, and whatever the writer put after the header",
    hint="offsets count from the beginning of the data, 8 + n bytes into the file; n is what the first 8 bytes say, "
    "blanks at the header's end included. Bytes and scales have an entry each.",
)
def anywhere(work: Work) -> None:
    draw = rng(3)
    for i in range(10):
        models = {
            name: packed(draw, draw.randint(1, 4), draw.randint(1, 3), 2 * draw.randint(1, 6), twins=True)
            for name in "abc"
        }
        entries = [entry for name, parts in models.items() for entry in named(f"{name}.weight", parts).items()]
        entries.append(("norm.weight", torch.rand(draw.randint(1, 7), generator=generator(i))))
        draw.shuffle(entries)
        name = draw.choice("abc")
        what = f"{name}.weight, in a file of the entries {', '.join(key for key, _ in entries)}: weights"
        same_weight(read(work, dict(entries), f"{name}.weight", draw.randint(1, 9)), models[name], what)


@holds(
    "p1",
    "read_weight",
    "the product is taken in float32: large and tiny scales lose nothing",
    hint="widen the scales before you multiply, not after: 8 times 30,000 is too large for float16, and a weight of 4 "
    "bits times a scale of 11 needs 15.",
)
def wide(work: Work) -> None:
    draw = rng(4)
    for scales in ((30000.0, 65504.0, 12345.0), (6e-8, 3e-7), (1.2345, 0.9991, 1.7777)):
        parts = packed(draw, draw.randint(2, 5), draw.randint(1, 3), 2 * draw.randint(4, 9), scales, twins=True)
        got = read(work, named("w", parts), "w")
        what = f"scales from {float(parts['.scale'].min()):g} to {float(parts['.scale'].max()):g}: weights"
        same_weight(got, parts, what)


@holds(
    "p1",
    "read_weight",
    "what is not packed comes as it is stored, widened to float32",
    hint="a name with an entry of its own is no packed one: its dtype is in the header. bfloat16 and float16 both have "
    "16 bits and are not the same.",
)
def plain(work: Work) -> None:
    draw = rng(5)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
        stored = torch.randn(shape, generator=generator(draw.randrange(1000))).to(dtype)
        tensors = {**named("w", packed(draw, 2, 2, 4)), "norm": stored}
        same(read(work, tensors, "norm", draw.randint(0, 4)), stored.float(), f"a tensor of {dtype} {shape}", 0.0)


def refuses(work: Work, path: Path, name: str, cut: list[str], whole: list[str]) -> None:
    """The function must raise a ValueError that names one of the entries that are not whole, and none that is."""
    entries = " or ".join(map(repr, cut))
    what = f"a file that ends before all data of {entries} are there: read_weight(path, {name!r})"
    function = work.function("read_weight")
    try:
        got = function(path, name)
    except (Wrong, NotImplementedError):
        raise
    except ValueError as error:
        if not any(entry in str(error) for entry in cut):
            told = f"ValueError: {error}"
            raise Wrong(f"{what} raised {told}; it must raise a ValueError that names {entries}") from error
        if named_too := [entry for entry in whole if entry in str(error)]:
            raise Wrong(f"{what} raised ValueError: {error}; {named_too[0]!r} is whole, and is named too") from error
        return
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise Wrong(f"{what} raised {told}; it must raise a ValueError that names {entries}") from error
    shape = list(got.shape) if isinstance(got, Tensor) else got
    raise Wrong(f"{what} returned {shape}; it must raise a ValueError that names {entries}")


@holds(
    "p1",
    "read_weight",
    "of a file that was cut short, whole tensors still come, and one that is not whole is refused by name",
    hint="`file.read(k)` returns fewer than k bytes at the end of a file and raises nothing: compare the length with "
    "end - begin, for each entry that you read.",
)
def cut_short(work: Work) -> None:
    draw = rng(6)
    for _ in range(4):
        first, last = (packed(draw, rows, draw.randint(1, 3), 2 * rows, twins=True) for rows in (2, 3))
        order = list(named("late", last).items())
        draw.shuffle(order)
        norm = torch.rand(draw.randint(2, 6), generator=generator(draw.randrange(1000)))
        entries = {**named("early", first), **dict(order), "norm": norm}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            write(path, entries, None, draw.randint(0, 7))
            whole, names = path.read_bytes(), list(entries)
            begin = len(whole) - sum(tensor.nbytes for tensor in entries.values())
            for i, (entry, tensor) in enumerate(entries.items()):
                if i >= len(first):  # this one and those behind it are not whole
                    path.write_bytes(whole[: begin + draw.randrange(tensor.nbytes)])
                    got = work.call("read_weight", path, "early")
                    same_weight(got, first, f"a file cut in the data of {entry!r}; 'early' lies before that: weights")
                    name = entry.split(".")[0]
                    mine, before = (
                        [one for one in part if one.split(".")[0] == name] for part in (names[i:], names[:i])
                    )
                    refuses(work, path, name, mine, before)
                begin += tensor.nbytes


# ---- alibi


def slopes(H: int) -> list[float]:
    """[H]: of the power of two at or below H, then every second one of twice as many heads (Press et al. 2022)."""
    P = 1 << (H.bit_length() - 1)
    both = [2.0 ** (-8 * (h + 1) / P) for h in range(P)], [2.0 ** (-8 * (h + 1) / (2 * P)) for h in range(2 * P)]
    return both[0] + both[1][::2][: H - P]


Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def right_alibi(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, by_head: list[float] | None = None
) -> Tensor:
    """In float64, head by head and query by query: slow, and hard to get wrong. `by_head`: other slopes [H]."""
    T, H, D = q.shape
    out = torch.zeros(T, H, D, dtype=torch.float64)
    for h, slope in enumerate(by_head or slopes(H)):
        j = h // (H // k.shape[1])
        for t in range(T):
            seen = k_pos <= q_pos[t]
            if seen.any():
                scores = k[seen, j].double() @ q[t, h].double() / D**0.5 - slope * (q_pos[t] - k_pos[seen]).double()
                out[t, h] = scores.softmax(0) @ v[seen, j].double()
    return out.to(q.dtype)


def case(seed: int, H: int, Hkv: int, D: int, q_pos: Tensor, k_pos: Tensor) -> Case:
    draw = partial(torch.randn, generator=generator(seed), dtype=torch.float64)
    return draw(len(q_pos), H, D), draw(len(k_pos), Hkv, D), draw(len(k_pos), Hkv, D), q_pos, k_pos


def own_slopes(work: Work, H: int, D: int) -> list[float] | None:
    """The slopes that the learner's function has, right or not, found by asking: two keys alike, a position apart.

    Properties that are not about slopes hold with these too. None if there are none, or they make no sense.
    """
    zeros = torch.zeros(1, H, D, dtype=torch.float64)
    v = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None, None].expand(2, 1, D).clone()  # the later key: 1
    got = work.call("alibi", zeros, torch.zeros_like(v), v, torch.tensor([2]), torch.arange(2))
    if not isinstance(got, Tensor) or got.shape != zeros.shape:
        return None
    found = [float(x) for x in got[0, :, 0].double().logit()]
    return found if all(1e-6 < slope < 10 for slope in found) else None


def compare(work: Work, given: Case, what: str, tolerance: float = 1e-9) -> None:
    expected = right_alibi(*given, own_slopes(work, *given[0].shape[1:]))
    same(work.call("alibi", *given), expected, f"{what}: [T, H, D]", tolerance)


def falls(work: Work, H: int, S: int) -> None:
    """A query of zeros likes all keys alike: what is left are the distances, and the weight falls evenly, by head."""
    q, k = torch.zeros(1, H, S, dtype=torch.float64), torch.ones(S, 1, S, dtype=torch.float64)
    v = torch.eye(S, dtype=torch.float64)[:, None]  # [S, 1, D = S]: the value of position s is 1 in dimension s
    given = q, k, v, torch.tensor([S]), torch.arange(S)  # no key needs hiding
    got, expected = work.call("alibi", *given), right_alibi(*given)
    if isinstance(got, Tensor) and got.shape == expected.shape and (got > 0).all():
        for h, slope in enumerate(slopes(H)):
            costs = float((got[0, h, -1] / got[0, h, -2]).log())
            if abs(costs - slope) > 1e-6:
                divided = abs(costs * S**0.5 - slope) < 1e-6
                raise Wrong(
                    f"{H} heads, head {h}, a query of zeros: one position further away must cost {slope:.6g}, its "
                    f"slope, and costs {costs:.6g}{': that is the slope divided by sqrt(D)' if divided else ''}"
                )
    same(got, expected, f"{H} heads, one query of zeros; the value of position s marks s: weights [T, H, S]", 1e-9)


@holds(
    "p1",
    "alibi",
    "1, 2, 4, 8 ... heads: one position further away costs the head's slope, and is not divided by sqrt(D)",
    hint="slope(h) = 2 ** (-8 (h + 1) / H), for h from 0: with 8 heads 1/2, 1/4, ... 1/256. The scale 1 / sqrt(D) is "
    "for the dot product alone.",
)
def even_slopes(work: Work) -> None:
    draw = rng(11)
    for H in (1, 2, 4, 8, 16):
        falls(work, H, draw.randint(3, 9))


@holds(
    "p1",
    "alibi",
    "other numbers of heads: those of the power of two below, then every second slope of twice as many",
    hint="6 heads: the four slopes of 4 heads, then the first and the third of the eight slopes of 8 heads.",
)
def uneven_slopes(work: Work) -> None:
    draw = rng(12)
    for H in (3, 6, 12, *draw.sample((5, 7, 9, 10, 11, 13, 14, 15), 3)):
        falls(work, H, draw.randint(3, 9))


@holds(
    "p1",
    "alibi",
    "positions count, not rows: chunks, gaps, keys in any order, far from the beginning",
    hint="the distance is q_pos[:, None] - k_pos, [T, S]; the row numbers of q and k say nothing. Only the difference "
    "counts, so the same distances 5,000 positions later give the same result.",
)
def by_position(work: Work) -> None:
    draw = rng(13)
    for i in range(10):
        start, T, D, far = draw.randint(1, 9), draw.randint(1, 5), draw.choice((4, 8, 16)), draw.choice((0, 5000))
        k_pos = far + torch.tensor(draw.sample(range(start), draw.randint(1, start)))
        q_pos = far + torch.tensor(draw.sample(range(start, start + 9), T))  # after all keys: nothing needs hiding
        compare(work, case(i, 4, 2, D, q_pos, k_pos), f"queries at {q_pos.tolist()}, keys at {k_pos.tolist()}")


@holds(
    "p1",
    "alibi",
    "no key from the future is seen, and a query that sees nothing answers 0",
    hint="hide where k_pos > q_pos, before the softmax; a row of -inf alone becomes NaN, so fill it with 0 at the end.",
)
def causal(work: Work) -> None:
    draw = rng(14)
    for i in range(8):
        T, S = draw.randint(2, 6), draw.randint(2, 7)
        q_pos = torch.tensor([draw.randint(0, 9) for _ in range(T)])
        k_pos = torch.tensor([draw.randint(2, 9) for _ in range(S)])
        given = case(100 + i, 2, 1, 4, q_pos, k_pos)
        got, what = work.call("alibi", *given), f"queries at {q_pos.tolist()}, keys at {k_pos.tolist()}"
        expected = right_alibi(*given, own_slopes(work, 2, 4))
        for t in range(T if isinstance(got, Tensor) and got.shape == expected.shape else 0):
            p = int(q_pos[t])
            if p < int(k_pos.min()):
                same(got[t], expected[t], f"{what}: query {t}, at {p}, sees nothing and must answer 0; [H, D]", 0.0)
            elif (k_pos > p).any():
                later = given[2] + 10.0 * (k_pos > p)[:, None, None]  # other values, where nobody at p may look
                if not torch.allclose(work.call("alibi", *given[:2], later, *given[3:])[t], got[t]):
                    raise Wrong(f"{what}: the answer to query {t}, at {p}, changes with values after it: it sees them")
        same(got, expected, f"{what}: [T, H, D]", 1e-9)


@holds(
    "p1",
    "alibi",
    "grouped queries: neighbouring query heads share a key-value head, and each keeps its own slope",
    hint="`k.repeat_interleave(H // Hkv, 1)`: query head h reads key-value head h // (H // Hkv). Slopes belong to the "
    "H query heads.",
)
def grouped(work: Work) -> None:
    draw = rng(15)
    for i, (H, Hkv) in enumerate(((4, 2), (8, 2), (8, 4), (2, 1), (16, 4), (4, 4))):
        T, S, D = draw.randint(1, 4), draw.randint(1, 8), draw.choice((4, 8))
        compare(work, case(200 + i, H, Hkv, D, torch.arange(S, S + T), torch.arange(S)), f"H = {H}, Hkv = {Hkv}")


@holds(
    "p1",
    "alibi",
    "16-bit inputs: scores and distances in float32, the answer in the dtype of q",
    hint="widen q, k and v first (`torch.promote_types(q.dtype, torch.float32)`), and take distances as integers: "
    "bfloat16 has no 257.",
)
def narrow(work: Work) -> None:
    draw = rng(16)
    for i, (dtype, tolerance) in enumerate(
        ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4), (torch.bfloat16, 1e-2))
    ):
        n, D = draw.randint(600, 900), draw.choice((8, 16))
        q, k, v, q_pos, k_pos = case(300 + i, 8, 2, D, torch.tensor([n, n + 3]), torch.arange(n))
        q *= 20 if i < 3 else 0.01  # scores that dtypes of 16 bits round too much; and distances alone
        compare(work, (q.to(dtype), k.to(dtype), v.to(dtype), q_pos, k_pos), f"{dtype}, {n} keys", tolerance)
