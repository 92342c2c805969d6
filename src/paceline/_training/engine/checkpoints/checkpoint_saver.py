"""Saver of checkpoints in the background.

Which checkpoints of a run are stored for their validation, and which are kept.
"""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from paceline import core
from paceline._base.journal_records import CheckpointStored
from paceline._base.process_and_network import join, num_cores, wait_until
from paceline._base.run_directory import RunDirectory
from paceline._training.engine.checkpoints.sharded_tensor_pieces import HostCopies, parts_with_shard
from paceline._training.engine.checkpoints.state_format import save_state
from paceline.core._background_checkpoints import StoreFailures
from paceline.storage._checkpoint_errors import CheckpointError, CheckpointNotFoundError
from paceline.storage._retention_rules import Kept, RetentionRules, to_delete
from paceline.storage._uploads import FileSender

logger = logging.getLogger(__name__)

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


class BestValidation:
    """Best validation so far, deciding for each new validation whether to store a checkpoint.

    Args:
        policy: "best", "all" or "none".
        metric: The metric to judge by; without one "best" works as "all".
        is_smaller_better: Whether smaller values are better.
    """

    def __init__(
        self, policy: str = "best", metric: str | None = None, is_smaller_better: bool = True
    ) -> None:
        self.policy = policy
        self.metric = metric
        self.is_smaller_better = is_smaller_better
        self.best: float | None = None
        self.best_metrics: dict[str, Any] | None = None

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "BestValidation":
        """Return the object recorded by `state`, also from within a larger state."""
        made = cls("best", *state["judged_by"])
        made.best, made.best_metrics = state["best"], state["best_metrics"]
        return made

    def state(self) -> dict[str, Any]:
        """Return the best metrics so far, with the metric and the direction of comparison."""
        return {
            "best": self.best,
            "best_metrics": self.best_metrics,
            "judged_by": [self.metric, self.is_smaller_better],
        }

    def carry_on(self, earlier: "BestValidation") -> None:
        """Take over the best metrics of `earlier`, unless judged by another metric."""
        if (earlier.metric, earlier.is_smaller_better) == (self.metric, self.is_smaller_better):
            self.best, self.best_metrics = earlier.best, earlier.best_metrics

    def wants_checkpoint(self, metrics: Mapping[str, Any]) -> bool:
        """Take a validation's metrics in and return whether they deserve a checkpoint.

        Raises:
            ValueError: The policy is "best" and the metric was not returned or is no number.
        """
        is_best = self.metric is not None and self._is_new_best(metrics)
        if self.policy == "best" and self.metric is not None:
            return is_best
        return self.policy != "none"

    def score(self, metrics: Mapping[str, Any]) -> float | None:
        """Return how good a validation is, larger is better; None if the metric cannot tell."""
        value = None if self.metric is None else _number(metrics.get(self.metric))
        if value is None or not isfinite(value):
            return None
        return -value if self.is_smaller_better else value

    def _is_new_best(self, metrics: Mapping[str, Any]) -> bool:
        assert self.metric is not None
        if self.metric not in metrics:
            if self.policy != "best":
                return False
            raise ValueError(
                f"The policy 'best' needs the metric {self.metric!r}, but the validation returned"
                f" {sorted(metrics)}."
            )
        value = _number(metrics[self.metric])
        if value is None and self.policy == "best":
            raise ValueError(
                f"The policy 'best' needs the metric {self.metric!r} to be a number, but the"
                f" validation returned {metrics[self.metric]!r}. Hint: return a float."
            )
        if value is None or not isfinite(value):
            return False
        is_better = self.best is None or (
            value < self.best if self.is_smaller_better else value > self.best
        )
        if is_better:
            self.best, self.best_metrics = value, dict(metrics)
        return is_better


def _number(value: Any) -> float | None:
    """Return a number (also of NumPy or in a tensor) as a float; None for other values."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


class KeptCheckpoints:
    """Existing checkpoints of a run; checkpoints not kept by the rules are deleted.

    Args:
        existing: What exists at first, in the order of storing.
        rules: The checkpoints to keep.
        delete: Deletes one. If it raises a CheckpointError or OSError, training continues, and it
            is called again with the next checkpoint.
    """

    def __init__(
        self, existing: Iterable[Kept], *, rules: RetentionRules, delete: Callable[[Kept], None]
    ) -> None:
        self._existing = list(existing)
        self._rules = rules
        self._delete = delete

    @property
    def uuids(self) -> list[str]:
        """The UUIDs of the existing checkpoints, the newest last."""
        return [kept.uuid for kept in self._existing]

    def add(self, checkpoint: Kept) -> None:
        """Add a new checkpoint, and delete checkpoints no longer kept by the rules."""
        self._existing.append(checkpoint)
        for kept in to_delete(self._existing, self._rules, now_s=time.time()):
            try:
                self._delete(kept)
            except CheckpointNotFoundError:
                # Someone else has removed it.
                pass
            except (CheckpointError, OSError) as error:
                logger.warning("A checkpoint is not deleted before the next one. %s", error)
                continue
            self._existing.remove(kept)


class CheckpointRetention:
    """Retention of a run's checkpoints by the rules; used on the chief only.

    Args:
        core_context: The core context.
        best_validation: How good a validation is.
        rules: The checkpoints to keep.
    """

    def __init__(
        self, core_context: core.Context, best_validation: BestValidation, rules: RetentionRules
    ) -> None:
        self._core = core_context
        self._best_validation = best_validation
        self._scores: dict[int, float | None] = {}
        run = RunDirectory(core_context.run_dir)
        for row in core.read_metrics(run, "validation"):
            if not row.is_superseded:
                self.note_validation(row.steps_completed, row.metrics)
        existing = [self._scored(stored) for stored in core.read_checkpoints(run)]
        self._kept = KeptCheckpoints(existing, rules=rules, delete=self._delete)

    def note_validation(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Take in how good the state at a step is."""
        self._scores[steps_completed] = self._best_validation.score(metrics)

    def note_checkpoint(self, stored: CheckpointStored) -> None:
        """Add a new checkpoint, and delete checkpoints no longer kept by the rules.

        It may be called in another thread than `note_validation`.
        """
        self._kept.add(self._scored(stored))

    def kept_of(self, uuids: Iterable[str]) -> list[str]:
        """Return the still existing checkpoints of `uuids`, in the given order."""
        existing = {*self._kept.uuids}
        return [uuid for uuid in uuids if uuid in existing]

    def _delete(self, kept: Kept) -> None:
        logger.debug("Deleting the checkpoint of step %d.", kept.steps_completed)
        self._core.checkpoint.delete(kept.uuid)

    def _scored(self, stored: CheckpointStored) -> Kept:
        return Kept(
            stored.uuid,
            stored.steps_completed,
            self._scores.get(stored.steps_completed),
            sum(stored.resources.values()),
            stored.time,
        )
