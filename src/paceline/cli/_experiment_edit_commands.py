"""Commands `paceline experiment set`, `label`, `rename` and `note`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._bulk_commands import Archived, ChangedQuery, Many, Yes, change_previewed
from paceline.cli._completions import complete_experiment
from paceline.cli._console_output import print_answer
from paceline.cli._experiment_commands import experiment_app
from paceline.cli._options_and_errors import (
    CommandError,
    DryRun,
    ExperimentId,
    Limits,
    connect,
    nested_overrides,
)

if TYPE_CHECKING:
    from paceline.client._experiment_and_trial import Experiment


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
    limits: Limits = [],  # noqa: B006
) -> None:
    """Set the priority, the weight, the most slots or the limits of the search of an experiment."""
    given = {"priority": priority, "weight": weight, "max_slots": max_slots}
    changes = {name: value for name, value in given.items() if value is not None}
    new_limits = nested_overrides(limits)
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
    dry_run: DryRun = False,
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
