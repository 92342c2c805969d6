"""Train a small model with the sums of a back end; the environment says what goes wrong."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from paceline import pytorch
from paceline.pytorch._loop_agreement import RankAgreement

RANK = int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", 0)))
FAULT_RANK = int(os.environ.get("FAULT_RANK", -1))
OUT = Path(os.environ["OUT"])
# A fault happens once.
MARK = OUT / "fault"


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    def train_batch(self, batch, epoch_idx, batch_idx):
        if RANK == FAULT_RANK and batch_idx == 4 and not MARK.exists():
            MARK.touch()
            os.kill(os.getpid(), getattr(signal, os.environ.get("FAULT", "SIGKILL")))
            # A rank that lives on looks for signals after this batch.
            time.sleep(4 * RankAgreement.look_interval_s)
        loss = self.model(batch[0]).pow(2).mean()
        if "PLAIN" in os.environ:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
        return {"loss": loss, "noise": torch.rand(())}

    def evaluate_batch(self, batch):
        return {"validation_loss": self.model(batch[0]).pow(2).mean()}

    def build_training_data_loader(self):
        # The last batch of an epoch has no samples for the last rank.
        numbers = torch.arange(4.0 * 22).reshape(22, 4) / 100
        data = torch.utils.data.TensorDataset(numbers)
        return torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)

    def build_validation_data_loader(self):
        return self.build_training_data_loader()


def main():
    backend = os.environ.get("BACKEND", "horovod")
    hparams = {"global_batch_size": 2 * int(os.environ.get("SHARDS", 2))}
    with pytorch.init(
        hparams, seed=3, name="hvd", resume=os.environ.get("RESUME"), data_parallel=backend
    ) as context:
        trial = Trial(context)
        result = pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(8),
            checkpoint_period=pytorch.Batch(2),
            validation_period=pytorch.Batch(3),
            reporting_period=pytorch.Batch(1),
        )
        state = {"weights": dict(trial.model.state_dict()), "metrics": result.metrics}
        if result.stop_reason != "preempted":
            state["random"] = torch.rand(3)
            torch.save(state, OUT / f"rank_{context.distributed.rank}.pt")
        if context.distributed.rank == 0:
            sums = type(context.stepper.all_reduce).__name__
            print("DONE", result.stop_reason, result.steps_completed, sums)


if __name__ == "__main__":
    sys.exit(main())
