"""Leftover processes of workers: found by marks, adopted, and ended."""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline._base.files import remove_leftover_directories
from paceline._base.run_memory import memory_root
from paceline._training.workers.processes.process_facts_and_signals import (
    _IS_LINUX,
    ProcessFacts,
    all_pids,
    control_process,
    living_processes,
    own_children,
    read_process,
)

# Signals that a scheduler, a terminal or a shell may send to all processes of a job.
JOB_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


GROUP_VARIABLE = "PACELINE_WORKER_GROUP"
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01
# After so many looks at all processes without finding one there is none. Where there were some, the
# looks go on for a while: on a busy machine, an exec without an environment takes its time.
_CLEAN_LOOKS = 2
_CLEAN_S = 0.3
_adopting_lock = threading.Lock()
_num_adopting = 0


def kill_leftover(pgid: int, start_time: float, timeout_s: float = 5.0) -> int:
    """Kill the leftovers of a worker started by an earlier supervisor.

    The worker is named by its process group (its own process id) and its start time, as
    `WorkerProcess` gives them; another process that got the same id since is left alone. Its
    descendants in other process groups are killed too.

    Returns:
        The number of processes that were killed.

    Raises:
        ValueError: `pgid` is the caller's own, or not a process group of a worker.
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
    # Earlier members cannot be the worker's: the id of their group was used again.
    found = {p.pid for p in processes if p.process_group == pgid and p.start_time >= start_time}
    while more := {p.pid for p in processes if p.parent in found} - found:
        found |= more
    return list(found - {os.getpid()})


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def adopting_orphan_processes() -> Iterator[None]:
    """Make orphaned descendants children of this process, where the system supports this.

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
    """Return the mark of the innermost group in a worker's environment."""
    return environment.get(GROUP_VARIABLE, "").rpartition("/")[2]


def end_stray_processes(group_id: str, timeout_s: float = 2.0) -> int:
    """Kill and reap a group's orphans adopted by this process.

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
    """Kill all processes left by a group on this machine, in any session and with any parent.

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
    num_clean, clean_at = 0, 0.0
    # Several looks: processes may fork meanwhile, and show no environment during an exec.
    while (now := time.monotonic()) < deadline:
        if num_clean >= _CLEAN_LOOKS and now >= clean_at:
            break
        marked = [pid for pid in all_pids() if pid != os.getpid() and _has_mark(pid, group_id)]
        num_clean = 0 if marked else num_clean + 1
        clean_at = now + _CLEAN_S if marked else clean_at
        killed.update(pid for pid in marked if _kill_marked(pid, group_id))
        time.sleep(_POLL_S)
    return len(killed)


def _kill_marked(pid: int, group_id: str) -> bool:
    """Kill a process unless its id was reused; return whether the process was killed."""
    try:
        # Descriptor before the look at the mark: it names the same process even if ids are reused.
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _has_mark(pid, group_id):
            return False
        # By descriptor, as the id may be another process's by now.
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _adopted() -> Iterator[ProcessFacts]:
    own_pid = os.getpid()
    children = own_children()
    # Children alone, where known: a look at all processes takes a hundred times as long.
    for pid in all_pids() if children is None else children:
        facts = read_process(pid)
        if facts is not None and facts.parent == own_pid:
            yield facts


def _is_stray(process: ProcessFacts, group_id: str, killed: Collection[int]) -> bool:
    # A dying process no longer shows whose it was, and its children are still to come.
    return process.pid in killed or process.is_dying or _has_mark(process.pid, group_id)


def marked_process_groups(group_id: str) -> set[int]:
    """Return the process groups of a worker group, without groups nested within.

    It is empty where the system shows no environments.
    """
    if not _IS_LINUX:
        return set()
    wanted, own = group_id.encode(), os.getpgrp()
    return {
        process.process_group
        for process in living_processes()
        if process.process_group != own and _process_marks(process.pid)[-1:] == [wanted]
    }


def use_by_marked(group_id: str) -> tuple[float, int]:
    """Return the CPU seconds of a group's living processes, and the bytes they read and wrote.

    Their ended children count as well. Both are known on Linux only.
    """
    cpu_ticks, num_bytes = 0, 0
    for pid in all_pids() if _IS_LINUX else ():
        if not _has_mark(pid, group_id):
            continue
        with suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            # User and system time, and those of children that were waited for.
            cpu_ticks += sum(map(int, stat[stat.rindex(b")") + 2 :].split()[11:15]))
            told = Path(f"/proc/{pid}/io").read_bytes().split()
            num_bytes += int(told[1]) + int(told[3])
    return cpu_ticks / os.sysconf("SC_CLK_TCK"), num_bytes


def _has_mark(pid: int, group_id: str) -> bool:
    return group_id.encode() in _process_marks(pid)


def _process_marks(pid: int) -> list[bytes]:
    """Return the marks in a process's environment, the outermost first."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        # The process has ended, or is another user's.
        return []
    prefix = f"{GROUP_VARIABLE}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].split(b"/")
    return []


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        # Another thread may have reaped it before.
        os.waitpid(pid, os.WNOHANG)


# Programs that use Paceline show that they live every half second.
LEAST_HEARTBEAT_TIMEOUT_S = 1.0
_LONGEST_TICK_S = 1.0


@dataclass(eq=False, repr=False)
class StoppedWorkerWatch:
    """Watch on workers until each has ended, to report those stopped for long.

    Args:
        timeout_s: How long a worker may be stopped, in seconds.
        ranks: Returns the ranks of the workers that were started and have not ended.
        is_stopped: Returns whether the worker of a rank is stopped.
        on_silence: Gets the rank of a silent worker and the reason.

    Raises:
        ValueError: `timeout_s` is below a second.
    """

    timeout_s: float
    ranks: Callable[[], Sequence[int]]
    is_stopped: Callable[[int], bool]
    on_silence: Callable[[int, str], object]

    def __post_init__(self) -> None:
        if not self.timeout_s >= LEAST_HEARTBEAT_TIMEOUT_S:
            raise ValueError(
                f"`heartbeat_timeout_s` must be at least {LEAST_HEARTBEAT_TIMEOUT_S:g}, but got"
                f" {self.timeout_s!r}."
            )
        self._tick_s = min(_LONGEST_TICK_S, self.timeout_s / 5)
        self._silent_s: dict[int, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-pulse", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._is_over.wait(self._tick_s):
            now = time.monotonic()
            # While this process stood still itself, nobody was late.
            elapsed_s, last = min(now - last, 2 * self._tick_s), now
            for rank in self.ranks():
                self._check_rank(rank, elapsed_s)

    def _check_rank(self, rank: int, elapsed_s: float) -> None:
        if not self.is_stopped(rank):
            self._silent_s[rank] = 0.0
            return
        silent_s = self._silent_s[rank] = self._silent_s.get(rank, 0.0) + elapsed_s
        if silent_s > self.timeout_s:
            text = f"is stopped (SIGSTOP): it gave no sign of life for {silent_s:.3g} s"
            self.on_silence(rank, text)


@contextmanager
def sweeping_after_kill() -> Iterator[dict[str, str]]:
    """Let another process end the workers' leftovers if this process is killed within the block.

    Workers end with this process by themselves, but processes that they started do not. To be
    entered before this process starts threads, as it forks.

    Yields:
        The variables that mark processes to end, for the environment of the workers.
    """
    if sys.platform != "linux":
        yield {}
        return
    group_id = secrets.token_hex(8)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            _await_end(ours, theirs, group_id)
        finally:
            # Exit handlers are for the process that forked, not for its copy.
            os._exit(0)
    theirs.close()
    try:
        yield {GROUP_VARIABLE: nested_group_mark(group_id, os.environ.get(GROUP_VARIABLE))}
    finally:
        with ours, suppress(OSError):
            ours.send(b"\0")
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _await_end(other: socket.socket, own: socket.socket, group_id: str) -> None:
    # Signals to the whole job are ignored: this process has to outlive the others.
    for number in JOB_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Whoever reads this process's output waits for no more than its own end.
    other.close()
    silence = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(silence, standard)
    os.closerange(3, own.fileno())
    os.closerange(own.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    # End of file without a byte: the other process was killed within the block.
    if not own.recv(1):
        end_marked(group_id)
        remove_leftover_directories(memory_root())
