"""Nodes: machines whose runners register, ask for attempts and carry them out."""

from paceline.master.nodes._checkpoint_transfers import (
    OFFERS_AT_ONCE,
    PIECES_AT_ONCE,
    Transfers,
)
from paceline.master.nodes._lost_nodes import LostNodes
from paceline.master.nodes._node_executor import NodeExecutor
from paceline.master.nodes._node_registry import Nodes
from paceline.master.nodes._node_work import work_for
from paceline.master.nodes._registered_node import (
    NodeRefusedError,
    RegisteredNode,
    UnknownNodeError,
)
from paceline.master.nodes._storage_marks import StorageMarks

__all__ = [
    "OFFERS_AT_ONCE",
    "PIECES_AT_ONCE",
    "LostNodes",
    "NodeExecutor",
    "NodeRefusedError",
    "Nodes",
    "RegisteredNode",
    "StorageMarks",
    "Transfers",
    "UnknownNodeError",
    "work_for",
]
