"""A new ladder beside the stored one: relations to transformers are compared, and nothing else."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from minillm.bench import earlier, results


def section(speeds: dict[str, float], peer: float | None = 10.0) -> dict[str, Any]:
    row = {"name": earlier.MEASURE, "void": None, "output_throughput": {"median": peer}}
    other = {"name": "minillm kernels", "void": None, "output_throughput": {"median": 1e9}}
    return {
        "about": {"machine": {"cpu": "a"}, "date": "2026-01-02T03:04:05+00:00", "commit": "0123456789"},
        "model": {"name": "m"},
        "preset": {"rounds": 3},
        "sets": {"main": {"requests": 4}},
        "rows": [{"stage": stage, "void": None, "output_throughput": speed} for stage, speed in speeds.items()],
        "peers": {"set_rows": [other, row]} if peer else None,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    results.add(path, "ladder", section({"naive": 5.0, "cached": 20.0, "gone": 1.0}))
    return path


def shown(found: earlier.Comparison) -> str:
    text = io.StringIO()
    earlier.show(found, Console(file=text, width=100))
    return " ".join(text.getvalue().split())


@given(machine=st.floats(0.01, 100), cached=st.sampled_from([0.5, 0.89, 0.91, 1.0, 3.0]))
def test_a_slower_machine_is_no_slower_stage(tmp_path_factory: pytest.TempPathFactory, machine: float, cached: float):
    path = tmp_path_factory.mktemp("results") / "machine.json"
    results.add(path, "ladder", section({"naive": 5.0, "cached": 20.0, "gone": 1.0}))
    new = section({"naive": 5.0 * machine, "cached": 20.0 * machine * cached, "new": 7.0}, peer=10.0 * machine)
    found = earlier.compare(new, path)
    assert [(c.stage, c.before) for c in found.changes] == [("naive", 0.5), ("cached", 2.0)]
    assert [c.factor for c in found.changes] == pytest.approx([1.0, cached])
    assert [c.stage for c in found.slower] == (["cached"] if cached < 0.9 else [])
    assert "2026-01-02, commit 0123456" in shown(found)


@pytest.mark.parametrize(
    "where, said",
    [("model", "other model"), ("preset", "other preset"), ("sets", "other prompts"), ("about", "machine")],
)
def test_what_cannot_be_compared_is_not(path: Path, where: str, said: str):
    new = section({"naive": 5.0})
    inside = {"about": "machine", "sets": "main"}
    (new[where][inside[where]] if where in inside else new[where])["other"] = 1
    found = earlier.compare(new, path)
    assert not found.changes and said in found.why_not and "Not compared" in shown(found)


def test_texts_that_part_by_rounding_are_no_other_prompts(path: Path):
    new = section({"naive": 5.0})
    new["sets"]["main"]["output_tokens"] = 77
    assert earlier.compare(new, path).changes


def test_both_runs_need_the_peer_and_rows_that_count(path: Path):
    assert "the new run is without" in earlier.compare(section({"naive": 5.0}, peer=None), path).why_not
    void = section({"naive": 5.0, "cached": 1.0})
    void["rows"][1]["void"] = "wrong text"
    assert [c.stage for c in earlier.compare(void, path).changes] == ["naive"]
    void["peers"]["set_rows"][1]["void"] = "too few tokens"
    assert "the new run is without" in earlier.compare(void, path).why_not
    results.add(path, "ladder", section({"naive": 5.0}, peer=None))
    assert "the stored run is without" in earlier.compare(section({"naive": 5.0}), path).why_not


def test_the_first_run_has_nothing_to_be_compared_with(tmp_path: Path):
    path = tmp_path / "new.json"
    assert "holds no ladder yet" in earlier.compare(section({"naive": 1.0}), path).why_not
    path.touch()
    assert "holds no ladder yet" in earlier.compare(section({"naive": 1.0}), path).why_not
    results.add(path, "queue", {})
    assert "holds no ladder yet" in earlier.compare(section({"naive": 1.0}), path).why_not


def test_the_stored_results_of_the_project_can_be_compared():
    path = Path(__file__).parents[1] / "results" / "amd-epyc-2-cores.json"
    stored = results.load(path)["ladder"]
    found = earlier.compare(copy.deepcopy(stored), path)
    assert not found.why_not and not found.slower and len(found.changes) == len(stored["rows"])
