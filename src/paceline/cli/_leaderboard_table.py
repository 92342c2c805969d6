"""The best trials of an experiment, as a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.cli._console_output import flatten, format_number, make_table
from paceline.cli._state_words import num_trials_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline.client import Experiment, Trial

_NUM_SHOWN = 10
_LINE_WIDTH = 80
_GAP = 2


def print_leaderboard(experiment: "Experiment", output: "Console") -> None:
    """Print the ten best trials of a search, and the best one with its hyperparameters."""
    found = experiment.trials(sort_by="metric", limit=_NUM_SHOWN)
    trials = [trial for trial in found if trial.best_metric is not None]
    if not trials:
        output.print(why_no_best(experiment), style="yellow", soft_wrap=True)
        return
    best = trials[0]
    value = format_number(best.best_metric)
    place = f"after {best.data.best_step} batches"
    if experiment.data.num_trials == 1:
        output.print(f"Best {experiment.metric}: {value} {place}", style="bold green")
        return
    direction = "smaller" if experiment.smaller_is_better else "larger"
    shown = f"Best {len(trials)} of {experiment.data.num_trials} trials"
    output.print()
    output.print(f"{shown} by {experiment.metric} ({direction} is better)", style="bold")
    output.print(leaderboard_table(trials, experiment.metric))
    output.print()
    output.print(f"Best: trial {best.id}, {experiment.metric} {value} {place}", style="bold green")
    for name, hparam in sorted(flatten(best.hparams).items()):
        output.print(f"  {name} = {format_number(hparam)}")


def why_no_best(experiment: "Experiment") -> str:
    """Return why no trial has a best value of the searched metric."""
    metric = experiment.metric
    # The best leaves out what is not finite, the latest does not.
    told = [trial for trial in experiment.trials() if trial.data.latest_metric is not None]
    if not told:
        return f"No trial reported the metric `{metric}` in a validation."
    summaries = [trial.reload().data.summary.get("validation", {}).get(metric) for trial in told]
    num_reports = sum(summary.count for summary in summaries if summary is not None)
    reports = "the only report" if num_reports == 1 else f"all {num_reports} reports"
    of = "" if experiment.data.num_trials == 1 else f" of {num_trials_text(len(told))}"
    return f"The metric `{metric}` was NaN or infinite in {reports}{of}."


def leaderboard_table(trials: "Sequence[Trial]", metric: str) -> "Table":
    """Return the table; its first row, the best trial, stands out.

    Hyperparameters have a column each if that fits a terminal of 80 characters.
    """
    names = _varying_in_leaderboard(trials)
    titles = ["#", "Trial", metric, "Batches", *names]
    rows = [_leaderboard_row(place, trial, names) for place, trial in enumerate(trials, start=1)]
    is_wide = _width([titles, *rows]) <= _LINE_WIDTH
    if names and not is_wide:
        titles = [*titles[:4], "Hyperparameters"]
        rows = [[*row[:4], _joined(names, row[4:])] for row in rows]
    table = make_table()
    for number, title in enumerate(titles):
        is_number = number < 4 or is_wide
        table.add_column(title, justify="right" if is_number else "left", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold green" if number == 0 else None)
    return table


def _leaderboard_row(place: int, trial: "Trial", names: list[str]) -> list[str]:
    values = flatten(trial.hparams)
    result = [str(place), str(trial.id), format_number(trial.best_metric)]
    result.append(format_number(trial.data.best_step))
    return result + [format_number(values.get(name)) for name in names]


def _joined(names: list[str], values: list[str]) -> str:
    return " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def _width(rows: list[list[str]]) -> int:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return sum(widths) + _GAP * (len(widths) - 1)


def _varying_in_leaderboard(trials: "Sequence[Trial]") -> list[str]:
    """Return the hyperparameters in which the trials differ; all of them for one trial."""
    rows = [flatten(trial.hparams) for trial in trials]
    names = sorted({name for row in rows for name in row})
    if len(rows) == 1:
        return names
    return [name for name in names if len({repr(row.get(name)) for row in rows}) > 1]
