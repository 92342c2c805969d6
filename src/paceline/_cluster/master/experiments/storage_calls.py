"""Calls to storages with time limits: a slow or hanging storage must not block other work."""

import errno
import itertools
import logging
import os
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline._base.files import open_regular_below, opened_directory, read_limited, replacing_below
from paceline._cluster.messages.runner_messages import StorageMark

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Thread limit: a hanging call keeps its thread until the storage answers.
_MAX_THREADS = 64
# Longest wait of other work for a storage call; after a timeout the storage is not asked
# again for `_REST_S`.
_PATIENCE_S = 1.0
_REST_S = 30.0
# Age of a pending call after which its storage counts as silent.
_SILENT_S = 10.0


class StoragePendingError(Exception):
    """Raised while a storage has not answered, but may yet do so soon."""


@dataclass(frozen=True, slots=True)
class SilentStorage:
    """Storage without an answer for some seconds."""

    storage: str
    seconds: float

    @property
    def text(self) -> str:
        """Warning about this storage, as a sentence."""
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
        self.num_failed: Counter[str] = Counter()

    def silent(self) -> list[SilentStorage]:
        """Return the storages with overdue calls, the longest wait first."""
        now = time.monotonic()
        since: dict[str, float] = {}
        with self._lock:
            for storage, begun in self._running.values():
                since[storage] = min(begun, since.get(storage, begun))
        found = [SilentStorage(one, now - begun) for one, begun in since.items()]
        return sorted((one for one in found if one.seconds > _SILENT_S), key=lambda x: -x.seconds)

    def note_failure(self, storage: str) -> None:
        """Count a write or deletion of the master that failed."""
        with self._lock:
            self.num_failed[storage] += 1

    @contextmanager
    def noted(self, storage: str) -> Iterator[None]:
        """Register a call to a storage for the duration of the block."""
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
        """Record a storage's silence within a block; the block itself may take long.

        The file system of a directory is asked now and then.
        """
        is_done = threading.Event()

        def look() -> None:
            while not is_done.wait(_SILENT_S):
                with self.noted(storage), suppress(OSError):
                    # Any request shows whether the storage answers.
                    os.statvfs(storage)

        if "://" not in storage:
            in_own_thread(look)
        try:
            yield
        finally:
            is_done.set()

    def ask(self, storage: str, call: Callable[[], Result], default: Result) -> Result:
        """Return the call's result if ready within a second, else `default`.

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
        # Each call to a storage that hangs holds a thread for good.
        with self._lock:
            self._rests_until[storage] = time.monotonic() + _REST_S
        return default

    def poll(self, purpose: str, storage: str, call: Callable[[], Result]) -> Result:
        """Return the call's result; a pending call for the same purpose is reused, not repeated.

        Args:
            purpose: The purpose of the call, in a word.
            storage: The storage.
            call: The call.

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
            # Short wait: most storages answer at once, so the first call usually succeeds.
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
    """Run a call in its own daemon thread; a hanging call cannot keep the process alive."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()
    # It acts for whoever asked.
    context = copy_context()

    def work() -> None:
        try:
            result = context.run(call)
        # Any error goes to the future: a waiter would otherwise wait for ever.
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="storage-call", daemon=True).start()
    return future


def _silence(storage: str) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "The storage does not answer", storage)


class StorageMarks:
    """Marker files in storage directories, showing nodes whether they share the directory.

    Its text is another one whenever a master starts: a copy of the directory has an old text.
    Others may write to the directory: what they put there is replaced, neither read nor written to.

    Args:
        cluster_id: The identity of the master's home; several masters may share a directory.
        calls: Calls storages that may hang.
    """

    def __init__(self, cluster_id: str, calls: StorageCalls) -> None:
        self._name = f".paceline-{cluster_id}"
        self._calls = calls
        self._text = secrets.token_hex(16)
        self._warned_of: set[str] = set()

    def mark(self, storage: str) -> StorageMark | None:
        """Return the mark in a storage; None if not a directory writable by this machine.

        Raises:
            StoragePendingError: The storage has not answered yet. Ask again.
            OSError: The disk is full or broken.
        """
        if "://" in storage:
            return None
        return self._calls.poll("mark", storage, lambda: self._make_mark(storage))

    def _make_mark(self, storage: str) -> StorageMark | None:
        path = Path(storage) / self._name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with opened_directory(path.parent) as directory:
                self._warn_of_renames(storage, os.fstat(directory).st_mode)
                if not self._is_there(directory):
                    # Everybody may read it, as runners of other users must. The text opens nothing:
                    # who knows it can only make a directory on another machine pass for this one.
                    with replacing_below(directory, self._name) as file:
                        file.write(self._text.encode())
        except (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
            logger.warning(
                "Checkpoints of nodes cannot be kept in %s, which this machine cannot write to"
                " (%s): all nodes must share that directory.",
                storage,
                error.strerror,
            )
            return None
        return StorageMark(str(path), self._text)

    def _warn_of_renames(self, storage: str, mode: int) -> None:
        """Warn once about a storage with files replaceable by others."""
        if not mode & stat.S_IWOTH or mode & stat.S_ISVTX or storage in self._warned_of:
            return
        self._warned_of.add(storage)
        logger.warning(
            "All users of its machines can rename, replace and remove checkpoints of others in %s."
            " Hint: `chmod +t` lets each one touch their own alone.",
            storage,
        )

    def _is_there(self, directory: int) -> bool:
        """Tell whether this user has written the mark."""
        try:
            with open_regular_below(directory, self._name, owners=[os.geteuid()]) as file:
                return read_limited(file, len(self._text)) == self._text.encode()
        except OSError:
            return False
