"""Results of a run: reports during the run, values and checkpoints at its end."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline import core
from paceline.display import html_table
from paceline.journal import AttemptStarted, JournalKey, MetricsReported, RunDirectory, decode_value
from paceline.train._checkpoint import Checkpoint
from paceline.workers.runs import METRICS_GROUP, TIMINGS_GROUP


class Report(dict[str, Any]):
    """The metrics of one report.

    Args:
        metrics: Names to values.
        rank: Who reported.
        number: Which report of this rank it is, from 1; a function that went on from a checkpoint
            goes on from there.
        time: When, in seconds since the epoch.
        generation: How often the workers had been replaced.
        lag_s: How long it took to the driver, in seconds.
        validation: What of it a search judges: all, nothing, or these metrics.
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
    """Values that the functions returned, in rank order, and the results of the run.

    Args:
        values: What they returned.
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
        """What the chief reported, without what was trained again after a restart."""
        return self.metrics_of(0)

    def metrics_of(self, rank: int) -> list[Report]:
        """Return what a rank reported, without what was trained again after a restart."""
        return self._read(rank, METRICS_GROUP)

    @property
    def fold_metrics(self) -> dict[int, Report]:
        """What the chief reported last of each fold of a cross validation, by `report(cv=...)`."""
        return {report["cv"]: report for report in self.metrics if "cv" in report}

    @property
    def mean_metrics(self) -> dict[str, float]:
        """The mean over all folds of each number that was reported last of each of them."""
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
        batch of that wait, and of what the function does with a batch.
        """
        return self._read(rank, TIMINGS_GROUP)

    def _read(self, rank: int, group: str) -> list[Report]:
        run = RunDirectory(self.run_dir)
        wanted = core.group_of_rank(group, rank)
        keys = set(run.journal_keys())
        reports: list[Report] = []
        for generation in self._generations:
            key = JournalKey(self._attempt, generation, rank)
            if key not in keys:
                # Without this rank, the chief tells where a generation began.
                key = JournalKey(self._attempt, generation, 0)
            for entry in run.reader(key) if key in keys else ():
                record = entry.decode()
                if isinstance(record, AttemptStarted):
                    reports = [r for r in reports if r.step <= record.steps_completed]
                    if key.rank != rank:
                        break
                elif isinstance(record, MetricsReported) and record.group == wanted:
                    report = report_of(key, record)
                    while reports and reports[-1].number >= report.number:
                        # It repeats one that was made after the checkpoint.
                        reports.pop()
                    reports.append(report)
        return reports


def report_of(key: JournalKey, record: MetricsReported, lag_s: float = 0.0) -> Report:
    """Return what a journal's record tells."""
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
