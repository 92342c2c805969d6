"""Data sets of Ray Data are split to the workers of a run on a Ray cluster."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from paceline import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Ray Data warns of its own settings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_ROWS = 101


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Ray Data leaves threads of its own."""


@pytest.fixture
def ray_dataset(ray_cluster: Any) -> Any:
    """Return a data set of Ray with one column `id`."""
    data = pytest.importorskip("ray.data", reason="NOT TESTED: needs pip install 'ray[data]'")
    return data.range(NUM_ROWS)


def read(config: dict[str, Any]) -> Any:
    """Train on two epochs, and return the rows of each and the weight."""
    rank = train.world_rank()
    died = Path(config["died"])
    loader = train.get_dataset().get_shard().to_torch(batch_size=16)
    model = train.prepare_model(nn.Linear(1, 1, bias=False))
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    state = train.load_checkpoint()
    epochs = []
    for epoch in range(0 if state is None else state["epoch"], 2):
        rows = []
        for batch in loader:
            rows += batch["id"].tolist()
            loss = model(batch["id"].float()[:, None] / NUM_ROWS).mean()
            optimizer.zero_grad()
            train.backward(loss)
            optimizer.step()
            if config["victim"] == rank and epoch == 1 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        epochs.append(rows)
        train.save_checkpoint(epoch=epoch + 1)
    return epochs, model.weight.item()


@pytest.mark.parametrize("victim", [None, 0, 1])
def test_workers_get_disjoint_rows_of_each_epoch(
    ray_dataset: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, victim: int | None
) -> None:
    config = {"victim": victim, "died": str(tmp_path / "died")}
    with train.Trainer(num_workers=2, cluster="ray", run_dir=tmp_path / "run") as trainer:
        results = trainer.run(read, config, dataset=ray_dataset)
    assert results.num_restarts == (0 if victim is None else 1)
    # All ranks have taken the same steps on equally many rows.
    assert results[0][1] == results[1][1]
    num_epochs = {len(epochs) for epochs, _ in results}
    assert len(num_epochs) == 1
    for parts in zip(*(epochs for epochs, _ in results), strict=True):
        assert [len(rows) for rows in parts] == [50, 50]
        assert len({row for rows in parts for row in rows}) == 100
    assert "order can differ from run to run" in caplog.text


def test_workers_without_ray_cannot_read_it(ray_dataset: Any) -> None:
    trainer = train.Trainer(num_workers=2, cluster="local")
    with pytest.raises(TypeError, match=r'Trainer\(cluster="ray"\)'):
        trainer.run(read, dataset={"train": ray_dataset})
