"""A student's engine, found and imported; and what of minillm its files import."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import minillm
from minillm.errors import InputError
from minillm.lab.conformance import SIGNATURES, Setup, split_spec
from minillm.lab.work import Work

PLAIN = (  # parts to build on; what else of minillm is imported, the report mentions
    "minillm",
    "minillm.attention",
    "minillm.config",
    "minillm.device",
    "minillm.draws",
    "minillm.errors",
    "minillm.fusing",
    "minillm.lab.conformance",
    "minillm.model",
    "minillm.params",
    "minillm.tokenizer",
    "minillm.weights",
)

LONG = 30  # characters: shorter lines are alike by chance
MUCH = 0.3  # of a file's long lines


@dataclass(frozen=True)
class Source:
    """Where an engine comes from."""

    name: str  # for people: my_engine.py:Engine
    factory: Callable[[Setup], Any]
    work: Work  # knows which files are the student's
    flags: list[str]


def load(spec: str) -> Source:
    """The factory that `module[:name]` or `file.py[:name]` names. Raises InputError."""
    wanted, name = split_spec(spec)
    path = Path(wanted)
    if wanted.endswith(".py") and not path.is_file():
        raise InputError(f"there is no file {wanted}; give a module or a .py file, for example my_engine:Engine")
    a_file = wanted.endswith(".py")
    folder, module = (path.parent, path.stem) if a_file else (Path(), wanted)
    sys.path.append(str(folder.resolve()))  # last, so that it hides nothing; it stays: an engine may import more later
    before = set(sys.modules)
    try:
        found = from_file(path) if a_file else importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            raise InputError(f"there is no module {module} in {Path.cwd()}; give a module or a .py file") from error
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise InputError(f"{wanted} cannot be imported: {type(error).__name__}: {error}{where}") from error
    factory = getattr(found, name, None)
    if not callable(factory):
        raise InputError(f"{wanted} has no class or function {name}; the adapter begins with {SIGNATURES['Engine']}")
    files = own_files(found, before)
    flags = [*imported(files), *copied(files)]
    return Source(f"{wanted}:{name}", factory, Work(wanted, {}, mine=frozenset(files)), flags)


def from_file(path: Path) -> ModuleType:
    """The module of this very file, whatever else has its name: queue.py is a good name for a student's file."""
    name = path.stem if path.stem not in sys.modules else f"engine_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own_files(module: Any, before: set[str]) -> list[str]:
    """Those of the student's: the module's, and what it brought in from the folder that it lies in."""
    home = Path(str(module.__file__)).resolve().parent
    files = [str(module.__file__)]
    for name in sorted(set(sys.modules) - before):
        path = getattr(sys.modules[name], "__file__", None)
        if path and name.partition(".")[0] != "minillm" and "site-packages" not in path and path not in files:
            if home in Path(path).resolve().parents:
                files.append(path)
    return files


def imported(files: Sequence[str]) -> list[str]:
    """A line for each file that imports more of minillm than its plain parts."""
    flags = []
    for path in files:
        names: set[str] = set()
        for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                modules = [name for name in inside if name in PLAIN or is_module(name)]
                names.update(modules or [node.module])
        more = sorted(name for name in names if name.partition(".")[0] == "minillm" and name not in PLAIN)
        if more:
            flags.append(f"{Path(path).name} imports {', '.join(more)}: what is it used for?")
    return flags


def is_module(name: str) -> bool:
    return name.startswith("minillm.") and name in sys.modules


def copied(files: Sequence[str]) -> list[str]:
    """A line for each file of which much stands in minillm, or in the engines of its tests, line for line."""
    package = Path(str(minillm.__file__)).parent
    others = [*package.rglob("*.py"), *(package.parent / "tests" / "engines").glob("*.py")]
    flags = []
    for path in files:
        own = long_lines(Path(path))
        there = [other for other in others if not other.samefile(path) and other.name != "conformance.py"]
        known = set[str]().union(*(long_lines(other) for other in there))
        share = sum(line in known for line in own) / max(1, len(own))
        if share >= MUCH:
            flags.append(
                f"{share:.0%} of the long lines in {Path(path).name} stand in minillm or its tests, word for word"
            )
    return flags


def long_lines(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    return [line for line in lines if len(line) >= LONG and not line.startswith(("#", "from ", "import "))]
