"""`paceline experiment`: create, watch and change experiments."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli._archive_commands import archive, delete, unarchive
from paceline.cli._checkpoint_commands import list_checkpoints
from paceline.cli._create_command import create
from paceline.cli._errors import CommandError
from paceline.cli._fork_commands import download, fork
from paceline.cli._options import (
    AllLogs,
    ExperimentId,
    Follow,
    Json,
    JsonLines,
    Limit,
    Overrides,
    Tail,
    Timestamps,
)
from paceline.cli._queue_commands import set_priority, set_weight

if TYPE_CHECKING:
    from paceline.client import Client, Experiment, Trial
    from paceline.messages.resources import Experiment as ExperimentData

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Create, watch and change experiments.",
)

StateWord = Literal["QUEUED", "RUNNING", "PAUSED", "STOPPING", "COMPLETED", "CANCELED", "ERROR"]

app.command()(create)
for _other_command in (archive, unarchive, delete, fork, download, set_priority, set_weight):
    app.command()(_other_command)


@app.command("list")
def list_experiments(
    limit: Limit = 20,
    state: Annotated[
        StateWord | None,
        typer.Option("--state", case_sensitive=False, help="Show only this state."),
    ] = None,
    archived: Annotated[
        bool, typer.Option("--archived", help="Show archived experiments instead.")
    ] = False,
    json: Json = False,
) -> None:
    """List experiments, newest first."""
    from paceline.cli._connection import connect
    from paceline.cli._output import format_age, print_json, print_table, state_text
    from paceline.cli._state_words import experiment_word, progress_text

    with connect() as client:
        found = _listed(client, state, limit, "only" if archived else "no")
    if json:
        print_json(found)
        return
    print_table(
        ["ID", "Name", "State", "Done", "Trials", "Best metric", "Created"],
        [
            (
                e.id,
                e.name,
                state_text(experiment_word(e)),
                progress_text(e),
                e.num_trials,
                e.best_metric,
                format_age(e.created_at),
            )
            for e in found
        ],
        right=["ID", "Done", "Trials", "Best metric"],
        shortened=["Name"],
        empty=_nothing_listed(state),
    )


def _listed(
    client: "Client", word: str | None, limit: int, archived: Literal["no", "only"]
) -> "list[ExperimentData]":
    """Return the newest experiments in the state of this word; several stored ones may be one."""
    from paceline.cli._state_words import EXPERIMENT_WORDS, experiment_word

    if word is None:
        return [e.data for e in client.list_experiments(limit=limit, archived=archived)]
    found = [
        e.data
        for stored in EXPERIMENT_WORDS[word]
        for e in client.list_experiments(state=stored, archived=archived)
        if experiment_word(e.data) == word
    ]
    return sorted(found, key=lambda data: -data.id)[:limit]


def _nothing_listed(word: str | None) -> str:
    if word is not None:
        return f"No experiment is {word}."
    return "No experiments. Create one with `paceline e create CONFIG`."


@app.command()
def describe(
    experiment: ExperimentId,
    json: Json = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Also print the resolved config.")
    ] = False,
) -> None:
    """Show an experiment with its best trial and its rungs."""
    from paceline.cli._connection import connect
    from paceline.cli._output import console, print_json

    with connect() as client:
        found = client.get_experiment(experiment)
        if json:
            print_json(found.data)
            return
        best, waits = _best_trial(client, found.data), _waits_for(client, found.data)
        _print_facts(found.data, best, waits, _note_of_end(found))
        _print_rungs(found)
    if show_config:
        import yaml

        console().print(yaml.safe_dump(found.config, sort_keys=False).rstrip())


def _note_of_end(experiment: "Experiment") -> str | None:
    """Return why an experiment that has completed has no best trial; None if it has one."""
    from paceline.cli._leaderboard_table import why_no_best

    data = experiment.data
    if data.is_unmanaged or data.best_metric is not None or data.num_records_lost:
        return None  # What was lost may have told of one.
    if data.state.value != "COMPLETED":
        return None
    return why_no_best(experiment) if data.num_trials else None


def _best_trial(client: "Client", data: "ExperimentData") -> "Trial | None":
    return None if data.best_trial_id is None else client.get_trial(data.best_trial_id)


def _waits_for(client: "Client", data: "ExperimentData") -> str | None:
    """Return what an experiment waits for to start, and who has it; None if it does not wait."""
    from paceline.cli._state_words import experiment_word

    if experiment_word(data) != "QUEUED" or data.is_unmanaged:
        return None
    slots = client.slots()
    if any(slot.experiment_id == data.id for slot in slots):
        return "starting"
    given = data.config.get("resources", {}).get("slots_per_trial", 1)
    wanted = int(given["min"] if isinstance(given, dict) else given)
    free = sum(slot.experiment_id is None for slot in slots)
    holders = sorted({slot.experiment_id for slot in slots if slot.experiment_id is not None})
    text = f"waiting for {wanted} slot{'s' * (wanted > 1)}; {free} of {len(slots)} free"
    if holders:
        text += f", held by experiment{'s' * (len(holders) > 1)} "
        text += ", ".join(map(str, holders))
    return text


def _print_facts(
    data: "ExperimentData", best_trial: "Trial | None", waits: str | None, note: str | None
) -> None:
    from paceline.cli._output import (
        format_duration,
        format_moment,
        format_number,
        format_values,
        print_facts,
        state_text,
    )
    from paceline.cli._state_words import experiment_word, lost_text, progress_text

    best, hparams, lost = note, None, None
    if data.num_records_lost:
        lost = f"{lost_text(data.num_records_lost)}; the trials' logs say which"
    if best_trial is not None:
        best = f"{format_number(data.best_metric)} (trial {best_trial.id})"
        hparams = format_values(best_trial.hparams) or None
    direction = "smaller" if data.smaller_is_better else "larger"
    search = f"{data.searcher} on {data.metric} ({direction} is better)"
    took = None if data.ended_at is None else format_duration(data.ended_at - data.created_at)
    print_facts(
        [
            ("Experiment", f"{data.id} ({data.name})"),
            ("Description", data.description or None),
            ("Labels", ", ".join(data.labels) or None),
            ("State", state_text(experiment_word(data))),
            ("Waits", waits),
            ("Error", data.error),
            ("Warning", "\n".join(data.warnings) or None),
            ("Lost", lost),
            ("Progress", progress_text(data)),
            ("Made", data.run_dir and f"without a master, in {data.run_dir}"),
            # Such a run tells of no search.
            ("Search", None if data.is_unmanaged else search),
            ("Trials", f"{data.num_trials}, {data.num_running} running"),
            ("Best", best),
            ("With", hparams),
            ("Continues", data.parent_trial_id and f"trial {data.parent_trial_id}"),
            ("Created", format_moment(data.created_at)),
            ("Took", took),
        ]
    )


def _print_rungs(experiment: "Experiment") -> None:
    from paceline.cli._output import console, print_table

    rows = []
    for number, bracket in enumerate(experiment.search().brackets, start=1):
        for rung in bracket:
            counts = rung.counts
            rows.append((number, rung.length, sum(counts.values()), counts.get("stopped", 0)))
    if rows:
        console().print()
        titles = ["Bracket", "Rung", "Reached", "Stopped"]
        print_table(titles, rows, right=titles)


@app.command()
def logs(
    experiment: ExperimentId,
    follow: Follow = False,
    tail: Tail = None,
    timestamps: Timestamps = False,
    all_logs: AllLogs = False,
    json: JsonLines = False,
) -> None:
    """Print the output of the trials.

    With -f the command follows the experiment to its end and prints its events. The exit code is
    then 0 if the experiment is COMPLETED, 3 if it is COMPLETED with lost records, else 1.
    """
    from paceline.cli._connection import connect
    from paceline.cli._log_printing import print_log_lines, tell_damaged_lines
    from paceline.cli._state_words import exit_code

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
        tell_damaged_lines(found.num_damaged_lines)
    if follow:
        raise typer.Exit(exit_code(found.data))


def _follow(experiment: "Experiment", client: "Client", **options: Any) -> None:
    from paceline.cli._follow_experiment import Follower, FollowOptions

    raise typer.Exit(Follower(experiment, client, FollowOptions(**options)).follow())


def _command(experiment: int, verb: Literal["pause", "activate", "cancel", "kill"]) -> None:
    from paceline.cli._connection import connect

    with connect() as client:
        data = getattr(client.get_experiment(experiment), verb)().data
    typer.echo(_how_it_stands(data))


def _how_it_stands(data: "ExperimentData") -> str:
    """Return the state in a sentence, with what its running trials may still do."""
    from paceline.cli._state_words import experiment_word, num_trials_text

    text = f"Experiment {data.id} is {experiment_word(data)}"
    if not data.num_running or not (data.state.value == "PAUSED" or data.state.is_stopping):
        return f"{text}."
    is_one = data.num_running == 1
    text += f"; {num_trials_text(data.num_running)} {'is' if is_one else 'are'} still running"
    if data.state.value in ("STOPPING_KILLED", "STOPPING_ERROR"):
        return f"{text} and will be ended."
    seconds = float(data.config.get("preemption_timeout", 600.0))
    return f"{text} and {'gets' if is_one else 'get'} up to {seconds:g} s to store a checkpoint."


@app.command()
def pause(experiment: ExperimentId) -> None:
    """Pause an experiment. Its trials store checkpoints and end."""
    _command(experiment, "pause")


@app.command()
def activate(experiment: ExperimentId) -> None:
    """Continue a paused experiment."""
    _command(experiment, "activate")


@app.command()
def cancel(experiment: ExperimentId) -> None:
    """Cancel an experiment. Its trials store checkpoints and end."""
    _command(experiment, "cancel")


@app.command()
def kill(experiment: ExperimentId) -> None:
    """Kill an experiment at once, without checkpoints."""
    _command(experiment, "kill")


@app.command()
def wait(
    experiment: ExperimentId,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two requests.")] = 1.0,
) -> None:
    """Wait for the end of an experiment.

    The exit code is 0 if it is COMPLETED, 3 if it is COMPLETED with lost records, else 1.
    """
    from paceline.cli._connection import connect
    from paceline.cli._state_words import exit_code, lost_text

    with connect() as client:
        found = client.get_experiment(experiment)
        try:
            state = found.wait(interval).value
        except ValueError as error:
            raise CommandError(str(error)) from error
        note = _note_of_end(found)
    lost = found.data.num_records_lost
    more = f"; {lost_text(lost)}" if lost else ""
    typer.echo(f"Experiment {experiment} is {state}{more}.")
    if note:
        typer.echo(note)
    raise typer.Exit(exit_code(found.data))


@app.command("continue")
def continue_experiment(
    experiment: ExperimentId,
    follow: Follow = False,
    overrides: Overrides = [],  # noqa: B006
    logs: AllLogs = False,
) -> None:
    """Reopen an ended experiment.

    Its trials continue from their checkpoints. In a search, only incomplete trials continue.
    """
    from paceline.cli._config_overrides import nested_overrides
    from paceline.cli._connection import connect

    with connect() as client:
        found, changes = client.get_experiment(experiment), nested_overrides(overrides)
        follower = None
        if follow:
            from paceline.cli._follow_experiment import Follower, FollowOptions

            # It begins before the command, so that it sees all that the command leads to.
            follower = Follower(found, client, FollowOptions(all_logs=logs, is_from_now=True))
        typer.echo(_how_it_stands(found.continue_(changes).data))
        if follower is not None:
            raise typer.Exit(follower.follow())


@app.command("list-trials")
def list_trials(
    experiment: ExperimentId,
    limit: Limit = 200,
    best: Annotated[bool, typer.Option("--best", help="Sort by metric, best first.")] = False,
    json: Json = False,
) -> None:
    """List the trials of an experiment (short: lt)."""
    from paceline.cli._connection import connect
    from paceline.cli._output import format_values, print_json, print_table, state_text
    from paceline.cli._state_words import word_of

    with connect() as client:
        of = client.get_experiment(experiment)
        found = of.trials(sort_by="metric" if best else "id", limit=limit)
    if json:
        print_json([trial.data for trial in found])
        return
    print_table(
        ["Trial", "State", "Batches", "Best metric", "Hyperparameters"],
        [
            (
                t.id,
                state_text(word_of(t.data, of.data.state)),
                t.steps_completed,
                t.best_metric,
                format_values(t.hparams),
            )
            for t in found
        ],
        right=["Trial", "Batches", "Best metric"],
        empty="No trials yet.",
    )


app.command("lt", hidden=True)(list_trials)
app.command("list-checkpoints")(list_checkpoints)
app.command("lc", hidden=True)(list_checkpoints)
