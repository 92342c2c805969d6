"""Specification of a worker's process, and the process that was started by it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.workers.processes._rank_environment import NodeLayout, log_threads, rank_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Specification of one worker's process.

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
            that waits for what it started. False sends them to the worker's process alone, which
            leaves its data-loading processes to it; SIGKILL always goes to the group.
        changes_session: What the command starts may lead a session of its own, as below `setsid`.
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
    """Return how to start the workers of this node, all with one command.

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
        pid: Its process id, which is also that of its session.
        pgid: Its process group.
        start_time: When it started, to tell it from a later process with the same id; see
            `kill_leftover`.
    """

    rank: int
    pid: int
    pgid: int
    start_time: float
