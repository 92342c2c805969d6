"""Models of the REST API on nodes and their slots."""

from typing import Literal, TypeAlias

from pydantic import Field

from paceline.messages.base import Message, Request

NodeState: TypeAlias = Literal["ready", "away", "left", "lost", "draining", "drained"]


class Node(Message):
    """A machine with slots. Times are in seconds since the epoch.

    `state` is `ready`, `away` (not heard since the master started, or its connection was closed),
    `left` (its runner was stopped), `lost`, `draining` (attempts are leaving) or `drained`.
    `address` is where other nodes reach it, for trials on several nodes.
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


class DrainNode(Request):
    """How a node is drained: by default its attempts store a checkpoint and go on elsewhere."""

    finish: bool = False


class Slot(Message):
    """One schedulable device and who uses it; `id` counts the slots of its node.

    A drained one gets no attempts; one that it has may still be leaving.
    """

    id: int
    node: str = "local"
    pool: str = "default"
    is_drained: bool = False
    device: str
    trial_id: int | None
    experiment_id: int | None
    attempt_id: int | None
