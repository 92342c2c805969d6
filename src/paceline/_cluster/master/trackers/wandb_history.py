"""Stored rows of a W&B run as lines of history again."""

from collections.abc import Collection, Iterator
from typing import Any

from sqlalchemy import Connection, select

from paceline._base.journal_records import (
    AnyRecord,
    MediaReported,
    MetricsReported,
    decode_value,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.metric_rows_and_times import read_rows
from paceline._cluster.master.store.metric_series import visible_series_limits
from paceline._cluster.master.trackers.wandb_values import MAX_INTEGER, storable
from paceline.importers._run_writer import GROUP

MAX_KEYS = 10_000
"""Most metrics and media of a run; further ones are left out, and its log says so."""


def keys_of(record: AnyRecord) -> Collection[str]:
    """Return the names of metrics or media in a record."""
    if isinstance(record, MetricsReported):
        return record.metrics
    return [record.name] if isinstance(record, MediaReported) else []


def read_history(
    connection: Connection,
    trial_id: int,
    began: float,
    *,
    group: str = GROUP,
    first_step: int = 0,
    last_step: int | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Return rows of a run as its client logged them, the steps from first to last included."""
    rows: dict[int, dict[str, Any]] = {}
    prefix = "" if group == GROUP else "system."
    span = None if last_step is None else max(last_step - first_step + 1, 0)
    most = min((each for each in (span, limit) if each is not None), default=None)
    for row in read_rows(connection, trial_id, group, after_step=first_step - 1, limit=most):
        if last_step is None or row.step <= last_step:
            facts = {"_step": row.step, "_timestamp": row.time, "_runtime": row.time - began}
            values = {f"{prefix}{key}": _shown(value) for key, value in row.metrics.items()}
            rows[row.step] = values | (facts if group == GROUP else facts | {"_wandb": True})
    if group == GROUP:
        for medium in _read_media(connection, trial_id, first_step, last_step):
            at = medium.steps_completed
            facts = {"_step": at, "_timestamp": medium.time, "_runtime": medium.time - began}
            rows.setdefault(at, facts)[medium.name] = _shown_media(medium)
    return [rows[step] for step in sorted(rows)][:limit]


def history_keys(connection: Connection, trial_id: int) -> dict[str, Any]:
    """Return what W&B calls the keys of a run: the metrics with their last values."""
    series, media = tables.series.c, tables.media.c
    columns = (series.key, series.num_points, series.num_numbers, series.last)
    where = (series.trial_id == trial_id, series.group == GROUP)
    query = select(*columns, series.last_step).where(*where).order_by(series.attempt)
    keys: dict[str, Any] = {}
    newest = -1
    for row in connection.execute(query):
        kind = "number" if row.num_numbers else "string"
        keys[row.key] = _key_facts(kind, row.num_points, _shown(decode_value(row.last)))
        newest = max(newest, row.last_step)
    shown = (media.name, media.kind, media.steps_completed)
    chosen = select(*shown).where(media.trial_id == trial_id, media.group == GROUP)
    for name, kind, step in connection.execute(chosen.distinct()):
        keys[name] = _key_facts(kind, 1, None)
        newest = max(newest, step)
    return {"sets": [], "keys": keys, "lastStep": newest}


def _key_facts(kind: str, count: int, last: Any) -> dict[str, Any]:
    types = [{"type": kind, "count": count}]
    return {"typeCounts": types, "monotonic": False, "previousValue": last}


def _read_media(
    connection: Connection, trial_id: int, first_step: int, last_step: int | None
) -> Iterator[Any]:
    media, limits = tables.media.c, visible_series_limits(connection, trial_id)
    query = select(tables.media).where(
        media.trial_id == trial_id,
        media.group == GROUP,
        media.steps_completed >= first_step,
        media.steps_completed <= (MAX_INTEGER if last_step is None else last_step),
    )
    for row in connection.execute(query.order_by(media.id)):
        highest = limits.get(row.attempt)
        if highest is None or row.steps_completed <= highest:
            yield row


def _shown(value: Any) -> Any:
    """Return a stored value as JSON that W&B's clients read: NaN and infinities as texts."""
    return storable(decode_value(value))


def _shown_media(row: Any) -> Any:
    value = _shown(row.value)
    if row.kind == "histogram" and isinstance(value, dict):
        return {"_type": "histogram", "bins": value["bins"], "values": value["counts"]}
    return value
