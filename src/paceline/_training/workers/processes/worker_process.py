"""Process of a worker: its specification, start, wait and end, and the reading of its output."""

import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from paceline._training.workers.processes import supervised_exec as _exec
from paceline._training.workers.processes.leftover_processes import marked_process_groups
from paceline._training.workers.processes.process_facts_and_signals import (
    STACKS_SIGNAL,
    children_that_handle,
    read_process,
    signal_group,
)
from paceline._training.workers.processes.rank_environment import (
    NodeLayout,
    log_threads,
    rank_environment,
)
from paceline._training.workers.processes.worker_output import (
    LINE_CHARACTERS,
    LineSplitter,
    OutputLine,
    Stream,
)
from paceline._training.workers.worker_failures import WorkerExit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Specification of a worker's process.

    Attributes:
        command: The program and its arguments; the program is looked up on the PATH of
            `environment`.
        environment: The worker's whole environment.
        working_directory: Where the worker starts.
        rank: The worker's number in the whole attempt.
        local_rank: The worker's number on this node.
        node_rank: The number of this node.
        world_size: The number of workers on all nodes.
        signals_whole_group: Signals go to the worker's whole process group, as a shell needs it
            that waits for its children. False sends them to the worker's process alone, which
            leaves its data-loading processes to it; SIGKILL always goes to the group.
        changes_session: The command's children may lead a session of their own, as below `setsid`.
            Whatever has the mark of the worker's group then counts as its process group.
        descriptors: File descriptors of this process that the worker gets under the same numbers.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    working_directory: Path
    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    signals_whole_group: bool = True
    changes_session: bool = False
    descriptors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not self.command:
            raise ValueError(
                "`command` must be a non-empty list of the program and its arguments, but got"
                f' {self.command!r}. Hint: ["sh", "-c", text] runs a line of shell.'
            )
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"`rank` must be at least 0 and below `world_size` ({self.world_size}), but got"
                f" {self.rank}."
            )


def local_specs(
    command: Sequence[str],
    layout: NodeLayout,
    *,
    signals_whole_group: bool,
    environment: Mapping[str, str] | None = None,
) -> list[WorkerSpec]:
    """Return the specifications of this node's workers, all with the same command.

    They get this process's working directory, and its environment with what `environment` adds.
    How many threads each computes with is logged.
    """
    ranks = range(layout.num_local_workers)
    base = {**os.environ, **(environment or {})}
    environments = [rank_environment(base, layout, local_rank) for local_rank in ranks]
    log_threads(environments)
    return [
        WorkerSpec(
            command=command,
            environment=environment,
            working_directory=Path.cwd(),
            rank=int(environment["RANK"]),
            local_rank=local_rank,
            node_rank=layout.node_rank,
            world_size=layout.world_size,
            signals_whole_group=signals_whole_group,
        )
        for local_rank, environment in enumerate(environments)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess:
    """The process of a started worker.

    Attributes:
        rank: The worker's rank.
        pid: Its process id, also the id of its session.
        pgid: Its process group.
        start_time: When it started, to tell it from a later process with the same id; see
            `kill_leftover`.
    """

    rank: int
    pid: int
    pgid: int
    start_time: float


# A supervisor that died before the signal was asked for can no longer send it.
_EXECUTE = '[ "$PPID" = "$0" ] || kill -s KILL "$$"; exec "$@"'


class ProcessHandle(ABC):
    """Handle of a started process; its id is not reused until `reap`.

    Attributes:
        pid: Its id, also the id of its session and process group.
        stdout: Its output, or None if that goes where this process's output goes.
        stderr: The same for its error output.
    """

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    @abstractmethod
    def await_end(self) -> tuple[int, int | None]:
        """Wait for the end; return the exit code (128 + N for a signal N) and the signal."""

    @abstractmethod
    def reap(self) -> None:
        """Reap the ended process, freeing its id."""


Start = Callable[[WorkerSpec, Mapping[str, str], bool], ProcessHandle]


def start_process(spec: WorkerSpec, environment: Mapping[str, str], is_read: bool) -> ProcessHandle:
    """Run a worker's command as a child, killed with the calling thread.

    Args:
        spec: The worker to run.
        environment: The worker's whole environment.
        is_read: Whether its output comes here; else it goes where this process's output goes.

    Raises:
        OSError: The process cannot be started.
    """
    return _Child(
        subprocess.Popen(
            [*_tie(spec.command[0], environment), *spec.command],
            env=environment,
            cwd=spec.working_directory,
            stdin=subprocess.DEVNULL if is_read else None,
            stdout=subprocess.PIPE if is_read else None,
            stderr=subprocess.PIPE if is_read else None,
            bufsize=0,
            start_new_session=True,
            pass_fds=spec.descriptors,
        )
    )


def _tie(program: str, environment: Mapping[str, str]) -> list[str]:
    """Return the command prefix to end a command with this process.

    Where util-linux is installed that is `setpriv`, which takes a tenth of an interpreter's time.
    """
    setpriv, shell = _find_setpriv(), shutil.which("sh", path=os.defpath)
    can_run = shutil.which(program, path=environment.get("PATH", os.defpath)) is not None
    if setpriv and shell and can_run and (os.path.isabs(program) or os.sep not in program):
        return [setpriv, "--pdeathsig", "KILL", shell, "-c", _EXECUTE, str(os.getpid())]
    # Wrapper in Python: reports by itself why a command cannot be run.
    return [sys.executable, "-I", "-S", _exec.__file__, str(os.getpid())]


@cache
def _find_setpriv() -> str | None:
    setpriv = shutil.which("setpriv", path=os.defpath) if sys.platform == "linux" else None
    if setpriv is None:
        return None
    test = [setpriv, "--pdeathsig", "KILL", "true"]
    return None if subprocess.run(test, capture_output=True).returncode else setpriv


class _Child(ProcessHandle):
    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.stdout = popen.stdout
        self.stderr = popen.stderr

    def await_end(self) -> tuple[int, int | None]:
        if hasattr(os, "waitid"):
            return _await_child(self.pid)
        # Before Python 3.13 macOS has no call that leaves the zombie, so the process id is free
        # for others a little early there.
        return ended(self._popen.wait())

    def reap(self) -> None:
        self._popen.wait()


class AdoptedProcess(ProcessHandle):
    """A child that another process has started and left to this one."""

    def __init__(self, pid: int, stdout: IO[bytes] | None, stderr: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.stderr = stderr

    def await_end(self) -> tuple[int, int | None]:
        return _await_child(self.pid)

    def reap(self) -> None:
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _await_child(pid: int) -> tuple[int, int | None]:
    """Wait for the end of a child, which stays a zombie."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    has_exited = result.si_code == os.CLD_EXITED
    return ended(result.si_status if has_exited else -result.si_status)


def ended(returncode: int) -> tuple[int, int | None]:
    """Return exit code and signal (or None) for a `returncode` of `subprocess`."""
    return (returncode, None) if returncode >= 0 else (128 - returncode, -returncode)


KILLED = ended(-signal.SIGKILL)


class LocalWorker:
    """A started worker: its process, its streams and its end.

    The group's lock guards all but `open_streams`, which belongs to the supervising thread.
    """

    def __init__(self, spec: WorkerSpec, handle: ProcessHandle, group_id: str = "") -> None:
        facts = read_process(handle.pid)
        self.spec = spec
        self._group_id = group_id
        self.handle = handle
        self.process = WorkerProcess(
            rank=spec.rank,
            pid=handle.pid,
            pgid=handle.pid,
            start_time=facts.start_time if facts else 0.0,
        )
        self.open_streams: dict[IO[bytes], LineSplitter] = {}
        self.sent_signals: set[int] = set()
        self.exit: WorkerExit | None = None
        self.silence: str | None = None
        self.exited_at = 0.0
        self.next_look_at = 0.0
        self.is_closed = False

    @property
    def is_ending(self) -> bool:
        """Whether the process has ended and its leftovers are not dealt with yet."""
        return self.exit is not None and not self.is_closed

    @property
    def may_save_its_work(self) -> bool:
        """Whether a shell's children may still be handling a signal after the shell's end."""
        # A system that ends a job, such as Slurm, signals all of its processes by itself.
        was_ended = self.exit is not None and self.exit.signal == signal.SIGTERM
        is_asked = was_ended or bool(self.sent_signals)
        is_killed = signal.SIGKILL in self.sent_signals
        return is_asked and not is_killed and self.spec.signals_whole_group

    def send(self, signum: int) -> None:
        """Send a signal, if the worker has not ended."""
        # Until it is closed the process stays a zombie, so nothing else can have got its id.
        if self.is_closed:
            return
        self.sent_signals.add(signum)
        if self.spec.signals_whole_group or signum == signal.SIGKILL:
            for process_group in self.process_groups():
                signal_group(process_group, signum)
        elif self.exit is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)
            if signum == STACKS_SIGNAL:
                # Processes of a data loader know what they read, if they were forked.
                for pid in children_that_handle(self.process.pid, signum):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signum)

    def process_groups(self) -> set[int]:
        """Return the process groups of the worker's processes."""
        others = marked_process_groups(self._group_id) if self.spec.changes_session else set()
        return {self.process.pgid} | others

    def close(self) -> None:
        """Reap the process; its id is free afterwards."""
        self.is_closed = True
        self.handle.reap()


def await_exit(worker: LocalWorker) -> WorkerExit:
    """Wait until a worker's process has ended, and return how."""
    code, signum = worker.handle.await_end()
    return WorkerExit(
        rank=worker.spec.rank,
        code=code,
        signal=signum,
        time=time.time(),
        # Ends by the group's own signal are no first failure, except for a kill after silence.
        is_consequence=signum in worker.sent_signals and worker.silence is None,
        silence=worker.silence,
    )


_READ_BYTES = 64 * 1024
# A launcher puts "[rank=N] " before each piece, and the next reader must not cut it again.
_PREFIX_CHARACTERS = 32

OnLine = Callable[[OutputLine], None]


class OutputReader:
    """Reader of workers' output, line by line; for a single thread except for `wake`.

    Args:
        on_line: Gets the lines, or None if there are none to read.
    """

    def __init__(self, on_line: OnLine | None) -> None:
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        # A full pipe wakes the reader as well, so nobody has to wait for room.
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)

    def wake(self) -> None:
        """Have `read` return."""
        # A full pipe wakes it already.
        with suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")

    def open(self, worker: LocalWorker, pipe: IO[bytes], stream: Stream) -> None:
        """Read a stream of a worker from now on."""
        spec = worker.spec
        is_one_of_many = spec.world_size > 1
        worker.open_streams[pipe] = LineSplitter(
            stream,
            spec.rank if is_one_of_many else None,
            max_characters=LINE_CHARACTERS - (_PREFIX_CHARACTERS if is_one_of_many else 0),
        )
        self._selector.register(pipe, selectors.EVENT_READ, worker)

    def read(self, timeout_s: float | None) -> int:
        """Read the streams with data; return their number."""
        num_read = 0
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, _READ_BYTES)
            if key.data is None:
                continue
            num_read += 1
            if data:
                splitter = key.data.open_streams[key.fileobj]
                self._deliver(splitter.feed(data, time.time()))
            else:
                self.close_stream(key.data, key.fileobj)  # type: ignore[arg-type] # registered so
        return num_read

    def close_stream(self, worker: LocalWorker, pipe: IO[bytes]) -> None:
        """Read a stream no more."""
        self._selector.unregister(pipe)
        splitter = worker.open_streams.pop(pipe)
        pipe.close()
        self._deliver(splitter.close(time.time()))

    def deliver_due(self, workers: Iterable[LocalWorker]) -> None:
        """Deliver progress-bar states held back for long enough."""
        now = time.time()
        for worker in workers:
            for splitter in worker.open_streams.values():
                self._deliver(splitter.tick(now))

    def close(self) -> None:
        """Close the selector and the wake-up pipe."""
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _deliver(self, lines: list[OutputLine]) -> None:
        for line in lines:
            try:
                if self._on_line is not None:
                    self._on_line(line)
            except Exception:
                # A failing callback must not end the reading of the workers' output.
                logger.exception("A line of output could not be passed on: %r", line)
