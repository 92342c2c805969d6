"""Reader of Trackio's local store: an SQLite database for each project, and `media` beside them."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from paceline._base import journal_records as records
from paceline.importers._mlflow_stores import open_database, table_names
from paceline.importers._run_writer import (
    GROUP,
    SYSTEM_GROUP,
    ImportRefusedError,
    RunFiles,
    SourceRun,
    started,
)

_TYPE, _MARK = "_type", "trackio."
_NON_FINITE = {"NaN", "Infinity", "-Infinity"}
_FILE_KINDS = {"image": "image", "audio": "audio", "video": "video", "html": "html"}
# Earlier releases know runs by their names alone, and neither alerts nor the system.
_ID = "COALESCE(run_id, run_name)"


def is_database(path: Path) -> bool:
    """Return whether a file is the SQLite database of a project of Trackio."""
    return {"metrics", "configs"} <= table_names(path)


def databases(path: Path) -> list[Path]:
    """Return the databases of Trackio at a path or in it, sorted."""
    if path.is_file():
        return [path] if is_database(path) else []
    return [each for each in sorted(path.glob("*.db")) if is_database(each)]


def read_store(path: Path, problems: list[str]) -> Iterator[SourceRun]:
    """Yield the runs of a store or of one of its databases.

    Raises:
        ImportRefusedError: A database cannot be read.
    """
    for place in databases(path):
        try:
            with closing(open_database(place)) as database:
                yield from _Project(place, database).runs()
        except sqlite3.Error as error:
            problems.append(f"{place} cannot be read to its end: {error}")
        except OSError as error:
            raise ImportRefusedError(str(error)) from error


class _Project:
    """A project: its open database, and the directory that media are below."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self._name = path.stem
        self._media = path.parent / "media"
        self._database = database
        # A view could compute for ever.
        self._tables = table_names(path)
        columns = {row[1] for row in database.execute("PRAGMA table_info(metrics)")}
        self._id = _ID if "run_id" in columns else "run_name"

    def runs(self) -> Iterator[SourceRun]:
        """Yield the runs in the order in which they began."""
        query = f"""
            SELECT run, run_name, MIN(begun) FROM (
              SELECT {self._id} AS run, run_name, timestamp AS begun FROM metrics UNION ALL
              SELECT {self._id}, run_name, created_at FROM configs
            ) GROUP BY run ORDER BY 3, 1
        """  # noqa: S608 (the expression is one of the two above)
        for run, name, begun in self._database.execute(query).fetchall():
            yield SourceRun(
                source=f"trackio:{self._name}/{run}",
                name=str(name),
                created=_seconds(begun),
                read=partial(self._records, str(run)),
            )

    def _rows(self, run: str, made: SourceRun, columns: str, table: str) -> Iterator[Any]:
        if table not in self._tables:
            return
        query = f"SELECT {columns} FROM {table} WHERE {self._id} = ? ORDER BY id"  # noqa: S608
        try:
            yield from self._database.execute(query, (run,))
        except sqlite3.Error as error:
            made.problems.append(f"The table {table} cannot be read to its end: {error}")

    def _records(self, run: str, made: SourceRun, files: RunFiles) -> Iterator[records.AnyRecord]:
        yield started(made.created)
        last = made.created
        for begun, step, content in self._rows(run, made, "timestamp, step, metrics", "metrics"):
            last = max(last, _seconds(begun))
            yield from self._reports(made, files, _seconds(begun), int(step), content)
        rows = self._rows(run, made, "timestamp, metrics", "system_metrics")
        for number, (begun, content) in enumerate(rows):
            if metrics := records.encode_metrics(_values(made, content)):
                yield records.MetricsReported(
                    time=_seconds(begun), group=SYSTEM_GROUP, steps_completed=number,
                    metrics=metrics,
                )  # fmt: skip
        yield from self._alerts(run, made)
        for [content] in self._rows(run, made, "config", "configs"):
            config = _values(made, content)
            facts = {"project": self._name, "group": config.get("_Group")}
            facts["user"] = config.get("_Username")
            yield records.RunMetadataSet(time=made.created, metadata=facts)
            made.hparams = {name: each for name, each in config.items() if name[:1] != "_"}
        # The store does not say how a run has ended.
        yield records.AttemptFinished(time=last, outcome="completed")

    def _reports(
        self, made: SourceRun, files: RunFiles, time: float, step: int, content: Any
    ) -> Iterator[records.AnyRecord]:
        """Yield the metrics and the media of a row."""
        metrics: dict[str, Any] = {}
        for name, value in _values(made, content).items():
            kind = str(value.get(_TYPE)) if isinstance(value, dict) else ""
            if not kind.startswith(_MARK):
                metrics[name] = value
                continue
            try:
                shown = self._media_of(kind.removeprefix(_MARK), name, step, value, files)
            except (KeyError, OSError, TypeError, ValueError) as error:
                made.problems.append(f"{name!r:.80} at step {step} cannot be read: {error}")
                continue
            yield records.MediaReported(
                time=time, group=GROUP, steps_completed=step, name=name, **shown
            )
        if metrics:
            yield records.MetricsReported(
                time=time,
                group=GROUP,
                steps_completed=step,
                metrics=records.encode_metrics(metrics),
            )

    def _media_of(
        self, kind: str, name: str, step: int, value: dict[str, Any], files: RunFiles
    ) -> dict[str, Any]:
        """Return kind and content of media.

        Raises:
            KeyError, TypeError, ValueError: They have another shape, or their file lies elsewhere.
            OSError: Their file cannot be read.
        """
        if kind == "histogram":
            bins = [float(each) for each in value["bins"]]
            counts = [float(each) for each in value["values"]]
            return {"kind": "histogram", "value": {"bins": bins, "counts": counts}}
        if kind == "markdown":
            return {"kind": "text", "value": str(value["_value"])}
        if kind == "table":
            rows = [dict(row) for row in value["_value"]]
            columns = list(dict.fromkeys(column for row in rows for column in row))
            cells = [[row.get(column) for column in columns] for row in rows]
            data = json.dumps({"columns": columns, "rows": cells}).encode()
            facts = {"columns": len(columns), "rows": len(rows)}
            return {"kind": "table", "files": [files.add_media(name, step, data, ".json", **facts)]}
        path, caption = str(value["file_path"]), value.get("caption")
        file = files.copy(self._media, path, f"media/{path}", caption and str(caption))
        return {"kind": _FILE_KINDS.get(kind, "file"), "files": [file]}

    def _alerts(self, run: str, made: SourceRun) -> Iterator[records.AnyRecord]:
        for begun, title, text, level in self._rows(
            run, made, "timestamp, title, text, level", "alerts"
        ):
            yield records.AlertRaised(
                time=_seconds(begun), title=str(title), description=str(text or ""),
                level=level if level in records.ALERT_LEVELS else "warn",
            )  # fmt: skip


def _values(made: SourceRun, content: Any) -> dict[str, Any]:
    """Return the object of a row, with numbers in place of the words for those JSON has not."""
    try:
        found = json.loads(content)
        if not isinstance(found, dict):
            raise TypeError("it is no object")
    except (RecursionError, TypeError, ValueError) as error:
        made.problems.append(f"A row is damaged: {error}")
        return {}
    return {
        name: float(value) if isinstance(value, str) and value in _NON_FINITE else value
        for name, value in found.items()
    }


def _seconds(text: Any) -> float:
    """Return the time of an ISO text, in seconds since the epoch; 0 for what is none."""
    try:
        found = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
        aware = found if found.tzinfo else found.replace(tzinfo=timezone.utc)
        return max(aware.timestamp(), 0.0)
    except (OverflowError, ValueError):
        return 0.0
