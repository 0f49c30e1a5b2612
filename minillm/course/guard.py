"""What a learner's code may not say while it is graded: names, imports and attributes.

Several layers, each simple. Names: the cells run with builtins and imports of their own, and find of the project only
what their lesson uses. Attributes: those that lead from an object to the interpreter are refused before a cell runs;
the others are looked at when the cell uses them (`watched`): of torch and numpy only the parts that compute are there,
no module and no class but the learner's own can be changed, and no text is formatted that reads attributes. `audit` has
what the whole process may do, and `walls` what the operating system lets it do.

None of this is proof. Code that runs in the process of its checks can be made to reach them: through classes that are
made by hand (a metaclass, `type` under another name), through code of a library that takes a name and reads that
attribute, or through a fault in C code. These layers only make that long and visible. Grades that matter need a look at
what was flagged, a container without rights, and a question asked in person.
"""

import ast
import builtins
import importlib
import pkgutil
import string
from collections.abc import Callable, Iterable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

MODULES = frozenset(
    "__future__ abc array asyncio base64 binascii bisect cmath collections contextlib copy dataclasses datetime "
    "decimal enum fractions functools hashlib heapq io itertools json math numbers numpy operator pathlib queue random "
    "re regex statistics string struct textwrap threading time torch typing warnings".split()
)
# of these two, the parts that only compute
PARTS = frozenset(
    "torch torch.nn torch.nn.functional torch.nn.init torch.linalg torch.fft torch.special torch.random torch.testing "
    "torch.cuda numpy numpy.linalg numpy.random numpy.fft numpy.typing numpy.lib numpy.lib.stride_tricks".split()
)
# and not these of their names, nor of any module: they run text, read or write files, or change what others use
REFUSED_NAMES = frozenset(
    "load save from_file tofile fromfile memmap compile classes ops import_ir_module import_ir_module_from_buffer "
    "PyTorchFileReader PyTorchFileWriter singledispatch singledispatchmethod make_dataclass".split()
)
COMPILES = ("re", "regex")  # whose compile is another
REFUSED_BUILTINS = "breakpoint compile eval exec exit globals help input locals quit".split()
DUNDERS = frozenset(
    "__name__ __doc__ __class__ __init__ __post_init__ __call__ __len__ __iter__ __next__ __getitem__ __setitem__ "
    "__contains__ __enter__ __exit__ __aenter__ __aexit__ __eq__ __lt__ __hash__ __repr__ __str__ __new__ "
    "__slots__ __version__ _replace _asdict _fields".split()
)
# attributes that lead to modules outside MODULES, to frames, or to what runs text as code
REFUSED_ATTRIBUTES = frozenset(
    "os sys subprocess inspect builtins bltns importlib ctypes ctypeslib gc socket multiprocessing linecache pickle "
    "unittest runpy from_file tofile attrgetter methodcaller get_type_hints ForwardRef "
    "Formatter get_field runstring settrace setprofile excepthook exc_traceback get_stack "
    "tb_frame tb_next f_back f_globals f_locals f_builtins f_code gi_frame gi_code cr_frame cr_code ag_frame ag_code "
    "func_globals func_code".split()
)
# methods by which an object passes for what it is not
REFUSED_METHODS = frozenset(
    "__prepare__ __instancecheck__ __subclasscheck__ __reduce__ __reduce_ex__ __torch_function__ __torch_dispatch__ "
    "__array_function__ __class__ __dict__".split()
)
SETTERS = ("__setattr__", "__delattr__")
FORMATS = ("format", "format_map")
SEE, CHANGE = "__see__", "__change__"  # what `watched` puts into a cell
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
    """What in a cell leads out of it; `_x` is fine where the cell itself makes it."""
    nodes = list(ast.walk(tree))
    own = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {name for node in nodes for name in slots(node)}
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call) and node.args and plain(node.args[0])}
    used, found = [], []
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if node.attr in SETTERS and id(node) in called:
                continue  # looked at when it runs
            used.append(node.attr)
            found += [node.attr] * (node.attr == "__class__" and not isinstance(node.ctx, ast.Load))
        elif isinstance(node, ast.MatchClass):
            used += node.kwd_attrs
            found += [name for name in node.kwd_attrs if name in REFUSED_NAMES or name in FORMATS]
        elif isinstance(node, ast.Name) and node.id.startswith("__"):
            used.append(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found += [node.name] * (node.name in (*REFUSED_METHODS, SEE, CHANGE))
        elif isinstance(node, ast.arg | ast.alias):
            name = node.arg if isinstance(node, ast.arg) else node.asname
            found += [name] if name in (SEE, CHANGE) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
            found += ["type with other than one argument"] * (len(node.args) != 1)
    return sorted({name for name in used if leads_out(name, own)} | set(found))


def plain(argument: ast.expr) -> bool:
    return not isinstance(argument, ast.Starred)


def slots(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.Assign) or [ast.unparse(one) for one in node.targets] != ["__slots__"]:
        return []
    return [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def leads_out(name: str, own: Iterable[str] = ()) -> bool:
    if name.startswith("__") and name.endswith("__"):  # also where the cell makes it: `__builtins__ = ...`
        return name not in DUNDERS
    return name in REFUSED_ATTRIBUTES or (name.startswith("_") and name not in DUNDERS and name not in own)


class watched(ast.NodeTransformer):
    """`x.name` becomes `__see__(x, "name").name`, and `x.name = y` becomes `__change__(x).name = y`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            node.value = self.through(SEE, node.value, ast.Constant(node.attr))
        else:
            node.value = self.through(CHANGE, node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        setter = isinstance(node.func, ast.Attribute) and node.func.attr in SETTERS
        self.generic_visit(node)
        if setter:
            node.args[0] = self.through(CHANGE, node.args[0])
        return node

    def visit_MatchClass(self, node: ast.MatchClass) -> ast.AST:  # its class must stay a name
        node.patterns = [self.visit(one) for one in node.patterns]
        node.kwd_patterns = [self.visit(one) for one in node.kwd_patterns]
        return node

    def visit_Module(self, node: ast.Module) -> ast.AST:
        self.as_text = any(isinstance(one, ast.ImportFrom) and one.module == "__future__" for one in node.body)
        return self.generic_visit(node)

    def visit(self, node: ast.AST) -> Any:
        if getattr(self, "as_text", False):  # annotations are kept as text: nothing runs there
            if isinstance(node, ast.AnnAssign):
                node.target, node.value = self.visit(node.target), node.value and self.visit(node.value)
                return node
            if isinstance(node, ast.arg):
                return node
        return super().visit(node)

    def through(self, function: str, *args: ast.expr) -> ast.expr:
        call = ast.Call(ast.Name(function, ast.Load()), list(args), [])
        return ast.fix_missing_locations(ast.copy_location(call, args[0]))


# ---- modules


def may_import(dotted: str, of_project: Iterable[str]) -> bool:
    """Of the project, what the lesson's own solutions use, and what lies in it; else modules that only compute."""
    root, *rest = dotted.split(".")
    if root == "minillm":
        return any(dotted == one or dotted.startswith(f"{one}.") for one in of_project)
    if root not in MODULES or any(leads_out(name) for name in rest):
        return False
    module, where = importlib.import_module(root), root
    for name in rest:
        inner = vars(module).get(name)
        part = isinstance(inner, ModuleType) or name in parts_of(module)
        if refused_name(root, name) or (part and not may_use(f"{where}.{name}")):
            return False
        if not isinstance(inner, ModuleType):
            break
        module, where = inner, inner.__name__
        if not may_use(where):
            return False
    return True


def may_use(module: str) -> bool:
    root = module.split(".")[0]
    return module in PARTS if root in ("torch", "numpy") else root in MODULES


def refused_name(root: str, name: str) -> bool:
    return name in REFUSED_NAMES and not (name == "compile" and root in COMPILES) and root != "json"


@cache
def parts_of(module: ModuleType) -> frozenset[str]:
    """Names of the modules in a package, also of those that it imports when they are asked for."""
    return frozenset(one.name for one in pkgutil.iter_modules(getattr(module, "__path__", [])))


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

    seen: set[tuple[str, str]] = set()

    def see(thing: Any, name: str) -> Any:
        """`thing`, if its attribute of that name may be used."""
        kind = type(thing)
        if issubclass(kind, ModuleType) and (thing.__name__, name) not in seen:
            where = thing.__name__
            if not may_import(where, of_project) or (name not in DUNDERS and not may_see(thing, name)):
                refuse(f"{where}.{name}: a task's cell may not use it when it is graded")
            seen.add((where, name))
        elif name in FORMATS and (issubclass(kind, str) or (issubclass(kind, type) and issubclass(thing, str))):
            if kind is not str or reads_attributes(thing):
                refuse(f".{name}() of a text that reads attributes: not allowed when it is graded; an f-string may")
        return thing

    def may_see(module: ModuleType, name: str) -> bool:
        value = vars(module).get(name)
        if isinstance(value, ModuleType):
            return may_import(value.__name__, of_project) and not leads_out(name)
        return module.__name__.startswith("minillm") or may_import(f"{module.__name__}.{name}", of_project)

    def change(thing: Any) -> Any:
        """`thing`, if its attributes may be set: no module's, and of classes and functions only the learner's own."""
        kind = type(thing)
        if issubclass(kind, ModuleType) or (issubclass(kind, type) and not made_here(thing)):
            refuse(f"a change of {thing.__name__}: only your own names may be changed when it is graded")
        return thing

    def imports(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name.split(".")[0] in QUIET and not level:
            return quiet(name.split(".")[0])
        wanted = [f"{name}.{part}" for part in fromlist or () if part != "*"] or [name]
        if isinstance(fromlist, list):  # C code of numpy or torch that needs a part of it; a statement has a tuple
            wanted = [name.split(".")[0]]
        elif "*" in (fromlist or ()) and name.split(".")[0] in ("torch", "numpy"):
            wanted = [f"{name}._all_"]
        for dotted in wanted:
            if level or not may_import(dotted, of_project):
                why = f"import of {dotted}: a task's cell may not use it when it is graded; {OWN}"
                if name == "sys":  # printing to sys.stderr is no cheating
                    raise PermissionError(f"{why}. Leave `sys` out of the cell: `print` is there")
                refuse(why)
        return __import__(name, globals, locals, fromlist, level)

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(thing: Any, name: str, *rest: Any) -> Any:
            if type(name) is not str or leads_out(name) or name.startswith("_"):
                refuse(f"{function.__name__}(..., {name!r}): not allowed when it is graded")
            if function in (setattr, delattr):
                change(thing)
            return function(see(thing, name), name, *rest)

        return call

    def own_vars(thing: Any) -> Any:
        if not made_here(type(thing)):
            refuse("vars of what is not your own: not allowed when it is graded")
        return vars(thing)

    found = dict(vars(builtins))
    found |= {"__import__": imports, "vars": own_vars, SEE: see, CHANGE: change}
    found.update({name: checked(found[name]) for name in ("getattr", "hasattr", "setattr", "delattr")})
    for name in REFUSED_BUILTINS:
        found[name] = Absent(f"{name}: not allowed when it is graded", tell)
    return found


def made_here(kind: type) -> bool:
    return vars(kind).get("__module__") == "mine"


def reads_attributes(text: str) -> bool:
    """Whether a text for `str.format` reads attributes or items of what it is given."""
    try:
        fields = [(name or "", spec or "") for _, name, spec, _ in string.Formatter().parse(text)]
    except ValueError:  # it raises in the cell too
        return False
    return any("." in name or "[" in name or ("{" in spec and reads_attributes(spec)) for name, spec in fields)


# ---- modules that a cell may ask for, and that do nothing here

QUIET = ("logging", "tqdm")


def quiet(name: str) -> Any:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    if name == "tqdm":

        def tqdm(iterable: Iterable[Any] = (), *args: Any, **kwargs: Any) -> Iterable[Any]:
            return iterable

        made = SimpleNamespace(tqdm=tqdm, trange=lambda *args, **kwargs: range(*args))
        made.auto = made.notebook = SimpleNamespace(tqdm=tqdm, trange=made.trange)
        return made
    levels = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
    calls = dict.fromkeys(
        "debug info warning error exception critical log basicConfig setLevel addHandler StreamHandler".split(), nothing
    )
    return SimpleNamespace(**levels, **calls, getLogger=lambda *args: SimpleNamespace(**calls))
