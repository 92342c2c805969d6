"""A node: the slots of a machine, and the runner that asks a master for attempts."""

from paceline.runner.node._machine_facts import describe_machine, find_facts
from paceline.runner.node._node_runner import NodeRunner, NodeStoppedError
from paceline.runner.node._slots import find_slots

__all__ = [
    "NodeRunner",
    "NodeStoppedError",
    "describe_machine",
    "find_facts",
    "find_slots",
]
