"""The state of a trainer for creators: read, saved, loaded, and ended with its workers."""

import os
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from paceline.creators import _replica_functions
from paceline.creators._replica_group import ReplicaGroup
from paceline.engine import (
    PassRecord,
    checked_pass_state,
    load_pass_state,
    save_pass_state,
)
from paceline.storage import CheckpointStorage

P = ParamSpec("P")
T = TypeVar("T")
_Trainer = TypeVar("_Trainer", bound="TrainerState")


def one_at_a_time(
    method: Callable[Concatenate[_Trainer, P], T],
) -> Callable[Concatenate[_Trainer, P], T]:
    """Wait for calls by other threads, and refuse a call of a trainer that was shut down."""

    @wraps(method)
    def call(self: _Trainer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._turn:
            self._check_active()
            return method(self, *args, **kwargs)

    return call


class TrainerState:
    """The part of a `PyTorchTrainer` that has workers and state; the other part runs passes."""

    _group: ReplicaGroup
    _record: PassRecord
    _storage: CheckpointStorage | None
    _is_active: bool
    # Calls of several threads wait for each other.
    _turn: threading.RLock

    # ---- state ---------------------------------------------------------------------------

    @one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: models, optimizers, schedulers, place in the data, generators.

        Tensors are on the CPU. Models are those of `model_creator`, without a wrapper.

        Raises:
            RuntimeError: The trainer was shut down.
        """
        return dict(self._group.state())

    @one_at_a_time
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, here or in another trainer.

        Args:
            state_dict: The state.

        Raises:
            RuntimeError: The trainer was shut down, or a model is another one.
            TypeError: It is no dictionary.
            ValueError: It is no state of a trainer, or holds other numbers of models.
        """
        self._group.load(dict(checked_pass_state(state_dict)))

    def save(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write the state to a file on this machine, or to a store, whole or not at all.

        The workers need not see the file. `torch.load(path, weights_only=True)` reads it.

        Args:
            path: The file, in place of what is there. Or the URL of a new checkpoint, such as
                ``s3://bucket/prefix/name``. By default a new one in `checkpoint_storage`.

        Returns:
            The path or URL.

        Raises:
            CheckpointWriteError: The store does not take it.
            FileExistsError: There is a checkpoint at the URL.
            OSError: It cannot be written.
            RuntimeError: The trainer was shut down.
            StateFormatError: The state of a model, optimizer or scheduler has more than tensors
                and plain values.
            ValueError: The path is empty, or neither it nor `checkpoint_storage` is given.
        """
        place = self._storage if path is None else path
        if not place:
            raise ValueError(
                "`path` must be a file or a URL, unless the trainer has a `checkpoint_storage`, but"
                f" got {path!r}. Hint: save('state.pt'), or"
                " PyTorchTrainer(checkpoint_storage='s3://bucket/prefix')."
            )
        with self._record.storing():
            return save_pass_state(self.state_dict, place)

    @one_at_a_time
    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` has written, here or in another trainer.

        Args:
            path: The file, or the URL of the checkpoint.

        Raises:
            CheckpointCorruptError: It cannot be read.
            CheckpointNotFoundError: There is no such checkpoint.
            OSError: It is not there.
            RuntimeError: The trainer was shut down, or a model is another one.
            ValueError: It is no state of a trainer, or holds other numbers of models.
        """
        self._group.load(load_pass_state(path))

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Do what `load` does."""
        self.load(path)

    @one_at_a_time
    def get_model(self) -> Any:
        """Return the trained model, or a list of several, on the CPU.

        Raises:
            NotSendableError: A model cannot be pickled.
            RuntimeError: The trainer was shut down.
        """
        models = self._group.call(_replica_functions.models)[0]
        return models[0] if len(models) == 1 else models

    # ---- workers -------------------------------------------------------------------------

    @one_at_a_time
    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Call a function of nothing in every worker and return what it returned, in rank order.

        Args:
            fn: The function.

        Raises:
            RuntimeError: The trainer was shut down.
            Exception: What the function raised on the rank that failed first.
        """
        # It may change anything.
        return self._group.call(_replica_functions.call, fn, changes_state=True)

    @property
    def num_workers(self) -> int:
        """How many workers there are at the moment; fewer than asked for after a loss."""
        return self._group.num_workers

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None before the first pass, and where none is recorded."""
        return self._record.run_dir

    def shutdown(self, force: bool = False) -> None:
        """End the workers, in bounded time; what was not saved is lost.

        Args:
            force: Whether to kill them at once.
        """
        self._end(None, force=force)

    def __enter__(self: _Trainer) -> _Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end(error, force=error is not None)

    def _end(self, error: BaseException | None, *, force: bool) -> None:
        self._is_active = False
        try:
            self._group.stop(force=force)
        finally:
            self._record.close(error)

    def _check_active(self) -> None:
        if not self._is_active:
            raise RuntimeError(
                "This PyTorchTrainer is not active, as it was shut down. Hint: make a new one, and"
                " load() what this one has saved."
            )
