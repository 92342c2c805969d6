"""Server of node 0's launcher, and the messages between the launchers of several nodes."""

import json
import logging
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from paceline._base.exceptions import CollectiveMismatchError
from paceline._base.process_and_network import PortReservation
from paceline._training.workers.channels import ChannelFrame, DriverChannel, FrameKind
from paceline._training.workers.stuck_ranks import HangWatch, Progress, WatchedRank
from paceline._training.workers.worker_failures import (
    NotEnoughWorkersError,
    RestartDecision,
    WorkerFailedError,
    describe_failure,
)
from paceline._training.workers.worker_health import (
    CAUSE_SETTLE_S,
    LONGEST_CAUSE_S,
    HyperparametersRefusedError,
)

logger = logging.getLogger(__name__)

PROTOCOL = 2
# Anyone may connect to the port, so no message may take up much memory.
LONGEST_BYTES = 64 * 1024
_TEXT_CHARACTERS = 8000
# Longest text of a rank's operation or place.
_PLACE_CHARACTERS = 120


class NodeFailureCause(str, Enum):
    """Cause of the end of a generation."""

    FAILED = "failed"
    MISMATCH = "mismatch"
    REFUSED = "refused"
    # Launchers did not come in time.
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """A failure on a node; see `WorkerFailedError`."""

    cause: str = NodeFailureCause.FAILED
    text: str
    rank: int = 0
    exit_code: int | None = None
    signal: int | None = None
    is_consequence: bool = False

    @classmethod
    def of(cls, error: BaseException) -> "NodeFailure":
        """Return the failure to report for an error."""
        kinds: dict[type[BaseException], NodeFailureCause] = {
            CollectiveMismatchError: NodeFailureCause.MISMATCH,
            HyperparametersRefusedError: NodeFailureCause.REFUSED,
        }
        return cls(
            cause=kinds.get(type(error), NodeFailureCause.FAILED),
            text=describe_failure(error)[:_TEXT_CHARACTERS],
            rank=getattr(error, "rank", 0),
            exit_code=getattr(error, "exit_code", None),
            signal=getattr(error, "signal", None),
            is_consequence=getattr(error, "is_consequence", False),
        )

    @classmethod
    def of_launcher(cls, node_rank: int, why: str) -> "NodeFailure":
        """Return the failure to report for a lost launcher; its workers count as killed."""
        text = f"The launcher of node {node_rank} was lost: {why}."
        return cls(text=text, signal=signal.SIGKILL)

    def error(self) -> Exception:
        """Return the error to raise."""
        if self.cause == NodeFailureCause.MISMATCH:
            return CollectiveMismatchError(self.text)
        if self.cause == NodeFailureCause.ABSENT:
            return NotEnoughWorkersError(self.text, 0, 0)
        return WorkerFailedError(self.text, self.rank, self.exit_code, self.signal)


class NodeMessageKind(str, Enum):
    """The kind of a message between launchers."""

    # Messages to node 0: the first words, the first failure, the end of workers, an early leave.
    HELLO = "hello"
    FAILED = "failed"
    ENDED = "ended"
    LEAVING = "leaving"
    # Message to node 0, sent all the time: progress of a node's ranks.
    PROGRESS = "progress"
    # Messages from node 0.
    REFUSED = "refused"
    WELCOME = "welcome"
    START = "start"
    END = "end"
    # Ranks wait in vain: all end, with their stacks.
    HANG = "hang"
    VERDICT = "verdict"
    # Both ways.
    SIGNAL = "signal"
    # Message within a launcher only: node 0 is gone.
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMessage:
    """Message between launchers; fields unused by its kind have their defaults."""

    word: str
    node_rank: int = 0
    options: Mapping[str, int] = field(default_factory=dict)
    failure: NodeFailure | None = None
    num_commits: int = 0
    received: Sequence[int] = ()
    resume: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    is_restart: bool = False
    text: str = ""
    signum: int = 0
    ranks: Sequence[Sequence[Any]] = ()
    returned: Sequence[int] = ()

    @classmethod
    def of_progress(cls, ranks: Sequence[WatchedRank]) -> "NodeMessage":
        """Return a message with the progress of a node's ranks; see `watched_ranks`."""
        return cls(word=NodeMessageKind.PROGRESS, ranks=ranks)

    def watched_ranks(self) -> list[WatchedRank]:
        """Return the observations of a node's ranks.

        Raises:
            TypeError: That is of other kinds.
            ValueError: That is of other kinds.
        """
        return [
            WatchedRank(
                int(rank),
                bool(has_returned),
                Progress(
                    float(stuck_s),
                    bool(is_waiting),
                    str(operation)[:_PLACE_CHARACTERS],
                    int(num_collectives),
                    str(place)[:_PLACE_CHARACTERS],
                    float(idle_s),
                ),
            )
            for rank, has_returned, (
                stuck_s, is_waiting, operation, num_collectives, place, idle_s,
            ) in self.ranks
        ]  # fmt: skip

    def frame(self) -> ChannelFrame:
        """Return the frame for the message."""
        return ChannelFrame(FrameKind.NODE, body=json.dumps(asdict(self)).encode())

    @classmethod
    def of(cls, frame: ChannelFrame) -> "NodeMessage":
        """Read the message of a frame.

        Raises:
            ValueError: The frame has none.
        """
        try:
            content: dict[str, Any] = json.loads(frame.body)
            failure = content.pop("failure", None)
            return cls(failure=None if failure is None else NodeFailure(**failure), **content)
        except (AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"A frame must hold a message, but {error}.") from None


# Limits for connections without a hello: time in seconds, and number.
_HELLO_S = 10.0
_MOST_STRANGERS = 128
# Time for which a node's report on its ranks stays valid, in seconds.
_FRESH_S = 10.0
# Time for the launchers to read the last verdict, in seconds.
_LEAVE_S = 5.0

Decide = Callable[[Exception, int, Collection[int]], RestartDecision]


class _Connection:
    """Connection of a launcher; `rank` is None until its hello."""

    def __init__(self, end: socket.socket) -> None:
        self.channel = DriverChannel(end, LONGEST_BYTES)
        self.rank: int | None = None
        self.has_left = False
        self.silent_s = 0.0
        self.hello_by = time.monotonic() + _HELLO_S


class NodesServer:
    """Has the launchers of all nodes start and end their workers together; a thread of node 0's.

    Anyone may connect. A connection that does not name itself a launcher of this group in time is
    dropped, and messages are small.

    Args:
        listener: Where launchers connect; closed at the end.
        options: What must be the same on all nodes, by the names of options.
        decide: Whether the workers start again after a failure; called once for all nodes.
        heartbeat_timeout_s: How long a launcher may give no sign of life, in seconds.
        collective_timeout_s: How long ranks may wait for others, in seconds.
        wait_s: How long to wait for the launchers of all nodes before each start, in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        options: Mapping[str, int],
        decide: Decide,
        heartbeat_timeout_s: float,
        collective_timeout_s: float,
        wait_s: float,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._options = options
        self._ranks = range(options["--nnodes"])
        self._decide = decide
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._hangs = HangWatch(
            heartbeat_timeout_s, collective_timeout_s, "in the outputs of the launchers"
        )
        # The last report of each node about its ranks, and its time.
        self._told: dict[int, tuple[float, list[WatchedRank]]] = {}
        self._tick_s = min(1.0, heartbeat_timeout_s / 5)
        self._wait_s = wait_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._strangers: list[_Connection] = []
        self._nodes: dict[int, _Connection] = {}
        # The nodes whose workers have not ended; none between two generations.
        self._running: set[int] = set()
        self._failures: list[NodeFailure] = []
        # When the workers are asked to end, if nobody reports the cause of the failure before.
        self._end_at: float | None = None
        self._cause_by = 0.0
        # The signals of each node. A node that was lost after its notice asks nobody else to end.
        self._received: dict[int, set[int]] = {}
        # The ranks that have returned without being asked to end.
        self._returned: set[int] = set()
        # The nodes that reported a failure.
        self._failed: set[int] = set()
        self._resume: Mapping[str, str] = {}
        self._num_commits = 0
        self._is_over = False
        self._come_by = time.monotonic() + wait_s
        self._port: PortReservation | None = None
        own, theirs = socket.socketpair()
        self._add(own)
        self.own_end = theirs
        self._thread = threading.Thread(target=self._run, name="paceline-nodes", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the other launchers have read the last verdict, in bounded time."""
        self._thread.join(2 * _LEAVE_S)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._turn()
            leave_by = time.monotonic() + _LEAVE_S
            # Closed earlier, a connection could lose the last messages.
            while self._nodes and time.monotonic() < leave_by:
                self._turn()
        except Exception:
            logger.exception("The connections to the launchers of other nodes failed.")
        finally:
            for connection in [*self._strangers, *self._nodes.values()]:
                connection.channel.close()
            self._selector.close()
            self._listener.close()
            if self._port is not None:
                self._port.close()

    def _turn(self) -> None:
        began = time.monotonic()
        for key, events in self._selector.select(self._tick_s):
            if key.data is None:
                self._accept()
                continue
            if events & selectors.EVENT_WRITE:
                key.data.channel.flush()
            if events & selectors.EVENT_READ:
                self._read(key.data)
        self._watch(began)
        for connection in [*self._strangers, *self._nodes.values()]:
            is_writing = connection.channel.wants_to_write
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_writing else 0)
            self._selector.modify(connection.channel, events, connection)

    def _watch(self, began: float) -> None:
        now = time.monotonic()
        # While this process stood still itself, nobody was late.
        elapsed_s = min(now - began, 2 * self._tick_s)
        for stranger in [s for s in self._strangers if now > s.hello_by]:
            self._drop(stranger, "")
        for node in list(self._nodes.values()):
            node.silent_s += elapsed_s
            if node.silent_s > self._heartbeat_timeout_s:
                self._drop(node, f"it gave no sign of life for {node.silent_s:.3g} s")
        if not self._is_over and not self._running and now > self._come_by:
            self._finish(self._absence())
        if self._running and self._end_at is not None and now > self._end_at:
            # Nodes without a failure so far may still name the cause.
            if now < self._cause_by and self._running - self._failed:
                self._end_at = now + self._tick_s
            else:
                self._ask_to_end()
        self._watch_ranks(now)

    def _watch_ranks(self, now: float) -> None:
        """End all workers if ranks, of any nodes, wait for others in vain."""
        is_known = len(self._told) == len(self._ranks) and all(
            now < self._told[rank][0] + _FRESH_S for rank in self._running
        )
        if not self._running or self._failures or not is_known:
            return
        seen = [watched for _, ranks in self._told.values() for watched in ranks]
        seen.sort(key=lambda watched: watched.rank)
        error = self._hangs.look([seen])
        if error is not None:
            failure = NodeFailure.of(error)
            self._failures.append(failure)
            self._tell_all(NodeMessage(word=NodeMessageKind.HANG, failure=failure))
        elif notice := self._hangs.notice([seen]):
            logger.warning("%s", notice)

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except BlockingIOError:
            # The caller may have gone before it was accepted.
            return
        except OSError as error:
            # Errors of `accept` can pass, for example too many open files.
            logger.warning("A launcher could not connect: %s.", error)
            time.sleep(self._tick_s)
            return
        if len(self._strangers) >= _MOST_STRANGERS:
            # The oldest goes: callers that send nothing must not keep launchers out.
            self._drop(self._strangers[0], "")
        with suppress(OSError):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._add(end)

    def _add(self, end: socket.socket) -> None:
        connection = _Connection(end)
        self._strangers.append(connection)
        self._selector.register(connection.channel, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        why = "its connection was closed"
        connection.silent_s = 0.0
        try:
            for frame in connection.channel.receive():
                if frame.kind is FrameKind.NODE:
                    self._take_message(connection, NodeMessage.of(frame))
                elif frame.kind is FrameKind.BEAT and connection.rank is not None:
                    connection.channel.send(ChannelFrame(FrameKind.BEAT))
                else:
                    raise ValueError("A launcher must not send frames of other kinds.")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"it sent what is no message ({error})"
            connection.channel.is_open = False
        if not connection.channel.is_open:
            self._drop(connection, why)

    def _drop(self, connection: _Connection, why: str) -> None:
        """Close a connection; the workers of its node count as lost."""
        rank = connection.rank
        known = self._strangers if rank is None else list(self._nodes.values())
        if connection not in known:
            return
        self._selector.unregister(connection.channel)
        connection.channel.close()
        if rank is None:
            self._strangers.remove(connection)
            return
        del self._nodes[rank]
        if not connection.has_left:
            self._received.pop(rank, None)
        if rank == 0:
            # Rank 0 is this launcher itself, which has ended.
            self._is_over = True
        elif not self._is_over:
            self._note_failure(rank, NodeFailure.of_launcher(rank, why))
            self._note_end(rank)

    # Messages of launchers.

    def _take_message(self, connection: _Connection, message: NodeMessage) -> None:
        rank = connection.rank
        if rank is None:
            self._admit(connection, message)
        elif message.word == NodeMessageKind.FAILED and message.failure is not None:
            text = f"Node {rank}: {message.failure.text}"
            self._note_failure(rank, replace(message.failure, text=text))
        elif message.word == NodeMessageKind.PROGRESS:
            self._told[rank] = time.monotonic(), message.watched_ranks()
        elif message.word == NodeMessageKind.ENDED:
            self._num_commits += message.num_commits
            self._received.setdefault(rank, set()).update(message.received)
            self._returned.update(message.returned)
            if rank == 0:
                self._resume = {**self._resume, **message.resume}
            self._note_end(rank)
        elif message.word == NodeMessageKind.SIGNAL:
            self._received.setdefault(rank, set()).add(message.signum)
            self._tell_all(replace(message, node_rank=rank), but=rank)
        elif message.word == NodeMessageKind.LEAVING and rank == 0 and not self._is_over:
            self._finish(NodeFailure(text=f"The launcher of node 0 has ended: {message.text}"))
        else:
            connection.has_left = True
            why = f"its launcher has ended: {message.text}"
            self._note_failure(rank, NodeFailure.of_launcher(rank, why))

    def _admit(self, connection: _Connection, message: NodeMessage) -> None:
        if message.word != NodeMessageKind.HELLO:
            raise ValueError("A launcher must say first who it is.")
        rank = message.node_rank
        for name, value in self._options.items():
            if (theirs := message.options.get(name)) != value:
                text = f"`{name}` must be the same on all nodes, but is {theirs!r} on node {rank!r}"
                self._refuse(connection, f"{text} and {value} on node 0.", is_final=True)
                return
        if rank not in self._ranks:
            raise ValueError("A launcher must have a rank of the group.")
        if rank in self._nodes:
            text = f"Only one launcher must have node rank {rank}, but there is another one."
            self._refuse(connection, text, is_final=False)
            return
        self._strangers.remove(connection)
        connection.rank = rank
        self._nodes[rank] = connection
        connection.channel.send(NodeMessage(word=NodeMessageKind.WELCOME).frame())
        self._start_if_complete()

    def _refuse(self, connection: _Connection, text: str, *, is_final: bool) -> None:
        logger.warning("A launcher was refused: %s", text)
        message = NodeMessage(word=NodeMessageKind.REFUSED, text=text, is_restart=not is_final)
        connection.channel.send(message.frame())

    # Consequences: start, end and verdict.

    def _start_if_complete(self) -> None:
        if self._running or self._is_over or len(self._nodes) < len(self._ranks):
            return
        if self._port is not None:
            self._port.close()
        # A port of its own for each generation: nothing of the last one can be in its way.
        self._port = PortReservation()
        self._running = set(self._ranks)
        self._failures = []
        self._end_at = None
        self._told = {}
        self._returned, self._failed = set(), set()
        self._tell_all(
            NodeMessage(word=NodeMessageKind.START, port=self._port.port, resume=self._resume)
        )

    def _note_failure(self, rank: int, failure: NodeFailure) -> None:
        if rank not in self._running:
            return
        # Failures without a pending deadline mean that the workers were asked to end.
        are_asked = bool(self._failures) and self._end_at is None
        if are_asked and (
            failure.cause == NodeFailureCause.MISMATCH
            or failure.signal in (signal.SIGTERM, signal.SIGKILL)
        ):
            # All workers were asked to end.
            failure = replace(failure, is_consequence=True)
        self._failures.append(failure)
        self._failed.add(rank)
        if not are_asked and not failure.is_consequence:
            self._ask_to_end()
        elif len(self._failures) == 1:
            # Another node may yet report the cause of this consequence.
            now = time.monotonic()
            self._end_at, self._cause_by = now + CAUSE_SETTLE_S, now + LONGEST_CAUSE_S

    def _ask_to_end(self) -> None:
        self._end_at = None
        self._tell_all(NodeMessage(word=NodeMessageKind.END))

    def _note_end(self, rank: int) -> None:
        if rank not in self._running:
            return
        self._running.discard(rank)
        if not self._running:
            self._conclude()

    def _conclude(self) -> None:
        """Send all launchers the verdict after the end of a generation."""
        failure = min(self._failures, key=lambda f: f.is_consequence, default=None)
        if failure is None or failure.cause == NodeFailureCause.REFUSED:
            self._finish(failure)
            return
        if failure.is_consequence and self._returned:
            failure = _left_early(failure, self._returned)
        received = set[int]().union(*self._received.values())
        decision = self._decide(failure.error(), self._num_commits, received)
        if not decision.is_restart:
            self._finish(failure, decision.text)
            return
        text = decision.text
        if missing := self._missing():
            text += f", once there is a launcher of node {missing} (within {self._wait_s:g} s)"
        self._come_by = time.monotonic() + self._wait_s
        self._tell_all(
            NodeMessage(word=NodeMessageKind.VERDICT, failure=failure, is_restart=True, text=text)
        )
        self._start_if_complete()

    def _finish(self, failure: NodeFailure | None, text: str = "") -> None:
        self._is_over = True
        self._tell_all(NodeMessage(word=NodeMessageKind.VERDICT, failure=failure, text=text))

    def _missing(self) -> str:
        return ", ".join(str(rank) for rank in self._ranks if rank not in self._nodes)

    def _absence(self) -> NodeFailure:
        text = (
            f"The launchers of all {len(self._ranks)} nodes must come within {self._wait_s:g} s,"
            f" but there is none of node {self._missing()}. Hint: start it with the same"
            " `--master-addr` and `--master-port`; no firewall may be between the nodes."
        )
        return NodeFailure(cause=NodeFailureCause.ABSENT, text=text)

    def _tell_all(self, message: NodeMessage, but: int | None = None) -> None:
        for rank, node in self._nodes.items():
            if rank != but:
                node.channel.send(message.frame())


def _left_early(failure: NodeFailure, returned: Collection[int]) -> NodeFailure:
    """Return a mismatch for a rank's broken connection, as other ranks had returned."""
    ranks = ", ".join(map(str, sorted(returned)))
    has = f"Rank {ranks} has" if len(returned) == 1 else f"Ranks {ranks} have"
    text = (
        f"{has} returned while others waited in a collective operation. {failure.text} Hint: all"
        " ranks must make the same calls in the same order."
    )
    return NodeFailure(cause=NodeFailureCause.MISMATCH, text=text, rank=min(returned))
