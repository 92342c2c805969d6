"""The members of an attempt that runs on several nodes, as they are stored with it."""

from typing import Any

import msgspec
from sqlalchemy import Row

from paceline.messages.attempts import AttemptEnd
from paceline.messages.node_runners import LOCAL_NODE
from paceline.messages.states import AttemptState


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an attempt on one node.

    Attributes:
        node_id: The node.
        name: The name of the node.
        slots: The slots that the attempt holds there.
        begun_at: When its runner said that it is there, in seconds since the epoch.
        port: A port that is free there; all meet at that of the first member.
        exit: How it ended.
        ended_at: When the master heard so, in seconds since the epoch.
        is_lost: Nobody can reach its node any more.
        sends_checkpoints: It does not share the checkpoint directory with the master.
    """

    node_id: int
    name: str
    slots: list[int]
    begun_at: float | None = None
    port: int = 0
    exit: AttemptEnd | None = None
    ended_at: float | None = None
    is_lost: bool = False
    sends_checkpoints: bool = False

    @property
    def state(self) -> AttemptState:
        """Where it stands."""
        if self.exit is not None:
            return AttemptState.ENDED
        return AttemptState.PENDING if self.begun_at is None else AttemptState.RUNNING


def read_members(attempt: Row[Any]) -> list[Member]:
    """Return the members of an attempt, rank 0's first; none if it runs on one node."""
    return msgspec.convert(attempt.members or [], list[Member])


def stored_members(members: list[Member]) -> Any:
    """Return what to store of members."""
    return msgspec.to_builtins(members) or None


def num_slots_of(attempt: Row[Any]) -> int:
    """Return the number of slots of an attempt on all its nodes."""
    return sum(map(len, slots_by_node(attempt).values()))


def slots_by_node(attempt: Row[Any]) -> dict[int, list[int]]:
    """Return the slots that an attempt holds, by the ids of its nodes."""
    if attempt.members is None:
        return {attempt.node_id or LOCAL_NODE: attempt.slots}
    return {member.node_id: member.slots for member in read_members(attempt)}
