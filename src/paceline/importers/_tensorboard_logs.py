"""Reader of TensorBoard log directories: new events as records, also while they are written."""

import json
import os
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeGuard

from paceline._base.files import open_regular_below, opened_directory
from paceline._base.imports import required_library
from paceline._base.journal_records import AnyRecord, MediaReported, MetricsReported, encode_float
from paceline.importers._run_writer import RunFiles

_EVENT_FILE = ".tfevents."
_GROUP = "training"
# Frames of a record: length, checksum of the length; the content; checksum of the content.
_HEAD, _FOOT = struct.Struct("<QI"), struct.Struct("<I")
# A damaged or forged length must not fill the memory.
_MAX_EVENT_BYTES = 256 * 1024 * 1024
# Scalars of one step within this time become one row.
_SAME_REPORT_S = 1.0
_HPARAMS_TAG = "_hparams_/session_start_info"
_SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".wav"}


def _part(name: str) -> Any:
    """Return a module of TensorBoard."""
    return required_library(
        f"tensorboard.{name}", "The reader of event files", "paceline[tensorboard]"
    )


def is_event_file(name: str) -> bool:
    """Return whether a file of this name is one of TensorBoard's event files."""
    return _EVENT_FILE in name


def log_directories(root: Path) -> list[Path]:
    """Return `root` and the directories below it that have event files, without links, sorted."""
    found = []
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = [name for name in folders if not os.path.islink(os.path.join(folder, name))]
        if any(map(is_event_file, names)):
            found.append(Path(folder))
    return sorted(found)


class LogDirectoryReader:
    """Follows the event files of one directory, which may still be written to.

    Regular files below the directory are read; links are not followed, and nothing waits.

    Args:
        directory: The log directory.
        files: Takes up images and audio.

    Attributes:
        hparams: Hyperparameters that were logged for the HParams dashboard; None without any.
        problems: What could not be read, a sentence each.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path, files: RunFiles) -> None:
        self._event = _part("compat.proto.event_pb2").Event
        self._migrate = _part("data_compat").migrate_event
        self._migrate_class = _part("dataclass_compat").migrate_event
        self._masked_crc32c = _part("compat.tensorflow_stub.pywrap_tensorflow").masked_crc32c
        self._directory = directory
        self._files = files
        self._offsets: dict[str, int] = {}
        self._metadata: dict[str, dict[str, Any]] = {}
        self.hparams: dict[str, Any] | None = None
        self.problems: list[str] = []

    def event_files(self) -> list[str]:
        """Return the names of the event files, in the order of their times."""
        try:
            return sorted(filter(is_event_file, os.listdir(self._directory)))
        except FileNotFoundError:
            return []

    def read(self) -> Iterator[AnyRecord]:
        """Yield records of the events since the last call; take them all, or ask again.

        A record that is not yet complete comes with a later call.
        """
        for name in self.event_files():
            row: MetricsReported | None = None
            for record in self._records(name):
                if row is not None and _belongs_to(record, row):
                    row.metrics.update(record.metrics)
                    continue
                if row is not None:
                    yield row
                row = record if isinstance(record, MetricsReported) else None
                if row is None:
                    yield record
            if row is not None:
                yield row

    def finish(self) -> None:
        """Note files that end within a record as problems; for directories of ended runs."""
        for name, offset in self._offsets.items():
            path = self._directory / name
            if offset >= 0 and path.exists() and path.stat().st_size > offset:
                self.problems.append(f"{path} ends within the event at byte {offset}")

    def _records(self, name: str) -> Iterator[AnyRecord]:
        metadata = self._metadata.setdefault(name, {})
        for data in self._events(name):
            try:
                event = self._event.FromString(data)
            except Exception as error:  # protobuf's own class depends on its back end
                self.problems.append(f"{self._directory / name}: an event is damaged: {error}")
                continue
            step, time = max(event.step, 0), max(event.wall_time, 0.0)
            values = event.summary.value
            if values and all(value.HasField("simple_value") for value in values):
                # Most events: one scalar, for which TensorBoard's migration would cost ten times.
                metrics = {v.tag: encode_float(v.simple_value) for v in values if v.tag}
                if metrics:
                    yield _row(time, step, metrics)
                continue
            for migrated in self._migrate_class(self._migrate(event), metadata):
                for value in migrated.summary.value:
                    yield from self._of_value(value, metadata, time, step)

    def _events(self, name: str) -> Iterator[bytes]:
        """Yield the whole events of a file after those of the last call."""
        offset = self._offsets.get(name, 0)
        if offset < 0:
            return
        try:
            with (
                opened_directory(self._directory) as directory,
                open_regular_below(directory, name) as file,
            ):
                size = os.fstat(file.fileno()).st_size
                if size < offset:
                    self._stop(name, f"was cut off from {offset} to {size} bytes while it was read")
                    return
                with os.fdopen(os.dup(file.fileno()), "rb") as buffered:
                    yield from self._frames(name, buffered, offset)
        except OSError as error:
            if name not in self._offsets:
                self._stop(name, f"cannot be read: {error.strerror}")

    def _frames(self, name: str, file: IO[bytes], offset: int) -> Iterator[bytes]:
        # Lengths repeat, and the checksum is computed in Python.
        checksum_of = lru_cache(self._masked_crc32c)
        file.seek(offset)
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            if checksum_of(head[:8]) != checksum or length > _MAX_EVENT_BYTES:
                # The place of the next event is unknown.
                self._stop(name, f"is damaged from byte {offset} on")
                return
            body = file.read(length + _FOOT.size)
            if len(body) < length + _FOOT.size:
                return
            data = body[:length]
            offset += len(head) + len(body)
            self._offsets[name] = offset
            if self._masked_crc32c(data) == _FOOT.unpack(body[length:])[0]:
                yield data
            else:
                self.problems.append(
                    f"{self._directory / name}: the event that ends at byte {offset} is damaged"
                )

    def _stop(self, name: str, problem: str) -> None:
        self._offsets[name] = -1
        self.problems.append(f"{self._directory / name} {problem}")

    def _of_value(
        self, value: Any, metadata: dict[str, Any], time: float, step: int
    ) -> Iterator[AnyRecord]:
        plugin = (metadata.get(value.tag) or value.metadata).plugin_data
        if value.tag == _HPARAMS_TAG:
            self.hparams = {**(self.hparams or {}), **_logged_hparams(plugin.content)}
        if not value.tag or not value.HasField("tensor"):
            return
        try:
            array = _part("util.tensor_util").make_ndarray(value.tensor)
            if plugin.plugin_name == "scalars":
                yield _row(time, step, {value.tag: encode_float(float(array.reshape(-1)[0]))})
            elif (media := self._media(plugin.plugin_name, value.tag, step, array)) is not None:
                kind, files, content = media
                yield MediaReported(
                    time=time, group=_GROUP, steps_completed=step, name=value.tag, kind=kind,
                    files=files, value=content,
                )  # fmt: skip
        except (ValueError, TypeError, IndexError) as error:
            self.problems.append(f"{self._directory}: {value.tag!r} at step {step}: {error}")

    def _media(self, plugin: str, tag: str, step: int, array: Any) -> tuple[str, Any, Any] | None:
        if plugin == "images":
            width, height, *images = array.reshape(-1).tolist()
            facts = {"width": int(width), "height": int(height)}
            return "image", self._contents(tag, step, images, ".png", facts), None
        if plugin == "audio":
            sounds = [pair[0] for pair in array.reshape(-1, array.shape[-1]).tolist()]
            return "audio", self._contents(tag, step, sounds, ".wav", {}), None
        if plugin == "histograms":
            if not len(array):
                return None
            rows = array.tolist()
            bins = [row[0] for row in rows] + [rows[-1][1]]
            return "histogram", [], {"bins": bins, "counts": [row[2] for row in rows]}
        if plugin == "text":
            texts = array.reshape(-1).tolist()
            return "text", [], "\n".join(text.decode(errors="replace") for text in texts)
        return None

    def _contents(
        self, tag: str, step: int, contents: list[bytes], suffix: str, facts: dict[str, Any]
    ) -> list[Any]:
        return [
            self._files.add_media(
                tag,
                step,
                data,
                next((end for start, end in _SUFFIXES.items() if data.startswith(start)), suffix),
                index=index,
                **facts,
            )
            for index, data in enumerate(contents)
        ]


def _row(time: float, step: int, metrics: dict[str, Any]) -> MetricsReported:
    return MetricsReported(time=time, group=_GROUP, steps_completed=step, metrics=metrics)


def _belongs_to(later: AnyRecord, row: MetricsReported) -> TypeGuard[MetricsReported]:
    return (
        isinstance(later, MetricsReported)
        and row.steps_completed == later.steps_completed
        and abs(later.time - row.time) < _SAME_REPORT_S
        and row.metrics.keys().isdisjoint(later.metrics)
    )


def _logged_hparams(content: bytes) -> dict[str, Any]:
    to_json = required_library("google.protobuf.json_format", "The HParams reader", "protobuf")
    start = _part("plugins.hparams.plugin_data_pb2").HParamsPluginData.FromString(content)
    return dict(json.loads(to_json.MessageToJson(start.session_start_info)).get("hparams", {}))
