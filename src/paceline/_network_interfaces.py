"""Addresses of this machine, and the network interfaces that have them."""

import socket
import struct
import sys

LOOPBACK = "127.0.0.1"
LOOPBACK_HOSTS = (LOOPBACK, "localhost", "::1")

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15
# Addresses of documents: nothing is sent there, but the system says by which way it would go.
_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has an address, None if none has it.

    Args:
        address: An IP address, or a host's name that stands for an IPv4 address.
    """
    if sys.platform == "linux":
        try:
            wanted = socket.inet_aton(socket.gethostbyname(address))
        except (OSError, UnicodeError):
            pass
        else:
            return _interface_of_ipv4(wanted)
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def listening_address(host: str) -> str:
    """Return the address at which a server for a host listens; the host if none is known."""
    try:
        return str(socket.getaddrinfo(host, None, listening_family(host))[0][4][0])
    except OSError:
        return host


def listening_family(host: str) -> socket.AddressFamily:
    """Return the family of addresses in which a server for a host listens."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def address_for_others(*, is_ipv6: bool = False) -> str:
    """Return the address by which other machines reach this one, or its name if it has no route."""
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_FAR_AWAY[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _interface_of_ipv4(wanted: bytes) -> str | None:
    """Ask Linux, as psutil takes a runner time and memory to load."""
    import fcntl

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
