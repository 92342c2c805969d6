"""Runners that a master starts as jobs of a real Slurm with two nodes."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from starter_contract import Cluster, Pool, StarterContract, attempts_of


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
        jobs = [line.split() for line in self.call("squeue", "-h", "--format=%T %D").splitlines()]
        return [state != "PENDING" for state, size in jobs for _ in range(int(size))]

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


def test_a_pool_says_why_its_jobs_wait_in_the_queue_of_slurm(
    cluster: SlurmCluster, make_pool: Callable[..., Pool]
) -> None:
    options = cluster.definition["options"] | cluster.waiting
    pool = make_pool(
        {**cluster.definition, "slots": 1, "max_runners": 2, "options": options}, cluster.variables
    )
    with pool.client() as client:
        experiment = pool.create(client)
        text = "1 runner waits in the queue of Slurm: JobHeldUser."
        pool.wait(lambda: any((one.detail or "").endswith(text) for one in client.pools()))
        [entry] = client.queue()
        assert entry.detail.endswith(text)
        experiment.kill()
        pool.wait(lambda: not cluster.jobs())


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
        # Slurm ends the attempt before its runner, which may be given another one in between.
        where = ("squeue", "--noheader", "--states=RUNNING", "--format=%N")
        pool.wait(lambda: cluster.call(*where) not in ("", node))
        pool.wait(
            lambda: [len(one.attempts) for one in client.nodes() if one.state == "ready"] == [1]
        )
        pool.hold.unlink()
        assert experiment.wait() == "COMPLETED"
        cluster.call("scontrol", "update", f"NodeName={node}", "State=RESUME")
        pool.wait(lambda: not cluster.jobs())


# The group of all ranks, as the launcher forms it.
GROUP = """
import os, time
from paceline import core
with core.init() as context:
    distributed = context.distributed
    print("rank", distributed.rank, "of", distributed.size, "on", context.info.agent_id, flush=True)
    if distributed.rank == 0:
        context.train.report_validation_metrics(1, {"loss": 0.5})
    while distributed.broadcast(os.path.exists(os.environ["HOLD"])):
        if context.preempt.should_preempt():
            with context.checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, _):
                (path / f"state_{distributed.rank}").write_text("1")
            break
        time.sleep(0.1)
"""


def processes_at(place: str) -> list[psutil.Process]:
    """Return a runner, its attempts and their processes."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("PACELINE_RUN_DIR", "")]
            is_there = place in " ".join([*words, process.cwd()])
        except psutil.Error:
            continue
        if is_there and process.name() != "srun":
            found.append(process)
    return found


GROUP_FIELDS: dict[str, Any] = {
    "entrypoint": "python3 -m paceline.launch.torch_distributed train.py",
    "resources": {"slots_per_trial": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["canceled", "time limit", "node down", "node lost"])
def test_a_trial_on_two_nodes_goes_on_in_another_job(
    how: str, cluster: SlurmCluster, make_pool: Callable[..., Pool]
) -> None:
    options = {"partition": "all", "time_limit": "10", "signal_before": 60}
    if how == "time limit":
        options |= {"time_limit": "2", "signal_before": 80}
    pool = make_pool(
        {"starter": "slurm", "slots": 1, "max_runners": 2, "idle_timeout": 5.0, "options": options},
        cluster.variables,
    )
    (pool.code / "train.py").write_text(GROUP)
    with pool.client() as client:
        experiment = pool.create(client, **GROUP_FIELDS)
        pool.wait(lambda: experiment.trials()[0].best_metric == 0.5)
        assert cluster.jobs() == [True, True]
        assert cluster.num_groups() == 1
        if how == "canceled":
            cluster.end_one()
        elif how == "node down":
            cluster.call("scontrol", "update", "NodeName=ALL", "State=DOWN", "Reason=test")
            cluster.call("scontrol", "update", "NodeName=ALL", "State=RESUME")
        elif how == "node lost":
            [place] = (pool.home.parent / "runners").glob("*.1")
            for process in processes_at(str(place)):
                process.kill()
        pool.wait(lambda: len(attempts_of(client, experiment)) == 2)
        first, second = attempts_of(client, experiment)
        if how in ("canceled", "time limit"):
            told = "\n".join(line.text for line in experiment.trials()[0].iter_logs())
            assert first["exit"]["outcome"] == "preempted", f"{first}\n{told}\n{pool.log()}"
            assert second["resumed_from"] is not None
        pool.wait(lambda: sum(bool(node.attempts) for node in client.nodes()) == 2)
        pool.hold.unlink()
        assert experiment.wait() == "COMPLETED", pool.log()
        said = [line.text for line in experiment.trials()[0].iter_logs()]
        num_starts = sum(line.startswith(("rank 0 of 2", "rank 1 of 2")) for line in said)
        # An attempt may begin on a runner that is about to hear of the end of its job.
        assert num_starts == 4 or (how == "node down" and num_starts > 4), said
        pool.wait(lambda: not cluster.jobs())
        pool.wait(lambda: not pool.runner_processes())
        pool.wait(lambda: all(token.revoked_at for token in client.list_tokens()))


@pytest.mark.slow
def test_trials_on_two_nodes_wait_for_whole_jobs_and_do_not_block_each_other(
    cluster: SlurmCluster, make_pool: Callable[..., Pool]
) -> None:
    # Somebody else has one of the two nodes.
    options = ("--nodes=1", "--exclusive", "--output=/dev/null")
    other = cluster.call("sbatch", "--parsable", *options, "--wrap=sleep 600")
    pool = make_pool(
        {**cluster.definition, "slots": 1, "max_runners": 4, "idle_timeout": 2.0},
        cluster.variables,
    )
    (pool.code / "train.py").write_text(GROUP)
    with pool.client() as client:
        experiments = [pool.create(client, **GROUP_FIELDS) for _ in range(2)]
        pool.wait(lambda: cluster.jobs().count(False) == 4)
        assert pool.runner_processes() == []
        assert client.nodes() == []
        cluster.call("scancel", other)
        pool.hold.unlink()
        assert [one.wait() for one in experiments] == ["COMPLETED"] * 2
        assert [len(attempts_of(client, one)) for one in experiments] == [1, 1]
