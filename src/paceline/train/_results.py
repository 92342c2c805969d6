"""Results and reports of a run."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline._base.imports import html_table
from paceline._base.journal_records import AttemptStarted, MetricsReported, decode_value
from paceline._base.run_directory import JournalKey, RunDirectory
from paceline._training.workers.worker_failures import TrainingFailedError
from paceline.core._arguments import rank_group
from paceline.train._run_protocol import METRICS_GROUP, TIMINGS_GROUP, Checkpoint, RankOutcome

if TYPE_CHECKING:
    pass

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
