"""What a learner's code may not do while it is graded.

Several layers, each simple. Names: the cells run with builtins and imports of their own, and find of the project only
what their lesson uses. Attributes: those that lead from an object to the interpreter are refused before a cell runs.
Events: Python's audit events of files, processes, sockets and frames are refused for the whole process. A snapshot of
what the checks stand on is compared afterwards.

None of this is proof. Code that runs in the process of its checks can be made to reach them, and these layers only make
that long and visible. Grades that matter need a look at what was flagged, and a question asked in person.
"""

import ast
import builtins
import os
import sys
from collections.abc import Callable, Iterable
from inspect import unwrap
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch

MODULES = frozenset(
    "__future__ abc array asyncio base64 binascii bisect cmath collections contextlib copy dataclasses datetime "
    "decimal enum fractions functools hashlib heapq io itertools json math numbers numpy operator pathlib queue random "
    "re regex safetensors statistics string struct textwrap threading tiktoken time torch typing warnings".split()
)
REFUSED_BUILTINS = "breakpoint compile eval exec exit globals help input quit vars".split()
DUNDERS = frozenset(
    "__name__ __doc__ __class__ __init__ __post_init__ __call__ __len__ __iter__ __next__ __getitem__ __setitem__ "
    "__contains__ __enter__ __exit__ __aenter__ __aexit__ __eq__ __lt__ __hash__ __repr__ __str__ __new__ "
    "_replace _asdict _fields".split()
)
# attributes that lead to modules outside MODULES, to frames, or to what runs text as code
REFUSED_ATTRIBUTES = frozenset(
    "os sys subprocess inspect builtins bltns importlib ctypes ctypeslib gc socket multiprocessing linecache pickle "
    "unittest runpy lab stages jit hub fx package cpp_extension attrgetter methodcaller get_type_hints ForwardRef "
    "Formatter get_field runstring settrace setprofile excepthook exc_traceback get_stack "
    "tb_frame tb_next f_back f_globals f_locals f_builtins f_code gi_frame gi_code cr_frame cr_code ag_frame ag_code "
    "func_globals func_code".split()
)
PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
OWN = "your own code is what is graded"


class Absent:
    """Stands for a name that a learner's code may not use: any use of it is told, and raises."""

    def __init__(self, why: str, tell: Callable[[str], None]):
        object.__setattr__(self, "_told", (why, tell))

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        why, tell = object.__getattribute__(self, "_told")
        tell(why)
        raise PermissionError(why)

    def _itself(self, other: object) -> "Absent":  # `Figure | None`, `Sequence[Figure]`: annotations are no use of it
        return self

    __call__ = __getattr__ = __setattr__ = __iter__ = __len__ = _refuse
    __or__ = __ror__ = __getitem__ = _itself


# ---- before a cell runs


def unseemly(tree: ast.AST) -> list[str]:
    """Attributes in a cell that lead out of it; `_x` is fine where the cell itself makes it."""
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used += [name for node in ast.walk(tree) if isinstance(node, ast.MatchClass) for name in node.kwd_attrs]
    used += [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.startswith("__")]
    return sorted({name for name in used if leads_out(name, own)})


def leads_out(name: str, own: Iterable[str] = ()) -> bool:
    if name.startswith("__"):  # also where the cell makes it: `__builtins__ = ...`
        return name not in DUNDERS
    return name in REFUSED_ATTRIBUTES or (name.startswith("_") and name not in DUNDERS and name not in own)


def may_import(dotted: str, of_project: Iterable[str]) -> bool:
    """Of the project, what the lesson's own solutions use, and what lies in it; else modules that only compute."""
    root, *rest = dotted.split(".")
    if root == "minillm":
        return any(dotted == one or dotted.startswith(f"{one}.") for one in of_project)
    return root in MODULES and not any(leads_out(name) for name in rest)


def imported(code: str) -> dict[str, str]:
    """{name: what it is} of the imports at the left margin of a cell."""
    found = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.Import):
            for one in node.names:
                root = one.name.split(".")[0]
                found[one.asname or root] = one.name if one.asname else root
        elif isinstance(node, ast.ImportFrom):
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return found


def used_of_project(setup: Iterable[str], solutions: Iterable[str]) -> set[str]:
    """What of the project a lesson's solutions use, as dotted names."""
    origins = {name: origin for code in setup for name, origin in imported(code).items()}
    names = {node.id for code in solutions for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    return {origins[name] for name in names if origins.get(name, "").split(".")[0] == "minillm"}


# ---- the names that it finds


def close(names: dict[str, Any], setup: Iterable[str], of_project: Iterable[str], tell: Callable[[str], None]) -> None:
    """Leaves of what the setup imported the part that a learner's code may use, and gives it builtins of its own."""
    for code in setup:
        for name, origin in imported(code).items():
            if name in names and not may_import(origin, of_project):
                names[name] = Absent(f"{name} ({origin}) is not for use in a task's cell: {OWN}", tell)
    names["__builtins__"] = guarded_builtins(of_project, tell)


def guarded_builtins(of_project: Iterable[str], tell: Callable[[str], None]) -> dict[str, Any]:
    def refuse(why: str) -> NoReturn:
        tell(why)
        raise PermissionError(why)

    def imports(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        wanted = [f"{name}.{part}" for part in fromlist or () if part != "*"] or [name]
        if isinstance(
            fromlist, list
        ):  # no statement, which has a tuple: C code of numpy or torch that needs a part of it
            wanted = [name.split(".")[0]]
        for dotted in wanted:
            if level or not may_import(dotted, of_project):
                refuse(f"import of {dotted}: a task's cell may not use it when it is graded; {OWN}")
        return __import__(name, globals, locals, fromlist, level)

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(thing: Any, name: str, *rest: Any) -> Any:
            if isinstance(name, str) and (leads_out(name) or name.startswith("_")):
                refuse(f"{function.__name__}(..., {name!r}): not allowed when it is graded")
            return function(thing, name, *rest)

        return call

    found = dict(vars(builtins))
    found["__import__"] = imports
    found.update({name: checked(found[name]) for name in ("getattr", "hasattr", "setattr", "delattr")})
    for name in REFUSED_BUILTINS:
        found[name] = Absent(f"{name}: not allowed when it is graded", tell)
    return found


# ---- what the whole process may do

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
        if path is None or isinstance(path, int):  # an open descriptor, as tempfile has them
            if self.whose() == "learner":
                self.refuse("opening a descriptor by its number: not allowed when it is graded")
            return
        real = os.path.realpath(os.fsdecode(path))
        inside = f"{real}{os.sep}"
        if real == os.devnull or (not writes and real == "/dev/urandom"):
            return
        if writes and not inside.startswith(self.writable):
            self.refuse(f"writing {os.fsdecode(path)}: only the folder for temporary files may be written")
        if inside.startswith(self.hidden) or not inside.startswith(self.readable):
            self.refuse(f"reading {os.fsdecode(path)}: not allowed when it is graded")

    def refuse(self, why: str) -> NoReturn:
        if self.whose() == "learner":  # else it is Python itself, that looks for a line to show
            self.tell(why)
        raise PermissionError(why)

    def whose(self) -> str:
        """Whose code is nearest to what happens now: the learner's, the project's, or neither's."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if file in self.mine:
                return "learner"
            if file.startswith(PACKAGE) and file != __file__:
                return "project"
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
