"""The README agrees with what it speaks of: the stored results, the files, the commands."""

import re
from pathlib import Path

from minillm.bench import results
from minillm.bench.readme import README, ROOT, filled, results_file
from minillm.stages import STAGES

TEXT = README.read_text("utf-8")


def test_the_tables_are_those_of_the_results_file() -> None:
    assert filled(TEXT, results_file(TEXT)) == TEXT


def test_no_stored_result_is_partial_or_without_its_machine() -> None:
    for name, section in results.load(results_file(TEXT)).items():
        assert not section["partial"], name
        assert section["about"]["machine"]["cpu"] and section["about"]["date"], name


def test_every_link_into_the_repository_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_every_command_shown_exists() -> None:
    from minillm.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    shown = set(re.findall(r"^minillm ([a-z]+)", TEXT, re.MULTILINE)) | set(re.findall(r"`minillm ([a-z]+)", TEXT))
    assert shown and shown <= known
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^make ([a-z-]+)", TEXT, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)", TEXT))
    assert targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_every_stage_has_a_row_in_both_tables() -> None:
    for stage in STAGES:
        assert f"[{stage}](minillm/stages/{stage}.py)" in TEXT
        assert re.search(rf"^\| {stage}( \*)? \| [\d.]+ \|", TEXT, re.MULTILINE)


def test_python_in_the_readme_names_what_exists() -> None:
    """Only the names: the examples run on the real weights elsewhere."""
    import minillm

    for name in re.findall(r"^from minillm import (.+)$", TEXT, re.MULTILINE):
        assert all(hasattr(minillm, part.strip()) for part in name.split(","))


def test_the_project_speaks_of_itself_alone() -> None:
    """No path of the machine it was made on, in any file that is kept."""
    for path in [*ROOT.glob("*.md"), *ROOT.glob("minillm/**/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("results/*")]:
        if path.suffix in (".md", ".py", ".json", ".txt", ".log") and path != Path(__file__):
            assert not re.search(r"/(work|opt|root)/", path.read_text("utf-8")), path
