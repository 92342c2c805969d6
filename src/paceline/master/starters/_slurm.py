"""Start runners as jobs of Slurm, by plain `sbatch`."""

import shlex
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paceline._private_files import open_private
from paceline.config import Section
from paceline.master.starters._programs import run_program
from paceline.master.starters._starter_base import RunnerOrder, Starter, StarterError

# States of jobs whose nodes are given to them.
_RUNNING = frozenset({"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STAGE_OUT"})
_OVER = frozenset(
    [
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
        "TIMEOUT",
    ]
)  # fmt: skip

_Word = Annotated[str, Field(pattern=r"^\S+$")]


class SlurmOptions(Section):
    """Fields of `options`.

    Attributes:
        partition: The partition, the default one if None.
        account: The account.
        time_limit: The time limit of each job, as Slurm takes it.
        gpus_per_node: GPUs of each runner.
        cpus_per_node: CPU cores of each runner.
        signal_before: How many seconds before its time limit a job is told to end, so that its
            trials store checkpoints.
        sbatch_options: Further arguments of `sbatch`.
    """

    partition: _Word | None = None
    account: _Word | None = None
    time_limit: _Word | None = None
    gpus_per_node: Annotated[int, Field(ge=1)] | None = None
    cpus_per_node: Annotated[int, Field(ge=1)] | None = None
    signal_before: Annotated[int, Field(ge=1, le=65_535)] = 120
    sbatch_options: list[_Word] = []


class SlurmStarter(Starter):
    """One job for each runner, on one node.

    The directory of the pool must be one that the nodes share with the machine of the master. The
    batch script becomes the runner, so that every signal of Slurm reaches it.
    """

    Options = SlurmOptions
    options: SlurmOptions

    def start(self, order: RunnerOrder) -> None:
        """Write the token file, and submit a job."""
        directory = Path(self.directory).expanduser() / order.name
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open_private(directory / "token", "w") as file:
                file.write(order.token)
            if order.certificate is not None:
                (directory / "master.pem").write_text(order.certificate)
        except OSError as error:
            raise StarterError(f"{str(directory)!r} must be writable, but got {error}.") from error
        place = shlex.quote(str(directory))
        runner = order.shell(shlex.quote(order.name), place, f"{place}/token")
        run_program(self._sbatch(order.name, directory), f"#!/bin/sh\nexec {runner}\n")

    def runners(self) -> dict[str, bool]:
        """Return the jobs of this pool by name."""
        found = {}
        # What has ended within the last minutes is listed too, with its state.
        listed = run_program(["squeue", "--me", "--noheader", "--format=%T %j"])
        for line in listed.splitlines():
            state, _, job = line.strip().partition(" ")
            if job.startswith(self._prefix) and state not in _OVER:
                found[job.removeprefix(self._prefix)] = state in _RUNNING
        return found

    def cancel(self, name: str) -> None:
        """Cancel a job that waits."""
        run_program(["scancel", "--me", "--state=PENDING", f"--name={self._prefix}{name}"])

    @property
    def _prefix(self) -> str:
        """What the names of the jobs of this pool begin with."""
        return f"paceline-{self.cluster_id[:8]}-{self.pool}:"

    def _sbatch(self, name: str, directory: Path) -> list[str]:
        options = self.options
        given = {
            "partition": options.partition,
            "account": options.account,
            "time": options.time_limit,
            "gpus-per-node": options.gpus_per_node,
            "cpus-per-task": options.cpus_per_node,
        }
        return [
            "sbatch",
            f"--job-name={self._prefix}{name}",
            "--nodes=1",
            "--ntasks=1",
            # The master asks for another job; this one's token would be over.
            "--no-requeue",
            f"--signal=B:TERM@{options.signal_before}",
            f"--output={directory / 'runner.log'}",
            f"--chdir={directory}",
            *(f"--{key}={value}" for key, value in given.items() if value is not None),
            *options.sbatch_options,
        ]
