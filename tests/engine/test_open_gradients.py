"""Gradients within an accumulated step, where another number of ranks goes on."""

from pathlib import Path

import torch

from paceline._training.engine.checkpoints.capture_and_restore import ModelsAndOptimizers
from paceline._training.engine.checkpoints.state_format import save_state
from paceline.pytorch._training_state import read_state
from paceline.storage._checkpoint_errors import STATE_VERSION


def test_the_chief_alone_takes_up_the_sum_for_a_parameter_that_is_not_sharded(
    tmp_path: Path,
) -> None:
    training = {"version": STATE_VERSION, "world_size": 3, "num_models": 0, "num_optimizers": 0}
    save_state(training, tmp_path, "training")
    for rank in range(3):
        own = {"random": None, "gradients": [torch.full((2,), float(rank + 1)), None]}
        save_state(own, tmp_path, f"rank_{rank}")
    for is_sharded in (True, False):
        found = []
        for rank in range(2):
            parts = read_state(tmp_path, rank, 2, is_sharded=is_sharded)
            parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
            shared = parts.get("gradients", {}).get("gradients")
            own = {**parts["rank"], "buffers": None, "sharded_gradients": shared}
            ModelsAndOptimizers(rank=rank, models=[], parameters=parameters).load_own_state(own)
            found.append([each.grad for each in parameters])
        assert found[0][0].tolist() == [6.0, 6.0]
        assert found[1] == [None, None]
