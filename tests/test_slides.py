"""Slides: every lesson has some, each quotation is in the lesson, nothing that a learner is to find, and all fits."""

import importlib.util
import re
import shutil

import pytest

pytest.importorskip("latex2mathml")

from minillm.course import slides as made  # noqa: E402
from minillm.course.slides import DECKS, deck, from_text, page, section  # noqa: E402
from minillm.errors import InputError  # noqa: E402
from minillm.lab.build import LESSONS, solutions, solved, sources  # noqa: E402

SOURCES = sources()
each = pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
[KV_CACHE] = LESSONS.glob("04_*.py")


@each
def test_every_lesson_has_slides_with_notes_and_titles(source):
    slides = deck(source.name[:2])
    assert 8 <= len(slides) <= 25
    assert slides[0].body.startswith("<h1>") and all(slide.body.startswith("<h2>") for slide in slides[1:])
    assert sum(len(slide.notes.split()) for slide in slides) >= 250
    assert "$" not in "".join(re.sub(r"<math.*?</math>|<code.*?</code>", "", slide.body) for slide in slides)
    assert "@" not in re.sub(r"<code.*?</code>", "", "".join(slide.body + slide.notes for slide in slides), flags=re.S)


@each
def test_no_answer_is_on_a_slide_or_in_its_notes(source):
    text = (DECKS / f"{source.name[:2]}.md").read_text("utf-8")
    given = {line.strip() for line in text.splitlines()}
    assert not given & set(solutions(source))


def test_each_deck_is_of_a_lesson():
    assert {path.stem for path in DECKS.glob("*.md")} == {source.name[:2] for source in SOURCES}


def test_quotations_are_the_lessons_own_words():
    assert from_text(KV_CACHE, "table", "The idea", 1, "").startswith("| step | tokens")
    assert from_text(KV_CACHE, "formula", "What it saves", 1, "").startswith("$$\\text{naive:}")
    code = from_text(KV_CACHE, "code", "One loop, not two", 1, "")
    assert code.startswith("    step 1   computed = 0") and code.rstrip().endswith(
        "the next one                      position  8"
    )
    [slide] = made.slides(KV_CACHE, "## A\n\n@table The idea\n\nNote:\nx", "04.md")
    assert slide.body.count("<tr>") == 4 and slide.notes == "<p>x</p>\n"


def test_a_section_ends_at_the_next_heading_of_its_level():
    text = "".join(cell.source for cell in section(solved(KV_CACHE), "The idea", ""))
    assert "The seven were computed three times" in text and "positions 0 1 2 3 4 5 6" in text  # and what is below it
    assert "predict(" not in text
    text = "".join(cell.source for cell in section(solved(KV_CACHE), "What it saves", ""))
    assert "The first grows with the square" in text and "You will hear of two phases" not in text


@pytest.mark.parametrize(
    "text, words",
    [
        ("## A\n\n@table What it costs\n\nNote:\nx", "no heading 'What it costs'"),
        ("## A\n\n@table What it saves 7\n\nNote:\nx", "has 1 of table; number 7"),
        ("## A\n\n@figure What it saves\n\nNote:\nx", "has 0 figures"),
        ("## A\n\n@picture What it saves\n\nNote:\nx", "@picture is not known"),
        ("## A\n\nNote:\nx\n---\n## B\n", "slide 2 has no notes"),
        ("## A\n\nNote:\n \n", "slide 1 has no notes"),
    ],
)
def test_what_is_wrong_in_a_deck_is_named(text, words):
    with pytest.raises(InputError, match=re.escape(words)):
        list(made.slides(KV_CACHE, text, "04.md"))


def test_a_lesson_without_slides_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(made, "DECKS", tmp_path)
    with pytest.raises(InputError, match="no slides for lesson 04"):
        deck("04")


def test_a_figure_comes_with_its_words():
    [slide] = made.slides(KV_CACHE, "## A\n\n@figure Plot\n\nNote:\nx", "04.md")
    assert 'src="data:image/png;base64,' in slide.body and 'alt="Two charts over the length' in slide.body


def test_the_page_holds_everything_and_fits(tmp_path):
    if importlib.util.find_spec("sphinx_revealjs") is None:
        pytest.skip("`make slides` brings reveal.js")
    pytest.importorskip("playwright")
    html = tmp_path / "04.html"
    html.write_text(page("04"), "utf-8")
    assert not re.search(r"""(?:src|href)=["'](?!data:|https://)""", html.read_text("utf-8").split("<script>")[0])
    if not any(map(shutil.which, made.CHROMIUM)):
        pytest.skip("there is no Chromium here")
    assert made.print_pdf(html, tmp_path) == []
    assert {path.name for path in tmp_path.glob("*.pdf")} == {"04.pdf", "04-notes.pdf"}
    large = page("04").replace("<h2>May", '<h2 style="height: 900px">May')
    html.write_text(large.replace("<h2>Discussion", '<h2 style="width: 1300px">Discussion'), "utf-8")
    assert [line.split(":")[0] for line in made.print_pdf(html, tmp_path)] == ["04, slide 4", "04, slide 9"]


def test_a_wide_drawing_gets_smaller_letters():
    assert made.markdown("    " + "<" * 86).startswith("<pre><code>")
    assert made.markdown("    " + "<" * 172).startswith('<pre style="font-size: 11.0px">')
