"""What can be asked of a master about its nodes, its pools and its queue."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from paceline.client._http_session import HttpSession

if TYPE_CHECKING:
    from paceline.messages.nodes_and_slots import Node, Slot
    from paceline.messages.pools_and_queue import Policy, Pool, QueueEntry


class ClusterClient:
    """The part of a client that is about nodes, pools and the queue."""

    _session: HttpSession

    def slots(self) -> "list[Slot]":
        """Return the master's slots and who uses them."""
        from paceline.messages.nodes_and_slots import Slot

        return self._session.get("slots", list[Slot])

    def drain_slot(self, node: str, slot: int, *, finish: bool = False) -> None:
        """Place nothing more on one slot.

        Args:
            node: The name of its node; `local` is the master's own machine.
            slot: Its number on the node.
            finish: A trial that runs there ends there; otherwise it stores a checkpoint and goes
                on elsewhere.

        Raises:
            ApiError: There is no such slot.
        """
        self._drain(f"nodes/{node}/slots/{slot}/drain", finish)

    def resume_slot(self, node: str, slot: int) -> None:
        """Take a drained slot back; raises like `drain_slot`."""
        self._session.send("POST", f"nodes/{node}/slots/{slot}/resume")

    def nodes(self, *, include_local: bool = False) -> "list[Node]":
        """Return the machines whose runners have registered, and what runs there.

        Args:
            include_local: Put the master's own machine before them, as the node `local`, if it has
                slots.
        """
        from paceline.messages.nodes_and_slots import Node

        return self._session.get("nodes", list[Node], include_local=include_local or None)

    def drain_node(self, name: str, *, finish: bool = False) -> None:
        """Place nothing more on a node.

        Args:
            name: The node's name.
            finish: Trials that run there end there; otherwise they store a checkpoint and go on
                elsewhere.

        Raises:
            ApiError: There is no such node.
        """
        self._drain(f"nodes/{name}/drain", finish)

    def resume_node(self, name: str) -> None:
        """Take a drained node back; raises like `drain_node`."""
        self._session.send("POST", f"nodes/{name}/resume")

    def forget_node(self, name: str) -> None:
        """Forget a node that is lost, has left or is drained.

        Raises:
            ApiError: There is no such node, or it has attempts, or is not lost,
                has not left and is not drained.
        """
        self._session.send("DELETE", f"nodes/{name}")

    def pools(self) -> "list[Pool]":
        """Return the pools that have nodes or settings."""
        from paceline.messages.pools_and_queue import Pool

        return self._session.get("pools", list[Pool])

    def set_pool(
        self,
        name: str,
        *,
        policy: "Policy" = "fifo",
        max_slots: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Say how a pool is shared; what is not given gets its default.

        Args:
            name: The name of the pool; there need be no node in it yet.
            policy: `fifo`, `priority` or `fair_share`.
            max_slots: How many of its slots may be in use at once; None is no limit.
            labels: Nodes that have all of these, and name no pool themselves, belong to it.

        Raises:
            ApiError: One of them is not possible.
        """
        from paceline.messages.pools_and_queue import SetPool

        body = SetPool(policy=policy, max_slots=max_slots, labels=dict(labels or {}))
        self._session.send("PUT", f"pools/{name}", content=body.model_dump_json().encode())

    def reset_pool(self, name: str) -> None:
        """Share a pool first come, first served, without a limit and without labels.

        Raises:
            ApiError: It has no settings.
        """
        self._session.send("DELETE", f"pools/{name}")

    def queue(self, *, pool: str | None = None, limit: int = 100) -> "list[QueueEntry]":
        """Return the trials that wait for slots, the next one first, and why each waits."""
        from paceline.messages.pools_and_queue import QueueEntry

        return self._session.get("queue", list[QueueEntry], pool=pool, limit=limit)

    def move_in_queue(
        self,
        experiment_id: int,
        *,
        ahead_of: int | None = None,
        behind: int | None = None,
        to: Literal["front", "end"] | None = None,
    ) -> None:
        """Move an experiment in the queue of its pool, among those of the same priority.

        Args:
            experiment_id: The experiment.
            ahead_of: It goes right ahead of this experiment,
            behind: or right behind this one,
            to: or to an end of the queue.

        Raises:
            ApiError: One of them has ended or waits in another pool, or not exactly one is given.
        """
        from paceline.messages.pools_and_queue import MoveExperiment

        body = MoveExperiment(experiment_id=experiment_id, ahead_of=ahead_of, behind=behind, to=to)
        self._session.send("POST", "queue/move", content=body.model_dump_json().encode())

    def _drain(self, path: str, finish: bool) -> None:
        from paceline.messages.nodes_and_slots import DrainNode

        body = DrainNode(finish=finish).model_dump_json().encode()
        self._session.send("POST", path, content=body)
