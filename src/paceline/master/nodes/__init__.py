"""Nodes: machines whose runners register, ask for attempts and carry them out."""

from paceline.master.nodes._node_executor import NodeExecutor
from paceline.master.nodes._nodes import (
    NodeRefusedError,
    Nodes,
    RegisteredNode,
    UnknownNodeError,
)
from paceline.master.nodes._work import work_for

__all__ = [
    "NodeExecutor",
    "NodeRefusedError",
    "Nodes",
    "RegisteredNode",
    "UnknownNodeError",
    "work_for",
]
