"""Checkpoints in the background: only the copy of the state stops training."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

from paceline._waiting import join
from paceline.engine._format import save_state
from paceline.engine._host_copies import HostCopies

# A thread that begins keeps the interpreter to itself for some milliseconds, unless it waits first.
_HEAD_START_S = 0.002

StorePath: TypeAlias = Callable[[Mapping[str, Any]], AbstractContextManager[tuple[Path, str]]]
"""Takes a checkpoint's metadata; its context has the directory to write to, and the UUID."""


class CheckpointSaver:
    """Store checkpoints, one at a time, in a thread.

    An error of the thread is raised by the next `save`, `check` or `finish`.

    Args:
        store_path: Where to write, such as `core.CheckpointContext.store_path`; used in the thread.
        on_stored: Gets the UUID of each checkpoint that was stored, at the next call of the saver.
    """

    def __init__(self, store_path: StorePath, on_stored: Callable[[str], None]) -> None:
        self._store_path = store_path
        self._on_stored = on_stored
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stored: list[str] = []

    def save(
        self,
        parts: dict[str, Any],
        metadata: dict[str, Any],
        write_more: Callable[[Path], None],
    ) -> None:
        """Copy the state and store it: one file pair per part.

        Args:
            parts: Names of files to nested states.
            metadata: The checkpoint's metadata.
            write_more: Called in the thread with the directory before the commit.
        """
        self.finish()
        self._copies.copy(parts)
        self._thread = threading.Thread(
            target=self._store, args=(metadata, write_more), name="checkpoint", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be stored; tell of those that were."""
        while self._stored:
            self._on_stored(self._stored.pop(0))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Wait for the checkpoint that is being stored, and check it."""
        if self._thread is not None:
            join(self._thread)
            self._thread = None
        self.check()

    def _store(self, metadata: dict[str, Any], write_more: Callable[[Path], None]) -> None:
        time.sleep(_HEAD_START_S)
        try:
            parts = self._copies.result()
            with self._store_path(metadata) as (path, uuid):
                for name, state in parts.items():
                    save_state(state, path, name)
                write_more(path)
            self._stored.append(uuid)
        except BaseException as error:  # raised in the training thread
            self._error = error
