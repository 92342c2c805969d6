"""The names of metrics that were reported, without a look at what was."""

from sqlalchemy import Connection, func, select, tuple_

from paceline.master.store import _tables as tables

_names = tables.metric_names.c


def all_metric_names(connection: Connection) -> list[tuple[str, str]]:
    """Return (group, name) of the metrics of all experiments, sorted."""
    found: list[tuple[str, str]] = []
    query = select(_names.group, _names.key).order_by(_names.group, _names.key).limit(1)
    place = query
    # From one name to the next: the index skips the experiments that share a name.
    while (row := connection.execute(place).first()) is not None:
        found.append((row.group, row.key))
        place = query.where(tuple_(_names.group, _names.key) > found[-1])
    return found


def metric_names(
    connection: Connection,
    experiment_id: int,
    *,
    after: tuple[str, str] = ("", ""),
    limit: int | None = None,
) -> list[tuple[str, str]]:
    """Return (group, name) of the metrics of an experiment beyond `after`, sorted."""
    query = select(_names.group, _names.key).where(
        _names.experiment_id == experiment_id, tuple_(_names.group, _names.key) > after
    )
    query = query.order_by(_names.group, _names.key).limit(limit)
    return [(row.group, row.key) for row in connection.execute(query).all()]


def num_metric_names(connection: Connection, trial_id: int, group: str, *, at_most: int) -> int:
    """Return how many names of a group the attempt of a trial has that has the most."""
    series = tables.series.c
    most = 0
    for number in attempts_with_series(connection, trial_id):
        keys = select(series.key).where(
            series.trial_id == trial_id, series.attempt == number, series.group == group
        )
        found = connection.scalar(select(func.count()).select_from(keys.limit(at_most).subquery()))
        most = max(most, found or 0)
    return most


def attempts_with_series(connection: Connection, trial_id: int) -> list[int]:
    """Return the numbers of the attempts of a trial that reported metrics, newest first."""
    attempt = tables.series.c.attempt
    query = select(attempt).where(tables.series.c.trial_id == trial_id)
    query = query.order_by(attempt.desc()).limit(1)
    found: list[int] = []
    number = connection.scalar(query)
    # The index skips the names of each attempt.
    while number is not None:
        found.append(number)
        number = connection.scalar(query.where(attempt < number))
    return found


MAX_GROUPS = 1000
MAX_NAMES = 1000
"""So many groups of a trial are told, and so many names; of each group one at least."""


def first_metric_names(connection: Connection, trial_id: int) -> tuple[dict[str, set[str]], bool]:
    """Return the first names of a trial's metrics by group, and whether there are more.

    What is read grows with what is returned.
    """
    series = tables.series.c
    found: dict[str, set[str]] = {}
    num_found, has_more = 0, False
    for attempt in attempts_with_series(connection, trial_id):
        of_attempt = (series.trial_id == trial_id, series.attempt == attempt)
        groups = select(series.group).where(*of_attempt).order_by(series.group).limit(1)
        group = connection.scalar(groups)
        while group is not None:
            if group not in found and len(found) >= MAX_GROUPS:
                return found, True
            names = select(series.key).where(*of_attempt, series.group == group)
            most = max(MAX_NAMES - num_found, 1)
            keys = connection.scalars(names.order_by(series.key).limit(most + 1)).all()
            has_more = has_more or len(keys) > most
            own = found.setdefault(group, set())
            num_found -= len(own)
            own.update(keys[:most])
            num_found += len(own)
            group = connection.scalar(groups.where(series.group > group))
    return found, has_more
