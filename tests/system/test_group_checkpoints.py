"""Checkpoints of trials on several nodes, each with a disk of its own: all parts reach the master.

Each node finds an empty disk where the master has its checkpoints, and where other nodes have their
files. Ranks 0 and 1 are on one node, rank 2 is on another. Needs root.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_lab.nodes import NodeProcess, can_mount

from paceline.storage import DirectoryStorage

# Draws random numbers whose state is in the checkpoint, so that one that is lost or doubled shows.
SCRIPT = """
import json, os, random, time
from pathlib import Path
import paceline as det

info = det.get_cluster_info()
with det.core.init() as context:
    distributed, checkpoint = context.distributed, context.checkpoint
    rank = distributed.rank
    print("rank", rank, "runs on", info.agent_id)
    draw, weight, begin = random.Random(rank), 0.0, 0
    if info.latest_checkpoint is not None:
        with checkpoint.restore_path(info.latest_checkpoint) as path:
            assert {f"state {n}" for n in range(3)} <= {one.name for one in path.iterdir()}
            begin, weight, known = json.loads((path / f"state {rank}").read_text())
        draw.setstate((known[0], tuple(known[1]), known[2]))
    for step in range(begin + 1, 7):
        weight += draw.random()
        total = sum(distributed.allgather(weight))
        if rank == 0:
            context.train.report_validation_metrics(step, {"loss": total})
        with checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
            (path / f"state {rank}").write_text(json.dumps([step, weight, draw.getstate()]))
            (path / f"empty {rank}").touch()
            (path / f"large {rank}").write_bytes(bytes(int(os.environ["LARGE"]) * (step == 1)))
            (path / "same").write_text(str(rank // 2) if "DIFFERS" in os.environ else "same")
        while step == 3 and not begin and not Path(os.environ["GATE"]).exists():
            time.sleep(0.02)
"""

pytestmark = pytest.mark.skipif(
    not can_mount(), reason="NOT TESTED: a node with a disk of its own needs the right to mount"
)


@pytest.fixture
def lease_s() -> int:
    """Return how long a node may be silent, which healthy ones may be on a busy machine."""
    return 60


@pytest.fixture
def master(make_master: Callable[..., Any], lease_s: int, free_port: int) -> Any:
    """Return a master without slots of its own, which comes back at the same address."""
    return make_master(0, "home", "--runner-timeout", str(lease_s), "--port", str(free_port))


class Cluster:
    """A master and nodes that see nobody else's files."""

    def __init__(
        self, master: Any, root: Path, code: Path, wait_until: Callable[..., None]
    ) -> None:
        self.master = master
        self.root = root
        self.code = code
        self.wait_until = wait_until
        self.nodes: dict[str, NodeProcess] = {}
        self.storage = DirectoryStorage(master.home / "checkpoints")

    def add(self, *names: str, sees_storage: bool = False, **variables: str) -> list[NodeProcess]:
        token = self.root / "token"
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text(self.master.client().create_token("nodes", scope="runner").secret)
        for name in names:
            (self.root / name).mkdir()
        for name in names:
            hidden = [
                one for one in (self.root / "first", self.root / "second") if one.name != name
            ]
            hidden = [one for one in hidden if one.is_dir()]
            if not sees_storage:
                hidden.append(self.storage.root)
            slots = "1" if name in ("second", "fourth") else "2"
            node = NodeProcess(
                self.master, token, self.root / name, "--slots", slots, hidden=hidden
            )
            self.nodes[name] = node.start(**variables)
        client = self.master.client()
        self.wait_until(
            lambda: set(names) <= {node.name for node in client.nodes() if node.state == "ready"}
        )
        return [self.nodes[name] for name in names]

    def submit(
        self, large: int = 10, changed: dict[str, Any] | None = None, **variables: str
    ) -> Any:
        config: dict[str, Any] = {
            "entrypoint": "python3 -m paceline.launch.torch_distributed train.py",
            "max_restarts": 0,
            "resources": {"slots_per_trial": 3, "allow_uneven": True},
            "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 6}},
            "environment": {"variables": {"LARGE": str(large), **variables}},
            "checkpoint_storage": {"save_trial_latest": 2, "save_trial_best": 0},
        }
        return self.master.client().create_experiment(config | (changed or {}), self.code)

    def complete(self, experiment: Any) -> None:
        """Wait until a trial has ended, with what one without faults reports and keeps."""
        [trial] = self.master.client().get_experiment(experiment.id).trials()
        assert self.master.client().get_experiment(experiment.id).wait().value == "COMPLETED", (
            self.told(trial)
        )
        rows = trial.iter_metrics("validation")
        assert [(row.steps_completed, row.metrics["loss"]) for row in rows] == expected()

        def is_clean() -> bool:
            stored = {one.uuid for one in trial.checkpoints() if one.state.value == "COMPLETED"}
            return len(stored) == 2 and sorted(stored) == self.storage.list()

        self.wait_until(is_clean)
        for uuid in self.storage.list():
            names = [f"{kind} {rank}" for kind in ("empty", "large", "state") for rank in range(3)]
            assert sorted(self.storage.verify(uuid).files) == sorted([*names, "same"])
            assert all(
                (self.storage.root / uuid / f"rank-{rank}.done").exists() for rank in range(3)
            )
        # The database hears first of the end of the attempt.
        self.wait_until(lambda: not (self.storage.root / ".incoming").exists())

    def attempts(self, experiment: Any) -> list[Any]:
        client = self.master.client()
        [trial] = client.get_experiment(experiment.id).trials()
        return list(client.get_trial(trial.id).data.attempts)

    def told(self, trial: Any) -> str:
        """Return what is known of a trial that went wrong."""
        ends = [attempt.exit for attempt in self.master.client().get_trial(trial.id).data.attempts]
        logs = [node.log_path.read_text() for node in self.nodes.values()]
        said = [line.text for line in trial.iter_logs()]
        return "\n".join([*map(str, ends), *said, *logs, self.master.log()])


@pytest.fixture
def cluster(
    master: Any, write_context: Callable[..., Path], wait_until: Callable[..., None], tmp_path: Path
) -> Iterator[Cluster]:
    (master.home / "checkpoints").mkdir(parents=True, exist_ok=True)
    cluster = Cluster(master, tmp_path, write_context(SCRIPT), wait_until)
    yield cluster
    for node in cluster.nodes.values():
        node.close()


def expected() -> list[tuple[int, float]]:
    draws, weights, found = [random.Random(rank) for rank in range(3)], [0.0] * 3, []
    for step in range(1, 7):
        weights = [weight + draw.random() for weight, draw in zip(weights, draws, strict=True)]
        found.append((step, sum(weights)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lease_s", [10])
def test_a_trial_goes_on_on_other_nodes_when_its_own_are_gone(cluster: Cluster) -> None:
    cluster.master.start()
    nodes = cluster.add("first", "second")
    experiment = cluster.submit()
    cluster.wait_until(lambda: [len(t.checkpoints()) for t in experiment.trials()] == [3])
    # The parts of the other node are not kept there once the master has them.
    parts = (nodes[1].directory / "attempts").glob
    cluster.wait_until(lambda: not [*parts("*/run/checkpoints/*-*")])
    for node in nodes:
        node.close()
        shutil.rmtree(node.directory)
        (cluster.root / node.name).mkdir()
    cluster.add("third", "fourth")[0].gate.touch()
    cluster.complete(experiment)
    assert [one.resumed_steps for one in cluster.attempts(experiment)] == [0, 3]
    last = [{node.name for node in one.nodes} for one in cluster.attempts(experiment)][-1]
    assert last == {"third", "fourth"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param("first", "runner.checkpoint.piece_sent:2", marks=pytest.mark.slow),
        ("second", "runner.checkpoint.piece_sent:2"),
        pytest.param("second", "runner.shard.arrived", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_dies_while_it_sends_leaves_no_half_checkpoint(
    name: str, fault: str, cluster: Cluster
) -> None:
    cluster.master.start()
    other = "second" if name == "first" else "first"
    cluster.add(other)
    [node] = cluster.add(name, PACELINE_FAULT=fault)
    experiment = cluster.submit(9 * 2**20)
    cluster.wait_until(lambda: cluster.attempts(experiment))
    runner = node.runner(1)
    cluster.wait_until(lambda: not runner.is_running() or runner.status() == "zombie")
    node.close()
    cluster.wait_until(lambda: cluster.attempts(experiment)[0].exit)
    assert all(cluster.storage.verify(uuid) for uuid in cluster.storage.list())
    cluster.add("third" if name == "first" else "fourth")[0].gate.touch()
    cluster.complete(experiment)
    assert len(cluster.attempts(experiment)) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("storage.piece_written:4", marks=pytest.mark.slow),
        "storage.before_moved_in",
        pytest.param("master.checkpoint.moved_in", marks=pytest.mark.slow),
    ],
)
def test_a_master_that_was_killed_while_parts_arrive_goes_on_with_them(
    fault: str, cluster: Cluster
) -> None:
    cluster.master.start(fault)
    [first, _] = cluster.add("first", "second")
    experiment = cluster.submit(9 * 2**20)
    cluster.wait_until(lambda: not cluster.master.is_alive)
    first.gate.touch()
    cluster.master.start()
    cluster.complete(experiment)
    assert len(cluster.attempts(experiment)) == 1


@pytest.mark.long
def test_another_file_of_the_same_name_on_another_node_is_refused_by_name(cluster: Cluster) -> None:
    cluster.master.start()
    cluster.add("first", "second")
    experiment = cluster.submit(DIFFERS="1")
    [trial] = experiment.trials()
    assert experiment.wait().value == "ERROR", cluster.told(trial)
    assert "rank 2 holds another 'same'" in cluster.told(trial)
    assert cluster.storage.list() == []


@pytest.mark.slow
def test_nodes_of_which_one_shares_the_directory_send_all_the_same(cluster: Cluster) -> None:
    cluster.master.start()
    cluster.add("first", sees_storage=True)
    cluster.add("second")[0].gate.touch()
    experiment = cluster.submit()
    cluster.complete(experiment)


# Report and store step by step, and wait at step 3 of the first attempt until the file is there.
HOLD = """
import os, time
from pathlib import Path
import paceline as det

IS_FIRST = det.get_cluster_info().latest_checkpoint is None

def hold(step):
    while step == 3 and IS_FIRST and not Path(os.environ["GATE"]).exists():
        time.sleep(0.02)
"""

TRAIN = """
import torch
from paceline import train

def loop():
    model = train.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin = 1
    if (state := train.load_checkpoint()) is not None:
        model.load_state_dict(state["model"])
        begin = state["step"] + 1
    for step in range(begin, 7):
        loss = model(torch.ones(3, 4)).square().mean()
        optimizer.zero_grad()
        train.backward(loss)
        optimizer.step()
        train.report(step=step, loss=loss.item())
        train.save_checkpoint(model=model, step=step)
        hold(step)
    return train.world_rank()

with train.Trainer(num_workers=3) as trainer:
    assert list(trainer.run(loop)) == [0, 1, 2]
"""

DECLARATIVE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from paceline.declarative import ParallelizationConfig, Trainer, TrainingConfig

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x):
        return self.body(x)

trainer = None
x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
trainer = Trainer(TrainingConfig(
    model_class=Net,
    dataset=TensorDataset(x, x[:, :2].clone()),
    validation_ratio=0.2,
    pred_names_and_types=[("y", "regr")],
    loss_function=[nn.MSELoss()],
    task_type="regression",
    batch_size_per_process=4,
    learning_rate_per_process=0.01,
    optimizer=torch.optim.SGD,
    num_epochs=6,
    model_save_dir=str(Path.cwd() / "out"),
    parallelization_params=ParallelizationConfig(parallelization_type="multi_node"),
    post_training_epoch_hook=lambda: hold(trainer.current_epoch + 1),
))
trainer.build()
trainer.run_training()
"""

METRICS = {"train": "loss", "declarative": "val_loss"}


@pytest.mark.slow
@pytest.mark.parametrize("door", METRICS)
def test_each_front_door_goes_on_from_a_checkpoint_of_several_nodes(
    door: str, cluster: Cluster, write_context: Callable[..., Path]
) -> None:
    code = {"train": TRAIN, "declarative": DECLARATIVE}[door]
    cluster.code = write_context(HOLD + code, door)
    cluster.master.start()
    nodes = cluster.add("first", "second")
    changed = {
        "max_restarts": 1,
        "searcher": {"name": "single", "metric": METRICS[door]},
    }
    experiment = cluster.submit(changed=changed)
    [trial] = experiment.trials()

    def has_stored() -> bool:
        assert not any(one.exit for one in cluster.attempts(experiment)), cluster.told(trial)
        return len(trial.checkpoints()) >= 2

    cluster.wait_until(has_stored, 120)
    for process in nodes[1].training():
        # Those that the launcher ends for it may be gone.
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert experiment.wait().value == "COMPLETED", cluster.told(trial)
    first, second = cluster.attempts(experiment)
    assert first.resumed_steps == 0
    assert second.resumed_steps >= 1
    assert cluster.storage.list()
    assert all(cluster.storage.verify(uuid) for uuid in cluster.storage.list())
    for rank in (0, 2) if door == "train" else (0,):
        group = "training" if rank == 0 else f"training_rank_{rank}"
        steps = [row.steps_completed for row in trial.iter_metrics(group)]
        assert len(steps) == len(set(steps)) >= 6
