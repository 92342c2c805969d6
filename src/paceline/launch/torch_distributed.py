"""Launcher of a worker per slot: ``python3 -m paceline.launch.torch_distributed``."""

import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline._base.exceptions import CollectiveMismatchError
from paceline._base.gpus import num_visible_gpus
from paceline._base.process_and_network import LOOPBACK, PortReservation, num_cores
from paceline._base.run_memory import run_memory
from paceline._base.terminal_text import join_colors
from paceline._training.workers import worker_failures as failures
from paceline._training.workers.launch_nodes import LaunchNodes
from paceline._training.workers.process_pools import ProgramPool, WorkerCommand, WorkerVariables
from paceline._training.workers.processes.leftover_processes import sweeping_after_kill
from paceline._training.workers.processes.rank_environment import (
    SHARDS_VARIABLE,
    NodeLayout,
    is_port_free,
)
from paceline._training.workers.processes.template_client import Template
from paceline._training.workers.processes.templates import template_of_ranks
from paceline._training.workers.processes.worker_output import OutputLine
from paceline._training.workers.run import LAUNCH_HINT, LaunchRun
from paceline._training.workers.worker_settings import check_crowd
from paceline._training.workers.workers import ElasticLimits, Workers
from paceline.launch._launcher_arguments import (
    USAGE,
    Backend,
    LaunchArgumentError,
    LaunchOptions,
    parse_arguments,
    worker_command,
)

if TYPE_CHECKING:
    from paceline._base.run_directory import RunInfo

logger = logging.getLogger("paceline.launch")


_RUN_DIRECTORY_VARIABLE = "PACELINE_RUN_DIR"
_MEETING_PORT_VARIABLE = "PACELINE_MEETING_PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptNodes:
    """Nodes of an attempt, and the place of this node among them.

    Attributes:
        rank: The number of this node.
        address: The address of node 0.
        port: Where the launchers meet, on node 0.
        num_slots: The slots of the attempt on each node.
    """

    rank: int
    address: str
    port: int
    num_slots: tuple[int, ...]

    def place(self, options: LaunchOptions) -> LaunchOptions:
        """Return the options with this node's place, unless they name several nodes already."""
        if options.num_nodes > 1:
            return options
        return replace(
            options,
            num_nodes=len(self.num_slots),
            node_rank=self.rank,
            master_address=self.address,
            master_port=self.port,
        )

    def sizes_for(self, options: LaunchOptions) -> tuple[int, ...]:
        """Return the number of workers of each node; empty if the options give this number."""
        return self.num_slots if options.num_workers is None else ()


def attempt_nodes() -> AttemptNodes | None:
    """Return the nodes of this process's attempt; None for fewer than two nodes."""
    port = os.environ.get(_MEETING_PORT_VARIABLE)
    info = attempt_info() if port else None
    if port is None or info is None or len(info.container_slot_counts) < 2:
        return None
    return AttemptNodes(
        rank=info.container_rank,
        address=info.container_addrs[0],
        port=int(port),
        num_slots=tuple(info.container_slot_counts),
    )


def tell_runner(text: str) -> None:
    """Report to this node's runner why the workers have ended, if this is an attempt of a trial."""
    if path := os.environ.get(_RUN_DIRECTORY_VARIABLE):
        from paceline._base.run_directory import (
            NotARunDirectoryError,
            RunDirectory,
            RunVersionError,
        )

        # Nobody may miss the workers' error because the run directory is gone.
        with suppress(OSError, NotARunDirectoryError, RunVersionError):
            RunDirectory.open(Path(path)).write_launch_error(text)


def attempt_info() -> "RunInfo | None":
    """Return the facts of this process's attempt, or None outside of a master's attempt.

    Raises:
        LaunchArgumentError: They cannot be read.
    """
    path = os.environ.get(_RUN_DIRECTORY_VARIABLE)
    if not path:
        return None
    # The journal's reader costs a good part of the launcher's start.
    from paceline._base.run_directory import NotARunDirectoryError, RunDirectory, RunVersionError

    try:
        return RunDirectory(Path(path)).read_info()
    except (NotARunDirectoryError, RunVersionError) as error:
        raise LaunchArgumentError(str(error)) from error


class RankLineWriter:
    """Writer of whole lines, each with its rank, to the stream of its origin."""

    def __init__(self) -> None:
        self._broken: set[int] = set()
        self._has_colors = _RUN_DIRECTORY_VARIABLE in os.environ

    def __call__(self, line: OutputLine) -> None:
        """Write a line."""
        descriptor = 1 if line.stream == "stdout" else 2
        # The runner keeps colours; a file that a person names for output takes plain text.
        text = join_colors(line.text, line.colors) if self._has_colors else line.text
        data = f"[rank={line.rank}] {text}\n".encode()
        # Training continues when nobody reads any more, as with `| head`.
        if descriptor not in self._broken and not _write_all(descriptor, data):
            self._broken.add(descriptor)


def _write_all(descriptor: int, data: bytes) -> bool:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # Another program with the same terminal may have made it non-blocking.
            select.select([], [descriptor], [])
        except OSError:
            return False
    return True


_INTERRUPTED = 130
# A finite time, as waits refuse infinity.
_FOR_EVER_S = 1e9
_DEFAULT_PORT_OF_SEVERAL_NODES = 29400
_LOG_FORMAT = "%(levelname)s: %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher and return its exit code: 0, or the code of the first worker to fail.

    After a restart the last start's counts.
    """
    return launch(arguments, Backend("torch_distributed"))


def launch(arguments: Sequence[str] | None, backend: Backend) -> int:
    """Run the launcher for a back end, and return its exit code.

    Args:
        arguments: The command line; by default this process's own.
        backend: The workers' variables besides those of torch.distributed.
    """
    # First of all, in a trial: the workers are forks too then, from their first start on.
    template = Template.split_off(os.environ)
    logging.basicConfig(format=_LOG_FORMAT, level=logging.INFO, stream=sys.stderr)
    try:
        options, program = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        if options.wants_help:
            print(USAGE.format(launcher=backend.launcher), end="")
            return 0
        command = worker_command(program)
        nodes = attempt_nodes()
        if nodes is not None:
            options = nodes.place(options)
        with (
            sweeping_after_kill() as marks,
            PortReservation() as reservation,
            backend.open(options) as variables,
        ):
            return _run_workers(
                command, options, reservation.port, marks, variables, nodes, template
            )
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (
        LaunchArgumentError,
        failures.NodesDifferError,
        failures.NotEnoughWorkersError,
        failures.WorkerStartError,
    ) as error:
        print(f"paceline.launch.{backend.launcher}: error: {error}", file=sys.stderr)
        tell_runner(str(error))
        return 2


def _run_workers(
    command: WorkerCommand,
    options: LaunchOptions,
    free_port: int,
    marks: Mapping[str, str],
    worker_variables: WorkerVariables,
    attempt: AttemptNodes | None,
    template: Template | None,
) -> int:
    """Run the workers to their end and return the exit code.

    Raises:
        NotEnoughWorkersError: There were too few for too long.
        WorkerStartError: One cannot be started.
    """
    limits, capacity = _worker_limits(options.num_workers, options.tensor_parallel_size)
    restarts = options.max_restarts if attempt is None else _restarts_on_nodes(options)
    policy = failures.RestartPolicy(restarts, option="--max-restarts", retries_errors=True)
    sizes = () if attempt is None else attempt.sizes_for(options)
    num_workers = sum(sizes) or limits.least
    nodes = _launch_nodes(options, num_workers, restarts, policy) if options.num_nodes > 1 else None
    if template is None and num_workers > options.num_nodes:
        template = template_of_ranks(command.arguments, os.environ)
    variables = dict(marks)
    if limits.least < limits.most:
        # The global batch is the same for any number of workers within the bounds.
        variables[SHARDS_VARIABLE] = os.environ.get(SHARDS_VARIABLE, f"{limits.most:g}")

    def make_pool() -> ProgramPool:
        return ProgramPool(
            command,
            lambda num_workers: _node_layout(
                options, num_workers, nodes.port if nodes is not None else free_port, sizes
            ),
            capacity,
            environment=variables,
            worker_variables=worker_variables,
            on_line=RankLineWriter(),
            heartbeat_timeout_s=options.heartbeat_timeout_s or _FOR_EVER_S,
            collective_timeout_s=options.collective_timeout_s or _FOR_EVER_S,
            grace_s=options.grace_s,
            is_restarted=restarts > 0,
            template=template,
        )

    workers = Workers(limits, make_pool, hint=LAUNCH_HINT)
    runner = LaunchRun(workers, policy, nodes)
    try:
        with run_memory(is_wanted=restarts > 0) as memory:
            variables |= memory
            runner.run(lambda: workers.pool.program)
    except (CollectiveMismatchError, failures.WorkerFailedError) as error:
        logger.error("%s", error)
        # Readers of the runner's report do not see the output beside it.
        text, found, _ = str(error).partition(failures.OUTPUT_IS)
        tell_runner(f"{text}." if found else text)
        return _exit_code(error, signal.SIGINT in runner.received)
    return 0


def _exit_code(
    error: CollectiveMismatchError | failures.WorkerFailedError, is_interrupted: bool
) -> int:
    """Return the exit code for an error: the code of the first worker to fail."""
    if isinstance(error, CollectiveMismatchError):
        return 1
    if error.exit_code is not None:
        return error.exit_code
    # A shell expects the code of Ctrl-C, though the workers ended by another signal.
    if is_interrupted and error.signal is not None:
        return _INTERRUPTED
    # A worker that hung was killed.
    return 128 + (error.signal or signal.SIGKILL)


def _restarts_on_nodes(options: LaunchOptions) -> int:
    # The next group may need files that only the next attempt of the master fetches.
    if options.max_restarts:
        logger.warning(
            "`--max-restarts` is %d, but a trial on several nodes is started again by its master"
            " alone: `max_restarts` of the experiment's configuration.",
            options.max_restarts,
        )
    return 0


def _launch_nodes(
    options: LaunchOptions, num_workers: int, max_restarts: int, policy: failures.RestartPolicy
) -> LaunchNodes:
    port = options.master_port or _DEFAULT_PORT_OF_SEVERAL_NODES
    try:
        return LaunchNodes(
            options.node_rank,
            (options.master_address or LOOPBACK, port),
            {
                "--nnodes": options.num_nodes,
                "--nproc-per-node": num_workers,
                "--max-restarts": max_restarts,
            },
            policy.decide,
            heartbeat_timeout_s=options.heartbeat_timeout_s or _FOR_EVER_S,
            collective_timeout_s=options.collective_timeout_s or _FOR_EVER_S,
            wait_s=options.nodes_timeout_s,
        )
    except OSError as error:
        raise LaunchArgumentError(
            f"The launchers must be able to meet on port {port} of node 0, but {error}."
            " Hint: give all nodes another `--master-port`."
        ) from None


def _node_layout(
    options: LaunchOptions, num_workers: int, free_port: int, sizes: tuple[int, ...]
) -> NodeLayout:
    port = free_port
    # The port is the launchers' own if there are several nodes.
    if options.master_port and options.num_nodes == 1:
        port = options.master_port
        if not is_port_free(port):
            raise LaunchArgumentError(
                f"`--master-port` must be a port that is free here, but {port} is taken."
                " Hint: leave it out to get a free one."
            )
    return NodeLayout(
        num_local_workers=num_workers,
        num_nodes=options.num_nodes,
        node_rank=options.node_rank,
        master_address=options.master_address or LOOPBACK,
        master_port=port,
        sizes=sizes,
    )


def _worker_limits(
    wanted: int | tuple[int, int] | str | None, tensor_size: int
) -> tuple[ElasticLimits, Callable[[], int]]:
    """Return the limits of the number of workers, and a function for the present capacity."""
    if isinstance(wanted, tuple):
        least, most = wanted
        _check_crowd(least)
        # Models are divided by whole groups of ranks.
        bounds = (least, max(least, most - most % tensor_size))
        # Several workers can share a core, but not a GPU.
        limits = ElasticLimits.of(bounds, multiple=tensor_size)
        return limits, lambda: num_visible_gpus() or max(least, num_cores())
    number = _num_workers(wanted)
    # A number from the user is checked instead, and never changed.
    if tensor_size > 1 and isinstance(wanted, str):
        number = max(1, number - number % tensor_size)
    return ElasticLimits.of(number), lambda: number


def _check_crowd(num_workers: int) -> None:
    try:
        check_crowd(num_workers)
    except failures.ResourcesError as error:
        raise LaunchArgumentError(f"`--nproc-per-node` is too large. {error}") from error


def _num_workers(wanted: int | str | None) -> int:
    if isinstance(wanted, int):
        _check_crowd(wanted)
        return wanted
    if wanted is None:
        return _slots_held()
    num_gpus = 0 if wanted == "cpu" else num_visible_gpus()
    if wanted == "gpu" and num_gpus == 0:
        raise LaunchArgumentError(
            "`--nproc-per-node gpu` needs a GPU, but this node has none that is visible."
        )
    number = num_gpus or num_cores()
    logger.info(
        "Starting %d workers: one per %s (%s).", number, "GPU" if num_gpus else "core", wanted
    )
    return number


def _slots_held() -> int:
    info = attempt_info()
    if info is not None and info.slot_ids:
        return len(info.slot_ids)
    logger.info("Starting 1 worker. `--nproc-per-node N` before the program starts more.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
