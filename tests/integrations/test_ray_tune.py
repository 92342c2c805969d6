"""Trials of the real Ray Tune run train functions and creator functions on a Ray cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from paceline import train
from paceline.creators import PyTorchTrainer

# Neither workers nor trials can import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Tune leaves a thread of its own."""


@pytest.fixture
def tune(ray_tune: Any) -> Any:
    """Return Ray Tune, on a cluster of two nodes with two CPUs each."""
    return ray_tune


def climb(config: dict[str, Any]) -> float:
    """Add `lr` to a value in each step, and note this worker, which dies once if it is to."""
    state = train.load_checkpoint() or {"step": 0, "value": 0.0, "path": ()}
    value, path = state["value"], tuple(state["path"])
    Path(config["notes"], str(os.getpid())).touch()
    died = Path(config["notes"], f"died-{config.get('name')}")
    for step in range(state["step"], config["steps"]):
        value, path = value + config["lr"], (*path, config["lr"])
        if config.get("saves_first"):
            train.save_checkpoint(step=step + 1, value=value, path=path)
        train.report(step=step, value=value, path=json.dumps(path), size=train.world_size())
        if not config.get("saves_first"):
            train.save_checkpoint(step=step + 1, value=value, path=path)
        is_due = config.get("victim") == train.world_rank() and step == 1
        if is_due and not died.exists():
            time.sleep(0.3)
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return value


def run_config(tune: Any, path: Path, **options: Any) -> Any:
    return tune.RunConfig(storage_path=str(path / "tuned"), verbose=0, **options)


def check_nothing_is_left(notes: Path) -> None:
    """Wait until the workers that have noted themselves, and all actors, have ended."""
    import ray

    pids = [int(path.name) for path in notes.iterdir() if path.name.isdigit()]
    assert pids
    deadline = time.monotonic() + 60
    while True:
        actors = ray._private.state.actors().values()
        left = [actor for actor in actors if actor["State"] != "DEAD"]
        alive = [pid for pid in pids if psutil.pid_exists(pid)]
        if not left and not alive:
            return
        assert time.monotonic() < deadline, (left, alive)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lost_workers_end_a_trial_as_often_as_the_failure_config_allows(
    tune: Any, tmp_path: Path
) -> None:
    trainable = train.Trainer(num_workers=3, cpus_per_worker=1).to_trainable(climb)
    space = {
        "lr": 1.0,
        "steps": 4,
        "notes": str(tmp_path / "notes"),
        "case": tune.grid_search([(0, False), (2, False), (2, True)]),
        "victim": tune.sample_from(lambda spec: spec["config"]["case"][0]),
        "saves_first": tune.sample_from(lambda spec: spec["config"]["case"][1]),
        "name": tune.sample_from(lambda spec: str(spec["config"]["case"])),
    }
    (tmp_path / "notes").mkdir()
    failures = tune.FailureConfig(max_failures=1)
    results = tune.Tuner(
        trainable, param_space=space, run_config=run_config(tune, tmp_path, failure_config=failures)
    ).fit()
    assert not results.errors
    for result in results:
        # Each step is told once, also those of the time before the loss.
        assert result.metrics_dataframe["step"].tolist() == [0, 1, 2, 3]
        assert result.metrics_dataframe["value"].tolist() == [1.0, 2.0, 3.0, 4.0]
        assert result.metrics["training_iteration"] == 4
        assert result.metrics["size"] == 3
    check_nothing_is_left(tmp_path / "notes")

    space |= {"case": (2, False), "name": "for good"}
    results = tune.Tuner(trainable, param_space=space, run_config=run_config(tune, tmp_path)).fit()
    assert "Rank 2" in str(results.errors[0])
    assert "SIGKILL" in str(results.errors[0])
    check_nothing_is_left(tmp_path / "notes")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_of_one_to_four_workers_holds_its_placement_group_through_a_loss(
    tune: Any, tmp_path: Path
) -> None:
    trainable = train.Trainer(num_workers=(1, 4), cpus_per_worker=1).to_trainable(climb)
    space = {
        "lr": 1.0,
        "steps": 6,
        "notes": str(tmp_path / "notes"),
        "name": "elastic",
        "victim": 2,
    }
    (tmp_path / "notes").mkdir()
    (result,) = tune.Tuner(
        trainable,
        param_space=space | {"saves_first": True},
        run_config=run_config(tune, tmp_path, failure_config=tune.FailureConfig(max_failures=1)),
    ).fit()
    assert result.error is None
    rows = result.metrics_dataframe
    assert rows["step"].tolist() == [*range(6)]
    assert rows["value"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert set(rows["size"]) == {4}
    check_nothing_is_left(tmp_path / "notes")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("reuses", [False, True])
def test_asha_stops_trials_and_leaves_nothing_behind(
    tune: Any, tmp_path: Path, reuses: bool
) -> None:
    from ray.tune.schedulers import ASHAScheduler

    (tmp_path / "notes").mkdir()
    # Tune stores the files of the checkpoints, or only where they are.
    storage = str(tmp_path / "storage") if reuses else None
    trainer = train.Trainer(num_workers=2, cpus_per_worker=1, checkpoint_storage=storage)
    trainable = trainer.to_trainable(climb)
    results = tune.Tuner(
        trainable,
        param_space={
            "lr": tune.grid_search([4.0, 3.0, 2.0, 1.0]),
            "steps": 4,
            "saves_first": True,
            "notes": str(tmp_path / "notes"),
        },
        tune_config=tune.TuneConfig(
            metric="value",
            mode="max",
            scheduler=ASHAScheduler(max_t=4, grace_period=1, reduction_factor=2),
            max_concurrent_trials=1,
            reuse_actors=reuses,
        ),
        run_config=run_config(tune, tmp_path),
    ).fit()
    assert not results.errors
    steps = {result.config["lr"]: result.metrics["step"] for result in results}
    assert steps == {4.0: 3, 3.0: 0, 2.0: 0, 1.0: 0}
    best = results.get_best_result()
    assert best.config["lr"] == 4.0
    with best.checkpoint.as_directory() as path:
        assert any(each.is_dir() for each in Path(path).iterdir()) == (storage is None)
        assert train.Checkpoint.from_path(path).load()["value"] == 16.0
    check_nothing_is_left(tmp_path / "notes")
    num_workers = len([p for p in (tmp_path / "notes").iterdir() if p.name.isdigit()])
    # Workers that are used again are the same processes, stopped trials or not.
    assert num_workers == (2 if reuses else 8)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_population_based_training_copies_checkpoints(tune: Any, tmp_path: Path) -> None:
    from ray.tune.schedulers import PopulationBasedTraining

    (tmp_path / "notes").mkdir()
    trainable = train.Trainer(num_workers=2, cpus_per_worker=1).to_tune_trainable(climb)
    results = tune.Tuner(
        trainable,
        param_space={
            "lr": tune.grid_search([1.0, 64.0]),
            "steps": 6,
            "notes": str(tmp_path / "notes"),
        },
        tune_config=tune.TuneConfig(
            metric="value",
            mode="max",
            scheduler=PopulationBasedTraining(
                time_attr="training_iteration",
                perturbation_interval=2,
                hyperparam_mutations={"lr": [1.0, 64.0]},
                quantile_fraction=0.5,
                resample_probability=0.0,
                synch=True,
            ),
            reuse_actors=True,
        ),
        run_config=run_config(tune, tmp_path),
    ).fit()
    assert not results.errors
    paths = [json.loads(result.metrics["path"]) for result in results]
    assert all(len(path) == 6 for path in paths)
    # The weak trial went on from the strong one's steps.
    assert all(path[:2] == [64.0, 64.0] for path in paths)
    assert [result.metrics["value"] for result in results] == [sum(path) for path in paths]
    check_nothing_is_left(tmp_path / "notes")


SEARCH = """
import os, sys, time
import torch
from ray import tune
from paceline import train
from paceline.creators import PyTorchTrainer

kind, place, *restored = sys.argv[1:]

def begin(lr, step):
    with open(os.path.join(place, "begun"), "a") as file:
        print(lr, step, file=file)
    # The first search gets no further.
    while step == 3 and os.path.exists(os.path.join(place, "held")):
        time.sleep(0.1)

def fit(config):
    for step in range((train.load_checkpoint() or {"step": 0})["step"], 5):
        begin(config["lr"], step)
        train.save_checkpoint(step=step + 1)
        train.report(step=step)

def model_creator(config):
    return torch.nn.Linear(1, 1)

def data_creator(config):
    return [(torch.ones(1), torch.ones(1))] * 2

def optimizer_creator(model, config):
    return torch.optim.SGD(model.parameters(), lr=config["lr"])

def train_function(config, train_iterator, info):
    begin(config["lr"], info["epoch_idx"])
    list(train_iterator)
    return {"step": info["epoch_idx"]}

if kind == "function":
    trainable = train.Trainer(num_workers=1).to_trainable(fit)
else:
    trainable = PyTorchTrainer.as_trainable(
        model_creator=model_creator, data_creator=data_creator, loss_creator=torch.nn.MSELoss,
        optimizer_creator=optimizer_creator, train_function=train_function,
        validation_function=False, dataloader_config={"num_workers": 0},
    )
if restored:
    tuner = tune.Tuner.restore(os.path.join(place, "search"), trainable)
else:
    often = tune.CheckpointConfig(checkpoint_frequency=1) if kind == "creators" else None
    tuner = tune.Tuner(
        trainable,
        param_space={"lr": tune.grid_search([1, 2, 3])},
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=tune.RunConfig(
            storage_path=place, name="search", checkpoint_config=often, verbose=0,
            stop={"training_iteration": 5},
        ),
    )
for result in tuner.fit():
    steps = result.metrics_dataframe["step"].tolist()
    print("\\ntrial", result.config["lr"], *map(int, steps))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["function", "creators"])
def test_trials_of_a_search_that_was_killed_go_on_from_their_checkpoints(
    ray_cluster: Any,
    clean_environment: dict[str, str],
    tmp_path: Path,
    kind: str,
) -> None:
    (tmp_path / "search.py").write_text(SEARCH)
    (tmp_path / "held").touch()
    command = [sys.executable, "search.py", kind, str(tmp_path)]
    # How often Tune stores which trials there are, and what they go on from.
    environment = {
        **clean_environment,
        "RAY_ADDRESS": ray_cluster.address,
        "TUNE_GLOBAL_CHECKPOINT_S": "0.1",
    }

    def is_stored() -> bool:
        """Tell whether Tune has stored its state since both trials have stored theirs."""
        checkpoints = list((tmp_path / "search").glob("*_0000[01]_*/checkpoint_000002"))
        times = [path.stat().st_mtime for path in checkpoints]
        states = (tmp_path / "search").glob("experiment_state-*")
        newest = max((path.stat().st_mtime for path in states), default=0.0)
        return len(times) == 2 and newest > max(times) + 1

    with (tmp_path / "log").open("w") as log:
        first = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not is_stored():
            assert first.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
    finally:
        first.kill()
        first.wait()
    (tmp_path / "held").unlink()
    second = subprocess.run(
        [*command, "restored"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    trials = sorted(line for line in second.stdout.splitlines() if line.startswith("trial"))
    assert trials == [f"trial {lr} 0 1 2 3 4" for lr in (1, 2, 3)], second.stderr
    begun = Counter((tmp_path / "begun").read_text().splitlines())
    # Those that ran began again where they were held.
    again = {"1 3": 2, "2 3": 2}
    assert begun == {f"{lr} {n}": again.get(f"{lr} {n}", 1) for lr in (1, 2, 3) for n in range(5)}


# tests/train/test_ray.py has a quick trainer that is refused.
@pytest.mark.slow
def test_trials_that_the_cluster_can_never_run_are_refused(tune: Any, tmp_path: Path) -> None:
    trainable = train.Trainer(num_workers=5, cpus_per_worker=1, cluster="ray").to_trainable(climb)
    tuner = tune.Tuner(trainable, run_config=run_config(tune, tmp_path))
    with pytest.raises(Exception, match=r"5 worker\(s\) with 1 CPU each need 5 CPU, but"):
        tuner.fit()


def test_functions_without_a_name_name_no_directory_after_signs() -> None:
    trainer = train.Trainer(num_workers=2)
    names = [
        trainer.to_trainable(function).__name__
        for function in (climb, partial(climb), lambda config: None)
    ]
    assert names == ["climb", "climb", "train_func"]
    creators = {"data_creator": None, "optimizer_creator": None, "loss_creator": None}
    trainable = PyTorchTrainer.as_trainable(model_creator=lambda config: None, **creators)
    assert trainable.__name__ == "model_creator"
