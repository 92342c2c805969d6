"""Trainers of creators with real workers."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from paceline.creators import (
    BATCH_SIZE,
    CheckpointCorruptError,
    NonFiniteError,
    PyTorchTrainer,
    StateFormatError,
)
from paceline.storage import storage_from

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))
Same = Callable[[Any, Any], bool]


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers stay from test to test."""


def model_creator(config: dict[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))


def data_creator(config: dict[str, Any]) -> Any:
    size = config.get(BATCH_SIZE, 4)
    return DataLoader(DATA, batch_size=size, shuffle=True), DataLoader(DATA, batch_size=size)


def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.01), momentum=0.9)


def scheduler_creator(optimizer: Any, config: dict[str, Any]) -> Any:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def make(**given: Any) -> PyTorchTrainer:
    creators = {
        "model_creator": model_creator,
        "data_creator": data_creator,
        "optimizer_creator": optimizer_creator,
        "loss_creator": nn.MSELoss,
    }
    return PyTorchTrainer(**{**creators, **given})


@pytest.fixture(scope="module")
def trainer() -> Iterator[PyTorchTrainer]:
    """Return a trainer of two workers, which stay from test to test."""
    before = set(threading.enumerate())
    with make(num_workers=2) as trainer:
        yield trainer
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


@pytest.fixture(scope="module")
def beginning(trainer: PyTorchTrainer) -> dict[str, Any]:
    """Return the state before any training."""
    return trainer.state_dict()


@pytest.fixture
def fresh(trainer: PyTorchTrainer, beginning: dict[str, Any]) -> PyTorchTrainer:
    """Return the trainer as it was at first."""
    trainer.load_state_dict(beginning)
    return trainer


def test_passes_train_and_their_statistics_cover_all_workers(fresh: PyTorchTrainer) -> None:
    """Of 50 samples in batches of 2 * 4, the last two are all of the first worker."""
    first = fresh.train()
    keys = ["epoch", "batch_count", "num_samples", "train_loss", "last_train_loss"]
    assert list(first) == keys
    assert [first[key] for key in keys[:3]] == [1, 7, 50]
    told = [fresh.train() for _ in range(5)]
    assert [statistics["epoch"] for statistics in told] == [2, 3, 4, 5, 6]
    assert told[-1]["train_loss"] < first["train_loss"] / 2

    by_rank = fresh.validate(reduce_results=False)
    assert [statistics["num_samples"] for statistics in by_rank] == [26, 24]
    whole = fresh.validate(profile=True)
    model = fresh.get_model().eval()
    expected = nn.functional.mse_loss(model(X), DATA.tensors[1]).item()
    assert whole["val_loss"] == pytest.approx(expected)
    assert whole["num_samples"] == 50
    assert "val_accuracy" not in whole
    assert set(whole["profile"]) == {"mean_validation_s", "mean_fwd_s"}


def test_partial_passes_end_in_the_bits_of_whole_ones(
    fresh: PyTorchTrainer, beginning: dict[str, Any], are_same: Same
) -> None:
    for _ in range(2):
        fresh.train()
    whole = fresh.state_dict()
    fresh.load_state_dict(beginning)
    for num_steps in (3, 6, None):
        fresh.train(num_steps=num_steps)
    assert are_same(fresh.state_dict(), whole)
    assert not are_same(beginning, whole)


def test_a_stored_state_goes_on_to_the_same_bits(
    fresh: PyTorchTrainer, are_same: Same, tmp_path: Path
) -> None:
    fresh.train(num_steps=3)
    path = str(tmp_path / "checkpoint")
    assert fresh.save(path) == path
    # Whichever test has the first pass has the run too.
    assert {entry.name for entry in tmp_path.iterdir()} - {"paceline_runs"} == {"checkpoint"}
    fresh.train(num_steps=2)
    fresh.train()
    straight = fresh.state_dict()
    assert straight["num_steps"] == 7
    fresh.restore(path)
    fresh.train(num_steps=2)
    # Validating in between changes nothing.
    fresh.validate()
    fresh.train()
    assert are_same(fresh.state_dict(), straight)
    stored = torch.load(path, weights_only=True)
    plain = model_creator({})
    plain.load_state_dict(stored["models"][0])
    assert stored["place"]["next_batch"] == 3


def test_a_state_in_a_bucket_is_gone_on_from_in_the_same_bits(
    fresh: PyTorchTrainer, are_same: Same, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.train(num_steps=2)
    for path in (None, ""):
        with pytest.raises(
            ValueError, match="`path` must be a file or a URL, unless the trainer has"
        ):
            fresh.save(path)
    # As `checkpoint_storage=` of the constructor does, which would start other workers.
    monkeypatch.setattr(fresh, "_storage", storage_from(s3))
    places = [fresh.save(), fresh.save(f"{s3}/named")]
    assert storage_from(s3).list() == sorted(place.rpartition("/")[2] for place in places)
    fresh.train(num_steps=2)
    straight = fresh.state_dict()
    for place in places:
        fresh.load(place)
        fresh.train(num_steps=2)
        assert are_same(fresh.state_dict(), straight)
    fresh.train(num_steps=1, checkpoint=places[0])


def test_a_bad_file_and_another_model_are_refused(
    fresh: PyTorchTrainer, are_same: Same, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    fresh.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointCorruptError, match="must be a whole file that `save`"):
        fresh.load(path)
    with pytest.raises(FileNotFoundError):
        fresh.load(tmp_path / "nothing")
    torch.save({"weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"but has the keys \['weight'\]"):
        fresh.load(path)
    with pytest.raises(TypeError, match="A state must be a dictionary, but got list"):
        fresh.load_state_dict([])
    state = fresh.state_dict()
    with pytest.raises(ValueError, match="must have version 4, but has 2"):
        fresh.load_state_dict({**state, "version": 2})
    with pytest.raises(ValueError, match="as many models as are trained here, but it holds 2"):
        fresh.load_state_dict({**state, "models": state["models"] * 2})
    # Its workers have ended with the error, and begin again from where they were.
    assert are_same(fresh.state_dict(), state)
    assert fresh.train()["num_samples"] == 50


def test_an_error_of_a_user_ends_no_training(fresh: PyTorchTrainer, are_same: Same) -> None:
    fresh.train()
    state = fresh.state_dict()

    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        fresh.apply_all_workers(fail)
    assert fresh.apply_all_workers(lambda: os.environ["RANK"]) == ["0", "1"]
    assert are_same(fresh.state_dict(), state)


def test_what_a_pass_is_asked_for_is_checked(fresh: PyTorchTrainer) -> None:
    with pytest.raises(TypeError, match="`num_steps` must be an integer, but got 1.5"):
        fresh.train(num_steps=1.5)
    with pytest.raises(ValueError, match="`num_steps` must be at least 0, but got -1"):
        fresh.validate(num_steps=-1)
    with pytest.raises(ValueError, match="`max_retries` must be at least 0, but got -1"):
        fresh.train(max_retries=-1)
    with pytest.raises(TypeError, match="`info` must be a dictionary, but got list"):
        fresh.train(info=[])
    assert fresh.train(num_steps=0)["batch_count"] == 0
    assert fresh.validate(num_steps=2)["batch_count"] == 2


# ---- creators and functions ----------------------------------------------------------------------


class Two(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)


def several(config: dict[str, Any]) -> Any:
    return Two(), Two()


def optimizers_of(models: Any, config: dict[str, Any]) -> Any:
    return [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def schedulers_of(optimizers: Any, config: dict[str, Any]) -> Any:
    return [StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]


def train_all(
    config: Any, models: Any, train_iterator: Any, criterion: Any, optimizers: Any, info: Any,
    schedulers: Any = None,
) -> dict[str, Any]:  # fmt: skip
    losses: dict[str, Any] = {}
    for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        for x, y in train_iterator:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        schedulers[index].step()
        losses[f"model_{index}"] = {"loss": loss}
    return {**losses, "epoch_idx": info["epoch_idx"], "told": info["told"]}


def validate_all(config: Any, model: Any, val_iterator: Any, criterion: Any) -> dict[str, Any]:
    assert not any(each.training for each in model)
    with torch.no_grad():
        losses = [criterion(model[0](x), y) for x, y in val_iterator]
    return {"loss": sum(losses) / len(losses)}


def hook(runner: Any) -> None:
    import torch.distributed as dist

    assert not dist.is_initialized()
    os.environ["HOOKED"] = f"{runner.rank} of {runner.world_size}"


def test_several_models_train_by_a_function_of_the_user(are_same: Same) -> None:
    with make(
        model_creator=several,
        optimizer_creator=optimizers_of,
        scheduler_creator=schedulers_of,
        train_function=train_all,
        validation_function=validate_all,
        initialization_hook=hook,
        num_replicas=2,
    ) as trainer:
        told = [trainer.train(info={"told": 7}) for _ in range(2)]
        assert trainer.apply_all_workers(lambda: os.environ["HOOKED"]) == ["0 of 2", "1 of 2"]
        validated = trainer.validate()
        state = trainer.state_dict()
        models = trainer.get_model()
    assert [each["epoch_idx"] for each in told] == [0.0, 1.0]
    assert told[1]["told"] == 7
    # A second turn over the same pass is no more data.
    assert told[1]["num_samples"] == 50
    assert told[1]["model_0"]["loss"] < told[0]["model_0"]["loss"]
    assert validated["loss"] < 5
    assert [type(model) for model in models] == [Two, Two]
    assert are_same(dict(models[1].state_dict()), state["models"][1])
    assert [each["last_epoch"] for each in state["schedulers"]] == [2, 2]


@pytest.mark.slow
def test_several_models_need_a_function() -> None:
    with make(model_creator=several, optimizer_creator=optimizers_of) as trainer:
        with pytest.raises(
            ValueError, match="`train_function` must be given with several .* 2 mod"
        ):
            trainer.train()
        with pytest.raises(ValueError, match="`validation_function` must be given with several"):
            trainer.validate()


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"data_creator": lambda config: (DATA, DATA, DATA)}, ValueError, "returned 3 values"),
        ({"data_creator": lambda config: 3}, TypeError, "iterables of batches, but returned a int"),
        ({"model_creator": lambda config: 3}, TypeError, "`model_creator` must return a torch.nn"),
        (
            {"optimizer_creator": lambda model, config: None},
            TypeError,
            "`optimizer_creator` must return a torch.optim.Optimizer or several, but returned None",
        ),
        (
            {"scheduler_creator": lambda optimizer, config: ReduceLROnPlateau(optimizer)},
            ValueError,
            "`scheduler_step_freq` must be 'manual' with ReduceLROnPlateau",
        ),
    ],
)
def test_what_creators_return_is_checked(
    given: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        make(**given)


@pytest.mark.slow
@pytest.mark.parametrize(("frequency", "rates"), [("batch", [7, 9]), ("epoch", [1, 1])])
def test_schedulers_step_as_often_as_asked_for(frequency: str, rates: list[int]) -> None:
    """With half the rate at each step, the rate tells their number; an epoch has 7 batches."""
    with make(
        scheduler_creator=scheduler_creator, scheduler_step_freq=frequency, num_workers=2
    ) as trainer:
        counts = []
        for num_steps in (None, 2):
            trainer.train(num_steps=num_steps)
            counts.append(trainer.state_dict()["schedulers"][0]["last_epoch"])
    assert counts == rates


@pytest.mark.slow
def test_plateaus_are_noticed_by_hand() -> None:
    def plateau(optimizer: Any, config: Any) -> Any:
        return ReduceLROnPlateau(optimizer, patience=0, factor=0.1)

    with make(scheduler_creator=plateau, scheduler_step_freq="manual") as trainer:
        trainer.train()
        for _ in range(2):
            trainer.update_scheduler(1.0)
        [group] = trainer.state_dict()["optimizers"][0]["param_groups"]
        assert group["lr"] == pytest.approx(0.001)


@pytest.mark.slow
def test_data_sets_get_loaders_and_the_config_stays_as_it_is() -> None:
    config = {BATCH_SIZE: 21}
    sizes: Any = lambda config: DataLoader(DATA, batch_size=config[BATCH_SIZE])  # noqa: E731
    with make(data_creator=sizes, config=config, num_workers=2) as trainer:
        assert trainer.train()["batch_count"] == 3
        with pytest.raises(ValueError, match="must return data to validate on as well"):
            trainer.validate()
    assert config == trainer.config == {BATCH_SIZE: 21}
    with make(
        data_creator=lambda config: (DATA, DATA), batch_size=10, num_workers=2,
        validation_function=False,
    ) as trainer:  # fmt: skip
        told = trainer.train(profile=True)
        assert (told["batch_count"], told["num_samples"]) == (5, 50)
        assert set(told["profile"]) == {
            *("mean_train_epoch_s", "mean_fwd_s", "mean_grad_s", "mean_apply_s")
        }
        assert trainer.validate() == {}


def weights_of_worker() -> Any:
    from paceline.creators import _replica as _replica_functions

    return _replica_functions._replica[0].models[0][0].weight.tolist()


@pytest.mark.slow
def test_workers_with_data_of_their_own_train_on_all_of_them() -> None:
    with make(add_dist_sampler=False, num_workers=2) as trainer:
        assert trainer.train()["num_samples"] == 100
        weights = trainer.apply_all_workers(weights_of_worker)
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("use_fp16", [True, "bf16"])
def test_mixed_precision_learns_and_its_scale_is_stored(use_fp16: Any, are_same: Same) -> None:
    with make(use_fp16=use_fp16, num_workers=2) as trainer:
        first = trainer.train()
        state = trainer.state_dict()
        last = [trainer.train() for _ in range(4)][-1]
        assert last["train_loss"] < first["train_loss"]
        end = trainer.state_dict()
        trainer.load_state_dict(state)
        for _ in range(4):
            trainer.train()
        assert are_same(trainer.state_dict(), end)
    assert (state["scaler"] is not None) == (use_fp16 is True)
    assert state["models"][0]["0.weight"].dtype is torch.float32


@pytest.mark.slow
def test_a_state_without_plain_values_is_not_written(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return {1, 2}

        def set_extra_state(self, state: Any) -> None: ...

    with make(model_creator=lambda config: Odd(4, 1)) as trainer:
        with pytest.raises(StateFormatError, match="to be saved, but this one has other values"):
            trainer.save(tmp_path / "checkpoint")
        assert not list(tmp_path.iterdir())


def test_a_trainer_that_was_shut_down_says_so(tmp_path: Path) -> None:
    trainer = make()
    assert trainer.num_workers == 1
    trainer.shutdown()
    trainer.shutdown(force=True)
    for call in (
        trainer.train,
        trainer.validate,
        trainer.state_dict,
        trainer.get_model,
        lambda: trainer.save(tmp_path / "checkpoint"),
        lambda: trainer.load(tmp_path / "checkpoint"),
        lambda: trainer.apply_all_workers(os.getpid),
    ):
        with pytest.raises(RuntimeError, match="This PyTorchTrainer is not active"):
            call()


# ---- as one process would ------------------------------------------------------------------------


def linear_creator(config: dict[str, Any]) -> nn.Module:
    return nn.Linear(4, 1)


def part_by_part(model: Any, train_iterator: Any, criterion: Any, optimizer: Any) -> None:
    """Add up the gradients of two backward passes, as a discriminator does."""
    for x, y in train_iterator:
        optimizer.zero_grad()
        for part in (y, 2 * y):
            criterion(model(x), part).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("train_function", [None, part_by_part])
def test_two_workers_train_as_one_with_the_whole_batch(train_function: Any) -> None:
    """The last of 50 samples in batches of 8 are 2, all of them of the first worker."""
    weights = []
    for num_workers in (1, 2):
        with make(
            model_creator=linear_creator,
            data_creator=lambda config: DataLoader(DATA, batch_size=config[BATCH_SIZE]),
            train_function=train_function,
            config={BATCH_SIZE: 8},
            num_workers=num_workers,
        ) as trainer:
            trainer.train()
            trainer.train()
            weights.append(trainer.get_model().weight)
    assert not torch.equal(weights[0], linear_creator({}).weight)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


class Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("num_workers", [1, 2])
def test_values_of_the_last_batch_are_those_of_its_samples(num_workers: int) -> None:
    """Of 16 samples in batches of 12, the last has 12 to 15, whose squares have a mean of 183.5."""
    x = torch.arange(16.0).reshape(16, 1)
    data = TensorDataset(x, torch.zeros_like(x))
    with make(
        model_creator=lambda config: Identity(),
        data_creator=lambda config: (data, data),
        config={"lr": 0.0},
        dataloader_config={"num_workers": 0, "shuffle": False},
        batch_size=12,
        num_workers=num_workers,
    ) as trainer:
        assert trainer.train()["last_train_loss"] == 183.5
        assert trainer.validate()["last_val_loss"] == 183.5


def test_another_learning_rate_is_applied_to_a_stored_state_and_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def plain_sgd(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    given = {
        "optimizer_creator": plain_sgd,
        "scheduler_creator": scheduler_creator,
        "scheduler_step_freq": "epoch",
        "stop_on_nan": False,
    }
    with make(num_workers=1, config={"lr": 0.25}, **given) as first:
        first.train()
        state = first.state_dict()
    with make(num_workers=1, config={"lr": 1.0}, **given) as second:
        second.load_state_dict(state)
        second.train()
        loaded = second.state_dict()
    # The scheduler halves it after each pass, as it would have done with the other one.
    assert state["optimizers"][0]["param_groups"][0]["lr"] == 0.125
    assert loaded["optimizers"][0]["param_groups"][0]["lr"] == 0.25
    assert loaded["schedulers"][0]["base_lrs"] == [1.0]
    assert "optimizer 0: lr was 0.25 and is 1.0" in "".join(capfd.readouterr())


def test_other_data_after_a_whole_pass_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    def data(config: dict[str, Any]) -> Any:
        values = torch.ones(config["size"], 4)
        return torch.utils.data.TensorDataset(values, values)

    with make(num_workers=1, data_creator=data, config={"size": 8}, batch_size=2) as first:
        first.train()
        state = first.state_dict()
    with make(num_workers=1, data_creator=data, config={"size": 9}, batch_size=4) as second:
        second.load_state_dict(state)
    said = "".join(capfd.readouterr())
    assert "the number of samples of an epoch was 8 and is 9" in said
    assert "the number of batches of an epoch was 4 and is 3" in said


def frozen_creator(config: dict[str, Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for layer in config["frozen"]:
        model[layer].requires_grad_(False)
    return model


def train_thawed(model: Any, train_iterator: Any, criterion: Any, optimizer: Any) -> None:
    model.requires_grad_(True)
    for x, y in train_iterator:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()


def test_layers_thawed_in_a_pass_stay_so_and_layers_built_frozen_are_named(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def trained_layers(trainer: PyTorchTrainer) -> list[bool]:
        return [bool(p.requires_grad) for p in trainer.get_model().parameters()][::2]

    given = {"num_workers": 1, "model_creator": frozen_creator}
    with make(**given, config={"frozen": [0]}, train_function=train_thawed) as first:
        assert trained_layers(first) == [False, True]
        first.train()
        state = first.state_dict()
    with make(**given, config={"frozen": [0]}) as second:
        second.load_state_dict(state)
        assert trained_layers(second) == [True, True]
    assert "other settings" not in "".join(capfd.readouterr())
    with make(**given, config={"frozen": [1]}) as third:
        third.load_state_dict(state)
        assert trained_layers(third) == [True, False]
    assert "'1.bias' of model 0, '1.weight' of model 0 was trained" in "".join(capfd.readouterr())


def nan_at(config: dict[str, Any]) -> Any:
    """Return data of 12 batches with a sample that is not finite."""
    x, y = X[:48].clone(), X[:48].sum(1, keepdim=True)
    x[config["sample"]] = float("nan")
    return DataLoader(TensorDataset(x, y), batch_size=4)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_loss_that_is_not_finite_ends_the_pass_with_the_rank(rank: int) -> None:
    """It comes with the last batch, so that no other rank has a batch with broken weights."""
    said = f"'train_loss' must be finite.* rank {rank} at batch 3"
    config = {"sample": 36 + 4 * rank}
    with (
        make(num_workers=3, data_creator=nan_at, config=config) as trainer,
        pytest.raises(NonFiniteError, match=said),
    ):
        trainer.train()


def test_a_pass_with_a_loss_that_is_not_finite_ends_if_that_is_wanted() -> None:
    options = {"config": {"sample": 30}, "stop_on_nan": False}
    with make(num_workers=1, data_creator=nan_at, **options) as trainer:
        assert trainer.train()["batch_count"] == 12
