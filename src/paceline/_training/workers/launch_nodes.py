"""The launchers of several nodes, as each of them sees the others."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from paceline._training.workers.channels import BlockingChannel, ChannelFrame, FrameKind
from paceline._training.workers.launch_nodes_server import (
    LONGEST_BYTES,
    PROTOCOL,
    Decide,
    NodeFailure,
    NodeMessage,
    NodeMessageKind,
    NodesServer,
)
from paceline._training.workers.stuck_ranks import WatchedRank
from paceline._training.workers.worker_failures import NodesDifferError

logger = logging.getLogger(__name__)

# The launcher of node 0 may start later than the others.
_RETRY_S = 0.5
_CONNECT_S = 5.0
# When a launcher says that it waits for node 0, and how often from then on.
_TELL_AFTER_S = 10.0
_TELL_EVERY_S = 60.0


class LaunchNodes:
    """Launchers of the other nodes, for `LaunchRun`; node 0's launcher decides for all.

    Each launcher has one connection to it, also node 0's own, which listens. A launcher that is
    silent or gone counts as lost with its workers.

    Args:
        node_rank: The rank of this node.
        address: Where node 0 listens: host and port.
        options: What must be the same on all nodes, by the names of options; has `--nnodes`.
        decide: Whether the workers start again after a failure; only node 0's is asked.
        heartbeat_timeout_s: How long a launcher may give no sign of life, in seconds.
        collective_timeout_s: How long ranks may wait for others, in seconds; node 0's counts.
        wait_s: How long to wait for launchers before each start, in seconds.

    Attributes:
        port: Where the workers of the present generation meet, on node 0.

    Raises:
        OSError: Node 0 cannot listen.
    """

    def __init__(
        self,
        node_rank: int,
        address: tuple[str, int],
        options: Mapping[str, int],
        decide: Decide,
        *,
        heartbeat_timeout_s: float,
        collective_timeout_s: float,
        wait_s: float,
    ) -> None:
        self.port = 0
        self._rank = node_rank
        self._address = address
        self._options = {**options, "launcher protocol": PROTOCOL}
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._wait_s = wait_s
        self._channel: BlockingChannel | None = None
        self._silent_s = 0.0
        self._is_closed = threading.Event()
        self._server: NodesServer | None = None
        if node_rank == 0:
            listener = _listen(*address)
            timeouts = heartbeat_timeout_s, collective_timeout_s, wait_s
            self._server = NodesServer(listener, self._options, decide, *timeouts)

    def open(self, put: Callable[[NodeMessage], object]) -> None:
        """Connect, and give each message for this launcher to a function, from a thread."""
        threading.Thread(target=self._run, args=(put,), name="paceline-node", daemon=True).start()

    def tell_progress(self, ranks: Sequence[WatchedRank]) -> None:
        """Report the progress of this node's ranks to node 0; for a call every few seconds."""
        message = NodeMessage.of_progress(ranks)
        # Longer reports are left out: the server would drop the connection of this launcher.
        if len(message.frame().body) <= LONGEST_BYTES // 2:
            self._send(message)

    def tell_failed(self, error: BaseException) -> None:
        """Report the error ending this node's workers to all launchers."""
        self._send(NodeMessage(word=NodeMessageKind.FAILED, failure=NodeFailure.of(error)))

    def tell_ended(
        self,
        num_commits: int,
        received: Collection[int],
        resume: Mapping[str, str],
        returned: Sequence[int] = (),
    ) -> None:
        """Report the end of this node's workers to all launchers.

        Args:
            num_commits: How many checkpoints they have committed.
            received: The signals that this launcher has received.
            resume: The variables by which workers resume the runs that these have reported.
            returned: The ranks that have returned without being asked to end.
        """
        self._send(
            NodeMessage(
                word=NodeMessageKind.ENDED,
                num_commits=num_commits,
                received=[*received],
                resume=resume,
                returned=returned,
            )
        )

    def relay(self, signum: int) -> None:
        """Have the other launchers forward a signal to their workers too."""
        self._send(NodeMessage(word=NodeMessageKind.SIGNAL, signum=signum))

    def close(self, error: BaseException | None) -> None:
        """Leave the group, in bounded time.

        Args:
            error: What ends this launcher, for those that do not know it; None at a common end.
        """
        if error is not None:
            text = str(error) or type(error).__name__
            self._send(NodeMessage(word=NodeMessageKind.LEAVING, text=text[: LONGEST_BYTES // 8]))
        self._is_closed.set()
        if self._channel is not None:
            self._channel.close()
        if self._server is not None:
            self._server.join()

    def _send(self, message: NodeMessage) -> None:
        # The reading thread reports a broken connection.
        if self._channel is not None:
            with suppress(OSError):
                self._channel.send(message.frame())

    # The thread.

    def _run(self, put: Callable[[NodeMessage], object]) -> None:
        why = "its connection was closed"
        try:
            channel = self._join()
            threading.Thread(target=self._beat, args=(channel,), daemon=True).start()
            while (frame := channel.receive()) is not None:
                self._silent_s = 0.0
                if frame.kind is FrameKind.NODE:
                    put(NodeMessage.of(frame))
            if self._silent_s > self._heartbeat_timeout_s:
                why = f"it gave no sign of life for {self._silent_s:.3g} s"
        except NodesDifferError as error:
            put(NodeMessage(word=NodeMessageKind.REFUSED, text=str(error)))
            return
        except (OSError, ValueError) as error:
            why = str(error)
        host, port = self._address
        put(
            NodeMessage(
                word=NodeMessageKind.LOST,
                failure=NodeFailure.of_launcher(0, f"{why} ({host}:{port})"),
            )
        )

    def _beat(self, channel: BlockingChannel) -> None:
        interval_s = min(1.0, self._heartbeat_timeout_s / 5)
        while not self._is_closed.wait(interval_s):
            with suppress(OSError):
                channel.send(ChannelFrame(FrameKind.BEAT))
            self._silent_s += interval_s
            if self._silent_s > self._heartbeat_timeout_s:
                channel.close()
                return

    def _join(self) -> BlockingChannel:
        """Connect to node 0, even if its launcher starts later.

        Raises:
            NodesDifferError: It refuses this launcher.
            ConnectionError: It is not there in time.
        """
        by = time.monotonic() + self._wait_s
        tell_at = time.monotonic() + _TELL_AFTER_S
        while True:
            try:
                return self._say_hello()
            except (OSError, ValueError) as error:
                text = str(error)
            if time.monotonic() > by:
                raise ConnectionError(f"it was not reached within {self._wait_s:g} s: {text}")
            if time.monotonic() >= tell_at:
                tell_at += _TELL_EVERY_S
                logger.warning(
                    "Node %d does not reach node 0 at %s:%d yet, and tries for %g s: %s. Hint:"
                    " this address must be that of node 0 for other machines (under a master:"
                    " `paceline runner --address`), and no firewall may be between the nodes.",
                    self._rank, *self._address, self._wait_s, text,
                )  # fmt: skip
            if self._is_closed.wait(_RETRY_S):
                raise ConnectionError("this launcher has ended")

    def _say_hello(self) -> BlockingChannel:
        end = self._connected()
        try:
            end.settimeout(_CONNECT_S)
            channel = BlockingChannel(end, LONGEST_BYTES)
            hello = NodeMessage(
                word=NodeMessageKind.HELLO, node_rank=self._rank, options=self._options
            )
            channel.send(hello.frame())
            frame = channel.receive()
            if frame is None or frame.kind is not FrameKind.NODE:
                raise ConnectionError("what listens there is no launcher, or has ended")
            answer = NodeMessage.of(frame)
            if answer.word == NodeMessageKind.REFUSED and not answer.is_restart:
                raise NodesDifferError(answer.text)
            if answer.word != NodeMessageKind.WELCOME:
                raise ConnectionError(answer.text)
            end.settimeout(None)
        except BaseException:
            end.close()
            raise
        self._channel = channel
        return channel

    def _connected(self) -> socket.socket:
        if self._server is not None:
            # Node 0's own launcher uses a socket pair, and needs no network.
            return self._server.own_end
        end = socket.create_connection(self._address, timeout=_CONNECT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return end


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket listening on an address of this node, or on all if `host` is none."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            # Names and addresses of other families raise OSError here.
            socket.inet_pton(family, host)
            with socket.socket(family) as probe:
                probe.bind((host, 0))
            return socket.create_server((host, port), family=family, backlog=128)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
        )
    return socket.create_server(("", port), backlog=128)
