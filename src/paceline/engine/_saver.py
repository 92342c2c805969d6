"""Checkpoints in the background: only the copy of the state stops training."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.core import Context
from paceline.engine._format import save_state


class HostCopies:
    """Copies of state tensors in host memory; the buffers are used again for the next copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, value: Any, path: str = "") -> Any:
        """Return `value` with every tensor replaced by a copy on the CPU."""
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value.detach(), path)
        if isinstance(value, dict):
            return {key: self.copy(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self.copy(item, f"{path}.{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _copy_tensor(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            is_cuda = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
            self._buffers[path] = buffer
        buffer.copy_(tensor)
        return buffer


class CheckpointSaver:
    """Store checkpoints on the chief, one at a time, in a thread.

    An error of the thread is raised by the next `save`, `check` or `finish`.
    """

    def __init__(self, core: Context, on_stored: Callable[[str], None]) -> None:
        self._core = core
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
        copied = {name: self._copies.copy(state, name) for name, state in parts.items()}
        self._thread = threading.Thread(
            target=self._store, args=(copied, metadata, write_more), name="checkpoint", daemon=True
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
            self._thread.join()
            self._thread = None
        self.check()

    def _store(
        self, parts: dict[str, Any], metadata: dict[str, Any], write_more: Callable[[Path], None]
    ) -> None:
        try:
            with self._core.checkpoint.store_path(metadata) as (path, uuid):
                for name, state in parts.items():
                    save_state(state, path, name)
                write_more(path)
            self._stored.append(uuid)
        except BaseException as error:  # raised in the training thread
            self._error = error
