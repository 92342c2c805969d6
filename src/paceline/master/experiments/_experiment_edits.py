"""Changes of an experiment that do not touch what runs: its name, notes, labels and archive."""

from typing import Any

from sqlalchemy import update

from paceline.master.experiments._state_changes import StateChanges
from paceline.master.experiments._state_transitions import RefusedError
from paceline.master.store import Transaction, tables
from paceline.messages.states import ExperimentState


def edit_experiment(
    transaction: Transaction,
    experiment_id: int,
    *,
    name: str | None = None,
    description: str | None = None,
    labels: list[str] | None = None,
    notes: str | None = None,
) -> None:
    """Change what is given; what is None stays.

    Raises:
        NotFoundError: There is no such experiment.
    """
    StateChanges.experiment(transaction.connection, experiment_id)
    values: dict[str, Any] = {"name": name, "description": description, "notes": notes}
    if labels is not None:
        values["labels"] = list(dict.fromkeys(label for label in labels if label.strip()))
    _change(transaction, experiment_id, {k: v for k, v in values.items() if v is not None})


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
        _change(transaction, experiment_id, {"is_archived": is_archived})


def _change(transaction: Transaction, experiment_id: int, values: dict[str, Any]) -> None:
    if not values:
        return
    experiments = tables.experiments
    transaction.connection.execute(
        update(experiments).where(experiments.c.id == experiment_id).values(**values)
    )
    transaction.emit("experiment_changed", experiment_id, fields=sorted(values))
