"""Runs and their metrics as rows for data frames."""

import os
from pathlib import Path
from typing import Any

from paceline._base.imports import Rows, flatten, metric_rows
from paceline._base.run_directory import RunDirectory
from paceline.core import _read_runs


def read_metrics(
    run: str | os.PathLike[str] | Any, group: str | None = None, *, rank: int = 0
) -> Rows:
    """Return the reported metrics of a run, with `to_pandas()` and `to_polars()`.

    Each row has the group, the batches completed, the attempt (from 1) and the metrics; nested ones
    have names such as "net.width". Rows that a later attempt repeated are left out.

    Args:
        run: A run directory; or the name of a run in ./paceline_runs, its start or end, or "last";
            or what has the directory as `path` or `run_dir`, such as a summary or results.
        group: Only this metric group, such as "training".
        rank: Who has reported them.

    Raises:
        NotARunDirectoryError: There is no such run, or several.
    """
    place = getattr(run, "run_dir", None) or getattr(run, "path", None) or run
    directory = RunDirectory(_read_runs.find_run(place))
    rows = metric_rows(
        (
            {
                "group": row.group,
                "steps_completed": row.steps_completed,
                "attempt": row.attempt + 1,
            },
            row.metrics,
        )
        for row in _read_runs.read_metrics(directory, group, rank=rank)
        if not row.is_superseded
    )
    return Rows(f"reports of {directory.path.name}", rows)


def runs(directory: str | os.PathLike[str] | None = None) -> Rows:
    """Return the runs in a directory, the oldest first, with `to_pandas()` and `to_polars()`.

    Each row has the fields of `paceline runs list --json` that are known without a master, and the
    hyperparameters with names such as "hparams.lr".

    Args:
        directory: A directory of run directories; ./paceline_runs by default.
    """
    root = Path(_read_runs.RUNS_DIRECTORY if directory is None else directory)
    return Rows(
        f"runs in {root}",
        (
            {
                "name": run.name,
                "path": str(run.path),
                "state": run.state.value,
                "created": run.created,
                "attempts": run.num_attempts,
                "steps_completed": run.last_step,
                "latest_checkpoint": run.latest_checkpoint,
                "error": run.error,
                **flatten(_hparams(run.path), "hparams."),
            }
            for run in _read_runs.list_runs(root)
        ),
    )


def _hparams(path: Path) -> dict[str, Any]:
    info = RunDirectory(path).read_info()
    return (info.hparams if info.trial is None else info.trial.hparams) or {}
