"""Commands `paceline export`, runs and trials as Parquet and JSON, and `import`."""

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from paceline._base import journal_records as records
from paceline._base.run_directory import JournalKey, RunDirectory, RunInfo, TrialInfo
from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._commands.runs_commands import find_run
from paceline.cli._completions import complete_run
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError

if TYPE_CHECKING:
    from paceline.client._experiment_and_trial import Experiment, Trial
    from paceline.importers._export_files import ExportedRun, Numbered
    from paceline.importers._run_writer import ImportedRun


def export_runs(
    what: Annotated[
        list[str],
        typer.Argument(
            help="Run directories, or names of runs in ./paceline_runs; directories of runs;"
            " numbers of experiments of the master.",
            metavar="RUN|EXPERIMENT",
            autocompletion=complete_run,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="New or empty directory.")
    ],
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Also copy the checkpoints, and their weights alone."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Write runs as Parquet and JSON, for other programs and for `paceline import`.

    Each run has its metrics as a table with one row for each value, its configuration,
    hyperparameters, environment and checkpoints as JSON, and its files.
    """
    from paceline.importers._export_files import finish_export, write_run

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CommandError(f"`--output` must be new or empty, but {str(output)!r} is not.")
    output.mkdir(parents=True, exist_ok=True)
    runs, num_values, not_exported = [], 0, []
    try:
        for run, copies in _found(what):
            num_values += write_run(output, run)
            runs.append(run.name)
            for stored, copy in copies if checkpoints else ():
                not_exported += _copy_checkpoint(output / run.name, stored, copy)
    except ImportError as error:
        raise CommandError(str(error)) from error
    finish_export(output)
    for text in not_exported:
        typer.echo(text, err=True)
    console.print_answer(
        {"path": str(output), "runs": runs, "num_values": num_values},
        f"Wrote {len(runs)} runs with {num_values:,} values into {output}.",
    )


Copies = Iterable[tuple[Any, Any]]
"""Checkpoints, each with a function that copies its files into a new directory."""


def _found(what: list[str]) -> Iterator[tuple["ExportedRun", Copies]]:
    for text in what:
        path = Path(text)
        if text.isdecimal() and not path.exists():
            with connect() as client:
                yield from _of_experiment(client.get_experiment(int(text)))
        elif path.is_dir() and not (path / "run.json").exists():
            paths = sorted(inner for inner in path.iterdir() if (inner / "run.json").exists())
            if not paths:
                raise CommandError(f"`RUN` must be or hold run directories, but {text!r} does not.")
            yield from map(_of_directory, paths)
        else:
            yield _of_directory(find_run(path))


def _of_directory(path: Path) -> tuple["ExportedRun", Copies]:

    from paceline.core._read_runs import read_history, storage_at, summarize_run
    from paceline.importers._export_files import ExportedRun

    directory = RunDirectory(path)
    summary, info, history = summarize_run(path), directory.read_info(), read_history(directory)
    firsts = (directory.reader(key).read(1) for key in directory.journal_keys())
    starts = [entry.decode() for entries in firsts for entry in entries]
    facts = {
        "state": summary.state.value,
        "error": summary.error,
        "config": info.trial.config if info.trial is not None else None,
        "hparams": info.trial.hparams if info.trial is not None else info.hparams,
        "metadata": history.metadata,
        "environment": next(
            (one.environment for one in starts if isinstance(one, records.AttemptStarted)), None
        ),
        "checkpoints": [msgspec.to_builtins(stored) for stored in history.checkpoints],
    }
    run = ExportedRun(
        name=path.resolve().name,
        info=info,
        records=_records_of(directory),
        facts=facts,
        files=path / "files",
    )
    return run, (
        (stored, partial(storage_at(path).download, stored.uuid)) for stored in history.checkpoints
    )


def _records_of(directory: Any) -> Iterator["Numbered"]:
    for key in directory.journal_keys():
        for entry in directory.reader(key):
            yield key, entry.sequence, entry.decode()


def _of_experiment(experiment: "Experiment") -> Iterator[tuple["ExportedRun", Copies]]:
    from paceline.importers._export_files import ExportedRun

    for trial in experiment.trials():
        trial.reload()
        stored = [one for one in trial.checkpoints() if one.state.value == "COMPLETED"]
        source = f"{experiment.data.created_at!r}/{experiment.id}/{trial.id}"
        info = RunInfo(
            run_id=hashlib.sha256(source.encode()).hexdigest()[:32],
            name=f"{experiment.name[:180]}-trial-{trial.id}".replace("/", "-"),
            created=trial.data.created_at,
            checkpoint_storage=stored[-1].data.storage if stored else "",
            seed=trial.data.seed,
            hparams=trial.hparams,
            trial=TrialInfo(
                trial_id=trial.id,
                experiment_id=experiment.id,
                trial_seed=trial.data.seed,
                hparams=trial.hparams,
                config=experiment.config,
            ),
        )
        facts = {
            "state": trial.state.value,
            "error": trial.data.error,
            "config": experiment.config,
            "hparams": trial.hparams,
            "metadata": trial.data.metadata,
            "environment": [one.model_dump(mode="json") for one in trial.environments()],
            "checkpoints": [one.data.model_dump(mode="json") for one in stored],
        }
        run = ExportedRun(
            name=f"experiment-{experiment.id}-trial-{trial.id}",
            info=info,
            records=_records_of_trial(trial, stored),
            facts=facts,
        )
        yield run, ((one, one.download) for one in stored)


def _records_of_trial(trial: "Trial", stored: list[Any]) -> Iterator["Numbered"]:
    """Yield records that say what the master knows of a trial, as one attempt."""
    from paceline.importers._run_writer import started

    data = trial.data
    found: list[Any] = [
        records.MetricsReported(
            time=row.time,
            group=row.group,
            steps_completed=row.steps_completed,
            metrics=records.encode_metrics(row.metrics),
        )
        for row in trial.iter_metrics()
    ]
    found += [
        records.CheckpointStored(
            time=one.data.created_at,
            uuid=one.uuid,
            steps_completed=one.steps_completed,
            metadata=one.metadata,
            resources=one.data.resources,
            storage=one.data.storage,
        )
        for one in stored
    ]
    found.sort(key=lambda record: record.time)
    ended = data.ended_at or data.created_at
    if data.metadata is not None:
        found.append(records.RunMetadataSet(time=ended, metadata=data.metadata))
    if data.state.is_terminal:
        outcome = {"COMPLETED": "completed", "CANCELED": "preempted"}.get(data.state.value, "error")
        found.append(records.AttemptFinished(time=ended, outcome=outcome, error=data.error))
    for number, record in enumerate([started(data.created_at), *found]):
        yield JournalKey(0, 0, 0), number, record


def _copy_checkpoint(place: Path, stored: Any, copy: Any) -> list[str]:
    """Copy a checkpoint, and write its weights alone if it has any; return what did not work."""

    from paceline.pytorch import export_weights
    from paceline.storage._checkpoint_errors import CheckpointCorruptError, CheckpointNotFoundError
    from paceline.storage._directory_storage import DirectoryStorage

    own, weights = DirectoryStorage(place / "checkpoints"), place / "weights"
    with TemporaryDirectory(dir=place) as temporary:
        files = Path(temporary) / "checkpoint"
        try:
            copy(files)
            own.copy_in(stored.uuid, files)
            own.commit(stored.uuid, stored.metadata)
        except (CheckpointNotFoundError, CheckpointCorruptError, OSError) as error:
            return [f"Checkpoint {stored.uuid} was not copied: {error}"]
        # Checkpoints of scripts with files of their own have no weights that are known.
        if (files / "training.json").exists():
            weights.mkdir(exist_ok=True)
            try:
                export_weights(files, weights / f"{stored.uuid}.safetensors")
            except (ValueError, OSError) as error:
                return [f"The weights of checkpoint {stored.uuid} were not written: {error}"]
    return []


_NOT_ALL = 1
_NUM_SHOWN = 20


def import_store(
    source: Annotated[
        Path,
        typer.Argument(
            help="Store of another tracker, such as `mlruns`, `mlflow.db` or a TensorBoard log"
            " directory; or what `paceline export` wrote.",
            metavar="SOURCE",
        ),
    ],
    kind: Annotated[
        Literal["export", "mlflow", "tensorboard", "trackio"] | None,
        typer.Option("--kind", help="Kind of the store. By default it is found by looking."),
    ] = None,
    into: Annotated[
        Path, typer.Option("--into", metavar="DIR", help="Directory of runs to write into.")
    ] = Path("paceline_runs"),
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Import runs that another tracker has logged.

    Metrics, hyperparameters, tags, media and artifacts become run directories. If you import a
    store again, only its new data is added. The exit code is 1 if something could not be read.
    """
    from paceline.importers._export_files import RunImport
    from paceline.importers._run_writer import ImportRefusedError

    runs: list[ImportedRun] = []
    try:
        work = RunImport(source, kind=kind, into=into, dry_run=dry_run)
        for run in work:
            runs.append(run)
            if not json and run.state != "unchanged":
                console.print_note(f"{run.path.name}: {run.state}, {run.num_points:,} values")
    except (ImportRefusedError, ImportError, OSError) as error:
        raise CommandError(str(error)) from error
    problems = [*work.problems, *(f"{r.path.name}: {text}" for r in runs for text in r.problems)]
    if json:
        console.print_json(
            {
                "kind": work.kind,
                "into": str(into),
                "runs": [_run_as_json(run) for run in runs],
                "problems": work.problems,
            }
        )
    else:
        console.print_note(_summary(runs, into, dry_run=dry_run))
        for problem in problems[:_NUM_SHOWN]:
            typer.echo(f"Not imported: {problem}", err=True)
        if len(problems) > _NUM_SHOWN:
            more = len(problems) - _NUM_SHOWN
            typer.echo(f"{more} more could not be read: `--json` lists all.", err=True)
    if problems:
        raise typer.Exit(_NOT_ALL)


def _summary(runs: "list[ImportedRun]", into: Path, *, dry_run: bool) -> str:
    counts = dict.fromkeys(("new", "grown", "unchanged"), 0)
    for run in runs:
        counts[run.state] += 1
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
    num_points = sum(run.num_points for run in runs)
    would = "would be " if dry_run else ""
    return f"Runs: {told}. {num_points:,} values {would}added to {into}."


def _run_as_json(run: "ImportedRun") -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state,
        "num_points": run.num_points,
        "num_files": run.num_files,
        "problems": list(run.problems),
    }
