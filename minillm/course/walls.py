"""What the operating system lets the process of a submission do: no network, no other files, no program, an end."""

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

SHARED = 0x40000000  # CLONE_NEWNET
AS_USER = 0x10000000  # CLONE_NEWUSER
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
NO_NEW_RIGHTS = 38  # PR_SET_NO_NEW_PRIVS
NEW_RULES, ADD_RULE, RESTRICT = 444, 445, 446  # Landlock's system calls, the same on all processors
EXECUTE, READ_FILE, READ_FOLDER, TRUNCATE = 1, 1 << 2, 1 << 3, 1 << 14
EVERYTHING = (1 << 13) - 1  # of Landlock's first version
LIBRARIES = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/proc", "/dev/urandom")


def only_files(readable: Iterable[str], folder: str) -> None:
    """Landlock, where the kernel has it: reads these, writes in the folder, starts no program. It holds for C code too,
    which Python's audit does not see. For this thread and those that it starts, so it comes before torch."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(NEW_RULES, None, 0, 1)
    handled = EVERYTHING | (TRUNCATE if version >= 3 else 0)
    if version < 1 or (rules := libc.syscall(NEW_RULES, ctypes.byref(ctypes.c_uint64(handled)), 8, 0)) < 0:
        return
    reads = {path: READ_FILE | READ_FOLDER for path in (*readable, *LIBRARIES)}
    for path, rights in (reads | {folder: handled & ~EXECUTE, os.devnull: READ_FILE | 2}).items():
        if not os.path.exists(path):
            continue
        at = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            rights &= READ_FILE | 2
        libc.syscall(ADD_RULE, rules, 1, struct.pack("=Qi", rights, at), 0)
        os.close(at)
    libc.prctl(NO_NEW_RIGHTS, 1, 0, 0, 0)
    libc.syscall(RESTRICT, rules, 0)
    os.close(rules)


def end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def without_network() -> None:
    """A network of its own with nobody in it, where Linux lets us. The audit refuses connections in any case."""
    try:
        unshare = ctypes.CDLL(None).unshare
    except AttributeError:  # macOS
        return
    if unshare(SHARED) != 0:
        unshare(AS_USER | SHARED)


def limit_memory(more_bytes: int) -> None:
    """Memory from now on: writable and private, as malloc and torch take it. (Addresses would be the wrong thing to
    limit: torch maps many gigabytes that it never touches.) Linux only; elsewhere there is no limit."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + more_bytes, used + more_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))
