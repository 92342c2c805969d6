"""Callbacks of a run on its driver: printed, as JSON lines, as a display, as TensorBoard files."""

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from paceline import core
from paceline._base.journal_records import (
    CheckpointDeleted,
    CheckpointStored,
    MetricsReported,
    encode_metrics,
)
from paceline._base.progress_display import TrainingProgress
from paceline._base.run_directory import JournalKey, RunDirectory
from paceline._base.run_tail_and_files import RunTail
from paceline.core._arguments import numbers_of, rank_group
from paceline.core._train_context import RunFeedback, ending_of
from paceline.storage._checkpoint_storage import CheckpointStorage
from paceline.storage._retention_rules import Kept
from paceline.train._results import Report, report_of
from paceline.train._run_protocol import METRICS_GROUP, Checkpoint, StoredAt

if TYPE_CHECKING:
    from paceline.train._trainer_arguments import CheckpointStrategy

logger = logging.getLogger(__name__)


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
