"""Tracker for TensorBoard."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core import MetricPoint, Outcome, TrackedRun, Tracker
from paceline.integrations._required_library import required_library


class TensorBoardTracker(Tracker):
    """Write runs as TensorBoard files: metrics, hyperparameters, URLs of checkpoints, the end.

    Args:
        logdir: The directory; ``tensorboard`` in the run directory by default.
        ranks: Whose metrics, see `core.Tracker`.
        groups: Which groups of metrics, see `core.Tracker`.
        close_timeout_s: How long the end of a run waits for the file system, in seconds.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    name = "tensorboard"

    def __init__(
        self,
        logdir: str | Path | None = None,
        *,
        ranks: int | Iterable[int] | None = 0,
        groups: Collection[str] | None = ("training", "validation"),
        close_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(ranks, groups=groups, close_timeout_s=close_timeout_s)
        required_library("tensorboard", "TensorBoardTracker", "paceline[tensorboard]")
        self._writers = required_library(
            "torch.utils.tensorboard", "TensorBoardTracker", "paceline[tensorboard]"
        )
        self._logdir = None if logdir is None else Path(logdir)
        self._writer: Any = None
        self._step = 0

    def start(self, run: TrackedRun) -> str:
        """Open the directory."""
        path = str(self._logdir or run.run_dir / "tensorboard")
        self._writer = self._writers.SummaryWriter(path)
        self._writer.add_text("config", f"```\n{json.dumps(dict(run.config), indent=2)}\n```")
        return path

    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        """Write scalars."""
        for each in points:
            self._writer.add_scalar(each.name, each.value, each.step, walltime=each.time)
            self._step = max(self._step, each.step)
        self._writer.flush()

    def log_checkpoints(self, checkpoints: Mapping[str, str], newest: str) -> None:
        """Write their URLs as text."""
        urls = "\n".join(f"- {url}" for url in checkpoints.values())
        self._writer.add_text("checkpoints", urls, self._step)
        self._writer.flush()

    def finish(self, outcome: Outcome, error: str | None) -> None:
        """Write how the run has ended, and close the file."""
        text = outcome.value if error is None else f"{outcome.value}: {error}"
        self._writer.add_text("outcome", text, self._step)
        self._writer.close()
