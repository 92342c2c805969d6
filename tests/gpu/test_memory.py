"""Memory of the device: given back after a training, after an error, and between trainings."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import pytorch, train

# The hidden layer's weights take 34 MB, and with gradients, moments and values four times as much.
WIDTH = 2**18
SMALL = 2**20
ON_GPU_ALONE = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: needs a GPU")


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@ON_GPU_ALONE
@pytest.mark.usefixtures("no_search_for_cycles")
def test_memory_is_given_back_after_each_training(
    trial_class: Any, fit: Callable[..., Any]
) -> None:
    # The first products of a process take memory that stays.
    fit(trial_class, 3)
    before, peaks = allocated(), []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        fit(lambda context: trial_class(context, WIDTH), 3, checkpoint_period=pytorch.Batch(2))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert allocated() <= before + SMALL
    assert min(peaks) > 64 * SMALL
    assert max(peaks) < 1.1 * min(peaks)


@pytest.mark.usefixtures("no_search_for_cycles")
def test_a_step_without_room_says_so_and_the_next_trial_runs(
    device: torch.device,
    trial_class: Any,
    fit: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    is_cuda = device.type == "cuda"
    fit(trial_class, 3)
    before = allocated() if is_cuda else 0
    if is_cuda:
        # Other tests use the device at the same time.
        torch.cuda.set_per_process_memory_fraction(0.05, device)
        request.addfinalizer(lambda: torch.cuda.set_per_process_memory_fraction(1.0, device))

    hoarded: list[weakref.ref[torch.Tensor]] = []

    class Greedy(trial_class):  # type: ignore[misc]
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            hoard = []
            while batch_idx == 2:
                hoard.append(torch.empty(2**31 if is_cuda else 1, dtype=torch.uint8, device=device))
                hoarded.append(weakref.ref(hoard[-1]))
                if not is_cuda:
                    raise torch.OutOfMemoryError("CUDA out of memory, as it were.")
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
        fit(Greedy, 5)
    assert any("train_batch" in entry.name for entry in caught.traceback)
    del caught
    assert [one() for one in hoarded] == [None] * len(hoarded) != []
    if is_cuda:
        assert allocated() <= before + SMALL
    assert fit(trial_class, 5).steps_completed == 5


@ON_GPU_ALONE
def test_a_worker_gives_memory_back_between_functions() -> None:
    def hoard(config: dict[str, Any]) -> int:
        import torch
        from torch import nn

        before = torch.cuda.memory_allocated()
        model = nn.Linear(4096, 4096).cuda()
        model, optimizer = train.accelerate(model, torch.optim.Adam(model.parameters()))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model(torch.ones(1, 4096, device="cuda")).sum().backward()
        optimizer.step()
        if config["fails"]:
            raise torch.OutOfMemoryError("CUDA out of memory, as it were.")
        return before

    with train.Trainer(num_workers=1) as trainer:
        assert trainer.run(hoard, {"fails": False}) == [0]
        with pytest.raises(torch.OutOfMemoryError):
            trainer.run(hoard, {"fails": True})
        # One model's weights: what the first products have taken stays.
        assert trainer.run(hoard, {"fails": False})[0] < 2**26


@ON_GPU_ALONE
def test_a_training_on_the_cpu_leaves_the_gpu_alone(run_script: Callable[[str], str]) -> None:
    """A process that has looked at a GPU holds hundreds of megabytes of it."""
    code = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline import pytorch


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(4, 1))
        adam = torch.optim.Adam(self.model.parameters())
        self.optimizer = context.wrap_optimizer(adam)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"loss": self.model(batch[0]).mean()}

    def build_training_data_loader(self):
        return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2, shuffle=True)

    build_validation_data_loader = build_training_data_loader


with pytorch.init(hparams={"global_batch_size": 2}, seed=1, device="cpu") as context:
    pytorch.Trainer(Trial(context), context).fit(
        max_length=pytorch.Epoch(2), checkpoint_period=pytorch.Batch(3)
    )
print("used" if torch.cuda.is_initialized() else "left alone")
"""
    assert run_script(code).endswith("left alone\n")
