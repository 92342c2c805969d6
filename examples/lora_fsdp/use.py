"""Add the trained adapters of a checkpoint to their base, and let the model complete a text."""

import argparse
from pathlib import Path

import torch
from lora import add_lora, merge_lora
from transformers import LlamaForCausalLM

from data import ALPHABET, IDS
from paceline import pytorch
from train import ADAPTED, HPARAMS


def main(checkpoint: Path, base: Path, text: str) -> None:
    model = LlamaForCausalLM.from_pretrained(base)
    add_lora(model, ADAPTED, HPARAMS["rank"], HPARAMS["alpha"])
    weights = pytorch.load_weights_from_checkpoint_path(checkpoint)
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    merge_lora(model)
    prompt = torch.tensor([[IDS[character] for character in text]])
    output = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    print("".join(ALPHABET[number] for number in output[0].tolist()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a directory")
    parser.add_argument("--base", type=Path, default=Path("base"), help="what make_base.py wrote")
    parser.add_argument("--text", default="7-2=", help="what to complete")
    main(**vars(parser.parse_args()))
