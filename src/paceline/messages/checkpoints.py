"""The model of the REST API on checkpoints."""

from typing import Any

from paceline.messages.base import Message, Number
from paceline.messages.states import CheckpointState


class Checkpoint(Message):
    """A committed checkpoint; `resources` maps file paths to bytes."""

    uuid: str
    trial_id: int
    experiment_id: int
    attempt: int
    steps_completed: int
    state: CheckpointState
    metadata: dict[str, Any]
    resources: dict[str, int]
    size: int
    storage: str
    created_at: float
    metric: Number | None
