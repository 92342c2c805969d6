"""The actors on a Ray cluster that host a pool's workers: created, heard of, and dropped."""

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from paceline.workers.remote._ray_bundles import Bundles
from paceline.workers.remote._ray_cluster import Resources
from paceline.workers.remote._ray_host_process import HostOrder
from paceline.workers.remote._ray_node_versions import COMPARED
from paceline.workers.remote._ray_worker_actor import make_worker_actor_class

logger = logging.getLogger(__name__)

# How long an actor that waits for its worker may take to answer before it is not relied on.
_PING_S = 0.5
# How long one may take whose node is in doubt, as another one was lost there.
_NODE_PING_S = 3.0
# How long Ray may take to tell why it has killed an actor.
_CAUSE_S = 10.0
LACK_OF_MEMORY = (
    "as its node is short of memory. Hint: fewer workers for each node, or smaller batches; Ray's"
    " log names the processes that have the most."
)


class HostActor:
    """An actor with the resources of one worker, which Ray may not have created yet.

    Args:
        actor: Ray's handle.
        bundle: The index of the bundle that it is in; None if it is in no placement group.
        sample: Such an order as it will get, if it is to load all that its worker needs before it
            counts.
    """

    def __init__(self, actor: Any, bundle: int | None, sample: HostOrder | None) -> None:
        self.actor = actor
        self.bundle = bundle
        self.facts: Mapping[str, Any] = {}
        # It answers one after the other, its facts first.
        self.unheard = [actor.facts.remote(COMPARED)]
        if sample is not None:
            # Asked for at once: nobody may look for its facts for a while.
            self.unheard.append(actor.warm_up.remote(sample))
        self.is_lost = False
        self.has_worked = False

    @property
    def node(self) -> str | None:
        """The id of its node; None before it has answered."""
        return self.facts.get("node")

    @property
    def is_placed(self) -> bool:
        """Whether it can start a worker, perhaps after what it still loads."""
        return bool(self.facts) and not self.is_lost

    @property
    def is_ready(self) -> bool:
        """Whether it can start a worker at once."""
        return self.is_placed and not self.unheard


class HostActors:
    """The actors of a pool, as Ray and they themselves tell of them; for one thread at a time.

    Args:
        ray: Ray itself.
        wanted: The resources of each.
        sample: Such an order as actors will get that are reserved while workers run.

    Attributes:
        all: Those that were created and not dropped.
        leaving: The ids of the nodes that will be taken away. The next look drops actors there,
            but for those that have worked.
        lacked_memory: Whether Ray has killed the actor for lack of memory that was lost last.
    """

    def __init__(self, ray: Any, wanted: Resources, sample: HostOrder) -> None:
        self._ray = ray
        self._wanted = wanted
        self._sample = sample
        self._kind: Any = None
        self.all: list[HostActor] = []
        self.leaving: Collection[str] = ()
        self.lacked_memory = False

    def create(
        self, bundles: Bundles | None = None, index: int | None = None, *, is_reserve: bool
    ) -> None:
        """Ask Ray for one more: in a bundle, else on any node.

        Args:
            bundles: The bundles of a placement group.
            index: That of the bundle.
            is_reserve: Whether it loads what its worker needs before it is ready.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._kind is None:
            self._kind = self._ray.remote(make_worker_actor_class())
        strategy: Any = "DEFAULT"
        if bundles is not None and index is not None:
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=bundles.group, placement_group_bundle_index=index
            )
        actor = self._kind.options(
            num_cpus=self._wanted.get("CPU", 0),
            num_gpus=self._wanted.get("GPU", 0),
            resources={n: a for n, a in self._wanted.items() if n not in ("CPU", "GPU")},
            max_restarts=0,
            scheduling_strategy=strategy,
        ).remote()
        self.all.append(HostActor(actor, index, self._sample if is_reserve else None))

    def drop(self, hosts: Iterable[HostActor]) -> None:
        """Give some back."""
        for host in hosts:
            self.all.remove(host)
            with suppress(Exception):
                self._ray.kill(host.actor)

    def look(self) -> list[HostActor]:
        """Take new answers, drop what is lost, and return those that are ready and stay."""
        self._doubt_nodes()
        for host in list(self.all):
            if not host.is_ready and not host.is_lost:
                self._hear(host)
            if host.is_lost or (host.node in self.leaving and not host.has_worked):
                self.drop([host])
        return [h for h in self.all if h.is_ready and h.node not in self.leaving]

    def placed(self) -> list[HostActor]:
        """Return those that have their resources and stay, as of the last look."""
        return [h for h in self.all if h.is_placed and h.node not in self.leaving]

    def _doubt_nodes(self) -> None:
        """Take those for lost that are on the nodes of lost ones and do not say that these live.

        Ray itself learns only after many seconds that a node is gone.
        """
        nodes = {host.node for host in self.all if host.is_lost and host.node}
        doubted = [host for host in self.all if host.is_ready and host.node in nodes]
        asked = {host.actor.is_on_node.remote(): host for host in doubted}
        if not asked:
            return
        answers, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=_NODE_PING_S)
        for host in doubted:
            host.is_lost = True
        for answer in answers:
            with suppress(self._ray.exceptions.RayError):
                asked[answer].is_lost = not self._ray.get(answer)

    def _hear(self, host: HostActor) -> None:
        while host.unheard and self._ray.wait([host.unheard[0]], timeout=0)[0]:
            try:
                host.facts = self._ray.get(host.unheard[0]) or host.facts
            except self._ray.exceptions.RayTaskError:
                # Its node lacks something, which the start of a worker tells.
                pass
            except self._ray.exceptions.RayError as error:
                host.is_lost = True
                self.lacked_memory = isinstance(error, self._ray.exceptions.OutOfMemoryError)
                return
            del host.unheard[0]

    def answering(self) -> list[HostActor]:
        """Return those that are ready, if they answer now or have been heard of in their work."""
        ready = self.look()
        idle = {host.actor.facts.remote(COMPARED): host for host in ready if not host.has_worked}
        if idle:
            _, silent = self._ray.wait(list(idle), num_returns=len(idle), timeout=_PING_S)
            unheard = [idle[reference] for reference in silent]
            ready = [host for host in ready if host not in unheard]
        return ready


def tell_lack_of_memory(ray: Any, actor: Any, rank: int) -> None:
    """Log it if Ray has killed the actor of a rank because its node was short of memory."""
    with suppress(Exception):
        reference = actor.is_on_node.remote()
        if not ray.wait([reference], timeout=_CAUSE_S)[0]:
            return
        try:
            ray.get(reference)
        except ray.exceptions.OutOfMemoryError:
            logger.warning("Ray has killed the actor of rank %d, %s", rank, LACK_OF_MEMORY)
