"""Slots that were used: by month, user, project and pool, also by experiments that were deleted."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import num_slots_of
from paceline._cluster.messages.master_models import Usage, UsageKey
from paceline._cluster.messages.runner_messages import DEFAULT_POOL

_KEYS = ("month", "user", "project_id", "pool")
_AMOUNTS = ("slot_s", "wait_s", "num_trials")
_Key = tuple[str, str, int, str]
_Amounts = tuple[float, float, int]


def month_of(moment: float) -> str:
    """Return the month of a time in seconds since the epoch, in UTC: `2026-11`."""
    return f"{datetime.fromtimestamp(moment, timezone.utc):%Y-%m}"


def beginning_of(month: str) -> float:
    """Return when a month begins, in seconds since the epoch."""
    return datetime.strptime(month, "%Y-%m").replace(tzinfo=timezone.utc).timestamp()


def next_month(month: str) -> str:
    """Return the month after another one."""
    return month_of(beginning_of(month) + 32 * 86400)


def read_usage(
    connection: Connection, since: str, until: str, by: Iterable[UsageKey]
) -> list[Usage]:
    """Return what was used in some months, those with most slot hours first.

    Args:
        connection: Shows the projects that count.
        since: The first month.
        until: The last month.
        by: What tells rows apart; the rest is summed up.
    """
    usage, projects = tables.usage.c, tables.projects.c
    chosen = select(tables.usage).where(usage.month.between(since, until))
    found = [(tuple(row[:4]), tuple(row[4:])) for row in connection.execute(chosen)]
    found += _used_by_attempts(connection, beginning_of(since), beginning_of(next_month(until)))
    names = {row.id: row.name for row in connection.execute(select(projects.id, projects.name))}
    wanted = set(by)
    sums: defaultdict[tuple[str | None, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for (month, user, project, pool), amounts in found:
        values = (month, user, names.get(project, str(project)), pool)
        key = tuple(v if k in wanted else None for k, v in zip(UsageKey, values, strict=True))
        _add(sums[key], amounts)
    return [
        Usage(
            **dict(zip((key.value for key in UsageKey), key, strict=True)),
            slot_hours=slot_s / 3600,
            wait_hours=wait_s / 3600,
            num_trials=int(num_trials),
        )
        for key, (slot_s, wait_s, num_trials) in sorted(
            sums.items(), key=lambda item: (-item[1][0], [part or "" for part in item[0]])
        )
    ]


def keep_usage(connection: Connection, experiment_id: int) -> None:
    """Keep what an experiment used, before its attempts are deleted."""
    sums: defaultdict[_Key, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for key, amounts in _used_by_attempts(connection, 0.0, time.time(), experiment_id):
        _add(sums[key], amounts)
    usage = tables.usage
    for key, amounts_now in sums.items():
        place = [usage.c[name] == value for name, value in zip(_KEYS, key, strict=True)]
        before = connection.execute(select(usage).where(*place)).first()
        if before is not None:
            _add(amounts_now, tuple(before[4:]))
            connection.execute(delete(usage).where(*place))
        values = dict(zip((*_KEYS, *_AMOUNTS), (*key, *amounts_now), strict=True))
        connection.execute(insert(usage).values(values))


def _add(sums: list[float], amounts: Iterable[float]) -> None:
    for index, amount in enumerate(amounts):
        sums[index] += amount


def _used_by_attempts(
    connection: Connection, since_s: float, until_s: float, experiment_id: int | None = None
) -> Iterator[tuple[_Key, _Amounts]]:
    """Yield what the attempts of runners used between two moments, month by month."""
    attempts, trials, experiments = tables.attempts.c, tables.trials.c, tables.experiments.c
    query = (
        select(
            attempts.slots, attempts.members, attempts.node_id, attempts.created_at,
            attempts.ended_at, attempts.number, trials.created_at.label("asked_at"),
            experiments.owner, experiments.project_id,
            experiments.config[("resources", "pool")].as_string().label("pool"),
        )
        .join(tables.trials, trials.id == attempts.trial_id)
        .join(tables.experiments, experiments.id == attempts.experiment_id)
        .where(
            experiments.external_id.is_(None),
            attempts.created_at < until_s,
            attempts.ended_at.is_(None)
            | (attempts.ended_at >= since_s)
            | (attempts.created_at >= since_s),
        )
    )  # fmt: skip
    if experiment_id is not None:
        query = query.where(attempts.experiment_id == experiment_id)
    found: Iterable[Row[Any]] = connection.execute(query)
    for row in found:
        yield from _by_month(row, since_s, until_s)


def _by_month(row: Row[Any], since_s: float, until_s: float) -> Iterator[tuple[_Key, _Amounts]]:
    key = (row.owner, row.project_id, row.pool or DEFAULT_POOL)
    num_slots = num_slots_of(row)
    if row.number == 1 and row.created_at >= since_s:
        wait_s = max(row.created_at - row.asked_at, 0.0)
        yield (month_of(row.created_at), *key), (0.0, wait_s, 1)
    begin = max(row.created_at, since_s)
    end = min(row.ended_at or time.time(), until_s)
    while begin < end:
        month = month_of(begin)
        part_end = min(end, beginning_of(next_month(month)))
        yield (month, *key), (num_slots * (part_end - begin), 0.0, 0)
        begin = part_end
