"""Trials on several nodes: real node runners on this machine, each with a directory of its own."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.client import ApiError

TRAIN = """
import os, time
from pathlib import Path

OUT = Path(os.environ["OUT"])

def before_batch(distributed, batch_idx):
    (OUT / f"batch-{distributed.rank}").write_text(f"{distributed.size} {os.getpid()} {batch_idx}")
    if batch_idx == int(os.environ.get("FAIL_AT", -1)) and distributed.rank == 2:
        raise ValueError("this rank fails")
    hold_at = int(os.environ.get("HOLD_AT", 10**9))
    while batch_idx >= hold_at and not (OUT / "go").exists():
        if "CREEPS" in os.environ:
            # Slower and slower, so that it is told to leave before it ends.
            time.sleep(min(3.0, 0.1 * (batch_idx - hold_at + 1)))
            break
        time.sleep(0.02)

with pytorch.init() as context:
    trial = Trial(context)
    pytorch.Trainer(trial, context).fit(
        max_length=pytorch.Batch(int(os.environ.get("LENGTH", "12"))),
        checkpoint_period=pytorch.Batch(4),
        reporting_period=pytorch.Batch(1),
    )
"""


@pytest.fixture
def lease_s() -> int:
    """Return how long a node may be silent, which healthy ones may be on a busy machine."""
    return 60


@pytest.fixture
def master(make_master: Callable[..., Any], lease_s: int) -> Any:
    """Return a master without slots of its own."""
    return make_master(0, "home", "--runner-timeout", str(lease_s)).start()


class Cluster:
    """A master, its nodes, and what a test submits to them."""

    def __init__(
        self, master: Any, make_node: Callable[..., Any], wait_until: Callable[..., None],
        code: Path, shared: Path,
    ) -> None:  # fmt: skip
        self.master = master
        self.client = master.client()
        self.make_node = make_node
        self.wait_until = wait_until
        self.code = code
        self.out = shared
        self.nodes: dict[str, Any] = {}

    def add(self, name: str, num_slots: int) -> Any:
        self.nodes[name] = self.make_node(name, "--slots", str(num_slots)).start()
        self.wait_until(lambda: name in [n.name for n in self.client.nodes() if n.state == "ready"])
        return self.nodes[name]

    def submit(self, slots: Any, *, entrypoint: str = "", out: str = "", **variables: Any) -> Any:
        resources = {"slots_per_trial": slots, **variables.pop("resources", {})}
        where = self.out / out
        where.mkdir(exist_ok=True)
        config = {
            "entrypoint": entrypoint or "python3 -m paceline.launch.torch_distributed train.py",
            "searcher": {"name": "single", "metric": "validation_loss"},
            "hyperparameters": {"global_batch_size": 8},
            "reproducibility": {"experiment_seed": 5},
            "resources": resources,
            "max_restarts": variables.pop("max_restarts", 0),
            "checkpoint_storage": str(self.out / "checkpoints"),
            "environment": {
                "variables": {"OUT": str(where)} | {k: str(v) for k, v in variables.items()}
            },
        }
        return self.client.create_experiment(config, self.code)

    def trial(self, experiment: Any) -> Any:
        [trial] = experiment.trials()
        return trial

    def attempts(self, experiment: Any) -> list[Any]:
        return self.client.get_trial(self.trial(experiment).data.id).data.attempts

    def places(self, experiment: Any) -> list[dict[str, int]]:
        """Return of each attempt the number of slots on each node."""
        return [
            {node.name: len(node.slots) for node in one.nodes} for one in self.attempts(experiment)
        ]

    def losses(self, experiment: Any) -> list[Any]:
        rows = self.trial(experiment).iter_metrics("training")
        return [(row.steps_completed, row.metrics["loss"]) for row in rows]

    def log(self, experiment: Any) -> str:
        return "\n".join(line.text for line in self.trial(experiment).iter_logs())

    def told(self, experiment: Any) -> str:
        logs = "".join(node.log_path.read_text() for node in self.nodes.values())
        return f"{self.log(experiment)}\n{self.attempts(experiment)}\n{logs}"

    def complete(self, experiment: Any) -> None:
        assert experiment.wait().value == "COMPLETED", self.told(experiment)

    def await_batch(self, number: int, out: str = "", num_ranks: int = 1) -> None:
        paths = [self.out / out / f"batch-{rank}" for rank in range(num_ranks)]

        def is_there(path: Path) -> bool:
            words = path.read_text().split() if path.exists() else []
            return len(words) == 3 and int(words[2]) >= number

        self.wait_until(lambda: all(map(is_there, paths)))


@pytest.fixture
def cluster(
    master: Any, make_node: Callable[..., Any], wait_until: Callable[..., None],
    write_context: Callable[..., Path], dropout_trial: str, tmp_path: Path,
) -> Cluster:  # fmt: skip
    shared = tmp_path / "shared"
    shared.mkdir()
    code = write_context(dropout_trial + TRAIN)
    return Cluster(master, make_node, wait_until, code, shared)


# Beside it, kills of several machines are tested quickly, and the bits of each number of ranks.
@pytest.mark.slow
def test_a_trial_on_two_nodes_that_lost_one_goes_on_elsewhere_and_ends_in_the_same_bits(
    cluster: Cluster,
) -> None:
    cluster.add("first", 1)
    second = cluster.add("second", 1)
    straight = cluster.submit(2, out="straight")
    cluster.complete(straight)
    assert cluster.places(straight) == [{"first": 1, "second": 1}]
    assert len(cluster.losses(straight)) == 12
    third = cluster.add("third", 1)
    killed = cluster.submit(2, out="killed", HOLD_AT=6)
    cluster.await_batch(6, "killed")
    cluster.wait_until(cluster.trial(killed).checkpoints)
    used = cluster.places(killed)[0]
    assert len(used) == 2
    victim = next(node for node in (second, third) if node.name in used)
    # As a power cut does: its runner and all that it has started, at once.
    victim.close()
    (cluster.out / "killed" / "go").touch()
    cluster.complete(killed)
    lost, after = cluster.attempts(killed)
    assert lost.exit.reason.value == "runner_lost"
    assert f"({victim.name})" in lost.exit.error
    assert f"({victim.name}) is lost" in cluster.log(killed)
    assert after.resumed_steps == 4
    assert victim.name not in cluster.places(killed)[1]
    assert cluster.trial(killed).data.restarts == 0
    assert cluster.losses(killed) == cluster.losses(straight)


@pytest.mark.long
def test_uneven_nodes_need_the_config_and_the_first_cause_is_named_by_node_and_rank(
    cluster: Cluster,
) -> None:
    cluster.add("large", 2)
    cluster.add("small", 1)
    with pytest.raises(ApiError, match=r"allow different numbers by .*allow_uneven: true"):
        cluster.submit(3)
    with pytest.raises(ApiError, match="must be at most 3, the slots of the nodes of its pool"):
        cluster.submit(4)
    experiment = cluster.submit(3, FAIL_AT=3, resources={"allow_uneven": True})
    assert experiment.wait().value == "ERROR"
    cause = "Node 1 (small): Rank 2 exited with code 1 (ValueError: this rank fails)"
    assert cause in cluster.trial(experiment).data.error, cluster.told(experiment)
    assert cause in cluster.log(experiment)
    assert cluster.places(experiment) == [{"large": 2, "small": 1}]
    assert (cluster.out / "batch-2").read_text().startswith("3 ")
    [attempt] = cluster.attempts(experiment)
    assert (attempt.exit.reason.value, attempt.exit.kind.value) == ("exited", "user")
    assert all(not node.training() for node in cluster.nodes.values())


@pytest.mark.long
def test_a_trial_leaves_a_node_whose_runner_is_stopped_and_goes_on_elsewhere(
    cluster: Cluster,
) -> None:
    for name in ("first", "second", "third"):
        cluster.add(name, 1)
    experiment = cluster.submit(2, HOLD_AT=4, CREEPS=1, LENGTH=40)
    cluster.await_batch(5, num_ranks=2)
    leaving = cluster.nodes["second"]
    leaving.process.send_signal(signal.SIGTERM)
    assert leaving.process.wait(60) == 0, leaving.log_path.read_text()
    (cluster.out / "go").touch()
    cluster.complete(experiment)
    before, after = cluster.attempts(experiment)
    assert before.preempt_reason == "the runner of second is stopped"
    assert before.exit.outcome == "preempted", cluster.told(experiment)
    assert after.resumed_steps >= 5
    assert cluster.places(experiment) == [{"first": 1, "second": 1}, {"first": 1, "third": 1}]


# It is short, as others may be placed on the silent node until it counts as lost.
@pytest.mark.long
@pytest.mark.parametrize("lease_s", [20])
def test_a_trial_whose_nodes_do_not_all_begin_gives_its_slots_back(cluster: Cluster) -> None:
    cluster.add("first", 1)
    second = cluster.add("second", 1)
    second.process.send_signal(signal.SIGSTOP)
    large = cluster.submit(2, out="large", resources={"start_timeout": 8.0})
    cluster.wait_until(lambda: cluster.places(large)[:1] == [{"first": 1, "second": 1}])
    small = cluster.submit(1, out="small")
    cluster.complete(small)
    second.process.send_signal(signal.SIGCONT)
    attempts = cluster.attempts(large)
    assert {one.exit.reason.value for one in attempts if one.exit} == {"not_formed"}
    assert "second did not begin within 8 s" in cluster.log(large)
    cluster.complete(large)
    assert cluster.trial(large).data.restarts == 0


@pytest.mark.long
def test_a_kill_reaches_all_nodes(cluster: Cluster) -> None:
    cluster.add("first", 1)
    cluster.add("second", 1)
    experiment = cluster.submit(2, HOLD_AT=2)
    cluster.await_batch(2, num_ranks=2)
    experiment.kill()
    assert experiment.wait().value == "CANCELED"
    for node in cluster.nodes.values():
        cluster.wait_until(lambda node=node: not node.training())
    [attempt] = cluster.attempts(experiment)
    assert attempt.exit.reason.value == "killed"


# tests/master/scheduling has quick ones of how many slots it takes.
@pytest.mark.slow
def test_an_elastic_trial_takes_what_is_free_at_each_start(cluster: Cluster) -> None:
    cluster.add("first", 1)
    experiment = cluster.submit({"min": 1, "max": 2}, HOLD_AT=4, CREEPS=1, LENGTH=40)
    cluster.await_batch(5)
    cluster.add("second", 1)
    experiment.pause()
    cluster.wait_until(lambda: cluster.attempts(experiment)[0].exit)
    (cluster.out / "go").touch()
    experiment.activate()
    cluster.complete(experiment)
    assert cluster.places(experiment) == [{"first": 1}, {"first": 1, "second": 1}]
    before, after = cluster.attempts(experiment)
    assert (before.exit.outcome, after.resumed_steps >= 5) == ("preempted", True)
    assert [step for step, _ in cluster.losses(experiment)] == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize("lease_s", [10])
def test_an_elastic_trial_shrinks_when_a_node_is_lost_and_grows_once_it_is_back(
    cluster: Cluster,
) -> None:
    """It grows at its next start, here after a pause, as it does not grow while it runs."""
    for name in ("first", "second", "third"):
        cluster.add(name, 1)
    experiment = cluster.submit({"min": 2, "max": 8}, HOLD_AT=5, CREEPS=1, LENGTH=40)
    cluster.await_batch(5, num_ranks=3)
    cluster.nodes["third"].close()
    all_three = {"first": 1, "second": 1, "third": 1}
    two = {"first": 1, "second": 1}
    cluster.wait_until(lambda: len(cluster.attempts(experiment)) == 2)
    assert cluster.places(experiment) == [all_three, two], cluster.told(experiment)
    resumed = cluster.attempts(experiment)[1].resumed_steps
    assert resumed >= 4
    assert resumed % 4 == 0
    cluster.nodes["third"].start()
    cluster.wait_until(lambda: [n.state for n in cluster.client.nodes()] == ["ready"] * 3)
    cluster.wait_until(lambda: max(step for step, _ in cluster.losses(experiment)) > resumed + 1)
    assert len(cluster.attempts(experiment)) == 2
    experiment.pause()
    cluster.wait_until(lambda: cluster.attempts(experiment)[1].exit)
    (cluster.out / "go").touch()
    experiment.activate()
    cluster.complete(experiment)
    assert cluster.places(experiment) == [all_three, two, all_three]
    lost, paused, last = cluster.attempts(experiment)
    assert (lost.exit.kind.value, paused.exit.outcome) == ("transient", "preempted")
    assert last.resumed_steps > resumed
    assert cluster.trial(experiment).data.restarts == 0
    assert [step for step, _ in cluster.losses(experiment)] == list(range(1, 41))
