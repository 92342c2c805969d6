"""Process of a worker: its specification, start, wait and end, and the reading of its output.

Environment of a worker with its rank, and the rendezvous of torch and Horovod.
"""

import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar

from paceline._base.process_and_network import (
    LOOPBACK,
    await_listener,
    num_cores,
    with_available_store,
)
from paceline._training.workers.processes import supervised_exec as _exec
from paceline._training.workers.processes.signals_and_leftovers import (
    STACKS_SIGNAL,
    children_that_handle,
    marked_process_groups,
    read_process,
    signal_group,
)
from paceline._training.workers.processes.worker_output import (
    LINE_CHARACTERS,
    LineSplitter,
    OutputLine,
    Stream,
)
from paceline._training.workers.worker_failures import WorkerExit

logger = logging.getLogger(__name__)

THREADS_VARIABLE = "OMP_NUM_THREADS"
THREADS_MARK = "PACELINE_THREADS"
# The shards of a global batch, for workers whose number may change.
SHARDS_VARIABLE = "PACELINE_NUM_SHARDS"
# How long the workers may wait for others in a collective operation until their parent ends them.
COLLECTIVE_TIMEOUT_VARIABLE = "PACELINE_COLLECTIVE_TIMEOUT_S"
_WATCHER_SLACK_S = 60.0
_TORCHRUN_PREFIX = "TORCHELASTIC_"
_LONGEST_S = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """Layout of a node: its share of the workers, and the meeting place of all workers.

    Attributes:
        num_local_workers: The workers of this node.
        num_nodes: The nodes of the attempt.
        node_rank: The number of this node.
        master_address: The address of the node of rank 0.
        master_port: The port on which rank 0 listens.
        sizes: The workers of each node; empty if every node has equally many.
    """

    num_local_workers: int
    master_port: int
    num_nodes: int = 1
    node_rank: int = 0
    master_address: str = LOOPBACK
    sizes: tuple[int, ...] = ()

    @property
    def first_rank(self) -> int:
        """The lowest rank of this node."""
        if self.sizes:
            return sum(self.sizes[: self.node_rank])
        return self.node_rank * self.num_local_workers

    @property
    def world_size(self) -> int:
        """The workers of all nodes."""
        if self.sizes:
            return sum(self.sizes)
        return self.num_local_workers * self.num_nodes


def rank_environment(
    base: Mapping[str, str], layout: NodeLayout, local_rank: int
) -> dict[str, str]:
    """Return the environment of a worker: `base` and the variables of its place."""
    # Variables of torchrun would make the worker look for torchrun's store at MASTER_ADDR.
    environment = {k: v for k, v in base.items() if not k.startswith(_TORCHRUN_PREFIX)}
    environment |= {
        "RANK": str(layout.first_rank + local_rank),
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(layout.num_local_workers),
        "GROUP_RANK": str(layout.node_rank),
        "GROUP_WORLD_SIZE": str(layout.num_nodes),
        "NODE_RANK": str(layout.node_rank),
        "MASTER_ADDR": layout.master_address,
        "MASTER_PORT": str(layout.master_port),
    }
    environment |= thread_environment(base, layout.num_local_workers)
    if layout.num_nodes == 1 and sys.platform == "linux":
        # Gloo would bind to the address of the host's name, which not every machine can resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def group_timeout(timeout_s: float) -> timedelta:
    """Return how long torch is to wait in a collective operation.

    Where somebody watches the workers, that is longer than the limit for them: the error of a
    watcher names the ranks that are missing, torch's does not.

    Args:
        timeout_s: How long where nobody watches, in seconds.
    """
    watched_s = float(os.environ.get(COLLECTIVE_TIMEOUT_VARIABLE, 0))
    least_s = min(watched_s + _WATCHER_SLACK_S, _LONGEST_S) if watched_s else 0.0
    return timedelta(seconds=max(timeout_s, least_s))


def thread_environment(base: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """Return the variables to share the cores among the workers of this node.

    A number that the user set stays. One that a runner set (which marks it) is for all workers
    together and is divided.
    """
    given = base.get(THREADS_VARIABLE)
    if given and not base.get(THREADS_MARK):
        return {}
    available = int(given) if given and given.isdigit() else num_cores()
    threads = str(max(1, available // num_workers))
    return {THREADS_VARIABLE: threads, THREADS_MARK: threads}


def log_threads(environments: Sequence[Mapping[str, str]]) -> None:
    """Say how many threads the workers of these environments compute with."""
    logger.info(
        "Starting %d worker(s) with %s thread(s) each (%s).",
        len(environments),
        environments[0][THREADS_VARIABLE],
        THREADS_VARIABLE,
    )


def launcher_shards() -> int | None:
    """Return the launcher's number of shards of a global batch, or None if not given.

    Raises:
        ValueError: PACELINE_NUM_SHARDS is no number from 1 on.
    """
    text = os.environ.get(SHARDS_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{SHARDS_VARIABLE} must be a number from 1 on, but got {text!r}.")
    return int(text)


def is_port_free(port: int) -> bool:
    """Tell whether a process on this node could listen on the port now."""
    with socket.socket() as probe:
        # Closed connections of an earlier run may linger on the port, and do no harm.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


_Info = TypeVar("_Info", bound="RankInfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Place of a worker: its rank and its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @classmethod
    def from_environment(
        cls: type[_Info], environment: Mapping[str, str] = os.environ, **more: Any
    ) -> _Info:
        """Return the place given by the variables of a worker.

        Args:
            environment: The variables.
            more: Fields of a subclass.
        """
        return cls(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
            node_rank=int(environment["NODE_RANK"]),
            **more,
        )


_HOST = "localhost"


class HorovodRendezvous:
    """Rendezvous server of Horovod, running in this process until `stop`.

    It gives the workers what `horovodrun --gloo` gives them.

    Raises:
        ImportError: Horovod is not installed.
    """

    def __init__(self) -> None:
        # Late import: only users of Horovod need the package.
        from horovod.runner.http.http_server import RendezvousServer

        self._server: Any = RendezvousServer()
        self._port = self._server.start()

    def variables(self, num_workers: int) -> list[dict[str, str]]:
        """Prepare a start of so many workers, and return the variables of each, in rank order."""
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

        # Server forgets the addresses of an earlier start by this call.
        self._server.init(get_host_assignments([HostInfo(_HOST, num_workers)], num_workers))
        return horovod_variables(num_workers, self._port)

    def stop(self) -> None:
        """End the server."""
        self._server.stop()

    def __enter__(self) -> "HorovodRendezvous":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stop()


def horovod_variables(num_workers: int, port: int) -> list[dict[str, str]]:
    """Return the variables of workers meeting at a port of this machine, in rank order."""
    size = str(num_workers)
    same = {
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_SIZE": size,
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": _HOST,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
    }
    ranks = map(str, range(num_workers))
    return [{**same, "HOROVOD_RANK": rank, "HOROVOD_LOCAL_RANK": rank} for rank in ranks]


# After so long torch waits for rank 0 itself, and says the cause.
_LISTEN_S = 60.0


def join_process_group(
    backend: str,
    *,
    timeout_s: float,
    method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Join a process group like `init_process_group`, without long pauses until rank 0 is there.

    Args:
        backend: Such as "gloo".
        timeout_s: How long ranks may wait for others where nobody watches them, in seconds.
        method: "env://", or "tcp://" with the host and the port of rank 0.
        rank: The rank of this process; by default the one in the environment.
        world_size: The number of ranks; by default the one in the environment.
    """
    from torch import distributed

    own_rank = os.environ.get("RANK", "0") if rank is None else rank
    if int(own_rank) != 0:
        host, _, port = method.removeprefix("tcp://").rpartition(":")
        if method == "env://":
            host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if host and port.isdecimal():
            await_listener(host, int(port), min(_LISTEN_S, timeout_s))
    with_available_store(
        lambda _: distributed.init_process_group(
            backend,
            init_method=method,
            rank=-1 if rank is None else rank,
            world_size=-1 if world_size is None else world_size,
            timeout=group_timeout(timeout_s),
        )
    )


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
