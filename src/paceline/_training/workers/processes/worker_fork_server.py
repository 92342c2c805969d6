"""Fork server: a process with torch loaded, forking workers from itself; its messages."""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from paceline._training.workers.processes.signals_and_leftovers import (
    JOB_SIGNALS,
    end_marked,
    innermost_group,
)
from paceline._training.workers.processes.supervised_exec import PR_SET_PDEATHSIG

_LENGTH = struct.Struct("!I")
# The three standard streams, the leash, and the worker's further descriptors.
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


STATUS = struct.Struct("!i")

# An idle server keeps memory for nobody.
_IDLE_S = 600.0
# Modules of a process's first optimizer: their import takes longer than all else in a restarted
# worker. They are loaded this long after the first workers, to hold none of those up.
_LATER_MODULES = ("torch._dynamo",)
_LATER_S = 5.0
_BLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


class ServerFacts(NamedTuple):
    """Start arguments of a fork server.

    Attributes:
        control: The descriptor of the socket to the driver.
        driver: The driver's process id.
        modules: The modules to load first.
    """

    control: int
    driver: int
    modules: Sequence[str]


def serve_forks(facts: ServerFacts) -> str:
    """Fork workers on request until the driver has gone; return in the workers only.

    Returns:
        The driver's orders for this worker.
    """
    server = _Server(facts)
    server.load(facts.modules)
    return server.run()


class _Child:
    """Worker with the server's end of its leash; a cut leash ends the worker."""

    def __init__(self, pid: int, leash: int, mark: str) -> None:
        self.pid = pid
        self.mark = mark
        self.leash = leash
        self.watch = os.pidfd_open(pid)
        self.has_ended = False

    def tell_end(self) -> None:
        """Report how the worker ended; its process id stays taken."""
        self.has_ended = True
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        has_exited = result.si_code == os.CLD_EXITED
        try:
            os.write(self.leash, STATUS.pack(result.si_status if has_exited else -result.si_status))
        except OSError:
            # Nobody listens any more; the leash is about to be cut.
            return

    def end(self) -> None:
        """Kill the rest of the worker's process group, and reap the worker."""
        with suppress(ProcessLookupError, PermissionError):
            # The group may be gone, or belong to another user by now.
            os.killpg(self.pid, signal.SIGKILL)
        # Reaped last, as another process may have the id from then on.
        os.waitpid(self.pid, 0)
        self.forget()

    def forget(self) -> None:
        """Close the worker's descriptors."""
        os.close(self.watch)
        os.close(self.leash)


class _Server:
    def __init__(self, facts: ServerFacts) -> None:
        self._control = socket.socket(fileno=facts.control)
        self._control.set_inheritable(False)
        self._children: list[_Child] = []
        # Groups whose workers were let go since the driver has last been heard of.
        self._let_go: set[str] = set()
        self._later_modules: Sequence[str] = _LATER_MODULES
        self._later_at = time.monotonic() + _LATER_S
        self._libc = ctypes.CDLL(None, use_errno=True)
        # A server that is stopped shall see too that the driver has gone, and end the workers with
        # all that they have started.
        self._get_at_end_of_parent(signal.SIGCONT)
        self._driver, self._is_loading = facts.driver, False
        signal.signal(signal.SIGCONT, lambda *_: self._leave_if_orphaned())
        self._driver_watch = os.pidfd_open(facts.driver)
        if os.getppid() != facts.driver:
            # Driver ended before it could be watched.
            os._exit(1)
        self._dispositions = {number: signal.getsignal(number) for number in JOB_SIGNALS}
        # A signal to all processes of a job is for the workers, which may save their work.
        for number in self._dispositions:
            signal.signal(number, signal.SIG_IGN)

    def load(self, modules: Sequence[str]) -> None:
        """Import modules, and tell the driver."""
        try:
            with self._loading():
                _import(modules)
        except Exception as error:
            send_message(self._control, {"error": f"{type(error).__name__}: {error}"})
            # Without exit handlers: modules that were imported in part may have left some.
            os._exit(1)
        send_message(self._control, {"error": _reason_against_forks()})

    def run(self) -> str:
        """Carry out requests; return only in forked workers, with the target of each."""
        while True:
            ready = self._poll()
            if not ready and self._later_modules:
                self._try_to_load(self._later_modules)
                self._later_modules = ()
                continue
            if self._driver_watch in ready or not (ready or self._children):
                self._leave()
            for child in list(self._children):
                if child.watch in ready:
                    child.tell_end()
                if child.leash in ready:
                    self._children.remove(child)
                    self._let_go.add(child.mark)
                    child.end()
            if self._control.fileno() in ready:
                target = self._answer()
                if target is not None:
                    return target

    def _poll(self) -> set[int]:
        """Wait, and return the descriptors ready to read; none after a long time."""
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._driver_watch):
            poll.register(descriptor, select.POLLIN)
        for child in self._children:
            poll.register(child.leash, select.POLLIN)
            if not child.has_ended:
                poll.register(child.watch, select.POLLIN)
        wait_s = max(0.0, self._later_at - time.monotonic()) if self._later_modules else _IDLE_S
        return {descriptor for descriptor, _ in poll.poll(wait_s * 1000)}

    def _try_to_load(self, modules: Sequence[str]) -> None:
        with self._loading():
            _try_to_load(modules)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Leave within the block too if the driver ends, as loading can take long."""
        self._is_loading = True
        self._leave_if_orphaned()
        try:
            yield
        finally:
            self._is_loading = False

    def _leave_if_orphaned(self) -> None:
        if self._is_loading and os.getppid() != self._driver:
            self._leave()

    def _leave(self) -> None:
        for child in self._children:
            child.end()
        # The driver can no longer end what they have started elsewhere. If it was killed, leashes
        # may have been cut before its end was seen.
        for mark in {child.mark for child in self._children} | self._let_go:
            end_marked(mark)
        os._exit(0)

    def _answer(self) -> str | None:
        """Carry out a request; return the worker's target in a forked worker, else None."""
        message = receive_message(self._control)
        if message is None:
            self._leave()
            return None
        self._let_go.clear()
        request, descriptors = message
        if "target" not in request:
            self._try_to_load([*request["modules"], *self._later_modules])
            self._later_modules = ()
            send_message(self._control, {"error": _reason_against_forks()})
            return None
        self._try_to_load(request["modules"])
        reason = _reason_against_forks()
        if reason is not None:
            for descriptor in descriptors:
                os.close(descriptor)
            send_message(self._control, {"error": reason})
            return None
        *streams, leash = descriptors
        pid = self._fork(request, streams, leash)
        if pid == 0:
            return str(request["target"])
        self._children.append(_Child(pid, leash, innermost_group(request["environment"])))
        for descriptor in streams:
            os.close(descriptor)
        send_message(self._control, {"pid": pid})
        return None

    def _fork(self, request: dict[str, Any], streams: Sequence[int], leash: int) -> int:
        """Fork a worker; return once the worker leads its own session (0 in the worker)."""
        server = os.getpid()
        reader, writer = os.pipe()
        # Blocked signals wait until the child has its handlers back; ignored ones would be lost.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._dispositions)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            self._get_at_end_of_parent(signal.SIGKILL)
            # Server ended before the signal was asked for, so it will not come.
            if os.getppid() != server:
                os._exit(128 + signal.SIGKILL)
            for number, disposition in self._dispositions.items():
                signal.signal(number, disposition)
            signal.signal(signal.SIGCONT, signal.SIG_DFL)
            os.close(leash)
            os.close(reader)
            os.close(writer)
            self._forget_all()
            _place_descriptors(streams, request["descriptors"])
            _become_worker(request)
        else:
            os.close(writer)
            # End of file: the child leads its own session now.
            os.read(reader, 1)
            os.close(reader)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return pid

    def _get_at_end_of_parent(self, signum: int) -> None:
        self._libc.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)

    def _forget_all(self) -> None:
        """Close the server's descriptors in a worker."""
        self._control.close()
        os.close(self._driver_watch)
        for child in self._children:
            child.forget()
        self._children.clear()


def _try_to_load(modules: Sequence[str]) -> None:
    missing = [name for name in modules if name not in sys.modules]
    for name in missing:
        # A worker that needs it gets the error itself.
        with suppress(Exception):
            _import([name])


def _import(modules: Sequence[str]) -> None:
    """Import modules, and freeze them so garbage collection in workers leaves them shared."""
    # Modules stay loaded: to look for garbage among them would take a tenth of their loading.
    gc.disable()
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        gc.enable()
    # Collections leave frozen objects alone, so forks keep sharing their pages.
    gc.collect()
    gc.freeze()


def _reason_against_forks() -> str | None:
    """Return why this process must not be forked, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized in the fork server"
    num_threads = len(os.listdir("/proc/self/task"))
    return None if num_threads == 1 else f"the fork server has {num_threads} threads"


def _place_descriptors(descriptors: Sequence[int], targets: Sequence[int]) -> None:
    """Move descriptors to the numbers expected by the worker."""
    import fcntl

    first_free = max(targets) + 1
    moved = [fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, first_free) for source in descriptors]
    for source in descriptors:
        os.close(source)
    for source, target in zip(moved, targets, strict=True):
        # Inheritance as for any new process: only the standard streams pass on to children.
        os.dup2(source, target, inheritable=target <= 2)
        os.close(source)


def _become_worker(request: dict[str, Any]) -> None:
    """Set this process up as a fresh interpreter would have been."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["directory"])
    time.tzset()
    tempfile.tempdir = None
    _set_threads(os.environ.get("OMP_NUM_THREADS", ""))
    # New seeds: workers forked from one state must not draw the same; Python reseeds its own.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _set_threads(number: str) -> None:
    """Set the number of threads of loaded libraries, as if they were loaded now."""
    if not number.isdigit():
        return
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(number))
    for setter in _blas_setters():
        setter(int(number))


def _blas_setters() -> list[Callable[[int], None]]:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(maxsplit=5)[-1].rstrip() for line in file if "openblas" in line}
    libraries = [ctypes.CDLL(path) for path in paths if os.path.isfile(path)]
    return [
        getattr(library, name)
        for library in libraries
        for name in _BLAS_SETTERS
        if hasattr(library, name)
    ]
