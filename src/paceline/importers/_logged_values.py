"""Values that a tracker's client logged at a step, as records: numbers, and media with files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline._base.files import open_regular_below, opened_directory, read_limited
from paceline._base.journal_records import (
    AnyRecord,
    MediaFile,
    MediaReported,
    MetricsReported,
    encode_metrics,
)
from paceline._base.run_directory import check_file_path
from paceline.importers._run_files import RunFiles

GROUP, SYSTEM_GROUP = "training", "system"
_KINDS = ("image", "audio", "video", "html", "table")
_MAX_TABLE_BYTES = 64 * 1024 * 1024
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def decoded_json(text: str | bytes) -> Any:
    """Return a client's JSON, with another character for halves of pairs, which no file takes.

    Raises:
        ValueError: It is no JSON.
    """
    value = json.loads(text)
    if (b"\\ud" if isinstance(text, bytes) else "\\ud") in text.lower():  # type: ignore[operator]
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


class LoggedValues:
    """Turns the values of one run into records.

    Args:
        files: Takes up the files of media.
        store: The directory of the client's files, below which no link is followed.
        problems: Takes what could not be read, a sentence each.
    """

    def __init__(self, files: RunFiles, store: Path, problems: list[str]) -> None:
        self._files = files
        self._store = store
        self._problems = problems

    def records(
        self, values: Mapping[str, Any], step: int, time: float, group: str = GROUP
    ) -> Iterator[AnyRecord]:
        """Yield the records of what was logged at a step: one of all numbers, and the media."""
        numbers: dict[str, Any] = {}
        media: list[tuple[str, dict[str, Any]]] = []
        for name, value in values.items():
            if isinstance(value, dict) and isinstance(value.get("_type"), str):
                media.append((name, value))
            elif value is not None and name:
                numbers[name] = _WORDS.get(value, value) if isinstance(value, str) else value
        if numbers and (metrics := self._encoded(numbers, step)):
            yield MetricsReported(time=time, group=group, steps_completed=step, metrics=metrics)
        for name, value in media:
            try:
                kind, found, content = self._media(name, step, value)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                self._problems.append(f"{name!r} at step {step} could not be read: {error}")
                continue
            yield MediaReported(
                time=time, group=group, steps_completed=step, name=name, kind=kind, files=found,
                value=content,
            )  # fmt: skip

    def _encoded(self, numbers: dict[str, Any], step: int) -> dict[str, Any]:
        try:
            return encode_metrics(numbers)
        except (TypeError, ValueError):
            pass
        fit: dict[str, Any] = {}
        for name, value in numbers.items():
            try:
                fit |= encode_metrics({name: value})
            except (TypeError, ValueError) as error:
                self._problems.append(f"The value at step {step} has no place here: {error}")
        return fit

    def _media(
        self, name: str, step: int, value: dict[str, Any]
    ) -> tuple[str, list[MediaFile], Any]:
        kind = value["_type"].removeprefix("trackio.").removesuffix("-file")
        if kind == "histogram":
            return "histogram", [], _histogram(value)
        if kind == "images/separated":
            captions = value.get("captions") or [None] * len(value["filenames"])
            pairs = zip(value["filenames"], captions, strict=True)
            return "image", [self._copy(path, caption) for path, caption in pairs], None
        if kind == "markdown" and isinstance(value.get("_value"), str):
            return "text", [], value["_value"]
        if kind == "table":
            return "table", [self._table(name, step, value)], None
        kind = "figure" if kind == "plotly" else kind if kind in _KINDS else "file"
        return (
            kind,
            [self._copy(value.get("path") or value["file_path"], value.get("caption"))],
            None,
        )

    def _copy(self, path: str, caption: str | None) -> MediaFile:
        path = path if path.startswith("media/") else f"media/{path}"
        return self._files.copy(self._store, path, path, caption)

    def _table(self, name: str, step: int, value: dict[str, Any]) -> MediaFile:
        if "_value" in value:
            rows = value["_value"]
            columns = list(dict.fromkeys(key for row in rows for key in row))
            cells = [[row.get(key) for key in columns] for row in rows]
        else:
            with (
                opened_directory(self._store) as directory,
                open_regular_below(directory, check_file_path(value["path"])) as file,
            ):
                content = decoded_json(read_limited(file, _MAX_TABLE_BYTES))
            columns, cells = content["columns"], content["data"]
        data = json.dumps({"columns": columns, "rows": cells}).encode()
        return self._files.add_media(name, step, data, ".table.json")


def _histogram(value: dict[str, Any]) -> dict[str, Any]:
    counts = value["values"]
    if "bins" in value:
        return {"bins": value["bins"], "counts": counts}
    packed = value["packedBins"]
    bins = [packed["min"] + packed["size"] * index for index in range(len(counts) + 1)]
    return {"bins": bins, "counts": counts}
