import sys
from collections.abc import Callable
from typing import Any

import pytest

from paceline._cluster.master.experiments.attempts import build_launch
from paceline.journal import RunMetadataSet


def launch_of(bench: Any, attempt_id: int, devices: tuple[str, ...]) -> Any:
    with bench.database.read() as connection:
        return build_launch(connection, bench.launch_sources(devices), attempt_id)


def test_an_attempt_is_told_all_it_needs(bench: Any) -> None:
    experiment_id = bench.create(
        "single",
        name="told",
        entrypoint="python3 train.py --lr ${hparams.lr}",
        hyperparameters={"lr": 0.5},
        environment={"variables": {"A": "b"}},
        data={"mine": [1]},
    )
    first = bench.start(1)
    bench.checkpoint(first, 7, "saved")
    bench.send(first, RunMetadataSet(time=1.0, metadata={"data": "v1"}))
    bench.end(first, code=1)
    launch = launch_of(bench, bench.start(1), ("cpu",) * 4)
    spec, info = launch.spec, launch.info
    assert (spec.trial_id, spec.number, spec.slot_ids) == (1, 2, [0])
    assert spec.entrypoint == "python3 train.py --lr 0.5"
    assert (spec.python, spec.variables, spec.gpu_ids) == (sys.executable, {"A": "b"}, [])
    assert (info.trial.trial_id, info.trial.experiment_id) == (1, experiment_id)
    assert (info.trial.hparams, info.trial.config["data"]) == ({"lr": 0.5}, {"mine": [1]})
    assert (info.latest_checkpoint, info.steps_completed, info.attempt) == ("saved", 7, 2)
    assert info.checkpoint_storage == "/home-of-paceline/checkpoints"
    assert (info.slot_ids, info.cluster_id) == ([0], "bench")
    assert info.metadata == {"data": "v1"}


@pytest.mark.parametrize(
    ("search", "changed", "judged"),
    [
        ("single", {}, None),
        ("random", {}, None),
        ("halving", {}, ["loss", "epochs"]),
        ("adaptive", {"time_metric": "batches"}, ["loss"]),
    ],
)
def test_an_attempt_is_told_which_metrics_its_search_judges(
    bench: Any, search: str, changed: dict[str, Any], judged: list[str] | None
) -> None:
    bench.create(search, searcher=changed)
    bench.schedule()
    with bench.database.read() as connection:
        launch = build_launch(connection, bench.launch_sources(), 1)
    assert launch.info.judged_metrics == judged


def test_a_trial_class_is_launched_by_the_interpreter_that_the_config_names(bench: Any) -> None:
    bench.create(
        "single",
        entrypoint="model_def:Trial",
        searcher={"name": "single", "metric": "loss", "max_length": 4},
        environment={"python": "/opt/python"},
    )
    launch = launch_of(bench, bench.start(1), ("cpu",) * 4)
    program = ["-m", "paceline.pytorch.run_trial", "model_def:Trial"]
    assert launch.spec.entrypoint == ["/opt/python", *program]
    assert launch.info.trial.config["entrypoint"] == "model_def:Trial"


def test_an_attempt_on_gpus_is_told_which(make_bench: Callable[[int], Any]) -> None:
    bench = make_bench(3)
    bench.create("single")
    bench.create("single", resources={"slots_per_trial": 2})
    assert bench.schedule() == [1, 2]
    devices = ("0", "GPU-7", "2")
    assert launch_of(bench, 1, devices).spec.gpu_ids == ["0"]
    assert launch_of(bench, 2, devices).spec.gpu_ids == ["GPU-7", "2"]


@pytest.mark.parametrize("devices", [("cpu",), ("0", "1")])
def test_slots_that_a_smaller_master_lacks_stop_no_launch(
    bench: Any, devices: tuple[str, ...]
) -> None:
    """The attempt was placed by a master with four slots that died before it started it."""
    bench.create("single", resources={"slots_per_trial": 4})
    [attempt_id] = bench.schedule()
    spec = launch_of(bench, attempt_id, devices).spec
    assert spec.slot_ids == [0, 1, 2, 3]
    assert spec.gpu_ids == [device for device in devices if device != "cpu"]
    assert spec.num_threads >= 1
