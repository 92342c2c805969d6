"""Serving: the process around a master, its log, its end within a limit."""

import copy
import errno
import gc
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import uvicorn

import paceline
from paceline._base.certificates import check_server_files, server_names
from paceline._base.files import regular_opener
from paceline._base.process_and_network import (
    LOOPBACK,
    LOOPBACK_HOSTS,
    address_for_others,
    listening_family,
)
from paceline._cluster.master.api.application import create_app
from paceline._cluster.master.api.request_limits import (
    QUEUE_LENGTH,
    ConnectionConfig,
    ConnectionLimits,
    process_limits,
    raise_file_limit,
)
from paceline._cluster.master.executors import executor_named
from paceline._cluster.master.experiments.attempts import DEFAULT_LEASE_S, Leases
from paceline._cluster.master.home_directory import Home
from paceline._cluster.master.master import Master
from paceline._cluster.master.measurements import DEFAULT_SLOW_REQUEST_S, Measurements
from paceline._cluster.master.notify.notices import NOTIFY_FILE, read_notify_file
from paceline._cluster.master.oidc_provider import OIDC_FILE, read_oidc_file
from paceline._cluster.master.starters.pool_runners import POOL_FILE, read_pool_file
from paceline._cluster.messages.master_models import RUNNER_GRACE_S, Shutdown
from paceline._cluster.messages.runner_messages import LOCAL_NAME
from paceline._cluster.runner.code_archive import ArchiveLimits
from paceline._cluster.runner.node_facts import describe_machine, find_slots

logger = logging.getLogger(__name__)

# Time limit for closing the database: running transactions are completed.
_CLOSE_DATABASE_S = 2.0


class EndLimit:
    """Time limit for ending the process: a storage may hang a thread for ever.

    All acknowledged records are stored by then: they survive any end.

    Args:
        master: The master.
    """

    def __init__(self, master: Master) -> None:
        self._master = master
        self._lock = threading.Lock()
        self._is_over = False

    def set(self, seconds: float) -> None:
        """End the process after a time, unless ended before or by an earlier limit."""
        timer = threading.Timer(seconds, self._end, (seconds,))
        timer.name, timer.daemon = "end-limit", True
        timer.start()

    def lift(self) -> None:
        """Let the process continue: the master has ended."""
        with self._lock:
            self._is_over = True

    def _end(self, seconds: float) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            # A broken log must not keep the process alive.
            with suppress(Exception):
                logger.error(
                    "The master did not end within %g s of its own, and is ended now. All that it"
                    " has acknowledged is stored. What its threads were at:\n%s",
                    seconds,
                    _describe_threads(),
                )
            is_closed = self._close_database()
            with suppress(Exception):
                sys.stderr.flush()
            # A normal exit would wait for the hanging threads.
            os._exit(0 if is_closed else 1)

    def _close_database(self) -> bool:
        """Close the database and remove the address; return False if closing hangs."""

        def close() -> None:
            self._master.home.remove_address()
            self._master.database.close()

        closer = threading.Thread(target=close, name="end-limit-close", daemon=True)
        closer.start()
        closer.join(_CLOSE_DATABASE_S)
        return not closer.is_alive()


def _describe_threads() -> str:
    """Return the innermost line of each thread."""
    frames = sys._current_frames()
    lines = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.current_thread():
            last = traceback.extract_stack(frame)[-1]
            lines.append(f"  {thread.name}: {last.name} ({last.filename}:{last.lineno})")
    return "\n".join(lines)


_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MAX_BYTES = 10 * 1024 * 1024
_WINDOW_S = 60.0
_MAX_PER_WINDOW = 20


@contextmanager
def logging_to_master_log(path: Path) -> Iterator[None]:
    """Write the master's log messages to standard error within the context.

    If that is appended to the file `path`, the file is kept small: at 10 MiB its content becomes
    that of `NAME.1`, in place of the old file, and the file begins anew.
    """
    handler = _MasterLogHandler(path)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


@dataclass(slots=True)
class _Window:
    """Messages logged by a place in the code since a time.

    `raised_at` has where the errors among them came from, whose tracebacks were written.
    """

    began: float
    num_messages: int = 0
    raised_at: set[tuple[str, int]] = field(default_factory=set)


class _MasterLogHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes at most 20 messages a minute from each place in the code, and counts the others.

    The traceback of a repeated error is written once a minute.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(_FORMAT))
        self._path = path
        self._windows: dict[tuple[str, int, type | None], _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message, unless the same place has logged many just now."""
        self._end_windows(time.monotonic() - _WINDOW_S)
        # Messages of one place differ in numbers and addresses, so that their texts say little.
        error = record.exc_info[0] if record.exc_info else None
        place = (record.pathname, record.lineno, error)
        window = self._windows.setdefault(place, _Window(time.monotonic()))
        window.num_messages += 1
        if window.num_messages <= _MAX_PER_WINDOW:
            self._write(_without_known_traceback(record, window.raised_at))

    def close(self) -> None:
        """Write summaries of the omitted messages, and stop writing."""
        self._end_windows(float("inf"))
        super().close()

    def _end_windows(self, before: float) -> None:
        for place, window in list(self._windows.items()):
            if window.began > before:
                continue
            del self._windows[place]
            num_left_out = window.num_messages - _MAX_PER_WINDOW
            if num_left_out > 0:
                self._write(_summary(place[0], place[1], num_left_out))

    def _write(self, record: logging.LogRecord) -> None:
        self._rotate_if_large()
        super().emit(record)

    def _rotate_if_large(self) -> None:
        # No log is worth an error in its caller.
        with suppress(OSError, ValueError):
            written = os.fstat(self.stream.fileno())
            if written.st_size >= _MAX_BYTES and os.path.samestat(written, self._path.stat()):
                self._rotate()

    def _rotate(self) -> None:
        # Copied and emptied, not renamed: whatever is printed without `logging` goes there as well.
        try:
            with open(self._path, "rb", opener=regular_opener) as file:
                file.seek(-_MAX_BYTES, os.SEEK_END)
                self._path.with_name(f"{self._path.name}.1").write_bytes(file.read())
        finally:
            os.truncate(self._path, 0)


def _without_known_traceback(
    record: logging.LogRecord, raised_at: set[tuple[str, int]]
) -> logging.LogRecord:
    """Return a record with a traceback already written replaced by the error in the text."""
    if not record.exc_info or record.exc_info[2] is None:
        return record
    innermost = traceback.extract_tb(record.exc_info[2])[-1]
    place = (innermost.filename, innermost.lineno or 0)
    if place not in raised_at:
        raised_at.add(place)
        return record
    # Other handlers get the record unchanged.
    shown = copy.copy(record)
    error = record.exc_info[1]
    shown.msg = f"{record.getMessage()} ({type(error).__name__}: {error}; as before)"
    shown.args, shown.exc_info, shown.exc_text = None, None, None
    return shown


def _summary(path: str, line: int, num_messages: int) -> logging.LogRecord:
    text = "%d more messages like those from %s:%d were left out."
    arguments = (num_messages, Path(path).name, line)
    return logging.LogRecord(__name__, logging.WARNING, path, line, text, arguments, None)


# Local address for each wildcard address, for programs on this machine.
_ALL_ADDRESSES = {"": LOOPBACK, "0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104 - no binding
_CLOSE_CONNECTIONS_S = 2
# Time limit for the master's own end, after the attempts have left.
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
    """Run a master until an order to stop: SIGINT, SIGTERM or a shutdown request.

    The first signal lets the attempts checkpoint and leave; a second one leaves them running.

    Args:
        home: The directory of all state.
        host: The address to listen on: a loopback address, or any with `tls_cert` or with
            `unencrypted`.
        port: The port, 0 for any free one; `master.json` in the home has it.
        num_slots: The number of slots of this machine; one per GPU or else CPU core if None. With
            0, trials run on other nodes only.
        runs: A directory of runs made without a master, to be shown live; it may be made later.
        set_aside: Move files that the database does not know, and a damaged database with all
            files, into a dated directory below ``set_aside`` in the home.
        executor: The name of the executor, see `executor_named`.
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
            the certificate, the file of pools, `notify.yaml` or `oidc.yaml` cannot be used.
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
            notify=read_notify_file(place.path / NOTIFY_FILE),
            oidc=read_oidc_file(place.path / OIDC_FILE),
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
    """Certificate of a server (PEM, without its chain), and the files of certificate and key.

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
    """Return a name covered by the certificate, or else the address of this machine."""
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
        # Objects loaded so far stay for ever: freezing them spares the garbage collector the scan.
        gc.freeze()
        server.run(sockets=[listener])
    finally:
        master.home.remove_address()
        master.close()
        limit.lift()


class _Server(uvicorn.Server):
    """HTTP server; drains the attempts before stopping.

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
            limits or process_limits(),
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
        # The event loop has one number for the queue and for the connections accepted in a turn.
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
        # Wake-up of waiting requests: the server closes only after their answers.
        self._master.events.notify()
        self._master.controls.notify_all()
        self._master.nodes.presence.polls.notify_all()
        self._master.sampler_answers.waiting.notify_all()
        self._master.streams.close()
        self.should_exit = True


def _listen_for_master(host: str, port: int) -> socket.socket:
    # Protocol given explicitly: with it left open, asyncio would not set TCP_NODELAY on accepted
    # connections, and a kept connection would wait 40 ms for each answer.
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
