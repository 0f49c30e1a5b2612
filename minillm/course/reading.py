"""Reads a notebook that nobody has checked, in a process of its own: only its cells come back, never its outputs.

A file of 100 MB of outputs is welcome. One that would fill the memory, or that nests without an end, ends this process
alone. It takes any version of the format and any damage that leaves cells behind.
"""

import json
import subprocess
import sys
from typing import Any

from minillm.errors import InputError

SECONDS = 60
MEMORY = 4 << 30  # bytes of address space
MOST_TEXT = 1_000_000  # characters of all cells together: a lesson has 60,000


def read_cells(data: bytes) -> list[dict[str, Any]]:
    """Each cell as {type, source, metadata, id}. Raises InputError with the reason why there are none."""
    if not data.strip():
        raise InputError("the file is empty")
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"it took more than {SECONDS} s to read") from error
    if done.returncode not in (0, 1):
        raise InputError("it takes too much memory to read")
    answer = json.loads(done.stdout)
    if "wrong" in answer:
        raise InputError(answer["wrong"])
    return list(answer["cells"])


def cells_of(data: bytes) -> list[dict[str, Any]]:
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"it is not a notebook: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(f"it is not a notebook: no JSON at line {error.lineno} ({error.msg})") from error
    except RecursionError as error:
        raise InputError("it is not a notebook: nested too deeply") from error
    sheets = notebook.get("worksheets") if isinstance(notebook, dict) else None  # the format before 2014 had them
    parts = sheets if isinstance(sheets, list) else [notebook]
    cells = [cell for part in parts if isinstance(part, dict) for cell in listed(part.get("cells"))]
    found = [plain(cell) for cell in cells if isinstance(cell, dict)]
    if not found:
        raise InputError("it is not a notebook: it has no cells")
    if sum(len(cell["source"]) for cell in found) > MOST_TEXT:
        raise InputError(f"its cells hold more than {MOST_TEXT:,} characters")
    return found


def plain(cell: dict[str, Any]) -> dict[str, Any]:
    source = cell.get("source", cell.get("input", ""))  # "input" before 2014
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    metadata = cell.get("metadata")
    return {
        "type": "code" if cell.get("cell_type") == "code" else "text",
        "source": whole(source) if isinstance(source, str) else "",
        "metadata": metadata if isinstance(metadata, dict) else {},
        "id": cell["id"] if isinstance(cell.get("id"), str) else "",
    }


def whole(text: str) -> str:
    """Halves of characters, which JSON allows and no file can hold, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def main() -> int:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, OSError, ValueError):
        pass  # where there are no such limits, time is the only one
    try:
        answer: dict[str, Any] = {"cells": cells_of(sys.stdin.buffer.read())}
    except InputError as error:
        answer = {"wrong": str(error)}
    except MemoryError:
        return 3
    json.dump(answer, sys.stdout)
    return 1 if "wrong" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
