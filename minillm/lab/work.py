"""What a learner wrote: functions out of a notebook, a Python file or the running kernel, called with care.

Only the cells that matter are run: those tagged `setup` (imports) and those with a `task`. So a check never runs a
measurement, and never tests our own code by mistake: what a file does not define is missing.
"""

import linecache
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from minillm.errors import InputError


class Wrong(Exception):
    """Something a learner wrote is not right. The message says what was expected, what came, and where first."""


@dataclass
class Work:
    """The functions, and where they come from. `broken` tells of cells that do not run: {function: why}."""

    source: str  # for people: a path, or "this notebook"
    names: dict[str, Any]  # the globals of its functions
    broken: dict[str, str] = field(default_factory=dict)
    mine: frozenset[str] = frozenset()  # file names of the learner's code, as tracebacks have them

    def function(self, name: str) -> Callable[..., Any]:
        """The learner's function of that name; raises Wrong if there is none."""
        if name in self.broken:
            raise Wrong(self.broken[name])
        found = self.names.get(name)
        if found is None:
            raise Wrong(f"there is no function {name} in {self.source}; write it, and run its cell")
        if not callable(found):
            raise Wrong(f"{name} is {type(found).__name__}, not a function")
        return found

    @contextmanager
    def replaced(self, others: Mapping[str, Any]) -> Iterator[None]:
        """Inside the block the learner's code finds these in the place of its own functions of the same names. What it
        keeps of them is of no use to it afterwards."""
        before, broken = {name: self.names[name] for name in others if name in self.names}, self.broken
        self.broken = {name: why for name, why in broken.items() if name not in others}
        loan = Loan()
        self.names.update({name: loan.of(name, other) for name, other in others.items()})
        try:
            yield
        finally:
            loan.over = True
            for name in others:
                self.names.pop(name, None)
            self.names.update(before)
            self.broken = broken

    def call(self, name: str, *args: Any, changes: Sequence[int] = (), **kwargs: Any) -> Any:
        """Calls the function with copies of nothing: arguments that it changes are found out.

        `changes`: numbers of the positional arguments that it is meant to change.
        """
        function = self.function(name)
        kept = [None if i in changes else deepcopy(arg) for i, arg in enumerate(args)]
        known = [kinds(arg) for arg in args]
        try:
            result = function(*args, **kwargs)
        except Wrong:  # out of time
            raise
        except Exception as error:
            raise Wrong(self.explain(name, error)) from error
        finally:
            for i, (before, now) in enumerate(zip(kept, args, strict=True)):
                if isinstance(before, Module) and differ(before, now):  # other checks use the same model
                    give_back(before, now)
                    kept[i] = CHANGED
        for i, (before, now) in enumerate(zip(kept, args, strict=True)):
            for kind in kinds(now) - known[i]:
                plain(kind, f"argument number {i + 1} of {name}, afterwards,")
            if i not in changes and (before is CHANGED or differ(before, now)):
                raise Wrong(f"{name} changed its argument number {i + 1}; work on a copy, or make a new tensor")
        return result

    def explain(self, name: str, error: BaseException) -> str:
        """An exception in a learner's words: what, and at which of their lines."""
        if isinstance(error, NotImplementedError):
            other = unwritten_task(str(error))
            if other not in (None, name):
                return f"{name} needs your {other}, which is not written yet"
            return f"{name} is not written yet ({error})"
        if isinstance(error, ImportError):
            return f"{name} needs something that is not installed: {error}"
        where = self.line(error.__traceback__)
        return f"{name} raised {type(error).__name__}: {error}{where}"

    def line(self, trace: TracebackType | None) -> str:
        """The last line of the learner's own code in a traceback."""
        for frame in reversed(traceback.extract_tb(trace)):
            if self.is_mine(frame.filename):
                where = "" if frame.name == "<module>" else f" of {frame.name}"
                return f"\n  at line {frame.lineno}{where}: {frame.line}"
        return ""

    def is_mine(self, filename: str) -> bool:
        return filename in self.mine or "ipykernel" in filename or filename.startswith("<ipython")

    def took_part(self, name: str, trace: TracebackType | None) -> bool:
        """Whether a traceback goes through the learner's code: through any of it, or the module that `name` is from."""
        module = getattr(self.names.get(name), "__module__", None)
        return any(
            self.is_mine(frame.f_code.co_filename)
            or frame.f_globals is self.names
            or (module is not None and frame.f_globals.get("__name__") == module)
            for frame, _ in traceback.walk_tb(trace)
        )


def unwritten_task(message: str) -> str | None:
    """The function of a stub's message, "task 04.store: ..."; None if it is no such message."""
    found = re.match(r"task (?:\d\d|p\d)\.(\w+):", message)
    return found[1] if found else None


CHANGED = object()


class Loan:
    """Right functions that are lent for a while."""

    over = False

    def of(self, name: str, other: Any) -> Any:
        if isinstance(other, type):

            def new(cls: type, *args: Any, **kwargs: Any) -> Any:
                self.check(name)
                made: Any = other.__new__
                return made(cls) if made is object.__new__ else made(cls, *args, **kwargs)

            meta: Any = type(other)
            return meta(other.__name__, (other,), {"__new__": new, "__module__": other.__module__})
        if not callable(other):
            return other

        def lent(*args: Any, **kwargs: Any) -> Any:
            self.check(name)
            return other(*args, **kwargs)

        return lent

    def check(self, name: str) -> None:
        if self.over:
            raise RuntimeError(f"{name} was kept from another check, where it stood in the place of yours")


def differ(before: Any, now: Any) -> bool:
    if type(before) is not type(now):
        return True
    if isinstance(before, Tensor):
        return before.shape != now.shape or not torch.equal(before.nan_to_num(7e7), now.nan_to_num(7e7))
    if isinstance(before, list | tuple):
        return len(before) != len(now) or any(differ(a, b) for a, b in zip(before, now, strict=True))
    if isinstance(before, Module):
        return parts(before).keys() != parts(now).keys() or any(
            differ(one, parts(now)[name]) for name, one in parts(before).items()
        )
    return isinstance(before, dict | set | int | float | str) and before != now


def parts(model: Module) -> dict[str, Any]:
    """What of a model must stay: its tensors, and what is hooked to it or set on it."""
    found: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors(model).items()}
    for name, inner in model.named_modules():
        found.update({f"{name}: {key}": None for key in vars(inner)})
        found.update({f"{name}: {hook}": len(vars(inner)[hook]) for hook in HOOKS})
    return found


HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def tensors(model: Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def give_back(before: Module, now: Module) -> None:
    """Makes a model again what it was."""
    with torch.no_grad():
        for name, tensor in tensors(now).items():
            if name in tensors(before):
                tensor.data = tensors(before)[name].detach().clone()
    for then, inner in zip(before.modules(), now.modules(), strict=False):
        for key in vars(inner).keys() - vars(then).keys():
            del inner.__dict__[key]
        for hook in HOOKS:
            for key in vars(inner)[hook].keys() - vars(then)[hook].keys():
                del vars(inner)[hook][key]


# ---- comparing


def same(got: Any, expected: Any, what: str, tolerance: float = 1e-6) -> None:
    """Raises Wrong unless `got` is what was expected: type, shape, dtype, device, no NaN, and values.

    `what` names it in the message. Tensors may differ by `tolerance`, absolute and relative; all else not at all.
    """
    if got is None:
        raise Wrong(f"{what} is None: is a `return` missing?")
    for kind in kinds(got) - kinds(expected):
        plain(kind, what)
    if not isinstance(expected, Tensor):
        if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
            return same_list(list(got), list(expected), what)
        if isinstance(expected, int | float) and isinstance(got, Tensor) and got.numel() == 1:
            got = got.item()
        if isinstance(expected, float) and isinstance(got, int | float):
            if got != expected and not abs(got - expected) <= tolerance * max(1.0, abs(expected)):  # NaN is wrong too
                raise Wrong(f"{what}: expected {expected:g}, got {got:g}")
        elif type(got) is not type(expected) or got != expected:
            raise Wrong(f"{what}: expected {expected!r}, got {got!r}")
        return
    if not isinstance(got, Tensor):
        raise Wrong(f"{what} is {type(got).__name__}; it must be a tensor of shape {list(expected.shape)}")
    for name in ("shape", "dtype", "device"):
        ours, theirs = getattr(expected, name), getattr(got, name)
        if ours != theirs:
            show = list if name == "shape" else str
            raise Wrong(f"{what}: the {name} must be {show(ours)}, and is {show(theirs)}")
    if expected.dtype.is_floating_point:
        if got.isnan().any() and not expected.isnan().any():
            raise Wrong(f"{what} has NaN, first at {first(got.isnan())}")
        wrong = ~torch.isclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        wrong = got != expected
    if wrong.any():
        at = first(wrong)
        share = wrong.double().mean().item()
        raise Wrong(
            f"{what}: {share:.0%} of the values differ; first at {at}: expected {number(expected[tuple(at)])}, "
            f"got {number(got[tuple(at)])}"
        )


def kinds(value: Any) -> set[type]:
    """The types in a value, and in what it contains."""
    found: set[type] = set()
    left, seen = [value], set()
    while left:
        one = left.pop()
        kind = type(one)
        found.add(kind)
        if id(one) in seen:
            continue
        if issubclass(kind, dict):
            left += [*dict.keys(one), *dict.values(one)]
        elif issubclass(kind, list | tuple | set | frozenset | deque):
            base = next(base for base in (list, tuple, set, frozenset, deque) if issubclass(kind, base))
            left += base.__iter__(one)
        else:
            continue
        seen.add(id(one))
    return found


HEAP_TYPE = 1 << 9  # of a type's flags: made by Python code, as all that a learner makes


def plain(kind: type, what: str) -> None:
    """Raises Wrong for a class of the learner's own: such a value can say that it equals whatever it is asked."""
    module, name = type.__dict__["__module__"].__get__(kind), type.__dict__["__name__"].__get__(kind)
    if not type.__dict__["__flags__"].__get__(kind) & HEAP_TYPE:
        return
    home = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    if home is None or vars(home).get(name) is not kind:
        raise Wrong(f"{what} has a {name}, a class that Python and torch do not know: give numbers, lists or tensors")


def same_list(got: list[Any], expected: list[Any], what: str) -> None:
    for i, (mine, ours) in enumerate(zip(got, expected, strict=False)):
        if mine != ours:
            raise Wrong(f"{what}: first different at index {i}: expected {ours!r}, got {mine!r}")
    if len(got) != len(expected):
        raise Wrong(f"{what}: expected {len(expected)} entries, got {len(got)}")


def first(wrong: Tensor) -> list[int]:
    return [int(i) for i in wrong.nonzero()[0]]


def number(value: Tensor) -> str:
    found = value.item()
    return f"{found:.6g}" if isinstance(found, float) else f"{found}"


# ---- no endless loops


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raises Wrong inside the block when its time is over. Without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        raise Wrong(f"{what} took longer than {seconds:g} s: does a loop never end?")

    before = signal.signal(signal.SIGALRM, over)
    left, _ = signal.getitimer(signal.ITIMER_REAL)  # of a limit around this one; 0: there is none
    signal.setitimer(signal.ITIMER_REAL, min(seconds, left or seconds))
    began = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3))


# ---- finding the functions


def from_namespace(names: dict[str, Any], source: str = "this notebook") -> Work:
    return Work(source, names)


def from_file(path: Path, seconds: float = 60.0) -> Work:
    """A notebook, a lesson's source (cells begin with `# %%`) or a plain Python file, whose code is run.

    Raises InputError for a file that cannot be read; a cell that does not run is told by the function's check.
    """
    if path.suffix not in (".ipynb", ".py"):
        raise InputError(f"{path} must end in .ipynb or .py")
    try:
        cells = cells_of(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a notebook or a Python file") from error
    except ValueError as error:  # neither UTF-8 nor a notebook
        raise InputError(f"{path} is not a notebook or Python text: {error}") from error
    return from_cells(path, cells, seconds)


def from_cells(path: Path, cells: Sequence[tuple[int, str]], seconds: float = 60.0) -> Work:
    """Runs the cells of a file, as `cells_of` gives them, in a namespace of their own."""
    names: dict[str, Any] = {"__name__": "mine"}
    work = Work(str(path), names)
    mine = []
    for number_of, code in cells:
        filename = f"<{path.name}, cell {number_of}>" if number_of else str(path)
        mine.append(filename)
        linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
        try:
            with time_limit(seconds, f"cell {number_of} of {path.name}"):
                exec(compile(code, filename, "exec"), names)
        except (Exception, SystemExit) as error:
            place = f"cell {number_of} of {path.name}" if number_of else path.name
            if isinstance(error, SyntaxError):  # its own words name the file and the line already
                what, at = error.msg, f", line {error.lineno}: {(error.text or '').strip()}"
            else:
                what, at = str(error), Work("", {}, mine=frozenset(mine)).line(error.__traceback__)
            why = f"{place} does not run: {type(error).__name__}: {what}{at}"
            for name in defined(code):
                work.broken[name] = why
    work.mine = frozenset(mine)
    return work


def cells_of(path: Path) -> list[tuple[int, str]]:
    """(number, code) of the cells that define something; number 0: the whole of a plain file."""
    if path.suffix == ".py" and "# %%" not in path.read_text("utf-8"):
        return [(0, path.read_text("utf-8"))]
    import jupytext

    notebook = jupytext.read(path)
    chosen = []
    for i, cell in enumerate(notebook.cells, 1):
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "code" and ("task" in cell.metadata or "setup" in tags):
            chosen.append((i, cell.source))
    return chosen


def defined(code: str) -> list[str]:
    """Names that begin a `def` or `class` at the left margin: also in code that does not compile."""
    found = []
    for line in code.splitlines():
        for keyword in ("def ", "class "):
            if line.startswith(keyword):
                found.append(line[len(keyword) :].split("(")[0].split(":")[0].strip())
    return found
