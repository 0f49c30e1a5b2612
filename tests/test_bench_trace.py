"""The timeline of small runs by hand, what it conserves, and the files that are made from it."""

import dataclasses
import io
import json
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from minillm.bench import trace
from minillm.bench.harness import Counts, Job, Run, Step, run
from minillm.bench.timeline import Cell, Timeline, alt_text, blocks, letters, make_timeline, show_text, spans
from minillm.bench.trace import chrome_trace, draw, pick_limits, run_command, save_picture
from minillm.errors import InputError
from minillm.model import Llama
from minillm.stages import STAGES

TOKEN_BYTES = TINY.kv_bytes_per_token(8)  # float64
LIMITS = {"max_running": 2, "budget": 4, "chunk": 4}


def jobs(*sizes: tuple[int, int]) -> list[Job]:
    """Prompts of so many tokens, and so many new ones."""
    return [Job(tuple(2 + (5 * i + 7 * j) % 60 for j in range(n)), n_new) for i, (n, n_new) in enumerate(sizes)]


def traced(model: Llama, stage: str, work: list[Job], limits: dict[str, int] = LIMITS) -> Timeline:
    known = {name: value for name, value in limits.items() if name in signature(STAGES[stage]).parameters}
    return make_timeline(run(model, stage, work, limits), known, TOKEN_BYTES)


def rows(timeline: Timeline) -> list[str]:
    return [letters(timeline, i).rstrip() for i in range(len(timeline.cells))]


def pads(timeline: Timeline, i: int) -> list[int]:
    return [cell.pads for cell in timeline.cells[i].values()]


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def silent(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width)


# ---- by hand


def test_a_rectangle_starts_together_and_ends_together(tiny: Llama):
    t = traced(tiny, "padded", jobs((4, 2), (2, 4), (3, 1)))
    assert rows(t) == ["Pdxx", "Pddd", "....P"]
    assert [step.tokens for step in t.steps] == [8, 2, 2, 2, 3]
    assert t.pads == [2, 0, 1, 1, 0]
    assert pads(t, 0) == [0, 0, 1, 1] and pads(t, 1) == [2, 0, 0, 0] and pads(t, 2) == [0, 0, 0, 0, 0]


def test_a_smaller_group_leaves_nobody_of_the_one_before_behind(tiny: Llama):
    t = traced(tiny, "padded", jobs((1, 1), (1, 1), (1, 1), (1, 1), (1, 3)), {"max_running": 4})
    assert rows(t) == ["P", "P", "P", "P", ".Pdd"]
    t = traced(tiny, "padded", jobs((1, 1), (1, 1), (1, 1), (1, 3), (1, 1)), {"max_running": 3})
    assert rows(t) == ["P", "P", "P", ".Pdd", ".Pxx"]


def test_a_newcomer_takes_the_row_that_is_free_and_pads_the_others(tiny: Llama):
    t = traced(tiny, "dynamic", jobs((1, 2), (1, 5), (5, 2)))
    assert rows(t) == ["Pd", "Pdddd", "..Pdx"]
    assert t.pads == [0, 0, 4, 0, 1]
    assert pads(t, 1) == [0, 0, 4, 0, 0]


def test_a_row_without_a_request_is_counted_and_belongs_to_nobody(tiny: Llama):
    t = traced(tiny, "dynamic", jobs((3, 2)), {"max_running": 3})
    assert rows(t) == ["Pd"] and t.pads == [6, 2] and pads(t, 0) == [0, 0]


def test_a_budget_cuts_prompts_into_pieces(tiny: Llama):
    t = traced(tiny, "continuous", jobs((3, 3), (6, 2), (2, 1)))
    assert rows(t) == ["Pdd", "PPPd", "...P"]
    assert t.cells[1] == {
        0: Cell("prefill", 1, 0),
        1: Cell("prefill", 3, 1),
        2: Cell("prefill", 2, 4),
        3: Cell("decode", 1, 6),
    }
    assert t.tokens("prefill") == [4, 3, 2, 2] and t.tokens("decode") == [0, 1, 1, 1] and t.pads == [0] * 4
    assert [step.stored_tokens for step in t.steps] == [4, 8, 11, 9]
    assert t.used_bytes == [TOKEN_BYTES * n for n in (4, 8, 11, 9)]


@pytest.mark.parametrize(
    "stage, expected, tokens",
    [
        ("naive", ["PAA", "...PA"], [3, 4, 5, 6, 7]),
        ("cached", ["Pdd", "...Pd"], [3, 1, 1, 6, 1]),
        ("chunked", ["Pdd", "...PPd"], [3, 1, 1, 4, 2, 1]),
        ("ragged", ["Pdd", "Pd"], [9, 2, 1]),
    ],
)
def test_the_other_stages(tiny: Llama, stage: str, expected: list[str], tokens: list[int]):
    t = traced(tiny, stage, jobs((3, 3), (6, 2)))
    assert rows(t) == expected and [step.tokens for step in t.steps] == tokens


def test_a_text_ends_where_the_model_ends_it(tiny: Llama):
    work = jobs((3, 6), (3, 6))
    eos = run(tiny, "cached", work).outputs[0][2]
    model = Llama.random(dataclasses.replace(TINY, eos=(eos,)), seed=0, dtype=torch.float64)
    done = run(model, "continuous", [dataclasses.replace(job, ignore_eos=False) for job in work], LIMITS)
    assert done.finish_reasons[0] == "stop"
    n = done.outputs[0].index(eos) + 1
    assert letters(make_timeline(done, LIMITS, TOKEN_BYTES), 0).strip() == "P" + "d" * (n - 1)


def hand_made(steps: list[dict[int, int]], work: list[Job], reasons: list[str | None], arrivals: list[float]) -> Run:
    """A step each second, half a second long."""
    counts = Counts([Step(sum(new.values()), began=k, ended=k + 0.5, new=new) for k, new in enumerate(steps)])
    outputs = [[0] * job.max_tokens for job in work]
    return Run("by hand", work, arrivals, outputs, [[] for _ in work], reasons, counts)


def test_arrival_waiting_and_a_step_without_a_token():
    done = hand_made([{0: 2}, {0: 1, 1: 1}, {0: 1}, {1: 2}], jobs((2, 3), (3, 1)), ["length", "length"], [0.0, 0.25])
    t = make_timeline(done, {}, 1)
    assert rows(t) == ["Pdd", " P-P"]  # it came when the first step was on, and was in the next
    assert t.waits == [0.0, 0.75] and t.end == 3.5
    done.arrivals[1] = 0.0
    assert rows(make_timeline(done, {}, 1)) == ["Pdd", ".P-P"]


def test_what_was_stopped_half_way():
    """The third step was broken off; the third request never began."""
    done = hand_made([{0: 2}, {1: 3}, {}], jobs((2, 3), (3, 1), (1, 1)), [None, "length", None], [0.0, 0.0, 0.5])
    t = make_timeline(done, {}, 1, partial=True)
    assert rows(t) == ["P-", ".P", " ."]
    assert t.waits == [0.0, 1.0, 1.0]
    assert "partial: stopped by Ctrl-C" in alt_text(t) and "request 3: 1.00 s (until the end)" in alt_text(t)


def test_spans_join_all_but_pieces_of_prompts():
    t = make_timeline(
        hand_made([{0: 2}, {0: 2}, {0: 1}, {0: 1}, {1: 1}], jobs((4, 3), (1, 1)), ["length"] * 2, [0.0, 0.0]), {}, 1
    )
    assert [(s.kind, s.first, s.last, s.n) for s in spans(t.cells[0])] == [
        ("prefill", 0, 0, 2),
        ("prefill", 1, 1, 2),
        ("decode", 2, 3, 1),
    ]
    assert [(s.kind, s.first, s.last) for s in spans(t.cells[1])] == [("waiting", 0, 3), ("prefill", 4, 4)]


# ---- for any lengths, limits and stages

SIZES = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 6), st.sampled_from([0.0, 0.0, 0.002])), min_size=1, max_size=6
)


@given(SIZES, st.sampled_from(list(STAGES)), st.integers(1, 4), st.integers(4, 9))
@settings(max_examples=150)
def test_every_token_is_somewhere_once(
    tiny: Llama, sizes: list[tuple[int, int, float]], stage: str, max_running: int, budget: int
):
    work = [
        dataclasses.replace(job, arrival=size[2])
        for job, size in zip(jobs(*[size[:2] for size in sizes]), sizes, strict=True)
    ]
    t = traced(tiny, stage, work, {"max_running": max_running, "budget": budget, "chunk": budget})
    for i, (n, n_new, _) in enumerate(sizes):
        row, cells = letters(t, i).strip(), t.cells[i]
        prefill = [cell for cell in cells.values() if cell.kind == "prefill"]
        assert [cell.start for cell in prefill] == [sum(c.n for c in prefill[:j]) for j in range(len(prefill))]
        assert sum(cell.n for cell in prefill) == n
        assert row.count("A" if stage == "naive" else "d") == n_new - 1
        assert len(row) == row.count(".") + row.count("P") + n_new - 1 + row.count("x")  # nobody is ever left out
        assert row == "".join(sorted(row, key=".PdAx".index))  # one after the other
        assert "x" not in row or stage in ("padded", "dynamic")
        assert t.waits[i] >= 0
    kinds = zip(*(t.tokens(kind) for kind in ("prefill", "decode", "again")), t.pads, strict=True)
    assert [sum(parts) for parts in kinds] == [step.tokens for step in t.steps]
    assert min(t.pads) >= 0
    of_requests = [sum(cells[k].pads for cells in t.cells if k in cells) for k in range(len(t.steps))]
    if stage == "dynamic":
        assert all(mine <= all_pads for mine, all_pads in zip(of_requests, t.pads, strict=True))
        assert all(sum(k in c and c[k].kind != "waiting" for c in t.cells) <= max_running for k in range(len(t.steps)))
    else:
        assert of_requests == t.pads  # each pad is in some request's row
    check_rules(chrome_trace(t))


# ---- the trace viewer's file


def check_rules(content: dict[str, Any]) -> None:
    """The rules of the trace event format, as far as we use it."""
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    events = content["traceEvents"]
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    named: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    lines: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in events:
        assert e["ph"] in ("X", "M", "C") and e["name"] and isinstance(e["args"], dict)
        assert all(isinstance(e[key], int) and e[key] >= 0 for key in ("ts", "pid", "tid"))
        if e["ph"] == "M":
            named[e["name"]].add((e["pid"], e["tid"]))
            assert isinstance(e["args"]["name"], str)
        elif e["ph"] == "C":
            assert all(isinstance(value, int | float) and value >= 0 for value in e["args"].values())
        else:
            assert isinstance(e["dur"], int) and e["dur"] >= 0
            lines.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert set(lines) <= named["thread_name"]
    assert {pid for pid, _ in lines} <= {pid for pid, _ in named["process_name"]}
    for intervals in lines.values():
        assert all(a[1] <= b[0] for a, b in zip(intervals, intervals[1:], strict=False)), "overlap"


def test_the_trace_by_hand():
    done = hand_made(
        [{0: 2}, {0: 1, 1: 3}, {0: 1, 1: 3}, {2: 1}], jobs((2, 3), (6, 1), (1, 1)), ["length"] * 3, [0, 0, 3]
    )
    content = chrome_trace(make_timeline(done, {"max_running": 2, "budget": 8}, 10))
    check_rules(content)
    events = content["traceEvents"]
    second = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (2, 2)]
    assert second == [
        ("waiting", 0, 1_000_000),
        ("prefill 1 of 2", 1_000_000, 500_000),
        ("prefill 2 of 2", 2_000_000, 500_000),
    ]
    steps = [e["args"] for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert steps[1] == {"step": 2, "tokens": 4, "requests": 2, "pads": 0, "prefill": 3, "decode": 1}
    counted = {(e["name"], e["ts"]): e["args"] for e in events if e["ph"] == "C"}
    assert counted["requests", 0] == {"running": 1, "waiting": 1}
    assert counted["requests", 1_000_000] == {"running": 2, "waiting": 0}
    assert counted["share of the most tokens in %", 1_000_000] == {"used": 50}
    assert ("requests", 1_500_000) not in counted
    assert counted["requests", 2_500_000] == {"running": 0, "waiting": 0}  # the engine sleeps till the third arrives
    assert counted["tokens in the step", 3_500_000] == {"prefill": 0, "decode": 0, "pads": 0}
    assert content["otherData"]["partial"] is False


# ---- text and pictures


def test_the_alt_text_has_the_numbers(tiny: Llama):
    words = alt_text(traced(tiny, "padded", jobs((4, 2), (2, 4), (3, 1))))
    assert words.startswith("padded: 3 requests in 5 steps, ")
    assert "prefill 9, decode 4, pads 4 (23.5% of all)" in words
    assert "At most 2 requests in one step, and 8 tokens." in words
    assert "Longest waits: request 3: " in words and "(until step 5)" in words
    assert f"at most {2 * 6 * TOKEN_BYTES / 1e6:.2f} MB reserved, {8 * TOKEN_BYTES / 1e6:.2f} MB in use" in words


def test_blocks_show_what_is_not_nothing():
    assert blocks([0, 1, 50, 51, 100], 100) == " ▁▄▅█"


def test_the_text_is_folded_to_the_console(tiny: Llama):
    console = silent(width=21)  # 11 for the labels, 10 for the steps
    show_text(traced(tiny, "padded", jobs((4, 2), (2, 13))), console)
    lines = [line.rstrip() for line in written(console).splitlines()]
    assert lines[:4] == ["steps 1 to 10", "request 1  Pdxxxxxxxx", "request 2  Pddddddddd", "tokens     █▂▂▂▂▂▂▂▂▂"]
    assert "steps 11 to 13" in lines and "request 1  xxx" in lines and "request 2  ddd" in lines


@pytest.mark.parametrize("by", ["step", "time"])
@pytest.mark.parametrize("stage", ["naive", "dynamic", "continuous"])
def test_the_picture_shows_every_kind(tiny: Llama, stage: str, by: str):
    t = traced(tiny, stage, jobs((4, 2), (2, 13), (9, 3)))
    figure = draw(t, by, "tiny")
    shown = {text.get_text().split(":")[0] for text in figure.legends[0].get_texts()}
    assert ("decode" in shown) == (stage != "naive") and {"prefill", "waiting"} <= shown
    assert ("pads" in shown) == (stage == "dynamic")
    grid, tokens, _ = figure.axes
    assert [label.get_text() for label in grid.get_yticklabels()] == ["1  (4 + 2)", "2  (2 + 13)", "3  (9 + 3)"]
    assert [text.get_text() for text in tokens.texts] == (["budget: 4 "] if stage == "continuous" else [])
    hatches = {patch.get_hatch() for patch in figure.legends[0].get_patches()}
    assert len(hatches) == len(shown)  # each kind has its own


@pytest.mark.parametrize("new", [20, 150])
def test_the_tokens_of_a_piece_are_told_where_they_can_be_read(tiny: Llama, new: int):
    figure = draw(traced(tiny, "continuous", jobs((4, new), (9, 3))), "step", "tiny")
    numbers, legend = figure.axes[0].texts, [text.get_text() for text in figure.legends[0].get_texts()]
    assert bool(numbers) == (new == 20) and all(number.get_fontsize() >= 6 for number in numbers)
    assert ("prefill: a piece of the prompt, and its tokens" in legend) == bool(numbers)
    assert ("prefill: a piece of the prompt" in legend) == (not numbers)


def test_pictures_carry_their_alt_text(tiny: Llama, tmp_path: Path):
    t = traced(tiny, "continuous", jobs((4, 2), (2, 3)))
    for name, begin in (("out.png", b"\x89PNG"), ("out.svg", b"<?xml"), ("out.pdf", b"%PDF")):
        save_picture(t, "step", "tiny", tmp_path / name)
        content = (tmp_path / name).read_bytes()
        assert content.startswith(begin)
        if name != "out.pdf":  # compressed there
            assert b"A row for each request, a column for each step." in content


# ---- the command


class Any_:
    """Stands for the tokenizer and the config of a folder."""

    @staticmethod
    def from_pretrained(folder: Path) -> None:
        return None

    from_folder = from_pretrained


@pytest.fixture
def folder(tiny: Llama, monkeypatch: pytest.MonkeyPatch) -> str:
    """`run_command` then runs the tiny model on three short prompts."""
    work = jobs((4, 2), (2, 6), (9, 3))
    monkeypatch.setattr(trace, "find", Path)
    monkeypatch.setattr(trace, "Tokenizer", Any_)
    monkeypatch.setattr(trace, "Config", Any_)
    monkeypatch.setattr(trace, "make_jobs", lambda *args: work)
    monkeypatch.setattr(trace, "load_model", lambda *args: tiny)
    return "tiny"


def command(
    folder: str, out: Path | None = None, chrome: Path | None = None, text: bool = False, **changes: Any
) -> tuple[int, str]:
    console = silent()
    options: dict[str, Any] = {
        "stage": "continuous",
        "model": folder,
        "device": "cpu",
        "dtype": "float64",
        "requests": 3,
    }
    options |= {"max_running": 2, "budget": 4, "max_tokens": 6, "arrivals_rate": None}
    return run_command(**{**options, **changes}, out=out, chrome=chrome, text=text, console=console), written(console)


def test_without_files_the_text_is_shown(folder: str):
    status, shown = command(folder)
    assert status == 0 and "request 1  Pd" in shown
    assert "continuous: 3 requests in " in shown and "at most 2 running, a budget of 4 tokens" in shown
    assert "tokens pushed: prefill 15, decode 8, pads 0 (0%)" in shown


def test_files_are_written_and_named(folder: str, tmp_path: Path):
    out, chrome = tmp_path / "out.svg", tmp_path / "out.json"
    status, shown = command(folder, out, chrome, by="time")
    assert status == 0 and "request 1  P" not in shown
    assert f"Picture: {out}" in shown.replace("\n", "") and f"Trace: {chrome}" in shown.replace("\n", "")
    assert out.read_text("utf-8").startswith("<?xml")
    check_rules(json.loads(chrome.read_text("utf-8")))


def test_ctrl_c_keeps_what_was_traced(tiny: Llama, folder: str, tmp_path: Path):
    out, chrome, passes = tmp_path / "out.svg", tmp_path / "out.json", 0

    def stop(*args: object) -> None:
        nonlocal passes
        passes += 1
        if passes == 2 + 4:  # two to warm up
            raise KeyboardInterrupt

    hook = tiny.norm.register_forward_pre_hook(stop)  # in the middle of a step
    try:
        with pytest.raises(KeyboardInterrupt):
            command(folder, out, chrome, stage="cached", max_running=None, budget=None)
    finally:
        hook.remove()
    content = json.loads(chrome.read_text("utf-8"))
    check_rules(content)
    assert content["otherData"]["partial"] is True
    assert content["otherData"]["heading"].startswith("cached: 3 requests in 3 steps")
    assert [e["name"] for e in content["traceEvents"] if e["ph"] == "X" and e["pid"] == 1] == [
        "step 1",
        "step 2",
        "step 3",
    ]
    assert "partial: stopped by Ctrl-C" in out.read_text("utf-8")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"stage": "fast"}, "stage 'fast' is not known; use one of naive, "),
        ({"stage": "naive"}, "stage 'naive' has no limit --max-running; leave it out"),
        ({"stage": "padded"}, "stage 'padded' has no limit --budget; leave it out"),
        ({"max_running": 0}, "max_running is 0; it must be at least 1"),
        ({"budget": 1}, "budget is 1; it must be at least the 2 requests that may run"),
        ({"requests": 0}, "requests is 0; it must be at least 1"),
        ({"max_tokens": -1}, "max_tokens is -1; it must be at least 1"),
        ({"arrivals_rate": 0.0}, "the arrival rate is 0; it must be at least 0.001"),
        ({"arrivals_rate": float("nan")}, "the arrival rate is nan; it must be"),
        ({"by": "token"}, "the picture by 'token' is not known; use step or time"),
        ({"out": Path("out.gif")}, "out.gif must end in one of .png, .svg, .pdf"),
        ({"chrome": Path("out.png")}, "out.png must end in one of .json"),
        ({"chrome": Path("nowhere") / "out.json"}, "there is no folder nowhere"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(changes: dict[str, Any], message: str):
    with pytest.raises(InputError) as error:
        command("no such model", **changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_each_stage_gets_the_limits_it_knows():
    assert pick_limits("naive", None, None) == {}
    assert pick_limits("chunked", None, None) == {"chunk": 128}
    assert pick_limits("padded", 3, None) == {"max_running": 3}
    assert pick_limits("continuous", None, 16) == {"max_running": 4, "budget": 16}


def test_prompts_and_arrivals(real_weights: Path):
    from minillm.config import Config
    from minillm.tokenizer import Tokenizer

    tokenizer, config = Tokenizer.from_pretrained(real_weights), Config.from_folder(real_weights)
    at_once, timed = (trace.make_jobs(tokenizer, config, 40, 8, rate) for rate in (None, 5.0))
    assert {job.arrival for job in at_once} == {0.0} and not any(job.ignore_eos for job in at_once)
    arrivals = [job.arrival for job in timed]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0.0 and 4 < arrivals[-1] < 16  # 39 gaps of 0.2 s on average
    assert timed == trace.make_jobs(tokenizer, config, 40, 8, 5.0)
    with pytest.raises(InputError, match="requests is 73; there are 60 prompts short enough for a picture"):
        trace.make_jobs(tokenizer, config, 73, 8, None)


def test_the_command_on_real_weights(real_weights: Path, tmp_path: Path):
    chrome = tmp_path / "out.json"
    changes = {"requests": 2, "max_running": None, "budget": 64, "max_tokens": 2, "dtype": "float32"}
    status, shown = command(str(real_weights), chrome=chrome, arrivals_rate=1e6, **changes)
    assert status == 0 and "continuous: 2 requests in" in shown
    check_rules(json.loads(chrome.read_text("utf-8")))
