"""Connections to an interactive task by its master: streams, and a local port that leads there."""

import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from paceline._base.process_and_network import LOOPBACK
from paceline._base.stream_relay import FarStream, StreamGoneError, relay
from paceline.client import _late_models as models
from paceline.client._http_session import ApiError, HttpSession, MasterUnreachableError

# Browsers send cookies to all ports of a host, also that of a sign-in at a master on 127.0.0.1. So
# tasks, which are strangers, have a host of their own. Systems other than Linux have no further
# address of loopback: there at least the other name for it.
_ADDRESS, _HOST = ("127.0.0.2", "127.0.0.2") if sys.platform == "linux" else (LOOPBACK, "localhost")
_WAIT_S = 20.0
# So long a stream outlives a master that does not answer; one that was started again has none.
_PATIENCE_S = 30.0
_PAUSE_S = 0.5
_JOIN_S = 5.0
_GONE = 410
_ACCEPT_S = 0.5


class _Taken(msgspec.Struct):
    num_bytes: int


class TaskStream(FarStream):
    """New stream to an interactive task.

    Args:
        session: Connections to the master, as the owner of the task.
        experiment_id: The task.
    """

    def __init__(self, session: HttpSession, experiment_id: int) -> None:
        self._session = session
        self._path = f"experiments/{experiment_id}/streams/{secrets.token_hex(16)}"

    def read(self, offset: int) -> bytes | None:
        """Return bytes from an offset on; see the base class."""
        try:
            return self._send("GET", None, offset=offset)
        except ApiError as error:
            if error.status == _GONE:
                return None
            raise StreamGoneError(str(error)) from error

    def write(self, offset: int, data: bytes, *, is_end: bool) -> int:
        """Send bytes; see the base class."""
        try:
            reply = self._send("PUT", data, offset=offset, is_end=is_end or None)
        except ApiError as error:
            raise StreamGoneError(str(error)) from error
        return msgspec.json.decode(reply, type=_Taken).num_bytes

    def close(self) -> None:
        """Close the stream for the other side, too."""
        with suppress(ApiError, MasterUnreachableError):
            self._session.send("DELETE", self._path)

    def _send(self, method: str, data: bytes | None, **params: int | bool | None) -> bytes:
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                sent = {**params, "wait_s": _WAIT_S}
                return self._session.send(method, self._path, params=sent, content=data).content
            except MasterUnreachableError as error:
                if time.monotonic() > until:
                    raise StreamGoneError(str(error)) from error
                time.sleep(_PAUSE_S)


class Tunnel:
    """Port of loopback whose connections lead to an interactive task.

    Only processes of this Unix user and of root get through, where the system tells whose a
    connection is (Linux).

    Args:
        session: Connections to the master, as the owner of the task.
        experiment_id: The task.
        port: The port; 0 for a free one.

    Raises:
        OSError: The port is in use.
    """

    def __init__(self, session: HttpSession, experiment_id: int, port: int = 0) -> None:
        self._session = session
        self._experiment_id = experiment_id
        self._listener = socket.create_server((_ADDRESS, port))
        self._listener.settimeout(_ACCEPT_S)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://{_HOST}:{self.port}"
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}

    def __enter__(self) -> "Tunnel":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with self._lock:
            threads = [*self._open.values()]
            for near in self._open:
                with suppress(OSError):
                    near.shutdown(socket.SHUT_RDWR)
        _join_all(threads)

    def serve(self, is_wanted: Callable[[], bool]) -> None:
        """Take connections as long as they are wanted, which is asked twice a second."""
        while is_wanted():
            try:
                near, address = self._listener.accept()
            except TimeoutError:
                continue
            near.settimeout(None)
            if not is_own_connection(address, (_ADDRESS, self.port)):
                near.close()
                continue
            thread = threading.Thread(
                target=self._pass_on, args=(near,), name="stream", daemon=True
            )
            with self._lock:
                self._open[near] = thread
            thread.start()

    def _pass_on(self, near: socket.socket) -> None:
        try:
            relay(near, TaskStream(self._session, self._experiment_id))
        finally:
            with self._lock:
                del self._open[near]


def _join_all(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads that are about to end, as some libraries crash if Python ends before."""
    until = time.monotonic() + _JOIN_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def is_own_connection(
    sender: tuple[str, int],
    receiver: tuple[str, int],
    table: Path = Path("/proc/net/tcp"),
    uid: int | None = None,
) -> bool:
    """Return whether a connection within loopback comes from a process of this Unix user or root.

    Args:
        sender: Address and port of whoever connected.
        receiver: Address and port that were connected to.
        table: The system's list of connections.
        uid: The user; None for this process's.
    """
    if sys.platform != "linux":
        return True
    wanted = [_as_in_table(*sender), _as_in_table(*receiver)]
    for line in table.read_text(encoding="ascii").splitlines():
        fields = line.split()
        if fields[1:3] == wanted:
            return int(fields[7]) in (0, os.geteuid() if uid is None else uid)
    return False


def _as_in_table(address: str, port: int) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address))
    return f"{number:08X}:{port:04X}"


class InteractiveClient:
    """Part of a client for notebooks, shells and TensorBoards on slots."""

    _session: HttpSession

    def interactive_link(self, experiment_id: int) -> "models.InteractiveLink":
        """Return what opens an interactive task, once it listens; its path is None before.

        Raises:
            ApiError: It does not run, is another's, or is no interactive task.
        """
        path = f"experiments/{experiment_id}/link"
        params = {"wait_s": _WAIT_S}
        return self._session.call("POST", path, models.InteractiveLink, params=params)

    def open_tunnel(self, experiment_id: int, port: int = 0) -> Tunnel:
        """Return a port of loopback that leads to an interactive task, for a browser.

        Args:
            experiment_id: The task.
            port: The port; 0 for a free one.

        Raises:
            OSError: The port is in use.
        """
        return Tunnel(self._session, experiment_id, port)

    @contextmanager
    def connect_to_task(self, experiment_id: int) -> Iterator[socket.socket]:
        """Yield a socket whose other end is the socket of an interactive task."""
        near, far = socket.socketpair()
        stream = TaskStream(self._session, experiment_id)
        thread = threading.Thread(target=relay, args=(far, stream), name="stream", daemon=True)
        thread.start()
        try:
            yield near
        finally:
            with suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
            near.close()
            _join_all([thread])
