"""One trainer of creators, called by several threads at once."""

import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.creators import PyTorchTrainer

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(iterator: Any) -> dict[str, Any]:
    time.sleep(0.05)
    return {"num": sum(1 for _ in iterator)}


def test_passes_of_two_threads_run_one_after_the_other(tmp_path: Path) -> None:
    said: list[Any] = []
    with PyTorchTrainer(
        model_creator=lambda config: nn.Linear(1, 1),
        data_creator=lambda config: TensorDataset(torch.randn(8, 1), torch.randn(8, 1)),
        optimizer_creator=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        train_function=train,
        batch_size=4,
        num_workers=2,
        run_dir=tmp_path / "run",
    ) as trainer:
        begin = threading.Barrier(2)

        def call() -> None:
            begin.wait()
            for _ in range(3):
                try:
                    told = trainer.train()
                    said.append((told["num"], told["epoch"]))
                    assert trainer.state_dict()
                except Exception as error:
                    said.append(error)

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(said) == [(2, epoch) for epoch in range(1, 7)]
