"""Commands `paceline init`, `experiment create`, `preview-search` and `simulate-search`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from paceline._base.progress_display import format_duration
from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._commands.rule_commands import check_early, code_directory, resolve_dry_run
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError
from paceline.cli._experiment_description import created_text, newest_before, print_created

if TYPE_CHECKING:
    from paceline.client._experiment_and_trial import Experiment
    from paceline.config._experiment_config import ExperimentConfig
    from paceline.search._preview_and_simulation import Curve, Preview, SlotsResult


_DEFAULT_PORT = 8080


def create(
    config: options.ConfigFile,
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Directory of the code. The default is the directory of the config. If the config"
            " sets `environment.working_dir`, no code is sent by default.",
            metavar="DIR",
        ),
    ] = None,
    follow: options.Follow = False,
    overrides: options.Overrides = [],  # noqa: B006
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
    logs: options.AllLogs = False,
    key: options.RequestKey = None,
    project: Annotated[
        str | None, typer.Option(metavar="NAME", help="Project. Default: your first one.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Template for what the config leaves open."),
    ] = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Create an experiment from a config and code."""
    from paceline.config._validate_config import load_config

    _check_local_options(is_local=local, is_test=test, is_resumed=resume is not None)
    if dry_run:
        checked, filled = resolve_dry_run(config, overrides, project, template)
        _print_dry_run(checked, filled, code_directory(checked, config, directory))
        return
    if local:
        checked = load_config(config, overrides)
        for warning in checked.warnings:
            console.print_warning(warning)
        directory = code_directory(checked, config, directory)
        from paceline.cli._commands.run_command import run_locally

        given = {"--paused": paused, "--json": json, "--start-master": start_master, "--key": key,
                 "--project": project, "--template": template}  # fmt: skip
        _refuse_with_local(given)
        place = directory or Path()
        words = [str(config), str(place), "--local", *(["--test"] if test else [])]
        words += [word for override in overrides for word in ("--config", override)]
        command = ["paceline", "e", "create", *words]
        raise typer.Exit(run_locally(checked, place, command, resume=resume, is_test=test))

    check_early(config, overrides)
    with connect() as client:
        with _master_to_submit_to(start_master):
            checked = client.resolve_config(config, overrides, project=project, template=template)
            for warning in checked.warnings:
                console.print_warning(warning)
            directory = code_directory(checked, config, directory)
            submitted = config.read_text(encoding="utf-8")
            before = newest_before(client, key)
            send = partial(client.create_experiment, key=key, project=project, template=template)
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
            console.print_warning(warning)
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

    return f"{num_files} file{'s' * (num_files != 1)} ({console.format_bytes(num_bytes)})"


def _print_dry_run(
    config: "ExperimentConfig", filled: Mapping[str, str], directory: Path | None
) -> None:
    """Print the experiment that `create` would make, and the size of its code."""
    from paceline.search._preview_and_simulation import preview

    num_files, num_bytes = _code_size(directory)
    rows = preview(config.search_config(), config.hyperparameters).rows
    num_trials = sum(row.trials for row in rows)
    facts = {"num_trials": num_trials, "num_files": num_files, "num_bytes": num_bytes}
    for warning in config.warnings:
        console.print_warning(warning)
    told = "".join(f"\nFrom {whose}: {path}" for path, whose in filled.items())
    console.print_answer(
        {"config": config.to_json(), "filled": dict(filled), **facts},
        f"Dry run: the config is valid. Experiment {config.name} would have"
        f" {console.num_trials_text(num_trials)} ({config.searcher.name}), and"
        f" {_files_text(num_files, num_bytes)} of code would be sent. Nothing was created.{told}",
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


def preview_search(
    config: options.ConfigFile,
    overrides: options.Overrides = [],  # noqa: B006
    json: options.Json = False,
) -> None:
    """Preview the search of a config.

    The command prints the number of trials and their lengths. It needs no master. A real search can
    differ a little, because the order of reports can affect its decisions.
    """
    from paceline.config._validate_config import load_config
    from paceline.search._preview_and_simulation import preview

    checked = load_config(config, overrides)
    result = preview(checked.search_config(), checked.hyperparameters)
    if json:
        console.print_json(_preview_as_json(checked, result))
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
    console.stdout().print(f"{config.searcher.name}: {total} {'trial' if total == 1 else 'trials'}")
    for name, values in _varies(config).items():
        console.stdout().print(f"{name}: {values}")
    title = "Trained for" if not result.brackets else f"Trained for ({unit})"
    whole = "their whole length"
    if config.searcher.wants_reports and not result.brackets:
        whole = "at most their whole length"
    rows = [(row.trials, row.units or whole) for row in result.rows]
    console.print_table(["Trials", title], rows, right=["Trials", title])
    if len(result.brackets) > 1:
        console.stdout().print()
        brackets = [
            (number, plan.trials, ", ".join(map(str, plan.units)))
            for number, plan in enumerate(result.brackets, start=1)
        ]
        console.print_table(
            ["Bracket", "Trials", f"Rungs ({unit})"], brackets, right=["Bracket", "Trials"]
        )
    if result.brackets:
        console.stdout().print()
        work = sum(row.trials * (row.units or 0) for row in result.rows)
        console.stdout().print(f"In total {work} {unit}.")


Door = Literal["core", "trial", "function", "creators", "declarative"]

_IGNORED = "paceline_runs/\n__pycache__/\n"


def init(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Directory of the project: new, or without files. The default is this one.",
            metavar="DIR",
        ),
    ] = Path(),
    door: Annotated[
        Door,
        typer.Option(
            help="core: a loop of your own. trial: a class with model, data and training step."
            " function: your loop on workers. creators: functions that make model, data and"
            " optimizer. declarative: a YAML file."
        ),
    ] = "core",
) -> None:
    """Make a small project that runs as it stands.

    Nothing is overwritten. The directory may have files whose names begin with a dot, such as .git
    and .venv.
    """
    from paceline.cli._app import examples_directory

    _check_free(directory)
    source = examples_directory() / "starters" / door
    # An installer compiles the starters into a directory beside them.
    paths = sorted(path for path in source.iterdir() if path.is_file())
    files = {path.name: path.read_text("utf-8") for path in paths}
    if not (directory / ".gitignore").exists():
        files[".gitignore"] = _IGNORED
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        # A file that came meanwhile is kept.
        with open(directory / name, "x", encoding="utf-8") as file:
            file.write(text)
    main = "run.yaml" if "run.yaml" in files else "train.py"
    enter = "" if directory.resolve() == Path.cwd() else f"cd {directory} && "
    console.print_answer(
        {"directory": str(directory), "door": door, "files": list(files), "main": main},
        f"Made a project in {directory}: {', '.join(files)}.\n"
        f"Start it with: {enter}paceline run {main}",
    )


def _check_free(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise CommandError(f"`DIR` must be a directory, but {str(directory)!r} is a file.")
    taken = sorted(path.name for path in directory.glob("*") if not path.name.startswith("."))
    if taken:
        more = f" and {len(taken) - 3} more" if len(taken) > 3 else ""
        raise CommandError(
            f"`DIR` must be new or without files, but {str(directory)!r} has"
            f" {', '.join(taken[:3])}{more}. Hint: name another directory: `paceline init NAME`."
        )


_MOST_CURVES = 200
_NUM_TIMES = 10
# Units that a trial of a search without any length trains for.
_WHOLE = 100


def simulate_search(
    config: options.ConfigFile,
    overrides: options.Overrides = [],  # noqa: B006
    curves: Annotated[
        str | None,
        typer.Option(
            metavar="ID|FILE",
            help="Number of an experiment whose trials were measured, or a JSON file of curves."
            " The default is imaginary curves, with a second for each unit.",
        ),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, metavar="N", help="Slots of the cluster.")] = 1,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, metavar="K", help="Number of simulated searches.")
    ] = 10,
    json: options.Json = False,
) -> None:
    """Simulate a search: its time, slot hours, trials for each length, and best values.

    Each simulated trial takes the measured curve of the nearest hyperparameters.
    """
    from paceline.config._validate_config import load_config

    checked = load_config(config, overrides)
    each = int(checked.to_json()["resources"].get("slots_per_trial") or 1)
    if each > slots:
        raise CommandError(
            f"`--slots` must be at least the {each} slots of a trial, but got {slots}."
        )
    given = None if curves is None else _read_curves(curves, checked)
    results = [_simulate(checked, seed, given, slots // each) for seed in range(seeds)]
    shown = _as_json(checked, results, each, None if given is None else len(given))
    if json:
        console.print_json(shown)
    else:
        _print(shown, checked)


def _simulate(
    config: "ExperimentConfig", seed: int, curves: "Sequence[Curve] | None", num_at_once: int
) -> "SlotsResult":
    from paceline.search._hyperparameter_space import parse_space
    from paceline.search._preview_and_simulation import (
        imaginary_curves,
        nearest_curves,
        simulate_slots,
    )
    from paceline.search._samplers import asking, make_sampler

    searcher, space = config.searcher, parse_space(config.hyperparameters)
    longest = max((c.points[-1][0] for c in curves or () if c.points), default=_WHOLE)
    # Without a length, a unit of the search is a whole trial.
    unit = longest if searcher.length is None else 1.0
    if curves is None:
        made = imaginary_curves(
            searcher.length or longest, smaller_is_better=searcher.smaller_is_better
        )
    else:
        try:
            made = nearest_curves(space, curves)
        except ValueError as error:
            raise CommandError(str(error)) from error
    spec = searcher.sampler_spec()
    sampler = None if spec.name == "random" else make_sampler(spec.name, spec.options, seed)
    return simulate_slots(
        config.search_config(),
        config.hyperparameters,
        seed,
        made,
        slots=num_at_once,
        unit=unit,
        ask=None if sampler is None else asking(sampler, space, seed),
        is_asking=sampler is not None,
    )


def _read_curves(text: str, config: "ExperimentConfig") -> "list[Curve]":

    from paceline.search._preview_and_simulation import Curve

    if text.isdecimal():
        return _measured_curves(int(text), config)
    try:
        return msgspec.json.decode(Path(text).read_bytes(), type=list[Curve])
    except (OSError, msgspec.MsgspecError) as error:
        raise CommandError(
            f"`--curves` must be the number of an experiment, or a JSON list of curves"
            f" ({{hparams, points: [[time, value]], seconds_per_unit}}), but {text!r} is not:"
            f" {error}"
        ) from error


def _measured_curves(number: int, config: "ExperimentConfig") -> "list[Curve]":
    """Return the validation curves of the trials of an experiment, with their speed."""
    from paceline.search._preview_and_simulation import Curve

    searcher, found = config.searcher, []
    with connect() as client:
        for trial in client.get_experiment(number).trials(limit=_MOST_CURVES):
            points = []
            for row in trial.iter_metrics("validation"):
                metrics = {"batches": row.steps_completed, **row.metrics}
                time, value = metrics.get(searcher.time_name), metrics.get(searcher.metric)
                if isinstance(time, int | float) and isinstance(value, int | float):
                    points.append((float(time), float(value)))
            points.sort()
            spent = trial.time()
            if points and points[-1][0] > 0:
                seconds = (spent.total_s - spent.waiting_s) / points[-1][0]
                found.append(Curve(hparams=trial.hparams, points=points, seconds_per_unit=seconds))
    return found


def _as_json(
    config: "ExperimentConfig", results: "list[SlotsResult]", each: int, num_curves: int | None
) -> dict[str, Any]:
    longest_s = max(result.wall_s for result in results)
    times = [longest_s * part / _NUM_TIMES for part in range(1, _NUM_TIMES + 1)]
    lengths = sorted({length for result in results for length in result.trained})
    trained = [[result.trained.get(length, 0) for result in results] for length in lengths]
    best = [[result.best_at(time) for result in results] for time in times]
    return {
        "searcher": config.searcher.name,
        "unit": config.searcher.length_unit,
        "num_searches": len(results),
        "num_curves": num_curves,
        "wall_s": _spread([result.wall_s for result in results]),
        "slot_hours": _spread([result.slot_s * each / 3600 for result in results]),
        "trials": [
            {"length": None if config.searcher.length is None else length, **_spread(counts)}
            for length, counts in zip(lengths, trained, strict=True)
        ],
        "best": [
            {"time_s": time, **spread}
            for time, values in zip(times, best, strict=True)
            if (spread := _spread(values))
        ],
    }


def _spread(values: "Sequence[float | None]") -> dict[str, float]:
    """Return mean, least and greatest of the known values; empty for none."""
    known = [value for value in values if value is not None and isfinite(value)]
    return {"mean": fmean(known), "min": min(known), "max": max(known)} if known else {}


def _print(shown: dict[str, Any], config: "ExperimentConfig") -> None:
    curves = "imaginary curves" if shown["num_curves"] is None else f"{shown['num_curves']} curves"
    output, wall = console.stdout(), shown["wall_s"]
    output.print(
        f"{shown['searcher']}: {shown['num_searches']} simulated searches on {curves}\n"
        f"Takes {format_duration(wall['mean'])} ({format_duration(wall['min'])} to"
        f" {format_duration(wall['max'])}), {shown['slot_hours']['mean']:.3g} slot hours.\n"
    )
    trained = [(row["length"] or "whole", row) for row in shown["trials"]]
    best = [(format_duration(row["time_s"]), row) for row in shown["best"]]
    for titles, found in (
        ([f"Trained for ({shown['unit'] or 'units'})", "Trials", "From", "To"], trained),
        (["After", f"Best {config.searcher.metric}", "From", "To"], best),
    ):
        rows = [(first, row["mean"], row["min"], row["max"]) for first, row in found]
        console.print_table(titles, rows, right=titles)
        output.print()
