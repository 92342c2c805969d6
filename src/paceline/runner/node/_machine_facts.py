"""What a machine is: the facts with which its runner registers it."""

import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import paceline
from paceline._checked_secrets import make_secret, read_secret
from paceline._usable_cores import num_cores
from paceline.gpus import KnownGpu
from paceline.journal import write_atomically
from paceline.messages.node_runners import DEFAULT_POOL, PROTOCOL, NodeFacts
from paceline.runner.node._slots import CPU, find_slots, memory_of_gpus, names_of_gpus

_KEY_FILE = "node_key"


def find_facts(
    directory: Path,
    *,
    name: str,
    num_slots: int | None,
    pool: str = DEFAULT_POOL,
    labels: Mapping[str, str] | None = None,
    address: str = "",
) -> NodeFacts:
    """Return the facts of this machine.

    Args:
        directory: The runner's directory, which has the key of the node, or gets one.
        name: The node's name with the master.
        num_slots: The number of slots; one per GPU or else CPU core if None.
        pool: The pool that the node belongs to.
        labels: What else is to be known of it.
        address: Where other nodes reach it; the master takes that of the connection by default.

    Raises:
        ValueError: There are not so many slots.
        ValueError: The key is damaged.
        OSError: It cannot be read or written.
    """
    return describe_machine(
        find_slots(num_slots),
        name=name,
        key=_machine_key(directory),
        pool=pool,
        labels=labels,
        address=address,
    )


def describe_machine(
    slots: Sequence[KnownGpu],
    *,
    name: str,
    key: str = "",
    pool: str = DEFAULT_POOL,
    labels: Mapping[str, str] | None = None,
    address: str = "",
) -> NodeFacts:
    """Return the facts of this machine with these slots; the rest is as for `find_facts`."""
    has_gpus = any(slot.id != CPU for slot in slots)
    return NodeFacts(
        name=name,
        key=key,
        version=paceline.__version__,
        protocol=PROTOCOL,
        python=sys.executable,
        python_version=platform.python_version(),
        devices=[slot.id for slot in slots],
        device_kind=names_of_gpus(slots) if has_gpus else _cpu_name(),
        device_memory_bytes=memory_of_gpus(slots),
        num_cores=num_cores(),
        memory_bytes=_memory_bytes(),
        pool=pool,
        labels=dict(labels or {}),
        address=address,
        host=socket.gethostname(),
    )


def _machine_key(directory: Path) -> str:
    path = directory / _KEY_FILE
    try:
        if key := read_secret(path):
            return key
    except FileNotFoundError:
        pass
    key = make_secret()
    write_atomically(path, key.encode())
    return key


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
