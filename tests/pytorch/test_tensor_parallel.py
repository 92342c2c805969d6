"""Models that a user's own plan divides: as trained in one piece, and in checkpoints."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sharded_runs import LAUNCHER, Training, assert_agree

from paceline.pytorch import export_weights

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("forked_ranks")]

# The name of a mode, its ranks, and those that divide the model: 2x2 are two groups of two.
Shape = tuple[str, int, int]
TENSOR, TWO_GROUPS, WITH_FSDP = ("flat", 2, 2), ("flat", 4, 2), ("fsdp", 4, 2)


def run(training: Training, shape: Shape, *, is_killed: bool = False) -> Training:
    """Train on with so many ranks."""
    mode, num_ranks, tensor_size = shape
    training.variables["TENSOR"] = str(tensor_size)
    training.run(num_ranks, mode, is_killed=is_killed)
    return training


def assert_groups_agree(training: Training, shape: Shape) -> None:
    """Check that the ranks of a group have trained on the same samples, and groups on others."""
    _, num_ranks, tensor_size = shape
    lines = [
        (training.directory / "samples" / f"{rank}-of-{num_ranks}").read_text().splitlines()
        for rank in range(num_ranks)
    ]
    # A kill may come before the last line of a rank.
    lines = [each[: min(map(len, lines))] for each in lines]
    assert len(lines[0]) > 10
    for first in range(0, num_ranks, tensor_size):
        assert all(lines[first] == lines[first + place] for place in range(tensor_size))
    by_group = [{*lines[first]} for first in range(0, num_ranks, tensor_size)]
    assert not set.intersection(*by_group) or len(by_group) == 1


# The last checkpoint before the kill is in the middle of an accumulated step.
@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TENSOR, ("flat", 1, 2)),
        pytest.param(TENSOR, ("fsdp", 2, 1), marks=pytest.mark.slow),
        pytest.param(TWO_GROUPS, TWO_GROUPS, marks=pytest.mark.slow),
        pytest.param(TWO_GROUPS, WITH_FSDP, marks=pytest.mark.slow),
        pytest.param(TWO_GROUPS, TENSOR, marks=pytest.mark.slow),
        pytest.param(TWO_GROUPS, ("flat", 2, 1), marks=pytest.mark.slow),
        pytest.param(TWO_GROUPS, ("flat", 1, 1), marks=pytest.mark.slow),
        pytest.param(WITH_FSDP, WITH_FSDP, marks=pytest.mark.slow),
        pytest.param(WITH_FSDP, TWO_GROUPS, marks=pytest.mark.slow),
        pytest.param(WITH_FSDP, TENSOR, marks=pytest.mark.slow),
        pytest.param(WITH_FSDP, ("fsdp", 2, 1), marks=pytest.mark.slow),
        pytest.param(WITH_FSDP, ("fsdp", 3, 1), marks=pytest.mark.slow),
        pytest.param(WITH_FSDP, ("flat", 1, 1), marks=pytest.mark.slow),
        pytest.param(("fsdp", 4, 1), WITH_FSDP, marks=pytest.mark.slow),
        pytest.param(("flat", 1, 1), TWO_GROUPS, marks=pytest.mark.slow),
        pytest.param(("flat", 2, 1), TWO_GROUPS, marks=pytest.mark.slow),
    ],
)
def test_a_divided_model_goes_on_in_another_division(
    whole: Training, tmp_path: Path, first: Shape, second: Shape
) -> None:
    training = run(Training(tmp_path / "run"), first, is_killed=True)
    stored = json.loads((training.checkpoint() / "manifest.json").read_text())
    assert stored["metadata"]["steps_completed"] == 15
    assert_groups_agree(training, first)
    assert_agree(whole, run(training, second))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TWO_GROUPS, WITH_FSDP])
def test_a_kill_of_any_rank_ends_in_the_same_bits(tmp_path: Path, shape: Shape) -> None:
    straight = run(Training(tmp_path / "straight", CASE="dropout"), shape)
    assert_groups_agree(straight, shape)
    for rank in (0, 2):
        fault = f"engine.batch:17,signal=KILL,rank={rank}"
        directory = tmp_path / str(rank)
        training = Training(directory, CASE="dropout", PACELINE_FAULT=fault, TENSOR="2")
        done = training.start([*LAUNCHER, str(shape[1])], shape[0])
        assert done.returncode == 128 + signal.SIGKILL
        assert f"Rank {rank} was ended by SIGKILL" in done.stdout + done.stderr
        training.variables.pop("PACELINE_FAULT")
        run(training, shape)
        assert training.samples() == straight.samples()
        weights = straight.weights()
        assert all(torch.equal(value, weights[name]) for name, value in training.weights().items())
        assert training.facts() == straight.facts()


LOSING = """
import sys
from paceline.launch import torch_distributed
# What can run at the first start, after the loss, and from the next checkpoint on.
numbers = [4, 3]
torch_distributed.num_cores = lambda: numbers.pop(0) if numbers else 5
sys.exit(torch_distributed.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("mode", ["flat", "fsdp"])
def test_an_elastic_group_stays_a_multiple_of_those_that_divide_a_model(
    whole: Training, tmp_path: Path, mode: str, rank: int
) -> None:
    fault = f"engine.batch:17,signal=KILL,rank={rank}"
    training = Training(tmp_path, PACELINE_FAULT=fault, TENSOR="2")
    launcher = ["-c", LOSING, "--nproc-per-node", "2:5", "--max-restarts", "1"]
    done = training.start([*launcher, "--tensor-parallel-size", "2"], mode)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f"Rank {rank} was ended by SIGKILL" in said
    spare = "3 worker(s) could run, but 2 start, as the number must be a multiple of 2"
    assert spare in said
    assert "Going on with 2 worker(s) instead of 4." in said
    # Most often it grows again at the checkpoint before the end.
    assert_agree(whole, training)


# One rank of the second group hears of it, and all leave after the same batch.
@pytest.mark.slow
@pytest.mark.parametrize("shape", [TWO_GROUPS, WITH_FSDP])
def test_a_request_to_leave_reaches_all_groups(
    whole: Training, tmp_path: Path, shape: Shape
) -> None:
    fault = "engine.batch:7,signal=TERM,rank=3"
    training = run(Training(tmp_path / "run", PACELINE_FAULT=fault), shape)
    manifest = json.loads((training.checkpoint() / "manifest.json").read_text())
    assert 7 <= manifest["metadata"]["steps_completed"] < 23
    training.variables.pop("PACELINE_FAULT")
    assert_agree(whole, run(training, shape))


# Each is killed within an accumulated step, and goes on in one process.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "shape"),
    [
        ("by hand", TENSOR),
        ("adapters lone", WITH_FSDP),
        ("adapters meta", TWO_GROUPS),
        ("recomputed compiled", WITH_FSDP),
        ("whole set", TWO_GROUPS),
        ("dropout", TENSOR),
    ],
)
def test_every_kind_of_model_can_be_divided(tmp_path: Path, case: str, shape: Shape) -> None:
    # A group joins its shards, and so draws the numbers of all in one go.
    options = {"CASE": case, "SHARDS": "1" if case == "dropout" else "4"}
    whole = Training(tmp_path / "whole", **options).run(1, "flat")
    training = run(Training(tmp_path / "run", **options), shape, is_killed=True)
    assert_agree(whole, run(training, shape if case == "dropout" else ("flat", 1, 1)))


@pytest.mark.slow
def test_several_copies_are_divided_by_a_plan_too(whole: Training, tmp_path: Path) -> None:
    training = Training(tmp_path / "run", SHARD_SIZE="2")
    run(training, ("fsdp", 8, 2), is_killed=True)
    # Two copies, each on two groups of two.
    names = {path.stem for path in training.checkpoint().glob("shard_*.json")}
    assert names == {"shard_0", "shard_1", "shard_2", "shard_3"}
    training.variables.pop("SHARD_SIZE")
    assert_agree(whole, run(training, TWO_GROUPS))


@pytest.mark.slow
def test_whole_weights_are_exported(whole: Training, tmp_path: Path) -> None:
    training = run(Training(tmp_path / "run"), WITH_FSDP)
    export_weights(training.checkpoint(), tmp_path / "weights.safetensors")
    exported = load_file(tmp_path / "weights.safetensors")
    exported.pop("num_calls")
    torch.testing.assert_close(exported, whole.weights(), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "num_ranks", "message"),
    [
        ({"TENSOR": "2"}, 3, "must divide the number of ranks, but got 2 for 3. Hint: use 2 ranks"),
        ({"TENSOR": "1", "CASE": "mesh"}, 2, "Hint: pass `tensor_parallel_size=2`"),
        ({"TENSOR": "2", "CASE": "mesh"}, 2, "must be divided over `context.tensor_mesh`"),
        ({"TENSOR": "2", "CASE": "early optimizer"}, 2, "Adam has parameters that are in no model"),
        ({"TENSOR": "2", "CASE": "plain"}, 2, "`loss.backward()` with `tensor_parallel_size`"),
        ({"TENSOR": "2", "PRECISION": "fp16"}, 2, "with `tensor_parallel_size`, but got"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, variables: dict[str, str], num_ranks: int, message: str
) -> None:
    done = Training(tmp_path / "run", **variables, WINDOW="1", LENGTH="2").start(num_ranks, "flat")
    assert done.returncode == 1
    assert message in done.stdout + done.stderr


@pytest.mark.slow
def test_the_example_of_the_guide_runs(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text()
    [code] = re.findall(r"```python\n(# tensor_parallel.py\n.*?)```", guide, re.DOTALL)
    (tmp_path / "tensor_parallel.py").write_text(code)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    for launcher in ([], [*LAUNCHER, "4", "--"]):
        command = [sys.executable, *launcher, "tensor_parallel.py"]
        subprocess.run(command, cwd=tmp_path, env=variables, check=True, timeout=180)
    # One checkpoint after each epoch.
    paths = list(tmp_path.glob("paceline_runs/*/checkpoints/*/manifest.json"))
    assert len(paths) == 4
    assert len([path for path in paths if (path.parent / "shard_1.json").exists()]) == 2
