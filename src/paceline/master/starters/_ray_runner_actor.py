"""The Ray actor that holds the resources of a runner and starts its process."""

from collections.abc import Mapping
from typing import Any


def make_runner_actor_class() -> Any:
    """Return the class of the actors; it travels by value, as their node may lack Paceline."""

    class PacelineRunner:
        """Runs one runner, which ends with this actor; the last one of a group ends the group.

        Args:
            order: What the guard is told.
            guard: The text of the guard, see `_ray_guard.py`.
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

            threading.Thread(target=self.end_with, args=(os.getppid(),), daemon=True).start()
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

        def end_with(self, parent: int) -> None:
            """End this process, and so its runner, with the raylet of the node.

            Ray itself does not see that one has ended which nobody has waited for.
            """
            import os
            import time

            while os.getppid() == parent:
                time.sleep(1.0)
            os._exit(1)

        def end(self) -> tuple[bool, str | None]:
            """Return whether the runner has ended, and why if it failed."""
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
                return True

    return PacelineRunner
