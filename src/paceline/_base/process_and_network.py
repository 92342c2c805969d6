"""Process and network: cores, waits, addresses, ports, settings."""

import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

LOOPBACK = "127.0.0.1"
LOOPBACK_HOSTS = (LOOPBACK, "localhost", "::1")

# Linux's number (sockios.h) of a question for the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
# IFNAMSIZ without the zero at the end.
_NAME_BYTES = 15
# Addresses of documents: nothing is sent there, but the system says by which way it would go.
_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an address, None if there is none.

    Args:
        address: An IP address, or a host's name that stands for an IPv4 address.
    """
    if sys.platform == "linux":
        try:
            wanted = socket.inet_aton(socket.gethostbyname(address))
        except (OSError, UnicodeError):
            pass
        else:
            return _ipv4_interface(wanted)
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def listening_address(host: str) -> str:
    """Return the listening address of a server for a host; the host itself if none is known."""
    try:
        return str(socket.getaddrinfo(host, None, listening_family(host))[0][4][0])
    except OSError:
        return host


def listening_family(host: str) -> socket.AddressFamily:
    """Return the address family of a server listening for a host."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def address_for_others(*, is_ipv6: bool = False) -> str:
    """Return this machine's address for other machines, or its name without a route."""
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket sends nothing: it only looks up the route.
            probe.connect((_FAR_AWAY[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _ipv4_interface(wanted: bytes) -> str | None:
    """Ask Linux, as psutil takes a runner time and memory to load."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:
                # An interface without an IPv4 address.
                continue
            if found == wanted:
                return name
    return None


def unix_user() -> str:
    """Return the name of the Unix user of this process; empty if the system has none."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""


_LOOK_INTERVAL_S = 0.01


def await_listener(host: str, port: int, timeout_s: float) -> OSError | None:
    """Wait until a process listens at an address; return why none could be reached in time.

    torch waits for a store itself, but looks twice a second at most, and prints pages of native
    stack traces while it does.

    Args:
        host: The address.
        port: The port.
        timeout_s: For how long to wait, in seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(timeout_s, 0.1)).close()
            return None
        except OSError as error:
            if time.monotonic() > deadline:
                return error
            time.sleep(_LOOK_INTERVAL_S)


class PortReservation:
    """Holds a free port until rank 0 listens there.

    On Linux the port stays bound (without listening) for the life of the reservation: no other
    process gets it, while rank 0, whose store allows address reuse, can listen on it. Elsewhere
    the port is only known to have been free.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]
        if sys.platform == "linux":
            # Set after the bind, so that the port was really free at that moment.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            self._socket.close()

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()

    def __enter__(self) -> "PortReservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


T = TypeVar("T")

_VARIABLE = "USE_LIBUV"


def with_available_store(make: Callable[[bool], T]) -> T:
    """Make an object with a TCPStore; try again without libuv if torch was built without libuv.

    torch asks for libuv unless USE_LIBUV is 0, and fails in such a build, as Debian's. The variable
    is set then, so that all later stores of this process do without libuv. Stores of both kinds
    understand each other.

    Args:
        make: Makes the store; its argument is whether to use libuv.
    """
    try:
        return make(os.environ.get(_VARIABLE, "1") == "1")
    except RuntimeError as error:
        if "without libuv" not in str(error) or os.environ.get(_VARIABLE) == "0":
            raise
    # The variable also counts for the stores that torch makes by itself later.
    os.environ[_VARIABLE] = "0"
    return make(False)


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Python runs signal handlers only between calls, so each wait returns this often.
SLICE_S = 0.1


def wait_until(wait: Callable[[float | None], T], timeout_s: float | None = None) -> T:
    """Wait until `wait` returns a true result; return the last result.

    Args:
        wait: Waits for some seconds, or without an end if it gets None, such as `Event.wait`.
        timeout_s: For how long to wait, in seconds; None for ever.
    """
    # Slices in the main thread only: Python runs signal handlers in no other thread.
    if threading.current_thread() is not threading.main_thread():
        return wait(timeout_s)
    if timeout_s is None:
        while not (result := wait(SLICE_S)):
            pass
        return result
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        result = wait(min(SLICE_S, left_s))
        if result or left_s <= SLICE_S:
            return result


def sleep(seconds: float) -> None:
    """Sleep like `time.sleep`, but let signal handlers run meanwhile."""
    wait_until(lambda slice_s: time.sleep(seconds if slice_s is None else slice_s), seconds)


def join(thread: threading.Thread, timeout_s: float | None = None) -> None:
    """Join a thread like `Thread.join`, but let signal handlers run meanwhile."""

    def wait(slice_s: float | None) -> bool:
        thread.join(slice_s)
        return not thread.is_alive()

    wait_until(wait, timeout_s)


def take(source: "queue.SimpleQueue[T] | queue.Queue[T]") -> T:
    """Return the next item of a queue, waiting until there is an item."""

    def wait(slice_s: float | None) -> list[T]:
        try:
            return [source.get(timeout=slice_s)]
        except queue.Empty:
            return []

    return wait_until(wait)[0]


def exit_code(process: "subprocess.Popen[bytes]") -> int:
    """Wait like `Popen.wait`, but let signal handlers run meanwhile."""

    def wait(slice_s: float | None) -> list[int]:
        try:
            return [process.wait(slice_s)]
        except subprocess.TimeoutExpired:
            return []

    return wait_until(wait)[0]


def integer_setting(name: str, default: int) -> int:
    """Return an environment variable as an integer of at least 1, or its default.

    Raises:
        ValueError: It is none.
    """
    text = os.environ.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(f"`{name}` must be an integer above 0, but got {text!r}.")
    return int(text)
