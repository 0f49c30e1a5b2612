"""What the lessons stand on: a learner's code found and called with care, notes, builds."""

import json
from pathlib import Path

import nbformat
import pytest
import torch

from minillm import attention, lab
from minillm.errors import InputError
from minillm.lab import build, checking, notes
from minillm.lab.checking import Property, Report, run_checks
from minillm.lab.use import use
from minillm.lab.work import Work, Wrong, from_file, same, time_limit

ONES = torch.ones(2, 3)


# ---- calling a learner's function


def work_of(code: str) -> Work:
    names: dict = {"torch": torch}
    exec(code, names)
    return Work("here", names)


@pytest.mark.parametrize(
    "code, words",
    [
        ("", "there is no function double in here"),
        ("double = 3", "double is int, not a function"),
        ("def double(x):\n    raise NotImplementedError('task 1')", "not written yet (task 1)"),
        ("def double(x):\n    import no_such_module", "is not installed"),
        ("def double(x):\n    return x + y", "double raised NameError: name 'y' is not defined"),
        ("def double(x):\n    x *= 2\n    return x", "double changed its argument number 1"),
        ("def double():\n    pass", "double raised TypeError"),
    ],
)
def test_what_goes_wrong_in_a_call_is_said_in_words(code: str, words: str):
    with pytest.raises(Wrong) as caught:
        work_of(code).call("double", torch.ones(3))
    assert words in str(caught.value)


def test_arguments_that_are_meant_to_change_may():
    work = work_of("def fill(x, y):\n    x.fill_(7)\n    return x")
    assert work.call("fill", torch.ones(2), [1], changes=(0,)).tolist() == [7, 7]
    with pytest.raises(Wrong, match="number 2"):
        work_of("def fill(x, y):\n    y.append(1)").call("fill", torch.ones(2), [1])


@pytest.mark.parametrize(
    "got, words",
    [
        (None, "is None: is a `return` missing?"),
        ([[1.0]], "is list; it must be a tensor of shape [2, 3]"),
        (torch.ones(3, 2), "the shape must be [2, 3], and is [3, 2]"),
        (torch.ones(2, 3, dtype=torch.float64), "the dtype must be torch.float32, and is torch.float64"),
        (torch.ones(2, 3, device="meta"), "the device must be cpu, and is meta"),
        (torch.tensor([[1, 1, 1], [1, float("nan"), 1]]), "has NaN, first at [1, 1]"),
        (torch.tensor([[1, 1, 1.5], [1, 2, 1]]), "33% of the values differ; first at [0, 2]: expected 1, got 1.5"),
    ],
)
def test_tensors_are_compared_in_full(got: object, words: str):
    same(ONES.clone(), ONES, "x")
    with pytest.raises(Wrong) as caught:
        same(got, ONES, "x")
    assert words in str(caught.value)


def test_numbers_and_lists_are_compared_too():
    same(3, 3, "n")
    same(0.30000001, 0.3, "share", 1e-6)
    same([(0, 4), (4, 3)], [(0, 4), (4, 3)], "chunks")
    for got, expected, words in (
        (4, 3, "expected 3, got 4"),
        (3.0, 3, "expected 3, got 3.0"),
        (True, 1, "expected 1, got True"),
        (0.4, 0.3, "expected 0.3, got 0.4"),
        ([1, 2], [1, 3], "index 1: expected 3, got 2"),
        ([1, 2], [1, 2, 3], "expected 3 entries, got 2"),
        ("a", [1], "expected [1], got 'a'"),
    ):
        with pytest.raises(Wrong) as caught:
            same(got, expected, "x")
        assert words in str(caught.value)


@pytest.mark.parametrize("got, expected", [(1.0, 2.0), ([1], [2]), ({"a": 1}, {"a": 2}), ([(1, 2)], [(3, 2)])])
def test_a_value_that_says_it_equals_everything_is_wrong(got, expected):
    class Lie(float):
        def __eq__(self, other):
            return True

        def __ne__(self, other):
            return False

        __hash__ = float.__hash__

    def lying(value):
        if isinstance(value, list | tuple):
            return type(value)(lying(one) for one in value)
        return {key: Lie(one) for key, one in value.items()} if isinstance(value, dict) else Lie(value)

    with pytest.raises(Wrong, match="a Lie, a class that Python and torch do not know"):
        same(lying(got), expected, "x")


def test_a_changed_model_and_a_changed_class_are_told_and_the_model_is_given_back():
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    work = work_of(
        "class Lie(torch.Tensor): pass\n"
        "def zero(model):\n    for p in model.parameters(): p.data.zero_()\n"
        "def hook(model):\n    model.register_forward_hook(print)\n"
        "def swap(x):\n    x.__class__ = Lie\n"
    )
    for name in ("zero", "hook"):
        with pytest.raises(Wrong, match="changed its argument number 1"):
            work.call(name, model)
    assert torch.equal(model.weight, before) and not model._forward_hooks
    with pytest.raises(Wrong, match="a Lie"):
        work.call("swap", torch.ones(2), changes=(0,))


def test_what_is_lent_is_of_no_use_afterwards():
    work = work_of("def one(): return 0\ndef keep(): return one")
    with work.replaced({"one": lambda: 1}):
        kept = work.call("keep")
        assert kept() == 1
    assert work.call("one") == 0
    with pytest.raises(RuntimeError, match="was kept from another check"):
        kept()


def test_a_loop_that_never_ends_is_stopped():
    work = work_of("def spin():\n    while True:\n        pass")
    with pytest.raises(Wrong, match="took longer than 0.2 s"), time_limit(0.2, "spin"):
        work.call("spin")
    with time_limit(0.2, "nothing"):
        pass  # and the alarm is off afterwards


@pytest.mark.parametrize("inner", [0.05, 60.0])
def test_a_limit_within_a_limit_leaves_it_on(inner: float):
    with pytest.raises(Wrong, match="took longer than 0.3 s"), time_limit(0.3, "all of it"):
        with time_limit(inner, "a part"):
            pass
        while True:
            pass


# ---- finding a learner's functions


CELLS = '''# %% [markdown]
# # Title

# %% tags=["setup"]
import torch
UNIT = 2

# %%
raise SystemExit("a measuring cell was run")

# %% task="09.double"
def double(x):
    """Twice."""
    ### BEGIN SOLUTION
    return UNIT * x
    ### END SOLUTION

# %% task="09.broken"
def broken(x):
    ### BEGIN SOLUTION
    return x +* 2
    ### END SOLUTION
'''


def as_notebook(path: Path) -> Path:
    source = path.parent / "09_nine.py"
    source.write_text(CELLS)
    nbformat.write(build.solved(source), path)
    return path


@pytest.mark.parametrize("kind", ["py", "ipynb"])
def test_only_setup_and_task_cells_are_run(tmp_path: Path, kind: str):
    source = tmp_path / "09_nine.py"
    source.write_text(CELLS)
    work = from_file(source if kind == "py" else as_notebook(tmp_path / "mine.ipynb"))
    assert work.call("double", 4) == 8
    with pytest.raises(Wrong, match=r"cell [56] of .* does not run: SyntaxError: .*, line 3"):
        work.function("broken")


def test_an_error_names_the_learners_own_line(tmp_path: Path):
    path = tmp_path / "plain.py"
    path.write_text("def double(x):\n    y = x\n    return y.no_such_thing\n")
    with pytest.raises(Wrong, match="at line 3 of double: return y.no_such_thing"):
        from_file(path).call("double", 1)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("x.txt", b"", "must end in .ipynb or .py"),
        ("x.ipynb", b"{", "is not a notebook or Python text"),
        ("x.py", b"\xff\xfe\xff", "is not a notebook or Python text"),
    ],
)
def test_files_that_are_no_work_are_refused(tmp_path: Path, name: str, content: bytes, words: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words):
        from_file(tmp_path / name)


# ---- reports


def report_of(work: Work, monkeypatch: pytest.MonkeyPatch) -> Report:
    def twice(work: Work) -> None:
        same(work.call("double", 4), 8, "double(4)")

    monkeypatch.setattr(checking, "properties", lambda lesson: [Property("09", "double", "doubles", "times 2", twice)])
    return run_checks("09", work)


def test_a_report_says_what_was_checked_and_why_it_is_wrong(monkeypatch: pytest.MonkeyPatch):
    right = report_of(work_of("def double(x):\n    return 2 * x"), monkeypatch)
    assert right.passed and "ok     double: doubles" in right.text() and "1 of 1 properties hold" in right.text()
    wrong = report_of(work_of("def double(x):\n    return x"), monkeypatch)
    assert not wrong.passed
    for words in ("checked: here", "WRONG  double: doubles", "expected 8, got 4", "hint: times 2", "0 of 1"):
        assert words in wrong.text()
    nothing = report_of(work_of(""), monkeypatch)
    assert not nothing.passed and "there is no function double" in nothing.text()


def test_a_function_that_never_ends_is_tried_once(monkeypatch: pytest.MonkeyPatch):
    tried = []

    def spin(work: Work) -> None:
        tried.append(work.call("spin"))

    properties = [Property("09", "spin", f"property {i}", "count", spin) for i in range(3)]
    monkeypatch.setattr(checking, "properties", lambda lesson: properties)
    monkeypatch.setattr(checking, "SECONDS", 0.2)
    report = run_checks("09", work_of("def spin():\n    while True:\n        pass"))
    assert (
        not tried
        and "spin took longer than 0.2 s" in report.text()
        and [f.wrong for f in report.findings][1:] == ["spin was too slow above; not tried"] * 2
    )


def test_one_cause_is_told_once_and_what_is_to_do_has_no_hint(monkeypatch: pytest.MonkeyPatch):
    def twice(work: Work) -> None:
        same(work.call("double", 4), 8, "double(4)")

    properties = [Property("09", "double", f"property {i}", "times 2", twice) for i in range(3)]
    monkeypatch.setattr(checking, "properties", lambda lesson: properties)
    wrong = run_checks("09", work_of("def double(x):\n    return x")).text()
    assert wrong.count("expected 8, got 4") == wrong.count("hint: times 2") == 1
    assert wrong.count("the same as above") == 2
    crash = run_checks("09", work_of("def double(x):\n    return y")).text()
    assert crash.count("NameError") == 1 and "hint" not in crash
    stub = "def {}(x):\n    raise NotImplementedError('task 09.{}: yours to write')"
    to_do = run_checks("09", work_of(stub.format("double", "double"))).text()
    assert to_do.count("to do  double is not written yet") == 1 and "hint" not in to_do and "WRONG" not in to_do
    needs = run_checks("09", work_of(stub.format("half", "half") + "\ndef double(x):\n    return half(x)")).text()
    assert "double needs your half, which is not written yet" in needs
    assert "wait   double" in needs and "WRONG" not in needs and "hint" not in needs  # it is nothing of its own


HALF = "def half(x):\n    return {}\n\ndef double(x):\n    return {}\n"


@pytest.mark.parametrize(
    "half, double, only, marks, words",
    [
        ("x / 2", "8 * half(half(x))", None, ["ok", "ok"], ""),
        ("x / 2", "half(x)", None, ["ok", "WRONG"], "double(4): expected 8, got 2"),
        (
            "x",
            "8 * half(half(x))",
            None,
            ["WRONG", "wait"],
            "mend half first: with a right one in the place of yours",
        ),
        ("x", "8 * half(half(x))", ["double"], ["wait"], "mend half first"),
        ("y", "8 * half(half(x))", None, ["WRONG", "wait"], "mend half first"),
        ("x", "half(x)", None, ["WRONG", "WRONG"], "double(4): expected 8, got 2\n(this stays so with a right half in"),
        ("x", "x + x", None, ["WRONG", "ok"], ""),
    ],
)
def test_a_fault_is_told_where_it_belongs(half, double, only, marks, words, monkeypatch: pytest.MonkeyPatch):
    def halves(work: Work) -> None:
        same(work.call("half", 4), 2.0, "half(4)")

    def twice(work: Work) -> None:
        same(work.call("double", 4), 8.0, "double(4)")

    properties = [
        Property("09", "half", "halves", "x / 2", halves),
        Property("09", "double", "doubles", "times 2", twice, {"half": lambda x: x / 2}),
    ]
    monkeypatch.setattr(checking, "properties", lambda lesson: properties)
    work = work_of(HALF.format(half, double))
    mine = work.names["half"]
    report = run_checks("09", work, only)
    lines = report.text().splitlines()
    assert [line.split()[0] for line in lines if "halves" in line or "doubles" in line] == marks
    assert words in (report.findings[-1].wrong or "") and report.passed == (set(marks) == {"ok"})
    assert ("hint: times 2" in report.text()) == (marks[-1] == "WRONG")  # a hint is of no use to what only waits
    assert work.names["half"] is mine


def test_a_fault_that_others_wait_for_is_told_once(monkeypatch: pytest.MonkeyPatch):
    def halves(work: Work) -> None:
        same(work.call("half", 4), 2.0, "half(4)")

    def twice(work: Work) -> None:
        same(work.call("double", 4), 8.0, "double(4)")

    properties = [Property("09", "double", f"{i}", "x", twice, {"half": lambda x: x / 2}) for i in range(3)]
    monkeypatch.setattr(checking, "properties", lambda lesson: [Property("09", "half", "h", "x", halves), *properties])
    work = work_of(HALF.format("x", "8 * half(half(x))"))
    work.broken["half"] = "cell 3 does not run"
    del work.names["half"]
    text = run_checks("09", work).text()
    assert text.count("mend half first") == 1 and text.count("the same as above") == 2 and "cell 3 does not" in text
    assert work.broken and "half" not in work.names


def test_a_fault_of_the_check_itself_is_not_the_learners(monkeypatch: pytest.MonkeyPatch):
    def broken(work: Work) -> None:
        {}[work.call("double", 4)]

    def calls_back(work: Work) -> None:
        work.function("double")([])  # inside torch, but the learner's call

    properties = [Property("09", "double", "a", "b", broken), Property("09", "double", "c", "d", calls_back)]
    monkeypatch.setattr(checking, "properties", lambda lesson: properties)
    report = run_checks("09", work_of("def double(x):\n    return torch.add(x, x)if x == [] else 8"))
    assert not report.passed and "0 of 2" in report.text() and "hint" not in report.text()
    assert (report.findings[0].wrong or "").startswith(
        "the check itself failed, which says nothing about your double: KeyError: 8\n  at line "
    )
    assert "of test_lab.py: {}[work.call" in report.text() and "Please report this" in report.text()
    assert "double raised TypeError: add()" in (report.findings[1].wrong or "")


def test_unknown_lessons_are_refused():
    with pytest.raises(InputError, match="lesson '99' is not known; use one of 00, 01"):
        checking.properties("99")


# ---- putting work to use


def test_a_function_that_is_put_to_use_changes_what_the_engine_makes(tiny, tmp_path: Path, capsys):
    """A wrong mask, and the engine's tokens change; undone, they are as before."""
    from minillm.engine import Engine
    from minillm.params import SamplingParams

    def tokens() -> list[int]:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        return Engine(tiny, max_running=2, max_len=64).generate([[5, 9, 11, 3, 8]], params)[0].token_ids

    before = tokens()
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n\ndef visible(q_pos, k_pos, q_seq=None, k_seq=None):\n"
        "    return k_pos[..., None, :] == q_pos[..., :, None]  # itself alone\n"
    )
    undo = use(path)
    try:
        assert "minillm.attention.visible is now" in capsys.readouterr().out
        assert tokens() != before
    finally:
        undo()
    assert tokens() == before and attention.visible.__module__ == "minillm.attention"
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(InputError, match="has none of the functions"):
        use(tmp_path / "none.py")


def test_a_stub_is_not_put_to_use(tmp_path: Path, capsys):
    stub = 'raise NotImplementedError("task 02.visible: yours to write")'
    path = tmp_path / "mine.py"
    path.write_text(f"def visible(q, k):\n    {stub}\n\ndef rotate(x, cos, sin):\n    return x\n")
    undo = use(path)
    undo()
    told = capsys.readouterr().out
    assert "visible is not written yet: ours stays" in told and "minillm.model.rotate is now" in told


# ---- notes


def test_predictions_and_answers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("MINILLM_NOTES", str(tmp_path / "notes.json"))
    lab.predict("04.tokens", None)
    assert not (tmp_path / "notes.json").exists() and "no prediction yet" in capsys.readouterr().out
    lab.predict("04.tokens", 1000)
    lab.predict("04.tokens", 1500)
    lab.answer("04.why", "  ")
    lab.answer("04.why", " because ")
    assert json.loads((tmp_path / "notes.json").read_text()) == {
        "predictions": {"04.tokens": 1500},
        "answers": {"04.why": "because"},
    }
    lab.reveal("04.tokens", 1520)
    lab.reveal("04.tokens", 15200)
    lab.reveal("04.bytes", 7)
    told = capsys.readouterr().out
    assert "measured 1520; you predicted 1500. Close." in told
    assert "A factor of 10.1 apart" in told and "measured 7; you made no prediction" in told


@pytest.mark.parametrize("value", [True, float("nan"), [1]])
def test_predictions_that_are_none_are_refused(value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINILLM_NOTES", str(tmp_path / "notes.json"))
    with pytest.raises(InputError, match="04.x: the prediction is"):
        lab.predict("04.x", value)


def test_a_broken_file_of_notes_is_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "notes.json"
    path.write_text("{")
    monkeypatch.setenv("MINILLM_NOTES", str(path))
    with pytest.raises(InputError, match="is not a file of notes"):
        notes.predict("04.x", 1)
    assert path.read_text() == "{"


def test_the_dial(monkeypatch: pytest.MonkeyPatch):
    for dial, value in (("ci", 1), ("default", 2), ("long", 3)):
        monkeypatch.setenv("MINILLM_SIZE", dial)
        assert lab.size(1, 2, 3) == value
    monkeypatch.setenv("MINILLM_SIZE", "huge")
    with pytest.raises(InputError, match="MINILLM_SIZE is 'huge'"):
        lab.size(1, 2, 3)


# ---- builds


def test_a_stub_raises_with_its_tasks_number(tmp_path: Path):
    source = tmp_path / "09_nine.py"
    source.write_text(CELLS)
    made = build.student(source)
    [cell] = [cell for cell in made.cells if cell["id"] == "09-double"]
    assert cell.source == (
        'def double(x):\n    """Twice."""\n    raise NotImplementedError("task 09.double: yours to write")'
    )
    assert [cell["id"] for cell in made.cells] == ["09-01", "09-install", "09-02", "09-03", "09-double", "09-broken"]
    assert [cell["id"] for cell in build.solved(source).cells] == [cell["id"] for cell in made.cells]


@pytest.mark.parametrize(
    "cell, words",
    [
        ("# %%\ndef f():\n    ### BEGIN SOLUTION\n    ### END SOLUTION", "a solution in a cell without a task"),
        ('# %% task="09.f"\ndef f():\n    return 1', "do not match"),
        ('# %% task="09.f"\ndef f():\n    ### BEGIN SOLUTION\n    return 1', "do not match"),
        ("# %% [markdown]\n# <!-- BEGIN SOLUTION -->\n# so", "do not match"),
    ],
)
def test_marks_that_do_not_match_are_refused(tmp_path: Path, cell: str, words: str):
    source = tmp_path / "09_nine.py"
    source.write_text(cell)
    with pytest.raises(InputError, match=words):
        build.student(source)


def test_text_of_a_solution_is_left_out(tmp_path: Path):
    source = tmp_path / "09_nine.py"
    marked = "# <!-- BEGIN SOLUTION -->\n# secret\n# <!-- END SOLUTION -->\n"
    source.write_text(f"# %% [markdown]\n# before\n#\n{marked}# after\n")
    cell, _ = build.student(source).cells
    assert "secret" not in cell.source and "before" in cell.source and "after" in cell.source
    assert "secret" in build.solved(source).cells[0].source


def test_the_lab_never_writes_over_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    source = tmp_path / "09_nine.py"
    source.write_text(CELLS)
    monkeypatch.setattr(build, "sources", lambda: [source])
    folder = tmp_path / "mine"
    build.make_lab(folder)
    path = folder / "09_nine.ipynb"
    path.write_text(path.read_text().replace("yours to write", "MY WORK"))
    build.make_lab(folder)
    assert "MY WORK" in path.read_text() and "yours, kept" not in capsys.readouterr().out
    source.write_text(CELLS + '\n# %% task="09.new"\ndef new():\n    ### BEGIN SOLUTION\n    ### END SOLUTION\n')
    build.make_lab(folder)
    assert "MY WORK" in path.read_text() and "the lesson has changed" in capsys.readouterr().out
