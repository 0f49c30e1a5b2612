"""The results file: sections that live side by side, and files that are not ours."""

import inspect
import json
from pathlib import Path

import pytest

from minillm.bench import results
from minillm.errors import InputError


def test_a_section_takes_its_own_place_and_leaves_the_others(tmp_path: Path):
    path = tmp_path / "machine.json"
    results.check_room(path)
    results.add(path, "ladder", {"rows": [1]})
    results.add(path, "queue", {"rows": [2]})
    results.add(path, "ladder", {"rows": [3]})
    assert results.load(path) == {"ladder": {"rows": [3]}, "queue": {"rows": [2]}}
    assert json.loads(path.read_text())["schema"] == results.SCHEMA
    assert [p.name for p in tmp_path.iterdir()] == ["machine.json"]  # nothing half written lies about


def test_a_section_that_is_no_json_leaves_the_old_file_whole(tmp_path: Path):
    path = tmp_path / "machine.json"
    results.add(path, "ladder", {"rows": [1]})
    with pytest.raises(ValueError):
        results.add(path, "ladder", {"rows": [float("nan")]})
    assert results.load(path) == {"ladder": {"rows": [1]}}


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[]", "is not a results file"),
        ('{"rows": []}', "is not a results file"),
        ('{"schema": 1, "rows": []}', "has schema 1, and this minillm reads 2"),
        ('{"schema": 99, "sections": {}}', "has schema 99"),
        ('{"schema": 2}', "has no sections"),
    ],
)
def test_other_files_are_refused_before_anything_is_measured(tmp_path: Path, text: str, message: str):
    path = tmp_path / "machine.json"
    path.write_text(text)
    for refused in (results.check_room, results.load):
        with pytest.raises(InputError, match=message):
            refused(path)
    assert path.read_text() == text


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    path = tmp_path / "machine.json"
    path.write_bytes(b"\x89PNG\r\n\xff\xfe")
    with pytest.raises(InputError, match="is not JSON"):
        results.check_room(path)
    with pytest.raises(InputError, match="cannot be read"):
        results.load(tmp_path / "nowhere.json")


def test_an_empty_or_a_new_file_has_room(tmp_path: Path):
    results.check_room(None)
    results.check_room(tmp_path / "new.json")
    (tmp_path / "empty.json").touch()
    results.check_room(tmp_path / "empty.json")
    results.add(tmp_path / "empty.json", "queue", {})


def test_files_that_cannot_be_written_are_refused(tmp_path: Path):
    results.check_plot(None)
    results.check_plot(tmp_path / "new.svg")
    for name in ("plot", "plot.gif", "plot.PNG.txt"):  # else it would be found out when all is measured
        with pytest.raises(InputError, match="must end in one of .png"):
            results.check_plot(tmp_path / name)
    with pytest.raises(InputError, match="is a folder"):
        results.check_room(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        results.check_room(tmp_path / "nowhere" / "out.json")


def test_no_module_of_the_package_has_the_name_of_one_of_its_functions():
    """To import such a module puts it in the function's place."""
    import minillm
    from minillm import bench

    for package in (minillm, bench):
        folder = Path(package.__file__).parent
        modules = {path.stem for path in folder.glob("*.py")}
        functions = {name for name, value in vars(package).items() if inspect.isfunction(value)}
        assert functions.isdisjoint(modules), functions & modules
