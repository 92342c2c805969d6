"""Files and output of W&B runs, and the URLs by which clients write and read them."""

from collections.abc import Mapping
from datetime import datetime, timezone
from functools import partial
from posixpath import normpath
from typing import Any
from urllib.parse import quote

from sqlalchemy import Row

from paceline._base.run_directory import check_file_path
from paceline._cluster.master.store.reach import check_object
from paceline._cluster.master.store.run_files import get_file, list_files
from paceline._cluster.master.trackers.wandb_graphql import GraphqlError, page
from paceline._cluster.master.trackers.wandb_runs import Asked, encode_id

OWN_PATHS = ("artifacts/", "artifact-uploads/", "artifact-manifests/")
"""Where files of artifacts lie, beside those that a run saves."""
_MAX_ROWS = 10_000
_MAX_FILES = 10_000
Fields = dict[str, Any]


def iso_time(seconds: float) -> str:
    """Return a time as W&B writes it."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def stored_path(name: str) -> str:
    """Return where a file that a run saves is stored.

    Raises:
        GraphqlError: The name could lead out of the run's files.
    """
    try:
        path = check_file_path(name)
    except ValueError as error:
        raise GraphqlError(str(error)) from error
    return f"saved/{path}" if path.startswith(OWN_PATHS) else path


def signed_url(asked: Asked, method: str, trial_id: int, path: str) -> str:
    """Return the URL by which a client that sends no token writes or reads a file of a run.

    Raises:
        NotAllowedError: The sender may not write to the run.
    """
    # Nothing that comes by the URL says who sends it.
    check_object(asked.connection, "trial_id", trial_id, changes=method != "GET")
    target = f"/wandb-files/{trial_id}/{path}"
    query = asked.master.signed_urls.sign(method, target)
    return f"{asked.base_url}{quote(target)}?{query}"


def file_view(asked: Asked, row: Row[Any], name: str | None = None) -> Fields:
    """Return the fields of a file; `name` differs from its path if it belongs to an artifact."""
    url = signed_url(asked, "GET", row.trial_id, row.path)
    shown = row.path if name is None else name
    return {
        "__typename": "File",
        "id": encode_id("File", str(row.trial_id), row.path),
        "name": shown,
        "displayName": shown,
        "url": url,
        "directUrl": url,
        "sizeBytes": row.size,
        "storagePath": row.path,
        "mimetype": row.media_type,
        "updatedAt": iso_time(row.created_at),
        "digest": row.digest,
        "md5": "",
    }


def file_rows(asked: Asked, trial_id: int, arguments: Mapping[str, Any]) -> list[Row[Any]]:
    """Return rows of the files of a run that have certain names, or fit a pattern."""
    names = [normpath(name) for name in arguments.get("names") or () if isinstance(name, str)]
    if names:
        found = (get_file(asked.connection, trial_id, name) for name in names[:_MAX_FILES])
        return [row for row in found if row is not None]
    rows = list_files(asked.connection, trial_id, limit=_MAX_FILES)
    pattern = arguments.get("pattern")
    if isinstance(pattern, str) and pattern:
        parts = pattern.split("%")
        rows = [row for row in rows if _is_like(row.path, parts)]
    return [row for row in rows if not row.path.startswith(OWN_PATHS)]


def _is_like(path: str, parts: list[str]) -> bool:
    """Return whether a path has the parts of a pattern between its `%` one after another."""
    if len(parts) == 1:
        return path == parts[0]
    if not path.startswith(parts[0]) or not path[len(parts[0]) :].endswith(parts[-1]):
        return False
    place, end = len(parts[0]), len(path) - len(parts[-1])
    for part in parts[1:-1]:
        found = path.find(part, place, end)
        if found < 0:
            return False
        place = found + len(part)
    return True


def files_page(asked: Asked, trial_id: int, arguments: Mapping[str, Any]) -> Fields:
    """Return a page of the files of a run."""
    names = [name for name in arguments.get("names") or () if isinstance(name, str)]
    rows = file_rows(asked, trial_id, arguments)
    found = page(rows, arguments, partial(file_view, asked))
    if arguments.get("upload") or (names and not rows):
        missing = set(names) - {row.path for row in rows}
        found["edges"] += [{"node": _missing_file(asked, trial_id, each)} for each in missing]
    return found


def _missing_file(asked: Asked, trial_id: int, name: str) -> Fields:
    fields = dict.fromkeys(("directUrl", "mimetype", "updatedAt", "digest", "md5"))
    return fields | {
        "__typename": "File",
        "id": encode_id("File", str(trial_id), name),
        "name": name,
        "url": None,
        "sizeBytes": "0",
    }


def log_lines(asked: Asked, trial_id: int, arguments: Mapping[str, Any]) -> Fields:
    """Return a page of the output of a run."""
    last = arguments.get("last")
    if isinstance(last, int) and last > 0:
        lines = asked.master.logs.tail(trial_id, min(last, _MAX_ROWS))
    else:
        lines = asked.master.logs.read(trial_id, limit=_MAX_ROWS)

    def show(line: Any) -> Fields:
        level = "error" if line.stream == "stderr" else "info"
        shown = {"number": line.id, "timestamp": iso_time(line.time), "level": level}
        return shown | {"label": "", "line": line.text}

    return page([*lines], arguments, show, default=_MAX_ROWS)
