"""The instructor's guide: plans with all sections, tables that add up, quotes that are what the checks really say,
commands and links that exist."""

import importlib.util
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest
import typer
from mutants import cells

from minillm import doctor
from minillm.bench import results
from minillm.cli import app
from minillm.lab.build import INDEX, LESSONS, ROOT, sources
from minillm.lab.checking import LESSONS as NUMBERS
from minillm.lab.checking import properties, run_checks
from minillm.lab.work import from_cells

GUIDE = LESSONS / "instructor"
PAGES = [GUIDE / name for name in ("README.md", "syllabi.md", "lab-machines.md")]
PLANS = {number: GUIDE / "plans" / f"{number}.md" for number in NUMBERS}
SECTIONS = (
    "Outcome",
    "Minutes",
    "Before class",
    "Opening question",
    "On the board",
    "Live coding",
    "Misconceptions",
    "Discussion",
    "When late",
    "Questions and problems",
)
each = pytest.mark.parametrize("number", NUMBERS)
every_page = pytest.mark.parametrize("page", [*PAGES, *PLANS.values()], ids=lambda page: page.stem)


@cache
def read(page: Path) -> str:
    return page.read_text("utf-8")


@cache
def section(page: Path, title: str) -> str:
    """What stands under a heading of the second or third level."""
    [text] = re.findall(rf"^##+ {re.escape(title)}\n(.*?)(?=^## |\Z)", read(page), flags=re.M | re.S)
    return text


@cache
def table(page: Path, title: str, which: int = 0) -> tuple[tuple[str, ...], ...]:
    """The rows of a section's table, its heading first, each cell without blanks and asterisks."""
    found = re.findall(r"(?:^\|.*\n)+", section(page, title), flags=re.M)[which]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in found.splitlines()]
    return tuple(tuple(row) for i, row in enumerate(rows) if i != 1)


def adds_up(rows: tuple[tuple[str, ...], ...], columns: range) -> None:
    *parts, last = rows[1:]
    for column in columns:
        assert sum(int(row[column]) for row in parts) == int(last[column]), f"{rows[0][column]}: {last}"


@cache
def minutes() -> dict[str, int]:
    """Of each lesson, as the index says."""
    found = re.findall(r"^\| \[(\d\d) .*\| (\d+) minutes \| [^|]*\|$", read(INDEX), flags=re.M)
    assert [number for number, _ in found] == list(NUMBERS)
    return {number: int(n) for number, n in found}


@cache
def in_class(number: str) -> tuple[int, int, int]:
    """Minutes of talk, work and discussion in a plan."""
    talk, work, discussion = table(PLANS[number], "Minutes")[-1][1:]
    return int(talk), int(work), int(discussion)


# ---- plans


@each
def test_a_plan_has_every_section_in_order_and_is_no_book(number: str):
    text = read(PLANS[number])
    assert tuple(re.findall(r"^## (.+)$", text, flags=re.M)) == SECTIONS
    assert 80 <= len(text.splitlines()) <= 120
    [title] = re.findall(r"^# Plan \d\d · (.+)$", text, flags=re.M)
    assert f"[{number} · {title}]" in read(INDEX)


@each
def test_a_plans_minutes_add_up_and_agree_with_the_index(number: str):
    rows = table(PLANS[number], "Minutes")
    assert rows[0] == ("part", "talk", "work", "discussion")
    adds_up(rows, range(1, 4))
    [(home, whole)] = re.findall(r"^At home: (\d+) of the lesson's (\d+) minutes", read(PLANS[number]), flags=re.M)
    assert int(whole) == minutes()[number] == in_class(number)[1] + int(home)


@each
def test_a_plan_names_every_objective_of_its_lesson(number: str):
    [source] = LESSONS.glob(f"{number}_*.py")
    bullets = re.search(r"\*\*Objectives\.\*\*.*?\n((?:# .*\n|#\n)+)", source.read_text("utf-8"))
    assert bullets
    count = len(re.findall(r"^# - (?!\*\*)", bullets[1].split("# **")[0], flags=re.M))
    named = re.findall(r"\b(\d\d\.\d)\b", section(PLANS[number], "Outcome"))
    assert named == [f"{number}.{k}" for k in range(1, count + 1)]


@each
def test_a_plan_counts_the_properties_as_the_check_does(number: str):
    [said] = re.findall(r"\((\d+) properties\)", read(PLANS[number]))
    assert int(said) == len(properties(number))


@each
def test_the_live_mistake_is_caught_in_the_words_that_the_plan_quotes(number: str):
    text = section(PLANS[number], "Live coding")
    [code], [quote] = (re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.M | re.S) for kind in ("python", "text"))
    [function] = re.findall(r"^(?:async )?def (\w+)", code, flags=re.M)
    assert f'lab.check("{number}", "{function}")' in text
    path, right = cells(number)
    report = run_checks(number, from_cells(path, [*right, (999, code)]), [function])
    lines = report.text().splitlines()
    assert "WRONG" in quote
    for line in quote.splitlines():
        assert line in lines, report.text()


# Predictions whose answer is the same on every machine: what a teacher must know before class.
COUNTED = {
    "01": {"english_to_japanese": "{}", "file_megabytes": "{}", "embedding_percent": "{}"},
    "02": {"mlp_share": "{}", "scores": "{:,}"},
    "03": {"tokens_computed": "{:,}"},
    "04": {"kib_llama2": "{}", "tokens_naive": "{}", "tokens_cached": "{}"},
    "05": {"scores_of_seven": "{}", "all_steps_percent": "{}"},
    "06": {"refill_pads": "{}"},
    "07": {"tokens": "{}", "scores": "{:,}", "break_even": "{:,}"},
    "08": {"makespan_ratio": "{}", "wait_ratio": "{}", "equal_ratio": "{}", "join_steps": "{}"},
    "09": {"waste_regions": "{}", "waste_16": "{}", "waste_13": "{}", "at_once": "{}", "again": "{}"},
    "10": {"second_tokens": "{}", "third_turn": "{}", "sample_blocks": "{}", "copies": "{}"},
    "11": {
        "prefill_skipped": "{}",
        "decode_skipped": "{}",
        "scratch": "{:,}",
        "intensity": "{}",
        "prefill_ratio": "{}",
    },
    "12": {"launches": "{:,}", "more_rows": "{}", "padding": "{}", "thrown": "{}", "floor": "{}"},
    "13": {"bytes": "{}", "p99": "{}", "good": "{}", "two": "{}"},
}


@pytest.mark.parametrize("number", COUNTED)
def test_the_counters_of_a_plan_are_those_of_the_executed_notebook(number: str):
    [path] = LESSONS.glob(f"{number}_*.ipynb")
    printed = "\n".join(
        output.get("text", "") for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])
    )
    known = section(PLANS[number], "Before class")
    for name, form in COUNTED[number].items():
        [found] = set(re.findall(rf"^{number}\.{name}: measured ([\d.]+);", printed, flags=re.M))
        value = form.format(int(found) if "," in form else found)
        assert re.search(rf"(?<![\d.,]){re.escape(value)}(?![\d]|[.,]\d)", known), f"{name} is {value}"


@each
def test_a_plan_says_what_to_cut_and_brings_questions(number: str):
    late = section(PLANS[number], "When late")
    assert re.findall(r"^- \*\*(\w+)\*\*:", late, flags=re.M) == ["First", "Second", "Never"]
    assert len(re.findall(r"^- \*", section(PLANS[number], "Misconceptions"), flags=re.M)) >= 4
    assert len(re.findall(r"^- \*.+\?\*", section(PLANS[number], "Discussion").replace("\n ", ""), flags=re.M)) >= 2
    problems = section(PLANS[number], "Questions and problems")
    covers = {"ps1": NUMBERS[:3], "ps2": NUMBERS[3:6], "ps3": NUMBERS[6:9], "ps4": NUMBERS[9:11], "ps5": NUMBERS[11:]}
    [named] = re.findall(r"Problem set: (ps\d)", problems)
    assert number in covers[named] and f"`{number}.why`" in problems
    bank = tomllib.loads((GUIDE / "questions" / f"{number}.toml").read_text("utf-8"))["question"]
    assert set(re.findall(r"\bq\d\d\.\d+", problems)) == {question["id"] for question in bank}


# ---- syllabi

SYLLABI = GUIDE / "syllabi.md"
PROBLEM_SETS = {
    f"p{path.name[2]}": path for path in sorted((LESSONS / "problems").glob("ps[0-9]_*.py"))
}  # {"p1": its source}


def lessons_in(cell: str) -> list[str]:
    return re.findall(r"\b\d\d\b", cell)


@cache
def problem_minutes(name: str) -> int:
    """What a problem set says of itself: in a sentence, or as the sum of its table."""
    text = PROBLEM_SETS[name].read_text("utf-8")
    found = re.search(r"Minutes:?\*\*:? about (\d+)|^# \| together \|.*\| (\d+) \|$", text, flags=re.M)
    assert found, f"{name} says no minutes"
    return int(found[1] or found[2])


def test_the_day_fits_into_six_hours_to_the_quarter():
    rows = table(SYLLABI, "One day")
    adds_up(rows, range(1, 2))
    starts = [60 * int(row[0][:2]) + int(row[0][3:]) for row in rows[1:-1]]
    lengths = [int(row[1]) for row in rows[1:-1]]
    assert all(start % 15 == 0 for start in starts) and starts[-1] - starts[0] == sum(lengths) == 360
    assert all(a + n == b for a, n, b in zip(starts, lengths, starts[1:], strict=False))
    taken = {
        number: sum(n for n, row in zip(lengths, rows[1:], strict=False) if row[2] == number) for number in NUMBERS
    }
    sums = table(SYLLABI, "One day", 1)
    adds_up(sums, range(1, 4))
    assert {row[0]: int(row[2]) for row in sums[1:-1]} == {number: n for number, n in taken.items() if n}
    for number, whole, here, home in sums[1:-1]:
        assert int(whole) == minutes()[number] == int(here) + int(home)


def test_four_weeks_add_up():
    rows = table(SYLLABI, "4 weeks")
    adds_up(rows, range(3, 7))
    given = []
    for _, _, lessons, whole, notebook, home, problems, due in rows[1:-1]:
        assert (int(whole), int(notebook)) == (150, 90)
        assert int(notebook) + int(home) == sum(minutes()[number] for number in lessons_in(lessons))
        assert int(problems) == sum(problem_minutes(f"p{k}") for k in re.findall(r"ps(\d)", due))
        given += lessons_in(lessons)
    assert given == list(NUMBERS[:11])


def test_ten_weeks_add_up_and_are_the_plans():
    rows = table(SYLLABI, "10 weeks")
    adds_up(rows, range(2, 8))
    given = []
    for week, lessons, lecture, lab, other, home, problems, _, due in rows[1:-1]:
        of = [in_class(number) for number in lessons_in(lessons)]
        assert int(lecture) == sum(talk + discussion for talk, _, discussion in of)
        assert int(lab) == sum(work for _, work, _ in of)
        assert int(home) == sum(minutes()[number] for number in lessons_in(lessons)) - int(lab)
        assert int(problems) == sum(problem_minutes(f"p{k}") for k in re.findall(r"ps(\d)", due))
        assert week == "after" or (int(lecture), int(lab) + int(other)) == (90, 120)
        given += lessons_in(lessons)
    assert given == list(NUMBERS)


def test_problem_sets_take_as_long_as_they_say_themselves():
    rows = table(SYLLABI, "Problem sets")
    adds_up(rows, range(3, 4))
    assert [(f"p{row[0][2]}", int(row[3])) for row in rows[1:-1]] == [(k, problem_minutes(k)) for k in PROBLEM_SETS]


def test_the_overview_of_the_syllabi_is_their_sum():
    text = read(SYLLABI)
    four, ten = table(SYLLABI, "4 weeks")[-1], table(SYLLABI, "10 weeks")[-1]
    for anchor, there, home in (
        ("#4-weeks", int(four[3]), int(four[5]) + int(four[6])),
        ("#10-weeks", sum(map(int, ten[2:5])), sum(map(int, ten[5:8]))),
    ):
        [(hours, at_home)] = re.findall(rf"{anchor}\) \| ([\d.]+) h \| ([\d.]+) h", text)
        assert float(hours) == there / 60 and abs(float(at_home) - home / 60) < 0.06


# ---- machines


def test_the_minutes_of_machines_follow_from_the_stored_run():
    """Within a half: the lessons may be run anew. A table that is further off is out of date."""
    page = GUIDE / "lab-machines.md"
    rows = table(page, "Minutes of the machine")
    stored = results.load(ROOT / "results" / "amd-epyc-2-cores.json")["lessons"]["seconds"]
    assert [row[0] for row in rows[1:-1]] == list(NUMBERS)
    speeds = {2: ({"copy_gb_s": 20, "float32_gflop_s": 150}, "float32")}
    speeds |= {3: ({"copy_gb_s": 60, "bfloat16_gflop_s": 2000}, "bfloat16")}
    assert "20 GB/s" in rows[0][2] and "150 GFLOP/s" in rows[0][2]
    assert "60 GB/s" in rows[0][3] and "2,000 GFLOP/s" in rows[0][3]
    for row, (name, run) in zip(rows[1:-1], stored.items(), strict=True):
        ranges = {1: [run["seconds"]] * 2, 4: [run["seconds"], 2 * run["seconds"]]}
        ranges |= {column: doctor.lesson_seconds(ROOT / "results", *of)[name] for column, of in speeds.items()}
        for column, expected in ranges.items():
            said = [float(n) for n in row[column].split(" to ")]
            for n, seconds in zip((said[0], said[-1]), expected, strict=True):
                assert abs(n - seconds / 60) <= 0.5 * seconds / 60 + 0.06, (name, column)


# ---- the eight steps


def test_there_are_eight_steps_and_each_says_what_to_do_and_what_if_not():
    titles = re.findall(r"^### (\d)\. ", read(GUIDE / "README.md"), flags=re.M)
    assert titles == [str(k) for k in range(1, 9)]
    steps = re.split(r"^### \d\. .*$", section(GUIDE / "README.md", "Adopt it in eight steps"), flags=re.M)[1:]
    for step in steps:
        assert re.findall(r"^- \*\*(.+?)\*\*:", step, flags=re.M) == ["Do", "You see", "Takes", "If it fails"]


def test_the_course_has_as_many_assignments_as_the_guide_says():
    [said] = re.findall(r"(\d+) assignments", read(GUIDE / "README.md"))
    assert int(said) == len(sources()) + len(PROBLEM_SETS)


# ---- commands and links


def spans(page: Path) -> list[str]:
    """What stands in `code`, and the lines of blocks that are no Python and no report."""
    text = read(page)
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.M | re.S)
    inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return [*inline, *(line for block in blocks for line in block.splitlines())]


@every_page
def test_every_command_exists(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.M))
    package = "\n".join(path.read_text("utf-8") for path in (ROOT / "minillm").rglob("*.py"))
    for span in spans(page):
        if found := re.match(r"make ([a-z-]+)", span):
            assert found[1] in targets, span
        if found := re.search(r"python -m (minillm[\w.]*)", span):
            assert importlib.util.find_spec(found[1]), span
        for variable in re.findall(r"MINILLM_\w+", span):
            assert f'"{variable}"' in package, span
        if span.startswith("minillm "):
            check_command(span)


def check_command(span: str) -> None:
    """Every word up to the first that is no command must be one, and every option be known to it."""
    command: Any = typer.main.get_command(app)
    words = [word for word in span.split()[1:] if word != "COMMAND"]
    while hasattr(command, "commands") and words:
        name = words.pop(0)
        assert name in command.commands, span
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    for word in words:
        assert not word.startswith("--") or word.split("=")[0] in options | {"--help"}, span


@every_page
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert path.startswith("https://") or target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), flags=re.M)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs, link


@every_page
def test_a_page_speaks_of_no_machine_path(page: Path):
    assert not re.search(r"/(work|opt|root|tmp|home)/", read(page))
