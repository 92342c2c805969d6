"""Every front door on one rank with a process group, and on several devices in one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from paceline import creators, train


@pytest.fixture
def backend(device: torch.device) -> str:
    """Return what suits ranks with a device of their own."""
    return "nccl" if device.type == "cuda" else "gloo"


@pytest.fixture
def group_of_one(backend: str, tmp_path: Path) -> Iterator[None]:
    """Make a process group of this process alone, as a user may."""
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_trial_trains_in_a_group_of_one(trial_class: Any, fit: Any) -> None:
    assert fit(trial_class, 20).steps_completed == 20


def samples(num: int = 64) -> TensorDataset:
    x = torch.randn(num, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, True))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("task", [None, "regression"])
def test_a_configured_training_trains_in_a_group_of_one(task: str | None) -> None:
    declarative = pytest.importorskip("paceline.declarative")
    config = declarative.TrainingConfig(
        model_class=nn.Linear,
        model_params=parameters_of_a_linear_layer(declarative),
        dataset=samples(),
        pred_names=["y"],
        loss_function=nn.MSELoss(),
        task_type=task,
        learning_rate_per_process=0.05,
        batch_size_per_process=8,
        num_epochs=2,
        scheduler=None,
    )
    trainer = declarative.Trainer(config)
    trainer.build()
    losses = trainer.run_training()["loss"]
    assert losses[-1] < losses[0]


def parameters_of_a_linear_layer(declarative: Any) -> Any:
    import dataclasses

    @dataclasses.dataclass
    class LinearParameters(declarative.ModelParameters):  # type: ignore[misc]
        in_features: int = 4
        out_features: int = 1

    return LinearParameters()


def test_a_train_function_trains_on_one_worker(device: torch.device, backend: str) -> None:
    def function() -> Any:
        import torch
        import torch.distributed as dist

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = train.accelerate(model, optimizer)
        x = torch.randn(64, 4)
        data = torch.utils.data.TensorDataset(x, x.sum(1, True))
        losses = []
        for _ in range(2):
            for x, y in train.prepare_data_loader(torch.utils.data.DataLoader(data, 8)):
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        train.save_checkpoint({"model": model})
        place = str(next(model.parameters()).device)
        return place, dist.get_backend(), losses[-1] < losses[0]

    with train.Trainer(num_workers=1) as trainer:
        assert trainer.run(function) == [(str(device), backend, True)]


def test_creators_train_on_one_worker(device: torch.device, backend: str) -> None:
    def data(config: Any) -> Any:
        import torch

        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, x.sum(1, True))

    def which(*_: Any) -> Any:
        import torch.distributed as dist

        return dist.get_backend()

    trainer = creators.PyTorchTrainer(
        model_creator=lambda config: nn.Linear(4, 1),
        data_creator=data,
        optimizer_creator=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.05),
        loss_creator=nn.MSELoss,
        num_workers=1,
        use_gpu=device.type == "cuda",
        backend="auto",
        dataloader_config={"num_workers": 0},
        batch_size=8,
    )
    try:
        losses = [trainer.train()["train_loss"] for _ in range(2)]
        assert losses[1] < losses[0]
        assert trainer.apply_all_workers(which) == [backend]
        state = trainer.state_dict()
        trainer.load_state_dict(state)
    finally:
        trainer.shutdown()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NOT RUN: needs two GPUs")
def test_data_parallel_trains_on_two_gpus() -> None:
    declarative = pytest.importorskip("paceline.declarative")
    config = declarative.TrainingConfig(
        model_class=nn.Linear,
        model_params=parameters_of_a_linear_layer(declarative),
        dataset=samples(),
        pred_names=["y"],
        loss_function=nn.MSELoss(),
        task_type=None,
        learning_rate_per_process=0.02,
        batch_size_per_process=8,
        num_epochs=2,
        scheduler=None,
    )
    trainer = declarative.Trainer(config)
    trainer.build()
    assert isinstance(trainer.model, nn.DataParallel)
    losses = trainer.run_training()["loss"]
    assert losses[-1] < losses[0]
