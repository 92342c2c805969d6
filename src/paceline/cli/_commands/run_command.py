"""Command `paceline run`, and the first trial of an experiment here: `e create --local`."""

import ast
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn
from uuid import uuid4

import typer

from paceline._base.process_and_network import exit_code
from paceline._base.progress_display import shortest_path
from paceline._base.progress_regions import SWITCH_VARIABLE
from paceline._base.run_directory import RUN_DIRECTORY_VARIABLE, RunDirectory, RunInfo, TrialInfo
from paceline.cli import _console_output as console
from paceline.cli._errors import CommandError, report_error

if TYPE_CHECKING:
    from paceline.config._experiment_config import ExperimentConfig
    from paceline.search._search_messages import Create


_WRONG_USAGE = 2
_WORKERS = re.compile(r"[1-9]\d*(:[1-9]\d*)?|auto|cpu|gpu")
_RESUME_VARIABLE = "PACELINE_RESUME"
# Fields that only one of the two kinds of files has.
_EXPERIMENT_FIELD, _RUN_FIELDS = "entrypoint", ("model_class", "config_class")

Kind = Literal["script", "experiment", "run"]


def run(
    program: Annotated[
        list[str],
        typer.Argument(
            help="Python script with its arguments, or a YAML file: the config of an experiment,"
            " whose first trial runs, or a run of config objects. After `--`, all arguments go to"
            " the script.",
            metavar="SCRIPT|FILE.yaml [ARGS]...",
        ),
    ],
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            "-n",
            metavar="N",
            help="Number of workers: N, LEAST:MOST, or auto, gpu or cpu. By default the script runs"
            " in one process.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|RUN_DIR",
            help="Resume the newest run of this script that has not completed, or this run: its"
            " directory, `last`, or the start or end of its name in ./paceline_runs.",
        ),
    ] = None,
    changes: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Set a field of the file. Repeatable."),
    ] = [],  # noqa: B006
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Start the workers again N times after one of them has failed."
        ),
    ] = 0,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Show progress also where it is off: in CI, or with PACELINE_PROGRESS=0.",
        ),
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print errors of this command as JSON. The output of the script stays."
        ),
    ] = False,
) -> None:
    """Run a script or a file here, without a master.

    The exit code is that of the script, or 2 if it cannot be started.
    """
    del json  # read by the command's class
    file, arguments = Path(program[0]), program[1:]
    if workers is not None and not _WORKERS.fullmatch(workers):
        _refuse(
            f"`--workers` must be a number from 1 on, LEAST:MOST, or auto, gpu or cpu, but got"
            f" {workers!r}."
        )
    kind = _checked_kind(file)
    _check_options(kind, arguments, changes, max_restarts)
    environment = dict(os.environ)
    if resume is not None and kind != "experiment":
        environment[_RESUME_VARIABLE] = resume if resume == "auto" else _path_to_resume(resume)
    if watch:
        # The experiment's trial starts with the environment of this process.
        environment[SWITCH_VARIABLE] = os.environ[SWITCH_VARIABLE] = "1"
    if kind == "experiment":
        raise typer.Exit(_run_experiment(file, workers, resume, changes))
    target = [str(file), *arguments]
    if kind == "run":
        target = ["-m", "paceline.declarative", str(file), *changes]
    command = [sys.executable, *target]
    if workers is not None or max_restarts:
        options = ["--nproc-per-node", workers or "1", "--max-restarts", str(max_restarts)]
        launcher = ["-m", "paceline.launch.torch_distributed"]
        command = [sys.executable, *launcher, *options, "--", *target]
    sys.stdout.flush()
    sys.stderr.flush()
    # This process becomes the script, so that signals, terminal and exit code are its own.
    os.execve(sys.executable, command, environment)  # noqa: S606 - no shell


def _refuse(message: str) -> NoReturn:
    report_error(message)
    raise typer.Exit(_WRONG_USAGE)


def _checked_kind(file: Path) -> Kind:
    """Return what a file is, once checked that it can be started."""
    if not file.is_file():
        what = "is a directory" if file.is_dir() else f"is not there in {os.getcwd()!r}"
        hint = "" if file.is_dir() else " Hint: `paceline init` makes a project to start from."
        _refuse(f"`SCRIPT` must be a file, but {str(file)!r} {what}.{hint}")
    if file.suffix in (".yaml", ".yml"):
        return _kind_of_yaml(file)
    try:
        with warnings.catch_warnings():
            # The script itself shows them when it runs.
            warnings.simplefilter("ignore")
            ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        place = str(file) if error.lineno is None else f"{file}:{error.lineno}"
        line = f": {error.text.strip()}" if error.text else ""
        _refuse(f"`SCRIPT` must be valid Python, but {place} is not ({error.msg}){line}")
    except (OSError, ValueError) as error:
        _refuse(f"`SCRIPT` must be a Python script, but {str(file)!r} is none ({error}).")
    return "script"


def _kind_of_yaml(file: Path) -> Kind:
    from paceline.config._fields_and_problems import ConfigError
    from paceline.config._read_yaml import read_yaml_file

    try:
        fields = read_yaml_file(file)
    except ConfigError as error:
        _refuse(str(error))
    if _EXPERIMENT_FIELD in fields:
        return "experiment"
    if any(name in fields for name in _RUN_FIELDS):
        return "run"
    names = ", ".join(map(repr, list(fields)[:5]))
    _refuse(
        f"`FILE` must be the config of an experiment, with the field `{_EXPERIMENT_FIELD}`, or a"
        f" run of config objects, with the field `{_RUN_FIELDS[0]}`, but {str(file)!r} has neither."
        f" Its fields: {names}."
    )


def _check_options(kind: Kind, arguments: list[str], changes: list[str], restarts: int) -> None:
    if kind == "script" and changes:
        key, _, value = changes[0].partition("=")
        _refuse(
            "`--set` must come with a YAML file: a script has no fields. Hint: if the script takes"
            f" it, write `-- --{key} {value}`."
        )
    if kind != "script" and arguments:
        _refuse(
            f"A YAML file must come without arguments, but got {arguments[0]!r}. Hint: `--set"
            " KEY=VALUE` sets a field."
        )
    if kind == "experiment" and restarts:
        _refuse(
            "`--max-restarts` must come without an experiment's config, which runs once here. Hint:"
            " `paceline e create` runs it on a master, with `max_restarts` of the config."
        )


def _path_to_resume(run: str) -> str:
    from paceline.cli._commands.runs_commands import find_run

    if "://" in run:
        return run
    path = find_run(Path(run)).absolute()
    RunDirectory.open(path).read_info()
    return str(path)


def _run_experiment(file: Path, workers: str | None, resume: str | None, changes: list[str]) -> int:
    from paceline.config._fields_and_problems import ConfigError
    from paceline.config._validate_config import load_config

    slots: list[str] = []
    if workers is not None:
        if not workers.isdecimal():
            _refuse(f"`--workers` must be a number for an experiment, but got {workers!r}.")
        slots = [f"resources.slots_per_trial={workers}"]
    try:
        config = load_config(file, [*changes, *slots])
    except ConfigError as error:
        raise ConfigError(
            replace(problem, path=problem.path.replace("--config", "--set"))
            for problem in error.problems
        ) from None
    directory = Path() if config.environment.working_dir else file.parent
    path: Any = None
    if resume is not None:
        path = _newest_of(config) if resume == "auto" else Path(_path_to_resume(resume))
    options = [word for change in changes for word in ("--set", change)]
    options += [] if workers is None else ["-n", workers]
    command = ["paceline", "run", str(file), *options]
    return run_locally(config, directory, command, resume=path)


def _newest_of(config: "ExperimentConfig") -> Path | None:
    from paceline.core._read_runs import RUNS_DIRECTORY
    from paceline.core._run_opening import run_to_resume

    found = run_to_resume(Path.cwd() / RUNS_DIRECTORY, local_run_name(config), "auto")
    return None if found is None else found.path


# A script without a master has no use for one, and no business with its secret.
_PRIVATE_VARIABLES = ("PACELINE_TOKEN", "PACELINE_MASTER", "PACELINE_HOME", "PACELINE_RESUME")
# Read by every trainer, see `engine/training/_fit_defaults.py`; importing that loads torch.
_TEST_MODE_VARIABLE = "PACELINE_TEST_MODE"
_SHELLS = ("sh", "dash", "bash", "ash", "busybox", "ksh", "zsh")
_NOT_EXECUTABLE, _NOT_FOUND, _SIGNALLED = 126, 127, 128


def run_locally(
    config: "ExperimentConfig",
    directory: Path,
    command: Sequence[str],
    *,
    resume: Path | None = None,
    is_test: bool = False,
) -> int:
    """Run the entrypoint with the hyperparameters of the search's first trial.

    Args:
        config: The experiment's configuration.
        directory: Where the entrypoint runs.
        command: The user's command without `--resume`, to be shown.
        resume: The run directory of an earlier local run to resume.
        is_test: Whether trainers use their test mode.

    Returns:
        The entrypoint's exit code.
    """
    run = _create_run(config) if resume is None else _open_run(resume)
    info = run.read_info()
    assert info.trial is not None

    typer.echo(f"Run directory: {run.path}", err=True)
    if info.trial.hparams:
        typer.echo(f"Hyperparameters: {console.format_values(info.trial.hparams)}", err=True)
    environment = _trial_environment(config, run)
    if config.environment.uv:
        environment = _sync_local_run(directory, environment)
    if is_test:
        typer.echo("Test mode: one training batch, one validation batch, a checkpoint.", err=True)
        environment[_TEST_MODE_VARIABLE] = "1"
    code = _run_entrypoint(config, info, directory, environment)
    _print_end(run, code, _without_secrets(command, config))
    return code


def _create_run(config: "ExperimentConfig") -> RunDirectory:
    from paceline.config._environment_and_secrets import hide_secrets
    from paceline.core._run_opening import new_run_storage

    seed = config.reproducibility.experiment_seed
    trial = _first_trial(config, secrets.randbelow(2**31) if seed is None else seed)
    root = Path.cwd() / "paceline_runs"
    name = local_run_name(config)
    path = _unused_for_local(root / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    storage = config.checkpoint_storage.root if config.checkpoint_storage else None
    info = RunInfo(
        run_id=uuid4().hex,
        name=name,
        created=time.time(),
        trial=TrialInfo(
            trial_id=0,
            experiment_id=0,
            trial_seed=trial.trial_seed,
            hparams=trial.hparams,
            config=hide_secrets(config.to_json()),
        ),
        checkpoint_storage=storage or new_run_storage(path).url,
        slot_ids=list(range(config.resources.fewest_slots)),
        arguments=_without_secrets(sys.argv, config),
    )
    return RunDirectory.create(path, info)


def _without_secrets(words: Sequence[str], config: "ExperimentConfig") -> list[str]:
    """Return the words of a command without the secrets of its config."""
    from paceline.config._environment_and_secrets import hide_values, is_secret

    variables = config.environment.variables
    private = [value for name, value in variables.items() if is_secret(name, value)]
    private += config.environment.secrets.values()
    return [hide_values(word, private) for word in words]


def local_run_name(config: "ExperimentConfig") -> str:
    """Return the name of an experiment's local runs."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", config.name).strip("-.") or "run"


def _open_run(path: Path) -> RunDirectory:
    run = RunDirectory.open(path.absolute())
    if run.read_info().trial is None:
        raise CommandError(
            f"`--resume` must name a run that `--local` started, but {str(path)!r} is none."
            f" Hint: start its script with PACELINE_RESUME={path}."
        )
    return run


def _unused_for_local(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _first_trial(config: "ExperimentConfig", seed: int) -> "Create":
    """Return the first trial of the search; always the same trial for a given seed."""
    from paceline.search._search import Search
    from paceline.search._search_messages import Create, Started

    search = Search(config.search_config(), config.hyperparameters, seed)
    created = [op for op in search.apply(Started()) if isinstance(op, Create)]
    return created[0]


def _trial_environment(config: "ExperimentConfig", run: RunDirectory) -> dict[str, str]:
    python = shutil.which(config.environment.python or sys.executable)
    if python is None and not config.environment.prefix:
        raise CommandError(
            "`environment.python` must be an interpreter, but"
            f" {config.environment.python!r} is none."
        )
    environment = {k: v for k, v in os.environ.items() if k not in _PRIVATE_VARIABLES}
    if python is not None:
        path = environment.get("PATH", os.defpath)
        environment["PATH"] = os.pathsep.join([str(Path(python).parent), path])
    environment["PYTHONUNBUFFERED"] = "1"
    if config.environment.uv and config.environment.python is not None:
        environment["UV_PYTHON"] = config.environment.python
    environment |= config.environment.variables | config.environment.secrets
    environment[RUN_DIRECTORY_VARIABLE] = str(run.path)
    return environment


def _sync_local_run(directory: Path, environment: dict[str, str]) -> dict[str, str]:
    from paceline._cluster.runner.attempt_preparation import UnusableConfigError, sync_environment

    try:
        return sync_environment(
            directory.absolute(), environment, lambda line: typer.echo(line, err=True)
        )
    except UnusableConfigError as error:
        raise CommandError(str(error)) from error


def _run_entrypoint(
    config: "ExperimentConfig", info: RunInfo, directory: Path, environment: dict[str, str]
) -> int:
    from paceline.config._entrypoint_command import build_command

    assert info.trial is not None
    entrypoint = build_command(
        config.entrypoint,
        hparams=info.trial.hparams,
        python=(
            "python3" if config.environment.uv else config.environment.python or sys.executable
        ),
        num_slots=len(info.slot_ids),
        prefix=config.environment.prefix,
    )
    command = ["sh", "-c", entrypoint] if isinstance(entrypoint, str) else entrypoint
    place = Path(config.environment.working_dir or directory)
    try:
        process = subprocess.Popen(command, cwd=place, env=environment)
    except PermissionError:
        return _refuse_local(f"The entrypoint {command[0]!r} must be executable.", _NOT_EXECUTABLE)
    except FileNotFoundError:
        if not place.is_dir():
            raise CommandError(f"`DIR` must be a directory, but got {str(place)!r}.") from None
        return _refuse_local(f"The entrypoint {command[0]!r} must exist.", _NOT_FOUND)
    with signals_passed_to(process):
        code = exit_code(process)
    return code if code >= 0 else _SIGNALLED - code


def _refuse_local(message: str, code: int) -> int:

    report_error(message)
    return code


@contextmanager
def signals_passed_to(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Pass signals to the script, the judge of their meaning; Ctrl-C comes from the terminal."""
    passed = (signal.SIGTERM, signal.SIGUSR1)
    old = {number: signal.getsignal(number) for number in (*passed, signal.SIGINT)}
    # The terminal sends Ctrl-C to the script as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in passed:
        signal.signal(number, lambda received, _: _pass_signal_on(process.pid, received))
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _pass_signal_on(pid: int, signal_number: int) -> None:
    """Send a signal to the command; to the children of a shell, since a shell alone would die."""
    import psutil

    try:
        process = psutil.Process(pid)
        if process.name() in _SHELLS:
            for child in process.children():
                _pass_signal_on(child.pid, signal_number)
        else:
            process.send_signal(signal_number)
    except psutil.NoSuchProcess:
        return


def _print_end(run: RunDirectory, code: int, command: Sequence[str]) -> None:
    """Print how a run has ended, how to look at it, and how to go on with it."""
    from paceline.cli._commands.runs_commands import run_state_name
    from paceline.core._read_runs import RunState, summarize_run

    summary = summarize_run(run.path)
    state = run_state_name(summary)
    if state == "no_reports":
        typer.echo(f"The script ended with exit code {code} and reported nothing.", err=True)
        return
    typer.echo(f"The run is {state} (exit code {code}).", err=True)
    path = shortest_path(str(run.path))
    typer.echo(f"look: paceline runs show {shlex.quote(path)}", err=True)
    if summary.num_attempts and summary.state in (RunState.CRASHED, RunState.PREEMPTED):
        line = f"resume: {shlex.join([*command, '--resume', path])}"
        if not summary.latest_checkpoint:
            line = "no checkpoint: the next start begins anew"
        typer.echo(line, err=True)
