"""Trials on several nodes: real node runners on this machine, each with a directory of its own."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

TRAIN = """
import os, time
from pathlib import Path

OUT = Path(os.environ["OUT"])

def before_batch(distributed, batch_idx):
    (OUT / f"batch-{distributed.rank}").write_text(f"{distributed.size} {os.getpid()} {batch_idx}")
    if batch_idx == int(os.environ.get("FAIL_AT", -1)) and distributed.rank == 2:
        raise ValueError("this rank fails")
    while batch_idx >= int(os.environ.get("HOLD_AT", 10**9)) and not (OUT / "go").exists():
        time.sleep(0.02)
        if os.environ.get("HOLD_BY_PAUSES"):
            break

with pytorch.init() as context:
    trial = Trial(context)
    pytorch.Trainer(trial, context).fit(
        max_length=pytorch.Batch(int(os.environ.get("LENGTH", "12"))),
        checkpoint_period=pytorch.Batch(4),
        reporting_period=pytorch.Batch(1),
    )
"""


@pytest.fixture
def master(make_master: Callable[..., Any]) -> Any:
    """Return a master without slots of its own, whose leases are short."""
    return make_master(0, "home", "--runner-timeout", "6").start()


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


def kill_node(node: Any) -> None:
    """End a node as a power cut does: its runner and all that it has started, at once."""
    processes = everything_on(node)
    # None of them may see another one end.
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            process.send_signal(signum)
    node.process.wait()


def everything_on(node: Any) -> list[psutil.Process]:
    own = psutil.Process(node.process.pid)
    found = [own, *own.children(recursive=True)]
    for path in (node.directory / "attempts").iterdir():
        runner = node.runner(int(path.name))
        found += [runner, *runner.children(recursive=True)]
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("PACELINE_RUN_DIR", "")]
        except psutil.Error:
            continue
        if any(word.startswith(str(node.directory)) for word in words):
            found.append(process)
    return found


def test_a_trial_runs_on_two_nodes(cluster: Cluster) -> None:
    cluster.add("first", 2)
    cluster.add("second", 2)
    experiment = cluster.submit(4)
    cluster.complete(experiment)
    assert cluster.places(experiment) == [{"first": 2, "second": 2}]
    assert len(cluster.losses(experiment)) == 12


def test_a_trial_that_lost_a_node_goes_on_elsewhere_and_ends_in_the_same_bits(
    cluster: Cluster,
) -> None:
    cluster.add("first", 2)
    second = cluster.add("second", 2)
    straight = cluster.submit(4, out="straight")
    cluster.complete(straight)
    third = cluster.add("third", 2)
    killed = cluster.submit(4, out="killed", HOLD_AT=6)
    cluster.await_batch(6, "killed")
    used = cluster.places(killed)[0]
    assert len(used) == 2
    victim = next(node for node in (second, third) if node.name in used)
    kill_node(victim)
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
