"""Session of a generation of a run, as seen by a worker."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline import core
from paceline._base.run_directory import JournalKey, RunDirectory
from paceline._training.engine.devices import own_device
from paceline._training.engine.gradient_reduction import TravellingSignal
from paceline._training.engine.rank_differences import RankCheck
from paceline._training.workers.processes.rank_environment import RankInfo
from paceline.core._preemption_and_search import ControlFile, SearchDecision, SignalWatch
from paceline.core._run_storage import NodeStorage
from paceline.core._train_context import alert_of, log_alert
from paceline.data._order_and_random_generators import seed_everything
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._retention_rules import RetentionRules
from paceline.train._preemption_watch import is_to_move, note_listener
from paceline.train._prepared_loader_and_steps import (
    PreparedLoader,
    UserLoop,
    check_enough_samples,
    check_loader,
    warn_of_whole_reads,
)
from paceline.train._rank_checkpoints import (
    Files,
    RankCheckpoints,
    TrainCheckpointWriter,
    UserStateReader,
)
from paceline.train._rank_comparison import RankComparison
from paceline.train._rank_reports_and_state import RankReporter, RankState
from paceline.train._run_access import RunAccess
from paceline.train._run_protocol import METRICS_GROUP, TIMINGS_GROUP, Job, ReportGate, RunSpec

logger = logging.getLogger(__name__)

# How often the chief looks for orders of the driver or the master, in seconds.
_LOOK_INTERVAL_S = 0.5


class PreemptionCheck:
    """Preemption check with the same answer for all ranks at the same call.

    A signal to any rank counts, and the chief looks every half second for orders of the driver or
    the master, and after a report for the decision of a master's search. The ranks tell
    each other at calls that they have agreed on before; all other calls cost nothing.

    Args:
        spec: The run.
        rank_info: The rank.
        device: Where the process group communicates.
        is_script: Whether this process is the user's script. SIGTERM to another worker is how its
            driver ends it, as after the error of a rank.
        decision: Knows the chief's newest report that a search judges.
    """

    def __init__(
        self,
        spec: RunSpec,
        rank_info: RankInfo,
        device: torch.device,
        *,
        is_script: bool,
        decision: SearchDecision,
    ) -> None:
        self._decision = decision
        self._run = run = RunDirectory(Path(spec.run_dir))
        self._rank_info = rank_info
        self._device = device
        self._control = ControlFile(run)
        self._next_look_s = 0.0
        self._is_wanted = False
        self._travelling = TravellingSignal(device)
        self._signals = SignalWatch()
        self.is_preempted = False
        # Elsewhere no signal can be noted, as for a driver in such a thread.
        if threading.current_thread() is threading.main_thread():
            signals = (signal.SIGTERM, signal.SIGUSR1) if is_script else (signal.SIGUSR1,)
            self._signals.install(signals)
        if rank_info.rank == 0:
            note_listener(run)

    def is_due(self) -> bool:
        """Return the answer; every rank must call equally often."""
        if self.is_preempted:
            return True
        self._look_for_orders()
        if self._rank_info.world_size == 1:
            self.is_preempted = self._is_wanted
            return self.is_preempted
        if self._is_wanted:
            self._travelling.tell(1.0)
        # The next call may be an epoch away.
        self._travelling.travel_alone(self._device, is_awaited=True)
        self.is_preempted = self._travelling.hear() > 0
        return self.is_preempted

    def close(self) -> None:
        """Give the signals back."""
        self._signals.restore()

    def _look_for_orders(self) -> None:
        self._is_wanted = self._is_wanted or self._signals.has_come
        if self._is_wanted or self._rank_info.rank != 0:
            return
        is_decided = self._decision.wait(self._is_told)
        now = time.monotonic()
        if is_decided or now >= self._next_look_s:
            self._next_look_s = now + _LOOK_INTERVAL_S
            self._is_wanted = self._is_told() or is_to_move(self._run)

    def _is_told(self) -> bool:
        return self._signals.has_come or self._control.read().should_preempt


T = TypeVar("T")

# How long a report of a stepwise run waits for parts of checkpoints of other ranks, in seconds.
_COMMIT_S = 30.0


class LooseSession(UserLoop):
    """Session for calls of `train` outside a run: they behave as with a single worker."""

    def alert(self, title: str, text: str, level: str) -> None:
        """Log an alert."""
        log_alert(alert_of(title, text, level), self.rank_info.rank)

    def prepare_loader(self, loader: Any, *, is_moved: bool = True) -> PreparedLoader:
        """Return this worker's part of a loader."""
        check_loader(loader)
        check_enough_samples(loader, self.rank_info.world_size)
        prepared = super().prepare_loader(loader, is_moved=is_moved)
        warn_of_whole_reads(prepared, self.rank_info)
        return prepared


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


class PlaceSession(LooseSession):
    """Session of functions executed by workers outside of a run: with ranks, but no records."""

    def report(self, metrics: dict[str, Any]) -> None:
        """Raise RuntimeError: a report outside of a run would be lost."""
        _refuse_outside_of_run("train.report", self.rank_info.rank)

    def save(self, state: Any, *, files: Files, allow_pickle: bool) -> None:
        """Raise RuntimeError: a checkpoint outside of a run would be lost."""
        _refuse_outside_of_run("train.save_checkpoint", self.rank_info.rank)

    def load(self, files_to: Path | None) -> None:
        """Return None, as nothing was stored."""

    def restore_random_state(self) -> None:
        """Do nothing, as nothing was loaded."""

    def should_preempt(self) -> bool:
        """Return False, as nothing can be stored."""
        return False


def _refuse_outside_of_run(name: str, rank: int) -> None:
    raise RuntimeError(
        f"`{name}` must be called in a run, but rank {rank} executes a function without one. Hint:"
        " trainer.run(function), or trainer.start(SomeClass) before trainer.execute(function)."
    )


class RankSession(LooseSession):
    """Session of a generation of a run in this process, from `begin` to `finish`.

    Args:
        job: The work to do.
        rank_info: This worker's rank.
        device: Where it computes.
        on_report: Called after each report, in a driver's own process.
        distributed: Where the ranks meet, if an outer launcher has started them.
    """

    def __init__(
        self,
        job: Job,
        rank_info: RankInfo,
        device: torch.device,
        on_report: Callable[[], None] | None = None,
        distributed: core.DistributedContext | None = None,
    ) -> None:
        spec = job.spec
        super().__init__(rank_info, device, spec.seed)
        self.num_shards = spec.num_shards
        self.job = job
        self._access = RunAccess(spec, rank_info)
        storage = self._access.storage
        if spec.storage_per_node and distributed is not None:
            storage = NodeStorage(self._access.run.checkpoints_path, distributed)
        # The driver of a pool has begun the run, and is the parent of its workers.
        is_parent_notified = on_report is not None or distributed is not None
        self._spec: RunSpec = spec
        self._decision = self._make_decision()
        self.reporter = self._make_reporter(on_report, is_parent_notified=is_parent_notified)
        self._comparison = RankComparison(
            RankCheck(spec.check_ranks),
            self.gradients,
            f"{spec.run_id}/{spec.attempt}/{spec.generation}",
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            num_busy_ranks=self.num_busy_ranks,
        )
        self.checkpoints = self._make_checkpoints(storage)
        self._writer = TrainCheckpointWriter(
            spec,
            rank_info.rank,
            rank_info.world_size,
            self.reporter,
            self.checkpoints,
            self._own_state,
        )
        self._state = RankState(self)
        self._stored: UserStateReader | None = None
        self._saved_at: tuple[int, int] | None = None
        self.is_to_compare = False
        self._has_warned = False
        self._num_loaders = 0
        self._gate = ReportGate(spec, rank_info) if spec.is_stepwise else None
        self._preemption: PreemptionCheck | None = None
        self._is_script = on_report is not None
        seed_everything(spec.seed, rank_info.rank)
        # Seed noted right after seeding: a later difference means a seed of the user's.
        self.is_seed_given, self.seeded_as = spec.is_seed_given, torch.initial_seed()

    def _make_decision(self) -> SearchDecision:
        run = RunDirectory(Path(self._spec.run_dir))
        # On a node that does not see the run directory, decisions do not arrive.
        judged = self._spec.judged_metrics if run.control_path.parent.exists() else None
        return SearchDecision(
            control=ControlFile(run), generation=self._spec.generation, metrics=judged
        )

    def _make_reporter(
        self, on_report: Callable[[], None] | None, *, is_parent_notified: bool
    ) -> RankReporter:
        spec, rank_info = self._spec, self.rank_info
        return RankReporter(
            JournalKey(spec.attempt, spec.generation, rank_info.rank),
            rank_info.world_size,
            self._access.journal_path,
            groups=(METRICS_GROUP, TIMINGS_GROUP),
            first_report=spec.first_report,
            decision=self._decision,
            searched_metrics=spec.searched_metrics,
            on_report=on_report,
            restart_causes=spec.restart_causes,
            is_parent_notified=is_parent_notified,
        )

    def _make_checkpoints(self, storage: CheckpointStorage) -> RankCheckpoints:
        spec, rank_info = self._spec, self.rank_info
        is_scored = spec.score_attribute is not None
        return RankCheckpoints(
            self._access.run,
            storage,
            self.reporter,
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            local_size=rank_info.local_world_size,
            existing=spec.kept,
            rules=RetentionRules(
                # Newest kept beside the best: a run resumes from the newest.
                latest=1 if is_scored and spec.num_to_keep else spec.num_to_keep,
                best=spec.num_to_keep if is_scored else None,
            ),
            is_score_minimized=spec.is_score_minimized,
            comparison=self._comparison,
        )

    # ---- reports and checkpoints ---------------------------------------------------------

    def alert(self, title: str, text: str, level: str) -> None:
        """Log and record an alert."""
        super().alert(title, text, level)
        self.reporter.begin()
        self.reporter.journal.append(alert_of(title, text, level))

    def report(
        self,
        metrics: dict[str, Any],
        validation: Mapping[str, Any] | bool = True,
        step: int | None = None,
    ) -> None:
        """Record metrics; see `train.report`.

        Args:
            metrics: The metrics.
            validation: The part of them that a search judges, see `RankReporter.report`.
            step: The steps that a library has counted.

        Raises:
            StoppedError: The driver of a stepwise run ends it at this report.
        """
        if self._gate is not None and self.rank_info.rank == 0:
            # A run stopped at this report resumes from the state saved before it.
            self.checkpoints.settle()
            self.checkpoints.await_commits(self.checkpoints.num_saves, _COMMIT_S)
        number = self.reporter.report(metrics, validation, step)
        if self._gate is not None:
            self._gate.wait(number)

    @cached_property
    def media(self) -> core.MediaReports:
        """Media reports of this rank; see `train.media`."""
        run = self._access.run
        if self._access.journal_path.parents[1] != run.path:
            raise core.NotOfferedError(
                f"`train.media()` needs a node that sees the run directory {str(run.path)!r}, but"
                " this one does not. Hint: Trainer(run_dir=...) on a file system that the nodes"
                " share."
            )
        self.reporter.begin()
        return core.MediaReports(run=run, journal=self.reporter.journal, rank=self.rank_info.rank)

    def save(self, state: Any, *, files: Files, allow_pickle: bool) -> None:
        """Save a checkpoint; see `train.save_checkpoint`."""
        with self.reporter.storing():
            self._writer.save(
                state, files=files, allow_pickle=allow_pickle, is_sharded=self.gradients.has_sharded
            )
        self._saved_at = self._place

    def _own_state(self) -> dict[str, Any]:
        return self._state.capture() | self.reporter.state()

    def load(self, files_to: Path | None) -> Any:
        """Return the state to resume from; see `train.load_checkpoint`."""
        if self._spec.checkpoint is None:
            return self.job.state
        if self._stored is None:
            self._stored = UserStateReader(self._spec.checkpoint)
            own = self._state.take_up(self._stored)
            self.reporter.begin(own, self._stored.uuid)
        if files_to is not None:
            self._stored.copy_files(files_to)
        # A rank with a sharded model needs its pieces only.
        return self._stored.state(is_lazy=self.gradients.has_sharded)

    def restore_random_state(self) -> None:
        """Restore the random generators of the loaded checkpoint, unless already done."""
        self._state.restore_random_state()

    def settle(self, num_expected: int, timeout_s: float) -> None:
        """Wait for the checkpoints that all ranks have saved, compare the ranks, and end.

        Raises:
            RanksDifferError: They have drifted apart since the last checkpoint.
        """
        self.checkpoints.await_commits(num_expected, timeout_s)
        try:
            if self.is_to_compare:
                self._comparison.compare_end()
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    @property
    def _place(self) -> tuple[int, int]:
        """How far training is."""
        return self.num_backwards, self.reporter.steps_completed

    def finish(self, error: BaseException | None) -> None:
        """End the run's work in this process, unless it is yet to `settle`.

        Raises:
            CheckpointWriteError: A checkpoint could not be written.
        """
        if self._preemption is not None:
            self._preemption.close()
        self._comparison.end()
        try:
            self.checkpoints.finish(error)
            if error is None and self._saved_at != self._place:
                self.is_to_compare = self._comparison.leave_end(self.device)
        except BaseException as second:
            self._close(error or second)
            raise
        if error is not None or not self.is_to_settle:
            self._close(error)

    @property
    def is_to_settle(self) -> bool:
        """Whether other ranks have to end before this one can."""
        return self.is_to_compare or self.checkpoints.num_pending > 0

    def _close(self, error: BaseException | None) -> None:
        self.checkpoints.close()
        if self._stored is not None:
            self._stored.close()
        if error is None and self.is_preempted:
            error = core.PreemptedError()
        self.reporter.finish(error)
        self._access.close()

    def should_preempt(self) -> bool:
        """Tell whether the run is to make room; see `train.should_preempt`."""
        if self._preemption is None:
            self._preemption = PreemptionCheck(
                self._spec,
                self.rank_info,
                self.device,
                is_script=self._is_script,
                decision=self._decision,
            )
        return self._preemption.is_due()

    @property
    def is_preempted(self) -> bool:
        """Whether the function was asked to make room."""
        return self._preemption is not None and self._preemption.is_preempted

    # ---- data ----------------------------------------------------------------------------

    def prepare_loader(self, loader: Any, *, is_moved: bool = True) -> PreparedLoader:
        """Return this worker's part of a loader, at its place in the loaded checkpoint."""
        prepared = super().prepare_loader(loader, is_moved=is_moved)
        self._state.add_loader(prepared)
        return prepared

    def agreed_seed(self, seed: int, loader: Any) -> int:
        """Return the chief's seed for this loader, which must have the same data on all ranks.

        Raises:
            ValueError: They differ.
        """
        self._num_loaders += 1
        return self._comparison.of_chief(f"data of loader {self._num_loaders}", seed, loader)

    def open_data(self, make: Callable[[], T], *, was_open: bool) -> T:
        """Return a new iterator over data, with the generators as the checkpoint has them."""
        return self._state.open_data(make, was_open=was_open)

    def begin_batch(self, num_own: int, num_all: int, *, is_last: bool, wait_s: float) -> None:
        """Note and count the start of a batch."""
        self._state.begin_batch()
        self._warn_if_unweighted()
        super().begin_batch(num_own, num_all, is_last=is_last, wait_s=wait_s)
        self.reporter.count_batch(num_own, wait_s, is_trained=torch.is_grad_enabled())

    def end_batch(self, seconds: float) -> None:
        """Note for how long the function has used a batch."""
        self.reporter.count_step(seconds)

    def _warn_if_unweighted(self) -> None:
        """Warn once if uneven shards per rank get no weights, as no model was prepared."""
        is_even = self.num_shards % self.rank_info.world_size == 0
        if is_even or self._has_warned or self.gradients.models or not torch.is_grad_enabled():
            return
        self._has_warned = True
        if self.rank_info.rank > 0:
            return
        logger.warning(
            "A global batch has %d shards, which %d workers cannot share equally, and no model was"
            " prepared whose gradients are weighted by samples. Hint: train.prepare_model(model).",
            self.num_shards,
            self.rank_info.world_size,
        )
