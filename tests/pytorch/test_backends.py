"""Back ends of the trial class, as far as they go without the libraries; see tests/backends."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import core
from paceline.pytorch import deepspeed
from paceline.pytorch.deepspeed import DeepSpeedStepper
from paceline.storage._checkpoint_errors import CheckpointMismatchError


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed here")
def test_deepspeed_that_is_not_installed_is_named() -> None:
    with (
        pytest.raises(ImportError, match="needs the package `deepspeed`, which is not installed"),
        deepspeed.init(),
    ):
        pass


def test_horovod_must_be_initialized_before_it_tells_the_place() -> None:
    hvd = SimpleNamespace(is_initialized=lambda: False)
    with pytest.raises(RuntimeError, match=r"Hint: hvd\.init\(\)"):
        core.DistributedContext.from_horovod(hvd)


def test_a_single_process_needs_no_store() -> None:
    hvd = SimpleNamespace(is_initialized=lambda: True, size=lambda: 1)
    assert core.DistributedContext.from_horovod(hvd).size == 1


class Engine(torch.nn.Module):
    """What an engine of DeepSpeed tells."""

    micro_steps = 2

    def gradient_accumulation_steps(self) -> int:
        return 2

    def managed_gradient_accumulation(self) -> bool:
        return True

    def zero_optimization_stage(self) -> int:
        return 1


@pytest.fixture
def stepper() -> DeepSpeedStepper:
    stepper = DeepSpeedStepper(core.DistributedContext.single(), torch.device("cpu"))
    stepper.add_engine(Engine())
    return stepper


def test_a_batch_ends_with_a_whole_step_of_each_engine(stepper: DeepSpeedStepper) -> None:
    assert stepper.finish_batch()
    stepper.engines[0].micro_steps = 3
    with pytest.raises(RuntimeError, match=r"step each engine once for each, but 1 were stepped"):
        stepper.finish_batch()
    stepper.accumulation.is_even = False
    with pytest.raises(RuntimeError, match="a rank has none"):
        stepper.begin_shard()


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({}, "a trial without DeepSpeed stored it"),
        ({"world_size": 2}, "number of ranks that stored them, which is 2, but here are 1"),
        ({"engines": []}, "it holds 0, and here are 1"),
        ({"engines": [{"zero_stage": 3}]}, "`zero_stage` of engine 0 must be 3"),
    ],
)
def test_a_checkpoint_of_others_is_refused(
    stepper: DeepSpeedStepper, training: dict[str, Any], message: str, tmp_path: Any
) -> None:
    stored = {"world_size": training.get("world_size", 1)}
    if training:
        stored["deepspeed"] = {"engines": training.get("engines", [])}
    with pytest.raises(CheckpointMismatchError, match=message):
        stepper.load(tmp_path, stored)
