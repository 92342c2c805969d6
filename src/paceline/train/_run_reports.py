"""Reports and results of a run on its driver: read, handed to callbacks, compared."""

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from paceline import core
from paceline._base.imports import html_table
from paceline._base.journal_records import (
    AttemptStarted,
    CheckpointDeleted,
    CheckpointStored,
    MetricsReported,
    decode_value,
    encode_metrics,
)
from paceline._base.progress_display import TrainingProgress
from paceline._base.run_directory import JournalKey, RunDirectory, RunTail
from paceline._training.workers.worker_failures import TrainingFailedError
from paceline.core._arguments import numbers_of, rank_group
from paceline.core._train_context import RunFeedback, ending_of
from paceline.storage._checkpoint_storage import CheckpointStorage, Kept
from paceline.train._run_protocol import (
    METRICS_GROUP,
    TIMINGS_GROUP,
    Checkpoint,
    RankOutcome,
    StoredAt,
)

if TYPE_CHECKING:
    from paceline.train._trainer_arguments import CheckpointStrategy

logger = logging.getLogger(__name__)


class Report(dict[str, Any]):
    """Metrics of a report, with its rank, number, step and time.

    Args:
        metrics: Names to values.
        rank: The rank that reported.
        number: Which report of this rank it is, from 1; a function that resumed from a checkpoint
            continues from there.
        time: When, in seconds since the epoch.
        generation: How often the workers had been replaced.
        lag_s: How long it took to the driver, in seconds.
        validation: The part that a search judges: all, nothing, or these metrics.
        step: The steps that training had completed; the number, if nothing has counted them.
    """

    def __init__(
        self,
        metrics: dict[str, Any],
        *,
        rank: int = 0,
        number: int = 0,
        time: float = 0.0,
        generation: int = 0,
        lag_s: float = 0.0,
        validation: dict[str, Any] | bool = True,
        step: int = 0,
    ) -> None:
        super().__init__(metrics)
        self.rank = rank
        self.number = number
        self.time = time
        self.generation = generation
        self.lag_s = lag_s
        self.validation = validation
        self.step = step

    def __repr__(self) -> str:
        return f"Report({super().__repr__()}, rank={self.rank}, number={self.number})"


class Results(list[Any]):
    """Return values of the function, in rank order, with the results of the run.

    Args:
        values: The ranks' results.
        run_dir: The run directory.
        attempt: The attempt there.
        generations: Its generations.
        checkpoints: The checkpoints that exist, oldest first.
        best: The best of them.
        num_restarts: How often workers were lost.
        report_lags_s: For each rank the longest time from a report to the driver, in seconds.
    """

    def __init__(
        self,
        values: Iterable[Any],
        *,
        run_dir: Path,
        attempt: int,
        generations: range,
        checkpoints: Sequence[Checkpoint],
        best: Checkpoint | None,
        num_restarts: int,
        report_lags_s: dict[int, float],
    ) -> None:
        super().__init__(values)
        self.run_dir = run_dir
        self.checkpoints = list(checkpoints)
        self.best_checkpoint = best
        self.num_restarts = num_restarts
        self.report_lags_s = report_lags_s
        self._attempt = attempt
        self._generations = generations

    def _repr_html_(self) -> str:
        facts: list[tuple[str, Any]] = [
            ("run directory", self.run_dir),
            ("checkpoints", len(self.checkpoints)),
            ("restarts of workers", self.num_restarts),
        ]
        if self.best_checkpoint is not None:
            facts.append(("best checkpoint", self.best_checkpoint.url))
        try:
            reports = self.metrics
        except OSError:
            # The run directory is gone.
            reports = []
        names = list(dict.fromkeys(name for report in reports for name in report))
        rows = [(each.number, *(each.get(name, "") for name in names)) for each in reports]
        return "\n".join(
            (
                html_table(f"Results of {len(self)} worker(s)", (), facts),
                html_table(f"{len(reports)} report(s) of rank 0", ("report", *names), rows),
            )
        )

    @property
    def metrics(self) -> list[Report]:
        """The chief's reports, without reports repeated by training again after a restart."""
        return self.metrics_of(0)

    def metrics_of(self, rank: int) -> list[Report]:
        """Return a rank's reports, without reports repeated by training again after a restart."""
        return self._read(rank, METRICS_GROUP)

    @property
    def fold_metrics(self) -> dict[int, Report]:
        """The chief's last report of each cross-validation fold, from `report(cv=...)`."""
        return {report["cv"]: report for report in self.metrics if "cv" in report}

    @property
    def mean_metrics(self) -> dict[str, float]:
        """The means over all folds of numbers in each fold's last report."""
        folds = list(self.fold_metrics.values())
        means = {}
        for name in dict.fromkeys(name for fold in folds for name in fold if name != "cv"):
            values = [fold.get(name) for fold in folds]
            numbers = [value for value in values if isinstance(value, (int, float))]
            if len(numbers) == len(folds):
                means[name] = sum(numbers) / len(numbers)
        return means

    def timings_of(self, rank: int) -> list[Report]:
        """Return how fast a rank was, about once a second.

        `samples_per_second` and `batches_per_second` are its own, `data_wait_fraction` is its wait
        for data as a part of the time. `data_wait_s` and `train_batch_s` are the mean seconds per
        batch of that wait, and the function's own work on a batch.
        """
        return self._read(rank, TIMINGS_GROUP)

    def _read(self, rank: int, group: str) -> list[Report]:
        run = RunDirectory(self.run_dir)
        wanted = rank_group(group, rank)
        keys = set(run.journal_keys())
        reports: list[Report] = []
        for generation in self._generations:
            key = JournalKey(self._attempt, generation, rank)
            if key not in keys:
                # Without this rank, the chief shows where a generation began.
                key = JournalKey(self._attempt, generation, 0)
            for entry in run.reader(key) if key in keys else ():
                record = entry.decode()
                if isinstance(record, AttemptStarted):
                    # New generation: later steps are trained again.
                    reports = [r for r in reports if r.step <= record.steps_completed]
                    if key.rank != rank:
                        break
                elif isinstance(record, MetricsReported) and record.group == wanted:
                    report = report_of(key, record)
                    while reports and reports[-1].number >= report.number:
                        # Repeat of a report made after the checkpoint: keep only the newer.
                        reports.pop()
                    reports.append(report)
        return reports


def report_of(key: JournalKey, record: MetricsReported, lag_s: float = 0.0) -> Report:
    """Return the report in a journal's record."""
    judged = record.validation
    return Report(
        decode_value(record.metrics),
        rank=key.rank,
        number=record.steps_completed if record.number is None else record.number,
        step=record.steps_completed,
        time=record.time,
        generation=key.generation,
        lag_s=lag_s,
        validation=judged if isinstance(judged, bool) else decode_value(judged),
    )


class IncompleteCheckpointError(TrainingFailedError):
    """Raised at the end of a run when ranks have saved unequally many checkpoints.

    `results` are the results of the unfinished run.
    """

    def __init__(self, message: str, results: Any) -> None:
        super().__init__(message)
        self.results = results


def check_saves(outcomes: Sequence[RankOutcome], num_lacking: int, results: Results) -> None:
    """Require equal numbers of saved checkpoints on all ranks, with all parts stored.

    Args:
        outcomes: The outcome of the run on each rank.
        num_lacking: How many checkpoints lack parts, though all ranks have saved them.
        results: The results of the run so far.

    Raises:
        IncompleteCheckpointError: They have not.
    """
    counts = [outcome.num_saves for outcome in outcomes]
    most, least = max(counts), min(counts)
    if num_lacking > 0:
        raise IncompleteCheckpointError(
            "All ranks must store their parts of each checkpoint in one storage, but"
            f" {num_lacking} checkpoint(s) lack parts, or one before does. Hint: see the output"
            " of the ranks: an error of `save_checkpoint` must not be passed over, and all machines"
            " must see the storage. The values that were returned are in this error's `results`.",
            results,
        )
    if most == least:
        return
    few = ", ".join(
        f"rank {rank} has made {count}" for rank, count in enumerate(counts) if count < most
    )
    raise IncompleteCheckpointError(
        f"All ranks must call `save_checkpoint` equally often, but {few} of {most} calls:"
        f" {most - least} checkpoint(s) do not exist. Hint: call it on every rank; only the"
        " chief's state is stored. The values that were returned are in this error's"
        " `results`.",
        results,
    )


def warn_of_reports(outcomes: Sequence[RankOutcome]) -> None:
    """Log a warning if the reporting ranks made unequal numbers of reports."""
    counts = {rank: o.num_reports for rank, o in enumerate(outcomes) if o.num_reports}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
        logger.warning("The ranks have reported unequally often: %s.", told)


def warn_of_tuples(values: Sequence[object]) -> None:
    """Log a hint if the per-rank values look like a single tuple of a function."""
    if len(values) > 1 and all(isinstance(v, tuple) and len(v) == len(values) for v in values):
        logger.warning(
            "`run` returns one value per rank: here %d tuples of %d values each. Hint:"
            " `trainer.run(...)[0]` is the tuple of rank 0.",
            len(values),
            len(values),
        )


class TrainingCallback:
    """Base class of driver callbacks following a run; override the methods of interest.

    The driver calls the methods one after the other, from the thread that runs the trainer. What
    they raise ends the run.
    """

    def start_training(
        self, run_dir: Path, config: Mapping[str, Any] | None, num_workers: int
    ) -> None:
        """Begin, before the workers get the function."""

    def handle_result(self, report: Report) -> None:
        """Take a report: the metrics, with `rank`, `number`, `time` and `generation`."""

    def handle_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Handle a committed checkpoint."""

    def handle_restart(self, error: Exception, generation: int) -> None:
        """Handle a loss of workers; workers of a new generation follow."""

    def handle_resize(self, num_workers: int, generation: int) -> None:
        """Handle a new generation with a changed number of workers."""

    def finish_training(self, error: BaseException | None) -> None:
        """Handle the end of the run; `error` is the cause of a failure, or None."""


class _OfWorkers(TrainingCallback):
    """Base class of callbacks for the reports of chosen workers.

    Args:
        workers_to_log: A rank, several of them, or None for all.
    """

    def __init__(self, workers_to_log: int | Sequence[int] | None = 0) -> None:
        if workers_to_log is None or isinstance(workers_to_log, int):
            ranks = None if workers_to_log is None else {workers_to_log}
        else:
            ranks = set(workers_to_log)
        if ranks is not None and not all(isinstance(r, int) and r >= 0 for r in ranks):
            raise ValueError(
                f"`workers_to_log` must be ranks of at least 0, but got {workers_to_log!r}."
            )
        self._ranks = ranks

    def handle_result(self, report: Report) -> None:
        """Handle a report if its rank was chosen."""
        if self._ranks is None or report.rank in self._ranks:
            self._take_report(report)

    def _take_report(self, report: Report) -> None:
        raise NotImplementedError


class PrintCallback(_OfWorkers):
    """Callback printing each report on its own line.

    Args:
        workers_to_log: A rank, several of them, or None for all.
        stream: Where to print them; `sys.stdout` by default.
    """

    def __init__(
        self, workers_to_log: int | Sequence[int] | None = 0, *, stream: TextIO | None = None
    ) -> None:
        super().__init__(workers_to_log)
        self._stream = stream

    def _take_report(self, report: Report) -> None:
        rank = "" if self._ranks is not None and len(self._ranks) == 1 else f"rank {report.rank} "
        metrics = "  ".join(f"{name}={_short(value)}" for name, value in report.items())
        stream = self._stream or sys.stdout
        stream.write(f"{rank}report {report.number}: {metrics}\n")
        stream.flush()


class JsonLinesCallback(_OfWorkers):
    """Callback writing each report at once as a line of JSON to a file.

    Args:
        path: The file; an earlier one of this name is replaced. By default ``results.jsonl`` in
            the run directory, to which a resumed run adds its reports.
        workers_to_log: A rank, several of them, or None for all.
    """

    def __init__(
        self, path: str | Path | None = None, workers_to_log: int | Sequence[int] | None = 0
    ) -> None:
        super().__init__(workers_to_log)
        self._path = None if path is None else Path(path)
        self._file: IO[str] | None = None

    def start_training(
        self, run_dir: Path, config: Mapping[str, Any] | None, num_workers: int
    ) -> None:
        """Open the file."""
        if self._path is not None:
            self._file = self._path.open("w", encoding="utf-8")
        else:
            self._file = (run_dir / "results.jsonl").open("a", encoding="utf-8")

    def _take_report(self, report: Report) -> None:
        assert self._file is not None
        line = {
            "rank": report.rank,
            "number": report.number,
            "generation": report.generation,
            "time": report.time,
            "metrics": encode_metrics(report),
        }
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def finish_training(self, error: BaseException | None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class ProgressCallback(_OfWorkers):
    """Callback showing progress: a live line in a terminal or notebook, else a line per report.

    Args:
        total: How many reports the chief will make, if that is known.
        unit: The meaning of a report of the chief: "reports", "epochs" or "batches".
        stream: Where to show it; standard error by default.

    Raises:
        ValueError: There is no such unit.
    """

    def __init__(
        self, total: int | None = None, *, unit: str = "reports", stream: TextIO | None = None
    ) -> None:
        super().__init__(0)
        self._total, self._unit, self._stream = total, unit, stream
        self._progress: TrainingProgress | None = None
        self._feedback: RunFeedback | None = None
        # Refuses an unknown unit.
        self._make()
        self._checkpoint: Checkpoint | None = None
        self._has_reports = False
        self._began = 0.0

    def start_training(
        self, run_dir: Path, config: Mapping[str, Any] | None, num_workers: int
    ) -> None:
        """Begin to show progress."""
        self._checkpoint, self._has_reports, self._began = None, False, time.monotonic()
        run = RunDirectory(run_dir)
        self._feedback = RunFeedback(
            run_dir, run.read_info(), num_workers=num_workers, resuming="Trainer(run_dir={!r})"
        )
        if self._stream is None:
            self._feedback.begin(more="resumes" if run.journal_keys() else "")
        self._progress = self._make()
        self._progress.start(0)
        self._progress.note(f"{num_workers} worker(s) running")

    def _make(self) -> TrainingProgress:
        return TrainingProgress(self._total, self._unit, stream=self._stream)

    def _take_report(self, report: Report) -> None:
        assert self._progress is not None
        if not self._has_reports:
            self._has_reports = True
            # Rates count from here: earlier attempts made the reports before this one.
            self._progress.start(report.number, began=self._began)
        self._progress.report(report, steps_completed=report.number)

    def handle_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remember the checkpoint, to show the last at the end."""
        self._checkpoint = checkpoint

    def handle_restart(self, error: Exception, generation: int) -> None:
        """Show the replacement of lost workers."""
        if self._progress is not None:
            self._progress.note("replacing lost workers")

    def finish_training(self, error: BaseException | None) -> None:
        """Show how the run has ended."""
        if self._feedback is not None:
            last, ending = self._checkpoint, ending_of(error)
            stored = (None, None) if last is None else (last.storage, last.uuid)
            if self._progress is not None and self._has_reports:
                self._progress.end(ending, *self._feedback.details(ending, *stored))
            else:
                if self._progress is not None:
                    self._progress.close()
                self._feedback.end(ending, *stored)
            self._progress = self._feedback = None


class RunLines(ProgressCallback):
    """Progress of runs without a `ProgressCallback`: few lines, none in a trial of a master.

    Args:
        shows_reports: Whether to show reports too, not only the beginning and the end.
    """

    def __init__(self, *, shows_reports: bool) -> None:
        self._shows_reports = shows_reports
        super().__init__()

    def _make(self) -> TrainingProgress:
        is_quiet = not self._shows_reports or (
            self._feedback is not None and self._feedback.is_quiet
        )
        return TrainingProgress(None, "reports", is_quiet=is_quiet, is_terse=True)

    def _take_report(self, report: Report) -> None:
        if self._shows_reports:
            super()._take_report(report)


class TensorBoardCallback(_OfWorkers):
    """Write the numbers of reports as TensorBoard scalars, by the number of the report.

    Args:
        logdir: The directory; ``tensorboard`` in the run directory by default.
        worker_to_log: The rank.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, logdir: str | Path | None = None, worker_to_log: int = 0) -> None:
        super().__init__(worker_to_log)
        self._logdir = None if logdir is None else Path(logdir)
        self._writer: Any = None
        _summary_writer()

    def start_training(
        self, run_dir: Path, config: Mapping[str, Any] | None, num_workers: int
    ) -> None:
        """Open the directory."""
        self._writer = _summary_writer()(str(self._logdir or run_dir / "tensorboard"))

    def _take_report(self, report: Report) -> None:
        for name, value in numbers_of(report):
            self._writer.add_scalar(name, value, report.number, walltime=report.time)

    def finish_training(self, error: BaseException | None) -> None:
        """Write pending points and close the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "`TensorBoardCallback` needs TensorBoard, which is not installed. Hint: pip install"
            " 'paceline[tensorboard]'"
        ) from error
    return SummaryWriter


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_ENTRIES = 1000


class RunFollower:
    """Reader of a run's new journal records, passing them to callbacks.

    Args:
        run: The run directory.
        callbacks: The callbacks to call.
        storage: Where the run has the checkpoints of its earlier attempts, if it resumes from them.

    Attributes:
        checkpoints: The checkpoints that exist by their UUID, oldest first.
        lags_s: For each rank the longest time from a report to here, in seconds.
        num_commits: How many checkpoints were committed.
    """

    def __init__(
        self,
        run: RunDirectory,
        callbacks: Sequence[TrainingCallback],
        storage: CheckpointStorage | None = None,
    ) -> None:
        self.checkpoints = {} if storage is None else dict(_earlier_checkpoints(run, storage))
        self.lags_s: dict[int, float] = {}
        self.num_commits = 0
        self._callbacks = callbacks
        self._taken: list[Report] = []
        # The journals that are there already are passed over.
        self._tail = RunTail(run, dict.fromkeys(run.journal_keys(), 1 << 62))

    @property
    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint."""
        return list(self.checkpoints.values())[-1] if self.checkpoints else None

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The existing checkpoints, in the form needed by the chief."""
        return tuple(
            Kept(c.uuid, int(c.metadata["steps_completed"]), c.score)
            for c in self.checkpoints.values()
        )

    def best_checkpoint(self, strategy: "CheckpointStrategy") -> Checkpoint | None:
        """Return the best checkpoint by a strategy; the newest without a score attribute."""
        if strategy.checkpoint_score_attribute is None:
            return self.latest_checkpoint
        scored = [(c.score, c) for c in self.checkpoints.values() if c.score is not None]
        sign = 1 if strategy.checkpoint_score_order == "max" else -1
        # Ties of equal scores: the earlier checkpoint wins.
        best = max(scored, key=lambda pair: sign * pair[0], default=None)
        return None if best is None else best[1]

    def next_start(self, first: StoredAt | None) -> StoredAt | None:
        """Return the checkpoint for replacement workers: newer than `first` if there is any."""
        latest = self.latest_checkpoint
        if latest is None or not self.num_commits:
            return first
        return StoredAt(latest.storage, latest.uuid)

    @property
    def has_reports(self) -> bool:
        """Whether `take_reports` has something to return."""
        return bool(self._taken)

    def take_reports(self) -> list[Report]:
        """Return the reports since the last call."""
        reports, self._taken = self._taken, []
        return reports

    def follow(self) -> None:
        """Process the records written by the workers since the last call."""
        num_read = _ENTRIES
        while num_read == _ENTRIES:
            num_read = 0
            for key, entries in self._tail.read(_ENTRIES):
                num_read += len(entries)
                now = time.time()
                for entry in entries:
                    self._take_record(key, entry.decode(), now)

    def _take_record(self, key: JournalKey, record: Any, now: float) -> None:
        if isinstance(record, MetricsReported):
            if record.group != rank_group(METRICS_GROUP, key.rank):
                return
            report = report_of(key, record, max(0.0, now - record.time))
            self.lags_s[key.rank] = max(self.lags_s.get(key.rank, 0.0), report.lag_s)
            self._taken.append(report)
            for callback in self._callbacks:
                callback.handle_result(report)
        elif isinstance(record, CheckpointStored):
            checkpoint = Checkpoint(
                uuid=record.uuid, storage=record.storage, metadata=record.metadata
            )
            self.checkpoints[record.uuid] = checkpoint
            self.num_commits += 1
            for callback in self._callbacks:
                callback.handle_checkpoint(checkpoint)
        elif isinstance(record, CheckpointDeleted):
            self.checkpoints.pop(record.uuid, None)


def _earlier_checkpoints(
    run: RunDirectory, storage: CheckpointStorage
) -> Iterator[tuple[str, Checkpoint]]:
    """Yield train functions' checkpoints still existing in a run, each with its UUID."""
    for stored in core.read_checkpoints(run):
        # A run directory may hold checkpoints of other doors.
        if "num_shards" in stored.metadata and storage.exists(stored.uuid):
            yield (
                stored.uuid,
                Checkpoint(uuid=stored.uuid, storage=storage.url, metadata=stored.metadata),
            )
