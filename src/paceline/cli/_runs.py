"""`paceline runs`: what scripts did here without a master."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._options import Json

if TYPE_CHECKING:
    from paceline.core import RunSummary
    from paceline.journal import RunDirectory

app = typer.Typer(no_args_is_help=True, help="What scripts did here without a master.")

_STATE_STYLES = {
    "running": "cyan",
    "completed": "green",
    "preempted": "yellow",
    "invalid_hp": "yellow",
    "crashed": "red",
}


@app.command("list")
def list_run_directories(
    directory: Annotated[
        Path, typer.Argument(help="The directory that holds the runs.", metavar="DIR")
    ] = Path("paceline_runs"),
    json: Json = False,
) -> None:
    """List the runs in ./paceline_runs, the newest first."""
    from paceline.cli._output import format_age, print_json, print_table
    from paceline.core import list_runs

    runs = list_runs(directory)[::-1]
    if json:
        print_json([_as_json(run) for run in runs])
        return
    print_table(
        ["Run", "State", "Attempts", "Batches", "Checkpoint", "Started"],
        [
            (
                run.path.name,
                _state_text(run),
                run.num_attempts,
                run.last_step,
                run.latest_checkpoint and run.latest_checkpoint[:8],
                format_age(run.created),
            )
            for run in runs
        ],
        right=["Attempts", "Batches"],
        empty=f"No runs in {directory}.",
    )


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="The run directory.", metavar="RUN_DIR")],
    group: Annotated[
        str | None, typer.Option("--group", "-g", help="Only this group of metrics.")
    ] = None,
    all_rows: Annotated[
        bool, typer.Option("--all", help="Also rows that a later attempt made again.")
    ] = False,
    json: Json = False,
) -> None:
    """Show a run and the metrics that it reported."""
    from paceline.core import read_metrics, summarize_run
    from paceline.journal import RunDirectory

    path = run if run.exists() else Path("paceline_runs") / run
    summary = summarize_run(path)
    directory = RunDirectory(path)
    rows = [
        (name, row)
        for name in ([group] if group else _groups(directory))
        for row in read_metrics(directory, name)
        if all_rows or not row.is_superseded
    ]
    if json:
        _print_json(summary, rows)
        return
    _print_facts(summary)
    _print_rows(rows)


def _print_facts(summary: "RunSummary") -> None:
    from paceline.cli._output import format_moment, print_facts

    print_facts(
        [
            ("Run", str(summary.path)),
            ("State", _state_text(summary)),
            ("Error", summary.error),
            ("Attempts", summary.num_attempts),
            ("Latest checkpoint", summary.latest_checkpoint),
            ("Started", format_moment(summary.created)),
        ]
    )


def _print_rows(rows: list[tuple[str, Any]]) -> None:
    from paceline.cli._output import console, format_values, print_table

    console().print()
    print_table(
        ["Group", "Batches", "Attempt", "Metrics"],
        [
            (
                name,
                row.steps_completed,
                row.attempt,
                format_values(row.metrics) + (" (superseded)" if row.is_superseded else ""),
            )
            for name, row in rows
        ],
        right=["Batches", "Attempt"],
        empty="No metrics.",
    )


def _groups(run: "RunDirectory") -> list[str]:
    """Return the names of the metric groups that the chief reported."""
    from paceline.journal import MetricsReported

    names = set()
    for key in run.journal_keys():
        if key.rank == 0:
            for entry in run.reader(key):
                record = entry.decode()
                if isinstance(record, MetricsReported):
                    names.add(record.group)
    return sorted(names)


def _state_text(run: "RunSummary") -> Any:
    from rich.text import Text

    return Text(run.state.value, style=_STATE_STYLES.get(run.state.value, ""))


def _as_json(run: "RunSummary") -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run.state.value,
        "created": run.created,
        "num_attempts": run.num_attempts,
        "last_step": run.last_step,
        "latest_checkpoint": run.latest_checkpoint,
        "error": run.error,
    }


def _print_json(summary: "RunSummary", rows: list[tuple[str, Any]]) -> None:
    from paceline.cli._output import print_json
    from paceline.journal import encode_metrics

    metrics = [
        {
            "group": name,
            "steps_completed": row.steps_completed,
            "attempt": row.attempt,
            "is_superseded": row.is_superseded,
            "metrics": encode_metrics(row.metrics),
        }
        for name, row in rows
    ]
    print_json({**_as_json(summary), "metrics": metrics})
