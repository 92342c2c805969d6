"""Why the trials of an experiment failed."""

from sqlalchemy import Connection, or_, select

from paceline.master.experiments._state_transitions import INVALID_HP
from paceline.master.store import tables
from paceline.messages.states import TrialState


def counted_trial_states(connection: Connection, experiment_id: int) -> set[TrialState]:
    """Return the states of the trials, without those that refused their hyperparameters."""
    trials = tables.trials.c
    query = select(trials.state).where(
        trials.experiment_id == experiment_id,
        or_(trials.stop_reason.is_(None), trials.stop_reason != INVALID_HP),
    )
    return set(map(TrialState, connection.execute(query.distinct()).scalars()))


def describe_failure(connection: Connection, experiment_id: int) -> str:
    """Return the reason of an experiment in which no trial succeeded."""
    trials = tables.trials.c
    failed = connection.execute(
        select(trials.id, trials.error)
        .where(
            trials.experiment_id == experiment_id,
            trials.error.is_not(None),
            or_(trials.stop_reason.is_(None), trials.stop_reason != INVALID_HP),
        )
        .order_by(trials.id)
        .limit(1)
    ).first()
    if failed is not None:
        return f"All trials failed. Trial {failed.id}: {failed.error}"
    return _describe_invalid(connection, experiment_id) or "All trials failed."


def _describe_invalid(connection: Connection, experiment_id: int) -> str | None:
    trials, attempts = tables.trials.c, tables.attempts.c
    first = connection.execute(
        select(trials.id, attempts.error)
        .join_from(tables.trials, tables.attempts, attempts.trial_id == trials.id)
        .where(trials.experiment_id == experiment_id, trials.stop_reason == INVALID_HP)
        .order_by(trials.id, attempts.number.desc())
        .limit(1)
    ).first()
    if first is None:
        return None
    why = first.error or "InvalidHP"
    return (
        f"All trials refused their hyperparameters. Trial {first.id}: {why}. Hint: change the"
        " hyperparameters, or look at the condition that raises InvalidHP."
    )
