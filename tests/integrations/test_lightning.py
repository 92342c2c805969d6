"""Lightning in train functions: reports, checkpoints, exact resume after kills, preemption."""

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


def make_net(config: dict[str, Any]) -> Any:
    import lightning.pytorch as pl
    import torch
    from torch import nn

    class Net(pl.LightningModule):
        """Draws random numbers, keeps buffers, and has a scheduler by epochs."""

        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"lr": 0.05, "path": Path("any")})
            self.net = nn.Sequential(
                nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1)
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(config.get("delay_s", 0.0))
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            marker = Path(config.get("marker", "never"))
            is_hit = self.trainer.global_step == config.get("step") and not marker.exists()
            if is_hit and train.world_rank() == config["rank"]:
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            adam = torch.optim.Adam(self.parameters(), lr=0.05)
            return [adam], [torch.optim.lr_scheduler.StepLR(adam, 1, 0.9)]

    return Net()


def digest(model: Any) -> str:
    data = b"".join(each.detach().numpy().tobytes() for each in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()


def fit(config: dict[str, Any]) -> tuple[str, int]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    warnings.filterwarnings("ignore")
    train.enable_reproducibility(3)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    loaders = [DataLoader(data, batch_size=8, shuffle=shuffle) for shuffle in (True, False)]
    if config.get("is_prepared", True):
        loaders = [train.prepare_data_loader(loader) for loader in loaders]
    trainer = integrations.lightning_trainer(
        max_epochs=3,
        log_every_n_steps=2,
        every_n_steps=config.get("every"),
        enable_model_summary=False,
    )
    model = make_net(config)
    trainer.fit(model, *loaders)
    return digest(model), trainer.global_step


def test_any_checkpoint_goes_on_to_the_same_bits() -> None:
    """With prepared loaders, within an epoch too; with plain ones, at the end of an epoch."""
    trainer = train.Trainer(num_workers=0)
    for is_prepared, every in ((True, 5), (False, None)):
        config = {"is_prepared": is_prepared, "every": every}
        straight = trainer.run(fit, config)
        assert straight[0][1] == 36
        steps = [each.metrics["step"] for each in straight.checkpoints]
        assert steps == ([5, 10, 12, 15, 20, 24, 25, 30, 35, 36] if every else [12, 24, 36])
        assert straight.metrics[-1]["epoch"] == 2
        assert straight.metrics[-1].keys() >= {"loss", "val_loss", "step"}
        # Each validation is reported once, and the steps are those of Lightning.
        assert [row["step"] for row in straight.metrics if "val_loss" in row] == [12, 24, 36]
        assert all(row.step >= row["step"] for row in straight.metrics)
        assert {row.step for row in straight.metrics if row["step"] % 12} >= {2, 4, 6, 8, 10, 14}
        for checkpoint in straight.checkpoints[::3]:
            assert trainer.run(fit, config, checkpoint=checkpoint) == straight
    state = straight.checkpoints[-1].load()["lightning"]
    model = make_net({})
    model.load_state_dict(state["state_dict"])
    assert digest(model) == straight[0][0]


def test_a_run_of_three_whose_rank_was_killed_ends_in_the_same_bits() -> None:
    strategy = train.CheckpointStrategy(
        num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    with train.Trainer(num_workers=3) as trainer:
        straight = trainer.run(fit, {"every": 3}, checkpoint_strategy=strategy)
        for rank in (0, 2):
            kill = {"rank": rank, "step": 6, "marker": f"killed-{rank}"}
            results = trainer.run(fit, {"every": 3, **kill}, checkpoint_strategy=strategy)
            assert results.num_restarts == 1
            # The chief's buffers are its own, and weights are those of all.
            assert results == straight
    assert len(straight.checkpoints) <= 3
    assert straight[0][1] == 12


def test_a_signal_has_it_save_after_the_step_and_end(
    preempted_and_resumed: Callable[[str], str],
) -> None:
    out = preempted_and_resumed(__file__)
    straight = train.Trainer(num_workers=2)
    with straight:
        assert f"done {straight.run(fit, {})[0]}" in out


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="trains where the workers are, but got devices"):
        integrations.lightning_trainer(devices=2)
    with pytest.raises(TypeError, match="must be a lightning.pytorch.Trainer, but is a"):
        integrations.prepare_lightning(3)
    with pytest.raises(ValueError, match="`every_n_steps` must be at least 1 or None"):
        integrations.lightning_trainer(every_n_steps=0, max_epochs=1)
