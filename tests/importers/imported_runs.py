"""Stores as the real libraries write them, and runs as an import leaves them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline._base.journal_records import MediaReported
from paceline._base.run_directory import RunDirectory
from paceline.core import read_metrics
from paceline.importers._export_files import RunImport
from paceline.importers._run_writer import ImportedRun

Import = Callable[..., tuple[list[ImportedRun], list[str]]]


def import_into(into: Path, source: Path, **options: Any) -> tuple[list[ImportedRun], list[str]]:
    """Import a store; return what was done with its runs, and all problems."""
    work = RunImport(source, into=into, **options)
    runs = list(work)
    return runs, [*work.problems, *(problem for run in runs for problem in run.problems)]


def points(path: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Return all rows of a run: group, step, metrics."""
    return [
        (group, row.steps_completed, row.metrics)
        for group in ("training", "system")
        for row in read_metrics(RunDirectory(path), group)
        if not row.is_superseded
    ]


def media(path: Path) -> dict[str, MediaReported]:
    """Return the media of a run by their names."""
    run = RunDirectory(path)
    records = (entry.decode() for key in run.journal_keys() for entry in run.reader(key))
    return {record.name: record for record in records if isinstance(record, MediaReported)}


def tree(root: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def run_script(code: str, *arguments: object, **variables: str) -> None:
    """Run a script of a tracker's client to its end."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_"))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    subprocess.run(command, check=True, env={**kept, **variables}, capture_output=True, timeout=250)
