"""Trainings by DeepSpeed: exact resume, preemption, what is refused, what other tools read."""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BACKEND = "deepspeed"
pytestmark = [
    pytest.mark.skipif(
        find_spec("deepspeed") is None,
        reason="NOT TESTED: DeepSpeed is not installed; see `make test-backends`",
    ),
    # The first start builds a part of DeepSpeed.
    pytest.mark.timeout(900),
]

Check = Callable[[Any, Any, int], None]


@pytest.mark.parametrize("fault_rank", [0, 1])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_training_goes_on_in_the_same_bits_after_a_killed_rank(
    train: Any, check_same: Check, stage: int, fault_rank: int
) -> None:
    killed = train(2, STAGE=stage, FAULT_RANK=fault_rank)
    assert f"Rank {fault_rank} was ended by SIGKILL" in killed.output
    check_same(train(2, STAGE=stage), killed, 2)
    port = (killed.directory / "out/port").read_text()
    assert not [*Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*")]


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (3, {"STAGE": 2, "FAULT_RANK": 2}),
        (2, {"STAGE": 3, "BF16": 1, "FAULT_RANK": 1}),
        (1, {"STAGE": 1, "NUM_MICRO": 1, "FAULT_RANK": 0}),
    ],
)
def test_other_groups_go_on_in_the_same_bits_too(
    train: Any, check_same: Check, num_ranks: int, options: dict[str, int]
) -> None:
    straight = {name: value for name, value in options.items() if name != "FAULT_RANK"}
    check_same(train(num_ranks, **straight), train(num_ranks, **options), num_ranks)


@pytest.mark.parametrize("fault_rank", [0, 1])
def test_a_preempted_training_goes_on_in_the_same_bits(
    train: Any, check_same: Check, tmp_path: Path, fault_rank: int
) -> None:
    # What a rank wants travels for some batches, as there are no gradients to take it along.
    options = {"STAGE": 3, "STEPS": 16}
    preempted = train(2, at=tmp_path, FAULT="SIGTERM", FAULT_RANK=fault_rank, **options)
    assert preempted.code == 0, preempted.output
    assert "DONE preempted" in preempted.output
    resumed = train(2, at=tmp_path, RESUME=preempted.run_directory, **options)
    check_same(train(2, **options), resumed, 2)


def test_the_steps_are_those_of_a_loop_without_paceline(train: Any) -> None:
    outcome = train(2, STAGE=2, BARE=1, PLAIN=1, STEPS=4)
    assert outcome.code == 0, outcome.output
    bare, own = outcome.states("bare"), outcome.states()
    assert len(bare) == len(own) == 2
    for bare_state, own_state in zip(bare, own, strict=True):
        for name, value in bare_state["weights"].items():
            assert value.equal(own_state["weights"][name]), name


@pytest.mark.parametrize(
    ("num_ranks", "options", "message"),
    [
        (3, {}, "number of ranks that stored them, which is 2, but here are 3"),
        (2, {"NUM_MICRO": 1}, "`gradient_accumulation_steps` of engine 0 must be 2"),
        (2, {"STAGE": 2}, "`zero_stage` of engine 0 must be 1"),
    ],
)
def test_a_checkpoint_of_other_engines_is_refused(
    train: Any, num_ranks: int, options: dict[str, int], message: str
) -> None:
    straight = train(2, STAGE=1)
    outcome = train(num_ranks, **{"STAGE": 1, "RESUME": straight.run_directory, **options})
    assert outcome.code == 1
    assert message in outcome.output


def test_deepspeeds_own_tool_reads_the_weights_of_a_checkpoint(train: Any, tmp_path: Path) -> None:
    import torch

    straight = train(2, STAGE=3)
    checkpoints = straight.run_directory.glob("checkpoints/*")
    directory = max(checkpoints, key=lambda path: path.stat().st_mtime) / "deepspeed_0"
    weights_path = tmp_path / "weights.pt"
    code = (
        "import sys, torch; from deepspeed.utils import zero_to_fp32 as tool;"
        "read = tool.get_fp32_state_dict_from_zero_checkpoint;"
        "torch.save(dict(read(sys.argv[1])), sys.argv[2])"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(directory), str(weights_path)],
        check=True,
        capture_output=True,
    )
    weights = torch.load(weights_path)
    for name, value in straight.states()[0]["weights"].items():
        assert value.equal(weights[name]), name


def test_older_checkpoints_are_deleted(train: Any) -> None:
    straight = train(2, STAGE=3)
    assert straight.code == 0, straight.output
    assert len(list(straight.run_directory.glob("checkpoints/*"))) == 2


def test_deepspeeds_own_launcher_starts_the_same_training(train: Any, check_same: Check) -> None:
    launcher = (str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2")
    started = train(2, launcher=(*launcher, "--no_local_rank"), STAGE=2)
    check_same(train(2, STAGE=2), started, 2)
