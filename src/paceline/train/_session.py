"""One generation of a run as a worker sees it."""

import gc
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline import core
from paceline.engine import (
    GradientSync,
    PreparedSteps,
    RankReporter,
    ShardedData,
    TrainedObjects,
    capture_random_state,
    has_stored_tensors,
    own_device,
    restore_generators,
    restore_random_state,
    seed_everything,
    shards_of_worker,
)
from paceline.journal import JournalKey
from paceline.train._access import RunAccess
from paceline.train._loader import (
    PreparedLoader,
    check_enough_samples,
    check_loader,
    warn_of_whole_reads,
)
from paceline.train._report_gate import ReportGate
from paceline.train._restoring import CheckpointReader
from paceline.train._saving import CheckpointWriter, Files
from paceline.train._should_preempt import PreemptionCheck
from paceline.train._spec import METRICS_GROUP, TIMINGS_GROUP, Job, RankInfo, RunSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How long a report of a stepwise run waits for parts of checkpoints of other ranks, in seconds.
_COMMIT_S = 30.0


class LooseSession:
    """Session for calls of `train` outside a run: they behave as with one worker.

    Attributes:
        rank_info: This worker's rank.
        device: Where it computes.
        gradients: What sums the gradients of prepared models.
        steps: The steps of prepared optimizers.
        seed: The seed of the data order.
    """

    def __init__(self, rank_info: RankInfo, device: torch.device, seed: int) -> None:
        self.rank_info = rank_info
        self.device = device
        self.seed = seed
        self.num_shards = rank_info.world_size
        self.gradients = GradientSync(rank_info.world_size, device)
        self.steps = PreparedSteps(self.gradients, device)
        self._has_begun = False
        self.warned_types: set[type] = set()

    @property
    def is_used(self) -> bool:
        """Whether a training has begun."""
        return self._has_begun or self.steps.is_used

    @property
    def num_backwards(self) -> int:
        """How many backward passes of prepared models have ended."""
        return self.gradients.num_backwards

    def prepare_loader(self, loader: Any, *, is_moved: bool = True) -> PreparedLoader:
        """Return this worker's part of a loader."""
        rank_info = self.rank_info
        check_loader(loader)
        check_enough_samples(loader, rank_info.world_size)
        data = ShardedData(
            loader,
            num_shards=self.num_shards,
            own_shards=shards_of_worker(self.num_shards, rank_info.rank, rank_info.world_size),
            seed=self.seed,
            joins_shards=True,
        )
        warn_of_whole_reads(data, rank_info)
        return PreparedLoader(loader, data, self, is_moved=is_moved)

    # ---- told by loaders -----------------------------------------------------------------

    def open_data(self, make: Callable[[], T], *, was_open: bool) -> T:
        """Return a new iterator over data; making it may draw random numbers."""
        return make()

    def begin_batch(self, num_own: int, num_all: int, *, is_last: bool, wait_s: float) -> None:
        """Note that the function gets a batch."""
        self._has_begun = True
        self.gradients.begin_batch(num_own, num_all, is_last=is_last)

    def end_batch(self, seconds: float) -> None:
        """Note for how long the function has used a batch."""

    def end_data(self) -> None:
        """Note the end of an iteration."""
        self.gradients.end_data()

    def is_training(self, num_backwards_before: int, *, is_first: bool) -> bool:
        """Tell whether the present loop does what all ranks must do together.

        Args:
            num_backwards_before: The backward passes before the loop.
            is_first: Whether the loop has had no batch yet.
        """
        if self.gradients.models and not is_first:
            return self.num_backwards > num_backwards_before
        models = self.gradients.models or _models_wrapped_by_the_user()
        return torch.is_grad_enabled() and any(model.training for model in models)


_loose: list[LooseSession] = []


def loose_session(*, begins: bool) -> LooseSession:
    """Return the session for calls of `train` outside a run.

    Args:
        begins: Whether the call prepares a model. If the last training has ended, this begins a
            new training, such as in the next cell of a notebook, with new settings.
    """
    if not _loose or (begins and _loose[0].is_used):
        rank_info = RankInfo()
        _loose[:] = [LooseSession(rank_info, own_device(0), torch.initial_seed())]
    return _loose[0]


class RankSession(LooseSession):
    """One generation of a run in this process, from `begin` to `finish`.

    Args:
        job: What to do.
        rank_info: This worker's rank.
        device: Where it computes.
        on_report: Called after each report, in a driver's own process.
    """

    def __init__(
        self,
        job: Job,
        rank_info: RankInfo,
        device: torch.device,
        on_report: Callable[[], None] | None = None,
    ) -> None:
        spec = job.spec
        super().__init__(rank_info, device, spec.seed)
        self.num_shards = spec.num_shards
        self.job = job
        self._access = RunAccess(spec, rank_info)
        self.reporter = RankReporter(
            JournalKey(spec.attempt, spec.generation, rank_info.rank),
            rank_info.world_size,
            self._access.journal_path,
            groups=(METRICS_GROUP, TIMINGS_GROUP),
            first_report=spec.first_report,
            on_report=on_report,
        )
        self._spec: RunSpec = spec
        self._writer = CheckpointWriter(
            spec,
            rank_info,
            self._access.run,
            self._access.storage,
            self.reporter,
            self._own_state,
        )
        self._loaders: list[PreparedLoader] = []
        self._stored: CheckpointReader | None = None
        self._own: dict[str, Any] | None = None
        self._loader_states: list[dict[str, Any]] = []
        self._is_random_due = False
        self._has_warned = False
        self._gate = ReportGate(spec, rank_info) if spec.is_stepwise else None
        self._preemption: PreemptionCheck | None = None
        seed_everything(spec.seed, rank_info.rank)

    # ---- reports and checkpoints ---------------------------------------------------------

    def report(self, metrics: dict[str, Any]) -> None:
        """Record metrics; see `train.report`.

        Raises:
            StoppedError: The driver of a stepwise run ends it at this report.
        """
        if self._gate is not None and self.rank_info.rank == 0:
            # Whoever stops the run at this report goes on from what was saved before it.
            self._writer.await_commits(_COMMIT_S)
        number = self.reporter.report(metrics)
        if self._gate is not None:
            self._gate.wait(number)

    def save(self, state: Any, *, files: Files, allow_pickle: bool) -> None:
        """Save a checkpoint; see `train.save_checkpoint`."""
        with self.reporter.storing():
            self._writer.save(
                state,
                files=files,
                allow_pickle=allow_pickle,
                is_sharded=self.gradients.has_sharded,
            )

    def load(self, files_to: Path | None) -> Any:
        """Return the state to go on from; see `train.load_checkpoint`."""
        if self._spec.checkpoint is None:
            return self.job.state
        if self._stored is None:
            self._stored = CheckpointReader(self._spec.checkpoint)
            self._take_up(self._stored)
        if files_to is not None:
            self._stored.copy_files(files_to)
        # A rank with a sharded model needs its pieces only.
        return self._stored.state(is_lazy=self.gradients.has_sharded)

    def restore_random_state(self) -> None:
        """Put back the generators of the checkpoint that was loaded, unless they are."""
        if self._is_random_due:
            self._put_back()
            self._is_random_due = False

    def settle(self, num_expected: int, timeout_s: float) -> None:
        """Wait for the checkpoints that all ranks have saved, and end."""
        self._writer.settle(num_expected, timeout_s)
        self._close(None)

    def finish(self, error: BaseException | None) -> None:
        """End the run's work in this process, unless checkpoints wait for other ranks.

        Raises:
            CheckpointWriteError: A checkpoint could not be written.
        """
        try:
            self._writer.finish(error)
        except BaseException as second:
            self._close(error or second)
            raise
        if error is not None or not self._writer.num_pending:
            self._close(error)

    @property
    def num_saves(self) -> int:
        """How often this rank has saved a checkpoint."""
        return self._writer.num_saves

    @property
    def num_pending(self) -> int:
        """How many of these wait for parts of other ranks."""
        return self._writer.num_pending

    def _close(self, error: BaseException | None) -> None:
        self._writer.close()
        if self._stored is not None:
            self._stored.close()
        if error is None and self.is_preempted:
            error = core.PreemptedError()
        self.reporter.finish(error)
        self._access.close()

    def should_preempt(self) -> bool:
        """Tell whether the run is to make room; see `train.should_preempt`."""
        if self._preemption is None:
            self._preemption = PreemptionCheck(self._spec, self.rank_info, self.device)
        return self._preemption.is_due()

    @property
    def is_preempted(self) -> bool:
        """Whether the function was told to make room."""
        return self._preemption is not None and self._preemption.is_preempted

    # ---- data ----------------------------------------------------------------------------

    def prepare_loader(self, loader: Any, *, is_moved: bool = True) -> PreparedLoader:
        """Return this worker's part of a loader, in the place where a loaded checkpoint has it."""
        prepared = super().prepare_loader(loader, is_moved=is_moved)
        self._place_loader(prepared, len(self._loaders))
        self._loaders.append(prepared)
        return prepared

    def open_data(self, make: Callable[[], T], *, was_open: bool) -> T:
        """Return a new iterator over data, with the generators as the checkpoint has them.

        Making one draws random numbers: where the checkpoint was saved within the iteration, that
        was before it, and else it is yet to come.
        """
        if was_open:
            before = None if self._is_random_due else capture_random_state()
            iterator = make()
            if before is None:
                self._put_back()
            else:
                # They were put back by `restore_random_state()`.
                restore_random_state(before)
            return iterator
        self.restore_random_state()
        return make()

    def begin_batch(self, num_own: int, num_all: int, *, is_last: bool, wait_s: float) -> None:
        """Note that the function gets a batch."""
        self._is_random_due = False
        self._warn_if_unweighted()
        super().begin_batch(num_own, num_all, is_last=is_last, wait_s=wait_s)
        self.reporter.count_batch(num_own, wait_s)

    def end_batch(self, seconds: float) -> None:
        """Note for how long the function has used a batch."""
        self.reporter.count_step(seconds)

    def _warn_if_unweighted(self) -> None:
        """Say once that ranks with more shards than others count no more than these."""
        is_even = self.num_shards % self.rank_info.world_size == 0
        if is_even or self._has_warned or self.gradients.models or not torch.is_grad_enabled():
            return
        self._has_warned = True
        logger.warning(
            "A global batch has %d shards, which %d workers cannot share equally, and no model was"
            " prepared whose gradients are weighted by samples. Hint: train.prepare_model(model).",
            self.num_shards,
            self.rank_info.world_size,
        )

    # ---- what this rank alone knows ------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        return {
            **self._objects().own_state(),
            "num_reports": self.reporter.num_reports,
            "loaders": [loader.state() for loader in self._loaders],
            "gradients": self.gradients.state(),
            "scaler": self.steps.state(),
        }

    def _objects(self) -> TrainedObjects:
        # What the function itself saves is not in here; prepared gradients have weights besides.
        return TrainedObjects(rank=self.rank_info.rank, models=self.gradients.models)

    def _take_up(self, stored: CheckpointReader) -> None:
        own, chief = stored.of_rank(self.rank_info.rank), stored.of_rank(0)
        # Who was not there goes on where the chief was.
        some = own or chief or {}
        self.reporter.begin(some.get("num_reports", 0), stored.uuid)
        # The place in the data is the same for all ranks, and for any number of them.
        self._loader_states = some.get("loaders", [])
        for index, loader in enumerate(self._loaders):
            self._place_loader(loader, index)
        if stored.metadata["world_size"] == self.rank_info.world_size:
            self._own = own
        elif chief is not None:
            self._own = {**chief, "random": None}
        self._is_random_due = True

    def _open_gradients(self, own: Mapping[str, Any], stored: CheckpointReader) -> Any:
        """Return this rank's gradients within an accumulated step, which others may have begun."""
        state, size = own["gradients"], self.rank_info.world_size
        is_same = stored.metadata["world_size"] == size and not self.gradients.has_sharded
        if state is None or (is_same and not has_stored_tensors(state)):
            return state
        ranks = range(stored.metadata["world_size"])
        states = [(stored.of_rank(rank) or own)["gradients"] for rank in ranks]
        return self.gradients.shared_out(states, self.rank_info.rank)

    def _place_loader(self, loader: PreparedLoader, index: int) -> None:
        if index < len(self._loader_states):
            loader.load_state(self._loader_states[index])

    def _put_back(self) -> None:
        """Put back what this rank alone knew; the generators last."""
        own = self._own
        assert self._stored is not None
        if own is not None:
            self._objects().load_own_state(own)
            self.gradients.load_state(self._open_gradients(own, self._stored))
            self.steps.load_state(own["scaler"])
        restore_generators(
            own and own["random"],
            seed=self.seed,
            num_steps=self._stored.metadata["steps_completed"],
            rank=self.rank_info.rank,
        )


def _models_wrapped_by_the_user() -> list[torch.nn.Module]:
    """Return the models whose gradients something else than us sums; rarely needed and slow."""
    kinds: tuple[type, ...] = (DistributedDataParallel,)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds += (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    # Not isinstance(), which would wake what is loaded lazily.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
