"""Reader of W&B's offline runs: a log of protobuf records, and the files beside it."""

import os
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from msgspec.structs import replace

from paceline._base.files import open_regular_below, opened_directory
from paceline._base.imports import required_library
from paceline._base.journal_records import (
    AnyRecord,
    AttemptFinished,
    MediaReported,
    RunMetadataSet,
)
from paceline.core._run_directories import recordable
from paceline.importers._run_files import RunFiles, files_below, kind_of, links_below
from paceline.importers._run_writer import GROUP, SourceRun, started
from paceline.importers._wandb_values import parse_json, records_of_line, system_record

# Blocks of the log, with parts of records; a part never crosses the end of a block.
_BLOCK = 32768
_FILE_HEAD, _PART_HEAD = struct.Struct("<4sHB"), struct.Struct("<IHB")
_FILE_START = (b":W&B", 0xBEE1, 0)
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MAX_RECORD_BYTES = 256 * 1024 * 1024
_INTERNAL = ("_step", "_timestamp", "_runtime", "_wandb")


def run_logs(path: Path) -> list[Path]:
    """Return the logs of offline runs at a path: the file itself, or those below a directory."""
    if path.suffix == ".wandb" and path.is_file():
        return [path]
    found = []
    for folder, folders, names in os.walk(path, followlinks=False):
        # `latest-run` is a link to one of the others.
        folders[:] = [name for name in folders if not os.path.islink(os.path.join(folder, name))]
        found += [Path(folder, name) for name in names if name.endswith(".wandb")]
    return sorted(found)


def read_offline_runs(path: Path, problems: list[str]) -> Iterator[SourceRun]:
    """Yield the runs of W&B's logs at a path, also of runs that W&B had synchronised.

    Args:
        path: A file `run-ID.wandb`, or a directory above such files.
        problems: Takes what cannot be read.

    Raises:
        ImportError: The `wandb` package is not installed.
    """
    record = required_library(
        "wandb.proto.wandb_internal_pb2", "The reader of offline runs", "paceline[wandb]"
    ).Record
    for log in run_logs(path):
        head = next((one for one in _decoded(log, record, []) if one.HasField("run")), None)
        if head is None:
            problems.append(f"{log} has no readable record of a run")
            continue
        run = head.run
        yield SourceRun(
            source=f"wandb:{run.entity}/{run.project}/{run.run_id}",
            name=run.display_name or run.run_id,
            created=max(run.start_time.ToMicroseconds() / 1e6, 0.0),
            read=partial(_read, log, record),
        )


def _read(log: Path, record_type: Any, run: SourceRun, files: RunFiles) -> Iterator[AnyRecord]:
    store = log.parent / "files"
    facts: dict[str, Any] = {}
    hparams: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    end: AttemptFinished | None = None
    step, now = 0, run.created
    yield started(run.created)
    for record in _decoded(log, record_type, run.problems):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = _items(record.history.item, run)
            step = int(_number(row.get("_step"), record.history.step.num))
            now = _number(row.get("_timestamp"), now)
            for found in records_of_line(row, step, now):
                yield from _with_files(found, run, files, store)
        elif kind == "stats":
            moment = record.stats.timestamp.ToMicroseconds() / 1e6
            system = system_record(_items(record.stats.item, run), step, moment)
            yield from () if system is None else [system]
        elif kind == "run":
            told = record.run
            hparams |= _items(told.config.update, run)
            facts = {
                "project": told.project, "tags": [*told.tags], "notes": told.notes,
                "group": told.run_group, "job_type": told.job_type, "host": told.host,
            }  # fmt: skip
        elif kind == "config":
            hparams |= _items(record.config.update, run)
        elif kind == "summary":
            summary |= _items(record.summary.update, run)
        elif kind == "artifact":
            yield from _artifact(record.artifact, run, files, step, now)
        elif kind == "exit":
            end = _end(record.exit.exit_code, now)
    run.hparams = {name: value for name, value in hparams.items() if name != "_wandb"}
    yield from _saved_files(store, run, files)
    kept = {
        name: value
        for name, value in summary.items()
        if name not in _INTERNAL and not (isinstance(value, dict) and "_type" in value)
    }
    metadata = {name: value for name, value in facts.items() if value} | {
        "summary": recordable(kept)
    }
    yield RunMetadataSet(time=now, metadata=metadata)
    if end is not None:
        yield end


def _saved_files(store: Path, run: SourceRun, files: RunFiles) -> Iterator[AnyRecord]:
    for link in links_below(store):
        run.problems.append(f"The file {link!r} is a link, which is not followed")
    for name in files_below(store):
        # Media came with their steps.
        if not name.startswith("media/"):
            yield from _copied(run, files, store, name, name, 0, run.created)


def _end(exit_code: int, now: float) -> AttemptFinished:
    if exit_code == 0:
        return AttemptFinished(time=now, outcome="completed")
    return AttemptFinished(time=now, outcome="error", error=f"The exit code was {exit_code}.")


def _number(value: Any, default: float) -> float:
    return max(value if isinstance(value, (int, float)) and value - value == 0 else default, 0)


def _items(items: Any, run: SourceRun) -> dict[str, Any]:
    """Return the values of a record, whose names may be paths in nested values."""
    found: dict[str, Any] = {}
    for item in items:
        # System metrics have no nested ones.
        names = [*getattr(item, "nested_key", ())] or [item.key]
        try:
            value = parse_json(item.value_json)
        except ValueError:
            run.problems.append(f"The value of {names!r} is no JSON")
            continue
        place = found
        for name in names[:-1]:
            inner = place.setdefault(name, {})
            place = inner if isinstance(inner, dict) else {}
        place[names[-1]] = value
    return found


def _artifact(
    artifact: Any, run: SourceRun, files: RunFiles, step: int, now: float
) -> Iterator[AnyRecord]:
    # The client keeps the files of artifacts there until they are sent; nothing else is read.
    data = required_library("wandb.env", "The reader of offline runs", "paceline[wandb]")
    staging = Path(data.get_data_dir()).absolute() / "artifacts" / "staging"
    for entry in artifact.manifest.contents:
        target = f"artifacts/{artifact.name}/{entry.path}"
        try:
            source = Path(entry.local_path).relative_to(staging).as_posix()
        except ValueError:
            run.problems.append(f"The file {target!r} is not in the store: {entry.local_path!r}")
            continue
        yield from _copied(run, files, staging, source, target, step, now)


def _with_files(
    record: AnyRecord, run: SourceRun, files: RunFiles, store: Path
) -> Iterator[AnyRecord]:
    """Yield a record whose files were copied, if they could be."""
    if isinstance(record, MediaReported) and record.kind != "histogram":
        try:
            if not record.files:
                raise ValueError("it has no file of the run")
            copies = [
                replace(files.copy(store, one.path, one.path, one.caption), facts=one.facts)
                for one in record.files
            ]
        except (OSError, ValueError) as error:
            place = f"{record.name!r} at step {record.steps_completed}"
            run.problems.append(f"{place} could not be read: {error}")
            return
        record = replace(record, files=copies)
    yield record


def _copied(
    run: SourceRun, files: RunFiles, store: Path, source: str, target: str, step: int, now: float
) -> Iterator[AnyRecord]:
    try:
        file = files.copy(store, source, target)
    except (OSError, ValueError) as error:
        run.problems.append(f"The file {target!r} cannot be read: {error}")
        return
    yield MediaReported(
        time=now, group=GROUP, steps_completed=step, name=target, kind=kind_of(file.media_type),
        files=[file],
    )  # fmt: skip


def _decoded(log: Path, record_type: Any, problems: list[str]) -> Iterator[Any]:
    try:
        with (
            opened_directory(log.parent) as directory,
            open_regular_below(directory, log.name) as file,
            os.fdopen(os.dup(file.fileno()), "rb") as buffered,
        ):
            for place, data in _records(buffered, log, problems):
                try:
                    yield record_type.FromString(data)
                except Exception as error:  # protobuf's own class depends on its back end
                    problems.append(f"{log}: the record before byte {place} is damaged: {error}")
    except OSError as error:
        problems.append(f"{log} cannot be read: {error}")


def _records(file: IO[bytes], log: Path, problems: list[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the whole records of a log, each with the place of its end."""
    head = file.read(_FILE_HEAD.size)
    if len(head) < _FILE_HEAD.size or _FILE_HEAD.unpack(head) != _FILE_START:
        problems.append(f"{log} is no log of W&B, or one of an unknown version")
        return
    place, parts = len(head), b""
    while True:
        left = _BLOCK - place % _BLOCK
        if left < _PART_HEAD.size:
            place += len(file.read(left))
            continue
        head = file.read(_PART_HEAD.size)
        if len(head) < _PART_HEAD.size:
            if head or parts:
                problems.append(f"{log} ends within the record at byte {place}")
            return
        checksum, length, kind = _PART_HEAD.unpack(head)
        data = file.read(min(length, left - len(head)))
        if len(data) < min(length, left - len(head)):
            problems.append(f"{log} ends within the record at byte {place}")
            return
        if len(data) < length or zlib.crc32(data, zlib.crc32(head[6:])) != checksum:
            problems.append(f"{log} is damaged at byte {place}, to the next block of it")
            # The place of the next record is known again where a block begins.
            place = (place // _BLOCK + 1) * _BLOCK
            file.seek(place)
            parts = b""
            continue
        place += len(head) + length
        parts = data if kind in (_FULL, _FIRST) else parts + data
        if len(parts) > _MAX_RECORD_BYTES:
            problems.append(f"{log}: the record before byte {place} is too large")
            parts = b""
        elif kind in (_FULL, _LAST):
            yield place, parts
            parts = b""
