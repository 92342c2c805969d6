"""`Result`, the return value of `Trainer.fit`."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.core import MetricsRow, read_metrics
from paceline.display import html_table
from paceline.journal import RunDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The outcome of a training.

    Attributes:
        metrics: The last validation's metrics, or the last training report's without one.
        best_metrics: The metrics of the best validation, None without a metric to judge by.
        checkpoints: UUIDs of the checkpoints stored by this call that are kept, oldest first.
        stop_reason: Why training ended.
        steps_completed: Global batches trained since the start of training.
        run_dir: The run directory that holds the history.
        checkpoint_storage: The directory or URL that holds the checkpoints.
    """

    metrics: dict[str, Any]
    best_metrics: dict[str, Any] | None
    checkpoints: list[str]
    stop_reason: str
    steps_completed: int
    run_dir: Path
    checkpoint_storage: str = ""

    def _repr_html_(self) -> str:
        facts = [
            ("steps completed", self.steps_completed),
            ("run directory", self.run_dir),
            ("checkpoints", len(self.checkpoints)),
            *(("newest checkpoint", url) for url in self.checkpoint_urls[-1:]),
        ]
        best = self.best_metrics or {}
        rows = [(name, value, best.get(name, "")) for name, value in self.metrics.items()]
        return "\n".join(
            (
                html_table(f"Result: {self.stop_reason}", (), facts),
                html_table("Metrics", ("metric", "last", "best"), rows),
            )
        )

    @property
    def checkpoint_urls(self) -> list[str]:
        """The checkpoints as paths, or as URLs of an object store, as `Trainer.restore` takes."""
        return [f"{self.checkpoint_storage}/{uuid}" for uuid in self.checkpoints]

    def history(self, group: str = "validation") -> Iterator[MetricsRow]:
        """Yield the rows of one group as reported, read from disk; superseded rows are left out."""
        for row in read_metrics(RunDirectory(self.run_dir), group):
            if not row.is_superseded:
                yield row

    def to_pandas(self, group: str = "validation") -> Any:
        """Return the history as a pandas data frame, one row per step.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "`to_pandas` needs pandas, but it is not installed. Hint: pip install pandas, or"
                " read the rows by `history`."
            ) from error
        rows: dict[int, dict[str, Any]] = {}
        for row in self.history(group):
            rows.setdefault(row.steps_completed, {}).update(row.metrics)
        frame = pandas.DataFrame.from_dict(rows, orient="index")
        frame.index.name = "steps_completed"
        return frame


def last_validation(run_dir: Path) -> dict[str, Any]:
    """Return the metrics of a run's last validation, which an earlier process may have made."""
    metrics: dict[str, Any] = {}
    for row in read_metrics(RunDirectory(run_dir), "validation"):
        metrics = metrics if row.is_superseded else row.metrics
    return metrics
