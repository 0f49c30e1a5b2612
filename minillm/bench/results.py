"""The results file: one JSON file for one machine, a section for each experiment.

    {"schema": 2, "sections": {"ladder": {...}, "queue": {...}, "memory": {...}}}

An experiment replaces its own section and leaves the others. Each section says what machine, command, commit and
date it comes from ("about"), and whether it was stopped half way ("partial").
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from minillm.errors import InputError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
SCHEMA = 2  # goes up when an entry changes its meaning or goes away


def check_writable(path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Raises InputError for a file that could not be written later, when the measuring is done."""
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise InputError(f"{path} must end in one of {', '.join(suffixes)}")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written; choose another place")


def check_room(path: Path | None) -> None:
    """Raises InputError, before anything is measured, for a file that could not take a section later."""
    check_writable(path)
    if path is not None and path.exists() and path.stat().st_size:
        load(path)


def check_plot(path: Path | None) -> None:
    """The same for a plot."""
    check_writable(path, PLOT_SUFFIXES)


def load(path: Path) -> dict[str, Any]:
    """{section: its content}. Raises InputError for a file that is not one of ours, or of another version."""
    try:
        file = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a results file") from error
    except ValueError as error:  # neither UTF-8 nor JSON
        raise InputError(f"{path} is not JSON ({error}); give a file that `minillm bench --json` wrote") from error
    if not isinstance(file, dict) or "schema" not in file:
        raise InputError(f"{path} is not a results file; give one that `minillm bench --json` wrote")
    if file["schema"] != SCHEMA:
        raise InputError(
            f"{path} has schema {file['schema']!r}, and this minillm reads {SCHEMA}; measure again into a new file"
        )
    sections = file.get("sections")
    if not isinstance(sections, dict):
        raise InputError(f"{path} has no sections; give a file that `minillm bench --json` wrote")
    return sections


def add(path: Path, section: str, content: dict[str, Any]) -> None:
    """Puts a section into the file, in place of an older one of the same name. A crash leaves the old file whole."""
    sections = load(path) if path.exists() and path.stat().st_size else {}
    sections[section] = content
    text = json.dumps({"schema": SCHEMA, "sections": sections}, indent=1, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def save(
    console: Console,
    json_path: Path | None,
    section: str,
    content: Callable[[], dict[str, Any]],
    plot_path: Path | None = None,
    plot: Callable[[], Any] | None = None,
) -> None:
    """Writes the section and the picture, those that were asked for, and says where they are."""
    if json_path is not None:
        add(json_path, section, content())
        console.print(Text(f"JSON: {json_path}"))
    if plot_path is not None and plot is not None:
        plot().savefig(plot_path, dpi=150)
        console.print(Text(f"Plot: {plot_path}"))
