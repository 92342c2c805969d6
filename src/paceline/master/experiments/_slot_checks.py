"""Whether there are slots for what a configuration asks for."""

from collections.abc import Sequence

from sqlalchemy import Connection

from paceline.config import ExperimentConfig
from paceline.master.experiments._scheduler_input import read_pools
from paceline.master.experiments._state_transitions import RefusedError
from paceline.master.scheduling import NodeSlots, fits_nodes, in_pools
from paceline.messages.node_runners import DEFAULT_POOL


def check_slots(
    connection: Connection, config: ExperimentConfig, known: Sequence[NodeSlots]
) -> None:
    """Refuse a configuration whose trials would wait for ever.

    Args:
        connection: Reads the pools.
        config: The configuration.
        known: The slots of all nodes.

    Raises:
        RefusedError: There is no such pool, or its nodes have too few slots.
    """
    wanted, pool = config.resources.fewest_slots, config.resources.pool or DEFAULT_POOL
    nodes = in_pools(known, read_pools(connection))
    pools = sorted({node.pool for node in nodes})
    if pool not in pools:
        raise RefusedError(
            "no_such_pool",
            f"`resources.pool` must be a pool that has a node ({', '.join(pools)}), but got"
            f" {pool!r}. Hint: start `paceline runner --pool {pool}` first.",
        )
    of_pool = [node for node in nodes if node.pool == pool]
    if fits_nodes(of_pool, wanted, allow_uneven=config.resources.allow_uneven):
        return
    if fits_nodes(of_pool, wanted, allow_uneven=True):
        raise RefusedError(
            "uneven_slots",
            f"`resources.slots_per_trial` must be a number that nodes of the pool {pool!r} have"
            f" together, equally many on each, but got {wanted}. Hint: choose another number,"
            " or allow different numbers by `resources: {allow_uneven: true}`.",
        )
    most = max(len(node.slots) for node in of_pool)
    total = sum(len(node.slots) for node in of_pool if node.can_join)
    whose = "this master" if len(nodes) == 1 else "the largest node of its pool"
    if total > most:
        most, whose = total, "the nodes of its pool that reach each other"
    raise RefusedError(
        "not_enough_slots",
        f"`resources.slots_per_trial` must be at most {most}, the slots of {whose}, but got"
        f" {wanted}. Hint: lower it, or start the master or a runner with more `--slots`.",
    )
