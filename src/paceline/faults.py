"""Named points in the code for tests to kill or signal the process.

``PACELINE_FAULT=storage.before_manifest`` kills the process (SIGKILL) when it first reaches that
point, ``PACELINE_FAULT=engine.batch:3,signal=TERM,rank=1`` sends SIGTERM to rank 1 when it reaches
that point for the third time. The rank is that of the variable RANK, 0 without it; a fault without
``rank=`` hits every process that reaches the point. ``,after=0.5`` has the process wait there for
half a second before it is hit, so that what runs in the background can end.

``PACELINE_FAULT_LOG=FILE`` has every process note there which points it reached for the first time,
and the faults that hit it: one JSON object a line.
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import lru_cache

FAULT_VARIABLE = "PACELINE_FAULT"
FAULT_LOG_VARIABLE = "PACELINE_FAULT_LOG"

_SIGNALS = ("KILL", "TERM", "INT", "STOP", "USR1")
# Delay after a signal: a process polling for signals must notice the signal at this very point.
_NOTICE_S = 0.1

_points: set[str] = set()
_num_reached: dict[str, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Fault requested by `PACELINE_FAULT`; `rank` None is all ranks, `after` is in seconds."""

    point: str
    count: int
    signal: signal.Signals
    rank: int | None
    after: float


def register(*names: str) -> None:
    """Register points, so a misspelt point is refused instead of never reached."""
    _points.update(names)


def points() -> frozenset[str]:
    """Return the names of all points of the packages imported so far."""
    return frozenset(_points)


def is_active() -> bool:
    """Return whether a fault is requested, so time-critical code can skip `reach`."""
    return FAULT_VARIABLE in os.environ or FAULT_LOG_VARIABLE in os.environ


def reach(point: str) -> None:
    """Signal this process if `PACELINE_FAULT` requests a signal at this point; else do nothing.

    Raises:
        ValueError: `point` was not registered, or the variable asks for something unknown.
    """
    text = os.environ.get(FAULT_VARIABLE)
    log = os.environ.get(FAULT_LOG_VARIABLE)
    if text is None and log is None:
        return
    if point not in _points:
        raise ValueError(
            f"A fault point must be registered, but got {point!r}."
            f" Hint: `faults.register({point!r})` where it is used."
        )
    count = _num_reached[point] = _num_reached.get(point, 0) + 1
    if log is not None and count == 1:
        _log_event(log, "reached", point)
    wanted = _parse(text) if text is not None else None
    if wanted is None or (wanted.point, wanted.count) != (point, count):
        return
    if wanted.rank in (None, _rank()):
        time.sleep(wanted.after)
        if log is not None:
            _log_event(log, "fault", point, wanted.signal.name.removeprefix("SIG"))
        _strike(wanted.signal)


@lru_cache(maxsize=1)
def _parse(text: str) -> _Wanted:
    place, *options = text.split(",")
    point, separator, count = place.partition(":")
    given = dict(option.partition("=")[::2] for option in options)
    name, rank = given.pop("signal", "KILL"), given.pop("rank", None)
    after = given.pop("after", "0")
    is_valid = (
        not given
        and name in _SIGNALS
        and (count.isdecimal() and int(count) > 0 if separator else True)
        and (rank is None or rank.isdecimal())
        and after.replace(".", "", 1).isdecimal()
    )
    if not is_valid:
        raise ValueError(
            f"`{FAULT_VARIABLE}` must be a point, then optionally `:N` with N >= 1,"
            f" `,signal={'|'.join(_SIGNALS)}`, `,rank=R` and `,after=SECONDS`, but got {text!r}."
        )
    return _Wanted(
        point=point,
        count=int(count or 1),
        signal=signal.Signals[f"SIG{name}"],
        rank=None if rank is None else int(rank),
        after=float(after),
    )


def _rank() -> int:
    return int(os.environ.get("RANK") or 0)


def _strike(number: signal.Signals) -> None:
    if number == signal.SIGSTOP:
        # Signal to this thread: sent to the process, it could stop another thread first.
        signal.pthread_kill(threading.get_ident(), number)
    else:
        os.kill(os.getpid(), number)
    # SIGKILL and SIGSTOP act at once; whoever sends SIGCONT has had all the time that it wanted.
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        time.sleep(_NOTICE_S)


def _log_event(log: str, event: str, point: str, signal_name: str | None = None) -> None:
    """Append a line; a single small write never mixes with another process's write."""
    torch = sys.modules.get("torch")
    threads = str(torch.get_num_threads() if torch else os.environ.get("OMP_NUM_THREADS"))
    entry = {
        "event": event,
        "point": point,
        "signal": signal_name,
        "rank": _rank(),
        "pid": os.getpid(),
        "threads": int(threads) if threads.isdecimal() else None,
        "counts": _num_reached,
    }
    with open(log, "ab", buffering=0) as file:
        file.write(json.dumps(entry).encode() + b"\n")
