"""Command `paceline import`: what other trackers have logged, as runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli._console_output import print_json, print_note
from paceline.cli._options_and_errors import CommandError, DryRun, Json

if TYPE_CHECKING:
    from paceline.importers._run_writer import ImportedRun

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
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Import runs that another tracker has logged.

    Metrics, hyperparameters, tags, media and artifacts become run directories. If you import a
    store again, only its new data is added. The exit code is 1 if something could not be read.
    """
    from paceline.importers._import_runs import RunImport
    from paceline.importers._run_writer import ImportRefusedError

    runs: list[ImportedRun] = []
    try:
        work = RunImport(source, kind=kind, into=into, dry_run=dry_run)
        for run in work:
            runs.append(run)
            if not json and run.state != "unchanged":
                print_note(f"{run.path.name}: {run.state}, {run.num_points:,} values")
    except (ImportRefusedError, ImportError, OSError) as error:
        raise CommandError(str(error)) from error
    problems = [*work.problems, *(f"{r.path.name}: {text}" for r in runs for text in r.problems)]
    if json:
        print_json(
            {
                "kind": work.kind,
                "into": str(into),
                "runs": [_run_as_json(run) for run in runs],
                "problems": work.problems,
            }
        )
    else:
        print_note(_summary(runs, into, dry_run=dry_run))
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
