"""Checkpoints that follow each other, in one process: none has a period."""

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import core, pytorch
from paceline._training.engine.checkpoints.checkpoint_saver import CheckpointSaver
from paceline.journal import RunDirectory
from paceline.pytorch import _training_checkpoints as _continuous_saves
from paceline.pytorch._loop_agreement import RankAgreement
from paceline.storage import CheckpointWriteError, DirectoryStorage


class Trial(pytorch.PyTorchTrial):
    """Calls `before_batch(batch_idx)`, by default once the last checkpoint is stored."""

    def __init__(
        self, context: pytorch.PyTorchTrialContext, before_batch: Callable[[int], None]
    ) -> None:
        self.context = context
        self.before_batch = before_batch
        self.model = context.wrap_model(nn.Linear(2, 1))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = context.wrap_optimizer(sgd)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.before_batch(batch_idx)
        loss = self.model(batch[0]).pow(2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": self.model(batch[0]).pow(2).mean()}

    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2) / 16), batch_size=1)

    build_validation_data_loader = build_training_data_loader


def await_checkpoint(batch_idx: int) -> None:
    savers = [each for each in gc.get_objects() if type(each) is CheckpointSaver]
    while any(each.is_storing for each in savers):
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def looks_after_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RankAgreement, "look_interval_s", 1e-6)


def fit(
    before_batch: Callable[[int], None] = await_checkpoint,
    *,
    length: int = 6,
    begin: dict[str, Any] | None = None,
    **options: Any,
) -> pytorch.Result:
    hparams = {"global_batch_size": 1}
    with pytorch.init(hparams=hparams, seed=1, name="on", **(begin or {})) as context:
        options = {"checkpoint_period": "continuous", "checkpoint_policy": "none", **options}
        trainer = pytorch.Trainer(Trial(context, before_batch), context)
        return trainer.fit(max_length=pytorch.Batch(length), **options)


def stored_steps(result: pytorch.Result) -> list[int]:
    stored = core.read_checkpoints(RunDirectory(result.run_dir))
    return [checkpoint.steps_completed for checkpoint in stored]


def test_next_one_begins_when_the_last_is_stored() -> None:
    result = fit(keep_latest=9)
    assert stored_steps(result) == [1, 2, 3, 4, 5, 6]
    folders = (result.run_dir / "checkpoints").glob("*-*")
    assert len(list(folders)) == 6
    # The last one comes after the last validation, as with a period.
    last = result.run_dir / "checkpoints" / result.checkpoints[-1] / "training.json"
    assert json.loads(last.read_text())["last_validation"] == 6


def test_the_two_newest_and_the_best_are_kept_without_a_rule() -> None:
    result = fit(metric="validation_loss", validation_period=pytorch.Batch(3))
    assert len(result.checkpoints) == 2
    assert stored_steps(result) == [5, 6]
    result = fit(
        metric="validation_loss", smaller_is_better=False, validation_period=pytorch.Batch(3)
    )
    assert stored_steps(result) == [3, 5, 6]


def test_training_goes_on_while_one_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    is_released, store = threading.Event(), DirectoryStorage.store_shard

    @contextmanager
    def held(self: DirectoryStorage, uuid: str, shard: int) -> Iterator[Path]:
        with store(self, uuid, shard) as path:
            assert is_released.wait(60)
            yield path

    monkeypatch.setattr(DirectoryStorage, "store_shard", held)

    def before_batch(batch_idx: int) -> None:
        if batch_idx == 4:
            is_released.set()
            await_checkpoint(batch_idx)

    # Those of steps 2, 3 and 4 are not begun.
    steps = stored_steps(fit(before_batch, keep_latest=9))
    assert (steps[:2], steps[-1]) == ([1, 5], 6)


def test_bytes_per_hour_bound_what_is_stored_also_by_a_run_that_goes_on() -> None:
    result = fit(checkpoint_bytes_per_hour="1KB", keep_latest=9)
    assert stored_steps(result) == [1, 6]
    again = fit(
        length=9, begin={"resume": result.run_dir}, checkpoint_bytes_per_hour=1000, keep_latest=9
    )
    assert stored_steps(again) == [1, 6, 9]


@pytest.mark.parametrize(("pause_s", "steps"), [(60.0, [1, 6]), (0.0, [1, 3, 4, 5, 6])])
def test_one_that_is_lost_is_followed_by_the_next_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, steps: list[int]
) -> None:
    begun, store = [], DirectoryStorage.store_shard

    @contextmanager
    def store_or_fail(self: DirectoryStorage, uuid: str, shard: int) -> Iterator[Path]:
        begun.append(uuid)
        if len(begun) == 2:
            raise CheckpointWriteError("The disk is full.")
        with store(self, uuid, shard) as path:
            yield path

    monkeypatch.setattr(DirectoryStorage, "store_shard", store_or_fail)
    monkeypatch.setattr(_continuous_saves, "_RETRY_S", pause_s)
    assert stored_steps(fit(keep_latest=9)) == steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_period": "often"}, "must be a train unit or \"continuous\", but got 'often'"),
        ({"checkpoint_bytes_per_hour": "20 gigabytes"}, "must be an integer of bytes, or text"),
        ({"checkpoint_bytes_per_hour": 0}, "`checkpoint_bytes_per_hour` must be"),
        (
            {"checkpoint_period": pytorch.Batch(2), "checkpoint_bytes_per_hour": "1GB"},
            'needs `checkpoint_period="continuous"`',
        ),
        ({"keep_age": "a week"}, "`keep_age` must be seconds, or text"),
        ({"keep_bytes": 1.5}, "`keep_bytes` must be"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fit(**options)
