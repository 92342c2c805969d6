"""Tracker for Weights & Biases."""

import atexit
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from paceline.core import MetricPoint, Outcome, TrackedRun, Tracker
from paceline.integrations._required_library import required_library

_STEP = "step"


class WandbTracker(Tracker):
    """Show runs in Weights & Biases: metrics, hyperparameters, URLs of checkpoints, and the end.

    A run that goes on stays one run there. Metrics have their step as "step", which is the axis of
    their charts. The summary has "checkpoint", the URL of the newest one, and "checkpoints", the
    URLs of all that exist.

    Args:
        project: The project; by default what W&B itself takes, such as the variable WANDB_PROJECT.
        entity: The team or user; W&B's own default.
        mode: "online", "offline" or "disabled"; by default what the variable WANDB_MODE says.
        run_name: The name of the run there; by default that of the run.
        directory: Where W&B keeps its files; the run directory by default.
        tags: Tags of the run.
        ranks: Whose metrics, see `core.Tracker`.
        groups: Which groups of metrics, see `core.Tracker`.
        close_timeout_s: How long the end of a run waits for W&B, in seconds.

    Raises:
        ImportError: W&B is not installed.
    """

    name = "wandb"

    def __init__(
        self,
        project: str | None = None,
        *,
        entity: str | None = None,
        mode: Any = None,
        run_name: str | None = None,
        directory: str | None = None,
        tags: Iterable[str] = (),
        ranks: int | Iterable[int] | None = 0,
        groups: Collection[str] | None = ("training", "validation"),
        close_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(ranks, groups=groups, close_timeout_s=close_timeout_s)
        # Here, so that loading it takes no time of training.
        self._wandb: Any = required_library("wandb", "WandbTracker", "paceline[wandb]")
        self._options = {"project": project, "entity": entity, "mode": mode, "tags": [*tags]}
        self._run_name = run_name
        self._directory = directory
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        """Make a run, or go on with an earlier one."""
        self._run = self._wandb.init(
            **self._options,
            id=run.run_id,
            name=self._run_name or run.name,
            dir=self._directory or str(run.run_dir),
            config=dict(run.config),
            resume="allow",
            # Another run of this process may go on, such as one of the user's own.
            reinit="create_new",
            settings=self._wandb.Settings(silent=True, console="off", disable_git=True),
        )
        self._run.define_metric("*", step_metric=_STEP)
        return run.run_id

    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        """Add points; those of one report become one row."""
        rows: dict[tuple[int, float], dict[str, float]] = {}
        for each in points:
            rows.setdefault((each.step, each.time), {})[each.name] = each.value
        for (step, time), row in rows.items():
            self._run.log({**row, _STEP: step, "_timestamp": time})

    def log_checkpoints(self, checkpoints: Mapping[str, str], newest: str) -> None:
        """Set their URLs in the summary."""
        self._run.summary["checkpoint"] = checkpoints.get(newest, newest)
        self._run.summary["checkpoints"] = dict(checkpoints)

    def finish(self, outcome: Outcome, error: str | None) -> None:
        """Set the status; one that was preempted counts as failed there, until it goes on."""
        self._run.summary["outcome"] = outcome.value
        if error is not None:
            self._run.summary["error"] = error
        self._run.finish(exit_code=0 if outcome is Outcome.COMPLETED else 1)

    def abandon(self) -> None:
        """Have the end of this process not wait for W&B's own, if that still hangs then."""
        # Handlers run last in, first out: before that of W&B, which waits without a limit.
        atexit.register(self._end_service)

    def _end_service(self) -> None:
        if not self.turn.locked():
            return
        # Checked with wandb 0.31, which offers no public way.
        setup: Any = self._wandb.setup()
        connection = getattr(setup, "_connection", None)
        process = getattr(getattr(connection, "_proc", None), "_process", None)
        if process is not None:
            process.kill()
