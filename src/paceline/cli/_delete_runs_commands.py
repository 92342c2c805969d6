"""Commands `paceline runs delete` and `prune`: remove the directories of ended runs."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli._console_output import (
    format_age,
    format_bytes,
    print_answer,
    print_json,
    print_table,
)
from paceline.cli._options_and_errors import (
    CommandError,
    age_in_seconds,
    confirm,
    is_json,
    report_error,
)
from paceline.cli._runs_commands import RunPath, find_run, run_state_name, runs_app

if TYPE_CHECKING:
    from paceline.core._read_runs import RunSummary

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@runs_app.command()
def delete(run: RunPath, yes: Yes = False) -> None:
    """Delete a run: its directory with metrics, logs and checkpoints.

    A run in use, a run of a master and anything that is no run directory are refused.
    """
    path = find_run(run).absolute()
    stays = _check_deletable(path)
    size = _size_of(path)
    confirm(f"Delete {path} ({format_bytes(size)})?", is_confirmed=yes)
    _delete_run(path)
    told = f"Deleted {path} ({format_bytes(size)})."
    told += f"\nIts checkpoints in {stays} stay." if stays else ""
    print_answer({"path": str(path), "num_bytes": size, "checkpoints_left_in": stays}, told)


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    yes: Yes = False,
) -> None:
    """Delete old runs. Runs in use and runs of a master stay."""
    import time

    from paceline.core._read_runs import RUNS_DIRECTORY, list_runs

    if (older_than is None) == (keep is None):
        raise CommandError("`--older-than` or `--keep` must be given, and not both.")
    age_s = None if older_than is None else age_in_seconds(older_than)
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
    if not is_json():
        _print_rows(rows, place)
    if rows and not dry_run:
        size = format_bytes(sum(row["num_bytes"] for row in rows))
        confirm(f"Delete {len(rows)} run{'s' * (len(rows) > 1)} ({size})?", is_confirmed=yes)
    for row in rows if not dry_run else ():
        try:
            _delete_run(Path(row["path"]))
            row["is_deleted"] = True
        except CommandError as error:
            report_error(str(error))
    num_deleted = sum(row["is_deleted"] for row in rows)
    if is_json():
        print_json(rows)
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
    print_table(
        ["Run", "State", "Last active", "Size"],
        [
            (
                Path(row["path"]).name,
                row["state"],
                format_age(row["last_active"]),
                format_bytes(row["num_bytes"]),
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
    from paceline._base.run_directory import RunDirectory
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
    from paceline._base.files import temporary_name
    from paceline._base.run_directory import RunDirectory

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
