"""Checkpoints of a training: the state in them, when they are stored, from an earlier run.

Files: ``model_<i>`` and ``optimizer_<i>`` (weights can be read by plain safetensors),
``training`` (position, schedulers, scaler, and facts added by the trainer) and ``rank_<r>``
(generators, open metric sums, accumulated gradients in the middle of a window, buffers).
``docs/checkpoints.md`` lists every key.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from paceline import core
from paceline._base.journal_records import CheckpointStored
from paceline._base.run_directory import RunDirectory
from paceline._training.engine.checkpoints.capture_and_restore import (
    ModelsAndOptimizers,
    restore_generators,
    summed_gradients,
)
from paceline._training.engine.checkpoints.checkpoint_saver import (
    BestValidation,
    CheckpointRetention,
    CheckpointSaver,
    Destination,
)
from paceline._training.engine.checkpoints.resume_differences import (
    SettingChanges,
    check_identity,
    epoch_sizes,
    note_epoch_sizes,
)
from paceline._training.engine.checkpoints.state_format import (
    StateInPieces,
    read_training,
    read_versioned_part,
)
from paceline._training.engine.checkpoints.tensor_reader import whole
from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.metric_reducers import ReducerSet
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.schedules import Position, scheduler_state
from paceline.core._core_context import Context
from paceline.core._read_runs import newest_run_named, read_checkpoints, restorable_checkpoint
from paceline.core._run_storage import failing_together
from paceline.pytorch._memory_checkpoints import MemoryCheckpoints
from paceline.pytorch._training_loop import TrainingLoop
from paceline.storage._checkpoint_files import STATE_VERSION, CheckpointWriteError
from paceline.storage._checkpoint_storage import (
    CheckpointStorage,
    RetentionRules,
    checkpoint_at,
    series_uuid,
)
from paceline.storage._uploads import UploadLimits

logger = logging.getLogger(__name__)

ContinuousPeriod: TypeAlias = Literal["continuous"]
"""A checkpoint period: the next checkpoint begins when the last one is stored."""

CONTINUOUS: ContinuousPeriod = "continuous"

_HOUR_S = 3600.0
# Delay before a retry: storage that fails at once would fail twice more within a moment, and
# the third failure ends training.
_RETRY_S = 60.0


class ContinuousSaves:
    """Pacing of continuous checkpoints, by a byte limit and a delay after failures.

    Args:
        bytes_per_hour: How many bytes to store in an hour at most, on average since the last
            checkpoint: each begins later by the share of the hour that the last one has used. None
            for no limit.
    """

    def __init__(self, bytes_per_hour: int | None = None) -> None:
        self._seconds_per_byte = 0.0 if bytes_per_hour is None else _HOUR_S / bytes_per_hour
        self._begun_s = self._next_s = 0.0
        self._retry_s: float | None = None

    def carry_on(self, num_bytes: int, stored_s: float) -> None:
        """Take in the last checkpoint of an earlier process of the run.

        Args:
            num_bytes: Its size.
            stored_s: When it was stored, in seconds since the epoch.
        """
        self._next_s = time.monotonic() + num_bytes * self._seconds_per_byte
        # Negative ages are ignored: the clock may have been set back.
        self._next_s -= max(time.time() - stored_s, 0.0)

    def is_due(self, *, is_newest_lost: bool) -> bool:
        """Return whether the next checkpoint is due, given no other being stored.

        Args:
            is_newest_lost: Whether the newest one could not be stored.
        """
        now = time.monotonic()
        if is_newest_lost:
            if self._retry_s is None:
                self._retry_s = now + _RETRY_S
            if now < self._retry_s:
                return False
        return now >= self._next_s

    def note_begun(self) -> None:
        """Record the beginning of any checkpoint, for pacing."""
        self._begun_s, self._retry_s = time.monotonic(), None

    def note_stored(self, num_bytes: int) -> None:
        """Record the size of the last stored checkpoint."""
        self._next_s = max(self._next_s, self._begun_s) + num_bytes * self._seconds_per_byte


# Time limit of the chief for other ranks' parts of a checkpoint, in seconds, besides the time
# that an object store may take to answer.
_PARTS_S = 60.0
_STORE_TRIES = 3
# After an error other ranks may be gone, and their parts will never come.
_PARTS_AFTER_ERROR_S = 1.0
_MUST_STORE = "All ranks must store their parts of a checkpoint"


class CommittedCheckpoints:
    """New checkpoints on the chief: recorded by the thread that commits them.

    The committing thread knows these and no training: with a way back to it, a finished training
    would keep its models' memory.

    Attributes:
        news: The records that training has not seen yet, oldest first.
        retention: Which checkpoints to keep; None for all.
    """

    def __init__(self) -> None:
        self.news: list[CheckpointStored] = []
        self.retention: CheckpointRetention | None = None

    def add(self, stored: CheckpointStored) -> None:
        """Record a checkpoint, and delete those no longer kept."""
        self.news.append(stored)
        if self.retention is not None:
            self.retention.note_checkpoint(stored)


class TrainingCheckpoints:
    """Checkpoints of a training: each rank stores its part, the chief commits them.

    Args:
        core: The core context.
        on_stored: Called with the UUID of each checkpoint that exists: at once on a chief that is
            alone, else on every rank in the batch after the next checkpoint.

    Attributes:
        uuids: Checkpoints of the present call of `fit`, oldest first, as far as this rank knows.
        latest: The newest there is, also from before; empty without one.
        continuous: When the next one of continuous checkpoints begins.
        memory: The saver of states to memory between checkpoints, or None.
    """

    def __init__(self, core: Context, on_stored: Callable[[str], None]) -> None:
        self.uuids: list[str] = []
        self.latest = ""
        self.continuous = ContinuousSaves()
        self.memory: MemoryCheckpoints | None = None
        self._core = core
        self._distributed = core.distributed
        self._on_stored = on_stored
        self._saver = CheckpointSaver(core.distributed.rank, core.distributed.local_size)
        self._committed = CommittedCheckpoints()
        self._parts = core.checkpoint.parts(self._committed.add)
        self._series = ""
        self._num_saves = self._num_announced = 0

    @property
    def retention(self) -> CheckpointRetention | None:
        """Retention rule on the chief; None to keep all."""
        return self._committed.retention

    @property
    def _is_newest_lost(self) -> bool:
        return self._saver.is_newest_lost or self._parts.is_newest_lost

    def begin_series(self) -> None:
        """Agree on the names of the next checkpoints; collective over all ranks."""
        is_chief = self._distributed.rank == 0
        series = self._parts.new_series() if is_chief else ""
        self._series = self._distributed.broadcast(series)

    def forget_uuids(self) -> None:
        """Forget the checkpoints of an earlier call of `fit`."""
        self.uuids, self._num_announced = [], 0

    def kept_uuids(self) -> list[str]:
        """Return the existing checkpoints of the present `fit` call; all ranks call this."""
        uuids = self.uuids if self.retention is None else self.retention.kept_of(self.uuids)
        return self._distributed.broadcast(uuids)

    def keep(self, best_validation: BestValidation, rules: RetentionRules) -> None:
        """Set the chief's rules for deleting checkpoints; ignored under a master's own rules."""
        self._committed.retention = None
        if rules.is_empty or self._distributed.rank:
            return
        if self._core.info is not None and self._core.info.cluster_id:
            logger.info("The checkpoints to keep are those of the master's rules.")
            return
        self._committed.retention = CheckpointRetention(self._core, best_validation, rules)

    def pace(self, bytes_per_hour: int | None) -> None:
        """Have continuous checkpoints take no more bytes than allowed; None for no limit."""
        self.continuous = ContinuousSaves(bytes_per_hour)
        if bytes_per_hour is not None and self._distributed.rank == 0:
            for stored in read_checkpoints(RunDirectory(self._core.run_dir))[-1:]:
                self.continuous.carry_on(sum(stored.resources.values()), stored.time)

    def check(self) -> None:
        """Raise the error of a failed checkpoint, and record the committed checkpoints."""
        self._saver.check()
        self._note_committed()

    def settle(self) -> None:
        """Wait until the last part is stored."""
        self._saver.settle()
        self._note_committed()

    def announce(self) -> None:
        """Send all ranks the checkpoints stored since the last call; collective."""
        if self._distributed.size == 1:
            return
        self._note_committed()
        news = self._distributed.broadcast(self.uuids[self._num_announced :])
        if self._distributed.rank:
            self.uuids += news
            self.latest = news[-1] if news else self.latest
        self._num_announced = len(self.uuids)
        for uuid in news:
            self._on_stored(uuid)

    def begin_next(self, metadata: Mapping[str, Any]) -> Destination:
        """Return where this rank's part of the next checkpoint goes."""
        self._num_saves += 1
        self.continuous.note_begun()
        return self._parts.store(series_uuid(self._series, self._num_saves), metadata)

    def save(
        self,
        parts: dict[str, Any],
        destination: Destination,
        write_more: Callable[[Path], None],
        *,
        reads_files: bool,
    ) -> None:
        """Store this rank's part in the background; see `CheckpointSaver.save`.

        Args:
            parts: The state.
            destination: The result of `begin_next`.
            write_more: Called in the thread with the directory before the commit.
            reads_files: Whether `write_more` may want all files in the directory.
        """
        sender_for = _no_sender if reads_files else self._core.checkpoint.storage.file_sender
        self._saver.save(parts, destination, write_more, sender_for)

    def settle_ranks(self) -> bool:
        """Wait on all ranks until the last parts are stored; return whether one of them is lost."""
        with failing_together(self._distributed, _MUST_STORE):
            self._saver.settle()
        return any(self._distributed.allgather(self._is_newest_lost))

    def complete(self) -> None:
        """Wait on all ranks until the newest checkpoint is whole.

        Raises:
            CheckpointWriteError: Parts of some ranks are missing.
        """
        with failing_together(self._distributed, _MUST_STORE):
            self._saver.finish()
        self._await_parts(is_failing=False)
        self.announce()

    def wants_next(self) -> bool:
        """Return whether the next continuous checkpoint is due, from this rank's view.

        The chief sees when the last one is whole. Another rank wants one if its part was lost.
        """
        is_chief, is_lost = self._distributed.rank == 0, self._is_newest_lost
        if self._saver.is_storing or (self._parts.num_pending if is_chief else not is_lost):
            return False
        return self.continuous.is_due(is_newest_lost=is_lost)

    def finish(self, error: BaseException | None) -> None:
        """Wait for the checkpoint being stored.

        Args:
            error: The error that ended the training, if it failed.
        """
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.finish(error)
        try:
            # A second Ctrl-C means now: an unfinished checkpoint stays without a manifest.
            if self._num_saves and not isinstance(error, KeyboardInterrupt):
                self._saver.finish()
                # After an error, other ranks may never store their parts.
                self._await_parts(is_failing=error is not None)
        finally:
            self._parts.close()

    # ---- small parts ---------------------------------------------------------------------

    def _await_parts(self, *, is_failing: bool) -> None:
        """Wait, on the chief, for all ranks' parts of the checkpoints and for their commit."""
        patience_s = _PARTS_S
        if self._core.checkpoint.storage.is_remote:
            patience_s += _STORE_TRIES * UploadLimits.from_environment().part_s
        num_lacking = self._parts.finish(
            timeout_s=_PARTS_AFTER_ERROR_S if is_failing else patience_s
        )
        self._note_committed()
        if num_lacking and not is_failing:
            raise CheckpointWriteError(
                f"A checkpoint must have the parts of all ranks within {patience_s:.0f} s, but"
                f" lacks some in {self._core.checkpoint.storage.url!r}. Hint: all ranks must see"
                " the same storage, such as a shared file system."
            )

    def _note_committed(self) -> None:
        self._parts.check()
        while self._committed.news:
            stored = self._committed.news.pop(0)
            self.continuous.note_stored(sum(stored.resources.values()))
            self.uuids.append(stored.uuid)
            self.latest = stored.uuid
            if self._distributed.size == 1:
                self._on_stored(stored.uuid)


def _no_sender(directory: Path) -> None:
    """Have all files written to the directory."""


_FINISHED = (core.RunState.COMPLETED, core.RunState.RUNNING)


class EarlierState(NamedTuple):
    """Checkpoint to begin from, with its storage; None means the run's own storage."""

    uuid: str
    storage: CheckpointStorage | None = None


def state_at(place: str) -> EarlierState:
    """Return the state named by a checkpoint's UUID in the run, or by a path or URL."""
    if "/" not in place:
        return EarlierState(place)
    storage, uuid = checkpoint_at(place)
    return EarlierState(uuid, storage)


def earlier_state(
    core_context: core.Context, resume: str | os.PathLike[str]
) -> EarlierState | None:
    """Return the newest state of an earlier run, the same on every rank.

    Args:
        core_context: The context of the new run.
        resume: "auto" for the newest run of the same name, unless it is completed; a run directory;
            or the URL of a checkpoint.

    Returns:
        None if there is no such run or it has no checkpoint.

    Raises:
        NotARunDirectoryError: The directory is none.
        CheckpointCorruptError: All its checkpoints are damaged.
    """
    if isinstance(resume, str) and "://" in resume:
        return state_at(resume)
    path, state = None, None
    if core_context.distributed.rank == 0:
        path = _newest(core_context) if resume == "auto" else Path(resume)
        if path is not None:
            storage, uuid = restorable_checkpoint(path)
            state = EarlierState(uuid, storage) if uuid is not None else None
    path, state = core_context.distributed.broadcast((path, state))
    if state is None:
        logger.info("There is no state of an earlier run to begin with.")
    else:
        logger.info("Beginning with the state of %s.", path)
    return state


def asked_state(
    core_context: core.Context, latest_checkpoint: str | None, resume: str | os.PathLike[str] | None
) -> EarlierState | None:
    """Return the state requested by the user, or None for the run's own latest state.

    Args:
        core_context: The context of the run.
        latest_checkpoint: A checkpoint of the run, or the path or URL of one.
        resume: See `earlier_state`; it is for a new run without a master.
    """
    if latest_checkpoint is not None:
        return state_at(latest_checkpoint)
    is_new = core_context.latest_checkpoint is None and core_context.info is None
    return earlier_state(core_context, resume) if resume is not None and is_new else None


def _newest(core_context: core.Context) -> Path | None:
    own = RunDirectory(core_context.run_dir).read_info()
    run = newest_run_named(core_context.run_dir.parent, own.name, before=own)
    if run is None or core.summarize_run(run.path).state in _FINISHED:
        return None
    return run.path


class TrainingState:
    """State of a training on this rank: captured for checkpoints and restored.

    Args:
        stepper: The models and optimizers.
        schedulers: The schedulers of the optimizers.
        collected: The collectors of metrics over the batches.
        rank: This rank; the chief stores the shared part.
    """

    def __init__(
        self, stepper: Stepper, schedulers: Sequence[Any], collected: ReducerSet, rank: int
    ) -> None:
        self._stepper = stepper
        self._schedulers = schedulers
        self._collected = collected
        self._rank = rank

    def capture(self, loop: TrainingLoop, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of a checkpoint to be stored by this rank.

        Args:
            loop: The loop.
            facts: The chief's additions to "training".
        """
        is_divided, objects = self._stepper.is_divided, self._objects()
        shared = self._shared(objects, loop, facts) if self._rank == 0 or is_divided else {}
        own: Any = self._own(objects, loop)
        if self._rank and is_divided:
            shared = {
                name: StateInPieces(part, name, is_whole=False) for name, part in shared.items()
            }
            # Own parts of a tensor-parallel group: pieces of the same tensors, under one name.
            first = self._stepper.grid.first_rank
            own = StateInPieces(own, f"rank_{first}", first)
        return {**shared, f"rank_{self._rank}": own}

    def restore_shared(
        self, parts: Mapping[str, Any], loop: TrainingLoop, changes: SettingChanges
    ) -> None:
        """Restore the state shared by all ranks, with changed settings applied.

        Raises:
            CheckpointMismatchError: Numbers, names, shapes or types differ, or an epoch was begun
                that the present data do not have; the message says which.
        """
        training, stepper = parts["training"], self._stepper
        check_identity(
            training.get("data"),
            loop.data.identity,
            is_within_epoch=loop.position.batch_in_epoch > 0,
            warn=changes.warn,
        )
        epoch = loop.position.epochs
        is_begun = loop.position.batch_in_epoch > 0
        order = loop.data.order(epoch) if is_begun else loop.data.known_order(epoch)
        note_epoch_sizes(changes, training, loop.position, order)
        in_files = {"models": models_in(parts), "optimizers": _numbered(parts, "optimizer")}
        self._objects().load_shared_state({**training, **in_files}, changes)
        stepper.accumulation.num_steps = training["num_optimizer_steps"]
        num_steps = training["optimizer_steps"]
        for optimizer, number in zip(stepper.optimizers, num_steps, strict=False):
            stepper.num_steps_of[id(optimizer)] = number
        loop.last_validation = training["last_validation"]

    def restore_own(
        self, parts: Mapping[str, Any], loop: TrainingLoop, *, is_same_size: bool
    ) -> None:
        """Restore this rank's own state.

        The generators come last, as all else may draw from them.
        """
        own = parts["rank"]
        loop.data.load_stream_state(own["stream"])
        if loop.position.batch_in_epoch:
            loop.open_epoch()
        if is_same_size:
            loop.means.load_state(own["means"], self._stepper.device)
            self._collected.load_state(own["reducers"])
        elif not own["means"]["is_empty"] and self._stepper.grid.rank == 0:
            logger.warning(
                "Another number of ranks goes on from the checkpoint: the metrics since the last"
                " report before it are left out of the next one."
            )
        sharded = parts.get("gradients", {}).get("gradients")
        self._objects().load_own_state({**own, "sharded_gradients": sharded})
        self.restore_generators(parts, loop.position.batches)

    def restore_generators(self, parts: Mapping[str, Any], num_batches: int) -> None:
        """Restore the generators; a rank without stored state gets newly seeded generators."""
        random, seed = parts["rank"]["random"], parts["training"]["seed"]
        # The ranks of a tensor-parallel group draw the same numbers.
        rank = self._stepper.grid.data_rank
        restore_generators(random, seed=seed, num_steps=num_batches, rank=rank)

    def _objects(self) -> ModelsAndOptimizers:
        stepper = self._stepper
        return ModelsAndOptimizers(
            rank=self._rank,
            data_rank=stepper.grid.data_rank,
            has_sums=stepper.is_sharded,
            models=[plain_model(model) for model in stepper.models],
            optimizers=stepper.optimizers,
            schedulers=self._schedulers,
            scaler=stepper.scaler,
            parameters=stepper.parameters(),
            bases=stepper.bases,
        )

    def _shared(
        self, objects: ModelsAndOptimizers, loop: TrainingLoop, facts: Mapping[str, Any]
    ) -> dict[str, Any]:
        stepper, state = self._stepper, objects.shared_state()
        models, optimizers = state.pop("models"), state.pop("optimizers")
        gradients, tensor_size = state.pop("sharded_gradients"), stepper.grid.tensor_size
        parts: dict[str, Any] = {f"model_{index}": each for index, each in enumerate(models)}
        parts |= {f"optimizer_{index}": each for index, each in enumerate(optimizers)}
        if gradients is not None:
            parts["gradients"] = {"gradients": gradients}
        identity = loop.data.identity
        parts["training"] = {
            "version": STATE_VERSION,
            "paceline": _own_version(),
            "torch": str(torch.__version__),
            "num_models": len(models),
            "num_optimizers": len(optimizers),
            **({"has_gradients": gradients is not None} if stepper.is_sharded else {}),
            **({"tensor_parallel_size": tensor_size} if tensor_size > 1 else {}),
            **state,
            **self.counts(loop),
            **epoch_sizes(loop.data.known_order(loop.position.epochs)),
            **({} if identity is None else {"data": identity}),
            **facts,
        }
        return parts

    def _own(self, objects: ModelsAndOptimizers, loop: TrainingLoop) -> dict[str, Any]:
        return {**objects.own_state(), **self.own_of_loop(loop)}

    def counts(self, loop: TrainingLoop) -> dict[str, Any]:
        """Return what each batch changes of the state shared by all ranks, besides tensors."""
        stepper = self._stepper
        return {
            "position": loop.position._asdict(),
            "num_optimizer_steps": stepper.accumulation.num_steps,
            "optimizer_steps": [stepper.num_steps_of.get(id(o), 0) for o in stepper.optimizers],
            "last_validation": loop.last_validation,
            "schedulers": [scheduler_state(scheduler) for scheduler in self._schedulers],
            "scaler": None if stepper.scaler is None else stepper.scaler.state_dict(),
        }

    def own_of_loop(self, loop: TrainingLoop) -> dict[str, Any]:
        """Return the state of this rank alone, besides generators and tensors."""
        return {
            "means": loop.means.state(),
            "reducers": self._collected.storable_state(),
            "stream": loop.data.stream_state(),
        }

    def whole(self, loop: TrainingLoop, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts shared by all ranks, from any rank with undivided models."""
        return self._shared(self._objects(), loop, facts)


def read_state(
    path: Path, rank: int, world_size: int, *, is_sharded: bool = False, tensor_size: int = 1
) -> dict[str, Any]:
    """Return all parts of a stored state; this rank's own part is under "rank".

    Args:
        path: The checkpoint's directory.
        rank: This rank.
        world_size: The number of ranks that resume from it.
        is_sharded: Whether their models are sharded.
        tensor_size: The ranks of a tensor-parallel group.

    Raises:
        CheckpointMismatchError: The directory holds no trainer's state, or of an unknown version.
        CheckpointCorruptError: A file cannot be read.
    """
    training = read_training(path)
    is_same_size = has_same_size(training, world_size, tensor_size)
    stored_size, data_rank = training.get("tensor_parallel_size", 1), rank // tensor_size
    if stored_size != tensor_size:
        # The ranks of a group know the same, however many they are.
        rank = data_rank * stored_size
    own = read_versioned_part(path, f"rank_{rank if is_same_size else 0}", training)
    sums: list[torch.Tensor | None] | None = None
    if not is_same_size:
        # States of generators do not fit another number of ranks: new ones are seeded.
        own["random"] = None
    if not is_same_size or (is_sharded and "has_gradients" not in training):
        # The chief stands for all ranks, unless each takes its part of the sum.
        takes_sum = data_rank == 0 or is_sharded
        stored = range(0, training["world_size"], stored_size) if takes_sum else ()
        by_rank = (
            whole(read_versioned_part(path, f"rank_{each}", training)["gradients"])
            for each in stored
        )
        own["gradients"], sums = None, summed_gradients(by_rank)
    parts = {"training": training, "rank": own}
    for index in range(training["num_models"]):
        parts[f"model_{index}"] = read_versioned_part(path, f"model_{index}", training)
    for index in range(training["num_optimizers"]):
        parts[f"optimizer_{index}"] = read_versioned_part(path, f"optimizer_{index}", training)
    if training.get("has_gradients"):
        parts["gradients"] = read_versioned_part(path, "gradients", training)
    if sums is not None:
        # A parameter has gradients of one of the two kinds.
        sharded = parts.get("gradients", {}).get("gradients", [None] * len(sums))
        merged = [one if other is None else other for one, other in zip(sums, sharded, strict=True)]
        parts["gradients"] = {"gradients": merged}
    return parts


def has_same_size(training: Mapping[str, Any], world_size: int, tensor_size: int) -> bool:
    """Tell whether as many ranks had other samples each as in this training.

    Args:
        training: The part "training" of a stored state.
        world_size: The number of ranks now.
        tensor_size: The ranks of a tensor-parallel group now.
    """
    stored_size: int = training["world_size"] // training.get("tensor_parallel_size", 1)
    return stored_size == world_size // tensor_size


def models_in(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states of the models of a stored state."""
    return _numbered(parts, "model")


def position_of(parts: dict[str, Any]) -> Position:
    """Return the position of a stored state."""
    return Position(**parts["training"]["position"])


def _numbered(parts: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return [parts[f"{name}_{index}"] for index in range(parts["training"][f"num_{name}s"])]


@cache
def _own_version() -> str:
    # Looking it up takes a millisecond, for which training would stand still each time.
    return version("paceline")
