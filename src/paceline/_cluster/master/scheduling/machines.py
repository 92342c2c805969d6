"""Machines with slots for attempts, and their inventory."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from paceline._base.process_and_network import LOOPBACK, num_cores, unix_user
from paceline._cluster.master.scheduling.pools import NodeSlots
from paceline._cluster.messages.runner_messages import LOCAL_NAME


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Machine of an attempt: its name, devices, cores, interpreter and address.

    Attributes:
        name: Its name among the nodes.
        devices: One entry per slot: "cpu" or a GPU's id.
        num_cores: Its CPU cores.
        python: The interpreter of attempts that name none.
        address: Where other nodes reach it.
    """

    name: str
    devices: tuple[str, ...]
    num_cores: int
    python: str
    address: str = LOOPBACK


class Machines:
    """Machines of a cluster: the master's own alone; a subclass adds other nodes.

    Args:
        devices: One entry per slot of the master's machine: "cpu" or a GPU's id.
    """

    def __init__(self, devices: Iterable[str] = ()) -> None:
        self.devices = tuple(devices)

    def place(self, node_id: int | None) -> Place:
        """Return where the attempts of a node run; None or 0 is the master's own machine.

        Raises:
            LookupError: There is no such node.
        """
        if node_id:
            raise LookupError(f"There is no node {node_id}.")
        return Place(
            name=LOCAL_NAME, devices=self.devices, num_cores=num_cores(), python=sys.executable
        )

    def slots(self) -> list[NodeSlots]:
        """Return the slots of all present machines, the master's own first."""
        return [NodeSlots(slots=tuple(range(len(self.devices))), owner=unix_user())]

    def returning_slots(self) -> list[NodeSlots]:
        """Return the slots of absent machines seen within the last minutes."""
        return []

    def possible_slots(self) -> list[NodeSlots]:
        """Return the slots of all present and expected machines."""
        return self.slots()
