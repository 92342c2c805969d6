"""Launchers of processes, such as torchrun, srun and mpirun: the variables of each."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The variables of one launcher; where several are named, the first that is set counts.

    Attributes:
        name: What it is called.
        rank: The process among all.
        size: The number of processes that were started together.
        local_rank: The process among those of its node.
        local_size: The number of processes on this node.
        tasks_per_node: The same for all nodes, as "2(x3),1".
        node_rank: The node among all.
        num_nodes: The number of nodes.
        job: What tells this group from others of the same node.
        step: What tells it from others of the same job, which may run at the same time.
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
        """Tell whether this launcher has started the process."""
        if self.unless in environment:
            return False
        names = (self.size,) if self.is_alone_decisive else (self.rank, self.size, self.local_rank)
        return all(name in environment for name in names)


def first_host_of(node_list: str) -> str:
    """Return the first host of a list as Slurm writes it, such as ``rack[1-2]n[07,09],m3``."""
    depth, end = 0, len(node_list)
    for index, letter in enumerate(node_list):
        depth += {"[": 1, "]": -1}.get(letter, 0)
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
# Of Slurm's variables those of the step count. The shell of salloc and the script of sbatch have
# the size of their job, but they are one process; what srun starts is a step of its own.
LAUNCHERS = (
    Launcher(
        name="ALPS",
        rank="ALPS_APP_PE",
        # Told by the user, as is the number for each node; see `_launched_place.py`.
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
