"""Train functions on a Ray cluster of real nodes, which all run on this machine."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

from paceline import train

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_STEPS = 6


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to Ray, which starts some at its first use."""


@pytest.fixture(autouse=True)
def no_leaked_signal_handlers() -> None:
    """Leave SIGTERM to Ray's nodes, which set it in this process."""


def fit(config: dict[str, Any]) -> Any:
    """Train on numbers that differ by rank and step; rank 1 may kill itself once."""
    torch.manual_seed(0)
    model = train.prepare_model(torch.nn.Linear(3, 1))
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = train.load_checkpoint()
    first = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in count(first):
        if step >= NUM_STEPS and train.world_size() >= config.get("least", 0):
            break
        if config.get("is_hit") and state is None and step == NUM_STEPS - 1:
            # It shall not be over before the loss is noticed.
            time.sleep(60)
        optimizer.zero_grad()
        value = torch.full((2, 3), (train.world_rank() + 1) * (step + 1) / 7)
        loss = model(value).square().mean()
        train.backward(loss)
        optimizer.step()
        train.report(loss=loss.item(), step=step)
        train.save_checkpoint(model=model, optimizer=optimizer, step=step + 1)
        if step == 3 and config.get("dies") and state is None and train.world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return model.weight.tolist(), train.node_rank(), train.world_size()


@pytest.mark.long
def test_a_trainer_takes_the_connected_cluster_and_survives_a_lost_worker(
    ray_cluster: Any,
) -> None:
    with train.Trainer(num_workers=2, resources_per_worker={"memory_bank": 1}) as trainer:
        undisturbed = trainer.run(fit, {})
        table = str(trainer)
        results = trainer.run(fit, {"dies": True})
    assert (undisturbed.num_restarts, results.num_restarts) == (0, 1)
    assert list(results) == list(undisturbed)
    assert [report["step"] for report in undisturbed.metrics] == list(range(NUM_STEPS))
    assert "2 worker(s), running on 1 node(s)" in table
    assert "GPUs  memory_bank\n" in table
    with pytest.raises(train.ResourcesError, match=r"9 worker\(s\) .* need 9 CPU, but the 2 node"):
        train.Trainer(num_workers=9).run(fit, {})


@pytest.mark.long
def test_a_group_waits_for_resources_as_long_as_it_may(ray_cluster: Any) -> None:
    from ray.util import placement_group, remove_placement_group

    others = placement_group([{"memory_bank": 2}])
    assert others.wait(60)
    elastic = train.ElasticConfig(max_wait_s=0.5)
    with train.Trainer(1, resources_per_worker={"memory_bank": 1}, elastic=elastic) as trainer:
        with pytest.raises(
            train.NotEnoughWorkersError, match=r"must find their resources within 0\.5 s, but"
        ):
            trainer.start()
        remove_placement_group(others)
        assert trainer.execute(train.world_size) == [1]


def await_end(pid: int) -> None:
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.05)


def raylet_of(pid: int) -> int:
    parents = psutil.Process(pid).parents()
    return next(process.pid for process in parents if process.name() == "raylet")


class Killer(train.TrainingCallback):
    """Kills the node of rank 1 after a report, and may add another one."""

    def __init__(self, cluster: Any, pids: list[int], adds: bool) -> None:
        raylet = raylet_of(pids[1])
        (self._node,) = [
            node
            for node in cluster.worker_nodes
            if node.all_processes["raylet"][0].process.pid == raylet
        ]
        self._cluster = cluster
        self._adds = adds
        self.sizes: list[int] = []
        self.num_kills = 0

    def handle_result(self, report: train.Report) -> None:
        if report["step"] == 2 and not self.num_kills:
            self.num_kills += 1
            self._cluster.remove_node(self._node, allow_graceful=False)

    def handle_resize(self, num_workers: int, generation: int) -> None:
        self.sizes.append(num_workers)
        if self._adds and num_workers == 2:
            self._cluster.add_node(num_cpus=1, resources={"seat": 1})


@pytest.fixture
def seats(ray_cluster: Any) -> Iterator[Callable[..., None]]:
    """Return a function that adds nodes which have a seat for one worker each, or for more."""
    before = set(ray_cluster.worker_nodes)

    def add(num_nodes: int, num_seats: int = 1) -> None:
        for _ in range(num_nodes):
            ray_cluster.add_node(num_cpus=num_seats, resources={"seat": num_seats})

    yield add
    for node in ray_cluster.worker_nodes - before:
        # Ray would tell of its seat for some seconds more if it were killed.
        ray_cluster.remove_node(node, allow_graceful=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_is_killed_changes_no_bit_of_the_result(
    ray_cluster: Any, seats: Callable[[int], None]
) -> None:
    seats(4)
    with train.Trainer(num_workers=3, resources_per_worker={"seat": 1}) as trainer:
        undisturbed = trainer.run(fit, {})
        killer = Killer(ray_cluster, trainer.execute(os.getpid), adds=False)
        results = trainer.run(fit, {"is_hit": True}, callbacks=[killer])
    assert killer.num_kills == 1
    assert results.num_restarts >= 1
    assert [node for _, node, _ in undisturbed] == [0, 1, 2]
    assert list(results) == list(undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_loses_a_node_and_takes_on_another_one(
    ray_cluster: Any, seats: Callable[[int], None]
) -> None:
    seats(3)
    with train.Trainer(num_workers=(2, 3), resources_per_worker={"seat": 1}) as trainer:
        trainer.start()
        killer = Killer(ray_cluster, trainer.execute(os.getpid), adds=True)
        results = trainer.run(fit, {"is_hit": True, "least": 3}, callbacks=[killer])
    assert killer.sizes == [2, 3]
    assert [size for _, _, size in results] == [3, 3, 3]
    assert [report["step"] for report in results.metrics] == list(range(len(results.metrics)))


def keep_going(config: dict[str, Any]) -> int:
    """Store a checkpoint in each step, until so many were made, and some by so many workers."""
    state = train.load_checkpoint() or {"step": 0, "by": 0}
    step, by = state["step"], state["by"]
    while step < config["steps"] or by < config["by"]:
        time.sleep(0.05)
        step += 1
        by += train.world_size() >= config["size"]
        train.report(step=step, pid=os.getpid())
        train.save_checkpoint(step=step, by=by)
    return train.world_size()


class Change(train.TrainingCallback):
    """Does something once, after the third report, and notes each number of workers."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._change = change
        self.sizes: list[int] = []

    def handle_result(self, report: train.Report) -> None:
        if report["step"] == 3:
            self._change()

    def handle_resize(self, num_workers: int, generation: int) -> None:
        self.sizes.append(num_workers)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_group_grows_once_when_a_node_joins(
    ray_cluster: Any, seats: Callable[[int], None]
) -> None:
    seats(1)
    change = Change(lambda: seats(1))
    with train.Trainer(
        num_workers=(1, 4), max_retries=0, resources_per_worker={"seat": 1}
    ) as trainer:
        results = trainer.run(keep_going, {"steps": 30, "size": 2, "by": 30}, callbacks=[change])
    assert change.sizes == [2]
    # Whoever tries to grow in vain has the first rank started again.
    assert len({report["pid"] for report in results.metrics}) == 2
    assert list(results) == [2, 2]


def follow_samples(config: dict[str, Any]) -> int:
    """Report the samples of each step, at least for so many, until so few workers are left."""
    train.enable_reproducibility(0)
    model = train.prepare_model(torch.nn.Linear(1, 1))
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    data = [(torch.tensor([n / 24]), n) for n in range(24)]
    loader = train.prepare_data_loader(
        torch.utils.data.DataLoader(data, 1, shuffle=True)  # type: ignore[arg-type]
    )
    step = 0
    state = train.load_checkpoint()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        for x, numbers in loader:
            optimizer.zero_grad()
            train.backward(model(x).square().mean())
            optimizer.step()
            step += 1
            weight = model.weight.item()
            train.report(step=step, samples=numbers.tolist(), weight=weight, pid=os.getpid())
            if not config.get("asks"):
                train.save_checkpoint(model=model, optimizer=optimizer, step=step)
            elif train.should_preempt():
                train.save_checkpoint(model=model, optimizer=optimizer, step=step)
                return train.world_size()
            is_long = step >= config["steps"] and (state is not None or not config.get("moves"))
            if train.world_size() <= config["most"] and is_long:
                return train.world_size()
            time.sleep(config["pause_s"])


class Kills(train.TrainingCallback):
    """Kills one rank after the other at steps, and counts what the chief has trained."""

    def __init__(self, steps: list[int]) -> None:
        self._steps = steps
        self._pids: dict[int, int] = {}
        self.num_trained = 0
        self.killed: list[int] = []

    def handle_result(self, report: train.Report) -> None:
        self._pids[report.rank] = report["pid"]
        if report.rank == 0:
            self.num_trained += 1
        if self._steps and report["step"] >= self._steps[0] and len(self._pids) == 4:
            rank = 3 - len(self.killed)
            os.kill(self._pids[rank], signal.SIGKILL)
            self.killed.append(rank)
            self._steps = self._steps[1:]
            self._pids = {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_whose_workers_are_killed_again_and_again_trains_little_twice(
    ray_cluster: Any, seats: Callable[..., None]
) -> None:
    seats(1, 4)
    kills = Kills([60, 120, 180, 240])
    with train.Trainer(num_workers=4, max_retries=4, resources_per_worker={"seat": 1}) as trainer:
        config = {"steps": 300, "most": 4, "pause_s": 0.1}
        results = trainer.run(follow_samples, config, callbacks=[kills])
    assert (kills.killed, results.num_restarts, list(results)) == ([3, 2, 1, 0], 4, [4, 4, 4, 4])
    assert kills.num_trained <= 300 / 0.85


def by_step(reports: list[train.Report]) -> dict[int, tuple[list[int], float]]:
    """Return the samples of all ranks, and the weight, of each step of the last generation."""
    last: dict[int, int] = {}
    found: dict[int, tuple[list[int], float]] = {}
    for report in reports:
        step, generation = report["step"], report.generation
        if generation > last.get(step, -1):
            last[step], found[step] = generation, ([], report["weight"])
        if generation == last[step]:
            found[step][0].extend(report["samples"])
    return {step: (sorted(samples), weight) for step, (samples, weight) in found.items()}


class AllReports(train.TrainingCallback):
    """Keeps the reports of all ranks; does something once."""

    def __init__(self, change: Callable[[], object] = lambda: None) -> None:
        self.reports: list[train.Report] = []
        self.sizes: list[int] = []
        self._change = change

    def handle_result(self, report: train.Report) -> None:
        self.reports.append(report)
        if len(self.reports) == 6:
            self._change()

    def handle_resize(self, num_workers: int, generation: int) -> None:
        self.sizes.append(num_workers)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_group_leaves_a_node_that_is_drained_before_it_is_lost(
    ray_cluster: Any, seats: Callable[[int], None], drain_node: Callable[[str], None]
) -> None:
    seats(2)
    nodes = {n.all_processes["raylet"][0].process.pid: n.node_id for n in ray_cluster.worker_nodes}
    with train.Trainer(
        num_workers=(1, 2), max_retries=0, resources_per_worker={"seat": 1}
    ) as trainer:
        trainer.start()
        staying, leaving = trainer.execute(os.getpid)
        drained = nodes[raylet_of(leaving)]
        kept = raylet_of(staying)
        record = AllReports(lambda: drain_node(drained))
        config = {"steps": 60, "most": 1, "pause_s": 0.05}
        results = trainer.run(follow_samples, config, callbacks=[record])
        # Nobody has killed the node: its worker was ended for the notice alone.
        await_end(leaving)
        (left,) = trainer.execute(os.getpid)
        assert raylet_of(left) == kept
    assert (record.sizes, list(results), results.num_restarts) == ([1], [1], 0)
    found = by_step(record.reports)
    assert list(found) == list(range(1, len(found) + 1))
    assert len(found) >= 60
    # The notice may take long to come, and the training waits for it.
    fixed = AllReports()
    config = {"steps": len(found), "most": 2, "pause_s": 0}
    with train.Trainer(num_workers=2, cluster="local") as trainer:
        trainer.run(follow_samples, config, callbacks=[fixed])
    assert found == by_step(fixed.reports)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("rank", "asks"), [(0, True), (2, False), (2, True), (0, False)])
def test_a_fixed_group_moves_from_a_node_that_is_drained(
    ray_cluster: Any,
    seats: Callable[[int], None],
    drain_node: Callable[[str], None],
    rank: int,
    asks: bool,
) -> None:
    seats(4)
    nodes = {n.all_processes["raylet"][0].process.pid: n.node_id for n in ray_cluster.worker_nodes}
    # It goes on until it has moved, and has no other checkpoint than that for the move if it asks.
    with train.Trainer(3, max_retries=0, resources_per_worker={"seat": 1}) as trainer:
        leaving = trainer.execute(os.getpid)[rank]
        drained = nodes[raylet_of(leaving)]
        record = AllReports(lambda: drain_node(drained))
        config = {"steps": 60, "most": 3, "pause_s": 0.05, "asks": asks, "moves": True}
        results = trainer.run(follow_samples, config, callbacks=[record])
        await_end(leaving)
        assert drained not in {nodes[raylet_of(pid)] for pid in trainer.execute(os.getpid)}
    assert (record.sizes, list(results), results.num_restarts) == ([], [3, 3, 3], 0)
    found = by_step(record.reports)
    assert list(found) == list(range(1, len(found) + 1))
    assert {report.generation for report in record.reports} == {0, 1}
    if asks:
        # Nothing was done twice.
        assert len(record.reports) == 3 * len(found)
    fixed = AllReports()
    config = {"steps": len(found), "most": 3, "pause_s": 0}
    with train.Trainer(num_workers=3, cluster="local") as trainer:
        trainer.run(follow_samples, config, callbacks=[fixed])
    assert found == by_step(fixed.reports)


def go_on_until_lost(config: dict[str, Any]) -> int:
    """Report without any checkpoint until workers were lost."""
    deadline = time.monotonic() + 120
    while not Path(config["lost"]).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
        train.report(world_size=train.world_size())
    return train.world_size()


class Loss(AllReports):
    """Notes that workers were lost."""

    def __init__(self, change: Callable[[], object], path: Path) -> None:
        super().__init__(change)
        self._path = path
        self.generations: list[int] = []

    def handle_restart(self, error: Exception, generation: int) -> None:
        self.generations.append(generation)
        self._path.touch()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_workers", "rank", "num_left"), [(3, 0, 3), (3, 2, 3), ((1, 3), 0, 2), ((1, 3), 2, 2)]
)
def test_a_node_that_ends_before_the_next_checkpoint_is_a_loss(
    ray_cluster: Any,
    seats: Callable[[int], None],
    drain_node: Callable[..., None],
    tmp_path: Path,
    num_workers: Any,
    rank: int,
    num_left: int,
) -> None:
    # A fixed group has room elsewhere.
    seats(1 + num_left)
    with train.Trainer(num_workers, resources_per_worker={"seat": 1}) as trainer:
        raylet = raylet_of(trainer.execute(os.getpid)[rank])
        [node] = [
            node
            for node in ray_cluster.worker_nodes
            if node.all_processes["raylet"][0].process.pid == raylet
        ]

        def take_away() -> None:
            drain_node(node.node_id, 5)
            # Others were reserved meanwhile, as far as there is room.
            time.sleep(5)
            ray_cluster.remove_node(node, allow_graceful=False)

        thread = threading.Thread(target=take_away)
        loss = Loss(thread.start, tmp_path / "lost")
        results = trainer.run(go_on_until_lost, {"lost": str(tmp_path / "lost")}, callbacks=[loss])
        thread.join()
    assert loss.generations == [1]
    assert results.num_restarts == 1
    assert list(results) == [num_left] * num_left
    assert results.checkpoints == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 2])
def test_workers_end_with_the_raylet_of_their_node(
    ray_cluster: Any, seats: Callable[[int], None], rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    seats(4)
    with train.Trainer(3, resources_per_worker={"seat": 1}) as trainer:
        pids = trainer.execute(os.getpid)
        raylet = raylet_of(pids[rank])
        # Nobody waits for its end, so that Ray's own processes take it for alive.
        record = AllReports(lambda: os.kill(raylet, signal.SIGKILL))
        config = {"steps": 20, "most": 3, "pause_s": 0.05, "moves": True}
        results = trainer.run(follow_samples, config, callbacks=[record])
        await_end(pids[rank])
        others = trainer.execute(os.getpid)
        assert raylet not in map(raylet_of, others)
    assert results.num_restarts >= 1
    assert f"Rank {rank} was lost with its node 127.0.0.1 or its Ray actor" in caplog.text
    assert not set(pids) & set(others)
    assert list(results) == [3, 3, 3]
    found = by_step(record.reports)
    assert list(found) == list(range(1, len(found) + 1))
    fixed = AllReports()
    config = {"steps": len(found), "most": 3, "pause_s": 0}
    with train.Trainer(num_workers=3, cluster="local") as trainer:
        trainer.run(follow_samples, config, callbacks=[fixed])
    assert found == by_step(fixed.reports)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_workers", "lost"), [(3, [0, 1]), (4, [2, 3])])
def test_a_node_that_is_lost_with_two_workers_is_one_loss(
    ray_cluster: Any,
    seats: Callable[..., None],
    num_workers: int,
    lost: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The node with the most workers comes first.
    seats(1, 2)
    seats(1, num_workers - 2)
    with train.Trainer(
        (1, num_workers), max_retries=1, resources_per_worker={"seat": 1}
    ) as trainer:
        raylets = [raylet_of(pid) for pid in trainer.execute(os.getpid)]
        assert [raylets.index(raylet) for raylet in raylets][lost[0]] == lost[0]
        record = AllReports(lambda: os.kill(raylets[lost[0]], signal.SIGKILL))
        config = {"steps": 20, "most": num_workers - 2, "pause_s": 0.05, "moves": True}
        results = trainer.run(follow_samples, config, callbacks=[record])
    assert results.num_restarts == 1
    assert list(results) == [num_workers - 2] * (num_workers - 2)
    told = f"was lost with its node 127.0.0.1 (ranks {', '.join(map(str, lost))})"
    assert told in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_seats_that_are_only_told_of_end_no_worker(
    ray_cluster: Any, seats: Callable[[int], None]
) -> None:
    seats(1)

    def add_and_lose_one() -> None:
        node = ray_cluster.add_node(num_cpus=1, resources={"seat": 1})
        # Ray goes on telling of its free resources for some seconds.
        ray_cluster.remove_node(node, allow_graceful=False)

    change = Change(add_and_lose_one)
    with train.Trainer(
        num_workers=(1, 4), max_retries=0, resources_per_worker={"seat": 1}
    ) as trainer:
        results = trainer.run(keep_going, {"steps": 120, "size": 1, "by": 0}, callbacks=[change])
    assert change.sizes == []
    assert len({report["pid"] for report in results.metrics}) == 1
    assert list(results) == [1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_begins_with_fewer_workers_than_it_is_told_can_run(
    ray_cluster: Any, seats: Callable[[int], None]
) -> None:
    seats(1)
    node = ray_cluster.add_node(num_cpus=1, resources={"seat": 1})
    ray_cluster.remove_node(node, allow_graceful=False)
    with train.Trainer(
        num_workers=(1, 4), max_retries=0, resources_per_worker={"seat": 1}
    ) as trainer:
        assert list(trainer.run(keep_going, {"steps": 3, "size": 1, "by": 0})) == [1]


def train_in_group(num_workers: int) -> str:
    """Train in the placement group that this process runs in, and return what came of it."""
    with train.Trainer(num_workers=num_workers, cluster="auto") as trainer:
        try:
            return " ".join(map(str, trainer.run(size_of_world)))
        except train.ResourcesError as error:
            return str(error)


def size_of_world() -> int:
    return train.world_size()


class Trial:
    """What Ray Tune has for a trial: an actor in the first bundle of a placement group."""

    def train(self, num_workers: int) -> str:
        return train_in_group(num_workers)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_of_a_trial_take_the_bundles_of_its_placement_group(ray_cluster: Any) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # Nothing is left for a group beside this one.
    group = placement_group([{"CPU": 1}, {"CPU": 1}, {"CPU": 2}])
    assert group.wait(60)
    for captures in (True, False):
        trial = (
            ray.remote(Trial)
            .options(
                num_cpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, 0, placement_group_capture_child_tasks=captures
                ),
            )
            .remote()
        )
        # The other two bundles have room for three.
        assert ray.get(trial.train.remote(3)) == "3 3 3"
        text = ray.get(trial.train.remote(4))
        assert "4 worker(s) with 1 CPU each must fit into the placement group" in text
        assert "its free bundles have room for 3" in text
        assert 'tune.PlacementGroupFactory([{"CPU": 1}] + [{"CPU": 1}] * 4)' in text
        ray.kill(trial)
    remove_placement_group(group)


TUNED = """
import sys
from ray import tune
from paceline import train

def count():
    return train.world_size()

def trial(config):
    with train.Trainer(num_workers=config["num_workers"], cluster="auto") as trainer:
        try:
            tune.report({"found": str(trainer.run(count)[0])})
        except train.ResourcesError as error:
            tune.report({"found": str(error)})

resources = tune.PlacementGroupFactory([{"CPU": 1}] * 3)
tuner = tune.Tuner(
    tune.with_resources(trial, resources),
    param_space={"num_workers": tune.grid_search([2, 3])},
    run_config=tune.RunConfig(storage_path=sys.argv[1], verbose=0),
)
for result in tuner.fit():
    print("\\nfound:", result.config["num_workers"], result.metrics["found"])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trials_of_ray_tune_train_with_workers(
    ray_cluster: Any, run_python: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip(
        "ray.tune", reason="NOT TESTED: needs pip install 'ray[tune]'", exc_type=ImportError
    )
    done = run_python(TUNED, str(tmp_path / "tuned"), RAY_ADDRESS=ray_cluster.address)
    assert done.returncode == 0, done.stderr
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("found:"))
    assert found[0] == "found: 2 2"
    assert found[1].startswith("found: 3 3 worker(s) with 1 CPU each must fit into the placement")


DRIVER = """
import os, sys
import helper
from paceline import train

def work():
    train.report(value=helper.VALUE)
    return helper.VALUE, os.path.dirname(helper.__file__), os.getcwd()

if __name__ == "__main__":
    trainer = train.Trainer(
        num_workers=1, resources_per_worker={"elsewhere": 1}, run_dir=sys.argv[1]
    )
    with trainer:
        results = trainer.run(work)
        print("\\nresult:", *results[0], results.metrics[0]["value"])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_modules_beside_the_script_travel(
    ray_cluster: Any,
    nodes_with_own_disks: Callable[[int], Path],
    run_python: Callable[..., Any],
    tmp_path: Path,
) -> None:
    hidden = nodes_with_own_disks(1)
    (hidden / "helper.py").write_text("VALUE = 7")
    seen = run_python(
        DRIVER, str(tmp_path / "seen"), name="project/train.py", RAY_ADDRESS=ray_cluster.address
    )
    assert seen.returncode == 0, seen.stderr
    # Ray itself may tell of nodes that were lost before.
    (line,) = [line for line in seen.stdout.splitlines() if line.startswith("result:")]
    _, value, helper, directory, reported = line.split()
    assert (value, reported) == ("7", "7")
    assert Path(helper).name.startswith("paceline-sources-")
    assert directory == str(tmp_path)
    assert not Path(helper).exists()
