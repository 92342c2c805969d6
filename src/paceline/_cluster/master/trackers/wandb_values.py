"""Values that W&B's clients log, as records of a journal."""

import json
import mimetypes
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any

from paceline._base import journal_records as records
from paceline._base.run_directory import check_file_path
from paceline.importers._run_writer import GROUP, MAX_TIME_S, SYSTEM_GROUP

_MAX_KEY, _MAX_BINS = 1000, 10_000
MAX_INTEGER = 2**63 - 1
_NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}
_KINDS = {
    "image-file": "image",
    "images": "image",
    "images/separated": "image",
    "audio": "audio",
    "audio-file": "audio",
    "video-file": "video",
    "videos": "video",
    "table-file": "table",
    "partitioned-table": "table",
    "joined-table": "table",
    "html": "html",
    "html-file": "html",
    "plotly": "figure",
    "plotly-file": "figure",
    "histogram": "histogram",
}
_LISTS = ("images", "audio", "videos", "html", "plotly")


def parse_json(text: str) -> Any:
    """Return what a JSON text says, with all text in it made storable.

    Raises:
        ValueError: It is no JSON, or nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("The JSON is nested too deeply.") from error
    if records.is_too_deep(value):
        raise ValueError("The JSON is nested too deeply.")
    return storable(value)


def storable(value: Any) -> Any:
    """Return a JSON value without lone surrogates and numbers that no database has."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {storable(key): storable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [storable(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return next(name for name, each in _NON_FINITE.items() if str(each) == str(value))
    if type(value) is int and abs(value) > MAX_INTEGER:
        return float(value) if abs(value) < 10**300 else ("Infinity" if value > 0 else "-Infinity")
    return value


def records_of_line(line: Mapping[str, Any], step: int, time: float) -> list[records.AnyRecord]:
    """Return the records of a line of history: one of metrics, one for each medium."""
    metrics: dict[str, Any] = {}
    found: list[records.AnyRecord] = []
    for key, value in _flat(line, ""):
        if isinstance(value, dict) and "_type" in value:
            found.append(_media(key, value, step, time))
        elif value is not None:
            metrics[key] = _metric(value)
    if metrics:
        report = records.MetricsReported(
            time=time, group=GROUP, steps_completed=step, metrics=metrics
        )
        found.insert(0, report)
    return found


def system_record(
    line: Mapping[str, Any], step: int, time: float
) -> records.MetricsReported | None:
    """Return the record of a line of system metrics, None if it has no numbers."""
    metrics = {
        key.removeprefix("system."): float(value)
        for key, value in _flat(line, "")
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if not metrics:
        return None
    return records.MetricsReported(
        time=time, group=SYSTEM_GROUP, steps_completed=step, metrics=metrics
    )


def step_of(line: Mapping[str, Any], default: int) -> int:
    """Return the step of a line."""
    step = line.get("_step")
    return step if type(step) is int and 0 <= step <= MAX_INTEGER else default


def time_of(line: Mapping[str, Any], default: float) -> float:
    """Return when a line was logged, in seconds since the epoch."""
    time = line.get("_timestamp")
    is_time = isinstance(time, (int, float)) and 0 <= time <= MAX_TIME_S
    return float(time) if is_time and time is not None else default


def _flat(line: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in line.items():
        if prefix == "" and name in ("_step", "_timestamp", "_runtime", "_wandb"):
            continue
        key = f"{prefix}{name}"
        if not name or name == records.NON_FINITE_KEY or len(key) > _MAX_KEY:
            continue
        if isinstance(value, dict) and "_type" not in value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _metric(value: Any) -> Any:
    if isinstance(value, str) and value in _NON_FINITE:
        return records.encode_float(_NON_FINITE[value])
    if isinstance(value, list):
        return ["null" if item is None else _metric(item) for item in value]
    if isinstance(value, dict):
        return {
            key or "_": "null" if each is None else _metric(each) for key, each in value.items()
        }
    return value


def _media(name: str, raw: dict[str, Any], step: int, time: float) -> records.MediaReported:
    kind = _KINDS.get(str(raw["_type"]), "file")
    files, value = [*_media_files(raw)], _metric(raw)
    if kind == "histogram":
        value = _metric(_histogram(raw))
    return records.MediaReported(
        time=time,
        group=GROUP,
        steps_completed=step,
        name=name,
        kind=kind,
        files=files,
        value=value,
    )


def _media_files(raw: Mapping[str, Any]) -> Iterator[records.MediaFile]:
    listed = next((raw[name] for name in _LISTS if isinstance(raw.get(name), list)), None)
    if listed is None and isinstance(raw.get("filenames"), list):
        listed = [{"path": path} for path in raw["filenames"]]
    captions = raw.get("captions")
    for index, one in enumerate([raw] if listed is None else listed):
        if not isinstance(one, dict) or not isinstance(one.get("path"), str):
            continue
        caption = one.get("caption")
        if isinstance(captions, list) and index < len(captions):
            caption = captions[index]
        facts = {
            key: one.get(key, raw.get(key))
            for key in ("width", "height", "ncols", "nrows")
            if type(one.get(key, raw.get(key))) is int
        }
        with suppress(ValueError):
            yield records.MediaFile(
                path=check_file_path(one["path"]),
                digest=str(one.get("sha256", "")),
                size=max(one["size"], 0) if type(one.get("size")) is int else 0,
                media_type=media_type_of(one["path"]),
                caption=caption if isinstance(caption, str) and caption else None,
                facts=facts,
            )


def media_type_of(path: str) -> str:
    """Return the media type that a path's ending stands for."""
    return mimetypes.guess_type(path)[0] or "application/octet-stream"


def _histogram(raw: Mapping[str, Any]) -> dict[str, Any]:
    bins, packed = raw.get("bins"), raw.get("packedBins")
    if not isinstance(bins, list) and isinstance(packed, dict):
        first, width, count = (packed.get(name) for name in ("min", "size", "count"))
        numbers = all(isinstance(each, (int, float)) for each in (first, width, count))
        if numbers and 0 <= count <= _MAX_BINS:  # type: ignore[operator]
            bins = [first + width * i for i in range(int(count) + 1)]  # type: ignore
    counts = raw.get("values")
    return {
        "bins": bins if isinstance(bins, list) else [],
        "counts": counts if isinstance(counts, list) else [],
    }
