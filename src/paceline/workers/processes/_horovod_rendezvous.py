"""The rendezvous of Horovod for workers of one machine: its server, and the variables of each."""

from types import TracebackType
from typing import Any

from paceline._network_interfaces import LOOPBACK

_HOST = "localhost"


class HorovodRendezvous:
    """Horovod's rendezvous server, which runs in this process until `stop`.

    It gives the workers what `horovodrun --gloo` gives them.

    Raises:
        ImportError: Horovod is not installed.
    """

    def __init__(self) -> None:
        # Only those who use Horovod need it.
        from horovod.runner.http.http_server import RendezvousServer

        self._server: Any = RendezvousServer()
        self._port = self._server.start()

    def variables(self, num_workers: int) -> list[dict[str, str]]:
        """Prepare a start of so many workers, and return the variables of each, in rank order."""
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

        # It forgets the addresses of an earlier start.
        self._server.init(get_host_assignments([HostInfo(_HOST, num_workers)], num_workers))
        return horovod_variables(num_workers, self._port)

    def stop(self) -> None:
        """End the server."""
        self._server.stop()

    def __enter__(self) -> "HorovodRendezvous":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def horovod_variables(num_workers: int, port: int) -> list[dict[str, str]]:
    """Return the variables of workers that meet at a port of this machine, in rank order."""
    size = str(num_workers)
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
    ranks = map(str, range(num_workers))
    return [{**same, "HOROVOD_RANK": rank, "HOROVOD_LOCAL_RANK": rank} for rank in ranks]
