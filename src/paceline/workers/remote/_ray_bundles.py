"""Bundles of resources in a Ray placement group: a pool's own, or those that a process runs in."""

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.workers.remote._ray_cluster import (
    RayConnection,
    Resources,
    num_fitting,
    told_resources,
)

# A bundle must want something.
_NOTHING = {"CPU": 0.001}


class Bundles:
    """The bundles of a placement group that can hold workers.

    Args:
        group: The placement group.
        indices: The index of a bundle for each worker that fits.
    """

    def __init__(self, group: Any, indices: Sequence[int]) -> None:
        self.group = group
        self.indices = list(indices)

    @classmethod
    def of_own(cls, wanted: Resources, num_workers: int, strategy: str) -> "Bundles":
        """Ask Ray for a placement group with a bundle for each worker."""
        from ray.util.placement_group import placement_group

        named = {name: amount for name, amount in wanted.items() if amount}
        bundles = [named or _NOTHING] * num_workers
        return cls(placement_group(bundles, strategy=strategy), range(num_workers))

    def free(self, connection: RayConnection, used: Sequence[int | None]) -> list[int]:
        """Return the bundles that are on staying nodes and not used, one entry for each worker."""
        left = Counter(self.indices)
        left.subtract(index for index in used if index is not None)
        if not +left:
            return []
        from ray.util.placement_group import placement_group_table

        staying = connection.staying()
        # Ray moves the bundles of a node that was lost once another one has room.
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        return [index for index in sorted((+left).elements()) if nodes.get(index) in staying]

    def remove(self) -> None:
        """Give the bundles back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)

    def describe_lack(self, num_workers: int, wanted: Resources) -> str:
        """Return a message that so many workers do not fit in the bundles of this process."""
        each = told_resources(wanted)
        bundle = json.dumps({name: _short(amount) for name, amount in wanted.items() if amount})
        return (
            f"{num_workers} worker(s) with {each} each must fit into the placement group that this"
            f" process runs in, such as that of a Ray Tune trial, but its free bundles have room"
            f" for {len(self.indices)}. Hint: ask for a bundle for each worker beside the one of"
            f" this process: tune.with_resources(function, tune.PlacementGroupFactory("
            f'[{{"CPU": 1}}] + [{bundle}] * {num_workers})).'
        )


def why_waiting(
    connection: RayConnection,
    bundle: Resources,
    num_bundles: int,
    strategy: str,
    group_id: str,
) -> str:
    """Return why a placement group has no place in the cluster yet, as a phrase."""
    nodes = connection.total()
    if strategy == "STRICT_SPREAD":
        num_fit = sum(num_fitting([node], bundle) > 0 for node in nodes)
    else:
        num_fit = num_fitting(nodes, bundle)
    may_grow = connection.may_grow()
    if num_fit >= num_bundles:
        return "its resources are in use now" + "; its autoscaler may add nodes" * may_grow
    lack = f"its {len(nodes)} node(s) have room for {num_fit}"
    if not may_grow:
        return lack
    if connection.is_infeasible(group_id):
        return f"{lack}, and its autoscaler can add none that fits"
    return f"{lack}; its autoscaler may add nodes"


def given_bundles(ray: Any, wanted: Resources) -> Bundles | None:
    """Return what has room in the placement group that this process runs in; None outside one."""
    group = ray.util.get_current_placement_group()
    if group is None:
        return None
    from ray.util.placement_group import placement_group_table

    own = _own_resources(ray)
    indices = []
    for index, resources in sorted(placement_group_table(group)["bundles"].items()):
        suffix = f"_group_{index}_{group.id.hex()}"
        left = {name: amount - own.get(name + suffix, 0.0) for name, amount in resources.items()}
        num_workers = num_fitting([left], wanted)
        if num_workers == sys.maxsize:
            # Workers that want nothing are spread over the bundles.
            num_workers = int("bundle" + suffix not in own)
        indices += [index] * num_workers
    return Bundles(group, indices)


def given_gpus(ray: Any) -> float | None:
    """Return the most GPUs of a bundle of this process's placement group; None outside one."""
    group = ray.util.get_current_placement_group()
    if group is None:
        return None
    from ray.util.placement_group import placement_group_table

    bundles = placement_group_table(group)["bundles"].values()
    return max(float(bundle.get("GPU", 0.0)) for bundle in bundles)


def _own_resources(ray: Any) -> Mapping[str, float]:
    """Return what Ray has given this process, by names that tell the bundle."""
    # Ray's public function leaves out of which bundle it is.
    given = ray._private.worker.global_worker.core_worker.resource_ids()
    return {name: sum(amount for _, amount in parts) for name, parts in given.items()}


def _short(amount: float) -> float:
    return int(amount) if math.floor(amount) == amount else amount
