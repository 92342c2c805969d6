"""Functions whose workers are lost: `pytorch.launch` starts them again."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from paceline import core, pytorch

# The workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(name: str, kill_at: int | None) -> list[float]:
    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            self.model = context.wrap_model(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 2)))
            sgd = torch.optim.SGD(self.model.parameters(), 0.1)
            self.optimizer = context.wrap_optimizer(sgd)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            is_first = not (Path.cwd() / "killed").exists()
            if is_first and (batch_idx, self.context.distributed.rank) == (kill_at, 1):
                (Path.cwd() / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = batch
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

        def evaluate_batch(self, batch: Any) -> Any:
            x, y = batch
            return {"validation_loss": nn.functional.cross_entropy(self.model(x), y)}

        def build_training_data_loader(self) -> Any:
            x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
            data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
            size = self.context.get_per_slot_batch_size()
            return pytorch.DataLoader(data, batch_size=size, shuffle=True)

        build_validation_data_loader = build_training_data_loader

    with pytorch.init(hparams={"global_batch_size": 8}, seed=3, name=name) as context:
        trial = Trial(context)
        length, period = pytorch.Batch(20), pytorch.Batch(5)
        pytorch.Trainer(trial, context).fit(max_length=length, checkpoint_period=period)
        return [float(number) for p in trial.model.parameters() for number in p.flatten()]


@pytest.mark.slow
def test_training_that_lost_a_worker_returns_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    straight = pytorch.launch(train, 2, args=("straight", None))
    killed = pytorch.launch(train, 2, args=("killed", 13), max_restarts=1)
    assert killed == straight
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= 30)
    assert "Rank 1 was ended by SIGKILL, the first of 2 to fail" in warning
    assert warning.endswith("Starting the workers again, restart 1 of 1.")
    runs = core.list_runs(tmp_path / "paceline_runs")
    assert [(run.name, run.num_attempts) for run in runs] == [("straight", 1), ("killed", 2)]


def test_a_wrong_number_of_restarts_is_refused() -> None:
    with pytest.raises(ValueError, match="`max_restarts` must be an integer of at least 0"):
        pytorch.launch(print, 2, max_restarts=-1)
