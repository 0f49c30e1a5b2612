"""The checks of the lessons are checked: right solutions pass, and nothing else does."""

import nbformat
import pytest
from mutants import lessons, outcome, planted, reference

from minillm.lab.build import by_name, student
from minillm.lab.checking import properties, run_checks
from minillm.lab.work import from_file

# every eighth: all of them take half an hour, and are `make mutants`
MUTANTS = [(lesson, mutant) for lesson in lessons() for mutant in planted(lesson)[::8]]


@pytest.mark.parametrize("lesson", lessons())
def test_the_reference_has_every_property(lesson: str):
    report = run_checks(lesson, reference(lesson))
    assert report.passed, report.text()


@pytest.mark.parametrize("lesson", lessons())
def test_the_bare_skeleton_has_none(lesson: str, tmp_path):
    """What a student is handed fails every check, and is told that it is not written yet."""
    source = by_name()[lesson]
    path = tmp_path / f"{source.stem}.ipynb"
    nbformat.write(student(source), path)
    report = run_checks(lesson, from_file(path))
    assert report.findings
    for finding in report.findings:
        assert finding.wrong is not None and "not written yet" in finding.wrong, finding


@pytest.mark.parametrize("lesson, mutant", MUTANTS, ids=[f"{lesson}: {m.name}" for lesson, m in MUTANTS])
def test_a_wrong_solution_is_caught_with_the_intended_words_and_nobody_else_blamed(lesson, mutant):
    found = outcome(lesson, mutant)
    assert not found.survived, found.report


@pytest.mark.parametrize("lesson", lessons())
def test_there_are_enough_wrong_solutions(lesson: str):
    names = [mutant.name for mutant in planted(lesson)]
    assert len(set(names)) == len(names) >= (5 if lesson >= "02" else 3)


@pytest.mark.parametrize("lesson", lessons())
def test_every_function_has_a_property_and_every_property_a_hint(lesson: str):
    tasks = {cell.metadata["task"] for cell in student_cells(lesson) if "task" in cell.metadata}
    checked = {prop.function for prop in properties(lesson)}
    assert {task.removeprefix(f"{lesson}.") for task in tasks} == checked
    assert all(prop.hint.strip() and prop.says.strip() for prop in properties(lesson))


def student_cells(lesson: str):
    return student(by_name()[lesson]).cells
