"""Checks of records from jobs: sizes, ranges, depths and names."""

import msgspec

from paceline._base import journal_records as records
from paceline._base.run_directory import RunInfo, check_file_path
from paceline._cluster.messages.runner_messages import MAX_TIME_S

_MAX_INTEGER = 2**63 - 1
_MAX_RANK = 2**31 - 1
_MAX_TEXT = 4096
_MAX_CAUSES = 1000
_NON_FINITE = [{records.NON_FINITE_KEY: text} for text in records.NON_FINITE]


def check_run_info(info: RunInfo) -> None:
    """Refuse a run with an impossible value; raises like `check_record`."""
    _check_range("created", info.created, MAX_TIME_S)
    _check_range("labels", len(info.labels), _MAX_CAUSES)
    for label in info.labels:
        _check_text("labels", label)
    for name, value in (("hparams", info.hparams), ("metadata", info.metadata)):
        _check_depth(name, value)
    if info.trial is not None:
        _check_depth("trial.config", info.trial.config)
        _check_depth("trial.hparams", info.trial.hparams)


def check_record(record: records.AnyRecord, number: int = 0) -> None:
    """Refuse a record with an impossible value.

    Args:
        record: The record.
        number: Its number in the journal, if it comes from there.

    Raises:
        ValueError: It has one; the message names it.
    """
    _check_range("time", record.time, MAX_TIME_S)
    _check_texts(record)
    _check_range("steps_completed", getattr(record, "steps_completed", 0), _MAX_INTEGER)
    if isinstance(record, records.MetricsReported):
        _check_metrics("metrics", record.metrics)
        _check_metrics("validation", record.validation)
    elif isinstance(record, records.MediaReported):
        _check_media(record)
    elif isinstance(record, (records.CheckpointStored, records.CheckpointFilesDeleted)):
        for name, size in record.resources.items():
            _check_range(f"resources[{name!r:.200}]", size, _MAX_INTEGER)
        _check_range("resources", sum(record.resources.values()), _MAX_INTEGER)
        _check_json("metadata", getattr(record, "metadata", None))
    elif isinstance(record, records.RunMetadataSet):
        _check_json("metadata", record.metadata)
    elif isinstance(record, records.AttemptStarted):
        _check_json("environment", record.environment)
        _check_range("restart_causes", len(record.restart_causes), _MAX_CAUSES)
        for cause in record.restart_causes:
            _check_text("restart_causes", cause)
        for name in ("attempt", "generation", "rank", "world_size"):
            _check_range(name, getattr(record, name), _MAX_RANK)
    elif isinstance(record, records.TimeSpent):
        for name, seconds in record.seconds.items():
            _check_range(f"seconds[{name!r:.200}]", seconds, MAX_TIME_S)
    elif isinstance(record, records.RecordsDropped):
        # Dropped records have smaller numbers than this record.
        _check_range("count", record.count, number)


def _check_media(record: records.MediaReported) -> None:
    if record.kind not in records.MEDIA_KINDS:
        raise ValueError(
            f"`kind` must be among {records.MEDIA_KINDS}, but got {record.kind!r:.200}."
        )
    _check_json("value", record.value)
    _check_json("files", msgspec.to_builtins(record.files))
    for file in record.files:
        check_file_path(file.path)
        _check_range("size", file.size, _MAX_INTEGER)


def _check_texts(record: records.AnyRecord) -> None:
    limit = records.MAX_STATUS if isinstance(record, records.StatusReported) else _MAX_TEXT
    for name in record.__struct_fields__:
        text = getattr(record, name)
        if isinstance(text, str):
            _check_text(name, text, limit)


def _check_text(name: str, text: str, limit: int = _MAX_TEXT) -> None:
    if len(text) > limit:
        raise ValueError(f"`{name}` must have at most {limit} characters, but has {len(text)}.")


def _check_range(name: str, value: float, limit: float) -> None:
    if not 0 <= value <= limit:
        raise ValueError(f"`{name}` must be from 0 to {limit}, but got {value:g}.")


def _check_depth(name: str, value: object) -> None:
    if records.is_too_deep(value):
        raise ValueError(f"`{name}` must not be nested more than {records.MAX_DEPTH} times.")


def _check_json(name: str, value: object) -> None:
    _check_depth(name, value)
    size = len(msgspec.json.encode(value))
    if size > records.MAX_METADATA_BYTES:
        raise ValueError(
            f"`{name}` must have at most {records.MAX_METADATA_BYTES} bytes as JSON, but has"
            f" {size}."
        )


def _check_metrics(name: str, metrics: object) -> None:
    """Refuse metrics outside the output of `encode_metrics`."""
    _check_depth(name, metrics)
    if isinstance(metrics, dict):
        _check_names(name, metrics)


def _check_names(name: str, metrics: dict[str, object]) -> None:
    for key, value in metrics.items():
        if not key or key == records.NON_FINITE_KEY:
            raise ValueError(
                f"`{name}` must have names that are not empty and not {records.NON_FINITE_KEY!r},"
                f" but has {key!r}."
            )
        if type(value) is not float:
            _check_metric(name, value)


def _check_metric(name: str, value: object) -> None:
    if value is None:
        raise ValueError(f"`{name}` must have numbers, texts, lists or dictionaries, but has null.")
    if isinstance(value, list):
        for item in value:
            _check_metric(name, item)
    elif isinstance(value, dict) and value not in _NON_FINITE:
        _check_names(name, value)
