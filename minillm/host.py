"""The machine under the process, asked without torch: `doctor` must answer where torch is missing."""

import os
from pathlib import Path


def memory_bytes() -> int:
    """The machine's memory, or what a container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return total  # no limit: the file isn't there, or says "max"


def cache_folder() -> Path | None:
    """Where what is made anew if it is gone may be kept for this user; None where nobody knows."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm"
    except RuntimeError:  # there is no home
        return None
