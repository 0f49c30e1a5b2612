"""Submissions, right, wrong and hostile: each gets marks with reasons, in bounded time, and no exception."""

import ast
import builtins
import functools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import torch

from minillm.bench import ceiling
from minillm.config import Config
from minillm.course import audit, grader, grading, guard, handed_in, process
from minillm.course.grading import Marks, grade
from minillm.errors import InputError
from minillm.lab import checking
from minillm.lab.build import LESSONS, solved, student
from minillm.lab.checking import LESSONS as NUMBERS
from minillm.lab.checking import run_checks
from minillm.lab.work import Work

FLOOR = "def floor_seconds(weight_bytes, kv_bytes, flops, bytes_per_s, flops_per_s):\n    "
BALANCE = "def balance_batch(itemsize, bytes_per_s, flops_per_s):\n    "
RIGHT_BALANCE = "return itemsize * flops_per_s / (2 * bytes_per_s)"
BLOCKS = "def blocks_needed(kv_len, size):\n    "


def handed_in_as(folder: Path, notebook) -> Path:
    path = folder / "mine.ipynb"
    nbformat.write(notebook, path)
    return path


def with_cells(folder: Path, lesson: str, **codes: str) -> Path:
    """The solutions, with these cells in the place of the functions' own."""
    notebook = solved(handed_in.source_of(lesson))
    for function, code in codes.items():
        [cell] = [cell for cell in notebook.cells if cell.metadata.get("task") == f"{lesson}.{function}"]
        cell.source = code
    return handed_in_as(folder, notebook)


def held(marks: Marks, function: str) -> tuple[int, int, int]:
    own = marks.of(function)
    return sum(mark.public for mark in own), sum(bool(mark.hidden) for mark in own), len(own)


def all_held(marks: Marks, *functions: str) -> bool:
    return all(len(set(held(marks, function))) == 1 for function in functions or marks.functions())


# ---- right ones, and empty ones


@pytest.mark.parametrize("lesson", NUMBERS if os.environ.get("MINILLM_GRADE_ALL") else ("13",))
def test_the_solutions_hold_in_public_and_in_a_variant(lesson: str):
    """Here the one that starts threads and event loops; MINILLM_GRADE_ALL=1 takes all lessons."""
    [path] = LESSONS.glob(f"{lesson}_*.ipynb")
    marks = grade(path, lesson, seed=5)
    assert not marks.refused and not marks.flags, (marks.refused, marks.flags)
    assert all_held(marks), [(mark.reason, mark.hidden_reason) for mark in marks.marks]


@pytest.mark.parametrize("lesson", NUMBERS)
def test_the_guard_has_nothing_against_a_solution(lesson: str):
    setup, tasks = handed_in.code_cells(handed_in.source_of(lesson))
    names = {name: object() for code in setup for name in guard.imported(code)}
    guard.close(names, setup, handed_in.allowed(lesson), lambda why: None)
    for task, code in tasks.items():
        tree = ast.parse(code)
        assert guard.unseemly(tree) == [], task
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        assert not [name for name in used - own if type(names.get(name)) is guard.Absent], task


def test_the_skeleton_holds_nothing_and_is_told_that_it_is_not_written(tmp_path: Path):
    marks = grade(handed_in_as(tmp_path, student(handed_in.source_of("00"))), "00")
    assert all(not mark.public and mark.hidden is None and "not written yet" in mark.reason for mark in marks.marks)
    assert not marks.refused and not marks.flags


# ---- what cannot be graded


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "mine.ipynb is not a file"),
        ("", "the file is empty"),
        ("{", "no JSON at line 1"),
        ('{"cells": []}', "it has no cells"),
        ('{"cells": [{"cell_type": "code", "source": "x = 1"}]}', "has no cell of lesson 00"),
        ("fifo", "is not a file"),
    ],
)
def test_what_is_no_submission_is_refused_with_a_reason(content: str | None, words: str, tmp_path: Path):
    path = tmp_path / "mine.ipynb"
    if content == "fifo":
        os.mkfifo(path)
    elif content is not None:
        path.write_text(content)
    marks = grade(path, "00", seed=1)
    assert words in marks.refused and not marks.flags
    assert len(marks.marks) == 12
    assert all(not mark.public and mark.hidden is False and mark.reason == marks.refused for mark in marks.marks)


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(handed_in, "MOST_BYTES", 1000)
    (tmp_path / "mine.ipynb").write_text(" " * 1001)
    assert "clear its outputs" in grade(tmp_path / "mine.ipynb", "00").refused


@pytest.mark.parametrize(
    "lesson, seconds, words",
    [("14", 1, "lesson '14' is not known"), ("00", 0, "must be above 0"), ("p5", 1, "lesson p5 is not in")],
)
def test_the_callers_mistakes_are_told(lesson, seconds, words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if lesson == "p5":
        monkeypatch.setattr("minillm.lab.build.LESSONS", tmp_path)
        monkeypatch.setattr(grading, "properties", lambda lesson: [])
    with pytest.raises(InputError, match=words):
        grade(tmp_path / "mine.ipynb", lesson, seconds=seconds)


# ---- wrong and hostile ones. A process takes seconds to start, so each function of a notebook does something else


def test_each_function_is_judged_by_itself_whatever_the_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "GRACE", 1.0)
    cells = {
        "blocks_needed": "print('x' * 10**8)\n" + BLOCKS + "return -(-kv_len // size)",
        "slots_of": "import numpy as np\n"
        "def slots_of(table, start, stop, size):\n"
        "    return np.lib.stride_tricks.as_strided(np.zeros(1), (2**40,), (2**12,)).sum()",
        "reserve": "def reserve(table, kv_len, free, size):\n"
        "    while True:\n"
        "        try:\n"
        "            for _ in iter(int, 1): len(table)\n"
        "        except Exception: pass",
        "release": "def release(table, free):\n    raise SystemExit(0)",
        "may_enter": "def may_enter(request, free, size)\n    return True",
        "preempt": "def preempt(running, waiting, free):\n    return preempt(running, waiting, free)",
        "schedule": "def schedule(running, waiting, budget, max_running, free, size):\n    while True: pass",
    }
    marks = grade(with_cells(tmp_path, "09", **cells), "09", seed=3, each=1.0)
    assert not marks.refused
    assert all_held(marks, "blocks_needed")
    reasons = {function: marks.of(function)[0].reason for function in cells}
    assert "the process was ended by SIGSEGV" in reasons["slots_of"]
    assert "it did not end within 1 s" in reasons["reserve"]
    assert "raised SystemExit" in reasons["release"]
    assert "cell 25 of mine.ipynb does not run: SyntaxError: expected ':'" in reasons["may_enter"]
    assert "RecursionError" in reasons["preempt"]
    assert "took longer than 1 s" in reasons["schedule"]
    assert not any(held(marks, function)[0] for function in list(cells)[1:])


def test_answers_written_down_from_the_public_inputs_hold_there_alone(tmp_path: Path):
    table = {}

    def recorded(*args):
        table[args] = args[0] * args[2] / (2 * args[1])
        return table[args]

    run_checks("00", Work("here", {"balance_batch": recorded}), ["balance_batch"])
    code = f"table = {table}\n{BALANCE}return table.get((itemsize, bytes_per_s, flops_per_s), 1.0)"
    marks = grade(with_cells(tmp_path, "00", balance_batch=code), "00", seed=4)
    public, _, n = held(marks, "balance_batch")
    assert public == n and not any(mark.hidden for mark in marks.of("balance_batch") if mark.varies)
    assert [mark.varies for mark in marks.of("floor_seconds")] == [False, False, False, True]
    assert all_held(marks, "floor_seconds", "decode_ceiling")
    [flag] = marks.flags
    assert flag.startswith("balance_batch: holds on the public inputs and not on others: ")


CHEATS = {
    "import os": (BALANCE + "import os\n    " + RIGHT_BALANCE, "import of os"),
    "the stages": (
        BALANCE + "from minillm.stages import naive\n    " + RIGHT_BALANCE,
        "import of minillm.stages.naive",
    ),
    "the setup's": (BALANCE + "return lab.checks", "lab (minillm.lab) is not for use"),
    "the source": (BALANCE + f"open({str(LESSONS / '00_tour.py')!r})", "reading /"),
    "a forged name": (
        "class S(str):\n    def startswith(self, *rest): return False\n" + BALANCE + "getattr(Config, S('__init__'))",
        "getattr(..., '__init__')",
    ),
    "a format": (BALANCE + "text = '{0.real}'\n    return text.format(1)", "a text that reads attributes"),
    "a timer": (BALANCE + "import torch.utils.benchmark", "import of torch.utils.benchmark"),
    "an alias": (BALANCE + "import torch\n    t = torch\n    t.library", "torch.library"),
    "a module": (BALANCE + "import math\n    math.pi = 3", "a change of math"),
    "a class": (BALANCE + "import torch\n    object.__setattr__(torch, 'equal', 1)", "a change of torch"),
    "a folder": (BALANCE + "import pathlib\n    pathlib.Path('a').mkdir()", "writing a"),
    "a file": (BALANCE + "open('/etc/passwd')", "reading /etc/passwd"),
    "writing": (BALANCE + "open('/etc/passwd', 'a')", "writing /etc/passwd"),
    "a descriptor": (BALANCE + "open(3, 'w')", "opening a descriptor"),
    "connecting": (BALANCE + "import asyncio\n    asyncio.run(asyncio.open_connection('127.0.0.1', 9))", "connections"),
    "eval": (BALANCE + "return eval('1')", "eval: not allowed"),
    "getattr": (BALANCE + "return getattr(Config, '__init' + '__')", "getattr(..., '__init__')"),
}


def test_cheating_is_told_to_the_teacher_and_stopped(tmp_path: Path):
    """Each in a cell of its own: the last one of a task counts, and the others are run."""
    notebook = solved(handed_in.source_of("00"))
    [at] = [i for i, cell in enumerate(notebook.cells) if cell.metadata.get("task") == "00.balance_batch"]
    tries = []
    for code, _ in CHEATS.values():
        body = code + "\ntry:\n    balance_batch(1, 2, 3)\nexcept PermissionError:\n    pass"
        tries.append(nbformat.v4.new_code_cell(body, metadata={"task": "00.balance_batch"}))
    notebook.cells[at:at] = tries
    marks = grade(handed_in_as(tmp_path, notebook), "00")
    for name, (_, words) in CHEATS.items():
        assert any(words in flag for flag in marks.flags), (name, marks.flags)
    assert (
        len(marks.flags) == len({words for _, words in CHEATS.values()})
        and not marks.refused
        and all(mark.public for mark in marks.marks)
    )


@pytest.mark.parametrize(
    "code, refused",
    [
        ("().__class__.__base__.__subclasses__()", ["__base__", "__subclasses__"]),
        ("try:\n    f()\nexcept E as e:\n    e.__traceback__.tb_frame", ["__traceback__", "tb_frame"]),
        ("match x:\n    case A(__globals__=g): pass", ["__globals__"]),
        ("__builtins__ = {}", ["__builtins__"]),
        ("import statistics\nstatistics.sys.modules", ["sys"]),
        ("torch._C._x", ["_C", "_x"]),
        ("class A:\n    def __init__(self):\n        self._x = 1\n        super().__init__()\n        self._x.y", []),
        ("name.__class__.__name__", []),
        (
            "class A:\n    __slots__ = ('_n',)\n    def f(self):\n        self.__m = self._n\n        return self.__m",
            [],
        ),
        ("object.__setattr__(self, 'x', 1)\nself.stages.package\ntorch.__version__", []),
        ("x.__class__ = Lie", ["__class__"]),
        ("torch.UntypedStorage.from_file", ["from_file"]),
        ("class A:\n    def __torch_function__(self): pass", ["__torch_function__"]),
        ("match x:\n    case str(format=f): pass", ["format"]),
        ("type('A', (), {})", ["type with other than one argument"]),
    ],
)
def test_ways_out_of_a_cell_are_seen_before_it_runs(code: str, refused: list[str]):
    assert guard.unseemly(ast.parse(code)) == refused


def test_a_cell_that_leads_out_a_borrowed_function_and_memory_without_end(tmp_path: Path):
    cells = {
        "blocks_needed": "import math\nblocks_needed = math.gcd",
        "slots_of": "def slots_of(table, start, stop, size):\n    return slots_of.__globals__",
        "reserve": "def reserve(table, kv_len, free, size):\n    return len([0] * 10**10)",
        "release": "def release(table, free):\n    helper(table)",
    }
    path = with_cells(tmp_path, "09", **cells)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("def helper(table):\n    pass"))
    marks = grade(handed_in_as(tmp_path, notebook), "09", each=5.0, memory_gib=1.0)
    reasons = {function: marks.of(function)[0].reason for function in cells}
    assert "is not written in mine.ipynb: it comes from math" in reasons["blocks_needed"]
    assert "uses __globals__, which leads out" in reasons["slots_of"]
    assert "MemoryError" in reasons["reserve"]
    assert "helper is made in cell 1, which is not run" in reasons["release"]
    assert len(marks.flags) == 2
    carried = [mark for mark in marks.of("schedule") if mark.carried]
    assert carried and not any(mark.public for mark in carried), "schedule is not to blame for the others"


def test_whoever_changes_what_the_checks_stand_on_gets_nothing(tmp_path: Path):
    code = f"import torch\ntorch.equal = lambda a, b: True\n{BALANCE}{RIGHT_BALANCE}"
    marks = grade(with_cells(tmp_path, "00", balance_batch=code), "00", seed=1)
    assert "a change of torch" in marks.flags[0]
    assert not any(mark.public or mark.hidden for mark in marks.of("balance_batch"))

    told: list[dict] = []
    work = grader.Grader({"source": "mine"}, lambda **message: told.append(message)).work({"f": lambda: patch()})
    with pytest.MonkeyPatch.context() as patcher:

        def patch() -> None:
            patcher.setattr(torch, "isclose", lambda *args: True)

        work.call("f")
    run = grading.Run("mine.ipynb", "00", None)
    run.hear(told[0])
    assert "f changed what compares" in run.void and not any(mark.public for mark in run.marks(run.void).marks)


def test_every_kind_of_change_is_seen(monkeypatch: pytest.MonkeyPatch):
    snapshot = audit.Snapshot()
    assert snapshot.changed() == []
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "oct", lambda number: "")  # no other thread needs it meanwhile
        patch.setattr(random.Random, "random", lambda self: 0.5)
        patch.setattr(checking, "abs", lambda x: x, raising=False)
        patch.setattr(Config, "kv_bytes_per_token", lambda *args: 0)
        patch.setattr(ceiling.floor_seconds, "__code__", (lambda *args: 0.0).__code__)
        patch.setattr(torch.Tensor, "__repr__", lambda self: "")
        patch.setattr(torch.Tensor, "equal", lambda self, other: True)
        torch.set_default_dtype(torch.float64)
        found = set(snapshot.changed())
        torch.set_default_dtype(torch.float32)
    assert found >= {
        "builtins.oct",
        "random.Random.random",
        "minillm.lab.checking.abs",
        "minillm.config.Config.kv_bytes_per_token",
        "minillm.config.Config.kv_bytes_per_token.__code__",
        "minillm.bench.ceiling.floor_seconds.__code__",
        "torch.Tensor.__repr__",
        "torch.Tensor.equal",
        "torch's default dtype",
    }
    assert snapshot.changed() == []


def test_the_time_of_the_whole_notebook_has_an_end(tmp_path: Path):
    code = "import time\n" + FLOOR + "time.sleep(100)"
    marks = grade(with_cells(tmp_path, "00", floor_seconds=code), "00", seconds=6.0)
    assert "whole notebook" in marks.of("floor_seconds")[0].reason and "whole notebook" in marks.marks[-1].reason


def test_unusual_and_honest_code_holds_and_a_refused_import_is_no_flag(tmp_path: Path):
    code = """
from __future__ import annotations
import functools, logging, torch
from dataclasses import dataclass
from tqdm import tqdm
log = logging.getLogger(__name__)
@dataclass(frozen=True)
class Shape:
    stages: int
    __slots__ = ("stages",)
    def __init__(self, n): object.__setattr__(self, "stages", n)
class Counter:
    def __init__(self): self.__n = 0
    def more(self): self.__n += 1; return self.__n
def twice(f):
    @functools.wraps(f)
    def g(*args): return f(*args)
    return g
@twice
@functools.cache
def balance_batch(itemsize: float, bytes_per_s, flops_per_s) -> float:
    for _ in tqdm([1]): log.info("%s %s", torch.__version__, Counter().more())
    "{:.2f} {}".format(1.0, Shape(2).stages)
    return itemsize * flops_per_s / (2 * bytes_per_s)
"""
    marks = grade(with_cells(tmp_path, "00", balance_batch=code, floor_seconds="import sys\n" + FLOOR + "pass"), "00")
    assert all(mark.public for mark in marks.of("balance_batch")), marks
    assert "import of sys" in marks.of("floor_seconds")[0].reason and not marks.flags


def test_wraps_reads_nothing_but_what_a_function_has():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functools, "wraps", functools.wraps)
        patch.setattr(functools, "update_wrapper", functools.update_wrapper)
        audit.tame_functools()
        with pytest.raises(PermissionError):
            functools.update_wrapper(type("Catch", (), {})(), ValueError(), assigned=("__traceback__",), updated=())
        assert functools.wraps(len)(lambda x: x).__name__ == "len"


# ---- the channel, and the words


def test_messages_give_no_more_time_and_a_deep_folder_is_removed():
    code = "import os, sys\nwhile True: os.write({}, b'x' * 70000 + b'\\n')"
    with process.scratch() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "command", lambda pipe: [sys.executable, "-c", code.format(pipe)])
        child = process.Process({}, folder)
        with pytest.raises(TimeoutError):
            for message in child.messages(time.monotonic() + 0.5, 10.0):
                assert message == {}
        assert "ended" in child.end()
        at = os.open(folder, os.O_RDONLY)
        for _ in range(1100):
            os.mkdir("a", dir_fd=at)
            inner = os.open("a", os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = inner
        os.close(at)
    assert not folder.exists()


def test_flags_have_an_end():
    run = grading.Run("mine.ipynb", "00", None)
    for i in range(1000):
        run.hear({"flag": str(i)})
    assert len(run.flags) == grading.MOST_FLAGS


def test_a_line_that_is_not_the_graders_is_told():
    run = grading.Run("mine.ipynb", "00", None)
    for line in (b"", b"[]", b'{"found": ["public", 0]}', b'{"nonce": "x", "found": ["public", 0]}', b"[" * 10**6):
        run.hear(process.heard(line, "y"))
    assert run.flags == [grading.OTHERS] and not run.found
    assert process.heard(b'{"nonce": "y", "end": true}', "y") == {"end": True}


def test_feedback_never_shows_what_is_hidden():
    mark = grading.Mark("f", "says", "hint", True, False, "", "expected 3, got 4")
    assert "3" not in mark.feedback and "not on others" in mark.feedback
    assert grading.Mark("f", "says", "hint", False, False, "why", "hidden").feedback == "why"
    assert grading.Mark("f", "says", "hint", True, True, "", "").feedback == ""


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    grading.main(tmp_path / "none.ipynb", "00", seed=1)
    assert "is not a file" in json.loads(capsys.readouterr().out)["refused"]
    with pytest.raises(SystemExit, match="is not known"):
        grading.main(tmp_path / "none.ipynb", "99")


def test_the_walls_hold_for_files_that_python_does_not_see(tmp_path: Path):
    """Landlock, where the kernel has it: C code may read what is named, and write in the folder alone."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir(), outside.mkdir()
    (outside / "secret").write_text("x", "utf-8")
    code = f"""
import ctypes, os, sys
from minillm.course.walls import NEW_RULES, only_files
if ctypes.CDLL(None).syscall(NEW_RULES, None, 0, 1) < 1:
    sys.exit(7)
only_files([sys.prefix, sys.base_prefix], {str(inside)!r})
open({str(inside / "own")!r}, "w").write("y")
for path, mode in (({str(outside / "secret")!r}, "r"), ({str(outside / "new")!r}, "w")):
    try:
        open(path, mode)
    except PermissionError:
        continue
    sys.exit(f"{{path}} was opened")
try:
    os.execv("/bin/false", ["false"])
except PermissionError:
    sys.exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode == 7:
        pytest.skip("this kernel has no Landlock")
    assert done.returncode == 0, done.stderr
    assert (inside / "own").read_text("utf-8") == "y" and not (outside / "new").exists()
