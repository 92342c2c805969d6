"""Commands `paceline runs` and `paceline sync`: show, delete and sync runs without a master."""

import os
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._base.arguments_and_errors import seconds_of
from paceline._base.files import temporary_name
from paceline._base.journal_records import MetricsReported, encode_metrics
from paceline._base.run_directory import NotARunDirectoryError, RunDirectory
from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._command_groups import CommandGroup
from paceline.cli._completions import complete_run
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError, report_error

if TYPE_CHECKING:
    from paceline._base.run_directory import RunDirectory
    from paceline.client._code_and_run_uploads import RunSync, SyncResult
    from paceline.core._read_runs import RunSummary

runs_app = CommandGroup(help="Show local runs without a master.")

_RUNS = Path("paceline_runs")
_STATE_STYLES = {
    "running": "cyan",
    "completed": "green",
    "preempted": "yellow",
    "invalid_hp": "yellow",
    "crashed": "red",
}


@runs_app.command("list", is_list=True)
def list_run_directories(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Directory of the runs. The default is ./paceline_runs.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """List the runs in a directory, newest first."""
    from paceline.core._read_runs import list_runs

    if directory is not None and not directory.is_dir():
        raise CommandError(f"`DIR` must be a directory, but {str(directory)!r} is none.")
    place = directory or _RUNS
    runs = list_runs(place)[::-1]
    console.print_list(
        [_run_as_json(run) for run in runs],
        ["Run", "State", "Attempts", "Batches", "Checkpoint", "Started"],
        [
            (
                run.path.name,
                _state_text(run),
                run.num_attempts,
                run.last_step,
                run.latest_checkpoint and run.latest_checkpoint[:8],
                console.Age(run.created),
            )
            for run in runs
        ],
        right=["Attempts", "Batches"],
        shortened=["Run"],
        spare=["Checkpoint", "Attempts", "Started"],
        empty=f"No runs in {place}.",
    )


RunPath = Annotated[
    Path,
    typer.Argument(
        help="Run directory. For a run in ./paceline_runs: `last`, or the start or end of its"
        " name.",
        metavar="RUN_DIR",
        autocompletion=complete_run,
    ),
]


@runs_app.command()
def show(
    run: RunPath,
    group: Annotated[
        str | None,
        typer.Option("--group", "-g", metavar="NAME", help="Show only this metric group."),
    ] = None,
    all_rows: Annotated[
        bool, typer.Option("--all", help="Also show reports that a later attempt repeated.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show a run and its reported metrics."""
    from paceline.core._read_runs import read_alerts, read_history, read_metrics, summarize_run

    path = find_run(run)
    summary = summarize_run(path)
    directory = RunDirectory(path)
    rows = [
        (name, row)
        for name in ([group] if group else run_groups(directory))
        for row in read_metrics(directory, name)
        if all_rows or not row.is_superseded
    ]
    if json:
        _print_run_json(directory, summary, rows)
        return
    _print_run_facts(summary, read_history(directory).metadata)
    console.print_alerts(read_alerts(directory))
    _print_run_rows(rows)


@runs_app.command("time")
def show_time(run: RunPath, json: options.Json = False) -> None:
    """Show how the time of a run was spent: training, starts, lost work."""
    from paceline.core._read_runs import time_shares_of_run

    shares = time_shares_of_run(find_run(run))
    if json:
        console.print_json(
            {**shares.seconds(), "total_s": shares.total_s, "goodput": shares.goodput}
        )
    else:
        console.print_time_table(shares.seconds(), shares.total_s, shares.goodput)


def find_run(run: Path) -> Path:
    """Return the directory of a run, named by its path, its name or a part of the name.

    Raises:
        CommandError: The part fits several runs or none.
    """
    from paceline.core import _read_runs

    try:
        return _read_runs.find_run(run)
    except NotARunDirectoryError as error:
        raise CommandError(str(error).replace("`run`", "`RUN_DIR`")) from error


def _print_run_facts(summary: "RunSummary", metadata: dict[str, Any] | None) -> None:

    console.print_facts(
        [
            ("Run", str(summary.path)),
            ("State", _state_text(summary)),
            ("Error", summary.error or _likely_cause(summary)),
            ("Attempts", summary.num_attempts),
            ("Worker restarts", console.restarts_text(summary.restart_causes)),
            ("Latest checkpoint", summary.latest_checkpoint),
            ("Started", console.format_moment(summary.created)),
            ("Metadata", None if metadata is None else console.format_values(metadata)),
        ]
    )


def _likely_cause(summary: "RunSummary") -> str | None:
    from paceline.core._read_runs import RunState

    if summary.state is not RunState.CRASHED or not summary.num_attempts:
        return None
    return "none was told: the process was killed, or its machine stopped"


def _print_run_rows(rows: list[tuple[str, Any]]) -> None:

    console.stdout().print()
    console.print_table(
        ["Group", "Batches", "Attempt", "Metrics"],
        [
            (
                name,
                row.steps_completed,
                row.attempt + 1,
                console.format_values(row.metrics) + (" (superseded)" if row.is_superseded else ""),
            )
            for name, row in rows
        ],
        right=["Batches", "Attempt"],
        empty="No metrics.",
    )


def run_groups(run: "RunDirectory") -> list[str]:
    """Return the names of the metric groups reported by the chief."""

    names = set()
    for key in run.journal_keys():
        if key.rank == 0:
            for entry in run.reader(key):
                record = entry.decode()
                if isinstance(record, MetricsReported):
                    names.add(record.group)
    return sorted(names)


def run_state_name(run: "RunSummary") -> str:
    """Return the state of a run; `no_reports` if its script never reported anything."""
    from paceline.core._read_runs import RunState

    if not run.num_attempts and run.state is not RunState.RUNNING:
        return "no_reports"
    return run.state.value


def _state_text(run: "RunSummary") -> Any:
    from rich.text import Text

    name = run_state_name(run)
    return Text(name.replace("_", " "), style=_STATE_STYLES.get(name, ""))


def _run_as_json(run: "RunSummary") -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "state": run_state_name(run),
        "created_at": run.created,
        "num_attempts": run.num_attempts,
        "steps_completed": run.last_step,
        "latest_checkpoint": run.latest_checkpoint,
        "error": run.error,
        "restarts": len(run.restart_causes),
        "last_restart_cause": run.restart_causes[-1] if run.restart_causes else None,
    }


def _print_run_json(
    run: "RunDirectory", summary: "RunSummary", rows: list[tuple[str, Any]]
) -> None:
    from paceline.core._read_runs import read_alerts, read_history

    metrics = [
        {
            "group": name,
            "steps_completed": row.steps_completed,
            "attempt": row.attempt + 1,
            "is_superseded": row.is_superseded,
            "metrics": encode_metrics(row.metrics),
        }
        for name, row in rows
    ]
    alerts = [
        {"time": a.time, "level": a.level, "title": a.title, "description": a.description}
        for a in read_alerts(run)
    ]
    facts = {"metadata": read_history(run).metadata, "alerts": alerts}
    console.print_json({**_run_as_json(summary), **facts, "metrics": metrics})


_WATCH_S = 1.0


def sync(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directories, or names of runs in ./paceline_runs.",
            metavar="RUN_DIR",
            autocompletion=complete_run,
        ),
    ],
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Continue to send until the runs have ended.")
    ] = False,
) -> None:
    """Send runs without a master to the master.

    If you send a run again, only its new data is sent.
    """
    from paceline.client._code_and_run_uploads import RunSync

    with connect() as client:
        # All are opened first, so that a wrong name is found before anything is sent.
        syncs = [RunSync(client, find_run(path)) for path in runs]
        results = {one: _send_run(one) for one in syncs}
        if watch:
            _watch_runs(results)
    if options.is_json():
        console.print_json([_sync_as_json(one, result) for one, result in results.items()])


def _sync_as_json(sync: "RunSync", result: "SyncResult") -> dict[str, Any]:
    return {
        "name": sync.name,
        "experiment_id": result.experiment_id,
        "num_records": result.num_records,
        "is_alive": result.is_alive,
    }


def _send_run(sync: "RunSync") -> "SyncResult":

    result = sync.send()
    records = "1 record" if result.num_records == 1 else f"{result.num_records} records"
    going_on = "; the run goes on" if result.is_alive else ""
    console.print_note(
        f"{sync.name} is experiment {result.experiment_id}: sent {records}{going_on}."
    )
    return result


def _watch_runs(results: "dict[RunSync, SyncResult]") -> None:
    """Send news about every second until all runs have ended; Ctrl-C leaves the runs alone."""

    from paceline.client._http_session import MasterUnreachableError

    is_away = False
    going_on = [sync for sync, result in results.items() if result.is_alive]
    while going_on:
        time.sleep(_WATCH_S)
        for sync in list(going_on):
            try:
                result = sync.send()
            except MasterUnreachableError as error:
                if not is_away:
                    typer.echo(f"{error} Trying again until one answers.", err=True)
                is_away = True
                break
            is_away = False
            num_records = results[sync].num_records + result.num_records
            results[sync] = replace(result, num_records=num_records)
            if not result.is_alive:
                going_on.remove(sync)
                console.print_note(f"{sync.name} has ended.")


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@runs_app.command()
def delete(run: RunPath, yes: Yes = False, dry_run: options.DryRun = False) -> None:
    """Delete a run: its directory with metrics, logs and checkpoints.

    A run in use, a run of a master and anything that is no run directory are refused.
    """
    path = find_run(run).absolute()
    stays = _check_deletable(path)
    size = _size_of(path)
    told = f"Dry run: {path} ({console.format_bytes(size)}) would be deleted."
    if not dry_run:
        options.confirm(f"Delete {path} ({console.format_bytes(size)})?", is_confirmed=yes)
        _delete_run(path)
        told = f"Deleted {path} ({console.format_bytes(size)})."
    told += f"\nIts checkpoints in {stays} stay." if stays else ""
    answer = {"path": str(path), "num_bytes": size, "checkpoints_left_in": stays}
    console.print_answer(answer | {"is_deleted": not dry_run}, told)


@runs_app.command()
def prune(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Directory of the runs. The default is ./paceline_runs.", metavar="DIR"
        ),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Delete runs without any report for this time, such as 30d, 12h or 2w.",
        ),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Delete all but the newest N runs.")
    ] = None,
    dry_run: options.DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete old runs. Runs in use and runs of a master stay."""

    from paceline.core._read_runs import RUNS_DIRECTORY, list_runs

    if (older_than is None) == (keep is None):
        raise CommandError("`--older-than` or `--keep` must be given, and not both.")
    age_s = None if older_than is None else seconds_of(older_than, may_be_zero=True)
    if older_than is not None and age_s is None:
        raise CommandError(
            "`--older-than` must be a number with the unit m, h, d or w, such as 30d, but got"
            f" {older_than!r}."
        )
    place = directory or Path(RUNS_DIRECTORY)
    if directory is not None and not directory.is_dir():
        raise CommandError(f"`DIR` must be a directory, but {str(directory)!r} is none.")
    runs = [run for run in list_runs(place) if not run.path.is_symlink()]
    if keep is not None:
        runs = runs[: max(len(runs) - keep, 0)]
    rows = [_row_of(run) for run in runs if _is_deletable(run.path)]
    rows = [row for row in rows if age_s is None or row["last_active"] < time.time() - age_s]
    if not options.is_json():
        _print_rows(rows, place)
    if rows and not dry_run:
        size = console.format_bytes(sum(row["num_bytes"] for row in rows))
        options.confirm(
            f"Delete {len(rows)} run{'s' * (len(rows) > 1)} ({size})?", is_confirmed=yes
        )
    for row in rows if not dry_run else ():
        try:
            _delete_run(Path(row["path"]))
            row["is_deleted"] = True
        except CommandError as error:
            report_error(str(error))
    num_deleted = sum(row["is_deleted"] for row in rows)
    if options.is_json():
        console.print_json(rows)
    elif num_deleted:
        typer.echo(f"Deleted {num_deleted} run{'s' * (num_deleted != 1)}.")
    if not dry_run and num_deleted < len(rows):
        raise typer.Exit(1)


def _row_of(run: "RunSummary") -> dict[str, Any]:
    return {
        "path": str(run.path),
        "state": run_state_name(run),
        "last_active": _last_active(run),
        "num_bytes": _size_of(run.path),
        "is_deleted": False,
    }


def _print_rows(rows: list[dict[str, Any]], place: Path) -> None:
    console.print_table(
        ["Run", "State", "Last active", "Size"],
        [
            (
                Path(row["path"]).name,
                row["state"],
                console.format_age(row["last_active"]),
                console.format_bytes(row["num_bytes"]),
            )
            for row in rows
        ],
        right=["Size"],
        shortened=["Run"],
        empty=f"No runs to delete in {place}.",
    )


def _last_active(run: "RunSummary") -> float:
    """Return when a process last wrote to the journals of a run, in seconds since the epoch."""
    moments = [run.created]
    for path in (run.path / "journal").glob("*/*"):
        with suppress(OSError):
            moments.append(path.lstat().st_mtime)
    return max(moments)


def _size_of(path: Path) -> int:
    size = 0
    # Links are not followed: their targets stay.
    for root, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(root, name)).st_size
    return size


def _is_deletable(path: Path) -> bool:
    try:
        _check_deletable(path)
    except CommandError:
        return False
    return True


def _check_deletable(path: Path) -> str | None:
    """Check that a directory may go, and return the storage of checkpoints elsewhere, if any.

    Raises:
        CommandError: It is a link, in use, or belongs to a master.
        NotARunDirectoryError: It is no run directory.
    """
    from paceline.core._read_runs import is_of_master, run_storage

    if path.is_symlink():
        raise CommandError(f"`RUN_DIR` must be a directory, but {str(path)!r} is a link.")
    run = RunDirectory.open(path)
    info = run.read_info()
    if is_of_master(info):
        raise CommandError(
            f"`RUN_DIR` must be a run without a master, but {str(path)!r} belongs to a trial."
            " Hint: `paceline e delete`."
        )
    if run.is_alive():
        raise _in_use(path)
    storage = run_storage(run, info)
    root = storage.local_root
    return None if root is not None and root.is_relative_to(path.absolute()) else storage.url


def _in_use(path: Path) -> CommandError:
    return CommandError(
        f"A run must have ended before its deletion, but a process works on {str(path)!r}."
    )


def _delete_run(path: Path) -> None:
    """Delete a run directory; no process can begin to work on it meanwhile.

    Raises:
        CommandError: It is in use, or files remain.
    """

    _check_deletable(path)
    try:
        with RunDirectory(path).hold_attempt_lock() as is_ours:
            if not is_ours:
                raise _in_use(path)
            # An interrupted deletion leaves no directory that looks like a whole run.
            doomed = path.with_name(temporary_name(path.name))
            path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise CommandError(f"{str(path)!r} must be deletable, but: {error}.") from error
