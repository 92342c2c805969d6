"""Reader of Trackio's local store: an SQLite database for each project, and files of media."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from paceline._base.journal_records import (
    ALERT_LEVELS,
    AlertRaised,
    AnyRecord,
    AttemptFinished,
    RunMetadataSet,
)
from paceline.importers._logged_values import GROUP, SYSTEM_GROUP, LoggedValues, decoded_json
from paceline.importers._mlflow_stores import open_database, table_names
from paceline.importers._run_files import RunFiles
from paceline.importers._run_writer import SourceRun, started


def databases(path: Path) -> list[Path]:
    """Return Trackio's databases: the file at a path, or those in a directory."""
    candidates = [path] if path.is_file() else sorted(path.glob("*.db"))
    return [one for one in candidates if {"metrics", "configs"} <= table_names(one)]


def read_databases(path: Path, problems: list[str]) -> Iterator[SourceRun]:
    """Yield the runs of Trackio's projects at a path.

    Args:
        path: A database, or the directory of all of them.
        problems: Takes what cannot be read.
    """
    for file in databases(path):
        try:
            with closing(open_database(file)) as database:
                columns = {row[1] for row in database.execute("PRAGMA table_info(metrics)")}
                # Earlier releases know a run by its name only.
                key = "run_id" if "run_id" in columns else "run_name"
                query = f"SELECT {key}, max(run_name), min(timestamp) FROM metrics GROUP BY {key}"  # noqa: S608
                for run, name, created in database.execute(query).fetchall():
                    yield SourceRun(
                        source=f"trackio:{file.stem}/{run}",
                        name=str(name),
                        created=_seconds(created),
                        read=partial(_read, file, database, key, run),
                    )
        except (OSError, sqlite3.Error) as error:
            problems.append(f"{file} cannot be read to its end: {error}")


def _read(
    file: Path, database: sqlite3.Connection, key: str, name: Any, run: SourceRun, files: RunFiles
) -> Iterator[AnyRecord]:
    def rows(columns: str, table: str) -> Iterator[Any]:
        # The names are those of this file, none comes from the store.
        query = f"SELECT {columns} FROM {table} WHERE {key} = ? ORDER BY id"  # noqa: S608
        try:
            yield from database.execute(query, (name,))
        except sqlite3.Error as error:
            run.problems.append(f"The table {table} cannot be read to its end: {error}")

    values = LoggedValues(files, file.parent, run.problems)
    yield started(run.created)
    step, now = 0, run.created
    for moment, at, content in rows("timestamp, step, metrics", "metrics"):
        step, now = max(_integer(at), 0), _seconds(moment) or now
        yield from values.records(_decoded(content, run), step, now, GROUP)
    tables = table_names(file)
    if "system_metrics" in tables:
        for moment, content in rows("timestamp, metrics", "system_metrics"):
            yield from values.records(_decoded(content, run), step, _seconds(moment), SYSTEM_GROUP)
    if "alerts" in tables:
        for moment, title, text, level in rows("timestamp, title, text, level", "alerts"):
            known = level if level in ALERT_LEVELS else "info"
            yield AlertRaised(
                time=_seconds(moment), title=str(title), description=str(text or ""), level=known
            )
    config = {k: v for (one,) in rows("config", "configs") for k, v in _decoded(one, run).items()}
    run.hparams = {name: value for name, value in config.items() if not name.startswith("_")}
    metadata = {
        "project": file.stem,
        "user": config.get("_Username"),
        "group": config.get("_Group"),
    }
    yield RunMetadataSet(time=now, metadata=metadata)
    # The store does not say how a run has ended.
    yield AttemptFinished(time=now, outcome="completed")


def _decoded(content: Any, run: SourceRun) -> dict[str, Any]:
    try:
        found = decoded_json(content)
    except (ValueError, TypeError):
        found = None
    if isinstance(found, dict):
        return found
    run.problems.append(f"A row is no JSON object: {content!r:.80}")
    return {}


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _seconds(text: Any) -> float:
    try:
        return max(datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp(), 0.0)
    except (ValueError, OverflowError):
        return 0.0
