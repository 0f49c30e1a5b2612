"""The papers around the project: citation, changes, errata, forms, workflows, the container. Each is what its reader,
human or machine, expects, and names only commands, files and lessons that there are."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from minillm import __version__
from minillm.lab import build

ROOT = build.ROOT
CLASS = ROOT / "lessons" / "instructor" / "class"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
HOME = "https://github.com/minillm/minillm"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def targets(command: str) -> list[str]:
    """What a `make` command asks for, without its variables."""
    words = shlex.split(command)
    assert words[0] == "make"
    return [word for word in words[1:] if "=" not in word]


def has_target(name: str) -> bool:
    stamp = name.replace(".venv/", "$(VENV)/", 1)
    return re.search(rf"^{re.escape(stamp)}:", MAKEFILE, re.MULTILINE) is not None


# ---- citation and changes


def test_the_citation_has_what_its_schema_asks_for() -> None:
    cited = read(ROOT / "CITATION.cff")
    assert cited["cff-version"] == "1.2.0"
    assert cited["message"] and cited["title"].startswith("minillm") and cited["type"] == "software"
    assert cited["authors"] and all(author.get("name") or author.get("family-names") for author in cited["authors"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert str(cited["version"]) == __version__ == project["version"] and cited["license"] == project["license"]
    assert cited["repository-code"] == HOME
    known = "abstract authors cff-version keywords license message repository-code title type version".split()
    assert sorted(cited) == known  # no DOI and no date that nobody has given


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    heads = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", text, re.MULTILINE)
    assert heads[0][0] == "Unreleased" or heads[0][0] == __version__
    assert __version__ in [version for version, _ in heads]
    for version, date in heads:
        assert version == "Unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", date), version
        assert version == "Unreleased" or f"\n[{version}]: {HOME}" in text
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# ---- errata


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if re.match(r"\| \d\d |\| ps?\d ", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_erratum_has_its_place_in_a_lesson() -> None:
    rows = rows_of((ROOT / "lessons" / "errata.md").read_text("utf-8"))
    assert rows and [row[0] for row in rows] == sorted(row[0] for row in rows)
    texts = {source.name[:2]: source.read_text("utf-8") for source in build.sources()}
    for lesson, where, said, now, date in rows:
        heads = re.findall(r"^# #{2,3} (?:\d+\. )?(.+)$", texts[lesson], re.MULTILINE)
        place = re.match(r"\*(?:\d+\. )?(.+?)\*", where)
        assert place and any(head.startswith(place[1]) for head in heads), (lesson, where)
        assert said != now and re.fullmatch(r"2\d{3}-\d\d-\d\d", date)


# ---- issue forms

ELEMENTS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def test_there_are_forms_and_blank_issues_are_off() -> None:
    assert {form.stem for form in FORMS} == {"config", "engine", "lesson", "question"}
    config = read(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")
    assert config["blank_issues_enabled"] is False
    for link in config["contact_links"]:
        assert set(link) == {"name", "url", "about"}
        assert (ROOT / link["url"].removeprefix(f"{HOME}/blob/main/")).is_file()


@pytest.mark.parametrize("path", [form for form in FORMS if form.stem != "config"], ids=lambda path: path.stem)
def test_a_form_is_what_github_accepts_and_asks_for_doctor(path: Path) -> None:
    """By https://docs.github.com/communities (syntax for issue forms, and for GitHub's form schema)."""
    form = read(path)
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "title", "labels"}
    fields = [element for element in form["body"] if element["type"] != "markdown"]
    assert fields, "at least one field that can be filled in"
    for element in form["body"]:
        assert element["type"] in ELEMENTS and set(element) <= {"type", "id", "attributes", "validations"}
    for key in ("id", "label"):
        values = [field["attributes"]["label"] if key == "label" else field["id"] for field in fields]
        assert all(values) and len(set(values)) == len(values)
    for field in fields:
        assert re.fullmatch(r"[\w-]+", field["id"])
        assert all(isinstance(needed, bool) for needed in field.get("validations", {}).values())
        if field["type"] == "dropdown":
            options = field["attributes"]["options"]
            assert len(options) == len(set(options)) > 0 and all(isinstance(option, str) for option in options)
    [doctor] = [field for field in fields if "minillm doctor" in field["attributes"]["label"]]
    assert doctor["attributes"]["render"] == "text"
    assert doctor["validations"]["required"] or path.stem == "question"


# ---- workflows


def workflow(path: Path) -> dict:
    found = read(path)
    found["on"] = found.pop(True)  # YAML 1.1 reads `on` as true, and GitHub as a word
    return found


@pytest.mark.parametrize(
    "path", [CLASS / "student-ci.yml", ROOT / ".github" / "workflows" / "ci.yml"], ids=lambda path: path.stem
)
def test_a_workflow_is_whole_and_may_only_read(path: Path) -> None:
    flow = workflow(path)
    assert flow["name"] and "push" in flow["on"] and flow["permissions"] == {"contents": "read"}
    for job in flow["jobs"].values():
        assert job["runs-on"] and 0 < job["timeout-minutes"] <= 360
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
    assert "secrets." not in path.read_text("utf-8")


def test_the_projects_own_workflow_is_its_script() -> None:
    [job] = workflow(ROOT / ".github" / "workflows" / "ci.yml")["jobs"].values()
    script = [step["run"] for step in job["steps"] if "run" in step]
    assert script == [".ci/run"] and os.access(ROOT / script[0], os.X_OK)
    [python] = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert (ROOT / python["cache-dependency-path"]).is_file()


def students_steps() -> dict[str, dict]:
    [job] = workflow(CLASS / "student-ci.yml")["jobs"].values()
    return {step.get("name", step.get("uses")): step for step in job["steps"]}


def test_the_students_workflow_installs_what_there_is() -> None:
    steps = students_steps()
    install = steps["Install minillm and its weights"]
    assert all(has_target(target) for target in targets(install["run"])), install["run"]
    text = (CLASS / "student-ci.yml").read_text("utf-8")
    assert f"ref: v{__version__}\n" in text
    for named in re.findall(r"minillm/((?:weights|constraints)[\w./-]*)", text):
        assert (ROOT / named).exists() or named == "weights/smollm2-135m-instruct"


CHECKED = """\
#!/bin/sh
echo "asked: $*"
case "$4" in 01_*) exit 1 ;; ps2_*) exit 124 ;; esac
"""


@pytest.mark.parametrize(
    "there, lessons, status, words",
    [
        (["00_a"], "", 0, ["## 00_a.ipynb: all properties hold", "asked: check 00 --impl 00_a.ipynb", "1 notebooks"]),
        (["00_a", "01_b"], "", 1, ["## 01_b.ipynb: not there yet", "2 notebooks checked, 1 with"]),
        (["00_a", "01_b"], "00 p1", 0, ["1 notebooks checked, 0 with"]),
        (["ps1_x", "ps2_y"], "p1 p2", 1, ["asked: check p1 --impl ps1_x.ipynb", "ps2_y.ipynb: stopped after 15"]),
        (["notes"], "", 1, ["0 notebooks checked"]),
    ],
)
def test_the_students_workflow_shows_each_report(
    there: list[str], lessons: str, status: int, words: list[str], tmp_path: Path
) -> None:
    """Its script is run as GitHub runs it, with a minillm that only says what it was asked."""
    minillm = tmp_path / "minillm" / ".venv" / "bin" / "minillm"
    minillm.parent.mkdir(parents=True)
    minillm.write_text(CHECKED)
    minillm.chmod(0o755)
    for name in there:
        (tmp_path / f"{name}.ipynb").touch()
    page = tmp_path / "page.md"
    step = students_steps()["Check the notebooks"]
    assert step["shell"] == "bash"
    env = {**os.environ, "GITHUB_WORKSPACE": str(tmp_path), "GITHUB_STEP_SUMMARY": str(page), "LESSONS": lessons}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == status and not done.stderr
    for word in words:
        assert word in page.read_text() and word in done.stdout
    assert page.read_text().count("````") % 2 == 0


def test_the_command_that_it_runs_exists() -> None:
    from typer.testing import CliRunner

    from minillm.cli import app

    told = CliRunner().invoke(app, ["check", "--help"], env={"COLUMNS": "120"}).output
    assert "--impl" in told and '"$minillm" check "$lesson" --impl' in students_steps()["Check the notebooks"]["run"]


# ---- the container


def instructions() -> list[tuple[str, str]]:
    text = (CLASS / "Containerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_container_runs_what_the_makefile_has() -> None:
    asked = [rest for word, rest in instructions() if word == "RUN" and rest.startswith("make")]
    [start] = [rest for word, rest in instructions() if word == "CMD"]
    asked.append(shlex.join(yaml.safe_load(start)))  # a JSON list is YAML too
    assert len(asked) == 3
    for command in asked:
        assert targets(command) and all(has_target(target) for target in targets(command)), command
    for variable in re.findall(r"([A-Z]+)=", " ".join(asked)):
        assert f"$({variable})" in MAKEFILE, variable
    assert instructions()[0] == ("FROM", "python:3.11-slim")
    assert [rest for word, rest in instructions() if word == "USER"] == ["student"], "learners are not root"


def test_the_container_takes_what_its_commands_read_and_no_more() -> None:
    taken = []
    for word, rest in instructions():
        if word == "COPY":
            *sources, _ = [part for part in rest.split() if not part.startswith("--")]
            taken += sources
    assert all((ROOT / source).exists() for source in taken)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {"Makefile", "pyproject.toml", "constraints.txt", "minillm", "lessons", "weights/manifest.json"}
    assert {*needed, project["readme"], *project["license-files"]} <= set(taken)
    assert not {"weights", "weights/", ".", ".git", ".venv", "build"} & set(taken)


# ---- links and commands


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "CHANGELOG.md",
        ROOT / "lessons" / "errata.md",
        ROOT / ".github" / "CONTRIBUTING.md",
        CLASS / "README.md",
        build.AGENTS,
    ],
    ids=lambda path: path.name,
)
def test_links_lead_somewhere_and_commands_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (path.parent / link).exists(), link
        for form in re.findall(rf"^{HOME}/issues/new\?template=(.+)$", link):
            assert (ROOT / ".github" / "ISSUE_TEMPLATE" / form).is_file(), link
    commands = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)|^    make ([a-z-]+)", text, re.MULTILINE)
    for command in filter(None, (name for found in commands for name in found)):
        assert has_target(command), command
    from minillm.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {group.name for group in app.registered_groups}
    for command in re.findall(r"`minillm ([a-z]+)|^minillm ([a-z]+)", text, re.MULTILINE):
        assert set(filter(None, command)) <= known, command


def test_instructions_for_assistants_name_what_there_is() -> None:
    text = build.AGENTS.read_text("utf-8")
    for module in re.findall(r"`(minillm\.[a-z]+)`", text):
        assert (ROOT / module.replace(".", "/")).is_dir(), module
    for call in re.findall(r"`lab\.([a-z]+)\(", text):
        from minillm import lab

        assert call in lab.__all__
    from minillm.lab.notes import FILE
    from minillm.lab.use import STUB

    assert FILE in text and STUB in text
