"""Commands `paceline experiment`: create, watch, change, archive, delete, fork and download."""

import time
from collections.abc import Callable
from datetime import datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline._base.arguments_and_errors import seconds_of
from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._command_groups import CommandGroup
from paceline.cli._commands.bulk_commands import (
    activate,
    archive,
    cancel,
    delete,
    how_it_stands,
    kill,
    move,
    pause,
    unarchive,
)
from paceline.cli._commands.checkpoint_commands import list_checkpoints
from paceline.cli._commands.create_command import create
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError
from paceline.cli._experiment_description import (
    created_text,
    describe,
    end_note,
    experiment_result,
    newest_before,
    print_created,
    print_trials,
    result_fields,
)

if TYPE_CHECKING:
    from paceline._cluster.messages.experiment_models import Experiment as ExperimentData
    from paceline.client._client import Client
    from paceline.client._experiment_and_trial import Experiment


def _change(experiment: int, text: str, change: "Callable[[Experiment], Experiment]") -> None:
    """Change an experiment and print the changed experiment, or a text for people."""

    with connect() as client:
        console.print_answer(change(client.get_experiment(experiment)).data, text)


def fork(
    experiment: options.ExperimentId,
    directory: options.ChangedCode = None,
    overrides: options.Overrides = [],  # noqa: B006
    paused: Annotated[
        bool, typer.Option("--paused", help="Create it, but do not start it.")
    ] = False,
    follow: options.Follow = False,
    logs: options.AllLogs = False,
    key: options.RequestKey = None,
    dry_run: options.DryRun = False,
) -> None:
    """Create a copy of an experiment.

    The copy has the same code and config, with your changes. With DIR it has the code there;
    `paceline e diff` shows the changes.
    """

    with connect() as client:
        found, changes = client.get_experiment(experiment), options.nested_overrides(overrides)
        if dry_run:
            config = found.forked_config(changes)
            text = f"Dry run: the config of {config['name']} is valid. Nothing was created."
            console.print_answer({"config": config}, text)
            return
        before = newest_before(client, key)
        made = found.fork(changes, activate=not paused, key=key, code=directory)
        text = f"{created_text(made, before)} from experiment {experiment}."
        print_created(made, client, text, is_followed=follow, all_logs=logs)


def download(
    experiment: options.ExperimentId,
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="New or empty directory. The default is ./experiment-ID.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Copy the code and config of an experiment into a directory."""

    target = Path(f"experiment-{experiment}") if directory is None else directory
    with connect() as client:
        num_files = client.get_experiment(experiment).download_code(target)
    console.print_answer(
        {"path": str(target), "num_files": num_files},
        f"Wrote config.yaml and {num_files} file{'s' * (num_files != 1)} into {target}.",
    )


experiment_app = CommandGroup(
    help="Create, watch and change experiments.",
)

# As of the command `timeout`.
_NOT_ENDED = 124
StateWord = Literal["QUEUED", "RUNNING", "PAUSED", "STOPPING", "COMPLETED", "CANCELED", "ERROR"]

for _creating_command in (create, fork):
    experiment_app.command(has_fields=result_fields)(_creating_command)
experiment_app.command(has_fields=True)(describe)
for _other_command in (archive, unarchive, delete, move, download):
    experiment_app.command()(_other_command)


@experiment_app.command()
def set_max_slots(
    experiment: options.ExperimentId,
    max_slots: Annotated[
        str, typer.Argument(metavar="NUMBER", help="Number of slots, or none for no limit.")
    ],
) -> None:
    """Set how many slots the trials of an experiment may use at once. Running trials continue."""
    if max_slots != "none" and not (max_slots.isdecimal() and int(max_slots) > 0):
        raise CommandError(f"`NUMBER` must be a number above 0, or none, but got {max_slots!r}.")
    number = None if max_slots == "none" else int(max_slots)
    slots = "as many slots as there are" if number is None else f"{number} slot{'s' * (number > 1)}"
    text = f"Experiment {experiment} may use {slots} at a time."
    _change(experiment, text, lambda found: found.set_max_slots(number))


@experiment_app.command()
def set_priority(
    experiment: options.ExperimentId,
    priority: Annotated[
        int,
        typer.Argument(
            min=1, max=99, metavar="PRIORITY", help="1 is the most important one, 99 the least."
        ),
    ],
) -> None:
    """Set an experiment's priority in pools with the policy `priority`."""
    text = f"Experiment {experiment} has priority {priority}."
    _change(experiment, text, lambda found: found.set_priority(priority))


@experiment_app.command()
def set_weight(
    experiment: options.ExperimentId,
    weight: Annotated[
        float, typer.Argument(metavar="WEIGHT", help="A number above 0; the default is 1.")
    ],
) -> None:
    """Set an experiment's weight in pools with the policy `fair_share`."""
    if not 0 < weight < inf:
        raise CommandError(f"`WEIGHT` must be a number above 0, but got {weight:g}.")
    text = f"Experiment {experiment} has weight {weight:g}."
    _change(experiment, text, lambda found: found.set_weight(weight))


@experiment_app.command("list", is_list=True)
def list_experiments(
    limit: options.Limit = 20,
    state: Annotated[
        StateWord | None,
        typer.Option("--state", case_sensitive=False, help="Show only this state."),
    ] = None,
    archived: Annotated[
        bool, typer.Option("--archived", help="Show archived experiments instead.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Show only names that contain this text.")
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="LABEL", help="Show only with this label. Repeatable."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Show only those created since then: an age such as 2d, 12h or 30m, or a date such"
            " as 2026-11-30 or 2026-11-30T09:00.",
        ),
    ] = None,
    owner: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show only those of this user.")
    ] = None,
    project: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show only those in this project.")
    ] = None,
    kind: Annotated[
        Literal["training", "notebook", "shell", "tensorboard"] | None,
        typer.Option("--kind", help="Show only this kind."),
    ] = None,
    everyone: Annotated[
        bool, typer.Option("--everyone", help="Show those of all users whose projects you see.")
    ] = False,
    query: options.QueryText = None,
) -> None:
    """List experiments, newest first. One fits a query if one of its trials does.

    Among several users it lists yours, unless --everyone, --owner, --project or --query asks
    for others too.
    """

    with connect() as client:
        session = None if everyone or owner or project or query else client.session()
        if session is not None and session.is_shared and session.owner is not None:
            owner = session.owner
        where: list[tuple[str, str, Any]] = [] if name is None else [("name", "contains", name)]
        where += [] if since is None else [("created_at", ">=", _moment(since))]
        where += [] if kind is None else [("kind", "=", kind)]
        filters = {"labels": labels or (), "where": where, "owner": owner, "project": project}
        filters["query"] = query
        found = _listed(client, state, limit, "only" if archived else "no", filters)
    console.print_list(
        found,
        ["ID", "Name", "State", "Progress", "Trials", "Best metric", "Created", "Kind", "Owner"],
        [
            (
                e.id,
                e.name,
                console.state_text(console.experiment_word(e)),
                console.progress_text(e),
                e.num_trials,
                e.best_metric,
                console.Age(e.created_at),
                e.kind,
                e.owner,
            )
            for e in found
        ],
        right=["ID", "Progress", "Trials", "Best metric"],
        shortened=["Name"],
        spare=["Kind"] if session is None else ["Owner", "Kind"],
        empty=_nothing_listed(state, is_filtered=bool(where or any(filters.values()))),
    )
    if session is not None and session.is_shared:
        console.print_hint("only yours are listed; --everyone lists those of all users.")


def _listed(
    client: "Client",
    word: str | None,
    limit: int,
    archived: Literal["no", "only"],
    filters: dict[str, Any],
) -> "list[ExperimentData]":
    """Return the newest experiments shown with this state word, across all its stored states."""

    if word is None:
        return [e.data for e in client.list_experiments(limit=limit, archived=archived, **filters)]
    found = [
        e.data
        for stored in console.EXPERIMENT_WORDS[word]
        for e in client.list_experiments(state=stored, archived=archived, **filters)
        if console.experiment_word(e.data) == word
    ]
    return sorted(found, key=lambda data: -data.id)[:limit]


def _moment(text: str) -> float:
    """Return an age such as `2d`, or a date or time in the local zone, as seconds since the epoch.

    Raises:
        CommandError: The text is neither.
    """
    if (age_s := seconds_of(text, may_be_zero=True)) is not None:
        return time.time() - age_s
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise CommandError(
            "`--since` must be an age such as 2d, 12h or 30m, or a date such as 2026-11-30, but got"
            f" {text!r}."
        ) from None


def _nothing_listed(word: str | None, *, is_filtered: bool) -> str:
    if is_filtered:
        return "No experiment fits."
    if word is not None:
        return f"No experiment is {word}."
    return "No experiments. Create one with `paceline e create CONFIG`."


@experiment_app.command()
def logs(
    experiment: options.ExperimentId,
    follow: options.Follow = False,
    tail: options.Tail = None,
    timestamps: options.Timestamps = False,
    all_logs: options.AllLogs = False,
    json: options.JsonLines = False,
) -> None:
    """Print the output of the trials.

    With -f the command follows the experiment to its end and prints its events. The exit code is
    then 0 if the experiment is COMPLETED, 3 if it is COMPLETED with lost records, else 1.
    """
    from paceline.cli._experiment_follower import print_damaged_log_lines, print_log_lines

    if follow and json:
        raise CommandError("`--json` must come without `-f`. Hint: `paceline t logs ID -f --json`.")
    with connect() as client:
        found = client.get_experiment(experiment)
        if follow and not found.state.is_terminal:
            _follow(
                found,
                client,
                all_logs=all_logs,
                timestamps=timestamps,
                is_from_now=tail is not None,
                tail=tail,
            )
        is_single = found.data.num_trials <= 1
        lines = found.iter_logs(tail=tail)
        print_log_lines(lines, json=json, timestamps=timestamps, show_trial=not is_single)
        print_damaged_log_lines(found.num_damaged_lines)
    if follow:
        raise typer.Exit(console.exit_code(found.data))


def _follow(experiment: "Experiment", client: "Client", **choices: Any) -> None:
    from paceline.cli._experiment_follower import ExperimentFollower, FollowOptions

    raise typer.Exit(ExperimentFollower(experiment, client, FollowOptions(**choices)).follow())


for _state_command in (pause, activate, cancel, kill):
    experiment_app.command()(_state_command)


@experiment_app.command(has_fields=result_fields)
def wait(
    experiment: options.ExperimentId,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two requests.")] = 1.0,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Wait no longer. The default is no limit."),
    ] = None,
) -> None:
    """Wait for the end of an experiment."""

    with connect() as client:
        found = client.get_experiment(experiment)
        try:
            found.wait(interval, timeout)
            code = console.exit_code(found.data)
        except ValueError as error:
            raise CommandError(str(error)) from error
        except TimeoutError:
            code = _NOT_ENDED
        lost = found.data.num_records_lost
        more = f"; {console.lost_records_text(lost)}" if lost else ""
        text = f"Experiment {experiment} is {found.state.value}{more}."
        why = found.data.end_reason
        notes = [text, why and f"It ended as {why}."]
        notes.append(None if code == _NOT_ENDED else end_note(found))
        console.print_answer(experiment_result(client, found), "\n".join(filter(None, notes)))
    if (hint := _after_wait(found, code)) is not None:
        console.print_agent_hint(hint)
    raise typer.Exit(code)


def _after_wait(experiment: "Experiment", code: int) -> str | None:
    id_ = experiment.id
    if code == _NOT_ENDED:
        return f"It goes on: `paceline e wait {id_} --timeout 600 --json` waits again."
    if code == 0:
        return f"`paceline e list-trials {id_} --best --limit 5 --json` shows the best."
    # Who has canceled it is known, and its logs do not tell.
    is_failed = experiment.state.value == "ERROR"
    return f"`paceline e logs {id_} --tail 50` shows why." if is_failed else None


@experiment_app.command("continue", has_fields=result_fields)
def continue_experiment(
    experiment: options.ExperimentId,
    follow: options.Follow = False,
    overrides: options.Overrides = [],  # noqa: B006
    logs: options.AllLogs = False,
    key: options.RequestKey = None,
    max_trials: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Go on with the search until it has had N trials in all."
        ),
    ] = None,
    limits: options.Limits = [],  # noqa: B006
) -> None:
    """Reopen an ended experiment.

    Its trials continue from their checkpoints. In a search, only incomplete trials continue; with
    `--max-trials` or `--limit`, it goes on with more trials.
    """

    with connect() as client:
        found, changes = client.get_experiment(experiment), options.nested_overrides(overrides)
        new_limits = options.nested_overrides(limits) | (
            {"max_trials": max_trials} if max_trials else {}
        )
        follower = None
        if follow:
            from paceline.cli._experiment_follower import ExperimentFollower, FollowOptions

            # Follower before the command: no event caused by the command is missed.
            follower = ExperimentFollower(
                found, client, FollowOptions(all_logs=logs, is_from_now=True)
            )
        reopened = found.continue_(changes, limits=new_limits or None, key=key)
        text = how_it_stands(reopened.data)
        if follower is None:
            console.print_answer(experiment_result(client, found), text)
        else:
            console.print_note(text)
            raise typer.Exit(follower.follow())


@experiment_app.command("list-trials", is_list=True)
def list_trials(
    experiment: options.ExperimentId,
    limit: options.Limit = 200,
    best: Annotated[bool, typer.Option("--best", help="Sort by metric, best first.")] = False,
) -> None:
    """List the trials of an experiment (short: lt)."""

    with connect() as client:
        of = client.get_experiment(experiment)
        found = of.trials(sort_by="metric" if best else "id", limit=limit)
    print_trials([trial.data for trial in found], "No trials yet.")


experiment_app.command("lt", hidden=True, is_list=True)(list_trials)
experiment_app.command("list-checkpoints", is_list=True)(list_checkpoints)
experiment_app.command("lc", hidden=True, is_list=True)(list_checkpoints)
