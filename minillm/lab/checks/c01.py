"""Lesson 01: bytes to ids, against tiktoken; safetensors files, written here byte by byte; parameters, by the model."""

import json
import random
import tempfile
import tracemalloc
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import regex
import tiktoken
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from minillm.config import Config
from minillm.errors import InputError
from minillm.fetch import find
from minillm.lab import seeds
from minillm.lab.checking import holds
from minillm.lab.work import Work, Wrong, same, time_limit
from minillm.model import Llama
from minillm.tokenizer import DIGITS_SPLIT, Tokenizer

REAL = "smollm2-135m-instruct"
RUNNING = "I am sure this project will"
TEXTS = (
    RUNNING,
    "In 2026, 12 people paid $3.50 each.",
    "  two  spaces,\n\n\ta tab, and a blank at the end ",
    "don't we'll WE'LL",
    "Le cœur; 日本語; 🙂👩\u200d👧",
    "def f(x):\n    return x**2  # ok?\n",
    "<|im_end|><|im_start|>",
    "Meerwasser: huit pommes, no movers",  # where the longest token that fits is not what merging gives
    "x" * 120,
    " " * 50,
)


def real() -> Path | None:
    """The folder of the real weights, if they are here."""
    try:
        return find(REAL)
    except InputError:
        return None


# ---- merge

LETTERS = {bytes([letter]): 17 + i for i, letter in enumerate(b"cab")}  # ids that say nothing about the letters


def tiktokens(ranks: dict[bytes, int]) -> Callable[[bytes], list[int]]:
    """tiktoken's merging of one piece."""
    encoding = tiktoken.Encoding("small", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={})
    return lambda piece: encoding._encode_single_piece(piece) if piece else []


def trained(draw: random.Random, letters: bytes, merges: int) -> dict[bytes, int]:
    """A table as training leaves it: each new token joins two neighbours that the earlier merges made."""
    ids = list(range(17, 17 + len(letters)))
    draw.shuffle(ids)
    ranks = {bytes([letter]): i for letter, i in zip(letters, ids, strict=True)}
    corpus = [bytes(draw.choices(letters, k=40)) for _ in range(6)]
    for _ in range(merges):
        encode, token = tiktokens(ranks), {i: made for made, i in ranks.items()}
        rows = [[token[i] for i in encode(text)] for text in corpus]
        pairs = sorted({a + b for row in rows for a, b in zip(row, row[1:], strict=False)})
        if not pairs:
            break
        ranks[draw.choice(pairs)] = 17 + len(ranks)
    return ranks


@seeds.cache
def tables() -> list[tuple[dict[bytes, int], list[tuple[bytes, list[int]]]]]:
    """Small tables, each with pieces and tiktoken's ids for them. Made once."""
    draw, made = seeds.rng(0), []
    for letters in (b"ab", b"abc", b"\x00\xff\x80", "é日 ".encode(), bytes(range(250, 256)), b"abcdefgh"):
        for merges in (3, 12, 40):
            ranks = trained(draw, bytes(sorted(set(letters))), merges)
            encode = tiktokens(ranks)
            pieces = [bytes(draw.choices(letters, k=draw.randint(1, 30))) for _ in range(25)]
            made.append((ranks, [(piece, encode(piece)) for piece in pieces]))
    return made


@cache
def real_table(folder: Path) -> tuple[dict[bytes, int], list[tuple[str, list[int]]]]:
    """The real tokenizer's table, and its ids for ordinary and odd text. Made once."""
    tokenizer = Tokenizer.from_pretrained(folder)
    ranks = {tokenizer.token_bytes(i): i for i in range(tokenizer.n_vocab) if not tokenizer.is_special(i)}
    return ranks, [(text, tokenizer.encode(text)) for text in TEXTS]


def told(ranks: dict[bytes, int]) -> str:
    return ", ".join(f"{token!r}: {i}" for token, i in ranks.items())


def merges_to(work: Work, piece: bytes, ranks: dict[bytes, int], expected: list[int]) -> None:
    got = work.call("merge", piece, dict(ranks))  # the next check must find the table as it was
    if not isinstance(got, list) or any(type(i) is not int for i in got):
        ends_with_ids(work)  # says it by the simplest example
    same(got, expected, f"merge({piece!r}) with {{{told(ranks)}}}")


@holds(
    "01",
    "merge",
    "it comes to an end, with a list of ids",
    hint="stop when no pair of neighbours has a rank; what is left are parts, and `ranks` has their ids. It is only "
    "read, never written to",
)
def ends_with_ids(work: Work) -> None:
    with time_limit(3.0, "merge"):
        for piece in (b"a", b"abcab"):
            got = work.call("merge", piece, LETTERS | {b"ca": 20})
            what = f"merge({piece!r})"
            if got is None:
                raise Wrong(f"{what} is None: is a `return` missing?")
            if not isinstance(got, list):
                raise Wrong(f"{what} is {type(got).__name__}; it must be a list of ids")
            for i in got:
                if type(i) is not int:
                    raise Wrong(f"{what} has {i!r} in its list; it must hold ids, which are whole numbers")


@holds(
    "01",
    "merge",
    "where nothing can be merged, every byte is its own token",
    hint="begin with one part for each byte; `bytes([b])` makes a piece of one byte; end with the parts' ids, not with "
    "the bytes' values",
)
def no_merges(work: Work) -> None:
    merges_to(work, b"a", LETTERS, [18])
    merges_to(work, b"abcab", LETTERS, [18, 19, 17, 18, 19])
    merges_to(work, b"", LETTERS, [])


@holds(
    "01",
    "merge",
    "the pair of lowest rank merges first, wherever it stands",
    hint="look at all neighbours, take the pair whose joined bytes have the lowest rank, merge it, and look again",
)
def lowest_rank_first(work: Work) -> None:
    ranks = LETTERS | {b"bc": 20, b"ab": 21}
    merges_to(work, b"abc", ranks, [18, 20])
    merges_to(work, b"abab", ranks, [21, 21])
    # the longest token that fits at the left is not what merging gives
    merges_to(work, b"abc", LETTERS | {b"bc": 20, b"ca": 21, b"abc": 22}, [22])
    merges_to(work, b"abca", LETTERS | {b"ca": 20, b"ab": 21, b"abc": 22}, [21, 20])


@holds(
    "01",
    "merge",
    "of equal pairs, the leftmost merges first",
    hint="where two pairs have the same rank, the one further left goes first: compare (rank, index)",
)
def leftmost_of_equals(work: Work) -> None:
    ranks = LETTERS | {b"aa": 20}
    merges_to(work, b"aaa", ranks, [20, 18])
    merges_to(work, b"baaab", ranks, [19, 20, 18, 19])


@holds(
    "01",
    "merge",
    "what was merged merges again",
    hint="one pass is not enough: go on until no pair of neighbours has a rank",
)
def merges_go_on(work: Work) -> None:
    ranks = LETTERS | {b"aa": 20, b"aaaa": 21, b"aaaab": 22}
    merges_to(work, b"aaaa", ranks, [21])
    merges_to(work, b"aaaaab", ranks, [21, 18, 19])
    merges_to(work, b"aaaab", ranks, [22])


@holds(
    "01",
    "merge",
    "any bytes under any table: equal to tiktoken",
    hint="the bytes need not be text; never decode them. After each merge, all pairs must be looked at anew",
)
def like_tiktoken(work: Work) -> None:
    for ranks, pieces in tables():
        for piece, expected in pieces:
            merges_to(work, piece, ranks, expected)


@holds(
    "01",
    "merge",
    "the real table, where the weights are here: equal to the model's tokenizer on ordinary and odd text",
    hint="if all above hold, look at the speed: a piece of 120 bytes must not take seconds",
)
def the_real_table(work: Work) -> None:
    folder = real()
    merge = work.function("merge")
    if folder is None:
        same(merge(b"a", LETTERS), [18], "merge(b'a')")
        return
    ranks, texts = dict(real_table(folder)[0]), real_table(folder)[1]
    for text, expected in texts:
        got: list[int] = []
        for piece in regex.findall(DIGITS_SPLIT, text):
            ids = merge(piece.encode(), ranks)
            if not isinstance(ids, list) or any(type(i) is not int for i in ids):
                ends_with_ids(work)
                raise Wrong(f"merge({piece.encode()!r}) is {ids!r}; it must be a list of ids")
            got += ids
        same(got, expected, f"the ids of {text!r}")


# ---- files

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
MEGABYTE = 2**20


def write(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, pad: int = 0
) -> dict[str, Any]:
    """A safetensors file, byte by byte: the data in the order given, the header in the order of names. Returns it."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(dict(sorted(header.items())), ensure_ascii=False).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return header


def some(draw: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers that differ in every bit that a dtype has."""
    raw = draw.randbytes(prod(shape) * dtype.itemsize)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    return tensor.nan_to_num(1.5, 2.5, -2.5) if dtype.is_floating_point else tensor


def sample_file(folder: Path, draw: random.Random, pad: int = 0) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    tensors = {
        "z.weight": some(draw, torch.float32, 3, 5),
        "a.weight": some(draw, torch.float32, 4),
        "m.größe": some(draw, torch.float32, 2, 2, 3),
    }
    path = folder / "model.safetensors"
    return path, tensors, write(path, tensors, {"format": "pt"}, pad)


def same_header(got: Any, expected: dict[str, Any], what: str) -> None:
    if got is None:
        raise Wrong(f"{what} is None: is a `return` missing?")
    if not isinstance(got, dict):
        raise Wrong(f"{what} is {type(got).__name__}; it must be the dict that the JSON describes")
    for name, entry in expected.items():
        if name not in got:
            raise Wrong(
                f"{what}: there is no entry {name!r}; it has {', '.join(sorted(map(str, got)))[:200] or 'none'}"
            )
        if got[name] != entry:
            raise Wrong(f"{what}, entry {name!r}: expected {entry!r}, got {got[name]!r}")
    if more := [name for name in got if name not in expected]:
        raise Wrong(f"{what}: the file has no entry {more[0]!r}")


def peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """A call's result, and the most bytes that Python took for it meanwhile."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def header_of(work: Work, path: Path) -> Any:
    """The learner's header; one who asks for more bytes than there can be is told why."""
    try:
        return work.call("read_header", path)
    except Wrong as wrong:
        if not isinstance(wrong.__cause__, OverflowError | MemoryError):
            raise
        with path.open("rb") as file:
            first = file.read(8)
        n = int.from_bytes(first, "little")
        told = f"did n come out as {float(int.from_bytes(first, 'big')):.1e}, where it is {n}? Is the byte order right?"
        raise Wrong(f"{wrong}\n{told} The first of the eight bytes counts least.") from wrong.__cause__


def right_header(path: Path) -> Any:
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


PARTS = {"read_header": right_header}


@holds(
    "01",
    "read_header",
    "the header comes back whole, `__metadata__` too",
    hint="8 bytes give the length n, least significant byte first; the next n bytes are JSON in UTF-8",
)
def header_of_small_file(work: Work) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, _, header = sample_file(Path(folder), seeds.rng(0))
        same_header(header_of(work, path), header, "the header of a file with three tensors")


@holds(
    "01",
    "read_header",
    "the length is a number of eight bytes",
    hint="all eight bytes count: int.from_bytes(..., 'little'); a header of 70,000 bytes is nothing unusual",
)
def long_header(work: Work) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tensors = {f"model.layers.{i}.weight": torch.zeros(1) for i in range(900)}
        header = write(Path(folder) / "long.safetensors", tensors)
        got = header_of(work, Path(folder) / "long.safetensors")
        same_header(got, header, "the header of a file with 900 tensors")


@holds(
    "01",
    "read_header",
    "files of the safetensors library, whose headers end in blanks",
    hint="read exactly n bytes after the first eight; JSON does not mind blanks at its end",
)
def header_of_the_library(work: Work) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        for n in range(1, 9):
            save_file({"w" * n: torch.zeros(n)}, path, metadata={"n": "x" * n})
            entry = {"dtype": "F32", "shape": [n], "data_offsets": [0, 4 * n]}
            expected = {"__metadata__": {"n": "x" * n}, "w" * n: entry}
            same_header(header_of(work, path), expected, f"the header of a file with {n} numbers")


@holds(
    "01",
    "read_header",
    "nothing but the header is read",
    hint="open the file and read 8 + n bytes; do not read all of it and cut: checkpoints have gigabytes",
)
def no_more_than_the_header(work: Work) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, _, header = sample_file(Path(folder), seeds.rng(1))
        with path.open("r+b") as file:
            file.truncate(64 * MEGABYTE)  # takes no room on the disk
        got, taken = peak(lambda: header_of(work, path))
        same_header(got, header, "the header of a file of 64 MB")
        if taken > 8 * MEGABYTE:
            raise Wrong(f"read_header took {taken / MEGABYTE:.0f} MB of memory for the header of a file of 64 MB")


def tensor_of(work: Work, path: Path, name: str) -> Any:
    """The learner's tensor; one who looks for it behind the end of the file is told why."""
    try:
        return work.call("read_tensor", path, name)
    except Wrong as wrong:
        cause = wrong.__cause__
        beyond = isinstance(cause, OverflowError | MemoryError | OSError) or "buffer length (0)" in str(cause)
        if not beyond or isinstance(cause, FileNotFoundError):
            raise
        told = "there is nothing where you read: did you seek past the end? n is the number in the first eight bytes, "
        raise Wrong(f"{wrong}\n{told}and the first of them counts least: is the byte order right?") from cause


@holds(
    "01",
    "read_tensor",
    "a tensor comes back with its shape, dtype and values",
    hint="offsets count from where the data begins, which is after 8 bytes of length and n bytes of header",
    uses=PARTS,
)
def one_tensor(work: Work) -> None:
    with tempfile.TemporaryDirectory() as folder:
        weight = torch.tensor([[1.5, -2.0, 3.25], [0.0, 7.0, -0.5]])
        write(Path(folder) / "one.safetensors", {"weight": weight})
        got = tensor_of(work, Path(folder) / "one.safetensors", "weight")
        same(got, weight, "a tensor [[1.5, -2, 3.25], [0, 7, -0.5]]", 0)


@holds(
    "01",
    "read_tensor",
    "of several tensors, each from its own place",
    hint="data_offsets has begin and end of this tensor's bytes; the order of names in the header says nothing",
    uses=PARTS,
)
def each_from_its_place(work: Work) -> None:
    one_tensor(work)  # what is wrong with one file of one tensor is told once, above
    with tempfile.TemporaryDirectory() as folder:
        for pad in (0, 1, 7):
            path, tensors, _ = sample_file(Path(folder), seeds.rng(2), pad)
            for name, tensor in tensors.items():
                what = f"tensor {name} of a file whose header ends in {pad} blanks"
                same(tensor_of(work, path, name), tensor, what, 0)


@holds(
    "01",
    "read_tensor",
    "every dtype, bit for bit; bfloat16 too",
    hint="take the dtype from the header's entry, through DTYPES; numpy has no bfloat16, torch.frombuffer has",
    uses=PARTS,
)
def every_dtype(work: Work) -> None:
    one_tensor(work)
    draw = seeds.rng(3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        tensors = {kind: some(draw, dtype, 6, 8) for dtype, kind in NAMES.items()}
        tensors["BF16"][0, :3] = torch.tensor([1.0, 3.140625, 1e30])
        write(path, tensors)
        for kind, tensor in tensors.items():
            same(tensor_of(work, path, kind), tensor, f"a tensor stored as {kind}", 0)


@holds(
    "01",
    "read_tensor",
    "any shape: a single number, a vector, four axes",
    hint="reshape to the entry's shape, whatever its length; [] is the shape of a single number",
    uses=PARTS,
)
def any_shape(work: Work) -> None:
    one_tensor(work)
    draw = seeds.rng(4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        for shape in ((), (1,), (7,), (1, 3), (3, 1), (2, 3, 4, 5)):
            tensor = some(draw, torch.float32, *shape)  # the dtype that every reader of the above can read
            write(path, {"before": torch.zeros(3), "it": tensor})
            same(tensor_of(work, path, "it"), tensor, f"a tensor of shape {list(shape)}", 0)


@holds(
    "01",
    "read_tensor",
    "nothing but this tensor's bytes is read",
    hint="file.seek(...) to the beginning of the tensor, then read end - begin bytes",
    uses=PARTS,
)
def no_more_than_the_tensor(work: Work) -> None:
    one_tensor(work)
    with tempfile.TemporaryDirectory() as folder:
        path, tensors, _ = sample_file(Path(folder), seeds.rng(5))
        with path.open("r+b") as file:
            file.truncate(64 * MEGABYTE)
        got, taken = peak(lambda: tensor_of(work, path, "a.weight"))
        same(got, tensors["a.weight"], "a small tensor of a file of 64 MB", 0)
        if taken > 8 * MEGABYTE:
            raise Wrong(f"read_tensor took {taken / MEGABYTE:.0f} MB of memory for a small tensor of a file of 64 MB")


@holds(
    "01",
    "read_tensor",
    "the real file, where the weights are here: equal to the safetensors library",
    hint="if all above hold, this should too; compare your header with the library's",
    uses=PARTS,
)
def the_real_file(work: Work) -> None:
    one_tensor(work)
    folder = real()
    read_tensor = work.function("read_tensor")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.safetensors" if folder is None else folder / "model.safetensors"
        if folder is None:
            save_file({"model.norm.weight": torch.ones(3)}, path)
        with safe_open(path, framework="pt") as file:
            known = set(file.keys())
            for name in ("model.norm.weight", "model.embed_tokens.weight", "model.layers.17.self_attn.k_proj.weight"):
                if name not in known:
                    continue
                same(read_tensor(path, name), file.get_tensor(name), name, 0)


# ---- count_parameters


def sizes(**changes: Any) -> Config:
    """A model whose numbers are all different, so that none can stand in for another; D is not d / H."""
    usual = dict(vocab_size=500, d_model=40, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=16, d_ff=84, tied=True)
    return Config(**(usual | changes), norm_eps=1e-5, rope_theta=10000.0, context=256)


def parameters(config: Config) -> int:
    with torch.device("meta"):  # shapes without memory
        model = Llama(config)
    return sum(parameter.numel() for parameter in model.parameters())


def counted(work: Work, config: Config) -> int:
    """The learner's count, once it is a whole number."""
    got = work.call("count_parameters", config)
    if got is None:
        raise Wrong("count_parameters returned None: is a `return` missing?")
    if not isinstance(got, int):
        raise Wrong(
            f"count_parameters is {type(got).__name__}; it must be a whole number. (`/` makes a float, and nothing "
            "here needs it: the width D of a head is config.head_dim, not d / H.)"
        )
    return got


def same_count(work: Work, config: Config, expected: int, what: str) -> None:
    got = counted(work, config)
    if got != expected:
        one_more_layer(work)  # where a layer is wrong, everything is: it is told by the layer
    same(got, expected, what)


@holds(
    "01",
    "count_parameters",
    "one more layer: q, k, v and o, gate, up and down, two norms",
    hint="q and o have H * D rows or columns, k and v Hkv * D; each norm has d weights",
)
def one_more_layer(work: Work) -> None:
    for changes in ({}, {"n_kv_heads": 6}, {"head_dim": 8}, {"n_heads": 2}, {"d_ff": 100}, {"d_model": 64}):
        counts = [counted(work, sizes(n_layers=n, **changes)) for n in (3, 4)]
        expected = parameters(sizes(n_layers=4, **changes)) - parameters(sizes(n_layers=3, **changes))
        c = sizes(**changes)
        what = f"a layer of d = {c.d_model}, H = {c.n_heads}, Hkv = {c.n_kv_heads}, D = {c.head_dim}, d_ff = {c.d_ff}"
        got, d = counts[1] - counts[0], c.d_model
        by_width = expected - 2 * (c.n_heads + c.n_kv_heads) * (c.head_dim - d // c.n_heads) * d
        if got != expected and got in (by_width, expected - 2 * (c.n_heads * c.head_dim - d) * d):
            why = "D = d // H" if got == by_width else "d in place of H * D for q and o"
            raise Wrong(
                f"parameters of {what}: expected {expected}, got {got}, as with {why}. D is config.head_dim, not d / H"
            )
        same(got, expected, f"parameters of {what}")


@holds(
    "01",
    "count_parameters",
    "a head of its own counts, a tied one is the embedding",
    hint="config.tied says whether head and embedding are the same V * d numbers",
)
def tied_head(work: Work) -> None:
    same_count(work, sizes(tied=True), parameters(sizes(tied=True)), "parameters with a tied head")
    same_count(work, sizes(tied=False), parameters(sizes(tied=False)), "parameters with its own head")


@holds(
    "01",
    "count_parameters",
    "any sizes: equal to the model's own parameters",
    hint="what all layers share: the embedding, and the last norm before the head",
)
def any_sizes(work: Work) -> None:
    draw = seeds.rng(6)
    for _ in range(30):
        n_kv_heads = draw.randint(1, 4)
        config = sizes(
            vocab_size=draw.randint(2, 900),
            d_model=draw.randint(1, 90),
            n_layers=draw.randint(1, 5),
            n_heads=n_kv_heads * draw.randint(1, 4),
            n_kv_heads=n_kv_heads,
            head_dim=2 * draw.randint(1, 30),
            d_ff=draw.randint(1, 200),
            tied=draw.random() < 0.5,
        )
        same_count(work, config, parameters(config), f"parameters of {config}")


@holds(
    "01",
    "count_parameters",
    "SmolLM2-135M has 134,515,008",
    hint="if all above hold, this does too",
)
def the_real_count(work: Work) -> None:
    real_sizes = dict(vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, d_ff=1536)
    same_count(work, sizes(**real_sizes), 134_515_008, "parameters of SmolLM2-135M")
