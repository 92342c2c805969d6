"""Train on files of more bytes than each worker may keep in memory."""

import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from paceline import data, train

FILES = Path("data")
NUM_FILES, ROWS, FEATURES = 16, 25_000, 64
MEMORY_BYTES = 16 * 1024 * 1024


def write_files() -> None:
    """Write about 100 MB: vectors, and the sum of each as what is to be learned."""
    FILES.mkdir(exist_ok=True)
    random = np.random.default_rng(1)
    for number in range(NUM_FILES):
        x = random.standard_normal((ROWS, FEATURES), dtype=np.float32)
        columns = {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), FEATURES),
            "y": pa.array(x.sum(1)),
        }
        pq.write_table(pa.table(columns), FILES / f"{number:03}.parquet", row_group_size=5_000)


def memory_mb() -> float:
    """Return the largest memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fit(config: dict[str, int]) -> tuple[float, float]:
    """Learn the sum of a vector; return the last loss and the memory that reading took."""
    before_mb = memory_mb()
    model = train.prepare_model(nn.Linear(FEATURES, 1))
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    loader = train.get_dataset().get_shard().to_torch(batch_size=500)
    stored = train.load_checkpoint() or {"epoch": 0}
    if "model" in stored:
        model.load_state_dict(stored["model"])
    loss = torch.zeros(())
    for epoch in range(stored["epoch"], config["epochs"]):
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            loss.backward()
            optimizer.step()
            if step % 100 == 99:
                # A run that is killed goes on from here, within the epoch.
                train.save_checkpoint(model=model, epoch=epoch)
        train.report(epoch=epoch, loss=loss.item())
    return loss.item(), memory_mb() - before_mb


if __name__ == "__main__":
    if not FILES.exists():
        write_files()
    size_mb = sum(path.stat().st_size for path in FILES.iterdir()) / 1e6
    files = data.read(FILES, memory_bytes=MEMORY_BYTES).shuffle()
    with train.Trainer(num_workers=2) as trainer:
        results = trainer.run(
            fit, config={"epochs": 2}, dataset=files, callbacks=[train.PrintCallback()]
        )
    for rank, (loss, memory) in enumerate(results):
        print(
            f"rank {rank}: loss {loss:.6f}, {memory:.0f} MB of memory for {size_mb:.0f} MB of files"
        )
