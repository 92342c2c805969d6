"""Facts about a node: its slots, GPUs, memory and packages."""

import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import paceline
from paceline._base.files import make_secret, read_secret, write_atomically
from paceline._base.gpus import KnownGpu, visible_gpus
from paceline._base.process_and_network import num_cores, unix_user
from paceline._cluster.messages.runner_messages import (
    DEFAULT_POOL,
    INTERACTIVE_PACKAGES,
    PROTOCOL,
    NodeFacts,
)

CPU: Final = "cpu"


def find_slots(num_slots: int | None) -> list[KnownGpu]:
    """Return an entry per slot: GPUs if present, else an entry with the id "cpu" per core.

    A device of a GPU that is divided by MIG is a slot, too.

    Args:
        num_slots: How many there are to be; None is one per GPU or else core.

    Raises:
        ValueError: `num_slots` is less than 1, or more than the GPUs there are.
    """
    if num_slots is not None and num_slots < 1:
        raise ValueError(f"`num_slots` must be at least 1, but got {num_slots}.")
    gpus = visible_gpus()
    if gpus:
        if num_slots is not None and num_slots > len(gpus):
            raise ValueError(
                f"`num_slots` must be at most {len(gpus)}, the number of GPUs, but got {num_slots}."
                " Hint: hide the GPUs by CUDA_VISIBLE_DEVICES= to have one slot per CPU core."
            )
        return gpus[:num_slots]
    if num_slots is None:
        num_slots = num_cores()
    return [KnownGpu(id=CPU)] * num_slots


def gpu_names(slots: Sequence[KnownGpu]) -> str:
    """Return the distinct GPU names of slots, joined by commas; "GPU" if all are unknown."""
    return ", ".join(sorted({slot.name for slot in slots if slot.name})) or "GPU"


def gpu_memory(slots: Sequence[KnownGpu]) -> list[int]:
    """Return the memory per slot in bytes, 0 if unknown; empty if unknown for all slots."""
    sizes = [slot.memory_bytes for slot in slots]
    return sizes if any(sizes) else []


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
        labels: Further facts about it.
        address: Where other nodes reach it; by default the address of the connection.

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
        device_kind=gpu_names(slots) if has_gpus else _cpu_name(),
        device_memory_bytes=gpu_memory(slots),
        num_cores=num_cores(),
        memory_bytes=_memory_bytes(),
        pool=pool,
        labels=dict(labels or {}),
        address=address,
        host=socket.gethostname(),
        unix_user=unix_user(),
        packages=installed_packages(),
    )


def installed_packages() -> list[str]:
    """Return the packages for interactive work that this interpreter has."""
    invalidate_caches()
    return [name for name in INTERACTIVE_PACKAGES.values() if find_spec(name) is not None]


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
