"""The model of the REST API on events."""

from typing import Any

from paceline.messages.base import Message


class Event(Message):
    """A change; follow them with the cursor `id`.

    Kinds: `experiment_state`, `experiment_changed`, `experiment_deleted`, `trial_created`,
    `trial_state`, `attempt_started`, `workers_restarted`, `attempt_ended`, `metrics`, `validation`,
    `checkpoint`, `progress`, `alert`, `logs`.
    """

    id: int
    time: float
    experiment_id: int
    trial_id: int | None
    kind: str
    data: dict[str, Any]
