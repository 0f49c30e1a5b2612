"""K and V reserved and needed, by hand for each stage; activations; what is refused, and what Ctrl-C leaves."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from minillm import attention
from minillm.bench import fragmentation, ladder, memory
from minillm.bench.fragmentation import Plan
from minillm.bench.harness import Job, Step, run
from minillm.bench.memory import KEEPING, POINTS, Result, check, measure, of_stage
from minillm.bench.workload import QUICK, Workload, random_workload
from minillm.errors import InputError
from minillm.model import Llama
from minillm.stages import STAGES

SHORT = dataclasses.replace(
    QUICK, small=1, small_cap=2, main=4, main_longest=100, main_cap=6, max_running=2, budget=16, chunk=5
)
TOKEN_BYTES = TINY.kv_bytes_per_token(8)  # float64


def silent(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def prompt(n: int, first: int = 2) -> tuple[int, ...]:
    return tuple(2 + (first + 7 * i) % 60 for i in range(n))


def work(*jobs: Job) -> Workload:
    known = random_workload(SHORT, TINY)
    return dataclasses.replace(known, sets={**known.sets, "main": list(jobs)}) if jobs else known


@pytest.fixture(scope="module")
def result(tiny: Llama) -> Result:
    return measure(tiny, "tiny", work(), silent(), SHORT, None, 60, (16, 32, 500))


# ---- K and V

# (prompt, new tokens): the most that is stored is one less than their sum
PAIR = [Job(prompt(4), 3), Job(prompt(8), 2)]
RESERVED = {
    "naive": 0,
    "cached": 9,  # one text at a time, and the longer one needs 8 + 2 - 1
    "chunked": 9,
    "padded": 2 * (9 + 1),  # two rows as long as the longer one, and a place for pads in each
    "dynamic": 2 * (9 + 1),
    "ragged": 2 * 9 + 1,  # two regions, and the scratch slot
    "continuous": 2 * 9 + 1,
    "paged": 2 * 16 + 1,  # as much as two of the longer one would take: a block of 16 each
    "shared": 2 * 16 + 1,
    "kernels": 2 * 16 + 1,
}
LIVE = {"naive": 0, "cached": 9, "chunked": 9} | dict.fromkeys(
    ("padded", "dynamic", "ragged", "continuous", "paged", "shared", "kernels"), (4 + 1) + (8 + 1)
)


@pytest.mark.parametrize("stage", STAGES)
def test_peaks_by_hand(tiny: Llama, stage: str):
    done = run(tiny, stage, PAIR, SHORT.limits)
    found = of_stage(done, TOKEN_BYTES, None)
    assert found.peak_reserved == RESERVED[stage] * TOKEN_BYTES == max(found.reserved)
    assert found.peak_live == LIVE[stage] * TOKEN_BYTES
    assert found.steps == len(done.counts.steps)
    assert len(found.reserved) == len(found.live) == POINTS


def test_shares_are_weighted_by_time(tiny: Llama):
    """One second with 1 of 10 needed, and three with 5 of 10: 16 of 40. Then 2 s with 4 of 4."""
    done = run(tiny, "cached", [Job(prompt(4), 1)])
    done.counts.steps[:] = [
        Step(1, began=0.0, ended=1.0, reserved_bytes=10, stored_tokens=1),
        Step(1, began=1.0, ended=4.0, reserved_bytes=10, stored_tokens=5),
    ]
    assert of_stage(done, 1, None).share_used == 16 / 40
    done.counts.steps.append(Step(1, began=4.0, ended=6.0, reserved_bytes=4, stored_tokens=4))
    found = of_stage(done, 1, None)
    assert found.share_used == pytest.approx(24 / 48)
    sixth = POINTS // 6
    assert found.live == pytest.approx([1] * sixth + [5] * (POINTS * 4 // 6 - sixth) + [4] * -(-POINTS // 3))
    assert set(found.reserved[: POINTS * 4 // 6]) == {10} and found.reserved[-1] == 4


def test_a_stage_that_keeps_nothing_has_no_share(tiny: Llama):
    assert of_stage(run(tiny, "naive", PAIR), TOKEN_BYTES, None).share_used is None


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=5),
    st.sampled_from(KEEPING),
    st.integers(1, 4),
)
def test_no_more_is_needed_than_is_reserved(tiny: Llama, sizes: list[tuple[int, int]], stage: str, max_running: int):
    jobs = [Job(prompt(n, 2 + i), n_new) for i, (n, n_new) in enumerate(sizes)]
    found = of_stage(run(tiny, stage, jobs, {"max_running": max_running, "budget": 8, "chunk": 5}), TOKEN_BYTES, None)
    assert all(live <= reserved for live, reserved in zip(found.live, found.reserved, strict=True))
    assert found.peak_live <= found.peak_reserved
    assert found.share_used is not None and 0 < found.share_used <= 1


def test_all_stages_that_keep_anything_are_run(result: Result):
    assert [s.stage for s in result.stages] == list(KEEPING)
    assert all(s.void is None for s in result.stages)


def test_a_wrong_stage_is_void(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    """A stage that looks one position too far back."""
    right = STAGES["cached"]

    def wrong(model: Llama, requests: list):
        visible = attention.visible
        attention.visible = lambda q, k, *seq: visible(q, k + 1, *seq) | (k[..., None, :] == 0)
        try:
            yield from right(model, requests)
        finally:
            attention.visible = visible

    monkeypatch.setitem(STAGES, "cached", wrong)
    found = measure(tiny, "tiny", work(), silent(), SHORT, ["cached", "padded"], 60, (16,))
    assert [s.void is None for s in found.stages] == [False, True]
    console = silent()
    memory.show(found, console)
    assert "cached is void" in " ".join(written(console).split()) and "cached void" in memory.alt_text(found)
    memory.plot(found)


# ---- activations


def test_scores_by_hand():
    """4 heads, 16 queries, 60 keys: two copies in float32, and one in the model's dtype if that is narrower."""
    scores = 4 * 16 * 60
    assert memory.scores_bytes(TINY, torch.bfloat16, 16, 60) == scores * (4 + 4 + 2)
    assert memory.scores_bytes(TINY, torch.float32, 16, 60) == scores * (4 + 4)
    assert memory.scores_bytes(TINY, torch.float64, 16, 60) == scores * (8 + 8)


def test_chunks_come_in_order_and_whole_is_the_last(result: Result):
    if not result.activations:
        pytest.skip("only Linux tells a process's peak memory")
    assert [(a.label, a.chunk) for a in result.activations] == [("16", 16), ("32", 32), ("whole", 60)]
    assert all(a.void is None for a in result.activations)


def test_a_long_prompt_needs_more_in_one_step():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("only Linux tells a process's peak memory")
    model = Llama.random(dataclasses.replace(TINY, context=2048))
    job = Job(prompt(1500), 2)
    chunk, whole = (memory.long_prompt(model, job, size)[1] for size in (50, 1500))
    assert whole > memory.scores_bytes(TINY, model.dtype, 1500, 1500) * 0.9  # 72 MB
    assert chunk < whole / 2


def test_a_system_that_does_not_tell_gets_no_number(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    class Silent:
        def __init__(self, device: torch.device):
            raise OSError("no /proc here")

    monkeypatch.setattr(memory, "PeakMemory", Silent)
    found = measure(tiny, "tiny", work(), silent(), SHORT, ["cached"], 60, (16,))
    assert found.activations == [] and len(found.stages) == 1 and not found.partial
    console = silent()
    memory.show(found, console)
    assert "does not tell a process's peak (no /proc here)" in " ".join(written(console).split())
    assert "not measured" in memory.alt_text(found)
    memory.plot(found)


# ---- what is refused


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"stages": ["best"]}, "stage 'best' is not known; use one of naive, "),
        ({"prompt": 0}, "prompt is 0; it must be at least 1"),
        ({"prompt": 253}, "prompt is 253 tokens; the model's context is 256, so it may have 252"),
        ({"chunks": [16, 0]}, "chunk is 0; it must be at least 1"),
    ],
)
def test_bad_input_is_refused(asked: dict, why: str):
    with pytest.raises(InputError, match=why):
        check(TINY, **{"stages": None, "prompt": 100, "chunks": [16]} | asked)


def test_bad_input_is_refused_before_the_weights_are_loaded(
    real_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(memory.Llama, "from_pretrained", loaded)
    for asked, why in (
        ({"prompt": 8190}, "context is 8192"),
        ({"stages": ["best"]}, "not known"),
        ({"json_path": tmp_path / "no" / "x.json"}, "there is no folder"),
        ({"plot_path": tmp_path / "x.gif"}, "must end in"),
    ):
        known = {"json_path": None, "plot_path": None} | asked
        with pytest.raises(InputError, match=why):
            memory.run_command(str(real_weights), "cpu", "auto", console=silent(), **known)
    with pytest.raises(InputError, match="prompt is 5 tokens; there are 4"):
        memory.check_text([1, 2, 3, 4], 5)


# ---- for people, and for programs


def test_the_tables_fit(result: Result):
    console = silent(width=80)
    memory.show(result, console)
    text = written(console)
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for stage in KEEPING:
        assert f"\n {stage}" in text and stage in memory.alt_text(result)


def test_a_peak_that_falls_has_its_number_below_the_line(result: Result):
    peaks = [memory.Activation(size, False, peak, 1, None) for size, peak in ((16, 30), (32, 20), (64, 40))]
    found = dataclasses.replace(result, activations=[dataclasses.replace(a, peak=a.peak * 10**6) for a in peaks])
    numbers = {text.get_text(): text.xyann[1] for text in memory.plot(found).axes[-1].texts}
    assert {number: at < 0 for number, at in numbers.items()} == {"30": False, "20": True, "40": False}
    assert "by size of chunk: 16: 30 MB, 32: 20 MB, 64: 40 MB." in memory.alt_text(found)


def test_after_ctrl_c_what_was_measured_is_kept(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    def stop_at(n: int):
        calls = iter(range(1, 1000))

        def counted(*args: object, **more: object):
            if next(calls) == n:
                raise KeyboardInterrupt
            return run(*args, **more)

        monkeypatch.setattr(memory, "run", counted)

    arguments = tiny, "tiny", work(), silent(), SHORT, ["cached", "padded"], 60, (16,)
    stop_at(2 * 2 + 2)  # two sizes, twice each; then the second stage
    found = measure(*arguments)
    assert found.partial and [s.stage for s in found.stages] == ["cached"] and len(found.activations) == 2
    stop_at(3)  # the second size
    found = measure(*arguments)
    assert found.partial and not found.stages and [a.label for a in found.activations] == ["16"]
    console = silent()
    memory.show(found, console)
    memory.plot(found)
    assert "Stopped half way" in written(console)
    stop_at(1)
    with pytest.raises(KeyboardInterrupt):
        measure(*arguments)


# ---- the same memory in blocks

SMALL = Plan(sizes=(1, 4), requests=20, served=8, scale=0.1, block=4, max_running=6, regions=2, rounds=1)


def test_blocks_come_last_and_are_told(tiny: Llama):
    found = measure(tiny, "tiny", work(), silent(), SHORT, ["continuous", "paged"], 60, (16,), SMALL)
    assert found.blocks and not found.partial and len(found.blocks.counted) == 3 and len(found.blocks.served) == 2
    console = silent()
    memory.show(found, console)
    text = " ".join(written(console).split())
    assert "The memory of 2 regions in blocks" in text and "The same on the model: 8 such requests" in text
    assert "Of the K and V memory that continuous holds" in memory.finding(found)  # its regions, not paged's blocks
    assert fragmentation.finding(found.blocks) in memory.finding(found)
    assert fragmentation.finding(found.blocks) not in memory.alt_text(found)  # the picture does not show it
    told = json.loads(json.dumps(memory.as_json(found)))["blocks"]
    assert [c["memory"] for c in told["counted"]] == ["regions", "blocks of 1", "blocks of 4"]
    assert told["ratio"] == found.blocks.ratio and told["claims"][1]["target"] == ">= 2 x"


def test_ctrl_c_among_the_blocks_keeps_the_rest(tiny: Llama, monkeypatch: pytest.MonkeyPatch):
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    arguments = tiny, "tiny", work(), silent(), SHORT, ["cached"], 60, (16,), SMALL
    if Path("/proc/self/clear_refs").exists():
        with monkeypatch.context() as patched:
            patched.setattr(ladder, "fix_lengths", stopped)
            found = measure(*arguments)
        assert found.partial and found.activations and found.blocks is None  # nothing is begun after it
    monkeypatch.setattr(fragmentation, "serve", stopped)
    found = measure(*arguments)
    assert found.partial and len(found.stages) == 1 and found.blocks and not found.blocks.served
    memory.show(found, silent())
    monkeypatch.setattr(fragmentation, "count_all", stopped)
    found = measure(*arguments)
    assert found.partial and len(found.stages) == 1 and found.blocks is None
    memory.show(found, silent())


def test_the_command_writes_everything(
    real_weights: Path, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def measured(model: Llama, name: str, workload: Workload, console: Console, *options: object) -> Result:
        asked.append((name, workload.weights, options))
        return dataclasses.replace(result, partial=len(asked) == 2)

    monkeypatch.setattr(memory, "measure", measured)
    monkeypatch.setattr(memory.Llama, "from_pretrained", lambda *_, **__: Llama.random(TINY))
    out, picture, console = tmp_path / "out.json", tmp_path / "out.png", silent()
    plan = Plan(requests=5, served=0)
    arguments = str(real_weights), "cpu", "float32", out, picture, console, None, 1000, (16,), plan
    assert memory.run_command(*arguments) == 0
    assert asked[0] == (real_weights.name, "real", (QUICK, None, 1000, (16,), plan))
    found = json.loads(out.read_text("utf-8"))["sections"]["memory"]
    assert found["partial"] is False and found["about"]["machine"]["cores"] and found["about"]["command"]
    assert found["alt_text"] == memory.alt_text(result) and found["finding"] == memory.finding(result)
    stages = {s["stage"]: s for s in found["stages"]}
    assert stages["padded"]["peak_live"] == result.stages[2].peak_live and len(stages["padded"]["live"]) == POINTS
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KeyboardInterrupt):
        memory.run_command(*arguments)
    assert json.loads(out.read_text("utf-8"))["sections"]["memory"]["partial"] is True
