"""A learner's own file: what was predicted before it was measured, and what was answered. Nobody grades the number."""

import json
import os
from pathlib import Path
from typing import Any

from minillm.errors import InputError

FILE = "my_notes.json"  # in the folder of the learner's notebooks


def path() -> Path:
    return Path(os.environ.get("MINILLM_NOTES", FILE))


def load() -> dict[str, Any]:
    """Raises InputError if the file is there and cannot be read: it is never written over then."""
    if not path().is_file():  # /dev/null neither: the book is made without a learner
        return {"predictions": {}, "answers": {}}
    try:
        notes = json.loads(path().read_text("utf-8"))
        notes["predictions"], notes["answers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path()} is not a file of notes ({error}); move it away, or mend it") from error
    return notes


def keep(kind: str, name: str, value: Any) -> None:
    if path().exists() and not path().is_file():
        return  # /dev/null: nobody to keep it for
    notes = load()
    notes[kind][name] = value
    partial = path().with_name(f".{path().name}.{os.getpid()}")
    partial.write_text(json.dumps(notes, indent=1, ensure_ascii=False) + "\n", "utf-8")
    partial.replace(path())


def predict(name: str, value: float | str | None) -> None:
    """Writes down a guess ("04.tokens_computed", 1520) before it is measured. None: no guess yet, and nothing is kept.

    Having guessed is what counts, being right is not. A second guess replaces the first.
    """
    if value is None:
        print(f"{name}: no prediction yet. Put a number in place of None; a wild guess is fine.")
        return
    if isinstance(value, bool) or not isinstance(value, int | float | str) or value != value:
        raise InputError(f"{name}: the prediction is {value!r}; it must be a number or a word")
    keep("predictions", name, value)
    print(f"{name}: you predict {value}.")


def reveal(name: str, measured: float | str) -> None:
    """Shows a prediction beside what was measured."""
    guess = load()["predictions"].get(name)
    said = "you made no prediction" if guess is None else f"you predicted {guess}"
    line = f"{name}: measured {measured}; {said}."
    if isinstance(guess, int | float) and isinstance(measured, int | float) and guess > 0 and measured > 0:
        ratio = max(guess, measured) / min(guess, measured)
        line += " Close." if ratio < 1.25 else f" A factor of {ratio:.3g} apart: why?"
    print(line)


def answer(name: str, text: str) -> None:
    """Keeps a written answer; an empty one is not kept."""
    if not isinstance(text, str):
        raise InputError(f"{name}: the answer is {type(text).__name__}; it must be text")
    if not text.strip():
        print(f"{name}: no answer yet. Write it between the quotes.")
        return
    keep("answers", name, text.strip())
    print(f"{name}: kept, {len(text.split())} words.")
