"""Which pool a node belongs to."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from paceline.master.scheduling._scheduling_types import NodeSlots, PoolSettings
from paceline.messages.node_runners import DEFAULT_POOL


def pool_of(named: str, labels: Mapping[str, str], pools: Mapping[str, PoolSettings]) -> str:
    """Return the pool of a node: the one that it names, or else the first with labels of it."""
    if named != DEFAULT_POOL:
        return named
    # Most nodes have no labels.
    for name, settings in sorted(pools.items()) if labels else ():
        if settings.labels and settings.labels.items() <= labels.items():
            return name
    return DEFAULT_POOL


def in_pools(nodes: Iterable[NodeSlots], pools: Mapping[str, PoolSettings]) -> list[NodeSlots]:
    """Return nodes in the pools that their labels choose.

    One that labels put into another pool than the only one that it may be in gets nothing there.
    """
    return [_in_pool(node, pool_of(node.pool, node.labels, pools)) for node in nodes]


def _in_pool(node: NodeSlots, pool: str) -> NodeSlots:
    if node.only_pool not in (None, pool):
        return replace(node, pool=node.only_pool, is_open=False)
    return node if node.pool == pool else replace(node, pool=pool)
