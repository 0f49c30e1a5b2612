"""Gates that every lesson passes: form, figures with words, links, builds without solutions, notebooks that agree."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

from minillm.bench import results
from minillm.bench.readme import README, results_file
from minillm.lab.build import INDEX, LESSONS, ROOT, agree, execute, index, solutions, solved, sources, student

SOURCES = sources()
NAMES = [source.stem for source in SOURCES]
SECTIONS = ("Predict", "Build", "Measure", "Explain", "Break it", "Recap", "Exercises", "References")
each = pytest.mark.parametrize("source", SOURCES, ids=NAMES)


def text_of(source: Path) -> str:
    return "\n\n".join(cell.source for cell in solved(source).cells if cell.cell_type == "markdown")


def executed(source: Path):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


# ---- form


@each
def test_headings_are_in_order(source: Path):
    levels = [len(found) for found in re.findall(r"^(#+) ", text_of(source), re.MULTILINE)]
    assert levels[0] == 1 and levels.count(1) == 1, "one title, first"
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False)), "a level is skipped"


@each
def test_every_section_is_there(source: Path):
    titles = re.findall(r"^## (.+)$", text_of(source), re.MULTILINE)
    for section in SECTIONS:
        assert any(title.startswith(section) for title in titles), section


@each
def test_it_says_for_whom_and_how_long(source: Path):
    text = text_of(source).lower()
    for words in ("objectives", "prerequisites", "minutes", "hardware", "one change"):
        assert words in text, words
    exercises = text_of(source).split("\n## Exercises", 1)[1]
    assert "difficulty" in exercises.lower() and "importance" in exercises.lower()


@each
def test_it_predicts_checks_reveals_and_asks(source: Path):
    code = "\n".join(cell.source for cell in solved(source).cells if cell.cell_type == "code")
    number = source.name[:2]
    predicted = set(re.findall(r'lab\.predict\("([\w.]+)", None\)', code))
    revealed = set(re.findall(r'lab\.reveal\("([\w.]+)"', code))
    assert predicted and predicted == revealed
    assert all(name.startswith(f"{number}.") for name in predicted)
    assert f'lab.start("{number}")' in code and f'lab.check("{number}"' in code and f'lab.answer("{number}.' in code
    assert code.index("lab.predict(") < code.index("lab.reveal(")


@each
def test_three_hints_and_an_explanation(source: Path):
    text = text_of(source)
    assert text.count("<details>") == text.count("</details>") >= 3
    assert all(f"Hint {n}" in text for n in (1, 2, 3)) and "<!-- BEGIN SOLUTION -->" in text


@each
def test_links_lead_somewhere(source: Path):
    for link in re.findall(r"\]\(([^)#\s]+)", text_of(source)):
        if link.startswith("https://colab.research.google.com/github/"):
            assert link.endswith(f"/lessons/{source.stem}.ipynb"), link
        elif not link.startswith("https://"):
            assert (LESSONS / link).exists(), link


@each
def test_images_in_the_text_have_alt_text(source: Path):
    text = text_of(source)
    assert all(words.strip() for words in re.findall(r"!\[([^\]]*)\]\(", text))
    assert "<img" not in text


# ---- builds


@each
def test_the_students_notebook_holds_no_line_of_a_solution(source: Path):
    release = "\n".join(cell.source for cell in student(source).cells)
    given = {line.strip() for line in release.splitlines()}
    for line in solutions(source):
        assert line not in given, line
    assert "BEGIN SOLUTION" not in release


@each
def test_the_students_notebook_differs_only_in_the_marked_places(source: Path):
    theirs = {cell["id"]: cell for cell in student(source).cells}
    for cell in solved(source).cells:
        if "BEGIN SOLUTION" in cell.source:
            continue
        assert theirs[cell["id"]].source == cell.source
    ids = [cell["id"] for cell in solved(source).cells]
    assert list(theirs) == [name for name in ids if name in theirs]


@each
def test_ids_are_unique_and_the_same_in_every_build(source: Path):
    ids = [cell["id"] for cell in solved(source).cells]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-zA-Z0-9-]{1,64}", name) for name in ids)
    assert ids == [cell["id"] for cell in solved(source).cells]


# ---- the executed notebooks


@each
def test_the_notebook_is_that_of_the_source(source: Path):
    assert (why := agree(source, executed(source))) is None, f"{why}; run `make lessons`"


@each
def test_the_notebook_ran_in_order_and_without_an_error(source: Path):
    counts = [cell.execution_count for cell in executed(source).cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    for cell in executed(source).cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error", cell["id"]
            assert output.get("name") != "stderr", (cell["id"], output.get("text"))


@each
def test_every_figure_has_words_beside_it(source: Path):
    figures = 0
    for cell in executed(source).cells:
        pictures = [o for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
        printed = "".join(o.get("text", "") for o in cell.get("outputs", []) if o.output_type == "stream")
        for picture in pictures:
            words = picture.metadata["image/png"]["alt"]
            assert len(words.split()) >= 5 and f"In words: {words}" in printed
            figures += 1
    assert figures


@each
def test_the_notebook_speaks_of_no_machine_path(source: Path):
    text = source.with_suffix(".ipynb").read_text("utf-8")
    assert not re.search(r"/(work|opt|root|tmp|home)/", text)


# ---- around the lessons


def test_the_index_is_made_from_the_lessons_and_the_results():
    taken = results.load(results_file(README.read_text("utf-8")))["lessons"]["seconds"]
    text = INDEX.read_text("utf-8")
    assert index(text, taken) == text
    assert taken.keys() == set(NAMES)


def test_every_badge_names_the_tag_of_this_version():
    import minillm

    for source in SOURCES:
        [tag] = re.findall(r"colab\.research\.google\.com/github/minillm/minillm/blob/v([^/]+)/", text_of(source))
        assert tag == minillm.__version__, source.name


@pytest.mark.parametrize("here", [True, False])
def test_the_package_is_installed_where_there_is_none(here: bool, monkeypatch: pytest.MonkeyPatch):
    """As in Colab: from the tag of this version, by commands that exist, before the first import."""
    import minillm

    ran: list[list[str]] = []
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if here else None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command))
    for source in SOURCES:
        cells = [cell for cell in student(source).cells if cell.cell_type == "code"]
        assert cells[0]["id"] == f"{source.name[:2]}-install" and "import minillm" not in cells[0].source
        exec(cells[0].source, {})
    if here:
        assert ran == []
        return
    clone, install, weights = ran[:3]
    assert f"v{minillm.__version__}" in clone and "https://github.com/minillm/minillm" in clone
    assert install[1:4] == ["-m", "pip", "install"] and install[-1] == f"./{clone[-1]}[lessons]"
    assert weights[1:] == ["-m", "minillm", "weights"] and sys.path[0] == clone[-1]
    assert "lessons" in tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


def test_the_devcontainer_makes_what_the_makefile_has():
    content = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    makefile = (ROOT / "Makefile").read_text("utf-8").replace("$(VENV)", ".venv")
    command, *targets = content["postCreateCommand"].split()
    assert command == "make" and targets
    assert all(re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) for target in targets)


# ---- run from top to bottom


@each
def test_it_runs_from_top_to_bottom(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_weights: Path):
    monkeypatch.setenv("MINILLM_SIZE", "ci")
    monkeypatch.setenv("MINILLM_NOTES", str(tmp_path / "notes.json"))
    execute(solved(source), ROOT / "lessons", seconds=300)
