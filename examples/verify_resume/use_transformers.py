"""Transformers' Trainer on a small GPT-2 with dropout, resumed from its last checkpoint."""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

set_seed(0)
tokens = torch.randint(0, 64, (256, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
)
arguments = TrainingArguments(
    "out",
    max_steps=48,
    per_device_train_batch_size=8,
    save_steps=8,
    logging_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 1,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
last = get_last_checkpoint("out") if os.path.isdir("out") else None
Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=last)
