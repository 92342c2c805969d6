"""Models of the REST API on nodes and their slots."""

from typing import Literal, TypeAlias

from pydantic import Field

from paceline.messages.base import Message, Request

NodeState: TypeAlias = Literal["ready", "away", "left", "lost", "draining", "drained"]


class Node(Message):
    """A machine with slots. Times are in seconds since the epoch.

    `state` is `ready`, `away` (not heard since the master started, or its connection was closed),
    `left` (its runner was stopped), `lost`, `draining` (attempts are leaving) or `drained`.
    `address` is where other nodes reach it, for trials on several nodes. `device_memory_bytes` has
    the memory of each device in bytes, 0 for one that is unknown; it is empty if none is known.
    A node on which one trial after another failed gets no attempts before `rests_until`.
    `num_slots_drained` devices get no attempts; attempts still hold `num_slots_draining` of these.
    """

    id: int
    name: str
    state: NodeState
    pool: str
    labels: dict[str, str]
    devices: list[str]
    device_kind: str
    num_slots_used: int
    num_cores: int
    memory_bytes: int
    version: str
    python_version: str
    registered_at: float
    seen_at: float | None = None
    attempts: list[int] = Field(default_factory=list)
    address: str = ""
    device_memory_bytes: list[int] = Field(default_factory=list)
    num_slots_drained: int = 0
    num_slots_draining: int = 0
    rests_until: float | None = None


class DrainNode(Request):
    """How a node is drained: by default its attempts store a checkpoint and go on elsewhere."""

    finish: bool = False


class Slot(Message):
    """One schedulable device and who uses it; `id` counts the slots of its node.

    A drained one gets no attempts; one that it has may still be leaving. `memory_bytes` is the
    memory of a GPU, None if it is unknown.
    """

    id: int
    node: str = "local"
    pool: str = "default"
    is_drained: bool = False
    device: str
    memory_bytes: int | None = None
    trial_id: int | None
    experiment_id: int | None
    attempt_id: int | None
