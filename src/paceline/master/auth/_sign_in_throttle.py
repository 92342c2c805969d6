"""Throttling of wrong passwords and tokens, for each sender on its own."""

import ipaddress
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable
from pathlib import Path

_MAX_SENDERS = 10_000
_PROC = Path("/proc/net")


class Throttle:
    """Count the failures of each sender within a window; thread-safe, of bounded size.

    Args:
        max_failures: How many each sender has in a window.
        window_s: Length of the window in seconds.
    """

    def __init__(self, max_failures: int, window_s: float = 60.0) -> None:
        self.max_failures = max_failures
        self.window_s = window_s
        self._lock = threading.Lock()
        # The sender that failed last comes last.
        self._failures: OrderedDict[Hashable, deque[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def allows(self, sender: Hashable) -> bool:
        """Tell whether a sender may try."""
        oldest = time.monotonic() - self.window_s
        with self._lock:
            failures = self._failures.get(sender, ())
            return sum(moment > oldest for moment in failures) < self.max_failures

    def fail(self, sender: Hashable) -> None:
        """Count a failure."""
        with self._lock:
            failures = self._failures.setdefault(sender, deque(maxlen=self.max_failures))
            failures.append(time.monotonic())
            self._failures.move_to_end(sender)
            while len(self._failures) > _MAX_SENDERS:
                self._failures.popitem(last=False)

    def forgive(self, sender: Hashable) -> None:
        """Forget the failures of a sender who got in."""
        with self._lock:
            self._failures.pop(sender, None)


def sender_at(peer: tuple[str, int] | None, own: tuple[str, int | None] | None) -> str:
    """Name the sender at the other end of a connection, so that strangers are told apart.

    That is the address, or the network of 64 bits of an IPv6 address, as one sender has all of
    them. All users of this machine have the same address; Linux tells which one it is.

    Args:
        peer: Address and port of the other end.
        own: Address and port of this end.
    """
    if peer is None:
        return ""
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if address.is_loopback:
        user = None if own is None else _user_of(peer, own, address.version)
        return str(address) if user is None else f"{address} user {user}"
    if address.version == 4:
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((address, 64), strict=False))


def _user_of(peer: tuple[str, int], own: tuple[str, int | None], version: int) -> str | None:
    """Return the Unix user who has the other end of a connection within this machine."""
    ends = [f"{port or 0:04X}" for _, port in (peer, own)]
    try:
        lines = (_PROC / ("tcp" if version == 4 else "tcp6")).read_text().splitlines()
    except OSError:
        return None
    for line in lines[1:]:
        # Number, this end, other end, state, queues, timer, retransmits, user.
        fields = line.split()
        if [field.rpartition(":")[2] for field in fields[1:3]] == ends:
            return fields[7]
    return None
