"""Adapt a small Llama to other text with LoRA; its layers are divided among the processes."""

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from lora import add_lora, num_trained
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import paceline
from data import Text, make_text
from paceline import pytorch

# Under a master, the hyperparameters and the length come from the experiment's config instead.
HPARAMS = {
    "base": "base",
    "global_batch_size": 32,
    "learning_rate": 0.01,
    "rank": 4,
    "alpha": 8.0,
}


# The layers that get adapters, by the last part of their name.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


class LoRATrial(pytorch.PyTorchTrial):
    """Train additions to the attention of a frozen model."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        base = Path(context.get_hparam("base"))
        model = LlamaForCausalLM.from_pretrained(base)
        add_lora(model, ADAPTED, context.get_hparam("rank"), context.get_hparam("alpha"))
        if context.distributed.rank == 0:
            print("Of the parameters, {} of {} are trained.".format(*num_trained(model)))

        # Checkpoints hold what is trained, and digests of the base. Each layer is gathered as a
        # whole for its forward and backward pass.
        self.model = context.wrap_model(
            model,
            trainable_only=f"the Llama in {base}",
            shard_units=LlamaDecoderLayer,
            gradient_checkpointing=True,
        )
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(trained, lr=context.get_hparam("learning_rate"))
        )

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Tensor]:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer,
            clip_grads=lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        )
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Tensor]:
        return {"validation_loss": self.model(input_ids=batch, labels=batch).loss}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        data = Text(make_text("-", 2000, seed=1), length=32)
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(data, batch_size=size, shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(Text(make_text("-", 256, seed=2), length=32), batch_size=16)


def main(batches: int, resume: str | None) -> None:
    with pytorch.init(HPARAMS, seed=1, resume=resume, data_parallel="fsdp") as context:
        trainer = pytorch.Trainer(LoRATrial(context), context)
        result = trainer.fit(
            max_length=pytorch.Batch(batches),
            validation_period=pytorch.Batch(20),
            checkpoint_period=pytorch.Batch(10),
        )
        if context.distributed.rank == 0 and result.metrics:
            loss = result.metrics["validation_loss"]
            print(f"{result.stop_reason}: {result.steps_completed} batches, loss {loss:.3f}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=paceline.LOG_FORMAT)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200, help="how long to train")
    parser.add_argument("--resume", help="auto, or the directory of a run to go on with")
    main(**vars(parser.parse_args()))
