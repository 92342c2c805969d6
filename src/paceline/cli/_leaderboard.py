"""The best trials of an experiment, as a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli._output import console, flatten, format_number

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.client import Experiment, Trial

_NUM_SHOWN = 10
_MAX_COLUMNS = 8
_LINE_WIDTH = 80


def print_leaderboard(experiment: "Experiment") -> None:
    """Print the ten best trials, and the best one with its hyperparameters."""
    # Those without a metric come last; one more than shown tells whether there are any.
    trials = [t for t in experiment.trials(sort_by="metric", limit=_NUM_SHOWN) if _is_measured(t)]
    output = console()
    if not trials:
        output.print(f"No trial reported the metric `{experiment.metric}`.")
        return
    direction = "smaller" if experiment.smaller_is_better else "larger"
    total = experiment.data.num_trials
    title = f"Best of {total} trials" if total > 1 else "The trial"
    output.print()
    output.print(f"{title} by {experiment.metric} ({direction} is better)", style="bold")
    output.print(leaderboard_table(trials, experiment.metric))
    best = trials[0]
    values = flatten(best.hparams)
    output.print(
        f"Best: trial {best.id}, {experiment.metric} {format_number(best.best_metric)}"
        f" after {best.data.best_step} batches",
        style="bold green",
    )
    for name, value in sorted(values.items()):
        output.print(f"  {name} = {format_number(value)}")


def leaderboard_table(trials: "Sequence[Trial]", metric: str) -> "Table":
    """Return the table; its first row, the best trial, stands out.

    Hyperparameters have a column each if that fits a terminal of 80 characters.
    """
    from rich import box
    from rich.table import Table

    names = _varying(trials)
    width = sum(max(len(name), 9) + 2 for name in [metric, *names]) + 20
    is_wide = bool(names) and len(names) <= _MAX_COLUMNS and width <= _LINE_WIDTH
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for title in ("#", "Trial", metric, "Batches"):
        table.add_column(title, justify="right")
    for name in names if is_wide else ["Hyperparameters"] * bool(names):
        table.add_column(name, justify="right" if is_wide else "left", overflow="fold")
    for place, trial in enumerate(trials, start=1):
        values = flatten(trial.hparams)
        shown = [format_number(values.get(name)) for name in names]
        if not is_wide and names:
            pairs = zip(names, shown, strict=True)
            shown = [" ".join(f"{name}={value}" for name, value in pairs)]
        table.add_row(
            str(place),
            str(trial.id),
            format_number(trial.best_metric),
            format_number(trial.data.best_step),
            *shown,
            style="bold green" if place == 1 else None,
        )
    return table


def _varying(trials: "Sequence[Trial]") -> list[str]:
    """Return the hyperparameters in which the trials differ; all of them for one trial."""
    rows = [flatten(trial.hparams) for trial in trials]
    names = sorted({name for row in rows for name in row})
    if len(rows) == 1:
        return names
    return [name for name in names if len({repr(row.get(name)) for row in rows}) > 1]


def _is_measured(trial: "Trial") -> bool:
    value: Any = trial.best_metric
    return value is not None
