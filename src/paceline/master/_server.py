"""Serving: the process around a master."""

import errno
import gc
import logging
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

import paceline
from paceline._certificates import check_server_files, server_names
from paceline._network_interfaces import (
    LOOPBACK,
    LOOPBACK_HOSTS,
    address_for_others,
    listening_family,
)
from paceline.master._connection_limits import (
    QUEUE_LENGTH,
    ConnectionConfig,
    ConnectionLimits,
    limits_of_process,
    raise_file_limit,
)
from paceline.master._end_limit import EndLimit
from paceline.master._home_directory import Home
from paceline.master._master import Master
from paceline.master._master_log import logging_to_master_log
from paceline.master._measurements import DEFAULT_SLOW_REQUEST_S, Measurements
from paceline.master.api import create_app
from paceline.master.executors import executor_named
from paceline.master.experiments import DEFAULT_LEASE_S, Leases
from paceline.master.starters import POOL_FILE, read_pool_file
from paceline.messages.master_info import RUNNER_GRACE_S, Shutdown
from paceline.messages.node_runners import LOCAL_NAME
from paceline.runner import ArchiveLimits
from paceline.runner.node import describe_machine, find_slots

logger = logging.getLogger(__name__)

# Where this machine reaches a master that listens on all of its addresses.
_ALL_ADDRESSES = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104 - no binding
_CLOSE_CONNECTIONS_S = 2
# For its own end, once the attempts have left.
_END_S = 12.0
_SWITCH_INTERVAL_S = 0.001


class PortInUseError(OSError):
    """Raised when another program listens on the port."""


def serve(
    home: Path,
    host: str = LOOPBACK,
    port: int = 8080,
    num_slots: int | None = None,
    *,
    runs: Path | None = None,
    set_aside: bool = False,
    executor: str = "local",
    runner_timeout_s: float = DEFAULT_LEASE_S,
    slow_request_s: float = DEFAULT_SLOW_REQUEST_S,
    unencrypted: bool = False,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    pool_file: Path | None = None,
) -> None:
    """Run a master until it is told to stop: SIGINT, SIGTERM or a shutdown request.

    The first signal lets the attempts checkpoint and leave; a second one leaves them running.

    Args:
        home: The directory of all state.
        host: The address to listen on: a loopback address, or any with `tls_cert` or with
            `unencrypted`.
        port: The port, 0 for any free one; `master.json` in the home tells which.
        num_slots: The number of slots of this machine; one per GPU or else CPU core if None. With
            0, trials run on other nodes only.
        runs: A directory of runs made without a master, to be shown live; it may be made later.
        set_aside: Move files that the database does not know, and a damaged database with all
            files, into a dated directory below ``set_aside`` in the home.
        executor: The name of what starts the attempts, see `executor_named`.
        runner_timeout_s: How long a runner may give no sign of life until it counts as lost, in
            seconds; 3 at least. It holds for the runners of nodes as well.
        slow_request_s: Seconds until an answer begins, from which on a request is logged as slow.
        unencrypted: The network is trusted, so that a host beyond loopback is allowed.
        tls_cert: The certificate of the master (PEM), with its chain. All requests are encrypted
            then. Programs on this machine know the certificate from the home.
        tls_key: Its key, without a passphrase.
        pool_file: The pools whose runners this master starts; by default `pools.yaml` in the home,
            if there is one.

    Raises:
        PortInUseError: Another program listens on the port.
        HomeInUseError: Another master serves the home.
        HomeUnusableError: The home is no directory, or cannot be written to.
        SecretFileError: The secrets of experiments cannot be read.
        DatabaseVersionError: The database was written by another version, or is damaged.
        LostDatabaseError: The home holds files that its database does not know.
        ValueError: The host is not loopback, the number of slots does not fit, `runs` is no
            directory, there is no such executor, `runner_timeout_s` is too small,
            `slow_request_s` is not greater than 0, a limit in the environment is no number, or
            the certificate or the file of pools cannot be used.
    """
    tls = _Tls.of(tls_cert, tls_key)
    if pool_file is not None and not pool_file.is_file():
        raise ValueError(f"`--pool-file` must be a file, but got {str(pool_file)!r}.")
    if not unencrypted and tls is None:
        _check_loopback(host)
    if runs is not None and runs.exists() and not runs.is_dir():
        raise ValueError(f"`runs` must be a directory, but got {str(runs)!r}.")
    kind = executor_named(executor)
    leases = Leases(runner_timeout_s)
    if not slow_request_s > 0:
        raise ValueError(f"`slow_request_s` must be greater than 0, but got {slow_request_s}.")
    place = Home(home)
    slots = [] if num_slots == 0 else find_slots(num_slots)
    machine = describe_machine(slots, name=LOCAL_NAME)
    ArchiveLimits.from_environment()
    raise_file_limit()
    # A thread that computes gives way to the event loop after a fifth of the usual time.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    listener = _listen_for_master(host, port)
    with listener, place.hold(), logging_to_master_log(place.master_log_path):
        place.prepare(set_aside=set_aside)
        port = listener.getsockname()[1]
        url = _url(_ALL_ADDRESSES.get(host, host), port, tls)
        public_host = _host_for_others(host, tls) if host in _ALL_ADDRESSES else host
        pool_file = pool_file or place.path / POOL_FILE
        pools = read_pool_file(pool_file, place.cluster_id) if pool_file.exists() else {}
        measurements = Measurements(slow_request_s)
        master = Master(
            place, machine.devices, runs and runs.absolute(), kind, _url(public_host, port, tls),
            leases, measurements, is_open=host not in LOOPBACK_HOSTS, pools=pools,
            certificate=tls.certificate if tls else None, machine=machine,
        )  # fmt: skip
        _serve(master, listener, host, url, tls)


def _check_loopback(host: str) -> None:
    if host not in LOOPBACK_HOSTS:
        raise ValueError(
            f"`host` must be a loopback address ({', '.join(LOOPBACK_HOSTS)}), but got {host!r}:"
            " tokens, code and secrets would be sent unencrypted. Hint: use `--tls-cert` and"
            " `--tls-key`, an SSH tunnel, or `--unencrypted` in a network that you trust."
        )


@dataclass(frozen=True, slots=True)
class _Tls:
    """The certificate of a server (PEM, without its chain), and the files that it is read from.

    `names` are the names and addresses that it is for.
    """

    certificate: str
    names: list[str]
    certificate_path: Path
    key_path: Path

    @classmethod
    def of(cls, certificate: Path | None, key: Path | None) -> "_Tls | None":
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            raise ValueError("`--tls-cert` and `--tls-key` must be given together.")
        text = check_server_files(certificate, key)
        return cls(text, server_names(certificate, key), certificate, key)


def _url(host: str, port: int, tls: _Tls | None) -> str:
    scheme = "http" if tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _host_for_others(host: str, tls: _Tls | None) -> str:
    """Return a name that the certificate is for, or else the address of this machine."""
    names = [] if tls is None else tls.names
    far = (name for name in names if name not in LOOPBACK_HOSTS and not name.startswith("*"))
    return next(far, None) or address_for_others(is_ipv6=":" in host)


def _serve(master: Master, listener: socket.socket, host: str, url: str, tls: _Tls | None) -> None:
    def announce() -> None:
        certificate = tls.certificate if tls else None
        port = listener.getsockname()[1]
        version = paceline.__version__
        master.home.write_address(url, port, version, certificate, master.url, host)

    limit = EndLimit(master)
    server = _Server(master, announce, tls=tls, limit=limit)
    try:
        master.start()
        # What is loaded by now stays, and need not be looked through again and again.
        gc.freeze()
        server.run(sockets=[listener])
    finally:
        master.home.remove_address()
        master.close()
        limit.lift()


class _Server(uvicorn.Server):
    """A server that drains the attempts before it stops.

    It calls `announce` once it accepts connections and handles signals: a signal before that ends
    the process at once and leaves the attempts running. With a limit, the process ends in time.
    """

    def __init__(
        self,
        master: Master,
        announce: Callable[[], None],
        limits: ConnectionLimits | None = None,
        tls: _Tls | None = None,
        limit: EndLimit | None = None,
    ) -> None:
        app = create_app(master, self.shut_down)
        config = ConnectionConfig(
            app,
            limits or limits_of_process(),
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
            lifespan="on",
            ssl_certfile=tls and tls.certificate_path,
            ssl_keyfile=tls and tls.key_path,
        )
        app.state.connections = config.connections
        super().__init__(config)
        self._master = master
        self._announce = announce
        self._limit = limit
        self._is_stopping = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        # The event loop has one number for the queue and for what it accepts in a turn.
        for listener in sockets or ():
            listener.listen(QUEUE_LENGTH)
        if self.started:
            self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; stop at once at the second."""
        if self._is_stopping:
            self._stop()
        else:
            self.shut_down(Shutdown())

    def shut_down(self, wanted: Shutdown) -> None:
        """Stop the server, in a thread of its own, after the attempts have left or at once."""
        self._is_stopping = True
        self._set_limit(0.0 if wanted.keep_trials else wanted.timeout_s + RUNNER_GRACE_S)
        threading.Thread(target=self._drain, args=(wanted,), name="shutdown", daemon=True).start()

    def _drain(self, wanted: Shutdown) -> None:
        try:
            if not wanted.keep_trials:
                self._master.reconciler.drain(wanted.timeout_s)
        except Exception:
            logger.exception("The attempts could not be stopped.")
        finally:
            self._stop()

    def _set_limit(self, drain_s: float) -> None:
        if self._limit is not None:
            self._limit.set(drain_s + _END_S)

    def _stop(self) -> None:
        self._set_limit(0.0)
        self._master.is_closing = True
        self._master.events.notify()
        self._master.controls.notify_all()
        self._master.nodes.presence.polls.notify_all()
        self.should_exit = True


def _listen_for_master(host: str, port: int) -> socket.socket:
    # With the protocol left open, asyncio would not set TCP_NODELAY on accepted connections, and a
    # connection that is kept would wait 40 ms for each answer.
    listener = socket.socket(listening_family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(QUEUE_LENGTH)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"The port must be free, but another program listens on {host}:{port}. Hint:"
                " `--port 0` takes any free one."
            ) from error
        raise
    return listener
