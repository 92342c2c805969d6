"""Ending what this process has started, whatever sessions and orphans that has made."""

import ctypes
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

_GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents have ended."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel end this process once its parent has ended, even by SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def end_descendants(process: "subprocess.Popen[bytes] | None" = None) -> None:
    """End a child and all other descendants: SIGTERM, and SIGKILL for what is left."""
    deadline = time.monotonic() + _GRACE_S
    number = signal.SIGTERM
    while found := _descendants():
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while _descendants() and time.monotonic() < deadline:
            time.sleep(0.05)
            _reap(process)
        number = signal.SIGKILL
        _reap(process)
    if process is not None:
        process.wait()


def _descendants() -> list[int]:
    """Return the descendants of this process that run."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name of the program, in parentheses, may hold anything.
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(path.parent.name)] = int(parent)
    found: set[int] = set()
    reached = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in reached} - found:
        found |= new
        reached |= new
    return sorted(found)


def _reap(process: "subprocess.Popen[bytes] | None") -> None:
    """Take the ends of adopted children; that of the child itself is left to its `Popen`."""
    own = None
    if process is not None:
        process.poll()
        own = process.pid
    for path in Path(f"/proc/{os.getpid()}/task/{os.getpid()}").glob("children"):
        for pid in map(int, path.read_text().split()):
            if pid != own:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
