"""Facts about processes, from the operating system."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

_IS_LINUX = sys.platform == "linux"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """One process as it was when it was looked up.

    `start_time` is in seconds since the machine's boot on Linux and since the epoch elsewhere: with
    the process id it names a process, as ids are used again. `is_dying` is true, where the system
    tells it, from when a process has given up its memory and with it its environment until it is a
    zombie, whose children have been handed over.
    """

    pid: int
    parent: int
    process_group: int
    start_time: float
    is_zombie: bool
    is_stopped: bool
    is_dying: bool = False


def read_process(pid: int) -> ProcessFacts | None:
    """Return the facts of a process, or None if there is none with this id."""
    return _read_proc(pid) if _IS_LINUX else _read_psutil(pid)


def _read_proc(pid: int) -> ProcessFacts | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in parentheses and may hold blanks and parentheses itself.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return ProcessFacts(
        pid=pid,
        parent=int(fields[1]),
        process_group=int(fields[2]),
        start_time=int(fields[19]) / os.sysconf("SC_CLK_TCK"),
        is_zombie=fields[0] in (b"Z", b"X"),
        is_stopped=fields[0] in (b"T", b"t"),
        is_dying=fields[20] == b"0" and fields[0] not in (b"Z", b"X"),
    )


def has_pending_signal(pid: int, signum: int) -> bool:
    """Tell whether a process was sent a signal that it has not begun to handle; Linux tells it."""
    return _has_signal(pid, b"ShdPnd:", signum)


def children_that_handle(pid: int, signum: int) -> list[int]:
    """Return the children of a process that have a handler for a signal; Linux tells it."""
    if not _IS_LINUX:
        return []
    children = (process.pid for process in living_processes() if process.parent == pid)
    return [child for child in children if _has_signal(child, b"SigCgt:", signum)]


def _has_signal(pid: int, field: bytes, signum: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return False
    signals = next((int(line.split()[1], 16) for line in lines if line.startswith(field)), 0)
    return bool(signals >> (signum - 1) & 1)


def _read_psutil(pid: int) -> ProcessFacts | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return ProcessFacts(
            pid=pid,
            parent=process.ppid(),
            process_group=os.getpgid(pid),
            start_time=process.create_time(),
            is_zombie=process.status() == psutil.STATUS_ZOMBIE,
            is_stopped=process.status() == psutil.STATUS_STOPPED,
        )
    except (psutil.Error, ProcessLookupError, PermissionError):
        return None


def all_pids() -> list[int]:
    """Return the ids of all processes."""
    if _IS_LINUX:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    import psutil

    return list(psutil.pids())


def living_processes() -> Iterator[ProcessFacts]:
    """Yield all processes but zombies."""
    for pid in all_pids():
        facts = read_process(pid)
        if facts is not None and not facts.is_zombie:
            yield facts


def living_members(process_group: int) -> list[ProcessFacts]:
    """Return the living processes of a process group."""
    return [p for p in living_processes() if p.process_group == process_group]


def own_children() -> list[int] | None:
    """Return the ids of this process's children, zombies included; None if the system hides them.

    The list is whole while nobody reaps at the same time.
    """
    if not _IS_LINUX:
        return None
    children = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with suppress(FileNotFoundError, ProcessLookupError):
                children += _read_children(thread)
    except OSError:
        return None
    return children


def _read_children(thread: str) -> list[int]:
    directory = f"/proc/self/task/{thread}"
    try:
        with open(f"{directory}/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        if os.path.exists(directory):
            raise OSError("This kernel does not list the children of processes.") from None
        raise
