"""The trainer's example trains in every way that its guide shows."""

import gzip
import json
import re
import runpy
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import load_config
from paceline.core import list_runs, read_checkpoints, read_metrics
from paceline.journal import RunDirectory

CONFIGS = ["adaptive", "const", "distributed", "trial_class"]
# As quick as it can be and still learn.
SHORT = ["--batches", "300"]

Run = Callable[..., str]


@pytest.fixture
def example_name() -> str:
    return "pytorch_trainer"


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return an environment with no Fashion-MNIST."""
    return {**environment, "FASHION_MNIST": str(tmp_path / "nowhere")}


def only_run(example: Path) -> RunDirectory:
    [summary] = list_runs(example / "paceline_runs")
    assert summary.state.value == "completed"
    return RunDirectory(summary.path)


def accuracies(run: RunDirectory) -> dict[int, float]:
    rows = read_metrics(run, "validation")
    return {row.steps_completed: row.metrics["accuracy"] for row in rows if not row.is_superseded}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_config_is_valid_and_searches_a_metric_of_the_trial(example: Path, name: str) -> None:
    config = load_config(example / f"{name}.yaml")
    assert not config.warnings
    assert f'"{config.searcher.metric}"' in (example / "model_def.py").read_text()


def test_every_file_is_in_the_guide(example: Path) -> None:
    named = set(re.findall(r"`(\w+\.(?:py|yaml|ipynb))`", (example / "README.md").read_text()))
    assert named == {path.name for path in example.iterdir()} - {"README.md"}


@pytest.mark.long
def test_training_learns_and_keeps_its_best(run: Run, example: Path) -> None:
    output = run("train.py", "--batches", "600")
    assert "The images are scikit-learn's digits" in output
    done = accuracies(only_run(example))
    assert list(done) == [250, 500, 600]
    best = max(done.values())
    assert best > 0.95
    assert f"reached max_length: 600 batches, best {best:.1%}" in output


@pytest.mark.long
def test_fashion_mnist_is_read_where_it_is(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both files begin with a magic number and the sizes; pixels here count from 0 to 195."""
    monkeypatch.setenv("FASHION_MNIST", str(tmp_path))
    for part, count in (("train", 40), ("t10k", 10)):
        images = struct.pack(">IIII", 0x803, count, 28, 28) + bytes(range(196)) * 4 * count
        labels = struct.pack(">II", 0x801, count) + bytes(index % 10 for index in range(count))
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    train_set, test_set = runpy.run_path(str(example / "data.py"))["load_images"]()
    assert (len(train_set), len(test_set)) == (40, 10)
    image, label = train_set[11]
    assert image.shape == (1, 28, 28)
    assert (image[0, 1, 1] * 255).item() == pytest.approx(29)
    assert label.item() == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_interrupted_training_goes_on_to_the_same_bits(
    run: Run, example: Path, environment: dict[str, str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "train.py", *SHORT],
        cwd=example,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    while not list(example.glob("paceline_runs/*/checkpoints/*/manifest.json")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert b"interrupted: " in output, output
    run("train.py", *SHORT, "--resume", "auto")
    resumed = only_run(example)
    assert len({key.attempt for key in resumed.journal_keys()}) == 2
    resumed.path.rename(example / "resumed")
    run("train.py", *SHORT)
    straight = only_run(example)
    moved = RunDirectory(example / "resumed")
    assert accuracies(moved) == accuracies(straight)
    left, right = last_weights(moved), last_weights(straight)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def last_weights(run: RunDirectory) -> dict[str, Any]:
    uuid = read_checkpoints(run)[-1].uuid
    return load_file(run.checkpoints_path / uuid / "model_0.safetensors")


# tests/pytorch and tests/launch have quick trainings of several processes.
@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["paceline.launch.torch_distributed", "--nproc-per-node", "2"],
        ["torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    ],
)
def test_two_processes_train_together(run: Run, example: Path, launcher: list[str]) -> None:
    output = run("-m", *launcher, "train.py", *SHORT)
    done = accuracies(only_run(example))
    assert list(done) == [250, 300]
    assert done[300] > 0.9
    assert output.count("reached max_length") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_master_runs_each_config(run: Run, tmp_path: Path, name: str) -> None:
    cli = ("-m", "paceline.cli")
    run(*cli, "up", "--detach", "--port", "0", "--slots", "2")
    try:
        fields = ["max_trials=4", "max_time=500"] if name == "adaptive" else ["max_length=300"]
        shorter = [part for field in fields for part in ("--config", f"searcher.{field}")]
        output = run(*cli, "e", "create", f"{name}.yaml", ".", "-f", *shorter)
        rows = [
            json.loads(line)
            for line in run(*cli, "t", "metrics", "1", "-g", "validation", "--json").splitlines()
        ]
    finally:
        run(*cli, "down", "--timeout", "1", "--home", str(tmp_path / "home"))
    assert "is COMPLETED" in output
    assert rows[-1]["metrics"]["accuracy"] > 0.6


@pytest.mark.slow
def test_one_batch_is_tried_before_submission(run: Run, example: Path) -> None:
    run("-m", "paceline.cli", "e", "create", "trial_class.yaml", ".", "--local", "--test")
    assert list(accuracies(only_run(example))) == [1]
