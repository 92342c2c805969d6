"""Process of a master for talking to a Ray cluster: answers requests, a line for each.

This module must not load the master.
"""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline._cluster.master.starters import ray_guard as _ray_guard
from paceline._training.workers.ray.cluster import (
    RayConnection,
    join_ray,
    make_node_watch,
    told_resources,
    why_waiting,
)


def make_runner_actor_class() -> Any:
    """Return the actor class, defined by value because the nodes may lack Paceline."""
    end_with_node = make_node_watch()

    class PacelineRunner:
        """Actor of a runner: both end together, and a group's last actor removes the group.

        Args:
            order: The guard's order.
            guard: The text of the guard, see `ray_guard.py`.
            group: The names of the actors that start together.
            namespace: Their namespace.
        """

        def __init__(
            self, order: Mapping[str, Any], guard: str, group: list[str], namespace: str
        ) -> None:
            import json
            import os
            import subprocess
            import sys
            import threading

            threading.Thread(target=end_with_node, args=(os.getppid(),), daemon=True).start()
            self.group = group
            self.namespace = namespace
            self.has_ended = False
            self.error: str | None = None
            self.guard = subprocess.Popen(
                [sys.executable, "-c", guard],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self.guard.stdin is not None
            self.guard.stdin.write(json.dumps(order) + "\n")
            self.guard.stdin.flush()
            self.guard.wait()
            threading.Thread(target=self.await_end, daemon=True).start()

        def end(self) -> tuple[bool, str | None]:
            """Return whether the runner has ended, and its error if the runner failed."""
            return self.has_ended, self.error

        def await_end(self) -> None:
            import json
            import os
            import time

            import ray

            assert self.guard.stdout is not None
            told = self.guard.stdout.read()
            self.error = json.loads(told) if told else None
            self.has_ended = True
            if self.error is not None:
                # The master asks for it meanwhile.
                time.sleep(10)
            # Ray takes back a group as a whole.
            while any(map(self.is_at_work, self.group)):
                time.sleep(2)
            group = ray.util.get_current_placement_group()
            if group is not None:
                ray.util.remove_placement_group(group)
            os._exit(0)

        def is_at_work(self, name: str) -> bool:
            import ray

            try:
                other = ray.get_actor(name, namespace=self.namespace)
                return not ray.get(other.end.remote(), timeout=30)[0]
            except (ValueError, ray.exceptions.RayActorError):
                return False
            except ray.exceptions.GetTimeoutError:
                # A silent runner may still be at work.
                return True

    return PacelineRunner


_ANSWER_S = 5.0


class RayRunners:
    """Runners of a pool on a Ray cluster.

    Each group has a placement group, whose name has the names of its runners, and an actor for each
    of them. They are detached, so the next master finds them.

    Args:
        options: `address` of the cluster, None to start one on this machine; `namespace`, `pool`,
            `directory`, `strategy`, and the `bundle` of resources of each runner.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._prefix = f"{options['namespace']}:{options['pool']}:"
        self._guard = Path(_ray_guard.__file__).read_text()
        self._handles: dict[str, Any] = {}
        self._is_own = options["address"] is None
        if self._is_own:
            # Ray joins the cluster that this names.
            os.environ.pop("RAY_ADDRESS", None)
        else:
            join_ray(options["address"], options["namespace"])
        self._connection = RayConnection()
        self._ray = self._connection.ray

    def close(self) -> None:
        """Leave the cluster; a cluster started here ends."""
        self._connection.close()
        if not self._is_own:
            self._ray.shutdown()

    def start(self, orders: list[dict[str, Any]]) -> None:
        """Request a placement group and its actors; the actors wait for the group."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        names = [order["name"] for order in orders]
        bundle = self._options["bundle"]
        group = placement_group(
            [bundle] * len(orders),
            strategy=self._options["strategy"],
            name=self._prefix + ",".join(names),
            lifetime="detached",
        )
        actors = self._ray.remote(make_runner_actor_class())
        custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        for index, order in enumerate(orders):
            self._handles[order["name"]] = actors.options(
                name=order["name"],
                namespace=self._options["namespace"],
                lifetime="detached",
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources=custom,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            ).remote(
                {**order, "directory": self._options["directory"]},
                self._guard,
                names,
                self._options["namespace"],
            )

    def runners(self) -> dict[str, Any]:
        """Return the waiting and running runners, reasons for waiting, and new failures."""
        found, failed, waiting = {}, {}, []
        for group_id, names, state in self._groups():
            if state == "PENDING":
                found.update(dict.fromkeys(names, False))
                waiting.append(self._describe_wait(group_id, len(names)))
                continue
            alive, errors = self._look_at(names)
            found.update(dict.fromkeys(alive, True))
            failed.update(errors)
            if not alive and not errors:
                self._remove(group_id, names)
        for name in self._handles.keys() - found.keys():
            del self._handles[name]
        return {"runners": found, "failed": failed, "waiting": list(dict.fromkeys(waiting))}

    def cancel(self, name: str) -> None:
        """Remove the group of a runner still waiting."""
        for group_id, names, state in self._groups():
            if name in names and state == "PENDING":
                self._remove(group_id, names)

    def _describe_wait(self, group_id: str, num_runners: int) -> str:
        bundle, strategy = self._options["bundle"], self._options["strategy"]
        why = why_waiting(self._connection, bundle, num_runners, strategy, group_id)
        each = f"with {told_resources(bundle)} each"
        if num_runners > 1 and strategy == "STRICT_SPREAD":
            each += ", each on another node,"
        return f"The Ray cluster has no room for {num_runners} runner(s) {each} yet: {why}."

    def _groups(self) -> list[tuple[str, list[str], str]]:
        """Return the id, the runners and the state of each placement group of the pool."""
        from ray.util.placement_group import placement_group_table

        return [
            (group_id, group["name"].removeprefix(self._prefix).split(","), group["state"])
            for group_id, group in placement_group_table().items()
            if group["name"].startswith(self._prefix) and group["state"] != "REMOVED"
        ]

    def _look_at(self, names: list[str]) -> tuple[list[str], dict[str, str]]:
        """Return the running runners of a placed group, and the errors of failed ones."""
        ray = self._ray
        alive, errors = [], {}
        ends = {}
        for name in names:
            handle = self._handles.get(name)
            with suppress(ValueError):  # it has ended
                handle = handle or self._actor(name)
                self._handles[name] = handle
                ends[name] = handle.end.remote()
        ready: list[Any] = []
        if ends:
            ready, _ = ray.wait([*ends.values()], num_returns=len(ends), timeout=_ANSWER_S)
        for name, end in ends.items():
            if end not in ready:
                # Unanswered calls mean a starting actor, or a node out of reach for now.
                alive.append(name)
                continue
            try:
                has_ended, error = ray.get(end)
            except ray.exceptions.RayActorError as lost:
                error = _creation_error(str(lost))
                has_ended = True
            if not has_ended:
                alive.append(name)
            elif error is not None:
                errors[name] = error
        return alive, errors

    def _actor(self, name: str) -> Any:
        return self._ray.get_actor(name, namespace=self._options["namespace"])

    def _remove(self, group_id: str, names: list[str]) -> None:
        from ray import PlacementGroupID
        from ray.util.placement_group import PlacementGroup, remove_placement_group

        for name in names:
            # Actors waiting for their placement group would wait for ever without a kill.
            with suppress(ValueError):
                self._ray.kill(self._actor(name))
        remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group_id)))


def _creation_error(text: str) -> str | None:
    """Return the reason for an actor's failed creation; None for an actor lost later."""
    lines = text.strip().splitlines()
    return f"Its actor failed: {lines[-1]}" if "creation task" in text else None


def main() -> None:
    """Answer the requests from the input until the input is closed."""
    # Private copy of standard output: anything printed by Ray must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runners: RayRunners | None = None
    for line in sys.stdin:
        request = json.loads(line)
        method = request.pop("method")
        try:
            runners = runners or RayRunners(json.loads(sys.argv[1]))
            answer = {"value": getattr(runners, method)(**request)}
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {lines[-1]}"}
        print(json.dumps(answer), file=answers, flush=True)
    if runners is not None:
        runners.close()


if __name__ == "__main__":
    main()
