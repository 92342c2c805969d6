"""TRL's SFTTrainer on a small GPT-2 with dropout, resumed from its last checkpoint."""

import os

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = {f"w{number}": number for number in range(62)} | {"<pad>": 62, "<eos>": 63}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
    pad_token="<pad>",
    eos_token="<eos>",
)
rows = [[(7 * row + 3 * place) % 62 for place in range(16)] for row in range(256)]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
)
arguments = SFTConfig(
    "out",
    max_steps=48,
    per_device_train_batch_size=8,
    save_steps=8,
    logging_steps=1,
    max_length=16,
    bf16=False,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = SFTTrainer(
    model,
    args=arguments,
    train_dataset=Dataset.from_dict({"input_ids": rows}),
    processing_class=tokenizer,
)
last = get_last_checkpoint("out") if os.path.isdir("out") else None
trainer.train(resume_from_checkpoint=last)
