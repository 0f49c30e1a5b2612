"""Picking a backend by measurement: what is measured, what is left out, what is remembered. No time is asserted."""

import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm import attention
from minillm.batch import Batch
from minillm.cache import KVPool
from minillm.errors import InputError
from minillm.kernels import BACKENDS, choose, why_not
from minillm.kernels.choose import (
    CHUNK,
    CONTEXT,
    LEAST_ROUNDS,
    SIZES,
    TOLERANCE,
    Probe,
    Time,
    answer,
    attention_only,
    candidates,
    enough_layers,
    judge,
    race,
    resolve,
    timed,
)
from minillm.kernels.gather import GatherAttend
from minillm.model import Llama

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
STEPS = [[(CONTEXT - 1, 1)] * 8, [(0, CHUNK)], [(CONTEXT - 1, 1)]]
some_chunks = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=5)


def tiny_of(dtype: torch.dtype) -> Llama:
    return attention_only(TINY, CPU, dtype)


# ---- backends that are not what they should be


class Right(GatherAttend):
    """Another name for the reference."""


class Compiled(GatherAttend):
    """Stands for one that would take long to compile."""


class Nowhere(GatherAttend):
    @staticmethod
    def why_not(model: Llama) -> str | None:
        return "it runs nowhere"


class OffByALittle(GatherAttend):
    by = 1.0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().__call__(layer, q, k, v)
        out[-1, -1, -1] += self.by
        return out


class Forgetful(GatherAttend):
    """Stores nothing, and takes what somebody else left there."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.store = lambda *_: None  # type: ignore[method-assign]
        try:
            return super().__call__(layer, q, k, v)
        finally:
            del self.pool.store


class Blind(GatherAttend):
    """Doesn't see one of the positions, the newest."""

    def __init__(self, pool: KVPool, batch: Batch):
        super().__init__(pool, batch)
        for group, _ in self.groups:
            group.mask[..., -1] = False


class Failing(GatherAttend):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("no such instruction")


class Flat(GatherAttend):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().__call__(layer, q, k, v).flatten(1)


class Infinite(OffByALittle):
    by = float("inf")


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has dense, gather and these in place of the real ones."""

    def use(*classes: type) -> None:
        known = {name: BACKENDS[name] for name in ("dense", "gather")}
        known |= {c.__name__.lower(): f"{__name__}:{c.__name__}" for c in classes}
        for name in list(BACKENDS):
            monkeypatch.delitem(BACKENDS, name)
        for name, where in known.items():
            monkeypatch.setitem(BACKENDS, name, where)

    return use


# ---- a step of attention without a model


@given(chunks=some_chunks, seed=st.integers(0, 3), nbytes=st.sampled_from([0, 3000, 10**9]))
def test_the_reference_gives_each_text_what_it_gets_alone(
    tiny: Llama, chunks: list[tuple[int, int]], seed: int, nbytes: int
) -> None:
    """Computed by `sdpa` from the pool's own numbers; every slot that is not one of them holds NaN."""
    probe = Probe.of(tiny, chunks, nbytes, seed)
    pool, layer = probe.pool, len(probe.pool.k) - 1
    rows = [chunk.row for chunk in probe.batch.chunks]
    assert [(c.start, c.n) for c in probe.batch.chunks] == chunks and len(set(rows)) == len(rows)
    kept = [pool.table[row, :start] for row, (start, _) in zip(rows, chunks, strict=True)]  # slots
    slots = torch.cat([*kept, probe.batch.slots])
    assert len(slots) == len(slots.unique()) and int(slots.max()) < pool.k.shape[2] - 1
    free = torch.ones(pool.k.shape[2], dtype=torch.bool).index_fill(0, torch.cat(kept), False)
    for memory in (pool.k, pool.v):
        assert memory[:, :, free].isnan().all() and memory[:, :, ~free].isfinite().all()
        assert all(torch.equal(memory[0][:, ~free], one[:, ~free]) for one in memory)
    new = [n for _, n in chunks]
    expected = []
    parts = zip(chunks, kept, probe.q.split(new), probe.k.split(new), probe.v.split(new), strict=True)
    for (start, n), mine, q, k, v in parts:
        keys, values = (
            torch.cat([memory[layer][:, mine].transpose(0, 1), t]) for memory, t in ((pool.k, k), (pool.v, v))
        )  # [S, Hkv, D]
        mask = attention.visible(torch.arange(start, start + n), torch.arange(start + n))
        expected.append(attention.sdpa(q, keys, values, mask))
    torch.testing.assert_close(answer("gather", probe), torch.cat(expected), rtol=0, atol=1e-11)


def test_numbers_are_drawn_from_the_seed(tiny: Llama) -> None:
    one, again, other = (Probe.of(tiny, [(5, 2), (3, 1)], seed=seed) for seed in (1, 1, 2))
    assert torch.equal(answer("gather", one), answer("gather", again))
    assert not torch.equal(answer("gather", one), answer("gather", other))
    assert abs(float(one.q.std()) - 1) < 0.3 and not torch.equal(one.q[0], one.q[1])
    stored = Probe.of(tiny, [(200, 1)]).pool.k[0, :, :200]
    assert abs(float(stored.std()) - 1) < 0.1 and abs(float(stored.mean())) < 0.1


def test_layers_are_as_many_as_hold_the_bytes() -> None:
    config = dataclasses.replace(TINY, n_layers=30)
    layer = 10 * 2 * 2 * 8 * 4  # positions of all texts, K and V, heads, head dim, bytes
    steps = [(3, 1), (5, 1)]
    found = [enough_layers(config, 4, steps, n) for n in (0, 1, layer, layer + 1, 7 * layer, 99 * layer)]
    assert found == [1, 1, 1, 2, 7, 30]
    assert enough_layers(config, 4, [(0, 9)], 99 * layer) == 2
    assert enough_layers(dataclasses.replace(config, n_layers=1), 4, [(0, 9)], 99 * layer) == 1
    pool = Probe.of(Llama.random(config), steps, 7 * layer).pool
    assert pool.k.shape[0] == 7 and (pool.table.shape[1] % choose.REGION) == 0


# ---- right and wrong answers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", STEPS, ids=["eight", "chunk", "one"])
def test_every_backend_that_runs_here_is_within_the_tolerance(
    dtype: torch.dtype, chunks: list[tuple[int, int]]
) -> None:
    """Of the shape that the default model has, and of one with heads that are few and small."""
    for heads in ({"n_heads": 9, "n_kv_heads": 3, "head_dim": 64}, {}):
        model = attention_only(dataclasses.replace(TINY, **heads), CPU, dtype)
        probe = Probe.of(model, chunks)
        expected = answer("gather", probe)
        assert expected.isfinite().all()
        for name in candidates(model):
            verdict = judge(name, probe, expected)
            assert verdict.fault is None and verdict.difference is not None, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", STEPS, ids=["eight", "chunk", "one"])
def test_one_position_that_is_not_seen_is_a_fault(
    dtype: torch.dtype, chunks: list[tuple[int, int]], backends: Callable[..., None]
) -> None:
    backends(Blind, Right)
    probe = Probe.of(tiny_of(dtype), chunks)
    expected = answer("gather", probe)
    found = judge("blind", probe, expected)
    assert found.fault and found.difference and found.difference > TOLERANCE[dtype]
    assert f"(tolerance {TOLERANCE[dtype]:g})" in found.fault
    assert judge("right", probe, expected) == choose.Verdict(0.0, None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (OffByALittle, "its answer differs from gather's by 1 (tolerance 1e-10)"),
        (Forgetful, "its answer is not numbers"),
        (Infinite, "its answer is not numbers"),
        (Failing, "it fails with RuntimeError: no such instruction"),
        (Flat, "its answer has the shape [5, 32] in place of [5, 4, 8]"),
    ],
)
def test_a_wrong_answer_is_a_fault_in_words(
    tiny: Llama, wrong: type, words: str, backends: Callable[..., None]
) -> None:
    backends(wrong)
    probe = Probe.of(tiny, [(4, 3), (7, 1), (0, 1)])
    found = judge(wrong.__name__.lower(), probe, answer("gather", probe))
    assert found.fault == words and (found.difference is None) == ("differs" not in words)


# ---- the time it takes


class Ticking:
    """A clock that only the backends below move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def perf_counter(self) -> float:
        return self.now


def slow(clock: Ticking, name: str, prepare: float, layer: float) -> Any:
    class Slow:
        def __init__(self, pool: KVPool, batch: Batch):
            clock.now += prepare
            clock.order.append(name)

        def __call__(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            clock.now += layer * (number + 1)
            return q

    return Slow


def test_a_time_is_that_of_the_preparation_and_the_mean_of_the_layers(
    tiny: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Ticking()
    monkeypatch.setattr(choose, "time", clock)
    probe = Probe.of(tiny, [(3, 1)], nbytes=10**9)
    found = timed(slow(clock, "a", 5.0, 1.0), probe)  # layers of 1 and 2 seconds
    assert found == Time(5.0, 1.5) and found.step(30) == 50.0


def test_rounds_are_interleaved_and_each_begins_with_another(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking()
    monkeypatch.setattr(choose, "time", clock)
    monkeypatch.setattr(choose, "backend", lambda name: slow(clock, name, 1.0, 0.0))
    probe = Probe.of(tiny, [(3, 1)])
    found = race(["a", "b", "c"], probe, rounds=4, seconds=1000)
    assert "".join(clock.order) == "abcbcacababc"
    assert {name: len(times) for name, times in found.items()} == {"a": 4, "b": 4, "c": 4}
    assert len(race(["a"], probe, rounds=50, seconds=0)["a"]) == LEAST_ROUNDS  # time is short
    assert len(race(["a"], probe, rounds=50, seconds=9.5)["a"]) == 10
    assert len(race(["a"], probe, rounds=1, seconds=0)["a"]) == 1


# ---- the choice


def test_candidates_are_those_that_run_here_and_at_once(
    tiny: Llama, backends: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    backends(Compiled, Nowhere, Right)
    monkeypatch.setattr(choose, "NOT_ON_CPU", ("compiled", "neverheardof"))
    assert candidates(tiny) == ["gather", "right"]
    with torch.device("meta"):
        elsewhere = Llama(TINY)
    assert candidates(elsewhere) == ["gather", "compiled", "right"]


def test_on_a_cpu_nothing_is_imported_that_takes_long() -> None:
    """torch.compile is a second of imports: a choice that is known already must not wait for it."""
    code = """
import sys
from minillm.kernels import BACKENDS
from minillm.kernels.choose import NOT_ON_CPU, candidates
from minillm.config import Config
from minillm.model import Llama
BACKENDS |= {name: f"minillm.kernels.{name}:None" for name in NOT_ON_CPU}
small = Config(8, 8, 1, 1, 1, 8, 8, 1e-5, 1e4, 8)
print(candidates(Llama.random(small))[0], "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "gather False\n", done.stderr


def fake_race(
    monkeypatch: pytest.MonkeyPatch, decode: dict[str, Sequence[float]], chunk: dict[str, float]
) -> list[tuple[int, list[str]]]:
    """`decode`: seconds of a layer with 1, 8 and 32 texts. Returns what is asked for: (tokens, backends)."""
    asked: list[tuple[int, list[str]]] = []

    def raced(names: Sequence[str], probe: Probe, rounds: int, seconds: float) -> dict[str, list[Time]]:
        asked.append((len(probe.q), list(names)))
        texts = len(probe.batch.chunks)
        of_chunk = len(probe.q) > texts
        took = {n: chunk[n] if of_chunk else decode[n][SIZES.index(texts)] for n in names}
        return {n: [Time(0, took[n]), Time(0, took[n]), Time(99, 99)] for n in names}  # one disturbed

    monkeypatch.setattr(choose, "race", raced)
    return asked


def test_the_fastest_wins_at_each_number_of_texts(
    tiny: Llama, monkeypatch: pytest.MonkeyPatch, backends: Callable[..., None]
) -> None:
    """A text is a chunk of its own and 128 tokens made together: a slow chunk weighs more, the more texts there are."""
    backends(Right)
    names = ["gather", "right"]
    asked = fake_race(monkeypatch, {"gather": (3, 3, 3), "right": (2, 2, 3)}, {"gather": 1, "right": 1})
    assert choose.measure(tiny, names) == {"1": "right", "8": "right", "32": "gather"}
    assert asked == [(1, names), (8, names), (32, names), (CHUNK, names)]
    # 128 seconds of decoding saved, against 10 more for each prompt
    fake_race(monkeypatch, {"gather": (2, 2, 2), "right": (1, 1, 1)}, {"gather": 1, "right": 11})
    assert choose.measure(tiny, names) == {"1": "right", "8": "right", "32": "gather"}


def test_what_is_wrong_is_left_out_with_a_warning(
    tiny: Llama, monkeypatch: pytest.MonkeyPatch, backends: Callable[..., None]
) -> None:
    backends(OffByALittle, Failing)
    names = ["gather", "offbyalittle", "failing"]
    fast = dict.fromkeys(names[1:], (0, 0, 0)) | {"gather": (1, 1, 1)}
    asked = fake_race(monkeypatch, fast, dict.fromkeys(names, 1))
    with pytest.warns(RuntimeWarning) as told:
        assert set(choose.measure(tiny, names).values()) == {"gather"}
    assert [str(one.message) for one in told] == [
        "backend 'offbyalittle' is left out: its answer differs from gather's by 1 (tolerance 1e-10)",
        "backend 'failing' is left out: it fails with RuntimeError: no such instruction",
    ]
    assert all(raced == ["gather"] for _, raced in asked)


def test_who_fails_in_a_later_step_has_not_won_an_earlier_one(
    tiny: Llama, monkeypatch: pytest.MonkeyPatch, backends: Callable[..., None]
) -> None:
    class SingleTokensOnly(GatherAttend):
        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert len(q) == len(self.batch.chunks)
            return super().__call__(layer, q, k, v)

    monkeypatch.setitem(globals(), "SingleTokensOnly", SingleTokensOnly)
    backends(SingleTokensOnly)
    names = ["gather", "singletokensonly"]
    fake_race(monkeypatch, {"gather": (1, 1, 1), "singletokensonly": (0, 0, 0)}, dict.fromkeys(names, 1))
    with pytest.warns(RuntimeWarning, match="fails with AssertionError"):
        assert set(choose.measure(tiny, names).values()) == {"gather"}


def test_the_real_thing_answers_with_a_backend_that_runs_here(tmp_path: Path) -> None:
    model = Llama.random(TINY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {size: choose.choose(model, size, tmp_path / "kept.json") for size in SIZES}
    assert all(name in candidates(model) for name in found.values())
    if len(candidates(model)) > 1:
        [(about, kept)] = json.loads((tmp_path / "kept.json").read_text()).items()
        assert kept == {str(size): name for size, name in found.items()} and "4/2 heads of 8" in about


# ---- the answer, kept


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, backends: Callable[..., None]) -> list[list[str]]:
    """What `measure` was asked for; it answers with another backend for each number of texts."""
    backends(Right, OffByALittle)
    calls: list[list[str]] = []

    def measure(model: Llama, names: list[str]) -> dict[str, str]:
        calls.append(names)
        return {str(size): names[min(i, len(names) - 1)] for i, size in enumerate(SIZES)}

    monkeypatch.setattr(choose, "measure", measure)
    return calls


NAMES = ["gather", "right", "offbyalittle"]


def test_it_is_measured_once(tiny: Llama, measured: list[list[str]], tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "kept.json"  # folders are made
    found = [choose.choose(tiny, running, path) for running in (1, 2, 8, 9, 32, 33, 1000)]
    assert found == ["gather", "right", "right", *["offbyalittle"] * 4]
    assert measured == [NAMES]
    assert [file.name for file in path.parent.iterdir()] == ["kept.json"]


def test_it_is_measured_again_where_anything_else_is_another(
    tiny: Llama, measured: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.json"
    others = [
        lambda: Llama.random(dataclasses.replace(TINY, n_heads=2)),
        lambda: Llama.random(dataclasses.replace(TINY, n_kv_heads=4)),
        lambda: Llama.random(dataclasses.replace(TINY, head_dim=16)),
        lambda: Llama.random(dataclasses.replace(TINY, n_layers=3)),
        lambda: Llama.random(TINY, dtype=torch.bfloat16),
    ]
    for i, other in enumerate([lambda: Llama.random(TINY), *others], 1):
        for _ in range(2):
            choose.choose(other(), 8, path)
        assert len(measured) == i
    changes: list[tuple[str, Any]] = [
        ("torch.get_num_threads", lambda: 77),
        ("torch.__version__", "9.9"),
        ("minillm.__version__", "9.9"),
        ("minillm.doctor.cpu_name", lambda: "another"),
        ("minillm.doctor.usable_cores", lambda: 77),
    ]
    for name, value in changes:
        before = len(measured)
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            choose.choose(Llama.random(TINY), 8, path)
        assert len(measured) == before + 1, name
    monkeypatch.delitem(BACKENDS, "right")
    assert choose.choose(Llama.random(TINY), 1, path) == "gather" and measured[-1] == ["gather", "offbyalittle"]
    assert len(json.loads(path.read_text())) == len(measured)  # and the others are kept


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b"[]", b"3", b"null"], ids=lambda content: repr(content))
def test_a_broken_file_is_no_error(tiny: Llama, measured: list[list[str]], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(content)
    assert choose.choose(tiny, 8, path) == "right" == choose.choose(tiny, 8, path)
    assert len(measured) == 1


@pytest.mark.parametrize("entry", [3, None, [], {}, {"8": "abacus"}, {"8": 3}, {"8": ["right"]}, {"32": "gather"}])
def test_an_entry_that_makes_no_sense_is_measured_again(
    tiny: Llama, measured: list[list[str]], tmp_path: Path, entry: object
) -> None:
    path = tmp_path / "kept.json"
    about = choose.describe(tiny, NAMES)
    path.write_text(json.dumps({"another": {"8": "gather"}, about: entry}))
    assert choose.choose(tiny, 8, path) == "right" and len(measured) == 1
    kept = json.loads(path.read_text())
    assert kept.pop("another") == {"8": "gather"} and list(kept) == [about]


def test_a_file_that_cannot_be_written_is_no_error(tiny: Llama, measured: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "kept.json").mkdir()
    for path in (tmp_path / "file" / "kept.json", tmp_path / "kept.json"):
        assert choose.choose(tiny, 8, path) == choose.choose(tiny, 8, path) == "right"
    assert len(measured) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "kept.json"]  # nothing half written


def test_the_file_lies_in_the_users_cache(
    tiny: Llama, measured: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    choose.choose(tiny)
    assert (tmp_path / "xdg" / "minillm" / "backends.json").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    choose.choose(tiny)
    assert (tmp_path / "me" / ".cache" / "minillm" / "backends.json").exists()

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert choose.choose(tiny, 8) == "right" and len(measured) == 3


def test_where_there_is_one_nothing_is_measured(
    tiny: Llama, measured: list[list[str]], tmp_path: Path, backends: Callable[..., None]
) -> None:
    backends(Nowhere)
    assert choose.choose(tiny, 8, tmp_path / "kept.json") == "gather"
    assert not measured and not list(tmp_path.iterdir())


# ---- names


def test_a_name_is_taken_if_it_can_run(
    tiny: Llama, backends: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    backends(Compiled, Nowhere)
    calls: list[int] = []
    monkeypatch.setattr(choose, "choose", lambda model, running: calls.append(running) or "gather")
    assert [resolve(name, tiny) for name in ("dense", "gather", "compiled")] == ["dense", "gather", "compiled"]
    assert not calls
    assert resolve("auto", tiny, 7) == "gather" and resolve("auto", tiny) == "gather" and calls == [7, 32]
    with pytest.raises(InputError, match="backend 'nowhere' cannot run this model here: it runs nowhere"):
        resolve("nowhere", tiny)
    with pytest.raises(InputError, match="backend 'abacus' is not known; use auto or one of dense, gather, compiled"):
        resolve("abacus", tiny)


def test_of_a_model_without_weights_the_same_can_be_asked(tiny: Llama) -> None:
    """A backend looks at shape, dtype and device alone when it says why it cannot run."""
    small = attention_only(TINY, CPU, torch.float64)
    assert small.config.n_layers == TINY.n_layers and small.dtype == torch.float64
    assert sum(p.numel() for p in small.parameters()) < 1000
    assert [why_not(name, small) for name in BACKENDS] == [why_not(name, tiny) for name in BACKENDS]
