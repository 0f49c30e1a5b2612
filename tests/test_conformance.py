"""`minillm check --engine`: a right engine reaches every level; a wrong one fails first where it should, in words."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from minillm.bench.workload import QUICK, random_workload
from minillm.cli import app
from minillm.errors import InputError
from minillm.lab import conformance, conformance_child, conformance_speed
from minillm.lab.conformance import (
    LEAST_SPEED,
    LEVELS,
    SECONDS,
    SIGNATURES,
    Finding,
    Report,
    check_engine,
    engine_command,
)
from minillm.lab.conformance_child import findings, names_of
from minillm.lab.conformance_levels import MOST_PUSHED
from minillm.lab.conformance_source import PLAIN, load
from minillm.lab.conformance_speed import measure
from minillm.lab.conformance_world import World
from minillm.lab.seeds import variant
from minillm.lab.work import Wrong
from minillm.weights import load as load_weights

BRIEF = Path(__file__).parents[1] / "lessons" / "instructor" / "final-project.md"
ENGINES = Path(__file__).parent / "engines"
RIGHT, WRONG = str(ENGINES / "right.py"), str(ENGINES / "wrong.py")

# engine: the level at which it fails first, and words of the reason
PLANTED = {
    "OffByOne": (1, "new token", "and must be", "counted from 0"),
    "LastOneNeverRead": (1, "none right"),
    "ReturnsThePrompt": (1, "begins with the prompt"),
    "ChangesThePrompt": (1, "prompt 1 of 1 was changed", "list(prompt)"),
    "GivesTensors": (1, "generate returned tensor(", "use .tolist()"),
    "GivesOneList": (1, "list of int, and not a list of lists", SIGNATURES["generate"]),
    "TakesNoSetup": (1, "TypeError", "Engine(setup: Setup)"),
    "GoesOnTooLong": (1, "25 new tokens", "max_tokens is 24"),
    "KeepsOldTexts": (1, "text 2 of 5"),
    "CallsOurs": (1, "minillm.engine", "not your engine", "Ours(self.model).generate"),
    "CallsAStage": (1, "minillm.stages.cached", "not your engine", "of generate"),
    "Leaks": (2, "alone it is right", "neighbours"),
    "TakesAsManyAsMayRun": (2, "3 texts for 9 prompts"),
    "Crashes": (2, "ValueError", "of admit: torch.tensor("),
    "Hangs": (2, "took longer than"),
    "IgnoresTheSeed": (3, "seeds 1 and 2 gave the same text", "uniform(seed, 0,"),
    "DrawsFromOneStream": (3, "seed 1", "the first 1 right"),
    "ForgetsTopP": (3, "top_p 0.7"),
    "ForgetsEos": (4, "text 1 of 4", "goes on after token", "ends a text"),
    "ForgetsStopTokens": (4, "text 3 of 4", "goes on after token", "ends a text"),
    "DropsTheEnd": (4, "belongs to it"),
    "OnlyGenerates": (4, "no method add", SIGNATURES["add"]),
    "WaitsForAll": (4, "arrived before step 3", "not before request 0"),
    "GoesOnAfterAbort": (4, "had ended or was aborted"),
    "AbortsTheOthers": (4, "2 of 5 requests never end"),
    "NoReason": (4, "no reason came with it"),
    "LosesRequests": (5, "never end", "are they lost"),
    "ForgetsItsPast": (5, "request 2"),
    "Unbounded": (5, "n_slots = 31 positions are 15,872"),
    "ReservesTheWholeContext": (5, "a new engine keeps"),
    "Naive": (6, "for 100 needed ones: 6.76"),
    "Pads": (6, "1.76"),
    "CannotBeCounted": (6, "tokens_pushed"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("conformance") / "model")


def tried(world: World, spec: str, claimed: int, last: float = SECONDS) -> Report:
    """`last`: seconds for the last property."""
    source, todo = load(spec), names_of(claimed)
    found = [*findings(world, source, SECONDS, todo[:-1]), *findings(world, source, last, todo[-1:])]
    return Report(spec, claimed, None, found, source.flags)


def reasons(report: Report) -> str:
    return "\n".join(finding.wrong for finding in report.findings if finding.wrong)


# ---- engines


def test_a_right_engine_reaches_every_level_that_needs_no_weights(world):
    report = tried(world, RIGHT, 6)
    assert report.reached == 6 and report.points == 60 and not report.flags, report.text()
    assert "Reached: levels 1 to 6; 60 points of 70." in report.text()
    notes = {finding.level: finding.note for finding in report.findings}
    assert "grew by" in notes[5] and notes[6] == "1.00, counted"


def test_a_right_engine_is_short_enough_to_read():
    assert len(Path(RIGHT).read_text().splitlines()) < 100


def test_a_right_engine_reaches_them_in_a_variant_too(tmp_path, world):
    with variant(5):
        other = World(tmp_path / "model")
        assert tried(other, RIGHT, 6).reached == 6
        prompts = other.prompts(11, [5])
    assert prompts != world.prompts(11, [5])
    assert not torch.equal(other.model.embed.weight, world.model.embed.weight)


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_engine_fails_first_at_its_level_with_the_intended_words(world, name):
    level, *words = PLANTED[name]
    report = tried(world, f"{WRONG}:{name}", level, last=1 if name == "Hangs" else SECONDS)
    assert report.reached == level - 1, report.text()
    for word in words:
        assert word in reasons(report), report.text()
    assert "the check itself" not in report.text()


def test_its_own_count_is_taken_where_nothing_can_be_counted(world):
    report = tried(world, f"{WRONG}:CountsItself", 6)
    assert report.reached == 6
    assert "1.00, by the engine's own count" in report.text()


def test_what_more_of_minillm_is_imported_is_mentioned(world):
    [flag] = load(f"{WRONG}:Naive").flags
    assert flag == "wrong.py imports minillm.engine, minillm.request: what is it used for?"


def test_a_file_may_have_the_name_of_another_module(tmp_path):
    """queue.py is a good name; and of two files of one name each is itself."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "queue.py"
        path.write_text(f"WHO = {folder!r}\n\n\nclass Engine:\n    who = WHO\n")
        assert load(str(path)).factory.who == folder
    import queue

    assert queue.SimpleQueue


def test_imports_are_found_in_every_form(tmp_path):
    lines = [
        "from minillm import engine, model",
        "import minillm.stages.naive as n",
        "from minillm.cache import KVPool",
    ]
    (tmp_path / "part_of_imports.py").write_text("\n".join(lines))
    (tmp_path / "imports_much.py").write_text("import part_of_imports\nimport torch\n\n\nclass Engine:\n    pass\n")
    [flag] = load(str(tmp_path / "imports_much.py")).flags
    assert flag.startswith("part_of_imports.py imports minillm.cache, minillm.engine, minillm.stages.naive:")


def test_copied_code_is_mentioned(tmp_path):
    (tmp_path / "my_own_work.py").write_text(
        Path(RIGHT).read_text().replace("import torch\n", "import torch  # mine\n")
    )
    [flag] = load(str(tmp_path / "my_own_work.py")).flags
    assert flag == "100% of the long lines in my_own_work.py stand in minillm or its tests, word for word"


def test_the_skeleton_of_the_brief_reaches_level_2(tmp_path, world):
    [skeleton] = re.findall(r"```python\n(.*?)```", BRIEF.read_text("utf-8"), re.DOTALL)
    (tmp_path / "skeleton.py").write_text(skeleton)
    report = tried(world, str(tmp_path / "skeleton.py"), 4)
    assert report.reached == 2 and not report.flags, report.text()
    assert "add is not written yet (level 4)" in reasons(report)


def test_the_brief_says_what_the_check_does():
    brief = BRIEF.read_text("utf-8")
    for level in LEVELS:
        [row] = re.findall(rf"^\| {level.number} \| \*\*.*$", brief, re.MULTILINE)
        assert row.endswith(f"| {level.points} |")
    for says in (f"{MOST_PUSHED:.2f} tokens pushed", f"{LEAST_SPEED} x the output tokens"):
        assert says in brief
    for name in SIGNATURES:
        assert SIGNATURES[name].replace("self, ", "").replace("self)", ")").split("  #")[0] in brief
    assert all(f"`{name.removeprefix('minillm.')}`" in brief for name in PLAIN if "lab" not in name and "." in name)
    rubric = brief.split("## What is graded: 100 points")[1].split("###")[0]
    assert sum(int(points) for points in re.findall(r"^\| [^|]+ \| (\d+) \|", rubric, re.MULTILINE)) == 100


@pytest.mark.parametrize(
    "spec, words",
    [
        ("no_such_module", ["no module no_such_module"]),
        ("no_such_file.py", ["no file no_such_file.py"]),
        (f"{RIGHT}:Motor", ["no class or function Motor", "Engine(setup: Setup)"]),
        (f"{RIGHT}:", ["no class"]),
        (":Engine", ["MODULE:NAME"]),
        ("a:b:c", ["MODULE:NAME"]),
        ("SYNTAX", ["cannot be imported", "SyntaxError", "line 2"]),
        ("RAISES", ["cannot be imported", "ZeroDivisionError"]),
    ],
)
def test_an_engine_that_is_not_there_is_refused(tmp_path, spec, words):
    (tmp_path / "SYNTAX.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "RAISES.py").write_text("1 / 0\n")
    if spec in ("SYNTAX", "RAISES"):
        spec = str(tmp_path / f"{spec}.py")
    if spec.endswith(":"):
        assert load(spec).name.endswith(":Engine")  # an empty name is the usual one
        return
    with pytest.raises(InputError) as error:
        load(spec)
    assert all(word in str(error.value) for word in words), error.value


# ---- the process of its own


def test_an_engine_that_cannot_be_interrupted_is_ended_and_no_more_is_tried(monkeypatch):
    names = names_of(2)
    monkeypatch.setattr(conformance_child, "GRACE", 1.0)
    monkeypatch.setattr(conformance, "MOST_STOPPED", 1)
    monkeypatch.setattr(conformance_child, "names_of", lambda claimed: [names[3], names[0]])
    said: list[str] = []
    report = check_engine(f"{WRONG}:HangsForGood", 2, None, 3, said.append)
    ended, skipped = report.findings
    assert ended.wrong == "the engine took longer than 3 s, and could not be interrupted: it was ended"
    assert skipped.says == names[0][1] and "not tried" in skipped.wrong
    assert said[0] == f"Level 2: {names[3][1]}"


def test_a_module_that_ends_the_process_is_refused(tmp_path):
    (tmp_path / "leaves.py").write_text("import os\n\nos._exit(3)\n")
    with pytest.raises(
        InputError, match=r"leaves.py cannot be loaded: the engine ended its own process \(exit code 3\)"
    ):
        check_engine(str(tmp_path / "leaves.py"), 1, None, 5)


# ---- the command


def made(claimed: int, wrong: int | None = None) -> Report:
    """A report in which one level does not hold."""
    found = [Finding(n, says, "it is not so\nat all" if n == wrong else None) for n, says in names_of(claimed)]
    return Report("mine.py:Engine", claimed, None, found, ["mine.py imports minillm.engine: what is it used for?"])


def test_the_command_returns_1_unless_the_claimed_level_is_reached(monkeypatch, tmp_path):
    written: list[str] = []

    def run(report: Report) -> int:
        monkeypatch.setattr(conformance, "check_engine", lambda *args: report)
        return engine_command("mine", report.claimed, None, tmp_path / "mine.json", written.append)

    assert run(made(4)) == 0 and run(made(7)) == 0
    assert run(made(4, wrong=4)) == 1
    assert "level 4: requests that come, go and end, 0 of 10 points" in written[-2]
    assert "         it is not so\n         at all" in written[-2]
    assert "Reached: levels 1 to 3; 30 points of 70.\nLevel 4 is the next; level 4 was claimed." in written[-2]
    assert run(made(6, wrong=2)) == 1
    assert "Reached: level 1; 50 points of 70." in written[-2]
    assert "to look at: mine.py imports minillm.engine" in written[-2]
    file = json.loads((tmp_path / "mine.json").read_text())
    assert (file["reached"], file["points"], file["most_points"], file["claimed"]) == (1, 50, 70, 6)
    assert [level["reached"] for level in file["levels"]] == [True, False, True, True, True, True]
    assert file["findings"][2]["wrong"] == "it is not so\nat all" and file["flags"]
    assert run(made(3, wrong=1)) == 1
    assert "No level is reached yet; 20 points of 70." in written[-2]


@pytest.mark.parametrize(
    "args, words",
    [
        (["--engine", "mine", "--level", "8"], "--level is 8"),
        (["--engine", "mine", "--level", "0"], "--level is 0"),
        (["--engine", "mine", "--seed", "-1"], "--seed is -1"),
        (["--engine", "mine", "--json", "no/such/folder/x.json"], "there is no folder"),
        (["04", "--engine", "mine"], "one of the two"),
        ([], "one of the two"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(args, words):
    found = CliRunner().invoke(app, ["check", *args])
    assert found.exit_code == 2 and words in found.output, (found.output, found.exception)


def test_from_the_command_line_to_the_file_past_a_crash(tmp_path):
    path = tmp_path / "dies.json"
    args = ["--engine", f"{WRONG}:Dies", "--level", "1", "--seed", "3", "--json", str(path)]
    found = CliRunner().invoke(app, ["check", *args])
    assert found.exit_code == 1, (found.output, found.exception)
    assert "No level is reached yet; 0 points of 70." in found.output
    file = json.loads(path.read_text())
    first, second = file["findings"]
    assert first["wrong"] == "the engine's process was ended by SIGSEGV: a crash in native code, or no memory"
    assert second["wrong"] is None  # tried in a process of its own again
    assert file["seed"] == 3 and file["flags"] and file["engine"].endswith("wrong.py:Dies")


def test_the_levels_are_70_points():
    assert [level.number for level in LEVELS] == list(range(1, 8)) and sum(level.points for level in LEVELS) == 70
    assert {level for level, _ in names_of(7)} == set(range(1, 8))


# ---- speed


PRESET = replace(QUICK, small=1, small_cap=3, main=3, main_longest=70, main_cap=5, max_running=2, budget=64, rounds=2)


@pytest.fixture
def timed(world, monkeypatch):
    """The last level on the small random model: (name of the engine) to what it says, or Wrong."""
    model = load_weights(world.model and world.folder, "cpu", "float64")
    monkeypatch.setattr(conformance_speed, "BESIDE", ("continuous",))
    return lambda spec: measure(load(spec), world.folder, model, random_workload(PRESET, model.config), PRESET)


def test_speed_is_a_ratio_of_the_same_rounds(timed, monkeypatch):
    monkeypatch.setattr(conformance_speed, "LEAST_SPEED", 0.0)
    words, data = timed(RIGHT)
    assert " x continuous (" in words and words.endswith("in 2 rounds, float64")
    low, middle, high = data["ratio_min_median_max"]["continuous"]
    assert 0 < low <= middle <= high and f"{middle:.2f} x continuous ({low:.2f} to {high:.2f})" in words


def test_too_slow_an_engine_is_told_its_ratio(timed, monkeypatch):
    monkeypatch.setattr(conformance_speed, "LEAST_SPEED", 1e9)
    with pytest.raises(Wrong, match=r"it makes \d.* x continuous .*; level 7 needs 1000000000.0 x continuous"):
        timed(RIGHT)


def test_the_speed_of_wrong_texts_does_not_count(timed):
    with pytest.raises(Wrong, match="not the naive model's, so no time counts: .* tokens are not"):
        timed(f"{WRONG}:OffByOne")
    with pytest.raises(Wrong, match="request . has (.) of \\1 tokens, and the engine's reason is None"):
        timed(f"{WRONG}:NoReason")


def test_the_last_level_waits_for_right_texts(world, monkeypatch):
    monkeypatch.setattr(conformance_speed, "speed", lambda source: ("2.00 x", {"ratio": 2.0}))
    todo = [names_of(7)[0], names_of(7)[-1]]
    assert [found.note for found in findings(world, load(RIGHT), 20, todo)] == ["", "2.00 x"]
    [_, last] = findings(world, load(f"{WRONG}:LastOneNeverRead"), 20, todo)
    assert "not tried" in last.wrong
    [last] = findings(world, load(RIGHT), 20, todo[1:], failed=[4])
    assert "not tried" in last.wrong


def test_without_weights_the_last_level_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_WEIGHTS", str(tmp_path))
    with pytest.raises(Wrong, match="not tried: .*minillm weights"):
        conformance_speed.speed(load(RIGHT))
