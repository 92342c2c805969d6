"""All processes of a laboratory, wherever they have gone, by a variable in their environment."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Found:
    """A process and what it is."""

    pid: int
    kind: str
    text: str

    def kill(self) -> bool:
        """Kill it; False if it has ended already."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            return True
        return False


def processes_of(directory: Path) -> list[Found]:
    """Return the living processes that have FAULT_LAB=`directory` in their environment."""
    mark = b"FAULT_LAB=" + os.fsencode(directory) + b"\0"
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if mark not in (entry / "environ").read_bytes():
                continue
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            name = (entry / "comm").read_text().strip()
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        found.append((int(entry.name), int(parent), f"{name} {words}".strip()))
    training = {pid for pid, _, text in found if "train.py" in text and "launch" not in text}
    return [Found(pid, _kind(text, parent in training), text) for pid, parent, text in found]


def end_all(find: Callable[[], list[psutil.Process]]) -> None:
    """Kill the processes that a function finds, until it finds none."""
    while left := find():
        # First, so that none of them can tell of the end of another.
        for action in (psutil.Process.suspend, psutil.Process.kill):
            for process in left:
                with suppress(psutil.Error):
                    action(process)
        psutil.wait_procs(left, timeout=1)


def _kind(text: str, is_child_of_training: bool) -> str:
    for part, kind in (
        ("paceline.cli up", "master"),
        ("paceline.cli runner", "node"),
        # Forked runners and entrypoints have command lines of their own.
        ("worker_program.py template", "template"),
        ("runner-", "runner"),
        ("--host", "host"),
        ("paceline._cluster.runner", "runner"),
        ("paceline.launch", "launcher"),
        ("sleep", "helper"),
    ):
        if part in text:
            return kind
    if "train.py" in text:
        return "loader" if is_child_of_training else "training"
    return "other"
