"""Channels between drivers and workers: frames, events, the worker's link to its driver.

Also: and keyed listeners.
"""

import faulthandler
import hmac
import json
import os
import pickle
import secrets
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from paceline._training.workers.pickled_calls import dump_error, load_error
from paceline._training.workers.processes import worker_program as _worker_program
from paceline._training.workers.processes.process_facts_and_signals import STACKS_SIGNAL
from paceline._training.workers.processes.worker_program import EVENT_KIND, HEADER, OUTCOME_KIND
from paceline._training.workers.stuck_ranks import ProgressMeter


class FrameKind(IntEnum):
    """Type of a frame."""

    # Frames from the driver to a worker.
    CALL = 1
    STOP = 2
    # Frames from a worker to the driver.
    READY = 3
    BEAT = 4
    VALUE = 5
    ERROR = 6
    # Frames from the driver to the host of a worker on another node.
    SIGNAL = 7
    END = 8
    # Frames from a host to the driver: an output line, stopped or continued, the exit.
    LINE = 9
    STOPPED = 10
    EXIT = 11
    # Frames from a worker to its host: FORWARD is for the host, ASK is passed on to the driver.
    FORWARD = 12
    ASK = 13
    # The driver's answer to it, the other way.
    ANSWER = 14
    # Frame from a host to the driver: data appended to a forwarded file.
    APPEND = 15
    # Frames to a host and back: DRAINED confirms that all output printed so far was sent.
    DRAIN = 16
    DRAINED = 17
    # Frame from a program at its end; see `worker_program.ProgramOutcome`.
    OUTCOME = OUTCOME_KIND
    # From a worker: the state of its runs, see `channels`.
    EVENT = EVENT_KIND
    # Between the launchers of several nodes.
    NODE = 20
    # Frames for memory out of a worker's reach: WANT asks for a call's segments, DATA is one.
    WANT = 21
    DATA = 22
    # From a program: the names of the modules that it has loaded.
    LOADED = 23


# Less than this is copied, to be written in one go with its header.
_SMALL_BYTES = 2**16


class ChannelFrame(NamedTuple):
    """Frame of a channel: kind, call number (0 for none) and body."""

    kind: FrameKind
    call: int = 0
    body: bytes | bytearray = b""

    def pieces(self) -> list[bytes | bytearray]:
        """Return the buffers to write, in order."""
        header = HEADER.pack(self.kind, self.call, len(self.body))
        return [header + self.body] if len(self.body) < _SMALL_BYTES else [header, self.body]


class _Assembler:
    """Assembler of frames from received bytes; bodies are not copied."""

    def __init__(self, longest_bytes: int | None = None) -> None:
        self._longest_bytes = longest_bytes
        self._header: tuple[int, int] | None = None
        self._begin(HEADER.size)

    def _begin(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._num_filled = 0

    def room(self) -> memoryview:
        """Return where the next bytes go."""
        return memoryview(self._buffer)[self._num_filled :]

    def filled(self, num_bytes: int) -> ChannelFrame | None:
        """Count bytes just read into `room`; return the frame if now complete, else None."""
        self._num_filled += num_bytes
        if self._num_filled < len(self._buffer):
            return None
        if self._header is None:
            kind, call, size = HEADER.unpack(self._buffer)
            if self._longest_bytes is not None and size > self._longest_bytes:
                raise ValueError(f"A frame must not be longer than {self._longest_bytes} bytes.")
            self._header = kind, call
            self._begin(size)
            if size:
                return None
        frame = ChannelFrame(FrameKind(self._header[0]), self._header[1], self._buffer)
        self._header = None
        self._begin(HEADER.size)
        return frame


class DriverChannel:
    """Driver's end of a channel: never blocks, and is used by a single thread.

    Args:
        end: The socket.
        longest_bytes: The longest body that a frame may have; a longer one is a ValueError.
    """

    def __init__(self, end: socket.socket, longest_bytes: int | None = None) -> None:
        end.setblocking(False)
        self._socket = end
        self._assembler = _Assembler(longest_bytes)
        self._outgoing: deque[memoryview] = deque()
        self.is_open = True

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether queued data wait for the socket to accept them."""
        return self.is_open and bool(self._outgoing)

    def send(self, frame: ChannelFrame) -> None:
        """Write a frame; data the socket does not take yet are queued for `flush`."""
        self._outgoing.extend(map(memoryview, frame.pieces()))
        self.flush()

    def flush(self) -> None:
        """Write as much as fits."""
        while self.wants_to_write:
            try:
                num_sent = self._socket.send(self._outgoing[0])
            except BlockingIOError:
                # The other end reads slowly: the rest is sent once its buffer has room.
                return
            except OSError:
                # The worker has ended; its exit explains the rest.
                self._outgoing.clear()
                return
            if num_sent == len(self._outgoing[0]):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = self._outgoing[0][num_sent:]

    def receive(self) -> Iterator[ChannelFrame]:
        """Yield the frames received so far; after the worker's end of file `is_open` is false."""
        while self.is_open:
            try:
                num_read = self._socket.recv_into(self._assembler.room())
            except BlockingIOError:
                return
            except OSError:
                num_read = 0
            if num_read == 0:
                self.is_open = False
                return
            frame = self._assembler.filled(num_read)
            if frame is not None:
                yield frame

    def close(self) -> None:
        """Close this end."""
        self.is_open = False
        self._outgoing.clear()
        self._socket.close()


class BlockingChannel:
    """Blocking end of a channel; `send` may be called from any thread.

    Args:
        end: The socket.
        longest_bytes: The longest body that a frame may have; a longer one is a ValueError.
    """

    def __init__(self, end: socket.socket, longest_bytes: int | None = None) -> None:
        self._socket = end
        self._socket.set_inheritable(False)
        self._assembler = _Assembler(longest_bytes)
        self._lock = threading.Lock()

    def send(self, frame: ChannelFrame) -> None:
        """Write a frame.

        Raises:
            OSError: The other side has gone.
        """
        with self._lock:
            for piece in frame.pieces():
                self._socket.sendall(piece)

    def receive(self) -> ChannelFrame | None:
        """Wait for the next frame; return None if the other side has gone."""
        while True:
            try:
                num_read = self._socket.recv_into(self._assembler.room())
            except OSError:
                # A connection that was reset is at its end, like one that was closed.
                return None
            if num_read == 0:
                return None
            frame = self._assembler.filled(num_read)
            if frame is not None:
                return frame

    def close(self) -> None:
        """Close this end; a thread waiting in `receive` gets None."""
        with suppress(OSError):
            # Shutdown wakes a thread that is blocked in `recv`; `close` alone does not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class WorkerChannel(BlockingChannel):
    """A worker's end."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(socket.socket(fileno=descriptor))
        # Forked children close the socket: they must not write here or keep the connection open.
        os.register_at_fork(after_in_child=self._socket.close)


RANK_LOST = b"lost"
# Called in a program, from another thread, once the launcher has seen that a rank is lost.
on_rank_lost: list[Callable[[], None]] = []
_BEAT_S = 0.5
# Programs have mostly begun to train by then.
_LOADED_AFTER_BEATS = 6

_Send = Callable[[FrameKind, bytes], None]


class _Link:
    """Link from this process to its parent; `send` is None without a parent."""

    send: "_Send | None" = None
    await_stop: Callable[[float], bytes] | None = None
    is_program = False
    is_alive = False
    is_found = False


def serve_events(send: _Send) -> None:
    """Send events through a pool worker's own channel; the worker sends its heartbeats itself."""
    _Link.send, _Link.is_program, _Link.is_found = send, False, True


def begin_signs_of_life() -> None:
    """Start a thread of heartbeats to the launcher, if there is a launcher; once only."""
    _find_channel()
    if _Link.send is None or not _Link.is_program or _Link.is_alive:
        return
    _Link.is_alive = True
    dump_stacks_on_signal()
    _Link.send(FrameKind.READY, b"")
    meter = ProgressMeter(threading.main_thread())
    threading.Thread(target=_beat, args=(meter,), name="paceline-beat", daemon=True).start()


def send_run_event(event: str, path: str, text: str = "") -> None:
    """Report an event of the run in a directory to the parent process.

    Args:
        event: A `core._attempt_journal.RunEvent`.
        path: The directory.
        text: Why.
    """
    _find_channel()
    if _Link.send is not None:
        # Channel may be closed: children forked by a pool's worker do not keep it.
        with suppress(OSError):
            _Link.send(FrameKind.EVENT, json.dumps([event, path, text]).encode())


def dump_stacks_on_signal() -> None:
    """Let the parent ask for the stacks of all threads."""
    # Descriptor 2 instead of `sys.stderr`, which the program may have replaced.
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)


def _find_channel() -> None:
    """Find the parent's channel, in the wrapper of this program or in the environment."""
    if _Link.is_found:
        return
    _Link.is_found = True
    wrapper = sys.modules.get(_worker_program.RUNNING_MARK)
    channel = _worker_program.take_channel() if wrapper is None else wrapper.parent
    if channel is not None:
        _Link.send, _Link.await_stop, _Link.is_program = channel.send, channel.await_stop, True


def _beat(meter: ProgressMeter) -> None:
    for num_beats in count():
        if _Link.send is None:
            return
        if num_beats == _LOADED_AFTER_BEATS:
            _Link.send(FrameKind.LOADED, json.dumps(list(sys.modules)).encode())
        _Link.send(FrameKind.BEAT, meter.measure().to_bytes())
        if _Link.await_stop is not None and _Link.await_stop(_BEAT_S) == RANK_LOST:
            for function in on_rank_lost[:]:
                function()


_RESUME_VARIABLE = "PACELINE_RESUME"


class RunEvents:
    """Events of the runs that the workers have begun or resumed.

    Attributes:
        num_checkpoints: How many checkpoints they have committed.
        loaded: The modules that a worker reports to have loaded, as the worker says.
    """

    def __init__(self) -> None:
        self.num_checkpoints = 0
        self.loaded: object = None
        self._is_completed: dict[str, bool] = {}

    def note(self, event: str, path: str, rank: int) -> None:
        """Note an event sent by a worker; see `send_run_event`."""
        if event == "run":
            self._is_completed.setdefault(path, False)
        elif event == "checkpoint":
            self.num_checkpoints += 1
        elif event == "completed" and rank == 0:
            self._is_completed[path] = True

    @property
    def have_begun(self) -> bool:
        """Whether the workers have begun to record a run."""
        return bool(self._is_completed)

    @property
    def are_completed(self) -> bool:
        """Whether there is a run, and all of them have come to their end."""
        return bool(self._is_completed) and all(self._is_completed.values())

    def resume_variables(self) -> Mapping[str, str]:
        """Return the variables to make the next workers resume from the last checkpoints.

        A script with one run gets its directory, so that no other job's run of the same name
        can be meant. A script with several finds each by its name.
        """
        paths = list(self._is_completed)
        if not paths:
            return {}
        value = paths[0] if len(paths) == 1 else "auto"
        return {_RESUME_VARIABLE: value}


class Forwarding(NamedTuple):
    """Order to a host: forward data appended in a worker's directory to the driver.

    Attributes:
        root: The directory that is removed when the worker has ended.
        source: A directory in it, to whose files the worker appends.
        target: The driver's directory that gets the same files.
    """

    root: str
    source: str
    target: str


class DriverLink:
    """Link for a worker's requests to its driver, in turn; may be used from any thread.

    Args:
        channel: Leads to the worker's host.
    """

    def __init__(self, channel: BlockingChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def forward(self, root: Path, source: Path, target: Path) -> None:
        """Start to forward data appended to a directory's files to the driver's directory.

        Whatever was appended before a request has arrived when that is answered.

        Args:
            root: The directory that is removed after this process, if it still exists then.
            source: A directory in it. Its files only grow, those before the last by name not even
                that. When it is removed its forwarding ends.
            target: The driver's directory.
        """
        self._channel.send(
            ChannelFrame(
                FrameKind.FORWARD,
                body=pickle.dumps(Forwarding(str(root), str(source), str(target))),
            )
        )

    def ask(self, name: str, *args: Any) -> Any:
        """Call a method of the driver's request handler, and return its value.

        Args:
            name: A method of the handler that the pool was given.
            args: The arguments of the method.

        Raises:
            ConnectionError: The driver has gone.
            Exception: The method's own error.
        """
        with self._lock:
            self._channel.send(ChannelFrame(FrameKind.ASK, body=pickle.dumps((name, args))))
            answer = self._channel.receive()
        if answer is None:
            raise ConnectionError(f"The driver must answer {name!r}, but has gone.")
        value, error, text = pickle.loads(answer.body)  # noqa: S301 - written by our own driver
        if text is not None:
            raise load_error(error) or RuntimeError(text)
        return value


def answer_of(handler: object, request: bytes | bytearray) -> bytes:
    """Return the pickled answer of a driver's handler to a worker's request."""
    try:
        name, args = pickle.loads(request)  # noqa: S301 - written by this driver's own worker
        return pickle.dumps((getattr(handler, name)(*args), b"", None))
    except Exception as error:
        return pickle.dumps((None, dump_error(error), f"{type(error).__name__}: {error}"))


_links: list[DriverLink] = []


def open_driver_link(channel: BlockingChannel) -> None:
    """Note how this process reaches its driver."""
    _links.append(DriverLink(channel))


def driver_link() -> DriverLink | None:
    """Return this process's link to its driver, or None for a driver on the same machine."""
    return _links[-1] if _links else None


_NONCE_BYTES = 32
_DIGEST_BYTES = 32
_HANDSHAKE_S = 10.0


class ListenerAddress(NamedTuple):
    """Address of a driver."""

    host: str
    port: int


class Listener:
    """Listening socket of a driver: accepts processes with its key.

    Args:
        host: The address of this node on which to listen.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.key = secrets.token_bytes(_NONCE_BYTES)
        self.address = ListenerAddress(host, self._listener.getsockname()[1])

    def accept(self, timeout_s: float) -> tuple[str, socket.socket] | None:
        """Return the name and socket of the next process to connect, or None after `timeout_s`.

        One that does not know the key is turned away.
        """
        self._listener.settimeout(timeout_s)
        try:
            end, _ = self._listener.accept()
        except TimeoutError:
            return None
        try:
            name = _admit(end, self.key)
        except (OSError, ValueError):
            end.close()
            return None
        return name, _prepared_socket(end)

    def close(self) -> None:
        """Listen no more; connections stay."""
        self._listener.close()


def join_listener(address: ListenerAddress, key: bytes, name: str) -> socket.socket:
    """Connect to a driver's listener under a name.

    Raises:
        ConnectionError: The driver is not reached, or does not know the key.
    """
    try:
        end = socket.create_connection(address, timeout=_HANDSHAKE_S)
    except OSError as error:
        raise ConnectionError(
            f"The driver must be reachable at {address.host}:{address.port} from"
            f" {socket.gethostname()}, but is not: {error}. Hint: no firewall may be between the"
            " nodes."
        ) from None
    try:
        theirs = _read_from_peer(end, _NONCE_BYTES)
        ours, encoded = secrets.token_bytes(_NONCE_BYTES), name.encode()
        proof = _proof(key, b"worker", theirs, ours, encoded)
        end.sendall(ours + bytes([len(encoded)]) + encoded + proof)
        if not hmac.compare_digest(
            _read_from_peer(end, _DIGEST_BYTES), _proof(key, b"driver", ours, theirs)
        ):
            raise ConnectionError(f"What listens at {address} is not this worker's driver.")
    except BaseException:
        end.close()
        raise
    return _prepared_socket(end)


def _admit(end: socket.socket, key: bytes) -> str:
    end.settimeout(_HANDSHAKE_S)
    ours = secrets.token_bytes(_NONCE_BYTES)
    end.sendall(ours)
    theirs = _read_from_peer(end, _NONCE_BYTES)
    name = _read_from_peer(end, _read_from_peer(end, 1)[0])
    proof = _read_from_peer(end, _DIGEST_BYTES)
    # Proof over both nonces: a recorded handshake is of no use for another connection.
    if not hmac.compare_digest(proof, _proof(key, b"worker", ours, theirs, name)):
        raise ValueError("The key must be known.")
    end.sendall(_proof(key, b"driver", theirs, ours))
    return name.decode()


def _proof(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _read_from_peer(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = end.recv(size - len(data))
        if not more:
            raise ConnectionError("The connection was closed too early.")
        data += more
    return data


def _prepared_socket(end: socket.socket) -> socket.socket:
    end.settimeout(None)
    # Frames are small, and must not wait for others to be sent together.
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A node that is gone says nothing: let the system find out within a minute.
    with suppress(AttributeError):
        # Some systems lack these options.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    return end
