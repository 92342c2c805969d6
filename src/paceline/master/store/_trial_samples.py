"""A part of an experiment's trials that looks like all of them."""

from typing import Any

from sqlalchemy import Connection, Row, Select, Text, select, type_coerce

from paceline.master.store import _tables as tables
from paceline.master.store._many_ids import ids_parameter, many_ids
from paceline.master.store._paging import Order
from paceline.master.store._row_counts import TRIALS, numbers_of

_trials = tables.trials.c
_SAMPLED: Select[Any] = select(
    _trials.id,
    _trials.state,
    type_coerce(_trials.hparams, Text).label("hparams"),
    _trials.steps_completed,
    _trials.best_metric,
)
_FACTOR, _RANGE = 2_654_435_761, 2**32


def sample_trials(
    connection: Connection, experiment_id: int, limit: int, *, smaller_is_better: bool
) -> tuple[list[Row[Any]], int]:
    """Return up to `limit` trials in order of id, and how many there are.

    The rows have id, state, hyperparameters as JSON, completed steps and best metric.

    Of more trials half are those with the best metric, and the others are chosen by a hash of their
    ids, so that they are spread evenly and mostly the same at the next call.
    """
    trials = tables.trials.c
    everyone = _SAMPLED.where(trials.experiment_id == experiment_id)
    total = numbers_of(connection, TRIALS, [experiment_id]).get(experiment_id, 0)
    if total <= limit:
        return list(connection.execute(everyone.order_by(trials.id).limit(limit)).all()), total
    ids = select(trials.id).where(trials.experiment_id == experiment_id)
    by_metric = Order((trials.best_metric, trials.id), not smaller_is_better)
    chosen = {row.id for row in by_metric.read(connection, ids, limit=(limit + 1) // 2)}
    share = (limit - len(chosen)) * _RANGE // total
    # Read from an index alone, in no order.
    spread = ids.where((trials.id * _FACTOR) % _RANGE < share)
    for trial_id in connection.execute(spread.limit(limit - len(chosen))).scalars():
        chosen.add(trial_id)
    rows = connection.execute(
        _SAMPLED.where(trials.id.in_(many_ids())), ids_parameter(sorted(chosen))
    )
    return sorted(rows, key=lambda row: row.id), total
