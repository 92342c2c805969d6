"""Which pool a node belongs to."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from paceline.master.scheduling._scheduling_types import NodeSlots, PoolSettings
from paceline.messages.nodes import DEFAULT_POOL


def pool_of(named: str, labels: Mapping[str, str], pools: Mapping[str, PoolSettings]) -> str:
    """Return the pool of a node: the one that it names, or else the first with labels of it."""
    if named != DEFAULT_POOL:
        return named
    for name, settings in sorted(pools.items()):
        if settings.labels and settings.labels.items() <= labels.items():
            return name
    return DEFAULT_POOL


def in_pools(nodes: Iterable[NodeSlots], pools: Mapping[str, PoolSettings]) -> list[NodeSlots]:
    """Return nodes in the pools that their labels choose."""
    return [replace(node, pool=pool_of(node.pool, node.labels, pools)) for node in nodes]
