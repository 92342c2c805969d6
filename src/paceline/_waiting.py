"""Waiting in a thread to which signals are to get through.

Python runs the handler of a signal in the main thread, when that next executes Python. A signal
that arrives just before the main thread blocks, or that the system gives to another thread, does
not wake it: without a time limit, a Ctrl-C would take effect only after the wait. So the main
thread waits in short slices. All waits of drivers that can last go through these functions.
"""

import queue
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SLICE_S = 0.1


def wait_until(wait: Callable[[float | None], T], timeout_s: float | None = None) -> T:
    """Wait until `wait` returns something true, and return that; or what it returned at last.

    Args:
        wait: Waits for some seconds, or without an end if it gets None, such as `Event.wait`.
        timeout_s: For how long to wait, in seconds; None for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        return wait(timeout_s)
    if timeout_s is None:
        while not (result := wait(SLICE_S)):
            pass
        return result
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        result = wait(min(SLICE_S, left_s))
        if result or left_s <= SLICE_S:
            return result


def sleep(seconds: float) -> None:
    """Do what `time.sleep` does."""
    wait_until(lambda slice_s: time.sleep(seconds if slice_s is None else slice_s), seconds)


def join(thread: threading.Thread, timeout_s: float | None = None) -> None:
    """Do what `Thread.join` does."""

    def wait(slice_s: float | None) -> bool:
        thread.join(slice_s)
        return not thread.is_alive()

    wait_until(wait, timeout_s)


def take(source: "queue.SimpleQueue[T] | queue.Queue[T]") -> T:
    """Return the next item of a queue, once there is one."""

    def wait(slice_s: float | None) -> list[T]:
        try:
            return [source.get(timeout=slice_s)]
        except queue.Empty:
            return []

    return wait_until(wait)[0]


def exit_code(process: "subprocess.Popen[bytes]") -> int:
    """Do what `Popen.wait` does."""

    def wait(slice_s: float | None) -> list[int]:
        try:
            return [process.wait(slice_s)]
        except subprocess.TimeoutExpired:
            return []

    return wait_until(wait)[0]
