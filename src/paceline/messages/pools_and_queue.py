"""Models of the REST API on pools and the order in which experiments get slots."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from paceline.messages.base import Message, Request

Policy: TypeAlias = Literal["fifo", "priority", "fair_share"]


Label = Annotated[str, Field(max_length=200)]


class Pool(Message):
    """A set of nodes that share a queue; `max_slots` is how many slots may be in use at once.

    Nodes that have all of `labels`, and name no pool themselves, belong to it. `failure` says why
    the master could not start a runner for it, or that one was started and has not registered. It
    goes once one has registered. `detail` says what nodes that are not there yet wait for.
    `num_slots` counts all slots: `num_slots_drained` of them get no attempts, and attempts still
    hold `num_slots_draining` of these.
    """

    name: str
    policy: Policy
    max_slots: int | None
    labels: dict[str, str]
    num_nodes: int
    num_slots: int
    num_slots_used: int
    num_slots_drained: int = 0
    num_slots_draining: int = 0
    failure: str | None = None
    detail: str | None = None


class SetPool(Request):
    """All settings of a pool; those that are left out get their defaults."""

    policy: Policy = "fifo"
    max_slots: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    labels: dict[str, Label] = Field(default_factory=dict, max_length=20)


class MoveExperiment(Request):
    """Another turn for an experiment: beside another one, or at an end of its pool's queue."""

    experiment_id: int
    ahead_of: int | None = None
    behind: int | None = None
    to: Literal["front", "end"] | None = None


class QueueEntry(Message):
    """A trial that waits for slots, in the order in which they will be given, and why it waits.

    `num_ahead` trials of its pool come before it. The one that holds it up is `behind_trial_id`.
    `priority` and `weight` are there if the policy of its pool asks for them.
    """

    trial_id: int
    experiment_id: int
    experiment_name: str
    num_slots: int
    waiting_since: float
    reason: Literal[
        "slots_in_use",
        "behind_others",
        "max_slots",
        "too_large",
        "pool_limit",
        "preempting",
        "pausing",
        "starting",
    ]
    detail: str
    pool: str = "default"
    num_ahead: int = 0
    behind_trial_id: int | None = None
    behind_experiment_id: int | None = None
    priority: int | None = None
    weight: float | None = None
