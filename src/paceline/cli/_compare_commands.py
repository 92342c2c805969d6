"""Commands `paceline runs compare` and `experiment compare`: settings and metrics side by side."""

from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._base.imports import flatten
from paceline._base.journal_records import encode_metrics
from paceline._base.run_directory import RunDirectory
from paceline.cli._console_output import format_number, print_list
from paceline.cli._experiment_commands import experiment_app
from paceline.cli._options_and_errors import CommandError, connect
from paceline.cli._runs_commands import find_run, run_groups, run_state_name, runs_app

if TYPE_CHECKING:
    from paceline.client._client import Client

_KINDS = ("last", "min", "max")


@runs_app.command("compare", is_list=True)
def compare_runs(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Runs, each named as for `runs show`.", metavar="RUN_DIR RUN_DIR..."),
    ],
) -> None:
    """Compare runs: settings that differ, and metrics side by side."""
    _check_number(len(runs), "RUN_DIR")
    _show([_run_as_column(find_run(run)) for run in runs])


@experiment_app.command("compare", is_list=True)
def compare_experiments(
    experiments: Annotated[
        list[int], typer.Argument(help="Numbers of the experiments.", metavar="ID ID...")
    ],
) -> None:
    """Compare experiments: settings that differ, and the metrics of their best trials."""
    _check_number(len(experiments), "ID")
    with connect() as client:
        columns = [experiment_as_column(client, experiment) for experiment in experiments]
    _show(columns)


def _check_number(number: int, name: str) -> None:
    if number < 2:
        raise CommandError(f"`{name}` must be given at least twice, but got {number}.")


def _run_as_column(path: Path) -> dict[str, Any]:
    from paceline.core._read_runs import read_metrics, summarize_run

    summary, run = summarize_run(path), RunDirectory(path)
    info = run.read_info()
    trial = info.trial
    settings: dict[str, Any] = {"hparams": info.hparams or {}, "seed": info.seed}
    if trial is not None:
        settings = {**trial.config, "hparams": trial.hparams, "seed": trial.trial_seed}
    metrics: dict[str, dict[str, Any]] = {}
    for group in run_groups(run):
        for row in read_metrics(run, group):
            if not row.is_superseded:
                for name, value in row.metrics.items():
                    found = metrics.setdefault(f"{group}/{name}", {"min": None, "max": None})
                    _add_value(found, value)
    return {
        "name": path.name,
        "state": run_state_name(summary),
        "settings": {**settings, "arguments": " ".join(info.arguments)},
        "metrics": {name: encode_metrics(found) for name, found in metrics.items()},
    }


def _add_value(found: dict[str, Any], value: Any) -> None:
    found["last"] = value
    # A value that is not finite is neither the least nor the greatest one.
    if isinstance(value, (int, float)) and isfinite(value):
        found["min"] = min(value, inf if found["min"] is None else found["min"])
        found["max"] = max(value, -inf if found["max"] is None else found["max"])


def experiment_as_column(client: "Client", number: int) -> dict[str, Any]:
    """Return what a comparison shows of an experiment."""
    found = client.get_experiment(number)
    best = None if found.data.best_trial_id is None else client.get_trial(found.data.best_trial_id)
    metrics = {
        f"{group}/{name}": {kind: getattr(summary, kind) for kind in _KINDS}
        for group, series in sorted(best.data.summary.items() if best else ())
        for name, summary in sorted(series.items())
    }
    return {
        "name": f"{number} {found.name}",
        "state": found.data.shown_state.value,
        "best_trial": found.data.best_trial_id,
        "best_metric": found.data.best_metric,
        "settings": {**found.config, "best_trial_hparams": best.hparams if best else {}},
        "metrics": metrics,
    }


def _show(columns: list[dict[str, Any]]) -> None:
    facts = ("state", "best_trial", "best_metric")
    rows = [(fact, *(one[fact] for one in columns)) for fact in facts if fact in columns[0]]
    settings = [flatten(column["settings"]) for column in columns]
    for name in dict.fromkeys(name for one in settings for name in one):
        values = [one.get(name) for one in settings]
        if any(value != values[0] for value in values):
            rows.append((name, *(None if value is None else str(value) for value in values)))
    names = dict.fromkeys(name for column in columns for name in column["metrics"])
    # Validation first: it decides.
    for name in sorted(names, key=lambda name: not name.startswith("validation/")):
        rows.append((name, *(_metric_text(column["metrics"].get(name)) for column in columns)))
    print_list(columns, ["", *(column["name"] for column in columns)], rows)


def _metric_text(found: dict[str, Any] | None) -> str | None:
    """Return the last value, with the least and the greatest one if there were several."""
    if found is None:
        return None
    last, least, most = (format_number(found[kind]) for kind in _KINDS)
    return last if found["min"] is None or least == most else f"{last} ({least} to {most})"
