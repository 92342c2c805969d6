"""A registered node as it is stored, and the reasons for which a node is refused."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Row

import paceline
from paceline._errors import PicklableError
from paceline._network_interfaces import LOOPBACK_HOSTS
from paceline.master.scheduling import NodeSlots
from paceline.messages.node_runners import PROTOCOL, NodeFacts


class NodeRefusedError(PicklableError, RuntimeError):
    """Raised when a registration or a poll is refused.

    Args:
        code: A short name of the reason.
        message: One sentence for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class UnknownNodeError(LookupError):
    """Raised when there is no such node: its runner must register."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredNode:
    """A node as it is stored.

    Args:
        seen_at: When a master last heard of it before it was lost or left, or it registered.
        has_left: It has said that it leaves, and has not come back.
    """

    id: int
    name: str
    key: str
    session: int
    token_id: int | None
    facts: NodeFacts
    is_draining: bool
    registered_at: float
    seen_at: float | None = None
    has_left: bool = False

    def slots(
        self,
        *,
        can_join: bool,
        is_open: bool = True,
        only_pool: str | None = None,
        is_drained: bool = False,
    ) -> NodeSlots:
        """Return the slots of this node for the scheduler."""
        slots = tuple(range(len(self.facts.devices)))
        return NodeSlots(
            node_id=self.id,
            slots=slots,
            drained=frozenset(slots if is_drained else ()),
            pool=self.facts.pool,
            labels=self.facts.labels,
            is_open=is_open,
            can_join=can_join,
            only_pool=only_pool,
        )


def nodes_that_join(nodes: Iterable[RegisteredNode]) -> set[int]:
    """Return the ids of the nodes that others reach, for trials on several nodes.

    A loopback address, as that of a node behind a tunnel, leads to the machine that asks. So nodes
    that have one reach each other only if all nodes are on one machine.
    """
    found = [node for node in nodes if node.facts.address]
    has_one_host = len({node.facts.host for node in found}) == 1
    return {node.id for node in found if has_one_host or not _is_loopback(node.facts.address)}


def _is_loopback(address: str) -> bool:
    return address in LOOPBACK_HOSTS or address.startswith("127.")


def check_node_version(facts: NodeFacts) -> None:
    """Refuse a runner of another version.

    Raises:
        NodeRefusedError: It has another one.
    """
    mine = paceline.__version__
    if facts.version == mine and facts.protocol == PROTOCOL:
        return
    raise NodeRefusedError(
        "other_version",
        f"The runner must have Paceline {mine} (protocol {PROTOCOL}) as this master, but has"
        f" {facts.version} (protocol {facts.protocol}). Hint: pip install paceline=={mine} on"
        f" {facts.name!r}.",
    )


def stored_node(row: Row[Any]) -> RegisteredNode:
    """Return the node of a row of the table."""
    facts = msgspec.convert(row.facts, NodeFacts)
    return RegisteredNode(**dict(row._mapping) | {"facts": facts})
