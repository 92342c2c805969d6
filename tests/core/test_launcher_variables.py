"""The place that launchers tell, from variables recorded in their processes."""

import os
import subprocess
import sys
from typing import Any

import pytest

from paceline.core import launched_place
from paceline.core._launcher_place import LaunchedPlace, first_host_of, forget_launcher

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "41000",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_ess_base_jobid": "1137770497",
    "OMPI_MCA_orte_num_nodes": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_ID": "1137770497.1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
PALS = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "0",
    "PMI_LOCAL_SIZE": "2",
    "PALS_RANKID": "2",
    "PALS_NODEID": "1",
    "PALS_LOCAL_RANKID": "0",
    "PALS_APID": "5c9a1c2c-3ee1-4f59-b4c5-7a3f4b7e7f51",
    "PBS_JOBID": "1234567.polaris-pbs-01",
    "PBS_NODEFILE": "/var/spool/pbs/aux/1234567.polaris-pbs-01",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MPISPAWN_ID": "0",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "4",
    "JSM_NAMESPACE_SIZE": "6",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "3",
    "LSB_JOBID": "99881",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
# Six processes by `aprun -n 6 -N 4 -e WORLD_SIZE=6 -e LOCAL_WORLD_SIZE=4`.
ALPS = {
    "ALPS_APP_PE": "5",
    "ALPS_APP_ID": "7654321",
    "ALPS_APP_DEPTH": "1",
    "WORLD_SIZE": "6",
    "LOCAL_WORLD_SIZE": "4",
    "COBALT_JOBID": "321",
}
# The shell that salloc starts, and the script of sbatch.
SALLOC = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
SBATCH = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SINGLE_TASK = SLURM | {
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def facts(place: LaunchedPlace | None) -> tuple[Any, ...]:
    assert place is not None
    rank = (place.rank, place.size, place.local_rank, place.local_size)
    return (place.launcher, *rank, place.node_rank, place.num_nodes, place.address)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, ("torchrun", 3, 4, 1, 2, 1, 2, "10.0.0.7")),
        (OPEN_MPI, ("Open MPI", 1, 2, 1, 2, 0, 1, "127.0.0.1")),
        (MPICH, ("MPICH", 1, 2, 1, 2, 0, 1, "127.0.0.1")),
        (PALS, ("PALS", 2, 4, 0, 2, 1, None, None)),
        (MVAPICH, ("MVAPICH", 1, 2, 1, 2, 0, 1, "127.0.0.1")),
        (JSRUN, ("jsrun", 4, 6, 1, 3, None, None, None)),
        (SLURM, ("Slurm", 4, 5, 0, 1, 2, 3, "n1")),
        (ALPS, ("ALPS", 5, 6, 1, 2, 1, 2, None)),
        (ALPS | {"ALPS_APP_PE": "3"}, ("ALPS", 3, 6, 3, 4, 0, 2, None)),
        (ALPS | {"LOCAL_WORLD_SIZE": "6"}, ("ALPS", 5, 6, 5, 6, 0, 1, "127.0.0.1")),
        # Workers of torchrun on the nodes of ALPS, and Cray's MPI, which tells more.
        (ALPS | TORCHRUN, ("torchrun", 3, 4, 1, 2, 1, 2, "10.0.0.7")),
        ({"ALPS_APP_PE": "2"} | PALS, ("PALS", 2, 4, 0, 2, 1, None, None)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_launcher_tells_the_place(
    environment: dict[str, str], expected: tuple[Any, ...]
) -> None:
    assert facts(launched_place(environment)) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SALLOC,
        SBATCH,
        SINGLE_TASK,
        {"ALPS_APP_PE": "0", "ALPS_APP_ID": "1", "WORLD_SIZE": "1"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        # srun with its interface to MPI tells a rank, but no local one.
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        # A worker of Ray or torchrun that is alone, within a task of Slurm.
        SLURM | {"WORLD_SIZE": "1", "RANK": "0"},
    ],
    ids=["none", "salloc", "sbatch", "srun -n1", "aprun -n1", "mpirun -n1", "half", "inner"],
)
def test_a_process_alone_is_no_member_of_a_group(environment: dict[str, str]) -> None:
    assert launched_place(environment) is None


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "6"}, "LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1", "2"])
def test_aprun_must_be_helped_out(told: dict[str, str], name: str, rank: str) -> None:
    """It tells a process its rank, but not of how many, nor how many each node has."""
    match = rf"{name} must be a number .* aprun, .* Hint: aprun -n 8 -N 4 -e WORLD_SIZE=8"
    with pytest.raises(ValueError, match=match):
        launched_place({"ALPS_APP_PE": rank, "ALPS_APP_ID": "1"} | told)


def test_all_processes_of_aprun_meet_on_one_port() -> None:
    places = [launched_place(ALPS | {"ALPS_APP_PE": str(rank)}) for rank in range(6)]
    assert len({place.port for place in places if place is not None}) == 1
    last = places[5]
    assert last is not None
    with pytest.raises(ValueError, match=r"MASTER_ADDR .* aprun -e MASTER_ADDR=HOST_OF_RANK_0"):
        last.meeting_point()


def test_the_innermost_launcher_counts() -> None:
    # mpirun starts its processes by srun where Slurm has given it nodes.
    place = launched_place(SLURM | OPEN_MPI)
    assert place is not None
    assert place.launcher == "Open MPI"
    place = launched_place(SLURM | OPEN_MPI | TORCHRUN)
    assert place is not None
    assert place.launcher == "torchrun"


def test_all_ranks_find_the_same_port_and_other_steps_another() -> None:
    def port(**changes: str) -> int:
        place = launched_place(SLURM | changes)
        assert place is not None
        return place.meeting_point()[1]

    first = port(SLURM_PROCID="0", SLURM_NODEID="0")
    assert first == port()
    assert 15000 <= first < 25000
    assert len({first, port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="4712")}) == 3
    assert port(MASTER_PORT="29500") == 29500


def test_the_address_may_be_told() -> None:
    place = launched_place(PALS | {"MASTER_ADDR": "x3001", "MASTER_PORT": "29500"})
    assert place is not None
    assert place.meeting_point() == ("x3001", 29500)
    assert place.meeting_point("x1") == ("x1", 29500)


@pytest.mark.parametrize(
    ("environment", "hint"),
    [
        (PALS, r"mpiexec --env MASTER_ADDR="),
        (JSRUN, r"jsrun -E MASTER_ADDR="),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, r"mpirun -x MASTER_ADDR="),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, r"mpirun -genv MASTER_ADDR"),
    ],
)
def test_several_nodes_without_an_address_are_refused_with_the_fix(
    environment: dict[str, str], hint: str
) -> None:
    place = launched_place(environment)
    assert place is not None
    with pytest.raises(ValueError, match=f"MASTER_ADDR must be set for the .* Hint: {hint}"):
        place.meeting_point()


def test_jsrun_tells_its_hosts_in_a_file(tmp_path: Any) -> None:
    ranks = tmp_path / "ranks"
    ranks.write_text("batch5\nh41n01\nh41n01\nh41n02\n")
    place = launched_place(JSRUN | {"LSB_DJOB_RANKFILE": str(ranks)})
    assert place is not None
    assert place.address == "h41n01"


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match=r"variable SLURM_NODEID must be a number .* got 'x'"):
        launched_place(SLURM | {"SLURM_NODEID": "x"})


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("n[001-003,7],m2", "n001"),
        ("rack[2-3]n[07,09]x,m3", "rack2n07x"),
        ("127.0.0.[1-2]", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_list_is_expanded(node_list: str, host: str) -> None:
    assert first_host_of(node_list) == host


@pytest.mark.parametrize("environment", [TORCHRUN, OPEN_MPI, MPICH, PALS, MVAPICH, JSRUN, SLURM])
def test_a_launcher_can_be_forgotten(environment: dict[str, str]) -> None:
    rest = dict(environment)
    forget_launcher(rest)
    assert launched_place(rest) is None
    assert len(rest) >= len(environment) - 3


def test_ranks_without_a_common_job_share_the_process_that_started_them() -> None:
    # As an mpirun that starts a shell for each of its processes.
    # One write each: `print` to one pipe may mix the ranks' lines.
    code = "import os; from paceline.core import launched_place;"
    code += " os.write(1, str(launched_place().port).encode() + bytes([10]))"
    rank = f'"{sys.executable}" -c "{code}"; true'
    both = f"PMI_RANK=0 sh -c '{rank}' & PMI_RANK=1 sh -c '{rank}'; wait"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PMI_")}
    environment |= {k: v for k, v in MPICH.items() if k != "PMI_RANK"}

    def ports() -> list[str]:
        result = subprocess.run(
            ["sh", "-c", both], env=environment, capture_output=True, text=True, check=True
        )
        return result.stdout.split()

    first, second = ports(), ports()
    assert len(first) == 2
    assert first[0] == first[1] != second[0]


def test_variables_that_a_script_has_set_are_completed_by_its_launcher() -> None:
    """As scripts do that map Slurm's variables to those of torch."""
    environment = SLURM | {
        "RANK": SLURM["SLURM_PROCID"],
        "WORLD_SIZE": SLURM["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "41000",
    }
    place, expected = launched_place(environment), launched_place(SLURM)
    assert place is not None
    assert expected is not None
    assert place.local_rank == expected.local_rank
    assert (place.rank, place.size, place.num_nodes) == (
        expected.rank,
        expected.size,
        expected.num_nodes,
    )
    assert place.meeting_point() == ("node7", 41000)
    # Another launcher's group is another one.
    other = launched_place(environment | {"RANK": "0", "WORLD_SIZE": "64"})
    assert other is not None
    assert (other.rank, other.size, other.local_rank) == (0, 64, None)


def test_a_local_rank_that_nothing_tells_is_refused_by_name() -> None:
    place = launched_place({"RANK": "1", "WORLD_SIZE": "2"})
    assert place is not None
    with pytest.raises(ValueError, match="LOCAL_RANK must be a number .*init_process_group"):
        place.known_local_rank()
