"""Rank of a user's own loop: reports in its journal, state for checkpoints."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from paceline import faults
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.journal_records import TimeSpent, encode_metrics
from paceline._base.run_directory import JournalKey
from paceline._training.engine.checkpoints.capture_and_restore import (
    ModelsAndOptimizers,
    restore_generators,
)
from paceline._training.engine.gradient_reduction import has_stored_tensors
from paceline._training.engine.profiling import WAIT, WHOLE, StepThroughput
from paceline._training.engine.schedules import Position
from paceline.core import _attempt_journal
from paceline.core._arguments import Outcome, check_judged, rank_group
from paceline.core._attempt_journal import (
    CHECKPOINT,
    TimeAccount,
    TimeEvent,
    end_journal,
    outcome_of,
    record_metrics,
    record_start,
)
from paceline.core._preemption_and_search import SearchDecision
from paceline.data._order_and_random_generators import capture_random_state, restore_random_state
from paceline.train._prepared_loader_and_steps import PreparedLoader, UserLoop

faults.register("train.report")

# How often throughput is recorded, in seconds.
_TIMINGS_INTERVAL_S = 1.0
# How often a report looks at the clock of the records made from time to time, in seconds.
_LOOK_INTERVAL_S = 0.05


class RankReporter:
    """Journal writer of a rank in a single generation of a run.

    Reports of a rank are numbered from 1, and continue from the checkpoint that `begin` was given.
    The step of a report is the number of batches that prepared loaders have given out for training,
    or a library's own count. Without such a count, each report counts as a step. Reports may come
    from several threads.

    Args:
        key: The attempt, its generation and the rank.
        world_size: The number of ranks.
        directory: Where the journal goes.
        groups: The names of the groups for metrics and for times.
        first_report: The number after which reports begin, unless `begin` says otherwise.
        decision: Hears of the reports that a search judges.
        searched_metrics: The metrics that must be numbers in these.
        on_report: Called after each report of the thread that makes this object; for a function
            that runs in its driver's process.
        restart_causes: The causes that ended the workers of earlier starts, see `AttemptStarted`.
        is_parent_notified: Whether the parent process must hear of the run, see `record_start`.
    """

    def __init__(
        self,
        key: JournalKey,
        world_size: int,
        directory: Path,
        *,
        groups: tuple[str, str],
        first_report: int,
        decision: SearchDecision,
        searched_metrics: Sequence[str],
        on_report: Callable[[], None] | None,
        restart_causes: Sequence[str] = (),
        is_parent_notified: bool = True,
    ) -> None:
        self.journal = JournalWriter(directory)
        self._decision = decision
        self._searched_metrics = searched_metrics
        self._throughput = StepThroughput()
        self._position = Position()
        self.num_reports = 0
        self._steps_completed = 0
        self._num_batches = self._batches_before = 0
        self._is_counted_by_library = False
        # Metrics of the current step: within a step, a name has a single value.
        self._metrics_of_step: dict[str, Any] = {}
        self.last_metrics: dict[str, Any] = {}
        self._key = key
        self._world_size = world_size
        self._first_report = first_report
        self._on_report = on_report
        self._restart_causes = restart_causes
        self._is_parent_notified = is_parent_notified
        self._own_thread = threading.get_ident()
        # A number, its place in the journal and the record that begins the journal go together.
        self._lock = threading.Lock()
        self._group, self._timings_group = (rank_group(g, key.rank) for g in groups)
        self._has_begun = False
        self._account = TimeAccount(self._record_time if key.rank == 0 else None)
        # Records before the start record: written after it, with the first step of the reports.
        self._first_times: list[TimeSpent] = []
        self._first_wait_s = 0.0
        self._num_steps, self._steps_s = 0, 0.0
        self._look_at = 0.0
        self._reach_fault = faults.reach if faults.is_active() else None

    @property
    def steps_completed(self) -> int:
        """The steps completed by training, including steps since the last report."""
        return max(self._steps_completed, self._counted)

    @property
    def _counted(self) -> int:
        """The steps counted by loaders; 0 before any batch or if a library counts steps."""
        return self._num_batches and self._num_batches + self._batches_before

    def state(self) -> dict[str, int]:
        """Return the counters, for a checkpoint."""
        return {
            "num_reports": self.num_reports,
            "num_steps": self.steps_completed,
            "num_batches": self._num_batches,
        }

    def begin(
        self, counters: Mapping[str, int] | None = None, resumed_from: str | None = None
    ) -> None:
        """Set the first step of this rank's reports; only the first call has an effect.

        It comes late, as only `load_checkpoint()` shows that the function resumes from there.

        Args:
            counters: The result of `state`.
            resumed_from: The UUID of the checkpoint.
        """
        with self._lock:
            if not self._has_begun:
                self._begin(counters, resumed_from)

    def report(
        self,
        metrics: dict[str, Any],
        validation: Mapping[str, Any] | bool = True,
        step: int | None = None,
    ) -> int:
        """Record metrics, see `train.report`, and return the number of the report.

        Args:
            metrics: The metrics.
            validation: The part of the chief's report that a search judges: all, nothing, or these
                metrics.
            step: The steps that a library has counted.
        """
        encoded = encode_metrics(metrics)
        judged = self._key.rank == 0 and (
            validation if isinstance(validation, bool) else encode_metrics(dict(validation))
        )
        if judged:
            check_judged(encoded if judged is True else judged, self._searched_metrics)
        with self._lock:
            if not self._has_begun:
                self._begin(None, None)
            self.num_reports = number = self.num_reports + 1
            if step is not None:
                # Batch count dropped: a step of the library may have several batches.
                self._is_counted_by_library, self._num_batches = True, 0
            steps = self._advance(encoded, self._counted if step is None else step)
            # A library reports the parts of its metrics apart.
            self.last_metrics = encoded if validation is True else self.last_metrics | encoded
            sequence = record_metrics(
                self.journal,
                self._group,
                steps,
                encoded,
                judged,
                None if number == steps else number,
            )
            if judged:
                told = encoded if judged is True else judged
                self._decision.reported(sequence, steps, told)
            now = perf_counter()
            if now >= self._look_at:
                self._look_at = now + _LOOK_INTERVAL_S
                self._account.report(steps, self._waited_s())
                if self._throughput.elapsed_s >= _TIMINGS_INTERVAL_S:
                    self._record_timings()
        if self._reach_fault is not None:
            self._reach_fault("train.report")
        # The driver's callbacks count on being called by one thread.
        if self._on_report is not None and threading.get_ident() == self._own_thread:
            self._on_report()
        return number

    def record_store_state(self, storage: str, reason: str | None) -> None:
        """Record an unreachable storage; see `record_store_state`."""
        if self._has_begun:
            _attempt_journal.record_store_state(self.journal, storage, reason)

    def finish(self, error: BaseException | None) -> None:
        """Record the end and close the journal."""
        self.begin()
        outcome = outcome_of(error)
        with self._lock:
            self._record_timings()
            if outcome is not Outcome.ERROR:
                self._account.end(self.steps_completed, self._waited_s())
        end_journal(self.journal, outcome, error, is_parent_notified=self._is_parent_notified)

    def count_batch(self, num_samples: int, wait_s: float, *, is_trained: bool) -> None:
        """Count a batch of this rank and the seconds waited for its data."""
        batches, records = self._position.batches, self._position.records
        if not batches:
            # The wait for the first batch lies before.
            self._account.begin(self.steps_completed)
            self._first_wait_s = wait_s
        self._num_batches += is_trained and not self._is_counted_by_library
        self._position = Position(batches=batches + 1, records=records + num_samples)
        self._throughput.data_wait_s += wait_s

    def count_step(self, seconds: float) -> None:
        """Count for how long the function has used a batch."""
        self._num_steps += 1
        self._steps_s += seconds

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Count the time of the block, the storing of a checkpoint, as time without training."""
        self.begin()
        with self._account.spent_on(CHECKPOINT, self.steps_completed):
            yield
        self._account.stored(self.steps_completed, self._waited_s())

    def _waited_s(self) -> float:
        return self._throughput.all_data_wait_s - self._first_wait_s

    def _advance(self, metrics: dict[str, Any], counted: int) -> int:
        """Return the step of a report with these metrics, when so many steps are counted."""
        known = self._metrics_of_step
        is_same = counted == self._steps_completed and counted > 0
        if not is_same or any(known.get(name, new) != new for name, new in metrics.items()):
            self._steps_completed = max(counted, self._steps_completed + 1)
            known.clear()
        known.update(metrics)
        return self._steps_completed

    def _record_time(self, event: TimeEvent, num_steps: int, seconds: dict[str, float]) -> None:
        record = TimeSpent(
            time=time.time(), event=event, steps_completed=num_steps, seconds=seconds
        )
        if self._has_begun:
            self.journal.append(record)
        else:
            self._first_times.append(record)

    def _begin(self, counters: Mapping[str, int] | None, resumed_from: str | None) -> None:
        first = self._first_report
        stored = counters or {"num_reports": first, "num_steps": first, "num_batches": 0}
        self._has_begun = True
        # A run after another one in the same directory continues the count.
        self._batches_before = self._first_report if counters is None else 0
        self.num_reports = stored["num_reports"]
        self._steps_completed = steps_completed = stored["num_steps"]
        # Added, not set: loaders may have counted batches before the journal begins.
        self._num_batches += stored["num_batches"]
        record_start(
            self.journal,
            attempt=self._key.attempt,
            generation=self._key.generation,
            rank=self._key.rank,
            world_size=self._world_size,
            resumed_from=resumed_from,
            steps_completed=steps_completed,
            restart_causes=self._restart_causes,
            is_parent_notified=self._is_parent_notified,
        )
        for record in self._first_times:
            self.journal.append(msgspec.structs.replace(record, steps_completed=steps_completed))
        self._account.begin(steps_completed)

    def _record_timings(self) -> None:
        rates = self._throughput.take(self._position)
        if not rates:
            return
        # The names of the step timeline, as means over the batches.
        rates[WAIT] = rates["data_wait_fraction"] / rates["batches_per_second"]
        if self._num_steps:
            rates[WHOLE] = self._steps_s / self._num_steps
            self._num_steps, self._steps_s = 0, 0.0
        record_metrics(self.journal, self._timings_group, self.steps_completed, dict(rates))


if TYPE_CHECKING:
    from paceline.train._rank_checkpoints import UserStateReader

T = TypeVar("T")


class RankState:
    """The generators, gradients, scale and place in the data of a rank.

    Models and optimizers are not in here: the loop stores them, and puts them back before it
    continues. So this is put back as late as possible: when the loop asks for data, or for it.

    Args:
        own_loop: The loop.
    """

    def __init__(self, own_loop: UserLoop) -> None:
        self._loop = own_loop
        self._loaders: list[PreparedLoader] = []
        self._loader_states: list[dict[str, Any]] = []
        self._stored: UserStateReader | None = None
        self._own: dict[str, Any] | None = None
        self._is_random_due = False

    def capture(self) -> dict[str, Any]:
        """Return the state."""
        return {
            **self._objects().own_state(),
            "loaders": [loader.state() for loader in self._loaders],
            "gradients": self._loop.gradients.state(),
            "scaler": self._loop.steps.state(),
        }

    def take_up(self, stored: "UserStateReader") -> Mapping[str, Any]:
        """Resume from a checkpoint, and return the state for this rank."""
        rank_info = self._loop.rank_info
        own, chief = stored.of_rank(rank_info.rank), stored.of_rank(0)
        # State of the chief for a new rank: the checkpoint has no state of its own for such a rank.
        some = own or chief or {}
        self._stored = stored
        # The place in the data is the same for all ranks, and for any number of them.
        self._loader_states = some.get("loaders", [])
        for index, loader in enumerate(self._loaders):
            self._place_loader(loader, index)
        sizes = (rank_info.world_size, self._loop.num_busy_ranks)
        if own is not None and stored.metadata["world_size"] in sizes:
            self._own = own
        elif chief is not None:
            # No generators of the chief: two ranks would draw the same numbers.
            self._own = {**chief, "random": None}
        self._is_random_due = True
        return some

    def add_loader(self, loader: PreparedLoader) -> None:
        """Move a loader to its place in the checkpoint, and include its state from now on."""
        self._place_loader(loader, len(self._loaders))
        self._loaders.append(loader)

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
                # Generators of before: `restore_random_state()` has already restored them.
                restore_random_state(before)
            return iterator
        self.restore_random_state()
        return make()

    def restore_random_state(self) -> None:
        """Restore the random generators of the loaded checkpoint, unless already done."""
        if self._is_random_due:
            self._put_back()
            self._is_random_due = False

    def begin_batch(self) -> None:
        """Cancel a pending restore of generators, as the loop has continued."""
        self._is_random_due = False

    def _objects(self) -> ModelsAndOptimizers:
        # Prepared gradients have weights besides.
        loop = self._loop
        return ModelsAndOptimizers(rank=loop.rank_info.rank, models=loop.gradients.models)

    def _open_gradients(self, own: Mapping[str, Any], stored: "UserStateReader") -> Any:
        """Return this rank's gradients of an accumulated step, even if begun by other ranks."""
        loop, gradients = self._loop, self._loop.gradients
        state, stored_size = own["gradients"], stored.metadata["world_size"]
        sizes = (loop.rank_info.world_size, loop.num_busy_ranks)
        # An idle rank has stored none.
        has_own = loop.rank_info.rank < stored_size
        is_same = has_own and stored_size in sizes and not gradients.has_sharded
        if state is None or (is_same and not has_stored_tensors(state)):
            return state
        states = [(stored.of_rank(rank) or own)["gradients"] for rank in range(stored_size)]
        return gradients.shared_out(states, loop.rank_info.rank)

    def _place_loader(self, loader: PreparedLoader, index: int) -> None:
        if index < len(self._loader_states):
            loader.load_state(self._loader_states[index])

    def _put_back(self) -> None:
        """Restore the state of this rank; the random generators last."""
        own, loop = self._own, self._loop
        assert self._stored is not None
        if own is not None:
            self._objects().load_own_state(own)
            loop.gradients.load_state(self._open_gradients(own, self._stored))
            loop.steps.load_state(own["scaler"])
        restore_generators(
            own and own["random"],
            seed=loop.seed,
            num_steps=self._stored.metadata["steps_completed"],
            rank=loop.rank_info.rank,
        )
