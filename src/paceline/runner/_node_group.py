"""What an attempt on several nodes needs on each: where they meet, and by which interface."""

from collections.abc import Mapping

from paceline._listening import PortReservation
from paceline._network_interfaces import interface_of
from paceline.journal import MEETING_PORT_VARIABLE, RunDirectory
from paceline.messages.attempts import AttemptSpec

_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


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
