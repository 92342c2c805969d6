"""Placement of a pool's workers on a Ray cluster: resources are reserved, awaited, given back."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline._base.process_and_network import join
from paceline._training.workers.ray.cluster import (
    Bundles,
    RayConnection,
    Resources,
    added_up,
    given_bundles,
    num_fitting,
    told_resources,
    why_waiting,
)
from paceline._training.workers.ray.host_process import HostOrder
from paceline._training.workers.ray.hosts import LACK_OF_MEMORY, HostActor, HostActors
from paceline._training.workers.worker_failures import (
    PlacementError,
    PlacementTimeoutError,
    ResourcesError,
    TrainingFailedError,
)

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.05
_PLACE_INTERVAL_S = 1.0
# How long Ray may take to start actors that have their resources.
_START_S = 120.0
# How long missing workers are waited for without a word.
_TELL_WAIT_S = 5.0
# How long Ray may take to take resources back.
_RELEASE_S = 10.0


class RayHosts:
    """Placement of a pool's actors, an actor per worker: reserve, take and give back.

    The first of them are placed together. Later ones take bundles whose actor was lost, which Ray
    moves to other nodes, or any node with free resources. In a placement group of somebody else,
    such as that of a Ray Tune trial, they take its free bundles and nothing beyond. None is placed
    on a node that will be taken away, and the next start gives back those that are on one.

    The autoscaler of a cluster adds nodes for actors and placement groups that have no room.

    Args:
        connection: The cluster.
        wanted: The resources of each.
        strategy: How Ray spreads workers that are placed together.
        sample: Such an order as actors will get that are reserved while workers run.
    """

    def __init__(
        self, connection: RayConnection, wanted: Resources, strategy: str, sample: HostOrder
    ) -> None:
        self._connection = connection
        self._ray = connection.ray
        self._wanted = wanted
        self._strategy = strategy
        self._given = given_bundles(connection.ray, wanted)
        self._bundles = self._given
        self._actors = HostActors(connection.ray, wanted, sample)
        self._num_asked_for = 0
        # Reentrant lock: `take` calls `release` and `reserve` while it holds the lock.
        self._lock = threading.RLock()

    # ---- what there is -------------------------------------------------------------------

    def capacity(self) -> int:
        """Return how many workers could run at this moment, those of living actors included."""
        with self._lock:
            self._actors.leaving = self._connection.leaving()
            # While others work, nobody need wait for those that still load.
            num_ready = len(self._actors.look() or self._actors.placed())
            free = self._free_bundles()
            others = 0 if self._given is not None else self._num_fitting()
        return min(num_ready + len(free) + others, sys.maxsize)

    def check_possible(self, num_workers: int) -> None:
        """Check whether so many workers could run on an idle cluster, or nodes may be added.

        Raises:
            ResourcesError: They never can.
        """
        if self._given is not None:
            if len(self._given.indices) < num_workers:
                raise ResourcesError(self._given.describe_lack(num_workers, self._wanted))
        elif not (self._fit_on_nodes(num_workers) or self._connection.may_grow()):
            raise self._lack(num_workers)

    def _fit_on_nodes(self, num_workers: int) -> bool:
        return num_fitting(self._connection.total(), self._wanted) >= num_workers

    def _lack(self, num_workers: int, why: str = "") -> ResourcesError:
        each = told_resources(self._wanted)
        nodes = self._connection.total()
        wanted = {name: amount * num_workers for name, amount in self._wanted.items()}
        leaving = self._connection.leaving()
        but = f", without the {len(leaving)} that will be taken away," if leaving else ""
        return ResourcesError(
            f"{num_workers} worker(s) with {each} each need"
            f" {told_resources(wanted)}, but the {len(nodes)} node(s) of this Ray cluster{but} have"
            f" {told_resources(added_up(nodes, list(wanted)))}, on which"
            f" {num_fitting(nodes, self._wanted)} of them fit.{why} Hint: fewer workers, or less"
            " for each."
        )

    # ---- taking --------------------------------------------------------------------------

    def reserve(self, num_workers: int) -> int:
        """Begin to create actors for more workers, and return how many there are for certain.

        It returns 0 where `take` has to place all of them together.
        """
        with self._lock:
            self._actors.leaving = self._connection.leaving()
            ready = self._actors.answering()
            # While workers are on leaving nodes, their replacements are not placed together.
            is_anew = not self._actors.placed() and not any(h.has_worked for h in self._actors.all)
            if is_anew or self._strategy.startswith("STRICT_"):
                return len(ready)
            if len(ready) < num_workers:
                self._request(num_workers - len(ready))
            return len(ready)

    def request(self, num_workers: int) -> None:
        """Queue actors for more workers in Ray, so an autoscaler adds nodes for them.

        They count once they have answered, as those that were reserved.
        """
        with self._lock:
            is_together = self._given is not None or self._strategy.startswith("STRICT_")
            if is_together or not self._connection.may_grow():
                return
            leaving = self._actors.leaving = self._connection.leaving()
            self._actors.look()
            kept = [host for host in self._actors.all if host.node not in leaving]
            missing = num_workers - len(kept) - self._num_empty_bundles()
            if missing > 0 and num_workers != self._num_asked_for:
                self._num_asked_for = num_workers
                logger.warning(
                    "Asking the autoscaler of the Ray cluster for room for %d more worker(s) with"
                    " %s each.",
                    missing,
                    told_resources(self._wanted),
                )
            for _ in range(missing):
                self._actors.create(is_reserve=True)

    def cancel(self) -> None:
        """Give back the actors begun by `reserve`, except actors with past work."""
        with self._lock:
            self._actors.drop([host for host in self._actors.all if not host.has_worked])

    def take(self, num_workers: int, timeout_s: float) -> list[HostActor]:
        """Return actors for so many workers, once they are there; the others are given back.

        Args:
            num_workers: How many workers.
            timeout_s: How long to wait for resources that others use, and for nodes that an
                autoscaler may add, in seconds.

        Raises:
            PlacementError: Their resources were not there, as `PlacementTimeoutError` in time, or
                an actor did not start.
            ResourcesError: The autoscaler cannot add the nodes that are missing.
        """
        with self._lock:
            leaving = self._actors.leaving = self._connection.leaving()
            self._actors.drop([host for host in self._actors.all if host.node in leaving])
            self._shrink(num_workers)
            ready = self._actors.look()
            is_anew = not self._actors.placed()
            if self._strategy.startswith("STRICT_"):
                is_anew = len(ready) < num_workers
            if is_anew:
                self.release()
                self._place(num_workers, timeout_s)
            else:
                self.reserve(num_workers)
        # Some have their resources, and need time alone.
        needs_time = is_anew or not ready
        taken = self._await(num_workers, _START_S if needs_time else timeout_s, is_anew)
        with self._lock:
            for host in taken:
                host.has_worked = True
        return taken

    def keep_answering(self) -> None:
        """Give back the actors without an answer, after a failed start."""
        with self._lock:
            for host in self._actors.all:
                host.has_worked = False
            answering = self._actors.answering()
            self._actors.drop([host for host in self._actors.look() if host not in answering])

    def release(self) -> None:
        """Give all back."""
        with self._lock:
            hosts, self._actors.all = self._actors.all, []
            bundles, self._bundles = self._bundles, self._given
            own = None if bundles is self._given else bundles
            if not self._ray.is_initialized() or not (hosts or own):
                return
            # Without its head node, Ray waits for a minute and then ends this process.
            thread = threading.Thread(
                target=self._give_back, args=(hosts, own), name="paceline-release", daemon=True
            )
            thread.start()
            join(thread, _RELEASE_S)
            if thread.is_alive():
                logger.warning(
                    "The Ray cluster did not take back the resources of the workers within %g s, as"
                    " its head node may be gone. Ray takes them back when this process ends.",
                    _RELEASE_S,
                )

    def _give_back(self, hosts: Sequence[HostActor], own: Bundles | None) -> None:
        with suppress(Exception):
            for host in hosts:
                self._ray.kill(host.actor)
            if own is not None:
                own.remove()

    # ---- placing -------------------------------------------------------------------------

    def _request(self, missing: int) -> None:
        """Create actors for so many workers: in free bundles, and wherever else they fit."""
        for index in self._free_bundles()[:missing]:
            self._actors.create(self._bundles, index, is_reserve=True)
        if self._given is None:
            is_begun = any(not host.is_ready and host.bundle is None for host in self._actors.all)
            # Free resources, as reported by Ray, may have been given to actors begun before.
            for _ in range(0 if is_begun else min(missing, self._num_fitting())):
                self._actors.create(is_reserve=True)

    def _free_bundles(self) -> list[int]:
        """Return the bundles on staying nodes without an actor."""
        if self._bundles is None:
            return []
        return self._bundles.free(self._connection, [host.bundle for host in self._actors.all])

    def _num_empty_bundles(self) -> int:
        """Return the number of bundles without an actor; Ray moves bundles of lost nodes."""
        if self._bundles is None:
            return 0
        used = [host for host in self._actors.all if host.bundle is not None]
        return max(0, len(self._bundles.indices) - len(used))

    def _num_fitting(self) -> int:
        return num_fitting(self._connection.available(), self._wanted)

    def _shrink(self, num_workers: int) -> None:
        """Give back the actors beyond the number of workers to come."""
        surplus = self._actors.look()[num_workers:]
        if self._given is None and any(host.bundle is not None for host in surplus):
            # A placement group cannot give back some of its bundles.
            self.release()
            return
        self._actors.drop(surplus)

    def _place(self, num_workers: int, timeout_s: float) -> None:
        """Place actors together."""
        if self._given is not None:
            free = self._free_bundles()
            if len(free) < num_workers:
                raise PlacementError(self._given.describe_lack(num_workers, self._wanted))
            for index in free[:num_workers]:
                self._actors.create(self._bundles, index, is_reserve=False)
            return
        self._bundles = Bundles.of_own(self._wanted, num_workers, self._strategy)
        self._await_bundles(num_workers, timeout_s)
        for index in range(num_workers):
            self._actors.create(self._bundles, index, is_reserve=False)

    def _await_bundles(self, num_workers: int, timeout_s: float) -> None:
        """Wait for resources used by others, or for nodes still to be added.

        Not if nodes are gone that had them.
        """
        assert self._bundles is not None
        began = time.monotonic()
        is_told = False
        while not self._has_room(self._bundles):
            may_grow, fits = self._connection.may_grow(), self._fit_on_nodes(num_workers)
            if not (fits or may_grow):
                raise PlacementError(self._describe_shortage(num_workers, timeout_s))
            if time.monotonic() - began > timeout_s:
                raise PlacementTimeoutError(self._describe_shortage(num_workers, timeout_s))
            group_id = self._bundles.group.id.hex()
            if not fits and self._connection.is_infeasible(group_id):
                raise self._lack(num_workers, " Its autoscaler cannot add the others.")
            if not is_told:
                is_told = True
                logger.warning(
                    "%d worker(s) with %s each wait for up to %.3g s for room on the Ray cluster:"
                    " %s.",
                    num_workers,
                    told_resources(self._wanted),
                    timeout_s,
                    why_waiting(
                        self._connection, self._wanted, num_workers, self._strategy, group_id
                    ),
                )

    def _has_room(self, bundles: Bundles) -> bool:
        """Wait a moment for bundles; return whether they are there.

        Raises:
            TrainingFailedError: The node of this process was lost; Ray removes the requests from
                there.
        """
        try:
            is_there: bool = bundles.group.wait(_PLACE_INTERVAL_S)
        except Exception as error:
            if self._connection.has_own_node():
                raise
            raise TrainingFailedError(
                "The Ray node of the driver must run, but its process `raylet` is gone, and Ray"
                " gives the driver no workers. Hint: start Ray and the script again; with"
                " `run_dir=`, a run goes on from its last checkpoint."
            ) from error
        return is_there

    def _await(self, num_workers: int, timeout_s: float, is_anew: bool) -> list[HostActor]:
        """Wait until so many are ready, and return them."""
        began = time.monotonic()
        is_told = is_anew
        while len(ready := self._actors.look()) < num_workers:
            if len(self._actors.all) < (num_workers if is_anew else 1):
                killed = f"Ray has killed one, {LACK_OF_MEMORY}"
                why = killed if self._actors.lacked_memory else "one did not."
                raise PlacementError(f"The actors of all workers must start, but {why}")
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                kind = PlacementError if is_anew else PlacementTimeoutError
                raise kind(self._describe_shortage(num_workers, timeout_s))
            if not is_told and waited_s > _TELL_WAIT_S:
                is_told = True
                logger.warning(
                    "%d of %d workers are there; the others wait for up to %.3g s for %s each.",
                    len(ready),
                    num_workers,
                    timeout_s,
                    told_resources(self._wanted),
                )
            if not is_anew:
                self.reserve(num_workers)
            time.sleep(_LOOK_INTERVAL_S)
        return ready[:num_workers]

    def _describe_shortage(self, num_workers: int, timeout_s: float) -> str:
        available = added_up(self._connection.available(), list(self._wanted))
        return (
            f"{num_workers} worker(s) with {told_resources(self._wanted)} each must"
            f" find their resources within {timeout_s:g} s, but the Ray"
            f" cluster has {told_resources(available)} to give."
        )


def trial_resources(bundles: Sequence[Mapping[str, float]]) -> "PlacementGroupFactory":
    """Return a trial's resources for Ray Tune: none for itself, and a bundle for each worker."""
    from ray.tune import PlacementGroupFactory

    return PlacementGroupFactory([{}, *(dict(bundle) for bundle in bundles)], strategy="PACK")


def trainable_name(function: Callable[..., Any], default: str) -> str:
    """Return the name of a function for Ray Tune's trials and directories.

    Args:
        function: The function; what `functools.partial` wraps has the name.
        default: The name for a lambda.
    """
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else default
