"""Messages between a node runner and the master: plain structs, quick to load."""

import msgspec

from paceline.journal import RunInfo
from paceline.messages.attempts import AttemptSpec

PROTOCOL = 1
"""The version of the messages in this module."""

LOCAL_NODE = 0
"""The id of the master's own machine among the nodes."""

LOCAL_NAME = "local"
"""The name of the master's own machine among the nodes."""

DEFAULT_POOL = "default"
# Nodes whose runners a master starts have it, with the name of the starter.
STARTER_LABEL = "starter"

NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node runner says when it registers.

    `key` is a random text in the runner's directory. `python` is the interpreter of the runner.
    `devices` has one entry per slot: "cpu" or the id of a GPU; `device_kind` names the hardware.
    `device_memory_bytes` has the memory of each slot's GPU, 0 if it is unknown; it is empty if none
    is known. `address` is where other nodes reach this one; empty if the master is to take that of
    the connection. `host` is the name of the machine.
    """

    name: str
    key: str
    version: str
    protocol: int
    python: str
    python_version: str
    devices: list[str]
    device_kind: str
    num_cores: int
    memory_bytes: int
    pool: str = DEFAULT_POOL
    labels: dict[str, str] = {}
    address: str = ""
    host: str = ""
    device_memory_bytes: list[int] = []


class NodeSession(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a registration; `session` is the node's fencing token."""

    node_id: int
    session: int
    cluster_id: str
    lease_s: float


class NodePoll(msgspec.Struct, frozen=True, kw_only=True):
    """A node runner's question for work.

    `number` grows with each poll of a session. `attempts` are those that have a directory on the
    node, `alive` those of them with a runner at work. The answer waits up to `wait_s` seconds for
    another version of the work than `after`. A node that is leaving gets no more attempts.
    """

    key: str
    session: int
    number: int
    attempts: list[int]
    alive: list[int]
    after: int = 0
    wait_s: float = 0.0
    is_leaving: bool = False


class NodeLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node needs to start an attempt."""

    spec: AttemptSpec
    info: RunInfo
    secrets: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"NodeLaunch(attempt {self.spec.attempt_id})"


class NodeWork(msgspec.Struct, frozen=True, kw_only=True):
    """What the master wants on a node: all attempts that it wants there, and what to do.

    `launches` are those of wanted attempts that the node does not have. `kill` are attempts whose
    runner must be killed. `strays` tells that attempts which were given away are alive there.
    """

    version: int
    wanted: list[int]
    launches: list[NodeLaunch]
    kill: list[int]
    strays: bool = False
