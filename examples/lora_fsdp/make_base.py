"""Train a small Llama on sums and store it: the base that train.py adapts to differences.

It takes the place of a model that you download. Its config is the model's only source.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data import ALPHABET, Text, make_text

CONFIG = LlamaConfig(
    vocab_size=len(ALPHABET),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
)


def main(output: Path, steps: int) -> None:
    torch.manual_seed(0)
    # So small a model has no work for more.
    torch.set_num_threads(1)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = Text(make_text("+", 4000, seed=0), length=32)
    order = torch.randperm(len(data)).tolist()
    loss = torch.zeros(())
    for step in range(steps):
        chosen = [order[(step * 32 + i) % len(order)] for i in range(32)]
        batch = torch.stack([data[index] for index in chosen])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(output)
    print(f"The base is in {output}: loss {loss.item():.2f} after {steps} steps.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("base"), help="a directory")
    parser.add_argument("--steps", type=int, default=200, help="how long to train")
    main(**vars(parser.parse_args()))
