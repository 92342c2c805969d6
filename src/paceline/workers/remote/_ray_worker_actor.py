"""The Ray actor that holds a worker's resources and starts its process."""

from collections.abc import Sequence
from typing import Any


def make_worker_actor_class() -> Any:
    """Return the class of the actors; it travels by value, as their node may lack Paceline."""

    class PacelineWorker:
        def __init__(self) -> None:
            import os
            import threading

            self.parent = os.getppid()
            threading.Thread(target=self.end_with_node, daemon=True).start()

        def end_with_node(self) -> None:
            """End this process, and so its worker, with the one of Ray that stands for the node.

            Ray itself does not see that a raylet has ended which nobody has waited for, as where
            the first process of a container does not.
            """
            import os
            import time

            while self.is_on_node():
                time.sleep(1.0)
            os._exit(1)

        def is_on_node(self) -> bool:
            import os

            return os.getppid() == self.parent

        def facts(self, packages: Sequence[str]) -> dict[str, Any]:
            import os
            import platform
            from importlib import metadata

            import ray

            versions = {"Python": platform.python_version()}
            for name in packages:
                try:
                    versions[name] = metadata.version(name)
                except metadata.PackageNotFoundError:
                    versions[name] = "none"
            return {
                "node": ray.get_runtime_context().get_node_id(),
                "address": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call] # Ray
                "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
                "versions": versions,
            }

        def mark_of(self, directory: str) -> Any:
            from paceline.workers.remote._script_directory import mark_of_script_directory

            return mark_of_script_directory(directory)

        def warm_up(self, order: Any) -> None:
            from paceline.workers.remote._ray_host_process import warm_up

            warm_up(order)

        def reserve_port(self) -> int:
            from paceline._listening import PortReservation

            # Held as long as the actor.
            self.port = PortReservation()
            return self.port.port

        def start(self, order: Any, archive: bytes | None) -> Any:
            from paceline.workers.remote._ray_host_process import WorkerHost

            self.host = WorkerHost(order, archive)
            return self.host.start()

    return PacelineWorker
