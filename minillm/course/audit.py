"""What the whole process may do once a learner's code runs, and whether what the checks stand on was changed."""

import functools
import os
import sys
from collections.abc import Callable, Iterable
from inspect import unwrap
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch

from minillm.lab import checking, work

PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
SITE = str(Path(torch.__file__).parents[1]) + os.sep
REFUSED_EVENTS = {
    "socket.": "connections",
    "subprocess.": "starting a process",
    "os.system": "starting a process",
    "os.exec": "starting a process",
    "os.fork": "starting a process",
    "os.posix_spawn": "starting a process",
    "os.spawn": "starting a process",
    "pty.": "starting a process",
    "os.kill": "signals",
    "signal.": "signals",
    "ctypes.": "calls into the C library",
    "gc.": "a look at all objects",
    "sys._current_": "a look at other frames",
    "sys.settrace": "tracing",
    "sys.setprofile": "tracing",
    "code.__new__": "code made by hand",
    "pickle.find_class": "unpickling",
    "resource.": "other limits",
}
HARMLESS_EVENTS = ("socket.__new__", "socket.gethostname")  # an event loop's pair of ends; nothing leaves by it
WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")


class Audit:
    """Refuses events once it is armed; there is no way back. `mine` are the file names of the learner's cells."""

    def __init__(self, readable: Iterable[str], hidden: Iterable[str], writable: str, tell: Callable[[str], None]):
        self.readable = tuple(folder(path) for path in (*readable, writable))
        self.hidden = tuple(folder(path) for path in hidden)
        self.writable = folder(writable)
        self.tell = tell
        self.mine: set[str] = set()

    def arm(self) -> None:
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = any(letter in (mode or "") for letter in "wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            self.file(path, bool(writes))
        elif event in WRITES:
            for path in args[: 2 if event in ("os.rename", "os.link") else 1]:
                self.file(path, True)
        else:
            for prefix, what in REFUSED_EVENTS.items():
                if event.startswith(prefix) and event not in HARMLESS_EVENTS and self.whose() != "project":
                    self.refuse(f"{what} ({event}): not allowed when it is graded")

    def file(self, path: Any, writes: bool) -> None:
        """Files are written by the checks alone, or by torch, which does so when it imports its compiler."""
        ours = self.whose(SITE) in ("project", "library")
        if path is None or isinstance(path, int):  # an open descriptor, as tempfile has them
            if not ours:
                self.refuse("opening a descriptor by its number: not allowed when it is graded")
            return
        real = os.path.realpath(os.fsdecode(path))
        inside = f"{real}{os.sep}"
        if real == os.devnull or (not writes and real == "/dev/urandom"):
            return
        if writes and not (ours and inside.startswith(self.writable)):
            self.refuse(f"writing {os.fsdecode(path)}: a task's cell may not write files when it is graded")
        if inside.startswith(self.hidden) or not inside.startswith(self.readable):
            self.refuse(f"reading {os.fsdecode(path)}: not allowed when it is graded")

    def refuse(self, why: str) -> NoReturn:
        if self.whose() == "learner":  # else it is Python itself, that looks for a line to show
            self.tell(why)
        raise PermissionError(why)

    def whose(self, libraries: str = "\0") -> str:
        """Whose code is nearest to what happens now: the learner's, the project's, a library's if asked, or none's."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if file in self.mine:
                return "learner"
            if file.startswith(PACKAGE) and file != __file__:
                return "project"
            if file.startswith(libraries):
                return "library"
            frame = frame.f_back
        return ""


def folder(path: str) -> str:
    return os.path.join(os.path.realpath(path), "")


# ---- what the checks stand on


DTYPE = "torch's default dtype"
NEVER_GROW = ("minillm", "random.Random.", "torch.Tensor.", "torch.nn.modules.module.Module.")


class Snapshot:
    """What the project, torch and Python's own modules are called by, to see afterwards whether it was changed."""

    def __init__(self) -> None:
        self.modules = {name for name in list(sys.modules) if watched(name)}
        self.before = self.taken()

    def changed(self) -> list[str]:
        now, absent = self.taken(), object()
        found = []
        for where, value in self.before.items():
            counts = callable(value) or where.startswith("minillm") or where == DTYPE
            if counts and now.get(where, absent) is not value and not wrapped_by_torch(now.get(where), value):
                found.append(where)
        for where, value in now.items():  # a new global may hide a builtin, a new method an inherited one
            if where not in self.before and where.startswith(NEVER_GROW) and not isinstance(value, ModuleType):
                if not of_torch(value):
                    found.append(where)
        return found

    def taken(self) -> dict[str, Any]:
        found: dict[str, Any] = {DTYPE: torch.get_default_dtype()}
        for name in self.modules:
            module = sys.modules.get(name)
            for key, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
                if not key.startswith("__") or key in ("__import__", "__build_class__"):
                    found[f"{name}.{key}"] = value
                if name.startswith(("minillm", "random")) and isinstance(value, type) and value.__module__ == name:
                    found.update(of_class(value))
        for one in (torch.Tensor, torch.nn.Module):
            found.update(of_class(one))
        for where, value in list(found.items()):
            if where.startswith("minillm") and isinstance(value, FunctionType):
                found[f"{where}.__code__"], found[f"{where}.__defaults__"] = value.__code__, value.__defaults__
        return found


def tame_functools() -> None:
    """`functools.wraps` reads and sets whatever attributes it is told to: from here on those of a function alone."""
    original = functools.update_wrapper

    def update_wrapper(
        wrapper: Any,
        wrapped: Any,
        assigned: Iterable[str] = functools.WRAPPER_ASSIGNMENTS,
        updated: Iterable[str] = functools.WRAPPER_UPDATES,
    ) -> Any:
        known = functools.WRAPPER_ASSIGNMENTS + functools.WRAPPER_UPDATES
        assigned, updated = tuple(assigned), tuple(updated)
        usual = all(type(name) is str and name in known for name in assigned + updated)
        trusted = sys._getframe(1).f_code.co_filename.startswith((PACKAGE, SITE, functools.__file__))
        if not trusted and not (usual and type(wrapper) is FunctionType and not isinstance(wrapped, ModuleType)):
            raise PermissionError("functools.wraps is for functions, and without assigned and updated")
        return original(wrapper, wrapped, assigned, updated)

    def wraps(wrapped: Any, **kwargs: Any) -> Any:
        return functools.partial(update_wrapper, wrapped=wrapped, **kwargs)

    functools.update_wrapper, functools.wraps = update_wrapper, wraps  # type: ignore[assignment]


def tools() -> list[object]:
    """What every comparison uses: few, so they are looked at after every call of a learner's function."""
    of_torch = [getattr(torch, name) for name in ("equal", "isclose", "allclose", "tensor", "Tensor", "no_grad")]
    of_tensor = [vars(torch.Tensor).get(name) for name in ("__eq__", "__ne__", "__getitem__", "__torch_function__")]
    ours = [checking.run_checks, checking.reason, work.same, work.differ, work.plain, work.Work.call, work.Wrong]
    return [*of_torch, *of_tensor, *ours, len, abs, isinstance, all, any, zip]


def wrapped_by_torch(now: Any, before: Any) -> bool:
    """As its compiler does with manual_seed once it is imported."""
    return of_torch(now) and unwrap(now) is before


def of_torch(value: Any) -> bool:
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(str(Path(torch.__file__).parent))


def watched(name: str) -> bool:
    root = name.split(".")[0]
    return root in ("minillm", "torch", "numpy") or root in sys.stdlib_module_names


def of_class(one: type) -> dict[str, Any]:
    where = f"{one.__module__}.{one.__qualname__}"
    methods = FunctionType, property, classmethod, staticmethod
    return {f"{where}.{key}": value for key, value in vars(one).items() if isinstance(value, methods)}
