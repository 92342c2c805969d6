"""Facts about processes, and signals to them."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

_IS_LINUX = sys.platform == "linux"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Facts about a process at the time of its look-up.

    `start_time` is in seconds since the machine's boot on Linux and since the epoch elsewhere: with
    the process id it names a process, as ids are used again. `is_dying` is true, where the system
    shows it, from when a process has given up its memory and with it its environment until it is a
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
    """Return whether a signal to a process is still pending; known on Linux only."""
    return _has_signal(pid, b"ShdPnd:", signum)


def children_that_handle(pid: int, signum: int) -> list[int]:
    """Return the children of a process with a handler for a signal; known on Linux only."""
    if not _IS_LINUX:
        return []
    children = (process.pid for process in living_processes() if process.parent == pid)
    return [child for child in children if _has_signal(child, b"SigCgt:", signum)]


def _has_signal(pid: int, field: bytes, signum: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        # The process has ended meanwhile.
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


# Has a worker write the stacks of its threads to its error output. A signal that nobody else uses
# where there are such, and one that interrupts also a thread that holds Python's lock.
STACKS_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


_PR_SET_PDEATHSIG = 1


@contextmanager
def noted_signals(names: Sequence[str], note: Callable[[int], object]) -> Iterator[None]:
    """Have a function note signals within the block, if this is the main thread.

    Signals for which someone has set a handler stay as they are.

    Args:
        names: The signals, such as "SIGTERM".
        note: Gets the number of a signal; it is called in the signal handler.
    """

    def handle(signum: int, _: FrameType | None) -> None:
        note(signum)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for name in names:
            number = getattr(signal, name)
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def signal_group(pgid: int, signum: int) -> None:
    """Send a signal to a process group; a missing group is no error."""
    # macOS says "not permitted" for a group of zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signum)


def signal_with_parent(signum: int) -> bool:
    """Make the system send this process a signal at the end of its parent.

    Returns:
        False where the operating system has no such thing.
    """
    return control_process(_PR_SET_PDEATHSIG, signum)


def control_process(option: int, value: int) -> bool:
    """Set an option of this process; return False where the system lacks the option."""
    if not _IS_LINUX:
        return False
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, value, 0, 0, 0) == 0)
