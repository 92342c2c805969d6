"""Leftover processes of workers: found by a mark in their environment, adopted, and killed."""

import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from paceline.workers.processes._process_facts import (
    ProcessFacts,
    all_pids,
    living_processes,
    own_children,
    read_process,
)
from paceline.workers.processes._signals import control_process

GROUP_VARIABLE = "PACELINE_WORKER_GROUP"

_PR_SET_CHILD_SUBREAPER = 36
_IS_LINUX = sys.platform == "linux"
_POLL_S = 0.01
# After so many looks at all processes without finding one there is none.
_CLEAN_LOOKS = 2

_adopting_lock = threading.Lock()
_num_adopting = 0


def kill_leftover(pgid: int, start_time: float, timeout_s: float = 5.0) -> int:
    """Kill what is left of a worker that an earlier supervisor started.

    The worker is named by its process group (its own process id) and its start time, as
    `WorkerProcess` gives them; another process that got the same id since is left alone. Its
    descendants in other process groups are killed too.

    Returns:
        The number of processes that were killed.

    Raises:
        ValueError: `pgid` is that of the caller, or not a process group of a worker.
    """
    if pgid <= 1 or pgid == os.getpgrp():
        raise ValueError(
            f"`pgid` must name the process group of a worker, but got {pgid}."
            " Hint: pass the `pgid` of a `WorkerProcess`."
        )
    leader = read_process(pgid)
    if leader is not None and leader.start_time != start_time:
        return 0
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while targets := _leftover_pids(pgid, start_time):
        for pid in targets:
            killed.add(pid)
            _kill(pid)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return len(killed)


def _leftover_pids(pgid: int, start_time: float) -> list[int]:
    processes = list(living_processes())
    found = {p.pid for p in processes if p.process_group == pgid and p.start_time >= start_time}
    while more := {p.pid for p in processes if p.parent in found} - found:
        found |= more
    return list(found - {os.getpid()})


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def adopting_orphan_processes() -> Iterator[None]:
    """Let orphaned descendants become children of this process, where the system can do it.

    Whoever adopts must also reap, so that nobody is adopted any more once the last one of those
    who asked for it has finished.
    """
    global _num_adopting
    with _adopting_lock:
        _num_adopting += 1
        control_process(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        with _adopting_lock:
            _num_adopting -= 1
            if not _num_adopting:
                control_process(_PR_SET_CHILD_SUBREAPER, 0)


def nested_group_mark(group_id: str, environment: str | None) -> str:
    """Return the value of `GROUP_VARIABLE` for a group inside the groups named so far."""
    return f"{environment}/{group_id}" if environment else group_id


def innermost_group(environment: Mapping[str, str]) -> str:
    """Return the mark of the group that a worker with such an environment belongs to."""
    return environment.get(GROUP_VARIABLE, "").rpartition("/")[2]


def end_stray_processes(group_id: str, timeout_s: float = 2.0) -> int:
    """Kill and reap orphans of a group that became children of this process.

    An orphan is known by the group's mark in its environment, so that other children of this
    process are never touched.

    Returns:
        The number of processes that were killed.
    """
    if not _IS_LINUX or own_children() == []:
        return 0
    killed: set[int] = set()
    seen: set[int] = set()
    deadline = time.monotonic() + timeout_s
    # Each that dies hands over its children: look again until nobody is new.
    while adopted := list(_adopted()):
        strays = [process for process in adopted if _is_stray(process, group_id, killed)]
        for stray in strays:
            if not stray.is_dying:
                killed.add(stray.pid)
                _kill(stray.pid)
            if stray.pid in killed:
                _reap(stray.pid)
        pids = {process.pid for process in adopted}
        if (not strays and pids <= seen) or time.monotonic() > deadline:
            break
        seen |= pids
        time.sleep(_POLL_S)
    return len(killed)


def end_marked(group_id: str, timeout_s: float = 5.0) -> int:
    """Kill all processes of this machine that a group has left, wherever they have gone.

    They are known by the group's mark in their environment, so that it makes no difference which
    session they lead and who is their parent now. Processes whose environment this user may not
    read are left alone.

    Returns:
        The number of processes that were killed; 0 where the system shows no environments.
    """
    if not _IS_LINUX:
        return 0
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    num_clean = 0
    # One may fork while others are looked at, and one that just executes a program shows nothing.
    while num_clean < _CLEAN_LOOKS and time.monotonic() < deadline:
        marked = [pid for pid in all_pids() if pid != os.getpid() and _has_mark(pid, group_id)]
        num_clean = 0 if marked else num_clean + 1
        killed.update(pid for pid in marked if _kill_marked(pid, group_id))
        time.sleep(_POLL_S)
    return len(killed)


def _kill_marked(pid: int, group_id: str) -> bool:
    """Kill a process unless another one has got its id since; True if it was killed."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _has_mark(pid, group_id):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _adopted() -> Iterator[ProcessFacts]:
    own_pid = os.getpid()
    children = own_children()
    # To look at all processes takes a hundred times as long.
    for pid in all_pids() if children is None else children:
        facts = read_process(pid)
        if facts is not None and facts.parent == own_pid:
            yield facts


def _is_stray(process: ProcessFacts, group_id: str, killed: Collection[int]) -> bool:
    # A dying process no longer shows whose it was, and its children are still to come.
    return process.pid in killed or process.is_dying or _has_mark(process.pid, group_id)


def marked_process_groups(group_id: str) -> set[int]:
    """Return the process groups of what belongs to a group, and to no group within it.

    It is empty where the system shows no environments.
    """
    if not _IS_LINUX:
        return set()
    wanted, own = group_id.encode(), os.getpgrp()
    return {
        process.process_group
        for process in living_processes()
        if process.process_group != own and _marks_of_process(process.pid)[-1:] == [wanted]
    }


def _has_mark(pid: int, group_id: str) -> bool:
    return group_id.encode() in _marks_of_process(pid)


def _marks_of_process(pid: int) -> list[bytes]:
    """Return the marks in a process's environment, the outermost first."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return []
    prefix = f"{GROUP_VARIABLE}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].split(b"/")
    return []


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
