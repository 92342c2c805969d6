"""Watchdog of ranks waiting in vain, and the progress of a worker's main thread."""

import ctypes
import faulthandler
import json
import os
import re
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from paceline._base.exceptions import CollectiveMismatchError
from paceline._training.workers.worker_failures import WorkerFailedError

_OWN_CODE = str(Path(__file__).parents[2]) + os.sep
_PYTHONS_CODE = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_LOADERS_CODE = os.path.join("torch", "utils", "data", "dataloader.py")
_IN_TORCH = f"{os.sep}torch{os.sep}distributed{os.sep}"
# Function within which the gradients of data-parallel modules are reduced.
_BACKWARD = "_engine_run_backward"
# A thread that waits uses hardly any time of a processor.
_WAITING_SHARE = 0.1
# Limits of an idle process: share of a processor, and bytes read and written per second.
_IDLE_SHARE = 0.03
_IDLE_RATE = 16384


class Progress(NamedTuple):
    """Progress of a worker's main thread.

    Attributes:
        stuck_s: For how long it has been at one and the same instruction, in seconds.
        is_waiting: It waits there, rather than to compute.
        operation: The collective operation that it is in; empty if that is not known.
        num_collectives: How many of them it has begun in the default process group; -1 without
            one.
        place: Where it is, such as "train.py:12 in main".
        idle_s: For how long the process has neither computed nor read nor written, in seconds.
    """

    stuck_s: float = 0.0
    is_waiting: bool = False
    operation: str = ""
    num_collectives: int = -1
    place: str = ""
    idle_s: float = 0.0

    def describe(self) -> str:
        """Return a phrase like "has waited in `barrier` for 6 s, at train.py:12 in main"."""
        if not self.place:
            return "has told nothing of itself"
        if not self.is_waiting and not self.operation:
            return f"has been at {self.place} for {self.stuck_s:.3g} s"
        verb = "waited" if self.is_waiting else "been"
        where = f" in `{self.operation}`" if self.operation else ""
        return f"has {verb}{where} for {self.stuck_s:.3g} s, at {self.place}"

    def to_bytes(self) -> bytes:
        """Return this as a message."""
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> "Progress":
        """Return the progress from a message made by `to_bytes`."""
        return cls(*json.loads(data))


class _Frame(NamedTuple):
    path: str
    line: str
    function: str


_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class _ThreadStack:
    """Stack of a thread, for another thread to read.

    Frame objects of a running thread are never touched: a worker whose main thread compiled a model
    with torch was ended by a segmentation fault while another thread followed their `f_back`.
    In Python 3.11 and 3.12 `faulthandler` ends the process if C++ code begins a thread meanwhile.
    These versions have a function for the stack of one thread, which needs the thread's state.

    Args:
        thread: Ident of the thread. If it is not the caller's, `faulthandler` is used.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._dump_own: Callable[[int], None] | None = None
        if thread == threading.get_ident() and hasattr(ctypes.pythonapi, "_Py_DumpTraceback"):
            state = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))()
            dump = ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(
                ("_Py_DumpTraceback", ctypes.pythonapi)
            )
            self._dump_own = lambda descriptor: dump(descriptor, state)

    def read(self) -> list[_Frame]:
        """Return the innermost 100 frames, newest first; none if unknown."""
        try:
            # No file that stays: a script may close all descriptors, and reuse its number.
            with _memory_file() as file:
                if self._dump_own is not None:
                    self._dump_own(file.fileno())
                else:
                    faulthandler.dump_traceback(file)
                text = os.pread(file.fileno(), file.tell(), 0).decode(errors="replace")
        except OSError:
            return []
        if self._dump_own is None:
            _, _, text = text.partition(f"Thread 0x{self._thread:016x} ")
        # Frames follow a header, and the next thread an empty line.
        lines = text.partition("\n\n")[0].splitlines()[1:]
        return [_Frame(*match.groups()) for line in lines if (match := _FRAME.match(line))]


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("paceline-stacks"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


class ProgressMeter:
    """Measures the progress of a thread; `measure` is for another thread, while that one lives.

    Args:
        thread: Which one; by default the one that makes the meter.
    """

    def __init__(self, thread: threading.Thread | None = None) -> None:
        self._thread = (thread and thread.ident) or threading.get_ident()
        self._stack = _ThreadStack(self._thread)
        self._idle = _IdleMeter()
        self._instruction: tuple[Sequence[_Frame], int] | None = None
        self._since = 0.0
        self._cpu_since = 0.0

    def measure(self) -> Progress:
        """Return the present progress of the thread."""
        stack = self._stack.read()
        if not stack:
            return Progress()
        num_collectives = _num_collectives()
        # Number of collectives included: a loop can be at the same line at every look.
        instruction = stack, num_collectives
        now, cpu = time.monotonic(), self._cpu_s()
        if instruction != self._instruction:
            self._instruction, self._since, self._cpu_since = instruction, now, cpu
        stuck_s = now - self._since
        is_waiting = stuck_s > 0 and cpu - self._cpu_since < _WAITING_SHARE * stuck_s
        operation = _operation(stack[0])
        if wait := _wait_in_store(self._thread):
            # Waits in the store poll: the thread is never at one instruction for long.
            stuck_s, is_waiting, operation = now - wait[0], True, wait[1]
        return Progress(
            stuck_s=stuck_s,
            is_waiting=is_waiting,
            operation=operation,
            num_collectives=num_collectives,
            place=_thread_place(stack),
            idle_s=self._idle.measure(now),
        )

    def _cpu_s(self) -> float:
        if not hasattr(time, "pthread_getcpuclockid"):
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread))


class _IdleMeter:
    """Measures for how long this process has done nothing."""

    def __init__(self) -> None:
        self._last = time.monotonic(), time.process_time(), _moved_bytes()
        self._since = self._last[0]

    def measure(self, now: float) -> float:
        """Return the time since the process last did anything, in seconds."""
        (before, cpu_before, bytes_before), self._last = (
            self._last,
            (now, time.process_time(), _moved_bytes()),
        )
        elapsed_s = now - before
        is_idle = (
            self._last[1] - cpu_before < _IDLE_SHARE * elapsed_s
            and self._last[2] - bytes_before < _IDLE_RATE * elapsed_s
        )
        if not is_idle:
            self._since = now
        return now - self._since


def _moved_bytes() -> int:
    """Return how much this process has read and written; 0 where the system does not say."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        return sum(int(fields[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    except (OSError, KeyError, ValueError):
        return 0


def _num_collectives() -> int:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    # A group that is just made or left, or a backend that does not count.
    with suppress(Exception):
        group = c10d.GroupMember.WORLD if c10d is not None else None
        if group is not None:
            return int(group._get_sequence_number_for_group())
    return -1


def _wait_in_store(thread: int) -> tuple[float, str] | None:
    """Return start and call of a thread's wait for other ranks in the store, or None."""
    store = sys.modules.get("paceline.core._key_value_store")
    wait: tuple[float, str] | None = None if store is None else store.thread_wait(thread)
    return wait


def _operation(frame: _Frame) -> str:
    if _IN_TORCH in frame.path:
        return frame.function
    return "backward" if frame.function == _BACKWARD else ""


def _thread_place(stack: Sequence[_Frame]) -> str:
    """Return the place of the user's code, as far as distinguishable from other code.

    That is Python's, torch's and ours.
    """
    ours: _Frame | None = None
    seen: _Frame | None = None
    is_in_loader = False
    for frame in stack:
        is_in_loader = is_in_loader or frame.path.endswith(_LOADERS_CODE)
        if frame.path.startswith(_OWN_CODE):
            ours = ours or frame
        elif f"{os.sep}torch{os.sep}" not in frame.path and not _is_pythons(frame.path):
            seen = frame
            break
    seen = seen or ours or stack[0]
    place = f"{os.path.basename(seen.path)}:{seen.line} in {seen.function}"
    return f"{place}, in a data loader" if is_in_loader else place


def _is_pythons(path: str) -> bool:
    """Tell whether code is in Python's library, or built in."""
    is_there = path.startswith(_PYTHONS_CODE) and not any(part in path for part in _PACKAGES)
    return is_there or path.startswith("<frozen ")


# Ranks pair up in these, so their numbers and kinds may differ.
_PAIRED = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list")

# Exchanges over the store of the ranks begin so.
_STORE = "distributed."

# How long a rank waits for one that has returned until that is taken for an error.
_CERTAIN_S = 5.0
# Time until waiting ranks are first reported, and the factor for each later report.
_NOTICE_S = 60.0
_NOTICE_FACTOR = 4
# Number of missing ranks with a place in the message; the log has it for all.
_MOST_PLACES = 3


class WatchedRank(NamedTuple):
    """Last observation of a rank in a call."""

    rank: int
    has_returned: bool
    progress: Progress


class DetectedHang(NamedTuple):
    """Hang of a call: ranks wait in vain.

    `is_certain` says that no patience would help, as the program itself does not fit together;
    `rank` is the first that is missing, else the first that waits.
    """

    text: str
    rank: int
    is_certain: bool


class HangWatch:
    """Decides whether workers end because ranks wait in vain, and reports long waits before.

    Args:
        heartbeat_timeout_s: How long a worker may give no sign of life, in seconds.
        collective_timeout_s: How long ranks may wait for others, in seconds.
        stacks_are: Where the stacks of all ranks are then.
    """

    def __init__(
        self,
        heartbeat_timeout_s: float,
        collective_timeout_s: float,
        stacks_are: str = "in the output above",
    ) -> None:
        self._certain_s = min(_CERTAIN_S, heartbeat_timeout_s)
        self._timeout_s = collective_timeout_s
        self._stacks_are = stacks_are
        self._notice_s = _NOTICE_S

    def look(self, calls: Iterable[Sequence[WatchedRank]]) -> Exception | None:
        """Return the error to end all workers, judged by the ranks of each call, or None."""
        hang = self._hang(calls, self._timeout_s)
        if hang is None:
            return None
        text = f"{hang.text} The stacks of all ranks are {self._stacks_are}."
        if hang.is_certain:
            hint = "Hint: all ranks must make the same calls in the same order."
            return CollectiveMismatchError(f"{text} {hint}")
        return WorkerFailedError(text, hang.rank)

    def notice(self, calls: Sequence[Sequence[WatchedRank]]) -> str | None:
        """Return ranks that wait long in a collective operation, and for whom, now and then."""
        if self._hang(calls, _NOTICE_S) is None:
            # Wait is over: the next one is reported after the first interval again.
            self._notice_s = _NOTICE_S
            return None
        hang = self._hang(calls, self._notice_s)
        if hang is None or self._notice_s >= self._timeout_s:
            return None
        self._notice_s *= _NOTICE_FACTOR
        return f"{hang.text} The workers are ended if that lasts {self._timeout_s:g} s."

    def _hang(
        self, calls: Iterable[Sequence[WatchedRank]], timeout_s: float
    ) -> DetectedHang | None:
        hangs = (detect_hang(ranks, self._certain_s, timeout_s) for ranks in calls)
        return next((hang for hang in hangs if hang is not None), None)


def detect_hang(
    observations: Sequence[WatchedRank], certain_s: float, timeout_s: float
) -> DetectedHang | None:
    """Return whether ranks of a call wait for others in vain.

    Args:
        observations: All ranks of the call.
        certain_s: How long a rank must have waited, in seconds, if those it waits for have
            returned already or are in another operation.
        timeout_s: How long it must have waited otherwise.
    """
    waiting = [o for o in observations if _waits_for_others(o, certain_s)]
    if not waiting or len(observations) < 2:
        return None
    in_store = [o for o in waiting if o.progress.operation.startswith(_STORE)]
    if in_store:
        hang = _hang_in_store(in_store, waiting, observations)
        waiting = [o for o in waiting if o not in in_store]
        if hang is not None or not waiting:
            return hang
    most = max(o.progress.num_collectives for o in waiting)
    waiting = [o for o in waiting if o.progress.num_collectives == most]
    others = [o for o in observations if o not in waiting]
    missing = [o for o in others if 0 <= o.progress.num_collectives < most]
    returned = [o for o in missing if o.has_returned]
    if returned:
        noun = _ranks(returned, "has returned", "have returned")
        return _detected_hang(waiting, f"{noun} without", returned, is_certain=True)
    if not others and len({o.progress.operation for o in waiting}) > 1:
        return _detected_hang(waiting, "these must be the same", [], is_certain=True)
    late = [o for o in waiting if o.progress.stuck_s >= timeout_s]
    if late and missing:
        noun = _ranks(missing, "has not come", "have not come")
        return _detected_hang(waiting, f"{noun} there", missing, is_certain=False)
    waiting = late
    if waiting and not any(o not in waiting and not o.has_returned for o in observations):
        return _detected_hang(waiting, "none of them goes on", [], is_certain=False)
    return None


def _hang_in_store(
    in_store: Sequence[WatchedRank],
    waiting: Sequence[WatchedRank],
    observations: Sequence[WatchedRank],
) -> DetectedHang | None:
    """Return the hang of ranks in the store if all others wait elsewhere or have returned.

    The store itself names ranks that are there in different calls.
    """
    others = [o for o in observations if o not in waiting]
    if not others and len(in_store) < len(waiting):
        return _detected_hang(waiting, "these must be the same", [], is_certain=True)
    if others and len(in_store) == len(waiting) and all(o.has_returned for o in others):
        noun = _ranks(others, "has returned", "have returned")
        return _detected_hang(in_store, f"{noun} without", others, is_certain=True)
    return None


def _waits_for_others(observation: WatchedRank, least_s: float) -> bool:
    progress = observation.progress
    return (
        not observation.has_returned
        and progress.is_waiting
        and progress.stuck_s >= least_s
        and progress.operation not in ("", *_PAIRED)
    )


def _detected_hang(
    waiting: Sequence[WatchedRank], what: str, missing: Sequence[WatchedRank], *, is_certain: bool
) -> DetectedHang:
    by_operation: dict[str, list[WatchedRank]] = {}
    for observation in waiting:
        by_operation.setdefault(observation.progress.operation, []).append(observation)
    waits = " and ".join(
        f"{_ranks(group, 'waits', 'wait')} in `{operation}` ({group[0].progress.place})"
        for operation, group in by_operation.items()
    )
    seconds = min(o.progress.stuck_s for o in waiting)
    text = f"{waits} for {seconds:.3g} s, but {what}."
    if missing:
        text += f" Missing ranks: {', '.join(str(o.rank) for o in missing)}."
        late = [o for o in missing if not o.has_returned and o.progress.place]
        for observation in late[:_MOST_PLACES]:
            text += f" Rank {observation.rank} is at {observation.progress.place}."
    first = (missing or waiting)[0]
    return DetectedHang(text[0].upper() + text[1:], first.rank, is_certain)


def _ranks(group: Sequence[WatchedRank], one: str, several: str) -> str:
    numbers = [str(observation.rank) for observation in group]
    if len(numbers) == 1:
        return f"rank {numbers[0]} {one}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]} {several}"
