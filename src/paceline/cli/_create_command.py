"""Commands `paceline experiment create` and `preview-search`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._console_output import (
    console,
    format_bytes,
    num_trials_text,
    print_answer,
    print_json,
    print_table,
    print_warning,
)
from paceline.cli._experiment_description import created_text, newest_before, print_created
from paceline.cli._options_and_errors import (
    AllLogs,
    CommandError,
    ConfigFile,
    DryRun,
    Follow,
    Json,
    Overrides,
    RequestKey,
    connect,
)

if TYPE_CHECKING:
    from paceline.client._experiment_and_trial import Experiment
    from paceline.config._experiment_config import ExperimentConfig
    from paceline.search._preview_and_simulation import Preview


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
    key: RequestKey = None,
    project: Annotated[
        str | None, typer.Option(metavar="NAME", help="Project. Default: your first one.")
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Create an experiment from a config and code."""
    from paceline.config._validate_config import load_config

    checked = load_config(config, overrides)
    for warning in checked.warnings:
        print_warning(warning)
    _check_local_options(is_local=local, is_test=test, is_resumed=resume is not None)
    if directory is None and checked.environment.working_dir is None:
        directory = config.parent
    if dry_run:
        _print_dry_run(checked, directory)
        return
    if local:
        from paceline.cli._local_trial import run_locally

        given = {"--paused": paused, "--json": json, "--start-master": start_master, "--key": key,
                 "--project": project}  # fmt: skip
        _refuse_with_local(given)
        place = directory or Path()
        words = [str(config), str(place), "--local", *(["--test"] if test else [])]
        words += [word for override in overrides for word in ("--config", override)]
        command = ["paceline", "e", "create", *words]
        raise typer.Exit(run_locally(checked, place, command, resume=resume, is_test=test))

    with connect() as client:
        with _master_to_submit_to(start_master):
            submitted = config.read_text(encoding="utf-8")
            before = newest_before(client, key)
            send = partial(client.create_experiment, key=key, project=project)
            experiment = _submit_experiment(send, checked, submitted, directory, paused)
        text = f"{created_text(experiment, before)}."
        print_created(experiment, client, text, is_followed=follow, all_logs=logs)


def _check_local_options(*, is_local: bool, is_test: bool, is_resumed: bool) -> None:
    for option, is_given in (("--resume", is_resumed), ("--test", is_test)):
        if is_given and not is_local:
            raise CommandError(f"`{option}` must come with `--local`. Hint: add it.")
    if is_test and is_resumed:
        raise CommandError(
            "`--test` must come without `--resume`: a test trains one batch from the start. Hint:"
            " leave one of them out."
        )


def _refuse_with_local(given: Mapping[str, object]) -> None:
    for option, is_given in given.items():
        if is_given:
            raise CommandError(
                f"`{option}` must come without `--local`, which runs the script here, at once and"
                " without a master. Hint: leave one of them out."
            )


def _submit_experiment(
    send: "Callable[..., Experiment]",
    config: "ExperimentConfig",
    submitted: str,
    directory: Path | None,
    paused: bool,
) -> "Experiment":

    experiment = send(config, directory, not paused, submitted_config=submitted)
    for warning in experiment.data.warnings:
        if warning not in config.warnings:
            print_warning(warning)
    if directory is None:
        typer.echo("Sent no files: the entrypoint runs in `environment.working_dir`.", err=True)
    else:
        typer.echo(f"Sent {_files_text(*_code_size(directory))} from {directory}", err=True)
    return experiment


def _code_size(directory: Path | None) -> tuple[int, int]:
    """Return the number of files to send, and their bytes."""
    from paceline.client._code_and_run_uploads import list_context

    entries = [] if directory is None else list_context(directory)
    files = [entry.size for entry in entries if not entry.is_directory]
    return len(files), sum(files)


def _files_text(num_files: int, num_bytes: int) -> str:

    return f"{num_files} file{'s' * (num_files != 1)} ({format_bytes(num_bytes)})"


def _print_dry_run(config: "ExperimentConfig", directory: Path | None) -> None:
    """Print the experiment that `create` would make, and the size of its code."""
    from paceline.search._preview_and_simulation import preview

    num_files, num_bytes = _code_size(directory)
    rows = preview(config.search_config(), config.hyperparameters).rows
    num_trials = sum(row.trials for row in rows)
    facts = {"num_trials": num_trials, "num_files": num_files, "num_bytes": num_bytes}
    print_answer(
        {"config": config.to_json(), **facts},
        f"Dry run: the config is valid. Experiment {config.name} would have"
        f" {num_trials_text(num_trials)} ({config.searcher.name}), and"
        f" {_files_text(num_files, num_bytes)} of code would be sent. Nothing was created.",
    )


@contextmanager
def _master_to_submit_to(start: bool) -> Iterator[None]:
    """Start a master if asked and none runs; shut the new master down if the block fails."""
    from paceline.client._http_session import home_directory

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


def preview_search(config: ConfigFile, overrides: Overrides = [], json: Json = False) -> None:  # noqa: B006
    """Preview the search of a config.

    The command prints the number of trials and their lengths. It needs no master. A real search can
    differ a little, because the order of reports can affect its decisions.
    """
    from paceline.config._validate_config import load_config
    from paceline.search._preview_and_simulation import preview

    checked = load_config(config, overrides)
    result = preview(checked.search_config(), checked.hyperparameters)
    if json:
        print_json(_preview_as_json(checked, result))
    else:
        _print_preview(checked, result)


def _unit(config: "ExperimentConfig") -> str:
    return str(getattr(config.searcher, "time_metric", None) or "units")


def _preview_as_json(config: "ExperimentConfig", result: "Preview") -> dict[str, Any]:
    return {
        "searcher": config.searcher.name,
        "unit": getattr(config.searcher, "time_metric", None),
        "rows": [{"num_trials": row.trials, "length": row.units} for row in result.rows],
        "brackets": [
            {"num_trials": plan.trials, "rungs": list(plan.units)} for plan in result.brackets
        ],
        "varies": _varies(config),
    }


def _varies(config: "ExperimentConfig") -> dict[str, str]:
    """Return what each hyperparameter can be, as the bounds of `log` are exponents."""
    from paceline.search._hyperparameter_space import parse_space

    return {
        each.name: " or ".join(map(str, each.choices))
        if each.choices
        else f"{each.low:g} to {each.high:g}{' on a logarithmic scale' if each.log else ''}"
        for each in parse_space(config.hyperparameters).parameters
    }


def _print_preview(config: "ExperimentConfig", result: "Preview") -> None:

    unit = _unit(config)
    total = sum(row.trials for row in result.rows)
    console().print(f"{config.searcher.name}: {total} {'trial' if total == 1 else 'trials'}")
    for name, values in _varies(config).items():
        console().print(f"{name}: {values}")
    title = "Trained for" if not result.brackets else f"Trained for ({unit})"
    whole = "their whole length"
    if config.searcher.wants_reports and not result.brackets:
        whole = "at most their whole length"
    rows = [(row.trials, row.units or whole) for row in result.rows]
    print_table(["Trials", title], rows, right=["Trials", title])
    if len(result.brackets) > 1:
        console().print()
        brackets = [
            (number, plan.trials, ", ".join(map(str, plan.units)))
            for number, plan in enumerate(result.brackets, start=1)
        ]
        print_table(["Bracket", "Trials", f"Rungs ({unit})"], brackets, right=["Bracket", "Trials"])
    if result.brackets:
        console().print()
        work = sum(row.trials * (row.units or 0) for row in result.rows)
        console().print(f"In total {work} {unit}.")
