"""Commands to propose, edit, repeat and compare experiments, and to see their lineage."""

from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._base.imports import flatten
from paceline._base.journal_records import encode_metrics
from paceline._base.run_directory import RunDirectory
from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._commands.bulk_commands import Archived, ChangedQuery, Many, Yes, change_previewed
from paceline.cli._commands.experiment_commands import experiment_app
from paceline.cli._commands.runs_commands import find_run, run_groups, run_state_name, runs_app
from paceline.cli._completions import complete_experiment
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError

if TYPE_CHECKING:
    from paceline._cluster.messages.experiment_models import Relative
    from paceline.client._client import Client
    from paceline.client._experiment_and_trial import Experiment


@experiment_app.command()
def propose(
    experiment: options.ExperimentId,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hyperparameters, such as lr=0.01; the rest are drawn. None to show proposals.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    why: Annotated[str, typer.Option(metavar="TEXT", help="The reason, for people.")] = "",
    by: Annotated[
        str, typer.Option(metavar="NAME", help="Who proposes. The default is the user.")
    ] = "",
    key: options.RequestKey = None,
) -> None:
    """Propose hyperparameters for the next trial of a search, or show the proposals."""
    with connect() as client:
        found = client.get_experiment(experiment)
        if values:
            made = found.propose(options.nested_overrides(values), why=why, by=by, key=key)
        proposals = [made] if values else found.proposals()
    if not values:
        rows = [
            (
                one.number,
                console.format_values(one.hparams),
                one.trial_id or one.problem,
                one.by,
                one.why,
            )
            for one in proposals
        ]
        titles = ["Number", "Hyperparameters", "Trial", "By", "Why"]
        console.print_list(proposals, titles, rows, right=["Number"], empty="No proposals.")
        return
    where = "waits for the next trial" if made.trial_id is None else f"is trial {made.trial_id}"
    console.print_answer([made], f"Proposal {made.number} for experiment {experiment} {where}.")
    console.print_agent_hint(f"`paceline e propose {experiment}` shows which trial took it.")


@experiment_app.command("tree", is_list=True)
def show_tree(experiment: options.ExperimentId) -> None:
    """Show what an experiment came from, and all that came of that."""
    with connect() as client:
        found = client.get_experiment(experiment).tree()
    depths: dict[int | None, int] = {None: -1}
    rows = []
    for one in found:
        depths[one.id] = depths[one.parent] + 1
        rows.append(_tree_row(one, depths[one.id]))
    console.print_list(found, ["Experiment", "Name", "State", "Best metric", "Code"], rows)


def _tree_row(one: "Relative", depth: int) -> tuple[Any, ...]:
    code = "changed" if one.has_changed_code else None
    return (
        "  " * depth + str(one.id),
        one.name,
        console.state_text(one.state),
        one.best_metric,
        code,
    )


@experiment_app.command()
def diff(
    experiment: options.ExperimentId,
    since: Annotated[
        int | None,
        typer.Option(metavar="ID", help="Compare with this experiment, not with its parent."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Show how the code of an experiment differs from that of the one it came from."""
    with connect() as client:
        found = client.get_experiment(experiment).diff(since)
    if json:
        console.print_json(found)
        return
    if not found.files:
        console.stdout().print(f"The code is that of experiment {found.since}.")
    for file in found.files:
        text = file.diff or f"{file.change} {file.path}: not shown, as it is large or no text"
        console.stdout().print(text, soft_wrap=True)


@experiment_app.command()
def repeat(
    experiment: options.ExperimentId,
    seeds: Annotated[int, typer.Option(min=2, metavar="N", help="Number of repeats.")] = 5,
    trial: Annotated[
        int | None, typer.Option(metavar="TRIAL", help="Trial. The default is the best one.")
    ] = None,
    baseline: Annotated[
        int | None, typer.Option(metavar="TRIAL", help="Trial to compare with, with equal seeds.")
    ] = None,
    paused: Annotated[
        bool, typer.Option("--paused", help="Create them, but do not start them.")
    ] = False,
    key: options.RequestKey = None,
) -> None:
    """Repeat the best trial of an experiment with other seeds: is the gain real?

    `paceline e describe` of the experiment then has the answer.
    """
    with connect() as client:
        found = client.get_experiment(experiment)
        try:
            made = found.repeat(seeds, trial=trial, baseline=baseline, activate=not paused, key=key)
        except ValueError as error:
            raise CommandError(str(error)) from error
    names = " and ".join(str(one.id) for one in made)
    plural = "s" * (len(made) > 1)
    console.print_answer(
        [one.data for one in made],
        f"Created experiment{plural} {names} with {seeds} repeats{' each' * (len(made) > 1)}.",
    )
    waits = " && ".join(f"paceline e wait {one.id}" for one in made)
    console.print_agent_hint(
        f"`{waits} && paceline e describe {experiment} --json` has the answer."
    )


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
    console.print_list(columns, ["", *(column["name"] for column in columns)], rows)


def _metric_text(found: dict[str, Any] | None) -> str | None:
    """Return the last value, with the least and the greatest one if there were several."""
    if found is None:
        return None
    last, least, most = (console.format_number(found[kind]) for kind in _KINDS)
    return last if found["min"] is None or least == most else f"{last} ({least} to {most})"


@experiment_app.command("set")
def set_fields(
    experiment: options.ExperimentId,
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
    limits: options.Limits = [],  # noqa: B006
) -> None:
    """Set the priority, the weight, the most slots or the limits of the search of an experiment."""
    given = {"priority": priority, "weight": weight, "max_slots": max_slots}
    changes = {name: value for name, value in given.items() if value is not None}
    new_limits = options.nested_overrides(limits)
    if not changes and not new_limits:
        raise CommandError("`--priority`, `--weight`, `--max-slots` or `--limit` must be given.")
    with connect() as client:
        found = client.get_experiment(experiment).edit(
            priority=priority, weight=weight, max_slots=max_slots, limits=new_limits or None
        )
    told = ", ".join(
        f"{name.replace('_', ' ')} {'none' if value is None else value}"
        for name, value in {**changes, **new_limits}.items()
    )
    _show_changed(found, f"has {told}")


@experiment_app.command()
def label(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="Number of the experiment; with --query the first label.",
            metavar="ID",
            autocompletion=complete_experiment,
        ),
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Argument(help="Labels to add; none to show them.", metavar="LABEL")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove these labels instead.")] = False,
    query: ChangedQuery = None,
    archived: Archived = False,
    yes: Yes = False,
    dry_run: options.DryRun = False,
) -> None:
    """Show the labels of an experiment, or add or remove some."""
    given = list(labels or [])
    if query is not None:
        _label_many([*filter(None, [experiment]), *given], remove, Many(
            None, query, yes, dry_run, "only" if archived else "no"
        ))  # fmt: skip
        return
    if experiment is None or not experiment.isdecimal():
        raise CommandError(f"`ID` must be the number of an experiment, but got {experiment!r}.")
    with connect() as client:
        found = client.get_experiment(int(experiment))
        before = found.data.labels
        if remove and (missing := [one for one in given or ["LABEL"] if one not in before]):
            raise CommandError(
                f"`LABEL` must be one of the experiment's labels ({', '.join(before) or 'none'}),"
                f" but got {missing[0]!r}."
            )
        kept = [one for one in before if not remove or one not in given]
        after = kept if remove else list(dict.fromkeys([*before, *given]))
        if after != before and not dry_run:
            found.edit(labels=after)
    told = f"has the labels {', '.join(after)}" if after else "has no labels"
    _show_changed(found, f"would have, by a dry run: {told}" if dry_run else told)


def _label_many(labels: list[str], remove: bool, many: Many) -> None:
    if not labels:
        raise CommandError("`LABEL` must be given with `--query`.")
    arguments: dict[str, Any] = {"remove_labels" if remove else "add_labels": labels}
    with connect() as client:
        query = str(many.query)
        preview = client.preview_action("label", query, archived=many.archived, **arguments)
        change_previewed(client, "label", preview, many, arguments)


@experiment_app.command()
def rename(
    experiment: options.ExperimentId,
    name: Annotated[str, typer.Argument(help="The new name.", metavar="NAME")],
) -> None:
    """Give an experiment another name."""
    with connect() as client:
        found = client.get_experiment(experiment).edit(name=name)
    _show_changed(found, f"is named {found.name}")


@experiment_app.command()
def note(
    experiment: options.ExperimentId,
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
    console.print_answer(found.data, told)


def _show_changed(experiment: "Experiment", told: str) -> None:
    console.print_answer(experiment.data, f"Experiment {experiment.id} {told}.")
