"""Changes of an experiment that people make: its name and notes, its archive, its turn."""

from typing import Any

from sqlalchemy import Connection, Row, select, update

from paceline.master.experiments._scheduler_input import waiting_trials
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.experiments._state_transitions import RefusedError
from paceline.master.scheduling import Waiting, moved
from paceline.master.store import Transaction, config_of, tables
from paceline.messages.node_runners import DEFAULT_POOL
from paceline.messages.states import ExperimentState, TrialState


def edit_experiment(
    transaction: Transaction,
    experiment_id: int,
    *,
    name: str | None = None,
    description: str | None = None,
    labels: list[str] | None = None,
    notes: str | None = None,
    priority: int | None = None,
    weight: float | None = None,
    max_slots: int | None = None,
) -> None:
    """Change what is given; what is None stays.

    Raises:
        NotFoundError: There is no such experiment.
        RefusedError: It has ended, or is not this master's, and one of the last three is given, or
            `max_slots` are too few for a trial.
    """
    row = StateChanges.experiment(transaction.connection, experiment_id)
    if not priority is weight is max_slots is None:
        _check_waits(row)
    if max_slots:
        _check_max_slots(row, max_slots)
    values: dict[str, Any] = {
        "name": name, "description": description, "notes": notes,
        "priority": priority, "weight": weight, "max_slots": max_slots,
    }  # fmt: skip
    if labels is not None:
        values["labels"] = list(dict.fromkeys(label for label in labels if label.strip()))
    _change_experiment(
        transaction, experiment_id, {k: v for k, v in values.items() if v is not None}
    )


def move_experiment(
    transaction: Transaction,
    experiment_id: int,
    *,
    ahead_of: int | None = None,
    behind: int | None = None,
    to_end: bool = False,
) -> None:
    """Change when an experiment gets slots, among those of its pool that are as important.

    Args:
        transaction: The transaction.
        experiment_id: The experiment.
        ahead_of: It goes right ahead of this one.
        behind: It goes right behind this one.
        to_end: It goes to the end, and not to the front, if neither is given.

    Raises:
        NotFoundError: There is no such experiment.
        RefusedError: One of them has ended, is not this master's, or waits in another pool.
    """
    connection = transaction.connection
    row = StateChanges.experiment(connection, experiment_id)
    _check_waits(row)
    others = [
        trial
        for trial in waiting_trials(connection, is_by_arrival=True)
        if trial.pool == _pool_of_experiment(row) and trial.experiment_id != experiment_id
    ]
    experiments = tables.experiments
    query = select(experiments.c.id, experiments.c.queue_place).where(
        experiments.c.queue_place.is_not(None),
        experiments.c.state.in_([ExperimentState.ACTIVE.value, ExperimentState.PAUSED.value]),
    )
    places = {one.id: float(one.queue_place) for one in connection.execute(query)}
    other_id = ahead_of if ahead_of is not None else behind
    if other_id is not None:
        other = StateChanges.experiment(connection, other_id)
        _check_waits(other)
        _check_together(row, other)
        first, last = _ends_of_queue(connection, other, others, places)
    elif others:
        first = _place_in_queue(others[0], places)
        last = _place_in_queue(others[-1], places)
    else:
        return
    is_ahead = ahead_of is not None or (behind is None and not to_end)
    changed = moved(
        places, experiment_id,
        ahead_of=first if is_ahead else None, behind=None if is_ahead else last,
    )  # fmt: skip
    for changed_id, place in changed.items():
        if places.get(changed_id) != place:
            _change_experiment(transaction, changed_id, {"queue_place": place})


def set_archived(transaction: Transaction, experiment_id: int, *, is_archived: bool) -> None:
    """Put an ended experiment into the archive, where lists leave it out, or take it back.

    Raises:
        NotFoundError: There is no such experiment.
        RefusedError: It has not ended.
    """
    row = StateChanges.experiment(transaction.connection, experiment_id)
    if is_archived and not ExperimentState(row.state).is_terminal:
        raise RefusedError(
            "not_ended",
            f"Experiment {experiment_id} must have ended to be archived, but is {row.state}.",
        )
    if row.is_archived != is_archived:
        _change_experiment(transaction, experiment_id, {"is_archived": is_archived})


def _check_waits(row: Row[Any]) -> None:
    """Refuse a change of the order for what never waits again."""
    state = ExperimentState(row.state)
    if row.external_id is None and not (state.is_terminal or state.is_stopping):
        return
    how = "runs without this master" if row.external_id is not None else f"is {row.state}"
    raise RefusedError(
        "not_scheduled",
        f"Experiment {row.id} must be active or paused to change when it gets slots, but {how}.",
    )


def _check_max_slots(row: Row[Any], max_slots: int) -> None:
    needed = config_of(row).resources.fewest_slots
    if max_slots < needed:
        raise RefusedError(
            "too_few_slots",
            f"`max_slots` must be at least {needed}, which a trial of experiment {row.id} needs,"
            f" but got {max_slots}. Hint: pause the experiment to let none of its trials run.",
        )


def _check_together(row: Row[Any], other: Row[Any]) -> None:
    if row.id == other.id:
        raise RefusedError(
            "same_experiment", f"Experiment {row.id} cannot go ahead of or behind itself."
        )
    if _pool_of_experiment(row) != _pool_of_experiment(other):
        raise RefusedError(
            "other_pool",
            f"Experiment {row.id} waits in the pool {_pool_of_experiment(row)!r}, but {other.id} in"
            f" {_pool_of_experiment(other)!r}. Each pool has an order of its own.",
        )


def _pool_of_experiment(row: Row[Any]) -> str:
    return config_of(row).resources.pool or DEFAULT_POOL


def _place_in_queue(trial: Waiting, places: dict[int, float]) -> float:
    return places.get(trial.experiment_id, float(trial.trial_id))


def _ends_of_queue(
    connection: Connection, other: Row[Any], waiting: list[Waiting], places: dict[int, float]
) -> tuple[float, float]:
    """Return the first and the last place at which trials of an experiment wait."""
    if other.id in places:
        return places[other.id], places[other.id]
    ids = [trial.trial_id for trial in waiting if trial.experiment_id == other.id]
    if not ids:
        # None waits now; the next one does so where those are that run.
        trials = tables.trials.c
        query = select(trials.id).where(
            trials.experiment_id == other.id, trials.state == TrialState.ACTIVE.value
        )
        ids = list(connection.execute(query).scalars())
    if not ids:
        raise RefusedError("nothing_waits", f"No trial of experiment {other.id} wants slots now.")
    return float(min(ids)), float(max(ids))


def _change_experiment(
    transaction: Transaction, experiment_id: int, values: dict[str, Any]
) -> None:
    if not values:
        return
    experiments = tables.experiments
    transaction.connection.execute(
        update(experiments).where(experiments.c.id == experiment_id).values(**values)
    )
    transaction.emit("experiment_changed", experiment_id, fields=sorted(values))
