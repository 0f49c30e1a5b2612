"""The table of objectives: true to the lessons, complete, and its guard sees what is wrong."""

import re
from dataclasses import replace

import pytest

from minillm.course import objectives
from minillm.course.objectives import FOLDER, TABLE, bank, faults, markdown, read, told_by
from minillm.errors import InputError
from minillm.lab.build import sources

QUESTIONS = bank()
ROWS = read(questions=QUESTIONS)


def test_everything_fits_together():
    assert faults(ROWS, QUESTIONS) == []


def test_the_committed_table_is_what_the_code_makes():
    assert TABLE.read_text("utf-8") == markdown(ROWS, QUESTIONS), "run python -m minillm.course.objectives"


def test_each_lesson_has_its_objectives():
    for source in sources():
        found = told_by(source)
        assert 4 <= len(found) <= 5 and all(len(text) > 30 and "\n" not in text for text in found), source.name
    assert told_by(sources()[4])[1] == (
        'compute what a token costs in memory, and find out where a published "16 KB" comes from'
    )


def changed(name: str, **fields):
    return [replace(row, **fields) if row.id == name else row for row in ROWS]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (changed("04.2", text="something else"), "04.2: the lesson says 'compute what a token costs"),
        (changed("04.2", checks=()), "04.2 has evidence of ['questions']"),
        (changed("04.2", checks=()), "04.kv_bytes_per_token (checks) shows no objective"),
        (changed("04.2", checks=("04.kv_bytes_per_token", "04.nobody")), "04.nobody (checks) does not exist"),
        (changed("03.2", problems=("p9.verify",)), "p9.verify (problems) does not exist"),
        (changed("03.2", problems=()), "p2.verify (problems) shows no objective"),
        (changed("03.3", written=("03.whose",)), "03.why (written) shows no objective"),
        (changed("03.3", questions=()), "03.3 has evidence of ['written']"),
        (changed("04.2", one_kind="because"), "04.2 has evidence of ['checks', 'questions'], so one_kind"),
        (ROWS[:-1], "13.5 is not in the table"),
        ([*ROWS, replace(ROWS[0], id="00.9")], "00.9: no lesson has this objective"),
    ],
)
def test_what_is_wrong_is_named(rows, words):
    assert any(told.startswith(words) or words in told for told in faults(rows, QUESTIONS))


def test_one_kind_of_evidence_may_do_with_a_reason():
    rows = changed("04.2", questions=(), one_kind="its sum is the whole of it")
    assert not any(told.startswith("04.2") for told in faults(rows, QUESTIONS))
    assert "its sum is the whole of it" in markdown(rows, QUESTIONS)


def test_a_question_names_an_objective_that_there_is():
    lost = replace(QUESTIONS[0], objectives=("00.9",))
    assert f"{lost.id}: there is no objective 00.9" in faults(ROWS, [lost, *QUESTIONS[1:]])


@pytest.mark.parametrize("text", ["[", '["00.1"]\ntext = "a"\nwhy = "b"', '["00.1"]\nchecks = []', "a = 1"])
def test_a_file_that_is_not_a_table_is_refused(tmp_path, text):
    (tmp_path / "o.toml").write_text(text)
    with pytest.raises(InputError, match="o.toml"):
        read(tmp_path / "o.toml", [])


def test_a_source_without_objectives_is_refused(tmp_path):
    (tmp_path / "14_more.py").write_text("# %% [markdown]\n# # 14\n")
    with pytest.raises(InputError, match="Objectives"):
        told_by(tmp_path / "14_more.py")


def test_main_writes_the_table_and_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(objectives, "TABLE", tmp_path / "objectives.md")
    assert objectives.main() == 0
    assert (tmp_path / "objectives.md").read_text("utf-8") == TABLE.read_text("utf-8")
    assert "63 objectives" in capsys.readouterr().out


# ---- rubrics of the written answers


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem[:2])
def test_each_written_answer_of_a_lesson_has_a_rubric(source):
    lesson = source.stem[:2]
    text = (FOLDER / "rubrics" / f"{lesson}.md").read_text("utf-8")
    assert f"`{lesson}.why`" in text.splitlines()[0]
    assert sum(float(points) for points in re.findall(r"^\| ([\d.]+) \| \w", text, re.M)) == 3
    given = re.findall(r"^\*\*(Excellent|Middling|Wrong): ([\d.]+) points?\.\*\*", text, re.M)
    assert [name for name, _ in given] == ["Excellent", "Middling", "Wrong"]
    assert 3 == float(given[0][1]) > float(given[1][1]) > float(given[2][1])
    first, *others = re.search(r"Objectives? (.+?)\.\n", text)[1].split(" ")
    named = [first, *(word for word in others if "." in word)]
    if "to" in others:
        named = [f"{lesson}.{k}" for k in range(int(named[0][3:]), int(named[-1][3:]) + 1)]
    shown = {row.id for row in ROWS if f"{lesson}.why" in row.written}
    assert set(named) <= shown, "the rubric names an objective for which the table does not name the answer"
