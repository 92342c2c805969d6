"""What a checkpoint must fit to be gone on with."""

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, TensorDataset

from paceline import core, pytorch
from paceline._training.engine.checkpoints.state_format import load_state, save_state
from paceline._training.engine.lr_schedulers import load_scheduler, scheduler_state
from paceline.pytorch._training_state import TrainingState, position_of, read_state
from paceline.storage import CheckpointCorruptError

Fit = Callable[..., "tuple[Net, pytorch.Result]"]


class Net(pytorch.PyTorchTrial):
    """Two layers; `changes` make it another one than was trained."""

    def __init__(self, context: pytorch.PyTorchTrialContext, **changes: Any) -> None:
        self.context = context
        self.changes = changes
        for layers in changes.get("models", [[nn.Linear(2, 3), nn.Linear(3, 1)]]):
            self.model = context.wrap_model(nn.Sequential(*layers))
        make_optimizer = changes.get("optimizer", lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9))
        self.optimizer = context.wrap_optimizer(make_optimizer(list(self.model.parameters())))
        make_scheduler = changes.get("scheduler", lambda opt: lr_scheduler.StepLR(opt, 1))
        if make_scheduler is not None:
            mode = pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH
            context.wrap_lr_scheduler(make_scheduler(self.optimizer), mode)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"mean": batch[0].mean()}

    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=4)

    def build_validation_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        callbacks: dict[str, pytorch.PyTorchCallback] = self.changes.get("callbacks", {})
        return callbacks


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """Return a function that trains two batches, or goes on from a checkpoint to three.

    `edit` is called with a copy of the checkpoint's directory, which is stored as another one.
    """

    def run(
        checkpoint: str | None = None, edit: Callable[[Path], None] | None = None, **changes: Any
    ) -> tuple[Net, pytorch.Result]:
        storage = tmp_path / "checkpoints"
        with pytorch.init(
            hparams={"global_batch_size": 4}, seed=1, checkpoint_storage=storage
        ) as context:
            if checkpoint is not None and edit is not None:
                checkpoint = stored_again(context.core, checkpoint, edit)
            trial = Net(context, **changes)
            result = pytorch.Trainer(trial, context).fit(
                max_length=pytorch.Batch(2 if checkpoint is None else 3),
                latest_checkpoint=checkpoint,
                aggregation_frequency=changes.get("window", 1),
            )
            return trial, result

    return run


def stored_again(context: core.Context, uuid: str, edit: Callable[[Path], None]) -> str:
    copy = Path("copy")
    context.checkpoint.download(uuid, copy)
    edit(copy)
    return context.checkpoint.upload(copy, {"steps_completed": 2})


def edit_training(path: Path, **changes: Any) -> None:
    file = path / "training.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"models": [[nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)]]},
            r"another model 0: it lacks \['2.bias', '2.weight'\]; it has \['1.bias', '1.weight'\]"
            " besides",
        ),
        (
            {"models": [[nn.Linear(2, 5), nn.Linear(5, 1)]]},
            r"'0.weight' is \[3, 2\] there and \[5, 2\] here, '0.bias' is \[3\] there and \[5\]",
        ),
        (
            {"models": [[nn.Linear(2, 1), *(nn.Linear(1, 1) for _ in range(4))]]},
            r"it lacks \['2.bias', '2.weight', '3.bias', '3.weight', '4.bias'\] and 1 more",
        ),
        (
            {"models": [[nn.Linear(2, 3)], [nn.Linear(2, 1)]]},
            "as many models as are trained here, but it holds 1, and here are 2",
        ),
        (
            {"optimizer": lambda ps: torch.optim.SGD([{"params": [p]} for p in ps], lr=0.1)},
            r"optimizer 0 .* they hold \[4\] parameters, and these hold \[1, 1, 1, 1\]",
        ),
        (
            {"optimizer": lambda ps: torch.optim.Adam(ps)},
            "optimizer 0 must be of the same type .* it is a SGD, and here is a Adam",
        ),
        ({"scheduler": None}, "as many schedulers as .* holds 1, and here are 0"),
        (
            {"scheduler": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9)},
            "scheduler 0 must be of the same type .* is a StepLR, .* is a ExponentialLR",
        ),
    ],
)  # fmt: skip
def test_checkpoint_of_another_trial_tells_what_differs(
    fit: Fit, changes: dict[str, Any], message: str
) -> None:
    _, result = fit()
    with pytest.raises(pytorch.CheckpointMismatchError, match=message):
        fit(result.checkpoints[-1], **changes)


@pytest.mark.parametrize("is_truncated", [False, True])
def test_damaged_file_is_named_before_anything_is_restored(
    fit: Fit, tmp_path: Path, is_truncated: bool
) -> None:
    _, result = fit()
    path = tmp_path / "checkpoints" / result.checkpoints[-1] / "model_0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data[:-8] if is_truncated else data)
    reason = r"\d+ bytes instead of \d+" if is_truncated else "other content of the same size"
    message = rf"'model_0.safetensors' was altered \({reason}\).* Hint: use another checkpoint"
    with pytest.raises(CheckpointCorruptError, match=message):
        fit(result.checkpoints[-1])


def test_file_that_was_stored_unreadable_is_named(fit: Fit) -> None:
    _, result = fit()

    def edit(path: Path) -> None:
        (path / "optimizer_0.json").write_text('{"state": ')

    with pytest.raises(CheckpointCorruptError, match="optimizer_0.json .* must be whole"):
        fit(result.checkpoints[-1], edit)


def test_checkpoint_of_another_program_is_refused(fit: Fit) -> None:
    _, result = fit()

    def edit(path: Path) -> None:
        (path / "training.json").unlink()

    with pytest.raises(pytorch.CheckpointMismatchError, match="has no training.json"):
        fit(result.checkpoints[-1], edit)


def test_another_number_of_ranks_takes_up_the_gradients_of_all(fit: Fit, tmp_path: Path) -> None:
    """The checkpoint lies after two batches of a window of three, as if two ranks had stored it."""
    _, result = fit(window=3)
    path = shutil.copytree(
        tmp_path / "checkpoints" / result.checkpoints[-1],
        tmp_path / "of_two",
        copy_function=shutil.copyfile,
    )
    edit_training(path, world_size=2)
    for file in [*path.glob("rank_0*")]:
        shutil.copyfile(file, path / file.name.replace("0", "1"))
    alike = [read_state(path, rank, 2)["rank"]["gradients"] for rank in (0, 1)]
    chief, *others = (read_state(path, rank, 3) for rank in range(3))
    for both, first, second in zip(chief["gradients"]["gradients"], *alike, strict=True):
        assert torch.equal(both, first + second)
        assert first.any()
    assert not any("gradients" in other for other in others)
    assert all(each["rank"]["gradients"] is None for each in (chief, *others))


def test_ranks_that_were_not_there_draw_numbers_of_their_own(fit: Fit, tmp_path: Path) -> None:
    _, result = fit()
    path = tmp_path / "checkpoints" / result.checkpoints[-1]
    drawn = []
    for rank in (0, 1, 2, 1):
        parts = read_state(path, rank, 3)
        stepper: Any = SimpleNamespace(grid=SimpleNamespace(data_rank=rank))
        nothing: Any = None
        state = TrainingState(stepper, [], nothing, rank)
        state.restore_generators(parts, position_of(parts).batches)
        drawn.append(torch.rand(()).item())
    assert len(set(drawn)) == 3
    assert drawn[1] == drawn[3]


def test_what_callbacks_kept_is_given_back_or_missed(
    fit: Fit, caplog: pytest.LogCaptureFixture
) -> None:
    class Counting(pytorch.PyTorchCallback):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count + 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    _, result = fit(callbacks={"old": Counting(), "kept": Counting()})
    new, kept = Counting(), Counting()
    with caplog.at_level(logging.WARNING):
        fit(result.checkpoints[-1], callbacks={"new": new, "kept": kept})
    assert (kept.count, new.count) == (1, 0)
    assert "has no state of the callback 'new'" in caplog.text
    assert "has a state of 'old', which is no callback now" in caplog.text


def test_buffers_that_a_model_does_not_hand_out_are_kept(fit: Fit) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("num_calls", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            return x * self.weight

    _, result = fit(models=[[Counter()]])
    trial, _ = fit(result.checkpoints[-1], models=[[Counter()]])
    assert trial.model[0].num_calls == 3


class Cached(nn.Module):
    """A layer that makes a buffer with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", torch.zeros(0, dtype=torch.float64), persistent=False)
        self.num_made = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not len(self.cache):
            self.num_made += 1
            self.cache = torch.full((2,), 3.0, dtype=torch.float64)
        return x * self.weight * self.cache


def test_buffer_that_has_grown_is_put_back(fit: Fit) -> None:
    _, result = fit(models=[[Cached()]])
    layer = Cached()
    fit(result.checkpoints[-1], models=[[layer]])
    assert layer.num_made == 0
    assert torch.equal(dict(layer.named_buffers())["cache"], torch.full((2,), 3.0).double())


def test_model_whose_shapes_come_with_the_first_batch_is_gone_on_with(fit: Fit) -> None:
    def lazy() -> list[nn.Module]:
        return [nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 1)]

    trained, result = fit(models=[lazy()])
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    trial, resumed = fit(result.checkpoints[-1], models=[lazy()])
    assert resumed.steps_completed == 3
    after = trial.model.state_dict()
    assert after["1.num_batches_tracked"] == before["1.num_batches_tracked"] + 1
    # One more step of a small rate and little momentum.
    assert torch.allclose(after["0.weight"], before["0.weight"], atol=0.1)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 8]),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, scale_fn=lambda step: 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LambdaLR(o, lambda step: (step + 1) / 4), lr_scheduler.StepLR(o, 2)],
        [3],
    ),
    "SequentialLR of a MultiStepLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [1, 4])], [6]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=6),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> list[float]:
        seen = []
        for _ in range(num_steps):
            optimizer.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    with warnings.catch_warnings():
        # SequentialLR steps its own schedulers in a way that torch itself warns of.
        warnings.simplefilter("ignore")
        optimizer, scheduler = make()
        rates(optimizer, scheduler, 4)
        save_state([optimizer.state_dict(), scheduler_state(scheduler)], tmp_path, "x")
        expected = rates(optimizer, scheduler, 8)
        optimizer, scheduler = make()
        optimizer_state, state = load_state(tmp_path, "x")
        optimizer.load_state_dict(optimizer_state)
        load_scheduler(scheduler, state)
        assert rates(optimizer, scheduler, 8) == expected
    if name == "MultiStepLR":
        assert sorted(scheduler.milestones.elements()) == [2, 5, 5, 8]
