"""Client of a template process: asks for forks, and watches and ends them."""

import json
import logging
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paceline._base.process_and_network import wait_until
from paceline._base.request_program import receive_message, send_message
from paceline._training.workers.processes import template_process
from paceline._training.workers.processes.leftover_processes import innermost_group
from paceline._training.workers.processes.rank_environment import THREADS_MARK, THREADS_VARIABLE
from paceline._training.workers.processes.template_process import STATUS, TemplateFacts
from paceline._training.workers.processes.worker_process import (
    KILLED,
    AdoptedProcess,
    ProcessHandle,
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
    "TORCH",
    "PYTORCH_",
    "ATEN_",
)
WARM_VARIABLE = "PACELINE_WARM"
FRESH_START_VARIABLE = "PACELINE_FRESH_START"
"""Tells a process why it is no fork of a template."""
_LIMITS = sorted({n for name, n in vars(resource).items() if name.startswith("RLIMIT_")})
# Imports of torch may take long from a network file system.
START_S = 120.0
_ANSWER_S = 20.0
_REAP_S = 5.0


class TemplateError(RuntimeError):
    """Raised when a template cannot be started, or forks nothing."""


def is_warm(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether processes with an environment may be forks of a template.

    Raises:
        ValueError: PACELINE_WARM is neither 0 nor 1.
    """
    text = environment.get(WARM_VARIABLE, "1")
    if text not in ("0", "1"):
        raise ValueError(f"{WARM_VARIABLE} must be 0 or 1, but got {text!r}.")
    return text == "1"


class Template:
    """A running template; may be used from any thread.

    Args:
        key: Names the workers it is for.
        interpreter: The interpreter and its flags.
        environment: An environment of such workers.
        path: The module path of its forks; None for that of the interpreter.
        facts: The other facts of `TemplateFacts`.
    """

    is_for_scripts = False

    def __init__(
        self,
        key: Mapping[str, str],
        interpreter: Sequence[str],
        environment: Mapping[str, str],
        path: Sequence[str] | None,
        **facts: Any,
    ) -> None:
        self.key = key
        self.num_workers = 0
        self._is_parent = facts["parent"] == "template"
        self._has_loaded = False
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        facts |= {"path": path, "control": theirs.fileno(), "driver": os.getpid()}
        with theirs:
            self._popen: subprocess.Popen[bytes] | _Split = subprocess.Popen(
                [*interpreter, PROGRAM_FILE, "template", json.dumps(facts)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Session of its own: Ctrl-C in a terminal must not end the template.
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    @classmethod
    def split_off(cls, environment: Mapping[str, str] | None = None) -> "Template | None":
        """Return a template that is a fork of this process, to be called before it does anything.

        Args:
            environment: The environment of its programs; None for that of trials of this process.

        Returns:
            None in a process that is itself no fork of a template.

        Raises:
            ForkedProgram: This process is a fork of the new template, for `worker_program`.
        """
        if not template_process.is_fork:
            return None
        self = cls.__new__(cls)
        self.key = import_time_facts(environment or unbuffered_environment(os.environ))
        self.num_workers, self._is_parent, self._has_loaded = 0, False, True
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        owner = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            self._control.close()
            facts = TemplateFacts(theirs.detach(), owner, (), (), None, "owner")
            raise ForkedProgram(template_process.serve_forks(facts))
        theirs.close()
        self._popen = _Split(pid)
        try:
            self.await_loaded()
        except TemplateError as error:
            logger.warning("The entrypoint starts slowly, as a new interpreter: %s.", error)
            return None
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the server process takes requests."""
        return self._popen.poll() is None

    def difference(self, spec: WorkerSpec, environment: Mapping[str, str]) -> str | None:
        """Return why a command would not load its libraries as this template has, or None."""
        if not is_warm(environment):
            return "warm starts are turned off"
        found = plain_program(spec.command, environment)
        if found is None:
            return "the command is another than that of a script or module for the interpreter"
        _, kind, target, *_ = found[0]
        # Python itself runs directories and archives, and reports a script that is missing.
        is_script = target.endswith(".py") and (spec.working_directory / target).is_file()
        if kind != "module" and not is_script:
            return f"{target!r} is no file of a script"
        facts = import_time_facts(environment).items() ^ self.key.items()
        names = sorted({name or "limits or the user" for name, _ in facts})
        return f"others are set that are read at the start: {', '.join(names)}" if names else None

    def await_loaded(self) -> None:
        """Wait until the server has loaded its modules.

        Raises:
            TemplateError: It cannot, or must not be forked after that.
        """
        try:
            self._answer(START_S)
        except TemplateError:
            self.close()
            raise
        except BaseException:
            # Nobody else knows this process when a Ctrl-C interrupts the wait.
            self._popen.kill()
            self.close()
            raise

    def is_loaded(self, timeout_s: float = 0.0) -> bool:
        """Return whether the template takes requests, by now or after a time in seconds at most."""
        with self._lock:
            if not self._has_loaded and self._control.fileno() >= 0 and self._has_answer(timeout_s):
                try:
                    self._answer(_ANSWER_S)
                    self._has_loaded = True
                except TemplateError as error:
                    logger.warning("Workers start slowly, as new interpreters: %s.", error)
                    self.close()
        return self._has_loaded and self.is_alive

    def load(self, modules: Sequence[str]) -> None:
        """Make the server load modules now, together with those planned for later.

        Raises:
            TemplateError: It has ended, or must not be forked after that.
        """
        with self._lock:
            self._send({"modules": list(modules)}, [])
            self._answer(START_S)

    def start(
        self,
        modules: Sequence[str],
        spec: WorkerSpec,
        environment: Mapping[str, str],
        is_read: bool,
    ) -> ProcessHandle:
        """Fork a worker, or start a new interpreter on failure; see `start_process`."""
        streams = _Streams(is_read)
        leash = socket.socketpair() if self._is_parent else None
        try:
            pid, _ = self.fork(spec, environment, streams.theirs, modules=modules, leash=leash)
        except TemplateError as error:
            streams.close_ours()
            if leash is not None:
                leash[0].close()
            logger.warning("A worker starts slowly, as a new interpreter: %s.", error)
            if not self._is_parent:
                # Nothing is said of the next workers, and forks live on.
                self.close()
            environment = {**environment, FRESH_START_VARIABLE: str(error)}
            return start_process(spec, environment, is_read)
        finally:
            streams.close_theirs()
            if leash is not None:
                leash[1].close()
        if leash is None:
            return AdoptedProcess(pid, *streams.files())
        return _Forked(pid, leash[0], streams.files(), self)

    def start_script(self, spec: WorkerSpec, output: int) -> ProcessHandle:
        """Fork a program whose output and error output go to a file.

        Args:
            spec: The program.
            output: A descriptor of the file.

        Raises:
            TemplateError: As `fork`.
            OSError: As `fork`.
        """
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull, "rb") as null:
            streams = [null.fileno(), output, output]
            try:
                pid, _ = self.fork(spec, spec.environment, streams, leash=(ours, theirs))
            except BaseException:
                ours.close()
                raise
        return _Forked(pid, ours, (None, None), self)

    def fork(
        self,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        streams: Sequence[int],
        *,
        modules: Sequence[str] = (),
        leash: tuple[socket.socket, socket.socket] | None = None,
    ) -> tuple[int, int | None]:
        """Fork a process.

        Args:
            spec: The program to run, as a command of `PROGRAM_FILE` or of Python.
            environment: The whole environment of the process.
            streams: Its standard streams.
            modules: The modules to load before.
            leash: The ends of a socket to report its end, if it is to be a child of the template.

        Returns:
            Its id, and a descriptor of the process if it is nobody's child and still there.

        Raises:
            TemplateError: There is no template any more, or the program must not be a fork of it.
            OSError: The system lacks resources for another process.
        """
        program, executable = _program_of(spec, environment)
        order = {
            "command": list(spec.command),
            "program": program,
            "executable": executable,
            "environment": dict(environment),
            "directory": str(spec.working_directory),
            "descriptors": [0, 1, 2, *spec.descriptors],
            "cores": sorted(os.sched_getaffinity(0)),
            "umask": _umask(),
        }
        request = {
            "modules": list(modules),
            "mark": innermost_group(environment),
            "first_path": _first_path(program, spec.working_directory),
        }
        ours, theirs = socket.socketpair()
        with ours, self._lock:
            with theirs:
                ends = [theirs, *([leash[1]] if leash is not None else [])]
                self._send(request, [end.fileno() for end in ends])
                answer, watches = self._receive(_ANSWER_S if not modules else START_S)
            if "errno" in answer:
                raise OSError(answer["errno"], f"A process cannot be forked: {answer['error']}")
            self._check(answer)
            self.num_workers += 1
            ours.settimeout(_ANSWER_S)
            # Read by the fork itself: the template must not know variables of programs.
            with suppress(OSError):
                # A fork that has died meanwhile is reported like any other worker.
                send_message(ours, order, [*streams, *spec.descriptors])
            return int(answer["pid"]), watches[0] if watches else None

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

    def _send(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        try:
            send_message(self._control, request, descriptors)
        except OSError as error:
            raise TemplateError("the template has ended") from error

    def _answer(self, timeout_s: float) -> None:
        """Wait until the template has done what it was asked for."""
        self._check(self._receive(timeout_s)[0])

    def _check(self, answer: Mapping[str, Any]) -> None:
        if answer.get("error"):
            raise TemplateError(answer["error"])

    def _receive(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        self._control.settimeout(timeout_s)
        try:
            if not wait_until(self._has_answer, timeout_s):
                raise TimeoutError
            message = receive_message(self._control)
        except TimeoutError as error:
            # A late answer would be taken for that to another request.
            self._popen.kill()
            raise TemplateError(f"the template is silent for {timeout_s:g} s") from error
        if message is None:
            raise TemplateError("the template has ended")
        return message

    def _has_answer(self, timeout_s: float | None) -> bool:
        descriptor = self._control.fileno()
        if descriptor < 0:
            # Closed socket: the read that follows reports it.
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


class ForkedProgram(BaseException):
    """Raised in a fork to unwind the stack: `worker_program` runs the fork's own program then."""

    def __init__(self, program: list[str]) -> None:
        super().__init__(program)
        self.forked_program = program


class _Split:
    """A forked template, as far as used like a `subprocess.Popen`."""

    returncode: int | None = None

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._watch = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> None:
        if self.returncode is not None:
            return
        poll = select.poll()
        poll.register(self._watch, select.POLLIN)
        if not poll.poll(None if timeout_s is None else 1000 * timeout_s):
            raise subprocess.TimeoutExpired("template", timeout_s or 0.0)
        self.returncode = 0
        os.close(self._watch)
        os.waitpid(self._pid, 0)

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._watch, signal.SIGKILL)


class _Streams:
    """The standard streams of a worker, and this process's ends of them."""

    def __init__(self, is_read: bool) -> None:
        self.ours: list[int] = []
        self.theirs = [0, 1, 2]
        self._is_read = is_read
        if is_read:
            self.theirs = [os.open(os.devnull, os.O_RDWR)]
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
        self,
        pid: int,
        leash: socket.socket,
        files: Sequence[IO[bytes] | None],
        server: Template,
    ) -> None:
        self.pid = pid
        self._leash = leash
        self._server = server
        self.stdout, self.stderr = files

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


def import_time_facts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what all forks of a template have in common, as it is read when libraries load."""
    found = {n: value for n, value in environment.items() if n.startswith(_READ_AT_IMPORT)}
    if environment.get(THREADS_MARK) == environment.get(THREADS_VARIABLE):
        # Number of threads chosen by Paceline: it can be set after the import too.
        found.pop(THREADS_VARIABLE, None)
    limits = [resource.getrlimit(n) for n in _LIMITS]
    process = (limits, os.getpriority(os.PRIO_PROCESS, 0), os.getresuid(), os.getgroups())
    return {**found, "": str(process)}


def unbuffered_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a template for trials, which never chose the number of threads."""
    kept = {name: v for name, v in environment.items() if name != THREADS_VARIABLE}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def template_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a template for another environment starts."""
    is_own_choice = THREADS_VARIABLE not in import_time_facts(environment)
    # Threads that a library starts when it loads would not be there after a fork.
    return {
        **environment,
        **({THREADS_VARIABLE: "1"} if is_own_choice else {}),
        "OPENBLAS_NUM_THREADS": "1",
    }


def _program_of(spec: WorkerSpec, environment: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the program of a command for `worker_program`, and the interpreter."""
    words = list(spec.command)
    if PROGRAM_FILE in words:
        at = words.index(PROGRAM_FILE)
        return words[at + 1 :], words[0]
    program = plain_program(words, environment)
    if program is None:
        raise TemplateError("the command is none of the template's interpreter")
    return program


def plain_program(
    words: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], str] | None:
    """Return the program of a command of this process's interpreter, and the interpreter's name.

    Returns:
        None for any other command, and for options besides -m.
    """
    found = shutil.which(words[0], path=environment.get("PATH", os.defpath))
    if found is None or len(words) < 2:
        return None
    is_own = os.path.dirname(found) == os.path.dirname(sys.executable)
    if not is_own or not os.path.samefile(found, sys.executable):
        return None
    kind, *rest = words[1:]
    if kind == "-m" and rest and not rest[0].startswith("-"):
        return ["plain", "module", *rest], found
    return None if kind.startswith("-") else (["plain", "script", kind, *rest], found)


def _first_path(program: Sequence[str], directory: Path) -> str:
    """Return the directory that a program's interpreter searches first; empty if none is new."""
    kind, target, *_ = program[1:] if program[0] == "plain" else program
    if kind == "serve":
        return ""
    return str((directory / target).resolve().parent if kind == "script" else directory)


def _umask() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        line = next(line for line in file if line.startswith("Umask:"))
    return int(line.split()[1], 8)
