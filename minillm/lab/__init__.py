"""What the lessons call: predict, answer, check, show, use. `build` makes the notebooks from their sources.

work      what a learner wrote, found and called with care     notes    predictions and answers, in the learner's file
checking  properties, run one by one                           figures  pictures with their words; masks as grids
checks/   the properties of each lesson                        build    source to notebook: solved, student
"""

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from minillm.errors import InputError
from minillm.lab.figures import mask_grid, show, show_masks
from minillm.lab.notes import answer, predict, reveal
from minillm.lab.use import use

__all__ = ["answer", "check", "mask_grid", "predict", "reveal", "show", "show_masks", "size", "start", "use"]

SIZES = ("ci", "default", "long")
T = TypeVar("T")


def size(ci: T, default: T, long: T) -> T:
    """How much a measuring cell does: MINILLM_SIZE is ci (seconds), default (minutes on two cores) or long."""
    dial = os.environ.get("MINILLM_SIZE", "default")
    if dial not in SIZES:
        raise InputError(f"MINILLM_SIZE is {dial!r}; it must be one of {', '.join(SIZES)}")
    return {"ci": ci, "default": default, "long": long}[dial]


def start(lesson: str) -> None:
    """The first line of a lesson: says how much it will run, and on USE_MINE=1 puts earlier work to use."""
    import torch

    from minillm.device import tune_memory

    size(0, 0, 0)  # a wrong dial is told now
    tune_memory()
    torch.manual_seed(0)
    dial = os.environ.get("MINILLM_SIZE", "default")
    print(f"Lesson {lesson}. Size: {dial}. {torch.get_num_threads()} threads, torch {torch.__version__}.")
    if os.environ.get("USE_MINE", "0") not in ("0", ""):
        for path in sorted(Path.cwd().glob("[0-9][0-9]_*.ipynb")):
            if path.name[:2] < lesson:
                try:
                    use(path)
                except InputError as error:  # lessons 00 and 01 have nothing that the engine calls
                    print(f"{error}; the engine's own stay")


def check(lesson: str, *functions: str, impl: str | Path | None = None) -> None:
    """Checks what this notebook defines (or the file `impl`), all of the lesson or some functions, and prints it."""
    from minillm.lab.checking import run_checks
    from minillm.lab.work import from_file, from_namespace

    if impl is not None:
        work = from_file(Path(impl))
    else:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        work = from_namespace(frame.f_back.f_globals)
    print(run_checks(lesson, work, functions or None).text())


def check_command(lesson: str, impl: Path | None, folder: Path, write: Any) -> int:
    """`minillm check`: the learner's file, by default the lesson's notebook in `folder`. Returns 1 if a property does
    not hold. Raises InputError if there is no such file or lesson."""
    from minillm.lab.checking import properties, run_checks
    from minillm.lab.work import from_file

    properties(lesson)
    if impl is None:
        name = f"{lesson.replace('p', 'ps')}_*.ipynb"
        found: Sequence[Path] = sorted(folder.glob(name))
        if not found:
            raise InputError(f"there is no notebook {name} in {folder}; run `make lab`, or give a file with --impl")
        impl = found[0]
    if not impl.is_file():
        raise InputError(f"{impl} is not a file; give a notebook or a Python file")
    report = run_checks(lesson, from_file(impl))
    write(report.text())
    return 0 if report.passed else 1
