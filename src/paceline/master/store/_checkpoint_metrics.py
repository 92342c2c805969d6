"""The searched metric beside each checkpoint, so that lists need not look it up."""

from sqlalchemy import Connection, bindparam, select, update

from paceline.master.store import _tables as tables
from paceline.master.store._metric_rows import metric_numbers_at

_GROUP = "validation"


def measure_checkpoints(
    connection: Connection,
    trial_id: int,
    key: str,
    *,
    step: int | None = None,
    beyond_step: int | None = None,
) -> None:
    """Bring the metric of a trial's checkpoints up to date with what its validations say.

    Args:
        connection: The connection of a write job.
        trial_id: The trial.
        key: The searched metric.
        step: Only the checkpoints at this step.
        beyond_step: Only the checkpoints after this step.
    """
    checkpoints = tables.checkpoints
    query = select(checkpoints.c.steps_completed).where(checkpoints.c.trial_id == trial_id)
    if step is not None:
        query = query.where(checkpoints.c.steps_completed == step)
    if beyond_step is not None:
        query = query.where(checkpoints.c.steps_completed > beyond_step)
    steps = set(connection.execute(query).scalars())
    if not steps:
        return
    values = metric_numbers_at(connection, trial_id, _GROUP, key, steps)
    statement = (
        update(checkpoints)
        .where(
            checkpoints.c.trial_id == trial_id,
            checkpoints.c.steps_completed == bindparam("at_step"),
        )
        .values(metric=bindparam("new_metric"))
    )
    connection.execute(
        statement, [{"at_step": at, "new_metric": values.get(at)} for at in sorted(steps)]
    )
