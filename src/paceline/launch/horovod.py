"""Start one worker per slot for Horovod, as ``python3 -m paceline.launch.horovod``.

It is the launcher of `torch_distributed` with the same options, on one node. The workers get what
`horovodrun --gloo` sets as well, and meet in Horovod's own rendezvous server, which runs here.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.launch._backend_variables import Backend, check_installed
from paceline.launch._launcher_arguments import LaunchArgumentError, LaunchOptions
from paceline.launch.torch_distributed import launch
from paceline.workers import LOOPBACK, NodeLayout, WorkerVariables

_HOST = "localhost"


class HorovodBackend(Backend):
    """Horovod's rendezvous server, and the variables that lead the workers there."""

    @contextmanager
    def open(self, options: LaunchOptions) -> Iterator[WorkerVariables]:
        """Yield what returns the variables of the workers, while the server runs.

        Raises:
            LaunchArgumentError: Horovod is not installed, or there are several nodes.
        """
        if options.num_nodes > 1:
            raise LaunchArgumentError(
                "`--nnodes` must be 1 with `paceline.launch.horovod`, but got"
                f" {options.num_nodes}. Hint: on several nodes, start the script with"
                " `horovodrun --gloo -np N -H node0:4,node1:4 python train.py`."
            )
        check_installed("horovod", self.launcher, "build it as `make test-backends` does")
        with _rendezvous_server() as (server, port):

            def variables(layout: NodeLayout) -> list[dict[str, str]]:
                # It forgets the addresses of an earlier start.
                server.init(_horovod_slots(layout.num_local_workers))
                return _horovod_variables(layout, port)

            yield variables


@contextmanager
def _rendezvous_server() -> Iterator[tuple[Any, int]]:
    # Only this launcher needs them.
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    try:
        yield server, port
    finally:
        server.stop()


def _horovod_slots(num_workers: int) -> list[Any]:
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    slots: list[Any] = get_host_assignments([HostInfo(_HOST, num_workers)], num_workers)
    return slots


def _horovod_variables(layout: NodeLayout, port: int) -> list[dict[str, str]]:
    size = str(layout.num_local_workers)
    same = {
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_SIZE": size,
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": _HOST,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
    }
    ranks = map(str, range(layout.num_local_workers))
    return [{**same, "HOROVOD_RANK": rank, "HOROVOD_LOCAL_RANK": rank} for rank in ranks]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher and return its exit code, as `torch_distributed.main` does."""
    return launch(arguments, HorovodBackend("horovod"))


if __name__ == "__main__":
    sys.exit(main())
