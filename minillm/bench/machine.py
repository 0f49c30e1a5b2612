"""What a measurement was made on: without it a number means nothing."""

import datetime
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import minillm
from minillm import doctor


def describe(device: torch.device) -> dict[str, Any]:
    """The machine, the versions, the command, the commit and the date, ready for JSON."""
    return {
        "machine": {
            "cpu": doctor.cpu_name(),
            "cores": doctor.usable_cores(),
            "threads": torch.get_num_threads(),
            "memory_gb": doctor.memory_gb(),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "system": platform.platform(),
        },
        "versions": {
            "minillm": minillm.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": doctor.version("transformers"),
        },
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def slug() -> str:
    """A name for files of results from this machine: its GPU, or its CPU and cores."""
    name = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{doctor.cpu_name()} {doctor.usable_cores()} cores"
    )
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def commit() -> str | None:
    """The commit of the clone this package runs from, with "-dirty" if files differ; None outside a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    except OSError:  # no git
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


if __name__ == "__main__":  # for the Makefile
    print(slug())
