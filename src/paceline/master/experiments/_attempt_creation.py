"""Creation of an attempt: its number, its slots, and the checkpoint that it goes on from."""

import time
from typing import Any

from sqlalchemy import insert

from paceline import faults
from paceline.master.experiments._attempt_launch import Node
from paceline.master.experiments._start_checkpoints import usable_checkpoint
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.scheduling import SlotAssignment
from paceline.master.store import Member, Transaction, new_id, stored_members, tables
from paceline.messages.states import AttemptState

faults.register("master.attempt.created")


def create_attempt(
    changes: StateChanges, node: Node, transaction: Transaction, assignment: SlotAssignment
) -> None:
    """Create an attempt of a waiting trial on the slots that it was given."""
    connection, trial_id = transaction.connection, assignment.trial_id
    trial = changes.trial(connection, trial_id)
    number = trial.num_attempts + 1
    latest = usable_checkpoint(changes, transaction, trial_id, number)
    if latest is None and trial.source_checkpoint is not None:
        # A warm start brings weights, not steps: the trial counts from its own beginning.
        latest = (trial.source_checkpoint, 0)
    uuid, steps = latest or (None, 0)
    place = node.place_of(assignment.node_id) if assignment.node_id else None
    connection.execute(
        insert(tables.attempts).values(
            id=new_id(connection, tables.attempts),
            trial_id=trial_id,
            experiment_id=trial.experiment_id,
            number=number,
            state=AttemptState.PENDING.value,
            slots=list(assignment.slots),
            node_id=assignment.node_id or None,
            node_name=None if place is None else place.name,
            members=_members_of_attempt(node, assignment),
            created_at=time.time(),
            resumed_from=uuid,
            resumed_steps=steps,
        )
    )
    changes.update_trial(transaction, trial_id, num_attempts=number)
    # The directory of the attempt must not outlive its row: after a power cut, another attempt
    # would get the same number and find it.
    transaction.force()
    faults.reach("master.attempt.created")


def _members_of_attempt(node: Node, assignment: SlotAssignment) -> Any:
    parts = [(assignment.node_id, assignment.slots), *assignment.others]
    if len(parts) == 1:
        return None
    return stored_members(
        [
            Member(node_id=node_id, name=node.place(node_id).name, slots=list(slots))
            for node_id, slots in parts
        ]
    )
