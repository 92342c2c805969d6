"""Start runners as actors of a Ray cluster, in placement groups."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.config import Section
from paceline.master.starters._cluster_programs import RequestProgram
from paceline.master.starters._starter_base import RunnerOrder, Starter, StarterError

_Amount = Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False)]


class RayOptions(Section):
    """Fields of `options`.

    Attributes:
        address: The address of the cluster, such as `head:6379`, or `auto` for the one that this
            machine is a node of.
        start: Whether to start a cluster of this machine alone, which ends with the master.
        strategy: Whether the runners of one trial must be on different nodes (`STRICT_SPREAD`), or
            on as few as possible (`PACK`).
        cpus_per_node: CPUs of each runner.
        gpus_per_node: GPUs of each runner.
        resources: Further resources of Ray of each runner.
    """

    address: Annotated[str, Field(min_length=1)] | None = None
    start: bool = False
    strategy: Literal["STRICT_SPREAD", "PACK"] = "STRICT_SPREAD"
    cpus_per_node: _Amount = 1.0
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    resources: dict[str, _Amount] = {}

    @model_validator(mode="after")
    def _check_cluster(self) -> "RayOptions":
        if (self.address is None) != self.start:
            raise ValueError("`options` must have either `address` or `start: true`")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                "`address` must be that of the cluster, such as head:6379, but got that of a Ray"
                f" client ({self.address}): the machine of the master must be a node"
            )
        return self


class RayStarter(Starter):
    """One actor for each runner, in one placement group for those that start together.

    Another process talks to Ray. The actors are detached: they go on without it and without this
    master, unless it has started the cluster.
    """

    Options = RayOptions
    module = "ray"
    options: RayOptions

    def __init__(self, pool: str, cluster_id: str, directory: str, options: Section) -> None:
        super().__init__(pool, cluster_id, directory, options)
        self._waiting: str | None = None
        self._program = RequestProgram(
            "Ray",
            [sys.executable, "-m", "paceline.master.starters._ray_runners", self._settings()],
        )

    def start(self, order: RunnerOrder) -> None:
        """Ask for an actor."""
        self.start_group([order])

    def start_group(self, orders: Sequence[RunnerOrder]) -> None:
        """Ask for a placement group with an actor in each bundle."""
        self._program.ask("start", orders=[_as_json(order) for order in orders])

    def runners(self) -> dict[str, bool]:
        """Return the runners in the placement groups of this pool."""
        answer = self._program.ask("runners")
        if answer["failed"]:
            why = [f"The runner {name} failed. {text}" for name, text in answer["failed"].items()]
            raise StarterError(" ".join(why))
        self._waiting = " ".join(answer["waiting"]) or None
        found: dict[str, bool] = answer["runners"]
        return found

    def why_waiting(self) -> str | None:
        """Return what the placement groups that wait lack."""
        return self._waiting

    def cancel(self, name: str) -> None:
        """Remove the placement group of a runner that waits."""
        self._program.ask("cancel", name=name)

    def close(self) -> None:
        """End the process that talks to Ray."""
        self._program.close()

    def _settings(self) -> str:
        options = self.options
        bundle = {
            "CPU": options.cpus_per_node,
            "GPU": options.gpus_per_node,
            **options.resources,
        }
        return json.dumps(
            {
                "address": options.address,
                "namespace": f"paceline-{self.cluster_id}",
                "pool": self.pool,
                "directory": self.directory,
                "strategy": options.strategy,
                "bundle": {name: amount for name, amount in bundle.items() if amount},
            }
        )


def _as_json(order: RunnerOrder) -> dict[str, Any]:
    return {
        "name": order.name,
        "token": order.token,
        "certificate": order.certificate,
        "command": [*order.command, "--name", order.name],
    }
