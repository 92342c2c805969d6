"""Template: a process with libraries loaded and nothing else, whose forks become programs.

A template never sees the environment of a fork, which each fork reads itself.
"""

import ctypes
import errno
import gc
import importlib
import mmap
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import paceline
from paceline._base.request_program import receive_message, send_message
from paceline._training.workers.processes.leftover_processes import JOB_SIGNALS, end_marked
from paceline._training.workers.processes.supervised_exec import PR_SET_PDEATHSIG

STATUS = struct.Struct("!i")

# Later modules are loaded this long after the first workers, to hold none of those up.
_LATER_S = 5.0
_ADOPTION_S = 10.0
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_SUFFIXES = (".py", ".pyc", ".so")
_PR_SET_NAME = 15
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# The last fields of /proc/PID/stat that a new interpreter has in other places.
_MAP = struct.Struct("=11QQIi")
_BLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


class TemplateFacts(NamedTuple):
    """Start arguments of a template.

    Attributes:
        control: The descriptor of the socket to the owner.
        driver: The owner's process id.
        modules: The modules to load first.
        later: The modules to load a while after.
        idle_s: When to end without forks and requests, in seconds; None for never.
        parent: Whose children forks are, and with whom they end: "template", or "owner" (which
            must adopt orphans). With "nobody" they end with no other process.
        learned: The modules to load once a fork has loaded torch itself.
    """

    control: int
    driver: int
    modules: Sequence[str]
    later: Sequence[str]
    idle_s: float | None
    parent: str
    learned: Sequence[str] = ()


# Files of loaded modules as they were then; forks know them too.
_stamps: dict[str, tuple[int, ...] | None] = {}
# Memory that all forks share: whether one of them has loaded torch by itself.
has_seen_torch = mmap.mmap(-1, 1)
is_fork = False
# Modules of the template, by name, as they were when this process was forked.
_libraries: dict[str, int] = {}


def serve_forks(facts: TemplateFacts) -> list[str]:
    """Fork on request until the owner has gone; return in the forks only.

    Returns:
        The kind, the target and the arguments of this fork's program, see `worker_program`.
    """
    try:
        server = _Server(facts)
        server.load(facts.modules)
        return server.run()
    except OSError:
        # The owner has gone. No exit handlers: they are for programs.
        os._exit(1)


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


class _Successor(NamedTuple):
    """A fork that loads more and then takes over; `loaded` is -1 once that is settled."""

    pid: int
    loaded: int
    go: int


class _Server:
    def __init__(self, facts: TemplateFacts) -> None:
        self._facts = facts
        self._control = socket.socket(fileno=facts.control)
        self._control.set_inheritable(False)
        self._children: list[_Child] = []
        # Groups whose workers were let go since the driver has last been heard of.
        self._let_go: set[str] = set()
        self._later_modules = facts.later
        self._names: set[str] = set()
        self._successor: _Successor | None = None
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
        if facts.parent == "nobody":
            # Nobody asks how forks ended, so that the system may forget them at once.
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
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
        self._stamp_files()
        send_message(self._control, {"error": _reason_against_forks()})

    def run(self) -> list[str]:
        """Carry out requests; return only in forks, with the program of each."""
        while True:
            ready = self._poll()
            if not ready and self._later_modules:
                self._try_to_load(self._later_modules)
                self._later_modules = ()
                continue
            if self._driver_watch in ready or not (ready or self._children):
                self._leave()
            if self._successor is not None and self._successor.loaded in ready:
                self._hand_over(self._successor)
            for child in list(self._children):
                if child.watch in ready:
                    child.tell_end()
                if child.leash in ready:
                    self._children.remove(child)
                    self._let_go.add(child.mark)
                    child.end()
            if self._control.fileno() in ready:
                program = self._answer()
                if program is not None:
                    return program

    def _poll(self) -> set[int]:
        """Wait, and return the descriptors ready to read; none after a long time."""
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._driver_watch):
            poll.register(descriptor, select.POLLIN)
        if self._successor is not None and self._successor.loaded >= 0:
            poll.register(self._successor.loaded, select.POLLIN)
        for child in self._children:
            poll.register(child.leash, select.POLLIN)
            if not child.has_ended:
                poll.register(child.watch, select.POLLIN)
        wait_s = self._facts.idle_s
        if self._later_modules:
            wait_s = max(0.0, self._later_at - time.monotonic())
        return {descriptor for descriptor, _ in poll.poll(wait_s and wait_s * 1000)}

    def _try_to_load(self, modules: Sequence[str]) -> None:
        if any(name not in sys.modules for name in modules):
            with self._loading():
                _try_to_load(modules)
            self._stamp_files()

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

    def _stamp_files(self) -> None:
        names = {name.partition(".")[0] for name in sys.modules}
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        _stamps.update({f: _stamp(f) for f in files if f and f not in _stamps})
        self._names = {n for n in names if getattr(sys.modules.get(n), "__file__", None)}
        _libraries.update({name: id(module) for name, module in sys.modules.items()})
        for name in ("__main__", "sys", "builtins"):
            _libraries.pop(name, None)

    def _answer(self) -> list[str] | None:
        """Carry out a request; return the program in a fork, else None."""
        message = receive_message(self._control)
        if message is None:
            self._leave()
            return None
        self._let_go.clear()
        request, descriptors = message
        if not descriptors:
            self._try_to_load([*request["modules"], *self._later_modules])
            self._later_modules = ()
            send_message(self._control, {"error": _reason_against_forks()})
            return None
        self._try_to_load(request["modules"])
        reason = _reason_against_forks() or self._reason_against(request)
        if reason is not None:
            for descriptor in descriptors:
                os.close(descriptor)
            send_message(self._control, {"error": reason})
            return None
        order, *leash = descriptors
        try:
            pid = self._fork(leash)
        except OSError as error:
            send_message(self._control, {"error": str(error), "errno": error.errno})
            pid = -1
        if pid == 0:
            return self._become_program(order)
        os.close(order)
        if leash and pid > 0:
            self._children.append(_Child(pid, leash[0], request["mark"]))
        if pid > 0:
            self._answer_with(pid)
        if has_seen_torch[0] and self._facts.learned and self._successor is None:
            self._successor = self._begin_successor()
        return None

    def _begin_successor(self) -> "_Successor":
        """Have a fork load what programs load, while this process serves; then it takes over."""
        server = os.getpid()
        (loaded, writer), (reader, go) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid:
            os.close(writer)
            os.close(reader)
            return _Successor(pid, loaded, go)
        os.close(loaded)
        os.close(go)
        self._get_at_end_of_parent(signal.SIGKILL)
        # To the fork this process is what the owner was.
        self._driver, self._successor = server, _Successor(0, -1, -1)
        self._try_to_load(self._facts.learned)
        os.write(writer, b"1")
        os.close(writer)
        if os.read(reader, 1) != b"1":
            os._exit(1)
        os.close(reader)
        return self._successor

    def _hand_over(self, successor: "_Successor") -> None:
        has_loaded = os.read(successor.loaded, 1) == b"1"
        os.close(successor.loaded)
        # Watched no more; if loading has failed it is not tried again.
        self._successor = successor._replace(loaded=-1)
        if has_loaded:
            os.write(successor.go, b"1")
            # The owner ends the successor by ending this process.
            with suppress(ChildProcessError):
                os.waitpid(successor.pid, 0)
            os._exit(0)

    def _answer_with(self, pid: int) -> None:
        watches = []
        if self._facts.parent == "nobody":
            with suppress(ProcessLookupError):
                watches.append(os.pidfd_open(pid))
        send_message(self._control, {"pid": pid}, watches)
        for watch in watches:
            os.close(watch)

    def _reason_against(self, request: dict[str, Any]) -> str | None:
        """Return why a program must not be a fork of this process, or None."""
        changed = [file for file, stamp in _stamps.items() if _stamp(file) != stamp]
        if changed:
            return f"{changed[0]!r} has changed since it was loaded"
        # The program's own modules come before libraries, unless those are loaded.
        try:
            entries = list(os.scandir(request["first_path"])) if request["first_path"] else []
            own = {e.name.partition(".")[0] for e in entries if e.name.endswith(_SUFFIXES)}
            own |= {e.name for e in entries if e.name in self._names and e.is_dir()}
        except OSError as error:
            return str(error)
        hidden = sorted(self._names & own)
        return f"the directory of the program has a module {hidden[0]!r} too" if hidden else None

    def _fork(self, leash: Sequence[int]) -> int:
        """Fork a process; return its id once it leads its own session (0 in that process)."""
        server = os.getpid()
        reader, writer = os.pipe()
        # Blocked signals wait until the child has its handlers back; ignored ones would be lost.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._dispositions)
        try:
            pid = os.fork()
            if pid == 0:
                if self._facts.parent == "owner" and (child := os.fork()):
                    os.write(writer, b"%d" % child)
                    os._exit(0)
                os.setsid()
                self._tie(server)
                for number, disposition in self._dispositions.items():
                    signal.signal(number, disposition)
                signal.signal(signal.SIGCONT, signal.SIG_DFL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in leash:
                    os.close(descriptor)
                self._forget_all()
            os.close(writer)
            # End of file: the child leads its own session now.
            told = b"" if pid == 0 else b"".join(iter(lambda: os.read(reader, 32), b""))
            os.close(reader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if pid and self._facts.parent == "owner":
            os.waitpid(pid, 0)
            if not told:
                raise OSError(errno.EAGAIN, "The template cannot fork twice")
            return int(told)
        return pid

    def _tie(self, server: int) -> None:
        """Have this fork end with its parent."""
        if self._facts.parent == "nobody":
            self._get_at_end_of_parent(0)
            return
        parent = server if self._facts.parent == "template" else self._facts.driver
        _await_parent(parent)
        self._get_at_end_of_parent(signal.SIGKILL)
        # Parent ended before the signal was asked for, so it will not come.
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    def _become_program(self, order: int) -> list[str]:
        """Read the order for this fork, and set the process up for the order."""
        with socket.socket(fileno=order) as end:
            message = receive_message(end)
        if message is None:
            os._exit(1)
        request, descriptors = message
        global is_fork
        is_fork = True
        sys.executable = request["executable"]
        _place_descriptors(descriptors, request["descriptors"])
        _become_worker(request)
        _show_as(request["command"], request["environment"])
        program: list[str] = request["program"]
        return program

    def _get_at_end_of_parent(self, signum: int) -> None:
        self._libc.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)

    def _forget_all(self) -> None:
        """Close the server's descriptors in a worker."""
        self._control.close()
        os.close(self._driver_watch)
        for child in self._children:
            child.forget()
        self._children.clear()
        if self._successor is not None:
            for descriptor in self._successor[1:]:
                with suppress(OSError):
                    os.close(descriptor)


def keep_libraries() -> None:
    """Keep the template's modules beyond the end of the interpreter.

    To take them apart would copy most of the memory shared with the template, for 0.5 s with torch.
    Modules and objects of the program end as usual. With a thread or a process group, which may be
    an attribute of a library, all end as usual.
    """
    distributed = sys.modules.get("torch.distributed")
    has_group = getattr(distributed, "is_initialized", bool)()
    if has_group or threading.active_count() > 1:
        return
    kept = [
        sys.modules.pop(name)
        for name, identity in _libraries.items()
        if id(sys.modules.get(name)) == identity
    ]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


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
        if "importlib.metadata" in sys.modules:
            # Each `core.init` records the version, and to read it takes longer than all else there.
            paceline.__version__  # noqa: B018
    finally:
        gc.enable()
    # Collections leave frozen objects alone, so forks keep sharing their pages.
    gc.collect()
    gc.freeze()


def _reason_against_forks() -> str | None:
    """Return why this process must not be forked, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized in the template"
    files = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    devices = [os.readlink(file) for file in files if os.path.lexists(file)]
    if any(device.startswith(_GPU_DEVICES) for device in devices):
        return "a GPU is open in the template"
    num_threads = len(os.listdir("/proc/self/task"))
    return None if num_threads == 1 else f"the template has {num_threads} threads"


def _stamp(file: str) -> tuple[int, ...] | None:
    try:
        facts = os.stat(file)
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


def _await_parent(pid: int) -> None:
    """Wait until a process has adopted this one."""
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() != pid and time.monotonic() < deadline:
        time.sleep(0.0005)


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
    # Python notes the id of the main thread once only.
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined] # as when it starts
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    # New seeds: workers forked from one state must not draw the same; Python reseeds its own.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _show_as(command: list[str], environment: dict[str, str]) -> None:
    """Show a command and its environment in /proc, where the system can."""
    global _shown
    sys.orig_argv[:] = command
    words = [os.fsencode(word) + b"\0" for word in command]
    words += [os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items()]
    _shown = ctypes.create_string_buffer(b"".join(words))
    start = ctypes.addressof(_shown)
    middle = start + sum(map(len, words[: len(command)]))
    with open("/proc/self/stat", "rb") as file:
        stat = file.read()
    fields = [0, 0, 0, *map(int, stat[stat.rindex(b")") + 4 :].split())]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    # Numbers of the fields as in proc(5): start_code, end_code, start_data, end_data, start_brk.
    places = [fields[number - 1] for number in (26, 27, 45, 46, 47)]
    end = start + sum(map(len, words))
    data = _MAP.pack(*places, libc.sbrk(0), fields[27], start, middle, middle, end, 0, 0, -1)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, data, ctypes.c_ulong(len(data)), 0)
    libc.prctl(_PR_SET_NAME, os.fsencode(os.path.basename(command[0])), 0, 0, 0)


# Memory that /proc shows.
_shown: object = None


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
