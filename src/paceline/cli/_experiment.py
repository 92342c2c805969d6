"""`paceline experiment`: create experiments, watch them, and act on them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli._checkpoint import list_checkpoints
from paceline.cli._errors import CommandError
from paceline.cli._options import (
    ConfigFile,
    ExperimentId,
    Follow,
    Json,
    Limit,
    Overrides,
    Tail,
    Timestamps,
)

if TYPE_CHECKING:
    from paceline.client import Client, Experiment
    from paceline.config import ExperimentConfig
    from paceline.messages.resources import Experiment as ExperimentData

app = typer.Typer(no_args_is_help=True, help="Create experiments, watch them, and act on them.")

AllLogs = Annotated[
    bool, typer.Option("--logs", help="With -f, every line that a search's trials print.")
]


@app.command()
def create(
    config: ConfigFile,
    directory: Annotated[
        Path | None, typer.Argument(help="The directory with the code.", metavar="DIR")
    ] = None,
    follow: Follow = False,
    overrides: Overrides = [],  # noqa: B006
    paused: Annotated[bool, typer.Option("--paused", help="Create it, but do not start.")] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Run the first trial here, without a master.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="With --local: go on in this run directory.")
    ] = None,
    start_master: Annotated[
        bool, typer.Option("--start-master", help="Start a master if none runs.")
    ] = False,
    logs: AllLogs = False,
    json: Json = False,
) -> None:
    """Create an experiment from a config and the code in DIR."""
    from paceline.config import load_config

    checked = load_config(config, overrides)
    for warning in checked.warnings:
        typer.secho(f"Warning: {warning}", fg="yellow", err=True)
    if resume is not None and not local:
        raise CommandError("`--resume` must come with `--local`. Hint: add it.")
    if local:
        from paceline.cli._local import run_locally

        raise typer.Exit(run_locally(checked, directory or Path(), resume))
    if start_master:
        _start_master()
    _submit(checked, config.read_text(encoding="utf-8"), directory, follow, paused, logs, json)


def _start_master() -> None:
    from paceline.cli._master_process import running_master, start_detached
    from paceline.client import home_directory

    home = home_directory()
    if running_master(home) is None:
        file = start_detached(home, [])
        typer.echo(f"Started the master at {file.url}; `paceline down` stops it.", err=True)


def _submit(
    config: "ExperimentConfig",
    submitted: str,
    directory: Path | None,
    follow: bool,
    paused: bool,
    logs: bool,
    json: bool,
) -> None:
    from paceline.cli._connection import connect
    from paceline.cli._output import print_json

    with connect() as client:
        experiment = client.create_experiment(
            config, directory, not paused, submitted_config=submitted
        )
        for warning in experiment.data.warnings:
            if warning not in config.warnings:
                typer.secho(f"Warning: {warning}", fg="yellow", err=True)
        if json:
            print_json(experiment.data)
        else:
            typer.echo(f"Created experiment {experiment.id} ({experiment.name}).")
        if follow:
            _follow(experiment, client, logs)


def _follow(experiment: "Experiment", client: "Client", all_logs: bool) -> None:
    from paceline.cli._follow import follow_experiment

    raise typer.Exit(follow_experiment(experiment, client, all_logs=all_logs))


@app.command("list")
def list_experiments(
    limit: Limit = 20,
    state: Annotated[
        str | None, typer.Option("--state", help="Only this state: ACTIVE, COMPLETED, ...")
    ] = None,
    json: Json = False,
) -> None:
    """List experiments, the newest first."""
    from paceline.cli._connection import connect
    from paceline.cli._output import format_age, print_json, print_table, state_text

    with connect() as client:
        found = [e.data for e in client.list_experiments(state=state, limit=limit)]
    if json:
        print_json(found)
        return
    print_table(
        ["ID", "Name", "State", "Done", "Trials", "Best metric", "Created"],
        [
            (
                e.id,
                e.name,
                state_text(e.state.value),
                f"{e.progress:.0%}",
                e.num_trials,
                e.best_metric,
                format_age(e.created_at),
            )
            for e in found
        ],
        right=["ID", "Done", "Trials", "Best metric"],
        empty="No experiments. Create one with `paceline e create CONFIG DIR`.",
    )


@app.command()
def describe(
    experiment: ExperimentId,
    json: Json = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Also print the resolved config.")
    ] = False,
) -> None:
    """Show an experiment, its best trial and its rungs."""
    from paceline.cli._connection import connect
    from paceline.cli._output import console, print_json

    with connect() as client:
        found = client.get_experiment(experiment)
        if json:
            print_json(found.data)
            return
        _print_facts(found.data)
        _print_rungs(found)
    if show_config:
        import yaml

        console().print(yaml.safe_dump(found.config, sort_keys=False).rstrip())


def _print_facts(data: "ExperimentData") -> None:
    from paceline.cli._output import (
        format_duration,
        format_moment,
        format_number,
        print_facts,
        state_text,
    )

    best = None
    if data.best_trial_id is not None:
        best = f"{format_number(data.best_metric)} (trial {data.best_trial_id})"
    direction = "smaller" if data.smaller_is_better else "larger"
    took = None if data.ended_at is None else format_duration(data.ended_at - data.created_at)
    print_facts(
        [
            ("Experiment", f"{data.id} ({data.name})"),
            ("Description", data.description or None),
            ("Labels", ", ".join(data.labels) or None),
            ("State", state_text(data.state.value)),
            ("Error", data.error),
            ("Progress", f"{data.progress:.0%}"),
            ("Search", f"{data.searcher} on {data.metric} ({direction} is better)"),
            ("Trials", f"{data.num_trials}, {data.num_running} running"),
            ("Best", best),
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
            stopped = sum(entry.decision == "stopped" for entry in rung.entries)
            rows.append((number, rung.length, len(rung.entries), stopped))
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
    json: Json = False,
) -> None:
    """Print what the trials' processes printed; with -f, everything until the end."""
    from paceline.cli._connection import connect
    from paceline.cli._logs import print_log_lines

    if follow and json:
        raise CommandError("`--json` must come without `-f`. Hint: `paceline t logs ID -f --json`.")
    with connect() as client:
        found = client.get_experiment(experiment)
        if follow:
            _follow(found, client, all_logs)
        is_single = found.data.num_trials <= 1
        lines = found.iter_logs(tail=tail)
        print_log_lines(lines, json=json, timestamps=timestamps, show_trial=not is_single)


def _command(experiment: int, verb: Literal["pause", "activate", "cancel", "kill"]) -> None:
    from paceline.cli._connection import connect

    with connect() as client:
        state = getattr(client.get_experiment(experiment), verb)().state.value
    typer.echo(f"Experiment {experiment} is {state}.")


@app.command()
def pause(experiment: ExperimentId) -> None:
    """Let running trials store a checkpoint and leave; `activate` goes on."""
    _command(experiment, "pause")


@app.command()
def activate(experiment: ExperimentId) -> None:
    """Go on with a paused experiment."""
    _command(experiment, "activate")


@app.command()
def cancel(experiment: ExperimentId) -> None:
    """Let running trials store a checkpoint, and end the experiment."""
    _command(experiment, "cancel")


@app.command()
def kill(experiment: ExperimentId) -> None:
    """End an experiment at once, without checkpoints."""
    _command(experiment, "kill")


@app.command()
def wait(
    experiment: ExperimentId,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Wait until an experiment has ended; the exit code is 0 if it is COMPLETED, else 1."""
    from paceline.cli._connection import connect

    with connect() as client:
        try:
            state = client.get_experiment(experiment).wait(interval).value
        except ValueError as error:
            raise CommandError(str(error)) from error
    typer.echo(f"Experiment {experiment} is {state}.")
    raise typer.Exit(0 if state == "COMPLETED" else 1)


@app.command("continue")
def continue_experiment(
    experiment: ExperimentId,
    follow: Follow = False,
    overrides: Overrides = [],  # noqa: B006
    logs: AllLogs = False,
) -> None:
    """Reopen an ended experiment; its unfinished trials go on from their checkpoints."""
    from paceline.cli._connection import connect
    from paceline.cli._overrides import nested_overrides

    with connect() as client:
        found = client.get_experiment(experiment).continue_(nested_overrides(overrides))
        typer.echo(f"Experiment {experiment} is {found.state.value}.")
        if follow:
            _follow(found, client, logs)


@app.command("list-trials")
def list_trials(
    experiment: ExperimentId,
    limit: Limit = 200,
    best: Annotated[bool, typer.Option("--best", help="The best metric first.")] = False,
    json: Json = False,
) -> None:
    """List an experiment's trials."""
    from paceline.cli._connection import connect
    from paceline.cli._output import format_values, print_json, print_table, state_text

    with connect() as client:
        found = client.get_experiment(experiment).trials(
            sort_by="metric" if best else "id", limit=limit
        )
    if json:
        print_json([trial.data for trial in found])
        return
    print_table(
        ["Trial", "State", "Batches", "Best metric", "Hyperparameters"],
        [
            (
                t.id,
                state_text(t.state.value),
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
