"""The question bank as Moodle XML, which Moodle and other learning platforms import.

After https://docs.moodle.org/en/Moodle_XML_format and Moodle's own importer, question/format/xml/format.php. Texts are
Markdown, which that format knows; a tolerance is absolute there; Moodle shuffles the choices itself.
"""

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from minillm.course.bank import Variant, variant
from minillm.course.questions import pick
from minillm.errors import whole_number


def moodle(lessons: Sequence[str], seed: int, n: int | None = None, essay: bool = True, variants: int = 1) -> str:
    """A file to import. Each lesson is a category; with more than one variant a calculation is a category of its own,
    from which a quiz takes one at random. Seeds go on counting from the first."""
    whole_number("variants", variants, 1, 1000)
    root = ET.Element("quiz")
    category = ""
    for made in sorted(pick(lessons, seed, n, essay), key=lambda made: made.question.id[:3]):
        asks = made.question
        several = asks.kind == "calculation" and variants > 1
        here = f"$course$/minillm/lesson {asks.id[1:3]}" + (f"/{asks.id}" if several else "")
        if here != category:
            category = here
            _text(ET.SubElement(ET.SubElement(root, "question", type="category"), "category"), here)
        for i in range(variants if several else 1):
            _question(root, variant(asks, seed + i), f"{asks.id}, seed {seed + i}" if several else asks.id)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _text(parent: ET.Element, text: str) -> None:
    ET.SubElement(parent, "text").text = text


def _markdown(parent: ET.Element, name: str, text: str, **attributes: str) -> ET.Element:
    element = ET.SubElement(parent, name, {"format": "markdown", **attributes})
    _text(element, text)
    return element


def _question(root: ET.Element, made: Variant, name: str) -> None:
    asks = made.question
    kind = {"choice": "multichoice", "calculation": "numerical", "essay": "essay"}[asks.kind]
    question = ET.SubElement(root, "question", type=kind)
    _text(ET.SubElement(question, "name"), name)
    unit = f"\n\nAnswer in {asks.unit}." if asks.unit else ""
    _markdown(question, "questiontext", made.text + unit)
    _markdown(question, "generalfeedback", made.explanation if asks.kind == "calculation" else "")
    ET.SubElement(question, "defaultgrade").text = str(asks.points)
    if asks.kind == "choice":
        ET.SubElement(question, "single").text = "true"
        ET.SubElement(question, "shuffleanswers").text = "true"
        ET.SubElement(question, "answernumbering").text = "ABCD"
        for choice in made.choices:
            answer = _markdown(question, "answer", choice.says, fraction="100" if choice.right else "0")
            _markdown(answer, "feedback", choice.why)
    elif made.answer is not None:
        _number(question, made.answer, made.tolerance, "100", "")
        for value, why in made.slips:
            _number(question, value, abs(value) * asks.tolerance, "0", f"This answer {why}.")
    else:
        ET.SubElement(question, "responseformat").text = "editor"
        points = [f"- {criterion.points}: {criterion.says}" for criterion in asks.criteria]
        _markdown(question, "graderinfo", "\n".join([*points, "", made.explanation]))
    tags = ET.SubElement(question, "tags")
    for objective in asks.objectives:
        _text(ET.SubElement(tags, "tag"), objective)


def _number(question: ET.Element, value: float, tolerance: float, fraction: str, why: str) -> None:
    answer = ET.SubElement(question, "answer", fraction=fraction, format="plain_text")
    _text(answer, repr(value))
    ET.SubElement(answer, "tolerance").text = repr(tolerance)
    _markdown(answer, "feedback", why)
