"""Saver of checkpoints in the background."""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from paceline._base.process_and_network import join, num_cores, wait_until
from paceline._training.engine.checkpoints.sharded_state import HostCopies, parts_with_shard
from paceline._training.engine.checkpoints.state_files import save_state
from paceline.core._background_checkpoints import StoreFailures
from paceline.storage._uploads import FileSender

# A thread that wakes keeps the interpreter to itself for some milliseconds, unless it then waits.
_HEAD_START_S = 0.002

Destination: TypeAlias = AbstractContextManager[tuple[Path, str]]
"""A context with the directory to write to, and the checkpoint's UUID."""


_Jobs = queue.SimpleQueue[Callable[[], None] | None]


class CheckpointSaver:
    """Background writer of checkpoints: a thread stores them, each after the other.

    The thread stays until `finish`, as it takes long to begin one where ranks share cores.

    An error of the thread is raised by the next `save` or `check` if training must not continue
    after it, as `StoreFailures` decides, and by `finish`.

    Args:
        rank: This rank, which stores its pieces of sharded tensors as a part ``shard_<rank>``.
        local_size: The ranks of this machine.
        failures: What decides; `StoreFailures` by default.

    Attributes:
        processor_s: How long a processor was busy with the newest checkpoint, in seconds.
    """

    def __init__(
        self, rank: int = 0, local_size: int = 1, failures: StoreFailures | None = None
    ) -> None:
        self.processor_s = 0.0
        self._rank = rank
        self._is_crowded = local_size > 1 and 2 * local_size > num_cores()
        self._copies = HostCopies(is_crowded=self._is_crowded)
        self._head_start_s = _HEAD_START_S
        # Set once training itself waits for the newest checkpoint.
        self._is_awaited = threading.Event()
        self._thread: threading.Thread | None = None
        self._jobs: _Jobs = queue.SimpleQueue()
        # Set once the newest checkpoint is stored.
        self._is_stored = threading.Event()
        self._is_stored.set()
        self._error: BaseException | None = None
        self._failures = failures or StoreFailures()
        # Thread end by garbage collection: a saver abandoned by Ctrl-C must leave no thread behind.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    @property
    def is_newest_lost(self) -> bool:
        """Whether the newest checkpoint could not be stored, as the last call found."""
        return self._failures.is_newest_lost

    @property
    def is_storing(self) -> bool:
        """Whether a checkpoint is being stored."""
        return not self._is_stored.is_set()

    def save(
        self,
        parts: dict[str, Any],
        destination: Destination,
        write_more: Callable[[Path], None] = lambda path: None,
        sender_for: Callable[[Path], FileSender | None] = lambda path: None,
        has_room: Callable[[int], bool] = lambda num_bytes: True,
    ) -> None:
        """Copy the state and start storing the copy, as a pair of files per part.

        Args:
            parts: Names of files to nested states, some of them `StateInPieces`.
            destination: Where to write, such as `core.CheckpointContext.store_path` returns; it is
                entered in the thread.
            write_more: Called in the thread with the directory before the commit.
            sender_for: Returns what stores large files of the directory from memory, or None.
            has_room: Gets the bytes of the copies; if there is no room, they are not stored.
        """
        self.settle()
        began = time.perf_counter()
        self._copies.copy(parts)
        if not has_room(self._copies.num_bytes):
            return
        self._head_start_s = _HEAD_START_S
        if self._is_crowded:
            # Other ranks may still be copying, for which they need the cores that storing takes.
            self._head_start_s += time.perf_counter() - began
        if self._thread is None:
            # A daemon, as `finish` waits for it; an exit without that must not hang.
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="checkpoint", daemon=True
            )
            self._thread.start()
        is_stored = threading.Event()
        self._is_awaited.clear()
        self._jobs.put(partial(self._store, destination, write_more, sender_for, is_stored))
        self._is_stored = is_stored

    def check(self) -> None:
        """Raise the error of a lost checkpoint if training must stop for the loss."""
        if self._error is not None:
            error, self._error = self._error, None
            self._failures.note_lost(error)

    def settle(self) -> None:
        """Wait for the checkpoint being stored, then check for an error."""
        self._wait()
        self.check()

    def finish(self) -> None:
        """Wait for the checkpoint being stored, and raise any error of the newest checkpoint."""
        self._wait()
        if self._thread is not None:
            self._jobs.put(None)
            join(self._thread)
            self._thread = None
        self.check()
        self._failures.check_newest()

    def _wait(self) -> None:
        self._is_awaited.set()
        wait_until(self._is_stored.wait)

    def _store(
        self,
        destination: Destination,
        write_more: Callable[[Path], None],
        sender_for: Callable[[Path], FileSender | None],
        is_stored: threading.Event,
    ) -> None:
        began_s = time.thread_time()
        try:
            self._copies.wait()
            self._is_awaited.wait(self._head_start_s)
            parts = parts_with_shard(self._copies.result(), self._rank)
            with destination as (path, _):
                send = sender_for(path)
                for name, state in parts.items():
                    save_state(state, path, name, send)
                write_more(path)
            self._failures.note_stored()
        except BaseException as error:  # raised in the training thread
            self._error = error
        finally:
            self.processor_s = time.thread_time() - began_s
            # Set after an error, too: the training thread waits for this event.
            is_stored.set()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        # Reference dropped while waiting: the job would keep the saver and its copies of the state.
        del job
