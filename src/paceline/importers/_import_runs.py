"""Import of what another tracker has logged: the kind of the store, and its runs."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from paceline._base.journal_records import AnyRecord, AttemptFinished
from paceline.importers import _mlflow_stores, _tensorboard_logs, _trackio_stores
from paceline.importers._export_files import is_export, read_export
from paceline.importers._run_files import RunFiles
from paceline.importers._run_writer import (
    ImportedRun,
    ImportRefusedError,
    RunWriter,
    SourceRun,
    started,
)

Reader = Callable[[Path, list[str]], Iterator[SourceRun]]


def _read_logs(root: Path, problems: list[str]) -> Iterator[SourceRun]:
    """Yield a run for each log directory of TensorBoard."""
    for directory in _tensorboard_logs.log_directories(root):
        names = sorted(filter(_tensorboard_logs.is_event_file, os.listdir(directory)))
        below = directory.relative_to(root).as_posix()
        name = (root.resolve().name if below == "." else below).replace("/", "-")
        # `events.out.tfevents.SECONDS.HOST...`; the directory may have been moved as a whole.
        second = names[0].partition(".tfevents.")[2].partition(".")[0]
        yield SourceRun(
            source=f"tensorboard:{directory.resolve().name}/{names[0]}",
            name=name,
            created=float(second) if second.isdecimal() else directory.stat().st_mtime,
            read=partial(_read_log, directory),
        )


def _read_log(directory: Path, run: SourceRun, files: RunFiles) -> Iterator[AnyRecord]:
    reader = _tensorboard_logs.LogDirectoryReader(directory, files)
    yield started(run.created)
    last = run.created
    for record in reader.read():
        last = max(last, record.time)
        yield record
    reader.finish()
    run.hparams = reader.hparams
    run.problems += reader.problems
    # Event files do not say how a run has ended.
    yield AttemptFinished(time=last, outcome="completed")


def _mlflow(path: Path) -> Path | None:
    """Return the store of MLflow at a path or in it, None without any."""
    if path.is_file():
        return path if _mlflow_stores.is_database(path) else None
    places = (path / "mlflow.db", path, path / "mlruns")
    for place in places:
        if place.is_file() and _mlflow_stores.is_database(place):
            return place
        if place.is_dir() and _mlflow_stores.is_file_store(place):
            return place
    return None


def _read_mlflow(path: Path, problems: list[str]) -> Iterator[SourceRun]:
    store = _mlflow(path) or path
    is_file = store.is_file()
    read = _mlflow_stores.read_database if is_file else _mlflow_stores.read_file_store
    return read(store, problems)


_KINDS: dict[str, tuple[Callable[[Path], Any], Reader]] = {
    "export": (is_export, read_export),
    "mlflow": (_mlflow, _read_mlflow),
    "tensorboard": (_tensorboard_logs.log_directories, _read_logs),
    "trackio": (_trackio_stores.databases, _trackio_stores.read_store),
}
KINDS = tuple(_KINDS)


def kind_of_store(path: Path) -> str:
    """Return the kind of a store.

    Raises:
        ImportRefusedError: It is of no known kind or of several, or there is nothing.
    """
    if not path.exists():
        raise ImportRefusedError(
            f"`SOURCE` must be a file or directory, but {str(path)!r} is not there."
        )
    if is_export(path):
        # Its files may be of any kind.
        return "export"
    found = [kind for kind, (find, _) in _KINDS.items() if find(path)]
    if len(found) > 1:
        raise ImportRefusedError(
            f"`SOURCE` must hold one kind of store, but {str(path)!r} holds {' and '.join(found)}."
            " Hint: give the directory of one, or its kind with `--kind`, and then the other one."
        )
    if found:
        return found[0]
    raise ImportRefusedError(
        f"`SOURCE` must hold what MLflow, TensorBoard, Trackio or `paceline export` has written,"
        f" but {str(path)!r} holds nothing of it. Hint: `wandb sync` sends W&B's runs to a master."
    )


class RunImport:
    """An import from one store.

    Args:
        source: The file or directory.
        kind: Its kind, one of `KINDS`; found by looking if it is None.
        into: The directory of runs to write into.
        dry_run: Whether nothing is written.

    Attributes:
        kind: The kind of the store.
        problems: What could not be read of the store outside of its runs, complete at the end.

    Raises:
        ImportRefusedError: There is nothing of this kind, or another import writes there.
    """

    def __init__(
        self, source: Path, *, kind: str | None = None, into: Path, dry_run: bool = False
    ) -> None:
        self.kind = kind_of_store(source) if kind is None else kind
        self.problems: list[str] = []
        self._source = source
        self._writer = RunWriter(into, dry_run=dry_run)

    def __iter__(self) -> Iterator[ImportedRun]:
        """Import the runs one after the other, and yield what was done with each.

        Raises:
            ImportError: The library that reads the store is not installed.
            OSError: The runs cannot be written.
        """
        try:
            for run in _KINDS[self.kind][1](self._source, self.problems):
                yield self._writer.write(run)
        finally:
            self._writer.close()
