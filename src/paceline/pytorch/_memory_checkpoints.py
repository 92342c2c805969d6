"""States of a training in memory that outlives its processes, between the stored checkpoints."""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline._base.process_and_network import num_cores
from paceline._base.run_memory import MEMORY_DIRECTORY_VARIABLE, memory_root
from paceline._training.engine.checkpoints.checkpoint_saver import CheckpointSaver
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.workers.shared_memory import available_bytes
from paceline.core._background_checkpoints import CheckpointParts, StoreFailures
from paceline.core._core_context import Context
from paceline.pytorch._loop_agreement_and_reports import RankWish
from paceline.pytorch._survivor_states import BoundaryStates, survivors_problem
from paceline.storage._checkpoint_files import CheckpointError, series_uuid

if TYPE_CHECKING:
    from paceline.pytorch._training_state import ResumableTraining

logger = logging.getLogger(__name__)

_SHARE = 0.02
_LEAST_INTERVAL_S = 0.25
# The newest whole state, and the one that is being written.
_NUM_SLOTS = 2
# Memory that other programs keep.
_SPARE_BYTES = 256 * 1024 * 1024
# After an error, other ranks may never store their parts.
_PARTS_AFTER_ERROR_S = 1.0


def checked_memory(given: Any) -> float | None:
    """Return the share of time or the seconds of `memory_checkpoints`; None if it is off.

    Raises:
        ValueError: It is neither a bool nor a number above 0.
    """
    if given is None or isinstance(given, bool):
        return _SHARE if given else None
    if not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise ValueError(
            "`memory_checkpoints` must be True, seconds, or a share of the time below 1, but got"
            f" {given!r}. Hint: memory_checkpoints=True is at most {_SHARE:.0%} of the time."
        )
    return float(given)


class MemoryFailures(StoreFailures):
    """Failures of states in memory: training continues, and the memory is given up."""

    @property
    def error(self) -> BaseException | None:
        """The first failure, or None."""
        return self._newest

    def note_stored(self) -> None:
        """Do nothing: a failure is final."""

    def note_lost(self, error: BaseException) -> None:
        """Record a failure of the memory; raise an error of the user's own hooks."""
        if not isinstance(error, (CheckpointError, OSError)):
            raise error
        self._newest = self._newest or error


class MemoryCheckpoints:
    """Saver of states to memory: each rank copies its part, the chief commits whole states.

    The newest whole state is kept until the next one is whole. After a failure, such as full
    memory, all ranks give it up, and training continues.

    Args:
        core: The core context.
        parts: Where the parts go.
        failures: What `parts` reports failures to.
        every: Seconds between two states, or a share of the time that they may cost, below 1.
        series: The UUID from which those of the states follow, the same on all ranks.

    Attributes:
        boundaries: The small states between batches, if survivors of a lost rank can use them.
    """

    def __init__(
        self,
        core: Context,
        parts: CheckpointParts,
        failures: MemoryFailures,
        every: float,
        series: str,
    ) -> None:
        self._distributed = core.distributed
        assert parts.directory is not None
        self._directory = parts.directory
        self._parts, self._failures, self._series = parts, failures, series
        local_size = core.distributed.local_size
        self._saver = CheckpointSaver(core.distributed.rank, local_size, failures)
        self._every = every
        # A busy processor takes its share of the time of all ranks here.
        self._processor_share = min(1.0, local_size / num_cores())
        self._begun_s, self._stall_s = -math.inf, 0.0
        self._num_saves = 0
        self.boundaries: BoundaryStates | None = None

    def note_boundaries(
        self, stepper: Stepper, training: "ResumableTraining", *, has_hooks: bool
    ) -> None:
        """Have survivors of a lost rank save the state of the last boundary, if they can.

        Args:
            stepper: The models and optimizers.
            training: The training.
            has_hooks: Whether callbacks add to checkpoints.
        """
        place = self._distributed.rank, self._distributed.size
        problem = "callbacks add to checkpoints" if has_hooks else survivors_problem(stepper)
        if problem and place[1] > 1:
            logger.info("Surviving ranks will not save their states: %s.", problem)
        elif place[1] > 1:
            path = self._directory / f"boundaries-{self._series}"
            share = (self._every if self._every < 1 else _SHARE) / 2
            self.boundaries = BoundaryStates(stepper, training, path, place, share)

    def wish(self) -> RankWish:
        """Return what this rank wants: nothing, the next state in memory, or to give it up."""
        self._saver.check()
        try:
            self._parts.check()
        except CheckpointError as error:
            self._failures.note_lost(error)
        if self._failures.error is not None:
            return RankWish.DROP
        is_busy = self._saver.is_storing or self._parts.num_pending
        is_chief = self._distributed.rank == 0
        return RankWish.KEEP if is_chief and not is_busy and self._is_due() else RankWish.NONE

    def _is_due(self) -> bool:
        interval_s = self._every
        if interval_s < 1:
            cost_s = self._stall_s + self._saver.processor_s * self._processor_share
            interval_s = max(_LEAST_INTERVAL_S, cost_s / interval_s)
        return time.monotonic() >= self._begun_s + interval_s

    @contextmanager
    def paced(self) -> Iterator[None]:
        """Count the time of a block that saves a state."""
        self._begun_s = time.monotonic()
        try:
            yield
        finally:
            self._stall_s = time.monotonic() - self._begun_s

    def save(
        self,
        parts: dict[str, Any],
        metadata: Mapping[str, Any],
        write_more: Callable[[Path], None],
    ) -> None:
        """Copy this rank's part, and store the copy in the background; all ranks call it.

        Args:
            parts: The state.
            metadata: The facts of the state.
            write_more: Called in the thread with the directory before the commit.
        """
        self._num_saves += 1
        destination = self._parts.store(series_uuid(self._series, self._num_saves), metadata)
        self._saver.save(parts, destination, write_more, has_room=self._has_room)

    def _has_room(self, num_bytes: int) -> bool:
        if self._num_saves > 1:
            return True
        wanted = _NUM_SLOTS * sum(self._distributed.allgather(num_bytes))
        room = self._distributed.broadcast(_room(self._directory))
        if wanted > room:
            self._failures.note_lost(
                OSError(
                    f"{_NUM_SLOTS} states need {wanted / 1e6:.0f} MB in {str(memory_root())!r}, but"
                    f" {max(room, 0) / 1e6:.0f} MB are free. Hint: make it larger, or name another"
                    f" directory by {MEMORY_DIRECTORY_VARIABLE}."
                )
            )
        return wanted <= room

    def drop(self) -> None:
        """Give the memory up; all ranks call it."""
        error = self._failures.error
        # All ranks see a lack of room at once.
        errors = self._distributed.allgather(None if error is None else str(error))
        if error is not None and errors.index(str(error)) == self._distributed.rank:
            logger.warning(
                "States are no longer kept in memory, and training goes on with its stored"
                " checkpoints alone. %s",
                error,
            )
        self._end()
        if self.boundaries is not None:
            self.boundaries.close()
        # No rank writes any more.
        self._distributed.allgather(None)
        self._clear()

    def finish(self, error: BaseException | None) -> None:
        """End with the training; after an error the newest state stays for the next processes.

        Args:
            error: The error that ended the training, if it failed.
        """
        if error is None:
            self._end()
            self._clear()
        elif not isinstance(error, KeyboardInterrupt) and not self._save_boundary(error):
            with suppress(CheckpointError, OSError):
                self._saver.finish()
                self._parts.finish(timeout_s=_PARTS_AFTER_ERROR_S)
        if self.boundaries is not None:
            self.boundaries.close()
        self._parts.close()

    def _save_boundary(self, error: BaseException) -> bool:
        if self.boundaries is None:
            return False
        try:
            return self.boundaries.save(error, self._parts.store_whole, _free(self._directory))
        except Exception as problem:
            # The error of the training is the one to be seen.
            logger.warning("The state of this rank cannot be kept in memory. %s", problem)
            return False

    def _end(self) -> None:
        with suppress(CheckpointError, OSError):
            self._saver.finish()
        self._parts.close()

    def _clear(self) -> None:
        if self._distributed.rank == 0:
            shutil.rmtree(self._directory, ignore_errors=True)


def _room(directory: Path) -> int:
    """Return how many bytes states may take, with those of a state that is there from before."""
    return _free(directory) + sum(path.stat().st_size for path in directory.glob("*/*"))


def _free(directory: Path) -> int:
    facts = os.statvfs(directory.parent)
    room = facts.f_bavail * facts.f_frsize
    if not os.environ.get(MEMORY_DIRECTORY_VARIABLE):
        room = min(room, available_bytes() - _SPARE_BYTES)
    return room


def begin_memory(core: Context, every: float | None) -> MemoryCheckpoints | None:
    """Return the saver of states to memory, the same on all ranks; None where there is none.

    Args:
        core: The core context.
        every: See `MemoryCheckpoints`; None for no such states.
    """
    if every is None:
        return None
    failures = MemoryFailures()
    parts = core.checkpoint.memory_parts(failures)
    series = "" if parts is None else parts.new_series()
    if not all(all_series := core.distributed.allgather(series)):
        if core.distributed.rank == 0:
            logger.warning(
                "`memory_checkpoints` has no effect: memory for states must belong to a process"
                " that starts lost workers of one node again. Hint: `python -m"
                " paceline.launch.torch_distributed --max-restarts 3 ...`, or"
                " `pytorch.launch(..., max_restarts=3)`; %s must be there.",
                memory_root(),
            )
        return None
    assert parts is not None
    return MemoryCheckpoints(core, parts, failures, every, all_series[0])
