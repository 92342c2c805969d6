"""Runners that a master starts as jobs of a real Slurm with two nodes."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starter_contract import Cluster, Pool, StarterContract, attempts_of


class SlurmCluster(Cluster):
    starts_groups = False
    waiting = {"sbatch_options": ["--hold"]}

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables = variables
        options: dict[str, Any] = {"partition": "all", "time_limit": "10", "signal_before": 60}
        self.definition = {"starter": "slurm", "options": options}

    def call(self, *command: str) -> str:
        environment = os.environ | self.variables
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    def jobs(self) -> list[bool]:
        states = self.call("squeue", "--noheader", "--format=%T").split()
        return [state != "PENDING" for state in states]

    def num_groups(self) -> int:
        return len(self.call("squeue", "--noheader", "--format=%i").split())

    def end_one(self) -> None:
        self.call("scancel", self.call("squeue", "--noheader", "--format=%i").split()[0])


@pytest.fixture
def cluster(slurm: dict[str, str]) -> SlurmCluster:
    cluster = SlurmCluster(slurm)
    # After a second, Slurm would kill a runner that has not told its attempts to leave yet.
    config = Path(slurm["SLURM_CONF"])
    config.write_text(config.read_text().replace("KillWait=1\n", "KillWait=60\n"))
    cluster.call("scontrol", "reconfigure")
    return cluster


class TestSlurm(StarterContract):
    pass


@pytest.mark.slow
def test_a_job_near_its_time_limit_lets_its_trial_go_on_in_another(
    cluster: SlurmCluster, make_pool: Callable[..., Pool]
) -> None:
    options = {"partition": "all", "time_limit": "2", "signal_before": 90}
    pool = make_pool(
        {"starter": "slurm", "slots": 1, "idle_timeout": 5.0, "options": options},
        cluster.variables,
    )
    with pool.client() as client:
        experiment = pool.create(client)
        pool.wait(lambda: len(attempts_of(client, experiment)) == 2)
        first, second = attempts_of(client, experiment)
        assert first["exit"]["outcome"] == "preempted"
        assert second["resumed_from"] is not None
        pool.hold.unlink()
        assert experiment.wait() == "COMPLETED"
        pool.wait(lambda: not cluster.jobs())


@pytest.mark.slow
def test_a_trial_goes_on_when_its_node_is_down(
    cluster: SlurmCluster, make_pool: Callable[..., Pool]
) -> None:
    pool = make_pool({**cluster.definition, "slots": 1, "idle_timeout": 5.0}, cluster.variables)
    with pool.client() as client:
        experiment = pool.create(client)
        pool.wait(lambda: experiment.trials()[0].best_metric == 0.5)
        node = cluster.call("squeue", "--noheader", "--format=%N")
        cluster.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        pool.wait(lambda: len(attempts_of(client, experiment)) == 2)
        running = cluster.call("squeue", "--noheader", "--states=RUNNING", "--format=%N")
        assert running not in ("", node)
        pool.hold.unlink()
        assert experiment.wait() == "COMPLETED"
        cluster.call("scontrol", "update", f"NodeName={node}", "State=RESUME")
        pool.wait(lambda: not cluster.jobs())
