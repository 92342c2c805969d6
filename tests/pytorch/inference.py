"""A batch inference; run by test_batch_inference.py in several processes.

Environment: KILL ("RANK BATCH", where a rank kills itself), LOADERS (processes of each loader).
"""

import os
import signal
from pathlib import Path
from typing import Any

import torch

from paceline import pytorch
from paceline.pytorch._batch_inference import TorchBatchProcessorContext

NUM_SAMPLES = 61
BATCH_SIZE = 3


class Numbers(torch.utils.data.Dataset[Any]):
    """Samples that are their own numbers."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Processor(pytorch.TorchBatchProcessor):
    """Writes the samples of some batches to a file, and each batch to a log."""

    def __init__(self, context: TorchBatchProcessorContext) -> None:
        self.context = context
        self.rows: list[str] = []
        self.total = context.wrap_reducer(lambda values: [sum(values), len(values)], "total")

    def process_batch(self, batch: Any, batch_idx: int) -> None:
        rank = self.context.get_distributed_rank()
        assert batch.tolist() == list(range(NUM_SAMPLES))[BATCH_SIZE * batch_idx :][:BATCH_SIZE]
        if os.environ.get("KILL") == f"{rank} {batch_idx}":
            os.kill(os.getpid(), signal.SIGKILL)
        self.total.update(int(batch.sum()))
        self.rows += map(str, batch.tolist())
        with Path("log").open("a") as file:
            file.write(f"{batch_idx} {rank} of {self.context.get_distributed_size()}\n")

    def on_checkpoint_start(self) -> None:
        path = self.context.output_path() / "rows"
        assert not path.exists()
        path.write_text("\n".join(self.rows))
        self.rows = []

    def on_finish(self) -> None:
        if self.context.distributed.rank == 0:
            Path("finished").write_text("yes")


if __name__ == "__main__":
    is_done = pytorch.torch_batch_process(
        Processor,
        Numbers(),
        BATCH_SIZE,
        checkpoint_interval=2,
        dataloader_kwargs={"num_workers": int(os.environ.get("LOADERS", "0"))},
        output_dir="results",
    )
    assert is_done
