"""Commands for the files and media of runs and trials: list and download them."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline._base.files import open_regular_below, opened_directory
from paceline._base.run_directory import RunDirectory, check_file_path
from paceline.cli import _console_output as console
from paceline.cli import _options as options
from paceline.cli._commands.runs_commands import RunPath, find_run, runs_app
from paceline.cli._commands.trial_commands import trial_app
from paceline.cli._connection import connect
from paceline.cli._errors import CommandError

Paths = Annotated[
    list[str] | None,
    typer.Argument(help="Files or directories to copy. The default is all.", metavar="PATH"),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Directory to copy them into. The default is ./files.", metavar="DIR"
    ),
]


@runs_app.command("files", is_list=True)
def list_run_files(run: RunPath) -> None:
    """List the files of a run, such as its media."""
    files = _local_files(find_run(run))
    _print_files(files)


@runs_app.command("download")
def copy_run_files(run: RunPath, paths: Paths = None, output: Output = None) -> None:
    """Copy files of a run. Files of the same name are replaced."""

    path = find_run(run)

    def copy(name: str, target: Path) -> None:
        with (
            opened_directory(path / "files") as directory,
            open_regular_below(directory, name) as source,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(source, file)

    _copy_files(_local_files(path), paths or [], output, copy)


@trial_app.command("files", is_list=True)
def list_trial_files(trial: options.TrialId) -> None:
    """List the files of a trial, such as its media."""
    with connect() as client:
        _print_files({file.path: file.size for file in client.get_trial(trial).files()})


@trial_app.command("download-files")
def copy_trial_files(trial: options.TrialId, paths: Paths = None, output: Output = None) -> None:
    """Copy files of a trial. Files of the same name are replaced."""
    with connect() as client:
        found = client.get_trial(trial)
        files = {file.path: file.size for file in found.files()}
        _copy_files(files, paths or [], output, found.download_file)


def _local_files(run: Path) -> dict[str, int]:
    """Return the sizes of a run's files, without links and files being written."""

    root = RunDirectory.open(run).files_path
    found = {}
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                found[path.relative_to(root).as_posix()] = path.stat().st_size
    return dict(sorted(found.items()))


def _print_files(files: dict[str, int]) -> None:
    console.print_list(
        [{"path": path, "size": size} for path, size in files.items()],
        ["File", "Bytes"],
        [*files.items()],
        right=["Bytes"],
        empty="No files.",
    )


def _copy_files(
    files: dict[str, int],
    paths: Sequence[str],
    output: Path | None,
    copy: Callable[[str, Path], object],
) -> None:
    wanted = [path for path in files if not paths or any(_is_in(path, one) for one in paths)]
    for one in paths:
        if not any(_is_in(path, one) for path in files):
            raise CommandError(
                f"`PATH` must be a file or directory of the run, but got {one!r}. Hint:"
                " `paceline runs files` or `paceline t files` lists them."
            )
    root = output or Path("files")
    for path in wanted:
        # A master is a stranger here: its names must not lead out of the directory.
        target = root / check_file_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        copy(path, target)
    number = "1 file" if len(wanted) == 1 else f"{len(wanted)} files"
    console.print_answer({"path": str(root), "files": wanted}, f"Copied {number} into {root}.")


def _is_in(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place.rstrip('/')}/")
