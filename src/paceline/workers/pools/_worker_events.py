"""Events that a worker sends to its parent besides call results; `_begun_runs` takes them in.

A program of a launcher has a channel for it, and shows signs of life once it uses Paceline: others
may hold Python's lock for as long as they like, and fork without a thread in their way. A worker of
a pool has its channel to the driver, and shows them by itself.
"""

import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from paceline.workers.pools._channel import FrameKind
from paceline.workers.pools._thread_progress import ProgressMeter
from paceline.workers.processes import _worker_program
from paceline.workers.processes._signals import STACKS_SIGNAL

_BEAT_S = 0.5

_Send = Callable[[FrameKind, bytes], None]


class _Link:
    """Link from this process to its parent; `send` is None without a parent."""

    send: "_Send | None" = None
    is_program = False
    is_alive = False
    is_found = False


def serve_events(send: _Send) -> None:
    """Let events go the way of a pool's worker, which shows signs of life itself."""
    _Link.send, _Link.is_program, _Link.is_found = send, False, True


def begin_signs_of_life() -> None:
    """Have a thread show that this process lives, for a launcher that looks; once only."""
    _find_channel()
    if _Link.send is None or not _Link.is_program or _Link.is_alive:
        return
    _Link.is_alive = True
    dump_stacks_on_signal()
    _Link.send(FrameKind.READY, b"")
    threading.Thread(target=_beat, name="paceline-beat", daemon=True).start()


def tell(event: str, path: str, text: str = "") -> None:
    """Tell what has become of the run in a directory.

    Args:
        event: "run", "checkpoint", "completed" or "invalid_hp".
        path: The directory.
        text: Why.
    """
    _find_channel()
    if _Link.send is not None:
        # What a worker of a pool forks has its channel closed.
        with suppress(OSError):
            _Link.send(FrameKind.EVENT, json.dumps([event, path, text]).encode())


def dump_stacks_on_signal() -> None:
    """Let the parent ask for the stacks of all threads."""
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)


def _find_channel() -> None:
    """Find the parent's channel, in the wrapper that runs this program or in the environment."""
    if _Link.is_found:
        return
    _Link.is_found = True
    wrapper = sys.modules.get(_worker_program.RUNNING_MARK)
    channel = _worker_program.take_channel() if wrapper is None else wrapper.parent
    if channel is not None:
        _Link.send, _Link.is_program = channel.send, True


def _beat() -> None:
    meter = ProgressMeter(threading.main_thread())
    while _Link.send is not None:
        _Link.send(FrameKind.BEAT, meter.measure().to_bytes())
        time.sleep(_BEAT_S)
