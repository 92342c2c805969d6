"""The names of metrics that were reported, without a look at what was."""

from sqlalchemy import Connection, select, tuple_

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
    connection: Connection, experiment_id: int, trial_id: int | None = None
) -> list[tuple[str, str]]:
    """Return (group, name) of the metrics of an experiment, or of one of its trials, sorted."""
    query = select(_names.group, _names.key).where(_names.experiment_id == experiment_id)
    if trial_id is not None:
        series, trials = tables.series.c, tables.trials.c
        query = (
            select(series.group, series.key)
            .join(tables.trials, trials.id == series.trial_id)
            .where(series.trial_id == trial_id, trials.experiment_id == experiment_id)
            .distinct()
        )
    return sorted((row.group, row.key) for row in connection.execute(query).all())
