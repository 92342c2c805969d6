"""Commands `paceline experiment set`, `label`, `rename`, `note` and `export`."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline._base.frames import flatten
from paceline.cli._console_output import print_answer
from paceline.cli._experiment_commands import experiment_app
from paceline.cli._options_and_errors import CommandError, ExperimentId, connect

if TYPE_CHECKING:
    from paceline.client._experiment_and_trial import Experiment

_TRIAL_FIELDS = (
    *("id", "seed", "steps_completed", "best_metric", "best_step", "latest_metric", "restarts"),
    *("created_at", "started_at", "ended_at", "stop_reason", "error"),
)
_METRIC_FIELDS = ("trial_id", "group", "steps_completed", "attempt", "time", "name", "value")


@experiment_app.command("set")
def set_fields(
    experiment: ExperimentId,
    priority: Annotated[
        int | None,
        typer.Option(min=1, max=99, metavar="N", help="Priority: 1 comes first, 99 last."),
    ] = None,
    weight: Annotated[
        float | None, typer.Option(metavar="W", help="Weight in fair shares, above 0.")
    ] = None,
    max_slots: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Most slots at once; 0 for no limit.")
    ] = None,
) -> None:
    """Set the priority, the weight or the largest number of slots of an experiment."""
    given = {"priority": priority, "weight": weight, "max_slots": max_slots}
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes:
        raise CommandError("`--priority`, `--weight` or `--max-slots` must be given.")
    with connect() as client:
        found = client.get_experiment(experiment).edit(
            priority=priority, weight=weight, max_slots=max_slots
        )
    told = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in changes.items())
    _show_changed(found, f"has {told}")


@experiment_app.command()
def label(
    experiment: ExperimentId,
    labels: Annotated[
        list[str] | None, typer.Argument(help="Labels to add; none to show them.", metavar="LABEL")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove these labels instead.")] = False,
) -> None:
    """Show the labels of an experiment, or add or remove some."""
    with connect() as client:
        found = client.get_experiment(experiment)
        before, given = found.data.labels, labels or []
        if remove and (missing := [one for one in given or ["LABEL"] if one not in before]):
            raise CommandError(
                f"`LABEL` must be one of the experiment's labels ({', '.join(before) or 'none'}),"
                f" but got {missing[0]!r}."
            )
        kept = [one for one in before if not remove or one not in given]
        after = kept if remove else list(dict.fromkeys([*before, *given]))
        if after != before:
            found.edit(labels=after)
    told = f"has the labels {', '.join(after)}" if after else "has no labels"
    _show_changed(found, told)


@experiment_app.command()
def rename(
    experiment: ExperimentId,
    name: Annotated[str, typer.Argument(help="The new name.", metavar="NAME")],
) -> None:
    """Give an experiment another name."""
    with connect() as client:
        found = client.get_experiment(experiment).edit(name=name)
    _show_changed(found, f"is named {found.name}")


@experiment_app.command()
def note(
    experiment: ExperimentId,
    text: Annotated[
        str | None, typer.Argument(help="The new notes; none to show them.", metavar="TEXT")
    ] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Add the text as a line below the notes.")
    ] = False,
) -> None:
    """Show or replace the notes of an experiment."""
    with connect() as client:
        found = client.get_experiment(experiment)
        if text is not None:
            lines = [found.data.notes] if append and found.data.notes else []
            found.edit(notes="\n".join([*lines, text]))
    told = f"Experiment {experiment} has new notes."
    if text is None:
        told = found.data.notes or f"Experiment {experiment} has no notes."
    print_answer(found.data, told)


def _show_changed(experiment: "Experiment", told: str) -> None:
    print_answer(experiment.data, f"Experiment {experiment.id} {told}.")


@experiment_app.command()
def export(
    experiment: ExperimentId,
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="New or empty directory. The default is ./experiment-ID-export.", metavar="DIR"
        ),
    ] = None,
    file_format: Annotated[
        Literal["csv", "jsonl"], typer.Option("--format", help="Format of the tables.")
    ] = "csv",
) -> None:
    """Write the config, the trials and all metrics of an experiment into a directory.

    The files are config.yaml, and trials and metrics as CSV or as lines of JSON. In CSV, a text
    that a spreadsheet would run as a formula begins with an apostrophe.
    """
    target = Path(f"experiment-{experiment}-export") if directory is None else directory
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CommandError(f"`DIR` must be new or empty, but {str(target)!r} is not.")
    with connect() as client:
        found = client.get_experiment(experiment)
        target.mkdir(parents=True, exist_ok=True)
        import yaml

        text = yaml.safe_dump(found.config, sort_keys=False, allow_unicode=True)
        (target / "config.yaml").write_text(text, encoding="utf-8")
        num_trials = _write_rows(target / f"trials.{file_format}", _trial_rows(found))
        num_values = _write_rows(target / f"metrics.{file_format}", _metric_rows(found))
    print_answer(
        {"path": str(target), "num_trials": num_trials, "num_values": num_values},
        f"Wrote config.yaml, trials.{file_format} ({num_trials} rows) and metrics.{file_format}"
        f" ({num_values} rows) into {target}.",
    )


def _trial_rows(experiment: "Experiment") -> Iterator[dict[str, Any]]:
    trials = [trial.data for trial in experiment.trials()]
    hparams = [flatten(data.hparams, "hparams.") for data in trials]
    names = dict.fromkeys(name for found in hparams for name in found)
    for data, found in zip(trials, hparams, strict=True):
        row = {name: getattr(data, name) for name in _TRIAL_FIELDS}
        row |= {"state": data.shown_state.value}
        yield row | {name: found.get(name) for name in names}


def _metric_rows(experiment: "Experiment") -> Iterator[dict[str, Any]]:
    from paceline._base.journal_records import encode_metrics

    for trial in experiment.trials():
        for row in trial.iter_metrics():
            place = (trial.id, row.group, row.steps_completed, row.attempt, row.time)
            # Encoded, as JSON knows no NaN.
            for name, value in encode_metrics(row.metrics).items():
                yield dict(zip(_METRIC_FIELDS, (*place, name, value), strict=True))


def _write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    """Write rows, as CSV or as lines of JSON by the ending of the path; return their number."""
    import json

    from paceline._base.journal_records import decode_value
    from paceline._base.process_and_network import csv_cell, csv_text

    number = 0
    with open(path, "x", encoding="utf-8", errors="replace", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        for number, row in enumerate(rows, start=1):
            if path.suffix == ".jsonl":
                file.write(json.dumps(row) + "\n")
                continue
            if number == 1:
                table.writerow(map(csv_text, row))
            table.writerow(csv_cell(decode_value(value)) for value in row.values())
    return number
