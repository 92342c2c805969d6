"""Process and network: cores, waits, terminal text, addresses, ports, programs, messages."""

import json
import os
import queue
import re
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import IO, Any, TextIO, TypeAlias, TypeVar

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


# Control characters but newline and tab, C1 among them; marks, embeddings and overrides of the
# direction; separators of lines; annotations; halves of surrogate pairs, which no stream takes.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb"
    "\ud800-\udfff]"
)


def terminal_text(text: str) -> str:
    """Return text with a blank in place of each character able to change a terminal."""
    return _UNSAFE.sub(" ", text)


# Control sequences and characters but newline and tab.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor movements
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles and links
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f]"
)
_COLOR = re.compile(r"\x1b\[([0-9;]{0,40})m")
MAX_COLORS = 200
"""How many changes of colour a line has at most; one with more is shown plain."""

Colors: TypeAlias = tuple[tuple[int, str], ...]
"""Changes of colour in a text: where, in characters of it, and the parameters of the sequence."""


def split_colors(text: str) -> tuple[str, Colors]:
    """Return text without control sequences, and the changes of colour among them."""
    colors: list[tuple[int, str]] = []
    removed = 0
    # Most lines hold none.
    for found in _CONTROL.finditer(text) if "\x1b" in text else ():
        if color := _COLOR.fullmatch(found[0]):
            colors.append((found.start() - removed, color[1]))
        removed += len(found[0])
    return _CONTROL.sub("", text), tuple(colors) if len(colors) <= MAX_COLORS else ()


def join_colors(text: str, colors: Iterable[tuple[int, str]]) -> str:
    """Return text with its changes of colour as control sequences, reset at the end."""
    parts, start = [], 0
    for at, color in colors:
        parts.append(f"{text[start:at]}\x1b[{color}m")
        start = max(start, at)
    return f"{''.join(parts)}{text[start:]}\x1b[0m" if parts else text


def escape_in_json(document: str) -> str:
    """Return JSON with terminal control characters escaped; only strings can contain them."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


# A spreadsheet takes text that begins so for a formula, and runs it.
_FORMULA = re.compile(r"[=+\-@\t\r]")


def csv_text(text: str) -> str:
    """Return a text as a CSV cell that no spreadsheet runs as a formula."""
    return f"'{text}" if _FORMULA.match(text) else text


def csv_cell(value: Any) -> Any:
    """Return a value as a CSV cell: numbers exact, including non-finite numbers."""
    if isinstance(value, str):
        return csv_text(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number or value is None else json.dumps(value)


class TerminalStream:
    """Stream writing the `terminal_text` of its input; for `sys.stdout` and `sys.stderr`.

    Rich, which has sequences of its own to write, writes to `rich_proxied_file`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write text without the characters able to change a terminal."""
        return self.rich_proxied_file.write(terminal_text(text))

    def writelines(self, lines: Any) -> None:
        """Write lines in the same way."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped stream."""
        return getattr(self.rich_proxied_file, name)


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


_TIMEOUT_S = 120.0
_CLOSE_S = 10.0


class RequestProgram:
    """Program answering requests, a line for each, from the first request until `close`.

    Args:
        name: The other side's name, for messages.
        command: Its command line. It must end when its input is closed.
        error: The exception to raise.
        directory: Its working directory, whose modules `python -m` takes before all others: by
            default one that only the administrator of the machine can write to.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        error: type[Exception] = RuntimeError,
        directory: str = "/",
    ) -> None:
        self._name = name
        self._error = error
        self._command = command
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None
        self._asking = threading.Lock()
        self._is_closed = False

    def ask(self, method: str, *, timeout_s: float = _TIMEOUT_S, **arguments: object) -> Any:
        """Return the answer to a request.

        Raises:
            Exception: Of the given class: it says that it cannot, has ended, or takes too long.
        """
        with self._asking:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            is_ready = True
            try:
                process.stdin.write(json.dumps({"method": method, **arguments}) + "\n")
                process.stdin.flush()
                is_ready = bool(select.select([process.stdout], [], [], timeout_s)[0])
                line = process.stdout.readline() if is_ready else ""
            except (OSError, ValueError):
                line = ""  # it has ended
            if not line:
                why = "has ended" if is_ready else f"did not answer within {timeout_s:g} s"
                raise self._error(f"{self._name}: its process {why}{self._end()}")
            answer = json.loads(line)
        if "error" in answer:
            raise self._error(f"{self._name}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """End the program, including a request pending in another thread."""
        self._is_closed = True
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError, ValueError):
            process.stdin.close()
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        # A pending request fails with the process, and gives the lock back.
        with self._asking:
            if self._process is not None:
                self._end()

    def _started(self) -> "subprocess.Popen[str]":
        if self._is_closed:
            raise self._error(f"{self._name}: the master ends.")
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lasts as long as the process
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                # Ctrl-C is for the master, which then closes the input.
                start_new_session=True,
            )
        return self._process

    def _end(self) -> str:
        """End the program after a failure, and return its last error output."""
        process, errors = self._process, self._errors
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        assert errors is not None
        self._process = None
        process.kill()
        process.wait()
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        errors.close()
        return f": {lines[-1]}" if lines else "."


_LENGTH = struct.Struct("!I")
# The three standard streams and the program's further descriptors.
_MOST_DESCRIPTORS = 16


def send_message(
    end: socket.socket, content: dict[str, Any], descriptors: Sequence[int] = ()
) -> None:
    """Send a message.

    Raises:
        OSError: The other side has gone.
    """
    body = json.dumps(content).encode()
    socket.send_fds(end, [_LENGTH.pack(len(body))], list(descriptors))
    end.sendall(body)


def receive_message(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for a message with its descriptors, and return both; None if the other side has gone.

    Raises:
        TimeoutError: The socket has a timeout, and it passed.
    """
    try:
        header, descriptors, _, _ = socket.recv_fds(
            end, _LENGTH.size, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not header:
            return None
        header += _receive_all(end, _LENGTH.size - len(header))
        body = _receive_all(end, _LENGTH.unpack(header)[0])
    except TimeoutError:
        raise
    except OSError:
        return None
    return json.loads(body), descriptors


def _receive_all(end: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = end.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("The other side has gone in the middle of a message.")
        data += piece
    return bytes(data)
