"""Follow a group of workers to its end, and pass the signals of this process on to it."""

import logging
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

from paceline.workers._local import LocalGroup
from paceline.workers._spec import WorkerExit, signal_name

logger = logging.getLogger(__name__)

_FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_ENDING = (signal.SIGTERM, signal.SIGINT)
# What the workers get to leave in after a second Ctrl-C, in seconds.
_LEAVE_S = 5.0

# Numbers are signals that arrived; None is the end of all workers.
_Events = SimpleQueue[int | None]


def supervise(group: LocalGroup) -> tuple[list[WorkerExit], set[int]]:
    """Start a group and follow it to its end.

    Signals whose action is the default one are passed on meanwhile, if this is the main thread.
    The first SIGINT lets the workers store their work, the second one asks them to leave now and
    kills those that do not; so does a second SIGTERM at once.

    Returns:
        The exits in rank order, and the signals that arrived.

    Raises:
        WorkerStartError: A worker cannot be started.
    """
    events: _Events = SimpleQueue()
    with _signals_to(events):
        group.start()
        waiter = threading.Thread(target=_announce_end, args=(group, events), daemon=True)
        waiter.start()
        try:
            received = _follow(group, events)
        except BaseException:
            group.stop(grace_s=0.0)
            raise
        finally:
            waiter.join()
        return group.wait() or [], received


@contextmanager
def _signals_to(events: _Events) -> Iterator[None]:
    """Turn signals into events until the end; those that someone has set stay as they are."""

    def put(signum: int, _: FrameType | None) -> None:
        # A `SimpleQueue` may be put into from a signal handler.
        events.put(signum)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for name in _FORWARDED:
            number = getattr(signal, name)
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                previous[number] = signal.signal(number, put)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _announce_end(group: LocalGroup, events: _Events) -> None:
    group.wait()
    events.put(None)


def _follow(group: LocalGroup, events: _Events) -> set[int]:
    """Forward signals until all workers have ended; return the signals that arrived."""
    counts: Counter[int] = Counter()
    while (event := _next(events)) is not None:
        counts[event] += 1
        if event not in _ENDING or counts[event] == 1:
            group.signal(event)
        elif event == signal.SIGINT and counts[event] == 2:
            logger.warning("SIGINT again: the workers leave now.")
            # Before the signal: the first worker to leave must not have the others ended.
            group.request_stop(_LEAVE_S, is_asked=True)
            group.signal(event)
        else:
            logger.warning("%s again: the workers are killed.", signal_name(event))
            group.request_stop(grace_s=0.0)
    return set(counts)


def _next(events: _Events) -> int | None:
    try:
        return events.get()
    except KeyboardInterrupt:
        # A handler that someone else had set.
        return signal.SIGINT
