"""Runners that a master starts as jobs of a real Slurm with two nodes."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from starter_contract import Cluster, StarterContract


class SlurmCluster(Cluster):
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
