"""Fork server client: the driver's side; a process has a single server as a rule."""

import atexit
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any

from paceline._base.process_and_network import wait_until
from paceline._training.workers.processes.rank_environment import THREADS_MARK, THREADS_VARIABLE
from paceline._training.workers.processes.worker_fork_server import (
    STATUS,
    receive_message,
    send_message,
)
from paceline._training.workers.processes.worker_process import (
    KILLED,
    ProcessHandle,
    Start,
    WorkerSpec,
    ended,
    start_process,
)
from paceline._training.workers.processes.worker_program import PROGRAM_FILE

logger = logging.getLogger(__name__)

# Prefixes of variables that interpreters and the server's libraries read only when they load.
_READ_AT_IMPORT = (
    "PYTHON",
    "LD_",
    "GLIBC_",
    "MALLOC_",
    "LANG",
    "LC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "BLIS_",
    "NPY_",
    "NUMPY_",
    "TORCH_",
    "PYTORCH_",
    "ATEN_",
)
_LOADED = ("torch", "numpy", "cloudpickle", "paceline._training.workers.serve_calls")
_CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")
# Imports of torch may take long from a network file system.
_START_S = 120.0
_ANSWER_S = 30.0
_REAP_S = 5.0


class ForkServerError(RuntimeError):
    """Raised when the fork server cannot be started, or forks nothing."""


def forking_start(environment: Mapping[str, str], modules: Sequence[str]) -> Start:
    """Return a function to start workers: by the fork server if possible, else as new processes.

    The server is started if there is none for workers with such an environment.

    Args:
        environment: The workers' environment, as far as it is the same for all.
        modules: The modules to load in the server besides torch.
    """
    if not _CAN_FORK:
        return start_process
    try:
        return partial(_current(environment).start, modules)
    except ForkServerError as error:
        logger.warning("Workers start slowly, as new interpreters: %s.", error)
        return start_process


def load_ahead(environment: Mapping[str, str], modules: Sequence[str]) -> None:
    """Make the fork server load all modules workers need, before the first worker starts.

    Args:
        environment: As `forking_start`.
        modules: As `forking_start`.
    """
    if _CAN_FORK:
        # The start of a worker reports if there can be no server.
        with suppress(ForkServerError):
            _current(environment).load(modules)


def stop_fork_server() -> None:
    """End the fork server, parent of forked workers; the next pool starts another.

    It ends by itself with this process, and when it has had no workers for ten minutes. Workers
    that it has forked are killed.
    """
    with _lock:
        for server in _servers:
            server.close()
        _servers.clear()


class _ForkServer:
    """A running fork server; may be used from any thread.

    Args:
        key: Names the workers it is for.
        environment: An environment of such workers.
    """

    def __init__(self, key: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self.key = key
        self.num_workers = 0
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as stdlib
        facts = {
            "path": [path or os.getcwd() for path in sys.path],
            "control": theirs.fileno(),
            "driver": os.getpid(),
            "modules": _LOADED,
        }
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, *flags, PROGRAM_FILE, "fork", json.dumps(facts)],
                env=_server_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Session of its own: Ctrl-C in a terminal must not end the server.
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    @property
    def is_alive(self) -> bool:
        """Whether the server process takes requests."""
        return self._popen.poll() is None

    def await_loaded(self) -> None:
        """Wait until the server has loaded its modules.

        Raises:
            ForkServerError: It cannot, or must not be forked after that.
        """
        try:
            self._answer(_START_S)
        except ForkServerError:
            self.close()
            raise
        except BaseException:
            # Nobody else knows this process when a Ctrl-C interrupts the wait.
            self._popen.kill()
            self.close()
            raise

    def load(self, modules: Sequence[str]) -> None:
        """Make the server load modules now, together with those planned for later.

        Raises:
            ForkServerError: It has ended, or must not be forked after that.
        """
        with self._lock:
            self._send({"modules": list(modules)}, [])
            self._answer(_START_S)

    def start(
        self,
        modules: Sequence[str],
        spec: WorkerSpec,
        environment: Mapping[str, str],
        is_read: bool,
    ) -> ProcessHandle:
        """Fork a worker, or start a new interpreter on failure; see `start_process`."""
        leash, their_leash = socket.socketpair()
        streams = _Streams(is_read)
        request = {
            "target": spec.command[-1],
            "environment": dict(environment),
            "directory": str(spec.working_directory),
            "descriptors": [0, 1, 2, *spec.descriptors],
            "cores": sorted(os.sched_getaffinity(0)),
            "umask": _umask(),
            "modules": list(modules),
        }
        try:
            pid = self._fork(request, [*streams.theirs, *spec.descriptors, their_leash.fileno()])
        except ForkServerError as error:
            streams.close_ours()
            leash.close()
            logger.warning("A worker starts slowly, as a new interpreter: %s.", error)
            return start_process(spec, environment, is_read)
        finally:
            streams.close_theirs()
            their_leash.close()
        return _Forked(pid, leash, streams, self)

    def release(self) -> None:
        """Note the reaping of a worker."""
        with self._lock:
            self.num_workers -= 1

    def close(self) -> None:
        """End the server and its workers."""
        self._control.close()
        try:
            self._popen.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def forget(self) -> None:
        """Leave the server to the parent process, as this process is a fork."""
        self._control.close()
        # Return code set by hand: the destructor must not take the server for a running child.
        self._popen.returncode = 0

    def _fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        with self._lock:
            self._send(request, descriptors)
            pid = int(self._answer(_ANSWER_S)["pid"])
            self.num_workers += 1
            return pid

    def _send(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        try:
            send_message(self._control, request, descriptors)
        except OSError as error:
            raise ForkServerError("the fork server has ended") from error

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        try:
            if not wait_until(self._has_answer, timeout_s):
                raise TimeoutError
            message = receive_message(self._control)
        except TimeoutError as error:
            # A late answer would be taken for that to another request.
            self._popen.kill()
            raise ForkServerError(f"the fork server is silent for {timeout_s:g} s") from error
        if message is None:
            raise ForkServerError("the fork server has ended")
        answer = message[0]
        if answer.get("error"):
            raise ForkServerError(answer["error"])
        return answer

    def _has_answer(self, timeout_s: float | None) -> bool:
        descriptor = self._control.fileno()
        if descriptor < 0:
            # Closed socket: the read that follows reports it.
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


class _Streams:
    """The standard streams of a worker, and this process's ends of them."""

    def __init__(self, is_read: bool) -> None:
        self.ours: list[int] = []
        self.theirs = [0, 1, 2]
        self._is_read = is_read
        if is_read:
            self.theirs = [os.open(os.devnull, os.O_RDONLY)]
            for _ in range(2):
                reader, writer = os.pipe()
                self.ours.append(reader)
                self.theirs.append(writer)

    def close_ours(self) -> None:
        for descriptor in self.ours:
            os.close(descriptor)

    def close_theirs(self) -> None:
        for descriptor in self.theirs if self._is_read else ():
            os.close(descriptor)

    def files(self) -> Sequence[IO[bytes] | None]:
        return [open(descriptor, "rb", buffering=0) for descriptor in self.ours] or [None, None]


class _Forked(ProcessHandle):
    """Forked worker with a leash: a socket to report its end, or to end the worker."""

    def __init__(
        self, pid: int, leash: socket.socket, streams: _Streams, server: _ForkServer
    ) -> None:
        self.pid = pid
        self._leash = leash
        self._server = server
        self.stdout, self.stderr = streams.files()

    def await_end(self) -> tuple[int, int | None]:
        try:
            status = self._leash.recv(STATUS.size, socket.MSG_WAITALL)
        except OSError:
            status = b""
        # Without a server there is no word, but then its workers were killed with it.
        return ended(*STATUS.unpack(status)) if len(status) == STATUS.size else KILLED

    def reap(self) -> None:
        with suppress(OSError):
            # The server answers a cut leash by reaping the worker, then by cutting its own end.
            self._leash.shutdown(socket.SHUT_WR)
            self._leash.settimeout(_REAP_S)
            self._leash.recv(1)
        self._leash.close()
        self._server.release()


_lock = threading.Lock()
# The last one is for new workers; the others are kept while they have workers.
_servers: list[_ForkServer] = []


def _current(environment: Mapping[str, str]) -> _ForkServer:
    """Return the fork server for workers with an environment, started if necessary."""
    key = _import_time_variables(environment)
    with _lock:
        if not _servers or _servers[-1].key != key or not _servers[-1].is_alive:
            for server in [server for server in _servers if server.num_workers == 0]:
                server.close()
                _servers.remove(server)
            server = _ForkServer(key, environment)
            server.await_loaded()
            _servers.append(server)
        return _servers[-1]


def _import_time_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables common to all workers of a fork server, read at import time."""
    found = {n: value for n, value in environment.items() if n.startswith(_READ_AT_IMPORT)}
    if environment.get(THREADS_MARK) == environment.get(THREADS_VARIABLE):
        # Number of threads chosen by Paceline: it can be set after the import too.
        found.pop(THREADS_VARIABLE, None)
    return found


def _server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    is_own_choice = THREADS_VARIABLE not in _import_time_variables(environment)
    # Threads that a library starts when it loads would not be there after a fork.
    return {
        **environment,
        **({THREADS_VARIABLE: "1"} if is_own_choice else {}),
        "OPENBLAS_NUM_THREADS": "1",
    }


def _umask() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        line = next(line for line in file if line.startswith("Umask:"))
    return int(line.split()[1], 8)


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    for server in _servers:
        server.forget()
    _servers.clear()


# A fork of this process must neither use its servers nor end them.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
atexit.register(stop_fork_server)
