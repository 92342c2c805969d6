"""What an attempt on several nodes needs on each: where they meet, and by which interface."""

import fcntl
import socket
import struct
import sys
from collections.abc import Mapping

from paceline._listening import PortReservation
from paceline.journal import MEETING_PORT_VARIABLE, RunDirectory
from paceline.messages.attempts import AttemptSpec

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


class NodeGroup:
    """The nodes of an attempt, as one of their runners sees them.

    The runner of the first node keeps a port free on which the launchers of all nodes meet.

    Args:
        run: The run directory of the attempt on this node.
        spec: The attempt.
    """

    def __init__(self, run: RunDirectory, spec: AttemptSpec) -> None:
        self._run = run
        self.has_others = spec.num_members > 1
        is_first = self.has_others and spec.member == 0
        self._reservation = PortReservation() if is_first else None

    @property
    def port(self) -> int | None:
        """A port for all nodes, of the first one."""
        return None if self._reservation is None else self._reservation.port

    def variables(self, port: int, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which a launcher finds the others.

        Args:
            port: Where the nodes meet.
            environment: The variables of the entrypoint.
        """
        found = {MEETING_PORT_VARIABLE: str(port)}
        info = self._run.read_info()
        # Gloo would take the address of the host's name, which others may not reach.
        if _INTERFACE_VARIABLE not in environment:
            interface = interface_of(info.container_addrs[info.container_rank])
            if interface is not None:
                found[_INTERFACE_VARIABLE] = interface
        return found

    def close(self) -> None:
        """Give the port back."""
        if self._reservation is not None:
            self._reservation.close()


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an IPv4 address, None if none has it."""
    if sys.platform != "linux":
        return None
    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except (OSError, UnicodeError):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:
                continue
            if found == wanted:
                return name
    return None
