"""Command `paceline run`: a script, an experiment's config or a run of config objects, here."""

import ast
import os
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from paceline._base.progress_regions import SWITCH_VARIABLE
from paceline._base.run_directory import RunDirectory
from paceline.cli._options_and_errors import report_error

if TYPE_CHECKING:
    from paceline.config._experiment_config import ExperimentConfig

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
    from paceline.cli._runs_commands import find_run

    if "://" in run:
        return run
    path = find_run(Path(run)).absolute()
    RunDirectory.open(path).read_info()
    return str(path)


def _run_experiment(file: Path, workers: str | None, resume: str | None, changes: list[str]) -> int:
    from paceline.cli._local_trial import run_locally
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
    from paceline.cli._local_trial import local_run_name
    from paceline.core._read_runs import RUNS_DIRECTORY
    from paceline.core._run_directories import run_to_resume

    found = run_to_resume(Path.cwd() / RUNS_DIRECTORY, local_run_name(config), "auto")
    return None if found is None else found.path
