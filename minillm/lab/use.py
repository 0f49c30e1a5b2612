"""A learner's functions in the place of ours, in the running engine."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minillm.errors import InputError
from minillm.lab.work import Work, from_file

STUB = ": yours to write"  # how the message of a stub ends

# {function: (module, name in it)}. Modules call these through the module that defines them.
PLACES = {
    "visible": ("minillm.attention", "visible"),
    "sdpa": ("minillm.attention", "sdpa"),
    "rotate": ("minillm.model", "rotate"),
    "rope_frequencies": ("minillm.model", "rope_frequencies"),
}


def use(source: str | Path | Work) -> Callable[[], None]:
    """Puts every function of the file that has a place into it, and prints which. Returns what undoes it.

    Raises InputError for a file that cannot be read, or that has none of them.
    """
    work = source if isinstance(source, Work) else from_file(Path(source))
    before: list[tuple[Any, str, Any]] = []
    for name, (module_name, attribute) in PLACES.items():
        if callable(work.names.get(name)) and name not in work.broken:
            if unwritten(work.names[name]):
                print(f"{work.source}'s {name} is not written yet: ours stays")
                continue
            module = importlib.import_module(module_name)
            before.append((module, attribute, getattr(module, attribute)))
            setattr(module, attribute, work.names[name])
            print(f"{module_name}.{attribute} is now {work.source}'s {name}")
    if not before:
        raise InputError(f"{work.source} has none of the functions that can be put to use: {', '.join(PLACES)}")

    def undo() -> None:
        for module, attribute, ours in reversed(before):
            setattr(module, attribute, ours)

    return undo


def unwritten(function: Any) -> bool:
    """Whether it is still the stub that `build.stubbed` makes."""
    constants = getattr(getattr(function, "__code__", None), "co_consts", ())
    return any(isinstance(constant, str) and constant.endswith(STUB) for constant in constants)
