"""Readers of MLflow's stores: a directory of files, or an SQLite database; without MLflow."""

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from heapq import merge
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from paceline._base import journal_records as records
from paceline._base.files import open_regular_below, opened_directory, read_limited
from paceline._base.run_directory import check_file_path
from paceline.config._read_yaml import parse_yaml
from paceline.importers._run_writer import (
    GROUP,
    SYSTEM_GROUP,
    ImportRefusedError,
    RunFiles,
    SourceRun,
    files_below,
    kind_of,
    links_below,
    started,
)

_SYSTEM = "system/"
_SMALL_FILE = 1024 * 1024
_METRIC_FILE = 4 * 1024**3
_STATUSES = {"1": "RUNNING", "2": "SCHEDULED", "3": "FINISHED", "4": "FAILED", "5": "KILLED"}
# What a database stores in place of infinities.
_LARGEST = 1.7976931348623157e308
# `log_image` names files so; releases before 2.14 put `%` between the parts.
IMAGE_FILE = re.compile(
    r"images/(?P<name>.+)(?P<mark>[+%])step(?P=mark)(?P<step>\d{1,18})(?P=mark)timestamp(?P=mark)"
    r"(?P<time>\d{1,15})(?P=mark)[\w-]+\.(?P<kind>png|jpg|jpeg|gif|webp)"
)
_MODELS = "models"


class _Point(NamedTuple):
    time_ms: int
    step: int
    name: str
    value: float


def is_file_store(path: Path) -> bool:
    """Return whether a directory is a file store of MLflow."""
    return any(
        child.is_dir() and not child.is_symlink() and (child / "meta.yaml").is_file()
        for child in (path.iterdir() if path.is_dir() else ())
    )


def read_file_store(root: Path, problems: list[str]) -> Iterator[SourceRun]:
    """Yield the runs of a file store, such as `mlruns`, without deleted ones.

    Args:
        root: The directory.
        problems: Takes what cannot be read.
    """
    for experiment in _directories(root):
        facts = _facts(experiment, problems) or {}
        if facts.get("lifecycle_stage") == "deleted":
            continue
        project = str(facts.get("name") or experiment.name)
        for directory in _directories(experiment):
            run = _facts(directory, problems)
            if run is not None and run.get("lifecycle_stage") != "deleted":
                yield _run_of_files(directory, project, run)


def _run_of_files(directory: Path, project: str, facts: dict[str, Any]) -> SourceRun:
    run_id = str(facts.get("run_id") or facts.get("run_uuid") or directory.name)
    facts |= {"run_id": run_id, "status": _STATUSES.get(str(facts.get("status")), "")}

    def read(run: SourceRun, files: RunFiles) -> Iterator[records.AnyRecord]:
        tags = dict(_texts(directory, "tags", run))
        run.hparams = {name: number_of(text) for name, text in _texts(directory, "params", run)}
        names = [*files_below(directory / "metrics")]
        series = [_metric_points(directory, name, run) for name in names]
        points = merge(*series, key=lambda point: point[:2])
        places = [(directory / "artifacts", "artifacts")]
        places += _model_places(directory.parent / _MODELS, run_id)
        yield from _records(run, files, facts, project, tags, points, places)

    return SourceRun(
        source=f"mlflow:{run_id}",
        name=str(facts.get("run_name") or facts.get("name") or run_id),
        created=_seconds(facts.get("start_time")),
        read=read,
    )


def _texts(directory: Path, folder: str, run: SourceRun) -> Iterator[tuple[str, str]]:
    root = directory / folder
    for name in files_below(root):
        try:
            yield name, _read_below(root, name, _SMALL_FILE).decode(errors="replace")
        except (OSError, ValueError) as error:
            run.problems.append(f"{folder}/{name} cannot be read: {error}")


def _metric_points(directory: Path, name: str, run: SourceRun) -> Iterator[_Point]:
    try:
        data = _read_below(directory / "metrics", name, _METRIC_FILE)
    except (OSError, ValueError) as error:
        run.problems.append(f"metrics/{name} cannot be read: {error}")
        return
    for number, line in enumerate(BytesIO(data), start=1):
        try:
            # Lines of the first releases have no step, those of later ones perhaps a data set.
            parts = line.split(None, 3)
            step = int(parts[2]) if len(parts) > 2 else 0
            yield _Point(int(parts[0]), max(step, 0), name, float(parts[1]))
        except (ValueError, IndexError):
            run.problems.append(f"Line {number} of metrics/{name} is damaged: {line!r:.80}")


def _model_places(models: Path, run_id: str) -> list[tuple[Path, str]]:
    """Return the artifacts of the models that a run has logged."""
    found = []
    for model in _directories(models):
        facts = _facts(model, [])
        if facts is not None and facts.get("source_run_id") == run_id:
            found.append((model / "artifacts", f"models/{model.name}"))
    return found


def is_database(path: Path) -> bool:
    """Return whether a file is an SQLite database of MLflow's tracking server."""
    return {"experiments", "runs", "metrics", "params"} <= table_names(path)


def table_names(path: Path) -> set[str]:
    """Return the names of the tables of an SQLite database; empty if the file is none."""
    try:
        with closing(open_database(path)) as database:
            # A view could compute for ever.
            found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return {row[0] for row in found}
    except (OSError, sqlite3.Error):
        return set()


def open_database(path: Path) -> sqlite3.Connection:
    """Open an SQLite database of a stranger for reading.

    Raises:
        OSError: The file is no regular file.
        sqlite3.Error: It is no database.
    """
    # SQLite opens its logs too, and a FIFO would have it wait.
    logs = [path.with_name(path.name + ending) for ending in ("-journal", "-wal", "-shm")]
    for one in (path, *filter(os.path.lexists, logs)):
        if one.is_symlink() or not one.is_file():
            raise OSError(f"A database must be a regular file, but {str(one)!r} is not.")
    database = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)
    database.text_factory = lambda data: data.decode(errors="replace")
    # Views and triggers of the database must call no function that does more than compute.
    database.execute("PRAGMA trusted_schema = OFF")
    return database


def read_database(path: Path, problems: list[str]) -> Iterator[SourceRun]:
    """Yield the runs of a database, without deleted ones.

    Artifacts are taken from `mlruns` or `mlartifacts` beside the database.

    Raises:
        ImportRefusedError: The database cannot be read.
    """
    try:
        with closing(open_database(path)) as database:
            database.row_factory = sqlite3.Row
            rows = database.execute(
                "SELECT runs.*, experiments.name AS project FROM runs JOIN experiments"
                " USING (experiment_id) WHERE runs.lifecycle_stage != 'deleted'"
                " ORDER BY start_time, run_uuid"
            )
            for row in rows:
                yield _run_of_database(path, database, dict(row))
    except sqlite3.Error as error:
        problems.append(f"{path} cannot be read to its end: {error}")
    except OSError as error:
        raise ImportRefusedError(str(error)) from error


def _run_of_database(path: Path, database: sqlite3.Connection, facts: dict[str, Any]) -> SourceRun:
    run_id = str(facts["run_uuid"])

    def read(run: SourceRun, files: RunFiles) -> Iterator[records.AnyRecord]:
        def rows(columns: str, table: str, order: str) -> Iterator[Any]:
            # The names are the lines below, none comes from the store.
            query = f"SELECT {columns} FROM {table} WHERE run_uuid = ? ORDER BY {order}"  # noqa: S608
            try:
                yield from database.execute(query, (run_id,))
            except sqlite3.Error as error:
                run.problems.append(f"The table {table} cannot be read to its end: {error}")

        tags = {row[0]: row[1] for row in rows("key, value", "tags", "key")}
        run.hparams = {
            row[0]: number_of(str(row[1])) for row in rows("key, value", "params", "key")
        }
        order = "timestamp, step, key"
        metrics = rows("key, value, timestamp, step, is_nan", "metrics", order)
        points = filter(None, map(partial(_point_of_row, run), metrics))
        below = f"{facts['experiment_id']}/{run_id}/artifacts"
        places = [(path.parent / name / below, "artifacts") for name in ("mlruns", "mlartifacts")]
        yield from _records(run, files, facts, str(facts["project"]), tags, points, places)

    return SourceRun(
        source=f"mlflow:{run_id}",
        name=str(facts.get("name") or run_id),
        created=_seconds(facts.get("start_time")),
        read=read,
    )


def _point_of_row(run: SourceRun, row: Any) -> _Point | None:
    try:
        value = float("nan") if row[4] else float(row[1])
        if abs(value) == _LARGEST:
            value *= 2
        return _Point(int(row[2]), max(int(row[3]), 0), str(row[0]), value)
    except (TypeError, ValueError):
        run.problems.append(f"A value of {row[0]!r:.80} is damaged: {row[1]!r:.80}")
        return None


def _records(
    run: SourceRun,
    files: RunFiles,
    facts: dict[str, Any],
    project: str,
    tags: dict[str, Any],
    points: Iterator[_Point],
    places: list[tuple[Path, str]],
) -> Iterator[records.AnyRecord]:
    """Yield the records of a run of either store."""
    yield started(run.created)
    yield from _reports(points)
    for store, prefix in places:
        yield from _artifacts(run, files, store, prefix)
    location = str(facts.get("artifact_uri") or "")
    is_here = any(store.is_dir() for store, _ in places)
    if not is_here and location and not _is_empty_place(location, places):
        run.problems.append(f"Artifacts at {location} are outside of the store")
    metadata = {"project": project, "tags": tags, "user": facts.get("user_id")}
    yield records.RunMetadataSet(time=run.created, metadata=metadata)
    status, ended = facts.get("status"), _seconds(facts.get("end_time")) or run.created
    if status == "FINISHED":
        yield records.AttemptFinished(time=ended, outcome="completed")
    elif status in ("FAILED", "KILLED"):
        error = f"MLflow has the status {status} for the run."
        yield records.AttemptFinished(time=ended, outcome="error", error=error)


def _is_empty_place(location: str, places: list[tuple[Path, str]]) -> bool:
    """Return whether a place of artifacts is in the store, where nothing was put."""
    if "://" in location and not location.startswith("file://"):
        return location.startswith("mlflow-artifacts:")
    return any(location.endswith("/".join(store.parts[-3:])) for store, _ in places)


def _reports(points: Iterator[_Point]) -> Iterator[records.AnyRecord]:
    """Yield a row for all values of the same time and step; a name repeats in a further one."""
    place: tuple[int, int] | None = None
    rows: dict[str, dict[str, Any]] = {}
    end = _Point(-1, -1, "", 0.0)
    for time_ms, step, name, value in chain(points, [end]):
        group = SYSTEM_GROUP if name.startswith(_SYSTEM) else GROUP
        if place is not None and (place != (time_ms, step) or name in rows.get(group, ())):
            for one, metrics in rows.items():
                yield records.MetricsReported(
                    time=max(place[0], 0) / 1000, group=one, steps_completed=place[1],
                    metrics=metrics,
                )  # fmt: skip
            rows = {}
        place = (time_ms, step)
        if name:
            rows.setdefault(group, {})[name] = records.encode_float(value)


def _artifacts(
    run: SourceRun, files: RunFiles, store: Path, prefix: str
) -> Iterator[records.AnyRecord]:
    for link in links_below(store):
        run.problems.append(f"The artifact {link!r} is a link, which is not followed")
    for name in files_below(store):
        try:
            file = files.copy(store, name, f"{prefix}/{name}")
        except (OSError, ValueError) as error:
            run.problems.append(f"The artifact {name!r} cannot be read: {error}")
            continue
        image = IMAGE_FILE.fullmatch(name) if prefix == "artifacts" else None
        kind = "image" if image else "file" if "compressed" in name else kind_of(file.media_type)
        yield records.MediaReported(
            time=run.created,
            group=GROUP,
            steps_completed=int(image["step"]) if image else 0,
            # MLflow writes one of these characters for a slash.
            name=re.sub("[~#]", "/", image["name"]) if image else name,
            kind=kind,
            files=[file],
        )


def _directories(root: Path) -> list[Path]:
    """Return the directories with facts in a directory, or with metrics of a run that lost them."""
    children = (path for path in root.iterdir()) if root.is_dir() else ()
    return sorted(
        path
        for path in children
        if not path.is_symlink() and ((path / "meta.yaml").exists() or (path / "metrics").is_dir())
    )


def _read_below(root: Path, name: str, max_bytes: int) -> bytes:
    with opened_directory(root) as store, open_regular_below(store, check_file_path(name)) as file:
        return read_limited(file, max_bytes)


def _facts(directory: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return what `meta.yaml` says of an experiment, a run or a model; None if it is damaged."""
    try:
        return parse_yaml(_read_below(directory, "meta.yaml", _SMALL_FILE).decode())
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split())
        problems.append(f"{directory / 'meta.yaml'} cannot be read: {told}")
        return None


def _seconds(time_ms: Any) -> float:
    try:
        return max(float(time_ms), 0.0) / 1000
    except (TypeError, ValueError):
        return 0.0


def number_of(text: str) -> Any:
    """Return a parameter as a number if it is the text of one, so that lists can sort by it."""
    for kind in (int, float):
        with suppress(ValueError):
            number = kind(text)
            if str(number) == text and abs(number) < 2**53:
                return number
    return text
