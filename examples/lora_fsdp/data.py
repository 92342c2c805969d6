"""Text that is made here, as characters: sums such as ``12+7=19``."""

import random
import string

import torch
from torch.utils.data import Dataset

ALPHABET = string.digits + string.ascii_lowercase + "+-= \n"
IDS = {character: number for number, character in enumerate(ALPHABET)}


def make_text(operator: str, num_lines: int, seed: int) -> str:
    """Return lines such as ``12+7=19``; the operator is ``+`` or ``-``."""
    drawn = random.Random(seed)
    lines = []
    for _ in range(num_lines):
        a, b = drawn.randrange(20), drawn.randrange(20)
        result = a + b if operator == "+" else a - b
        lines.append(f"{a}{operator}{b}={result}\n")
    return "".join(lines)


class Text(Dataset[torch.Tensor]):
    """Pieces of a text, of equal length, as numbers of characters: int64 tensors [length]."""

    def __init__(self, text: str, length: int) -> None:
        ids = torch.tensor([IDS[character] for character in text])
        self._pieces = ids[: len(ids) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._pieces[index]
