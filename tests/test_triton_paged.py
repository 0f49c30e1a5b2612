"""The Triton backend: what surrounds the kernel, the kernel compiled without a GPU, and on a GPU.

Triton's interpreter must be chosen before triton is imported, and torch.compile imports it too. So the tests that run
the kernel on a CPU are in triton_interpreter.py, and one test here runs them all in a process of their own.
"""

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from test_attention import random
from test_batch import Step, request
from torch import Tensor

from minillm import attention
from minillm.batch import Batch, Chunk, pack
from minillm.cache import KVPool
from minillm.kernels import triton_paged
from minillm.kernels.triton_paged import TritonPagedAttend, block_size, split_count, tiles
from minillm.model import Llama

NAN = float("nan")
CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")

Heads = tuple[int, int, int]  # H, Hkv, D
SMOLLM2: Heads = (9, 3, 64)
LLAMA_1B: Heads = (32, 8, 64)


def shape(heads: Heads, dtype: torch.dtype, device: torch.device) -> Llama:
    """A model for its shape, dtype and device alone."""
    H, Hkv, D = heads
    config = replace(TINY, n_heads=H, n_kv_heads=Hkv, head_dim=D)
    return Llama(config).to(device, dtype)


def step_of(*chunks: tuple[int, int], max_len: int = 0) -> Step:
    """Chunks as (computed, new), their slots anywhere among free ones, in rows of a table in reverse order."""
    n_slots = sum(computed + new for computed, new in chunks) + 7
    slots = torch.randperm(n_slots, generator=torch.Generator().manual_seed(1)).tolist()
    plan = []
    for row, (computed, new) in enumerate(chunks):
        mine, slots = slots[: computed + new], slots[computed + new :]
        plan.append((request([1] * (computed + new), computed, len(chunks) - row, mine), new))
    return Step(plan, n_slots, len(chunks) + 1, max(max_len, *(computed + new for computed, new in chunks)))


def fill(step: Step, model: Llama) -> tuple[KVPool, Batch, tuple[Tensor, Tensor, Tensor], Tensor]:
    """A pool with what was computed before (NaN in every other slot of layer 1), the packed step, q, k and v of its
    tokens, and the attention [T, H, D] of each sequence alone, in float64 from the same rounded numbers."""
    c, dtype, device = model.config, model.dtype, model.device
    pool = step.pool(model)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    expected = []
    for i, (r, n) in enumerate(step.plan):
        stop = r.computed + n
        q = random(n, c.n_heads, c.head_dim, seed=300 + i, dtype=dtype)
        k, v = (random(stop, c.n_kv_heads, c.head_dim, seed=seed + i, dtype=dtype) for seed in (100, 200))
        mask = attention.visible(torch.arange(r.computed, stop), torch.arange(stop))
        expected.append(attention.sdpa(q.double(), k.double(), v.double(), mask))
        before = torch.tensor(r.slots[: r.computed], dtype=torch.int64, device=device)
        pool.store(1, before, k[: r.computed].to(device), v[: r.computed].to(device))
        parts.append((q, k[r.computed :], v[r.computed :]))
    q, k, v = (torch.cat(tensors).to(device) for tensors in zip(*parts, strict=True))
    return pool, pack(step.plan, pool), (q, k, v), torch.cat(expected)


def check(step: Step, model: Llama, atol: float) -> None:
    pool, packed, qkv, expected = fill(step, model)
    out = TritonPagedAttend(pool, packed)(1, *qkv)
    assert out.dtype == model.dtype
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=atol)


# ---- around the kernel


def test_the_module_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # what makes an import fail
    monkeypatch.delitem(sys.modules, "minillm.kernels.triton_kernel", raising=False)
    spec = importlib.util.spec_from_file_location("a_copy", triton_paged.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    model = shape((2, 1, 8), torch.float32, CPU)
    assert copy.TritonPagedAttend.why_not(model) == "it needs triton, which is not installed (pip install triton)"
    with pytest.raises(ImportError):
        copy.TritonPagedAttend(*fill(step_of((0, 1)), model)[:2])


@needs_triton
def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = shape((2, 1, 8), torch.float32, CPU)
    assert TritonPagedAttend.why_not(model) == "it needs a CUDA GPU, and the model is on cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonPagedAttend.why_not(model) is None
    assert "use float32" in (TritonPagedAttend.why_not(model.bfloat16()) or "")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 20))
def test_tiles_cover_every_token_once_and_no_tile_holds_two_sequences(lengths: list[int], queries: int) -> None:
    bounds = tiles([Chunk(row, 0, n) for row, n in enumerate(lengths)], queries)
    owner = [row for row, n in enumerate(lengths) for _ in range(n)]
    assert bounds[0] == 0 and bounds[-1] == len(owner)
    for begin, stop in zip(bounds, bounds[1:], strict=False):
        assert 0 < stop - begin <= queries and len(set(owner[begin:stop])) == 1
    assert len(bounds) - 1 == sum(-(-n // queries) for n in lengths)  # and there are no more than need be


def test_tiles_of_the_docstring() -> None:
    assert tiles([Chunk(0, 0, 5), Chunk(1, 0, 1)], 2) == [0, 2, 4, 5, 6]


@pytest.mark.parametrize(
    "programs, width, splits",
    [(3, 2048, 8), (3, 100, 1), (3, 8192, 32), (64, 8192, 4), (132, 8192, 2), (133, 8192, 1), (1000, 8192, 1)],
)
def test_positions_are_shared_where_programs_are_few(programs: int, width: int, splits: int) -> None:
    """With the 132 processors of an H200: never less than 256 positions each, never more than 264 programs."""
    assert split_count(programs, width, 132) == splits


@pytest.mark.parametrize("key_bytes, keys", [(32, 128), (128, 128), (256, 64), (512, 32), (1024, 16), (2048, 16)])
def test_a_block_is_16_kb_if_it_can(key_bytes: int, keys: int) -> None:
    assert block_size(key_bytes) == keys


@needs_triton
def test_under_the_interpreter() -> None:
    file = Path(__file__).with_name("triton_interpreter.py")
    # where NaN arises, numpy warns of it: even in rows that nobody reads, it is an error here
    command = [sys.executable, "-m", "pytest", "-W", "error::RuntimeWarning", str(file)]
    child = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr
    assert " passed" in child.stdout and "skipped" not in child.stdout


# ---- compiled, without a GPU


def launches(
    model: Llama, step: Step, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(kernel, its arguments, options) of every launch for the step on an H200; nothing runs."""
    from minillm.kernels import triton_kernel

    found = []

    class Launcher:
        def __init__(self, name: str):
            self.name, self.parameters = name, getattr(triton_kernel, name).arg_names

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*values: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
                arguments = dict(zip(self.parameters, values, strict=False)) | constants
                assert list(arguments) == self.parameters and all(side >= 1 for side in grid)
                found.append((self.name, arguments, {"num_warps": num_warps, "num_stages": num_stages}))

            return launch

    monkeypatch.setattr(triton_paged, "processors", lambda device: 132)
    pool, packed, qkv, _ = fill(step, model)
    attend = TritonPagedAttend(pool, packed)
    attend.kernels = SimpleNamespace(attend=Launcher("attend"), merge=Launcher("merge"))  # type: ignore[assignment]
    attend(1, *qkv)
    return found


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the kernels are made for the interpreter")
@pytest.mark.parametrize(
    "capability, heads, dtype, chunks",
    [
        (90, SMOLLM2, torch.bfloat16, [(20, 1), (0, 1)]),
        (90, SMOLLM2, torch.float32, [(20, 1), (0, 1)]),
        (90, LLAMA_1B, torch.bfloat16, [(20, 1), (0, 40)]),
        (90, (32, 8, 128), torch.bfloat16, [(20, 1), (0, 40)]),
        (80, LLAMA_1B, torch.bfloat16, [(20, 1), (0, 40)]),
    ],
    ids=str,
)
def test_it_compiles(
    capability: int,
    heads: Heads,
    dtype: torch.dtype,
    chunks: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """As far as to the GPU's instructions, with room for the shared memory of a consumer GPU, 99 KB."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from minillm.kernels import triton_kernel

    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = []
    for name, arguments, options in launches(shape(heads, dtype, CPU), step_of(*chunks, max_len=2048), monkeypatch):
        values = {at: value for at, value in enumerate(arguments.values()) if not isinstance(value, Tensor)}
        strides = {at for at, parameter in enumerate(arguments) if parameter.endswith("_stride")}
        signature = {
            parameter: types[value.dtype]
            if isinstance(value, Tensor)
            else "i32"
            if parameter.endswith("_stride")
            else "constexpr"
            for parameter, value in arguments.items()
        }
        source = ASTSource(
            getattr(triton_kernel, name),
            signature,
            constexprs={(at,): value for at, value in values.items() if at not in strides},
            attrs={
                (at,): [["tt.divisibility", 16]] for at in range(len(arguments)) if at not in values.keys() - strides
            },
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert arguments["out"].dtype == (torch.float32 if name == "attend" else dtype)  # what is merged stays wide
        assert compiled.metadata.shared <= 99 * 1024
        assert compiled.asm["cubin"]
        names.append(name)
    assert names == ["attend", "merge"]


# ---- on a GPU

cuda = pytest.mark.cuda
CUDA = torch.device("cuda")
# bfloat16 rounds the weights and the answer to 8 bits, and the largest value of the answer is about 4
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-11}


@cuda
@needs_gpu
@needs_triton
@pytest.mark.parametrize(
    "heads, dtype",
    [
        *itertools.product([SMOLLM2, LLAMA_1B], [torch.bfloat16, torch.float32]),
        ((9, 1, 80), torch.bfloat16),
        ((8, 8, 128), torch.bfloat16),
        (SMOLLM2, torch.float16),
        (SMOLLM2, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "chunks",
    [
        [(1500, 1)],
        [(3 * i * i, 1) for i in range(33)],
        [(0, 300), (700, 1), (129, 40), (0, 1), (1000, 17)],
    ],
    ids=["one long", "33 single", "mixed"],
)
def test_on_a_gpu_each_sequence_gets_what_it_gets_alone(
    heads: Heads, dtype: torch.dtype, chunks: list[tuple[int, int]]
) -> None:
    check(step_of(*chunks, max_len=4096), shape(heads, dtype, CUDA), TOLERANCE[dtype])


@cuda
@needs_gpu
@needs_triton
def test_memory_of_more_than_two_to_the_31_numbers() -> None:
    """Offsets kept in int32 turn negative from there on. Of two heads, the second begins there."""
    offset = 2**25
    if torch.cuda.get_device_properties(CUDA).total_memory < 45e9:
        pytest.skip("K and V take 35 GB")
    step = step_of((5, 1), (20, 2))
    for r, _ in step.plan:
        r.slots = [slot + offset for slot in r.slots]
    step.n_slots += offset
    check(step, shape((2, 2, 64), torch.float16, CUDA), TOLERANCE[torch.float16])


@cuda
@needs_gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("max_len", [200, 4096], ids=["unsplit", "split"])
def test_a_graph_replays_over_other_contents(dtype: torch.dtype, max_len: int) -> None:
    """Recorded at one step of five sequences, replayed at others: longer, shorter, in other rows and slots."""
    model = shape(SMOLLM2, dtype, CUDA)
    pool, static, (q, k, v), _ = fill(step_of(*[(3, 1)] * 5, max_len=max_len), model)
    static_pool = KVPool(model, 1000, 6, max_len)
    attend = TritonPagedAttend(static_pool, static)
    assert (attend.splits > 1) == (max_len == 4096)

    def copy(step: Step) -> Tensor:
        """The step into the static tensors; what it should give."""
        pool, packed, qkv, expected = fill(step, model)
        static_pool.k.fill_(NAN)
        static_pool.v.fill_(NAN)
        static_pool.k[:, :, : pool.k.shape[2]] = pool.k
        static_pool.v[:, :, : pool.v.shape[2]] = pool.v
        static_pool.table.copy_(pool.table)
        for field in ("positions", "seq", "slots"):
            getattr(static, field).copy_(getattr(packed, field))
        for ours, theirs in zip((q, k, v), qkv, strict=True):
            ours.copy_(theirs)
        return expected

    copy(step_of(*[(3, 1)] * 5, max_len=max_len))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(1, q, k, v)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(1, q, k, v)
    for computed in ([150, 3, 0, 77, 199], [0, 0, 0, 0, 0], [1, 199, 140, 16, 127]):
        expected = copy(step_of(*((n, 1) for n in computed), max_len=max_len))
        graph.replay()
        torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=TOLERANCE[dtype])
