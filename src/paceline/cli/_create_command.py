"""`paceline experiment create`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli._command_options import AllLogs, ConfigFile, Follow, Json, Overrides
from paceline.cli._errors import CommandError

if TYPE_CHECKING:
    from paceline.client import Client, Experiment
    from paceline.config import ExperimentConfig

_DEFAULT_PORT = 8080


def create(
    config: ConfigFile,
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Directory of the code. The default is the directory of the config. If the config"
            " sets `environment.working_dir`, no code is sent by default.",
            metavar="DIR",
        ),
    ] = None,
    follow: Follow = False,
    overrides: Overrides = [],  # noqa: B006
    paused: Annotated[
        bool, typer.Option("--paused", help="Create it, but do not start it.")
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Run the first trial here, without a master.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="RUN_DIR", help="With --local: resume this run directory."
        ),
    ] = None,
    test: Annotated[
        bool,
        typer.Option(
            "--test",
            help="With --local: train one batch, validate one batch, store a checkpoint and end.",
        ),
    ] = False,
    start_master: Annotated[
        bool, typer.Option("--start-master", help="Start a master if none runs.")
    ] = False,
    logs: AllLogs = False,
    json: Json = False,
) -> None:
    """Create an experiment from a config and code."""
    from paceline.cli._console_output import print_warning
    from paceline.config import load_config

    checked = load_config(config, overrides)
    for warning in checked.warnings:
        print_warning(warning)
    _check_local_options(is_local=local, is_test=test, is_resumed=resume is not None)
    if directory is None and checked.environment.working_dir is None:
        directory = config.parent
    if local:
        from paceline.cli._local_trial import run_locally

        _refuse_with_local({"--paused": paused, "--json": json, "--start-master": start_master})
        place = directory or Path()
        raise typer.Exit(run_locally(checked, place, resume=resume, is_test=test))
    from paceline.cli._connection import connect

    with connect() as client:
        with _master_to_submit_to(start_master):
            submitted = config.read_text(encoding="utf-8")
            experiment = _submit_experiment(client, checked, submitted, directory, paused, json)
        if follow:
            from paceline.cli._experiment_follower import ExperimentFollower, FollowOptions

            options = FollowOptions(all_logs=logs, is_json=json)
            raise typer.Exit(ExperimentFollower(experiment, client, options).follow())


def _check_local_options(*, is_local: bool, is_test: bool, is_resumed: bool) -> None:
    for option, is_given in (("--resume", is_resumed), ("--test", is_test)):
        if is_given and not is_local:
            raise CommandError(f"`{option}` must come with `--local`. Hint: add it.")
    if is_test and is_resumed:
        raise CommandError(
            "`--test` must come without `--resume`: a test trains one batch from the start. Hint:"
            " leave one of them out."
        )


def _refuse_with_local(given: dict[str, bool]) -> None:
    for option, is_given in given.items():
        if is_given:
            raise CommandError(
                f"`{option}` must come without `--local`, which runs the script here, at once and"
                " without a master. Hint: leave one of them out."
            )


def _submit_experiment(
    client: "Client",
    config: "ExperimentConfig",
    submitted: str,
    directory: Path | None,
    paused: bool,
    json: bool,
) -> "Experiment":
    from paceline.cli._console_output import print_json, print_warning

    experiment = client.create_experiment(config, directory, not paused, submitted_config=submitted)
    for warning in experiment.data.warnings:
        if warning not in config.warnings:
            print_warning(warning)
    typer.echo(_what_was_sent(directory), err=True)
    if json:
        print_json(experiment.data)
    else:
        typer.echo(f"Created experiment {experiment.id} ({experiment.name}).")
    return experiment


def _what_was_sent(directory: Path | None) -> str:
    from paceline.cli._console_output import format_bytes
    from paceline.client import list_context

    if directory is None:
        return "Sent no files: the entrypoint runs in `environment.working_dir`."
    entries = list_context(directory)
    num_files = sum(not entry.is_directory for entry in entries)
    size = format_bytes(sum(entry.size for entry in entries))
    return f"Sent {num_files} file{'s' * (num_files != 1)} ({size}) from {directory}"


@contextmanager
def _master_to_submit_to(start: bool) -> Iterator[None]:
    """Start a master if asked and none runs; it ends again if what it was started for fails."""
    from paceline.client import home_directory

    home = home_directory()
    if not start:
        yield
        return
    from paceline.cli._master_process import is_port_free, running_master, shut_down, start_detached

    if running_master(home) is not None:
        yield
        return
    is_free = is_port_free(_DEFAULT_PORT)
    file = start_detached(home, [] if is_free else ["--port", "0"])
    why = "" if is_free else f" (port {_DEFAULT_PORT} is taken)"
    typer.echo(f"Started the master at {file.shown_url}{why}; `paceline down` stops it.", err=True)
    try:
        yield
    except BaseException:
        shut_down(file, home, keep_trials=False, timeout_s=0.0)
        typer.echo("Stopped the master again.", err=True)
        raise
