"""Calls to storages that may be slow or hang, such as network disks: nothing else waits."""

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")

# Those that hang keep their thread until their storage answers.
_MAX_THREADS = 64
# What else is to be done waits so long for a call at most, and after that for none of the storage
# for a while.
_PATIENCE_S = 1.0
_REST_S = 30.0
# From when on a storage counts as one that does not answer.
_SILENT_S = 10.0


class StoragePendingError(Exception):
    """Raised while a storage has not answered, but may yet do so soon."""


@dataclass(frozen=True, slots=True)
class SilentStorage:
    """A storage that has not answered for some seconds."""

    storage: str
    seconds: float

    @property
    def text(self) -> str:
        """What is wrong, as a sentence."""
        return (
            f"The storage {self.storage!r} has not answered for {self.seconds:.0f} s: trials wait"
            " that need it. Hint: see to its disk or file server; nothing has to be started again."
        )


class StorageCalls:
    """Call storages in threads of their own; for any thread.

    The threads end with the process, whatever they wait for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._running: dict[int, tuple[str, float]] = {}
        self._begun: dict[tuple[str, str], tuple[Future[Any], float]] = {}
        self._rests_until: dict[str, float] = {}

    def silent(self) -> list[SilentStorage]:
        """Return the storages that do not answer, the longest first."""
        now = time.monotonic()
        since: dict[str, float] = {}
        with self._lock:
            for storage, begun in self._running.values():
                since[storage] = min(begun, since.get(storage, begun))
        found = [SilentStorage(one, now - begun) for one, begun in since.items()]
        return sorted((one for one in found if one.seconds > _SILENT_S), key=lambda x: -x.seconds)

    @contextmanager
    def noted(self, storage: str) -> Iterator[None]:
        """Note that a storage is called within the block, by the thread that runs it."""
        with self._lock:
            number = next(self._numbers)
            self._running[number] = (storage, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                del self._running[number]

    @contextmanager
    def watched(self, storage: str) -> Iterator[None]:
        """Note if a storage stops to answer within the block, which may take long anyway.

        The file system of a directory is asked now and then.
        """
        is_done = threading.Event()

        def look() -> None:
            while not is_done.wait(_SILENT_S):
                with self.noted(storage), suppress(OSError):
                    os.statvfs(storage)

        if "://" not in storage:
            in_own_thread(look)
        try:
            yield
        finally:
            is_done.set()

    def ask(self, storage: str, call: Callable[[], Result], default: Result) -> Result:
        """Return what a call returns if the storage answers within a second, else `default`.

        One that has not answered is not asked for the next half minute.

        Raises:
            OSError: As the call does.
        """
        with self._lock:
            is_resting = time.monotonic() < self._rests_until.get(storage, 0.0)
        if is_resting:
            return default
        future = self._start(storage, call)
        if future is not None and wait({future}, _PATIENCE_S).done:
            return future.result()
        with self._lock:
            self._rests_until[storage] = time.monotonic() + _REST_S
        return default

    def poll(self, purpose: str, storage: str, call: Callable[[], Result]) -> Result:
        """Return what a call returns; a call for this purpose that goes on is not made again.

        Args:
            purpose: What is wanted of the storage, in a word.
            storage: The storage.
            call: What asks it.

        Raises:
            StoragePendingError: The storage has not answered yet. Ask again.
            OSError: As the call does; or the storage does not answer (`ETIMEDOUT`).
        """
        key = (purpose, storage)
        with self._lock:
            known = self._begun.get(key)
        if known is None:
            future = self._start(storage, call)
            if future is None:
                raise _silence(storage)
            known = future, time.monotonic()
            with self._lock:
                self._begun[key] = known
            wait({future}, _PATIENCE_S)
        future, begun = known
        if future.done():
            with self._lock:
                self._begun.pop(key, None)
            result: Result = future.result()
            return result
        if time.monotonic() > begun + _SILENT_S:
            raise _silence(storage)
        raise StoragePendingError(storage)

    def _start(self, storage: str, call: Callable[[], Result]) -> "Future[Result] | None":
        """Begin a call; None if as many hang as there may be."""
        with self._lock:
            if len(self._running) >= _MAX_THREADS:
                return None

        def noted_call() -> Result:
            with self.noted(storage):
                return call()

        return in_own_thread(noted_call)


def in_own_thread(call: Callable[[], Result]) -> "Future[Result]":
    """Make a call in a thread of its own, which ends with the process whatever it waits for."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="storage-call", daemon=True).start()
    return future


def _silence(storage: str) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "The storage does not answer", storage)
