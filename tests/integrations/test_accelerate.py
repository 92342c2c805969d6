"""Accelerate in train functions: reports, checkpoints, resume, preemption."""

import hashlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import integrations, train

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(config: dict[str, Any]) -> tuple[str, int]:
    import torch
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    warnings.filterwarnings("ignore")
    train.enable_reproducibility(3)
    # torch's wrapper changes its order of summing after the first step, unless it looks for
    # parameters without gradients.
    ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
    reports = integrations.PacelineTracker()
    accelerator = Accelerator(cpu=True, log_with=reports, kwargs_handlers=[ddp])
    accelerator.init_trackers("any")
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loader = train.prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    state = integrations.load_accelerator(accelerator) or {"epoch": 0, "step": 0}
    step = state["step"]
    for epoch in range(state["epoch"], 3):
        for batch, target in loader:
            marker = Path(config.get("marker", "never"))
            is_hit = step == config.get("step") and not marker.exists()
            if is_hit and train.world_rank() == config["rank"]:
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(config.get("delay_s", 0.0))
            loss = nn.functional.mse_loss(model(batch), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.log({"loss": loss.item()}, step=step)
            is_preempted = train.should_preempt()
            if is_preempted or step % config.get("every", 1000) == 0:
                integrations.save_accelerator(accelerator, epoch=epoch, step=step)
            if is_preempted:
                return "preempted", step
        scheduler.step()
    weights = accelerator.unwrap_model(model).state_dict().values()
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in weights)).hexdigest()
    return digest, step


def test_any_checkpoint_goes_on_to_the_same_bits() -> None:
    trainer = train.Trainer(num_workers=0)
    straight = trainer.run(fit, {"every": 5})
    assert straight[0][1] == 36
    assert [each["step"] for each in straight.metrics] == [*range(1, 37)]
    for checkpoint in straight.checkpoints[::3]:
        assert trainer.run(fit, {"every": 5}, checkpoint=checkpoint) == straight
    other = trainer.run(lambda: train.save_checkpoint(other=1)).checkpoints[0]
    with pytest.raises(ValueError, match="must find a checkpoint of `save_accelerator`"):
        trainer.run(fit, {}, checkpoint=other)


def test_a_run_of_three_whose_rank_was_killed_ends_in_the_same_bits() -> None:
    with train.Trainer(num_workers=3) as trainer:
        straight = trainer.run(fit, {"every": 3})
        assert straight[0][1] == 12
        for rank in (0, 2):
            kill = {"rank": rank, "step": 5, "marker": f"killed-{rank}"}
            results = trainer.run(fit, {"every": 3, **kill})
            assert results.num_restarts == 1
            assert results == straight


def test_a_signal_has_it_save_after_the_step_and_end(
    preempted_and_resumed: Callable[[str], str],
) -> None:
    out = preempted_and_resumed(__file__)
    with train.Trainer(num_workers=2) as straight:
        assert f"done {straight.run(fit, {})[0]}" in out
