"""Exports: runs as Parquet and JSON and back again; imports of all kinds of stores.

An export is a directory with `export.json`, and for each run a directory with `run.json` (facts),
`metrics.parquet` (one row for each value), `records.jsonl` (everything else in the journals),
`files` and, if asked for, `checkpoints`.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from pathlib import Path
from typing import Any

import msgspec

from paceline._base.files import read_regular, sync_directory, write_atomically
from paceline._base.imports import required_library
from paceline._base.journal_records import (
    AnyRecord,
    AttemptFinished,
    AttemptStarted,
    MetricsReported,
    decode_record,
    encode_float,
    encode_record,
)
from paceline._base.run_directory import JournalKey, RunInfo
from paceline.importers import _mlflow_stores, _tensorboard_logs, _trackio_stores
from paceline.importers._run_writer import (
    ImportedRun,
    ImportRefusedError,
    RunFiles,
    RunWriter,
    SourceRun,
    files_below,
    started,
)

FORMAT_VERSION = 1
_EXPORT, _RUN, _METRICS, _RECORDS = "export.json", "run.json", "metrics.parquet", "records.jsonl"
_ROWS_AT_ONCE = 65536
_JOURNAL = ("attempt", "generation", "rank")

Numbered = tuple[JournalKey, int, AnyRecord]
"""A record with its journal and its number there."""


def _parquet() -> tuple[Any, Any]:
    arrow = required_library("pyarrow", "An export", "paceline[data]")
    return arrow, required_library("pyarrow.parquet", "An export", "paceline[data]")


def _schema(arrow: Any) -> Any:
    whole, text = arrow.int64(), arrow.string()
    return arrow.schema(
        [
            ("run", text), *((name, whole) for name in _JOURNAL), ("report", whole),
            ("group", text), ("steps_completed", whole), ("time", arrow.float64()),
            # A number as such; other values, and how searches see the report, as JSON.
            ("name", text), ("value", arrow.float64()), ("json", text), ("report_json", text),
        ]
    )  # fmt: skip


@dataclass(kw_only=True, slots=True)
class ExportedRun:
    """A run to export.

    Attributes:
        name: The name of its directory in the export.
        info: Its facts.
        records: All its records.
        facts: What else people want to know of it, as JSON.
        files: The directory of its files, if it has one.
    """

    name: str
    info: RunInfo
    records: Iterable[Numbered]
    facts: dict[str, Any] = field(default_factory=dict)
    files: Path | None = None


def write_run(target: Path, run: ExportedRun) -> int:
    """Write a run into an export, and return the number of its metric values.

    Raises:
        FileExistsError: The export has a run of this name.
        ImportError: PyArrow is not installed.
    """
    arrow, parquet = _parquet()
    schema = _schema(arrow)
    place = target / run.name
    place.mkdir(parents=True)
    number = 0
    columns: list[list[Any]] = [[] for _ in schema.names]
    with (
        parquet.ParquetWriter(place / _METRICS, schema, compression="zstd") as table,
        open(place / _RECORDS, "wb") as others,
    ):
        for key, sequence, record in run.records:
            if not isinstance(record, MetricsReported) or not record.metrics:
                line = _Line(key, sequence, msgspec.Raw(encode_record(record)))
                others.write(msgspec.json.encode(line) + b"\n")
                continue
            for row in _rows(run.name, key, sequence, record):
                number += 1
                for column, value in zip(columns, row, strict=True):
                    column.append(value)
            if len(columns[0]) >= _ROWS_AT_ONCE:
                table.write_table(arrow.table(columns, schema=schema))
                columns = [[] for _ in schema.names]
        table.write_table(arrow.table(columns, schema=schema))
    if run.files is not None:
        files = RunFiles(place / "files")
        for name in files_below(run.files):
            files.copy(run.files, name, name)
    facts = {"run": msgspec.to_builtins(run.info), **run.facts}
    write_atomically(place / _RUN, json.dumps(facts, indent=1).encode())
    return number


def finish_export(target: Path) -> None:
    """Mark an export as complete."""
    content = {"format": "paceline", "version": FORMAT_VERSION}
    write_atomically(target / _EXPORT, json.dumps(content).encode())
    sync_directory(target)


def _rows(
    name: str, key: JournalKey, sequence: int, record: MetricsReported
) -> Iterator[tuple[Any, ...]]:
    told = {"validation": record.validation, "number": record.number}
    is_plain = record.validation is False and record.number is None
    report = None if is_plain else json.dumps(told)
    start = (name, key.attempt, key.generation, key.rank, sequence)
    place = (record.group, record.steps_completed, record.time)
    for metric, value in record.metrics.items():
        number, other = None, None
        if type(value) is float:
            number = value
        elif isinstance(value, dict) and isinstance(value.get("$float"), str):
            number = float(value["$float"])
        else:
            number = float(value) if type(value) is int else None
            other = json.dumps(value)
        yield (*start, *place, metric, number, other, report)


def is_export(path: Path) -> bool:
    """Return whether a directory is a complete export."""
    return (path / _EXPORT).is_file()


def read_export(root: Path, problems: list[str]) -> Iterator[SourceRun]:
    """Yield the runs of an export.

    Args:
        root: Its directory.
        problems: Takes what cannot be read.

    Raises:
        ImportError: PyArrow is not installed.
    """
    try:
        version = json.loads(read_regular(root / _EXPORT))["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{root / _EXPORT} cannot be read: {error}")
        return
    if version != FORMAT_VERSION:
        problems.append(
            f"{root} must have format version {FORMAT_VERSION}, but has {version!r}. Hint: import"
            " it with the Paceline version that wrote it."
        )
        return
    for place in sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink()):
        try:
            if any((place / name).is_symlink() for name in (_RUN, _METRICS, _RECORDS)):
                raise ValueError("one of the files is a link, which is not followed")
            facts = json.loads(read_regular(place / _RUN))
            info = msgspec.convert(facts["run"], RunInfo)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{place / _RUN} cannot be read: {error}")
            continue

        def read(run: SourceRun, files: RunFiles, place: Path = place) -> Iterator[AnyRecord]:
            return _read(place, run, files)

        yield SourceRun(
            source=f"export:{info.run_id}",
            name=info.name,
            created=info.created,
            read=read,
            info=info,
        )


def _read(place: Path, run: SourceRun, files: RunFiles) -> Iterator[AnyRecord]:
    key: JournalKey | None = None
    both = merge(_other_records(place, run), _reports(place, run), key=lambda item: item[:2])
    for now, _, record in both:
        # The first record of a journal says which one it is; it may have been damaged.
        if now != key and not isinstance(record, AttemptStarted):
            first = started(record.time, now.attempt)
            yield msgspec.structs.replace(first, generation=now.generation, rank=now.rank)
        key = now
        yield record
    for folder in ("files", "checkpoints"):
        copies = files.beside(folder)
        for name in files_below(place / folder):
            try:
                copies.copy(place / folder, name, name)
            except (OSError, ValueError) as error:
                run.problems.append(f"The file {folder}/{name} cannot be read: {error}")
        files.num_files += copies.num_files


def _other_records(place: Path, run: SourceRun) -> Iterator[Numbered]:
    try:
        with open(place / _RECORDS, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    parts = msgspec.json.decode(line, type=_Line)
                    yield parts.journal, parts.number, decode_record(parts.record)
                except (msgspec.DecodeError, ValueError) as error:
                    run.problems.append(f"Line {number} of {_RECORDS} is damaged: {error}")
    except OSError as error:
        run.problems.append(f"{_RECORDS} cannot be read: {error}")


class _Line(msgspec.Struct):
    journal: JournalKey
    number: int
    record: msgspec.Raw


def _reports(place: Path, run: SourceRun) -> Iterator[Numbered]:
    arrow, parquet = _parquet()
    before: tuple[Any, ...] | None = None
    metrics: dict[str, Any] = {}
    try:
        with parquet.ParquetFile(place / _METRICS) as table:
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=_schema(arrow).names[1:]):
                for *report, name, value, other, facts in zip(
                    *(column.to_pylist() for column in batch.columns), strict=True
                ):
                    now = (*report, facts)
                    if before is not None and now != before:
                        yield _report(before, metrics)
                        metrics = {}
                    before = now
                    metrics[name] = encode_float(value) if other is None else json.loads(other)
        if before is not None:
            yield _report(before, metrics)
    except (OSError, ValueError, TypeError, arrow.ArrowException) as error:
        run.problems.append(f"{_METRICS} cannot be read to its end: {error}")


def _report(place: tuple[Any, ...], metrics: dict[str, Any]) -> Numbered:
    attempt, generation, rank, sequence, group, steps_completed, time, facts = place
    told = {} if facts is None else json.loads(facts)
    record = MetricsReported(
        time=time, group=group, steps_completed=steps_completed, metrics=metrics, **told
    )
    return JournalKey(attempt, generation, rank), sequence, record


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
