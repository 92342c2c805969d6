"""Runners that a master starts on a real Ray cluster of several nodes."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from starter_contract import Cluster, Pool, StarterContract, attempts_of

from paceline._cluster.master.starters.ray_runners import RayRunners


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to Ray, which starts some at its first use."""


@pytest.fixture(autouse=True)
def no_leaked_signal_handlers() -> None:
    """Leave SIGTERM to Ray's nodes, which set it in this process."""


class RayNodes(Cluster):
    waiting = {"resources": {"nowhere": 1}}

    def __init__(self, address: str) -> None:
        self.definition = {
            "starter": "ray",
            "options": {"address": address, "strategy": "PACK"},
        }

    def jobs(self) -> list[bool]:
        from ray.util import list_named_actors

        groups = self.groups()
        if not groups:
            return [False] * len(list_named_actors(all_namespaces=True))
        states = [group["state"] for group in groups for _ in group["bundles"]]
        return [state != "PENDING" for state in states]

    def num_groups(self) -> int:
        return len(self.groups())

    @staticmethod
    def groups() -> list[dict[str, Any]]:
        from ray.util import placement_group_table

        all_groups = placement_group_table().values()
        return [group for group in all_groups if group["state"] != "REMOVED"]

    def end_one(self) -> None:
        import ray
        from ray.util import list_named_actors

        actor = list_named_actors(all_namespaces=True)[0]
        ray.kill(ray.get_actor(**actor))


@pytest.fixture
def cluster(ray_cluster: Any) -> RayNodes:
    return RayNodes(ray_cluster.address)


class TestRay(StarterContract):
    pass


def test_runners_that_wait_are_told_with_what_the_cluster_lacks(
    ray_cluster: Any, tmp_path: Path
) -> None:
    options = {
        "address": ray_cluster.address, "namespace": "paceline-test", "pool": "far",
        "directory": str(tmp_path), "strategy": "STRICT_SPREAD", "bundle": {"memory_bank": 1},
    }  # fmt: skip
    runners = RayRunners(options)
    order = {"token": "", "certificate": None, "command": ["false"]}
    runners.start([{**order, "name": name} for name in ("far-1", "far-2")])
    try:
        told = runners.runners()
        assert told["runners"] == {"far-1": False, "far-2": False}
        assert told["waiting"] == [
            "The Ray cluster has no room for 2 runner(s) with 1 memory_bank each, each on another"
            " node, yet: its 2 node(s) have room for 1."
        ]
    finally:
        runners.cancel("far-2")
    assert runners.runners() == {"runners": {}, "failed": {}, "waiting": []}


@pytest.mark.slow
def test_a_search_runs_on_two_nodes_and_goes_on_when_one_is_killed(
    ray_cluster: Any, make_pool: Callable[..., Pool]
) -> None:
    nodes = [ray_cluster.add_node(num_cpus=1, resources={"lab": 1}) for _ in range(2)]
    pool = make_pool(
        {
            "starter": "ray", "slots": 1, "max_runners": 2, "idle_timeout": 5.0,
            "options": {"address": ray_cluster.address, "resources": {"lab": 1}},
        },
        {},
    )  # fmt: skip
    with pool.client() as client:
        searcher = {"name": "random", "metric": "loss", "max_trials": 3, "max_concurrent_trials": 2}
        space = {"x": {"type": "int", "minval": 0, "maxval": 9}}
        experiment = pool.create(client, searcher=searcher, hyperparameters=space)
        pool.wait(lambda: sum(bool(n.attempts) for n in client.nodes()) == 2)
        pool.wait(lambda: len([t for t in experiment.trials() if t.best_metric == 0.5]) == 2)
        ray_cluster.remove_node(nodes.pop(), allow_graceful=False)
        pool.wait(lambda: sum(bool(n.attempts) for n in client.nodes()) == 1)
        pool.hold.unlink()
        assert experiment.wait() == "COMPLETED"
        assert [trial.state for trial in experiment.trials()] == ["COMPLETED"] * 3
        pool.wait(lambda: not pool.runner_processes())
    ray_cluster.remove_node(nodes.pop())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trial_leaves_a_node_whose_raylet_alone_was_killed(
    ray_cluster: Any, make_pool: Callable[..., Pool]
) -> None:
    nodes = [ray_cluster.add_node(num_cpus=1, resources={"lab": 1}) for _ in range(2)]
    pool = make_pool(
        {
            "starter": "ray", "slots": 1, "max_runners": 2, "idle_timeout": 5.0,
            "options": {"address": ray_cluster.address, "resources": {"lab": 1}},
        },
        {},
    )  # fmt: skip
    with pool.client() as client:
        experiment = pool.create(client, max_restarts=0)
        pool.wait(lambda: num_reports(experiment) == 1)
        [runner] = client.nodes()
        # Nobody waits for its end, so that Ray's own processes take it for alive.
        node_of_runner(ray_cluster, runner.name).all_processes["raylet"][0].process.kill()
        pool.wait(lambda: len(attempts_of(client, experiment)) == 2)
        first, second = attempts_of(client, experiment)
        assert first["exit"]["outcome"] == "preempted"
        assert second["resumed_from"] is not None
        pool.hold.unlink()
        assert experiment.wait() == "COMPLETED"
        assert runner.name not in [node["name"] for node in second["nodes"]]
        pool.wait(lambda: not pool.runner_processes())
    for node in ray_cluster.worker_nodes & set(nodes):
        ray_cluster.remove_node(node, allow_graceful=False)


# All ranks take part in each step and in each checkpoint.
GROUP = """
import os, time
from pathlib import Path
from paceline import core
with core.init() as context:
    rank, info = context.distributed.rank, context.info
    begin = 0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            begin = int((path / f"rank-{rank}").read_text())
    Path(os.environ["HOLD"]).with_name(f"{begin}-{rank}").write_text(info.agent_id)
    step, deadline = begin, time.monotonic() + 200
    while step < begin + 3 or (os.path.exists(os.environ["HOLD"]) and time.monotonic() < deadline):
        step += 1
        context.distributed.allgather(step)
        with context.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
            (path / f"rank-{rank}").write_text(str(step))
        if rank == 0:
            context.train.report_validation_metrics(step, {"loss": 0.5})
        time.sleep(0.2)
        # All ranks see the same.
        if any(context.distributed.allgather(not os.path.exists(os.environ["HOLD"]))):
            break
"""


def num_reports(experiment: Any) -> int:
    return sum(len(list(t.iter_metrics("validation"))) for t in experiment.trials())


def node_of_runner(ray_cluster: Any, runner: str) -> Any:
    """Return the Ray node that has the actor of a runner."""
    import ray

    actors = ray._private.state.actors().values()
    [node_id] = [actor["Address"]["NodeID"] for actor in actors if actor["Name"] == runner]
    [node] = [node for node in ray_cluster.worker_nodes if node.node_id == node_id]
    return node


def lose_node(ray_cluster: Any, pool: Pool, runner: str) -> None:
    """Kill all processes of the Ray node of a runner, the last of which is Ray's own."""
    node = node_of_runner(ray_cluster, runner)
    place = f"{pool.home.parent}/runners/{runner}/"
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if place in f"{process.cmdline()} {process.cwd()}/ {process.environ()}":
                process.kill()
    ray_cluster.remove_node(node, allow_graceful=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_trial_on_three_nodes_goes_on_from_its_last_checkpoint_when_one_is_lost(
    ray_cluster: Any, make_pool: Callable[..., Pool], rank: int
) -> None:
    nodes = [ray_cluster.add_node(num_cpus=1, resources={"lab": 1}) for _ in range(4)]
    pool = make_pool(
        {
            "starter": "ray", "slots": 1, "max_runners": 4, "idle_timeout": 5.0,
            "options": {"address": ray_cluster.address, "resources": {"lab": 1}},
        },
        {},
    )  # fmt: skip
    (pool.code / "train.py").write_text(GROUP)
    with pool.client() as client:
        experiment = pool.create(
            client,
            entrypoint="python3 -m paceline.launch.torch_distributed train.py",
            resources={"slots_per_trial": 3},
            max_restarts=0,
        )
        pool.wait(lambda: num_reports(experiment) >= 3)
        lost = (pool.home.parent / f"0-{rank}").read_text()
        lose_node(ray_cluster, pool, lost)
        pool.wait(lambda: len(attempts_of(client, experiment)) == 2)
        pool.wait(lambda: len(list(pool.home.parent.glob(f"*-{rank}"))) == 2)
        pool.hold.unlink()
        assert experiment.wait() == "COMPLETED"
        first, second = attempts_of(client, experiment)
        assert first["exit"]["reason"] == "runner_lost"
        assert lost not in [node["name"] for node in second["nodes"]]
        [trial] = experiment.trials()
        steps = [report.steps_completed for report in trial.iter_metrics("validation")]
        assert steps == list(range(1, steps[-1] + 1))
        begun = {int(p.name.partition("-")[0]) for p in pool.home.parent.glob(f"*-{rank}")}
        # All ranks had stored what comes before the third report.
        assert begun == {0, second["resumed_steps"]}
        assert second["resumed_steps"] >= 2
        assert trial.data.restarts == 0
        pool.wait(lambda: not pool.runner_processes())
    for node in ray_cluster.worker_nodes & set(nodes):
        ray_cluster.remove_node(node)


@pytest.mark.slow
def test_a_cluster_that_the_master_has_started_ends_with_it(
    make_pool: Callable[..., Pool],
) -> None:
    pytest.importorskip("ray", reason="NOT TESTED: Ray is not installed")
    pool = make_pool(
        {"starter": "ray", "slots": 1, "options": {"start": True}}, {"RAY_worker_niceness": "0"}
    )
    with pool.client() as client:
        experiment = pool.create(client)
        pool.wait(lambda: any(n.attempts for n in client.nodes()))
        [helper] = [
            p
            for p in psutil.Process(pool.process.pid).children()
            if "ray_runners" in str(p.cmdline())
        ]
        started = helper.children(recursive=True)
        assert any("raylet" in process.name() for process in started)
        pool.hold.unlink()
        assert experiment.wait() == "COMPLETED"
    pool.process.terminate()
    pool.wait(lambda: not any(process.is_running() for process in [helper, *started]))
    pool.wait(lambda: not pool.runner_processes())


@pytest.mark.slow
def test_a_cluster_that_cannot_be_reached_is_told_in_the_log(
    make_pool: Callable[..., Pool],
) -> None:
    pytest.importorskip("ray", reason="NOT TESTED: Ray is not installed")
    pool = make_pool({"starter": "ray", "options": {"address": "127.0.0.1:1"}}, {})
    with pool.client() as client:
        pool.create(client)
        pool.wait(lambda: "No Ray cluster answers at 127.0.0.1:1 (" in pool.log())
