"""A node: the slots of a machine, and the runner that asks a master for attempts."""

from paceline.runner.node._machine_facts import find_facts
from paceline.runner.node._node_runner import NodeRunner, NodeStoppedError
from paceline.runner.node._slots_and_gpus import find_devices

__all__ = ["NodeRunner", "NodeStoppedError", "find_devices", "find_facts"]
