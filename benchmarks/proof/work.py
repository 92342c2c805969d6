"""The work that every way does: a model of 25 million parameters, real text, a log of steps."""

import json
import os
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

LENGTH = 128  # tokens of a sample
BATCH_SIZE = 4  # samples of one rank
WIDTH = int(os.environ.get("PROOF_WIDTH", "512"))
NUM_LAYERS = int(os.environ.get("PROOF_LAYERS", "8"))
NUM_STEPS = int(os.environ.get("PROOF_STEPS", "300"))
CHECKPOINT_PERIOD = int(os.environ.get("PROOF_CHECKPOINT_PERIOD", "20"))  # steps
DIRECTORY = Path(os.environ.get("PROOF_DIRECTORY", "."))


class Text(Dataset[Tensor]):
    """The sources of Python's standard library, byte by byte; a sample has `LENGTH + 1` bytes."""

    def __init__(self) -> None:
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.data = torch.frombuffer(
            bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8
        )

    def __len__(self) -> int:
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index * LENGTH : (index + 1) * LENGTH + 1].long()


class Transformer(nn.Module):
    """Predicts the next byte; takes [batch, length] of bytes and gives [batch, length, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 8, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens) + self.position
        output: Tensor = self.output(self.layers(hidden, mask=mask, is_causal=True))
        return output


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy of the next byte, a scalar."""
    output = model(batch[:, :-1])
    return functional.cross_entropy(output.flatten(0, 1), batch[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that every way uses."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def batch_of(text: Text, step: int, rank: int) -> Tensor:
    """Return the samples of one rank at one step, drawn from the step's number alone."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    indices = torch.randint(len(text), (BATCH_SIZE,), generator=generator).tolist()
    return torch.stack([text[index] for index in indices])


class StepLog:
    """Appends one line for each step that is executed, and says which process this rank is."""

    def __init__(
        self, rank: int, directory: Path = DIRECTORY, *, file_of: int | None = None
    ) -> None:
        torch.set_num_threads(1)
        mark = directory / f"rank-{rank}.pid"
        beside = mark.with_suffix(f".{os.getpid()}")
        beside.write_text(str(os.getpid()))
        os.replace(beside, mark)
        number = rank if file_of is None else file_of
        self._file = (directory / f"steps-{number}.jsonl").open("a", buffering=1)

    def __call__(self, step: int, loss: Tensor, num_ranks: int = 2) -> None:
        """Log that step number `step` was executed just now, with its loss to the last bit."""
        line = {"step": step, "end": time.time(), "pid": os.getpid(), "loss": float(loss).hex(),
                "ranks": num_ranks}  # fmt: skip
        self._file.write(json.dumps(line) + "\n")
