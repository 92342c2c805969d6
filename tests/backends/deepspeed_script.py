"""Train a small model by DeepSpeed; the environment says how, and what goes wrong."""

import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn

from paceline import pytorch
from paceline.pytorch import deepspeed as pds
from paceline.pytorch._loop_agreement import RankAgreement

STAGE = int(os.environ.get("STAGE", 2))
STEPS = int(os.environ.get("STEPS", 8))
NUM_MICRO = int(os.environ.get("NUM_MICRO", 2))
RANK = int(os.environ.get("RANK", 0))
FAULT_RANK = int(os.environ.get("FAULT_RANK", -1))
FAULT_BATCH = int(os.environ.get("FAULT_BATCH", 5))
OUT = Path(os.environ["OUT"])
# A fault happens once.
MARK = OUT / "fault"

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": NUM_MICRO,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": STAGE},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    **({"bf16": {"enabled": True}} if "BF16" in os.environ else {}),
}
DTYPE = torch.bfloat16 if "BF16" in os.environ else torch.float32


NUMBERS = torch.arange(4.0 * 50).reshape(50, 4) / 100
# Without anything random, for a comparison with a loop without Paceline.
IS_PLAIN = "PLAIN" in os.environ


def make_engine():
    torch.manual_seed(1)
    # A norm of batches has buffers that differ from rank to rank, and takes no bfloat16.
    norm = nn.LayerNorm(8) if "BF16" in os.environ else nn.BatchNorm1d(8)
    dropout = nn.Dropout(0.0 if IS_PLAIN else 0.2)
    model = nn.Sequential(nn.Linear(4, 8), norm, dropout, nn.Tanh(), nn.Linear(8, 2))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    return engine


class Trial(pds.DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        self.engine = context.wrap_model_engine(make_engine())

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if RANK == FAULT_RANK and batch_idx == FAULT_BATCH and not MARK.exists():
            MARK.touch()
            os.kill(os.getpid(), getattr(signal, os.environ.get("FAULT", "SIGKILL")))
            # A rank that lives on looks for signals after this batch.
            time.sleep(4 * RankAgreement.look_interval_s)
        (numbers,) = self.context.to_device(next(dataloader_iter))
        loss = self.engine(numbers.to(DTYPE)).float().pow(2).mean()
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss.detach(), "noise": torch.rand(())}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        (numbers,) = next(dataloader_iter)
        return {"validation_loss": self.engine(numbers.to(DTYPE)).float().pow(2).mean()}

    def build_training_data_loader(self):
        data = torch.utils.data.TensorDataset(NUMBERS)
        size = self.context.get_train_micro_batch_size_per_gpu()
        return torch.utils.data.DataLoader(data, batch_size=size, shuffle=not IS_PLAIN)

    def build_validation_data_loader(self):
        numbers = torch.arange(4.0 * 14).reshape(14, 4) / 100
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(numbers), batch_size=2)


def full_weights(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=STAGE == 3):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def train_without_paceline():
    deepspeed.init_distributed("gloo")
    engine, world_size = make_engine(), int(os.environ["WORLD_SIZE"])
    for step in range(STEPS):
        for micro in range(NUM_MICRO):
            first = 2 * ((step * world_size + RANK) * NUM_MICRO + micro)
            loss = engine(NUMBERS[first : first + 2]).pow(2).mean()
            engine.backward(loss)
            engine.step()
    torch.save({"weights": full_weights(engine)}, OUT / f"bare_{RANK}.pt")


def main():
    if "BARE" in os.environ:
        train_without_paceline()
    with pds.init(seed=3, name="ds", resume=os.environ.get("RESUME")) as context:
        trial = Trial(context)
        trainer = pds.Trainer(trial, context)
        result = trainer.fit(
            max_length=pytorch.Batch(STEPS),
            checkpoint_period=pytorch.Batch(2),
            validation_period=pytorch.Batch(3),
            reporting_period=pytorch.Batch(1),
            metric="validation_loss",
            keep_latest=2,
        )
        weights = full_weights(trial.engine)
        buffers = {name: value.clone() for name, value in trial.engine.module.named_buffers()}
        state = {"weights": weights, "buffers": buffers, "metrics": result.metrics}
        if result.stop_reason != "preempted":
            state["random"] = torch.rand(3)
            torch.save(state, OUT / f"rank_{context.distributed.rank}.pt")
        if context.distributed.rank == 0:
            (OUT / "port").write_text(os.environ.get("MASTER_PORT", ""))
            print("DONE", result.stop_reason, result.steps_completed, len(result.checkpoints))
            print("RUN", result.run_dir)


if __name__ == "__main__":
    sys.exit(main())
