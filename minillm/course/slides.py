"""Slides out of the lessons: a deck says what is shown and said, and quotes the lesson for the rest.

A deck is `lessons/instructor/slides/NN.md`. A line of `---` ends a slide; what follows a line `Note:` is for the
speaker. What the lesson has already is quoted, so that a change there reaches the slides:

    @table What it saves          of the section with that title the first table, or
    @table What it saves 2        the second; also @formula, @code (in the text), and
    @figure Measure               a picture that the executed notebook shows there, with its words

Text comes from the student's notebook, so no slide can show what a learner is to find. Each deck becomes one HTML file
that needs no network (reveal.js inside, formulas as MathML), and with Chromium a PDF, and one with the speaker's notes.
"""

import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import escape, unescape
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import Environment

from minillm.errors import InputError
from minillm.lab.build import LESSONS, ROOT, chosen, student, title_of

DECKS = LESSONS / "instructor" / "slides"
SLIDES = ROOT / "build" / "slides"
PAGE = Path(__file__).with_name("slides.html")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT, MARGIN = 1280, 720, 50  # pixels of a slide, and at its left and right
LETTER, COLUMNS = 22, 86  # pixels of code, as in slides.html, and how many letters then fit beside each other

QUOTE = re.compile(r"^@(\w+) (.+?)(?: (\d+))?$", re.MULTILINE)
IN_TEXT = {
    "table": r"(?:^\|.*\n?)+",
    "formula": r"\$\$[\s\S]+?\$\$",
    "code": r"(?:^    .*\n?(?:\n(?=    ))?)+|^```[\s\S]*?^```",
}


@dataclass(frozen=True)
class Slide:
    body: str  # HTML
    notes: str  # HTML


def deck(lesson: str, text: str | None = None) -> list[Slide]:
    """Raises InputError, which names the slide, for a deck without notes or a quotation that the lesson has not."""
    [source] = chosen([lesson])
    path = DECKS / f"{lesson}.md"
    if text is None:
        if not path.exists():
            raise InputError(f"there are no slides for lesson {lesson}: {path} is missing")
        text = path.read_text("utf-8")
    return list(slides(source, text, path.name))


def slides(source: Path, text: str, name: str) -> Iterator[Slide]:
    for i, part in enumerate(re.split(r"^---\n", text, flags=re.MULTILINE), 1):
        body, found, notes = part.partition("\nNote:\n")
        where = f"{name}, slide {i}"
        if not found or not notes.strip():
            raise InputError(f"{where} has no notes; a line `Note:` begins what the speaker says")
        pictures: list[str] = []

        def quoted(match: re.Match[str], where: str = where, pictures: list[str] = pictures) -> str:
            kind, title, n = match[1], match[2], int(match[3] or 1)
            if kind == "figure":
                pictures.append(figure(source, title, n, where))
                return f"FIGURE{len(pictures) - 1}"
            return "\n" + from_text(source, kind, title, n, where) + "\n"

        html = markdown(QUOTE.sub(quoted, body))
        for j, picture in enumerate(pictures):
            html = html.replace(f"<p>FIGURE{j}</p>", picture)
        yield Slide(html, markdown(notes))


# ---- quoting


def section(notebook: Any, title: str, where: str) -> list[Any]:
    """The cells under a heading, to the next one of its level or above. Its own cell is cut at the heading."""
    found: list[Any] = []
    level = 0
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            found += [cell] if level else []
            continue
        for marks, words, text in sections(cell.source):
            if level and marks and marks <= level:
                return found
            if not level and plain(words) == plain(title):
                level = marks
            if level:
                found.append(nbformat.v4.new_markdown_cell(text))
    if not level:
        raise InputError(f"{where}: the lesson has no heading {title!r}")
    return found


def sections(text: str) -> Iterator[tuple[int, str, str]]:
    """(level, title, text below) of each heading in a cell; what stands before the first has level 0."""
    head, *rest = re.split(r"^(#+) (.+)$", text, flags=re.MULTILINE)
    yield 0, "", head
    for marks, title, below in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        yield len(marks), title, below


def plain(title: str) -> str:
    return re.sub(r"[`*$]", "", title).strip()


def from_text(source: Path, kind: str, title: str, n: int, where: str) -> str:
    if kind not in IN_TEXT:
        raise InputError(f"{where}: @{kind} is not known; use {', '.join(IN_TEXT)} or figure")
    cells = section(students(source), title, where)
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    found = re.findall(IN_TEXT[kind], text, flags=re.MULTILINE)
    if len(found) < n:
        raise InputError(f"{where}: section {title!r} has {len(found)} of {kind}; number {n} was asked for")
    return str(found[n - 1])


def figure(source: Path, title: str, n: int, where: str) -> str:
    found = [
        (output.data["image/png"], output.metadata["image/png"]["alt"])
        for cell in section(executed(source), title, where)
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    if len(found) < n:
        raise InputError(f"{where}: section {title!r} has {len(found)} figures; number {n} was asked for")
    png, words = found[n - 1]
    return f'<img src="data:image/png;base64,{"".join(png.split())}" alt="{escape(words)}">'


@cache
def students(source: Path) -> Any:
    return student(source)


@cache
def executed(source: Path) -> Any:
    """The solved notebook with its outputs; its text is not quoted."""
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


# ---- HTML and PDF


@cache
def renderer() -> Any:
    from latex2mathml.converter import convert
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    def math(tex: str, options: dict[str, Any]) -> str:
        return str(convert(tex, display="block" if options["display_mode"] else "inline"))

    return MarkdownIt("commonmark", {"html": False}).enable("table").use(dollarmath_plugin, renderer=math)


def markdown(text: str) -> str:
    return re.sub(r"<pre>(.*?)</pre>", fitted, str(renderer().render(text)), flags=re.DOTALL)


def fitted(pre: re.Match[str]) -> str:
    """A drawing wider than a slide in letters that are as much smaller."""
    longest = max(map(len, unescape(re.sub(r"<.*?>", "", pre[1])).splitlines()), default=0)
    size = f' style="font-size: {LETTER * COLUMNS / longest:.1f}px"' if longest > COLUMNS else ""
    return f"<pre{size}>{pre[1]}</pre>"


def reveal(path: str) -> str:
    """A file of reveal.js, as the package sphinx-revealjs carries it; Sphinx itself is not needed."""
    found = importlib.util.find_spec("sphinx_revealjs")
    if found is None or not found.submodule_search_locations:
        raise InputError("slides need reveal.js; `make slides` brings it")
    return (Path(found.submodule_search_locations[0]) / "_static" / "revealjs" / path).read_text("utf-8")


def page(lesson: str) -> str:
    """One HTML file with everything inside."""
    [source] = chosen([lesson])
    template = Environment(autoescape=False, keep_trailing_newline=True).from_string(PAGE.read_text("utf-8"))
    return template.render(
        title=escape(title_of(source)),
        slides=deck(lesson),
        css=reveal("dist/reset.css") + reveal("dist/reveal.css"),
        script=reveal("dist/reveal.js"),
        notes=reveal("plugin/notes/notes.js"),
        width=WIDTH,
        height=HEIGHT,
        margin=MARGIN,
    )


# Right edge and height of what the slide that is shown holds; those that are not shown have no size.
SIZE = """() => {
    const slide = Reveal.getCurrentSlide();
    return [Math.max(...[...slide.children].map(one => one.offsetLeft + one.scrollWidth)), slide.scrollHeight];
}"""


def print_pdf(html: Path, folder: Path) -> list[str]:
    """NN.pdf and NN-notes.pdf beside each other in `folder`; returns what does not fit on its slide.

    Raises InputError where there is no Chromium or no playwright."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise InputError(f"PDFs need playwright ({error}); `make slides` brings it") from None
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        raise InputError("PDFs need Chromium; on Debian `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        tab.goto(f"{html.resolve().as_uri()}?view=plain")
        tab.wait_for_function("Reveal.isReady()")
        sizes = []
        for i in range(tab.evaluate("Reveal.getTotalSlides()")):
            tab.evaluate(f"Reveal.slide({i})")
            sizes.append(tab.evaluate(SIZE))
        for name, query in ((html.stem, "print-pdf"), (f"{html.stem}-notes", "print-pdf&showNotes=separate-page")):
            tab.goto(f"{html.resolve().as_uri()}?{query}")
            tab.wait_for_selector(".pdf-page")
            tab.pdf(path=folder / f"{name}.pdf", prefer_css_page_size=True, print_background=True)
        browser.close()
    return [
        f"{html.stem}, slide {i}: {width} x {height} do not fit into {WIDTH - MARGIN} x {HEIGHT}"
        for i, (width, height) in enumerate(sizes, 1)
        if height > HEIGHT or width > WIDTH - MARGIN
    ]


def make_slides(lessons: list[str], folder: Path = SLIDES, pdf: bool = True) -> int:
    """Writes NN.html, and with `pdf` NN.pdf and NN-notes.pdf; 1 if something does not fit."""
    folder.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    for source in chosen(lessons):
        lesson = source.name[:2]
        html = folder / f"{lesson}.html"
        html.write_text(page(lesson), "utf-8")
        if pdf:
            wrong += print_pdf(html, folder)
        print(f"{html}: {len(deck(lesson))} slides", flush=True)
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


def main(arguments: list[str]) -> int:
    """`python -m minillm.course.slides [--no-pdf] [NN ...]`"""
    try:
        return make_slides([name for name in arguments if name != "--no-pdf"], pdf="--no-pdf" not in arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
