"""Place given to a process by an outer launcher (torchrun, srun, mpirun), and a meeting point."""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline._base.process_and_network import LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Environment variables of a launcher; of several names, the first variable set counts.

    Attributes:
        name: The launcher's name.
        rank: The process among all.
        size: The number of processes that were started together.
        local_rank: The process among the processes of its node.
        local_size: The number of processes on this node.
        tasks_per_node: The same for all nodes, as "2(x3),1".
        node_rank: The node among all.
        num_nodes: The number of nodes.
        job: The variable that distinguishes this group from others on the same node.
        step: The variable that distinguishes it from others of the same job, which may run at the
            same time.
        is_alone_decisive: The size alone shows that this launcher was at work.
        unless: A variable of launchers that run inside this one.
        first_host: Finds the node of rank 0.
        hint: How to set a variable for all processes.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: tuple[str, ...] = ()
    tasks_per_node: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    job: tuple[str, ...] = ()
    step: str = ""
    is_alone_decisive: bool = False
    unless: str = ""
    first_host: Callable[[Mapping[str, str]], str | None] | None = None
    hint: str = "give every process the host of rank 0 as MASTER_ADDR, and one free port of it."

    def is_at_work(self, environment: Mapping[str, str]) -> bool:
        """Return whether this launcher has started the process."""
        if self.unless in environment:
            return False
        names = (self.size,) if self.is_alone_decisive else (self.rank, self.size, self.local_rank)
        return all(name in environment for name in names)


def first_host_of(node_list: str) -> str:
    """Return the first host of a node list in Slurm's format, e.g. ``rack[1-2]n[07,09],m3``."""
    depth, end = 0, len(node_list)
    for index, letter in enumerate(node_list):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        # A comma within brackets separates numbers of one name.
        if letter == "," and depth == 0:
            end = index
            break
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", node_list[:end]).strip()


def _slurm_host(environment: Mapping[str, str]) -> str | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environment.get(name):
            return first_host_of(environment[name])
    return None


def _lsf_host(environment: Mapping[str, str]) -> str | None:
    try:
        hosts = Path(environment["LSB_DJOB_RANKFILE"]).read_text().split()
    except (KeyError, OSError):
        return None
    # The first line is the node on which the job's script runs.
    return hosts[1] if len(hosts) > 1 else None


# The first launcher that is at work decides. Workers of torchrun and of Paceline may run within a
# task of another launcher, and an mpirun starts its processes by srun where Slurm has the nodes.
#
# Only Slurm's variables of the step count. The shell of salloc and the script of sbatch have
# the size of their job, but they are one process; srun starts a step of its own.
LAUNCHERS = (
    Launcher(
        name="ALPS",
        rank="ALPS_APP_PE",
        # Set by the user, like the number for each node.
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank="GROUP_RANK",
        num_nodes="GROUP_WORLD_SIZE",
        job=("ALPS_APP_ID",),
        unless="RANK",
        hint="aprun -e MASTER_ADDR=HOST_OF_RANK_0 -e MASTER_PORT=29500 ...",
    ),
    Launcher(
        name="torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size=("LOCAL_WORLD_SIZE",),
        node_rank="GROUP_RANK",
        num_nodes="GROUP_WORLD_SIZE",
        is_alone_decisive=True,
    ),
    Launcher(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        hint="mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500 ...",
    ),
    Launcher(
        name="MVAPICH",
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        hint="mpirun_rsh ... MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500 python train.py",
    ),
    Launcher(
        name="jsrun",
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        job=("LSB_JOBID",),
        first_host=_lsf_host,
        hint="jsrun -E MASTER_ADDR=HOST_OF_RANK_0 -E MASTER_PORT=29500 ...",
    ),
    Launcher(
        name="MPICH",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size=("MPI_LOCALNRANKS",),
        hint="mpirun -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500 ...",
    ),
    Launcher(
        name="PALS",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="PMI_LOCAL_RANK",
        local_size=("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        node_rank="PALS_NODEID",
        job=("PALS_APID", "PBS_JOBID"),
        hint='mpiexec --env MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")" --env MASTER_PORT=29500 ...',
    ),
    Launcher(
        name="Slurm",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
        node_rank="SLURM_NODEID",
        num_nodes="SLURM_STEP_NUM_NODES",
        job=("SLURM_JOB_ID",),
        step="SLURM_STEP_ID",
        first_host=_slurm_host,
    ),
)


# Below the ports that systems give out by themselves.
_FIRST_PORT, _NUM_PORTS = 15000, 10000
_SIZES_OF_ALPS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedPlace:
    """Place of this process among all processes started together by an outer launcher.

    Attributes:
        launcher: The launcher's name.
        rank: This process among all, from 0.
        size: The number of processes, at least 2.
        local_rank: This process among the processes of its node, from 0; None if unknown, as
            where a script has set RANK and WORLD_SIZE itself.
        local_size: The number of processes on this node; None if the launcher does not set it.
        node_rank: This node among all; None if the launcher does not set it.
        num_nodes: The number of nodes; None if the launcher does not set it.
        address: The address of the node of rank 0; None if MASTER_ADDR must give it.
        port: The port on which rank 0 listens; None if MASTER_PORT must give it.
        hint: The way to set a missing value.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node_rank: int | None
    num_nodes: int | None
    address: str | None
    port: int | None
    hint: str = ""

    def known_local_rank(self) -> int:
        """Return the process's number on its node.

        Raises:
            ValueError: Nothing sets it.
        """
        if self.local_rank is None:
            raise ValueError(
                "The environment variable LOCAL_RANK must be a number where WORLD_SIZE is above 1"
                " and no process group was made, but it is missing. Hint: set LOCAL_RANK, or call"
                " `torch.distributed.init_process_group` first, or start with torchrun, srun,"
                " mpirun or `python -m paceline.launch.torch_distributed`."
            )
        return self.local_rank

    def meeting_point(self, address: str | None = None) -> tuple[str, int]:
        """Return the address and port of the store where all processes meet.

        Args:
            address: Takes the place of the address found.

        Raises:
            ValueError: The address or the port must be set, but was not.
        """
        address = address or self.address
        for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", self.port)):
            if value is None:
                raise ValueError(
                    f"The environment variable {name} must be set for the {self.size} processes"
                    f" that {self.launcher} has started, but is missing. Hint: {self.hint}"
                )
        assert address is not None
        assert self.port is not None
        return address, self.port


def launched_place(environment: Mapping[str, str] | None = None) -> LaunchedPlace | None:
    """Return the place given to this process by torchrun, srun, mpirun or another launcher.

    None for a process that works alone: one that no launcher started, or as the only one.

    Args:
        environment: The variables; the process's own by default.

    Raises:
        ValueError: A variable is missing or no number.
    """
    num_of_mpi = _mpi_size() if environment is None else None
    environment = os.environ if environment is None else environment
    environment = _with_place_of_alps(environment, num_of_mpi)
    launcher = next((one for one in LAUNCHERS if one.is_at_work(environment)), None)
    if launcher is None:
        return None
    size = _number_from_launcher(launcher, launcher.size, environment)
    if size <= 1:
        return None
    outer = launcher
    if launcher.local_rank not in environment:
        # A script that has set RANK and WORLD_SIZE from its launcher's variables.
        launcher = _same_place(launcher, environment) or launcher
    node_rank = _optional_from_launcher(launcher, (launcher.node_rank,), environment)
    local_size = _optional_from_launcher(launcher, launcher.local_size, environment)
    if launcher.tasks_per_node in environment and node_rank is not None:
        local_size = _node_tasks(environment[launcher.tasks_per_node], node_rank)
    num_nodes = _optional_from_launcher(launcher, (launcher.num_nodes,), environment)
    # Single node: node numbers of the launcher are not needed.
    if local_size == size:
        node_rank, num_nodes = 0, 1
    return LaunchedPlace(
        launcher=launcher.name,
        rank=_number_from_launcher(outer, outer.rank, environment),
        size=size,
        local_rank=_optional_from_launcher(launcher, (launcher.local_rank,), environment),
        local_size=local_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        address=_address_from_launcher(launcher, environment, is_one_node=num_nodes == 1),
        port=_port_from_launcher(launcher, environment, is_one_node=num_nodes == 1),
        hint=launcher.hint,
    )


def _mpi_size() -> int | None:
    """Return the number of processes known to mpi4py; None if the script does not use mpi4py."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return int(mpi.COMM_WORLD.Get_size())


def _with_place_of_alps(
    environment: Mapping[str, str], num_of_mpi: int | None
) -> Mapping[str, str]:
    """Return the variables plus those derived from the variables set by a user of aprun.

    ALPS sets the rank alone, and places as many processes on each node as `aprun -N` says, one node
    after the other. While the size is unknown, a process may be one of several.

    Args:
        environment: The variables.
        num_of_mpi: The number of processes by mpi4py; None if it does not know.

    Raises:
        ValueError: The number of processes, in all or on each node, was not set.
    """
    if "ALPS_APP_PE" not in environment or "RANK" in environment:
        return environment
    if any(one.is_at_work(environment) for one in LAUNCHERS if one.size != "WORLD_SIZE"):
        return environment  # such as Cray's MPI, which sets more
    if "WORLD_SIZE" not in environment and num_of_mpi is not None:
        environment = {**environment, "WORLD_SIZE": str(num_of_mpi)}
        if "LOCAL_WORLD_SIZE" not in environment:
            # Local rank 0 for all: the ranks find out who shares a node when they meet.
            return {**environment, "LOCAL_RANK": "0"}
    rank, *sizes = (environment.get(n, "") for n in ("ALPS_APP_PE", *_SIZES_OF_ALPS))
    if sizes == ["1", ""]:
        return environment
    for name, value in zip(_SIZES_OF_ALPS, sizes, strict=True):
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(
                f"The environment variable {name} must be a number for the processes of aprun, but"
                f" got {environment.get(name)!r}. Hint: aprun -n 8 -N 4 -e WORLD_SIZE=8"
                " -e LOCAL_WORLD_SIZE=4 ..., WORLD_SIZE=1 for one process, or import mpi4py.MPI"
                " first."
            )
    size, local_size = map(int, sizes)
    return {
        **environment,
        "LOCAL_RANK": str(int(rank) % local_size),
        "GROUP_RANK": str(int(rank) // local_size),
        "GROUP_WORLD_SIZE": str(-(-size // local_size)),
        # The last node may have fewer.
        "LOCAL_WORLD_SIZE": str(min(local_size, size - int(rank) // local_size * local_size)),
    }


def _same_place(outer: Launcher, environment: Mapping[str, str]) -> Launcher | None:
    """Return a launcher with the same rank and size and a full place; None without a match."""
    names = (outer.rank, outer.size)
    for launcher in LAUNCHERS:
        if launcher is outer or not launcher.is_at_work(environment):
            continue
        theirs = environment[launcher.rank], environment[launcher.size]
        if theirs == tuple(environment.get(name) for name in names):
            return launcher
    return None


def forget_launcher(environment: MutableMapping[str, str]) -> None:
    """Remove launcher variables, so a new process does not join the launcher's group."""
    for launcher in LAUNCHERS:
        for name in (launcher.rank, launcher.size, launcher.local_rank):
            environment.pop(name, None)


def _number_from_launcher(launcher: Launcher, name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name)
    if text is None or not text.isdecimal():
        raise ValueError(
            f"The environment variable {name} must be a number when {launcher.size} is above 1,"
            f" but got {text!r}. Hint: start with torchrun, srun, mpirun or `python -m"
            " paceline.launch.torch_distributed`, or use the `DistributedContext` constructor."
        )
    return int(text)


def _optional_from_launcher(
    launcher: Launcher, names: tuple[str, ...], environment: Mapping[str, str]
) -> int | None:
    name = next((name for name in names if name in environment), None)
    return None if name is None else _number_from_launcher(launcher, name, environment)


def _node_tasks(text: str, node_rank: int) -> int | None:
    """Return the task count of a node from a list like "2(x3),1"; None beyond the list's end."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts[node_rank] if node_rank < len(counts) else None


def _address_from_launcher(
    launcher: Launcher, environment: Mapping[str, str], *, is_one_node: bool
) -> str | None:
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if is_one_node:
        return LOOPBACK
    return launcher.first_host(environment) if launcher.first_host is not None else None


def _port_from_launcher(
    launcher: Launcher, environment: Mapping[str, str], *, is_one_node: bool
) -> int | None:
    if "MASTER_PORT" in environment:
        return _number_from_launcher(launcher, "MASTER_PORT", environment)
    job = next((environment[name] for name in launcher.job if environment.get(name)), None)
    if job is None and is_one_node and not launcher.is_alone_decisive:
        job = str(_launcher_pid(launcher.rank))
    if job is None:
        return None
    if launcher.step:
        job = f"{job}.{environment.get(launcher.step, '0')}"
    # Port derived from the job: all ranks compute the same number without communication.
    digest = hashlib.sha256(job.encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _NUM_PORTS


def _launcher_pid(rank_variable: str) -> int:
    """Return the id of the launcher: the nearest ancestor process without a rank variable."""
    marker = f"{rank_variable}=".encode()
    pid = os.getppid()
    while pid > 1:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            status = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return pid
        if not any(variable.startswith(marker) for variable in variables):
            return pid
        # The parent follows the state, after the name, which may hold parentheses.
        pid = int(status.rpartition(b") ")[2].split()[1])
    return pid
