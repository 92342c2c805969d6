"""The hooks of callbacks, and the small facts that a trial asks its context for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import pytorch

HOOKS = [name for name in vars(pytorch.PyTorchCallback) if name.startswith("on_")]
VALIDATION = [
    "validation_start",
    "validation_epoch_start",
    "validation_epoch_end [2]",
    "validation_end {value}",
]
SAVE = [
    "checkpoint_save_start {training}",
    "checkpoint_end directory",
    "checkpoint_write_end directory",
    "checkpoint_upload_end uuid",
]


class Trial(pytorch.PyTorchTrial):
    """Two batches an epoch, to train and to validate."""

    callbacks: dict[str, pytorch.PyTorchCallback]

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"value": batch[0].mean()}

    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)

    def build_validation_data_loader(self) -> Any:
        return self.build_training_data_loader()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.callbacks


def recorder(said: list[str], name: str = "", **replaced: Any) -> pytorch.PyTorchCallback:
    """Return a callback that tells of each of its hooks, with what it is given."""

    def hook(hook_name: str) -> Callable[..., None]:
        def tell(_: Any, *arguments: Any) -> None:
            said.append(" ".join([name + hook_name.removeprefix("on_"), *map(text_of, arguments)]))

        return tell

    hooks = {each: hook(each) for each in HOOKS} | replaced
    made: pytorch.PyTorchCallback = type("Recorder", (pytorch.PyTorchCallback,), hooks)()
    return made


def text_of(argument: Any) -> str:
    if isinstance(argument, dict):
        state = {"training"} & argument.keys()
        return "{" + ",".join(sorted(state or argument)) + "}"
    if isinstance(argument, list):
        return f"[{len(argument)}]"
    text = str(argument)
    if len(text) == 36:
        return "uuid"
    return "directory" if Path(text).is_absolute() else text


class Runs:
    """Trainings of one run.

    Attributes:
        context: The context of the last one.
    """

    context: pytorch.PyTorchTrialContext

    def fit(
        self,
        *callbacks: pytorch.PyTorchCallback,
        num_epochs: int,
        resume: Path | None = None,
        trial_class: type[Trial] = Trial,
    ) -> pytorch.Result:
        hparams = {"global_batch_size": 2}
        with pytorch.init(hparams=hparams, seed=1, resume=resume) as self.context:
            trial = trial_class(self.context)
            trial.callbacks = {str(index): each for index, each in enumerate(callbacks)}
            return pytorch.Trainer(trial, self.context).fit(
                max_length=pytorch.Epoch(num_epochs), reporting_period=pytorch.Epoch(1)
            )


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    return Runs()


def epoch(number: int) -> list[str]:
    return [
        f"training_epoch_start {number}",
        f"training_epoch_end {number}",
        "training_workload_end {batches,epochs,loss} [2]",
    ]


def test_hooks_run_in_order_with_what_they_are_about(runs: Runs) -> None:
    said: list[str] = []
    runs.fit(recorder(said), num_epochs=2)
    begin = ["trial_startup 0 None", "training_start"]
    assert said == [*begin, *epoch(0), *epoch(1), *VALIDATION, *SAVE, "trial_shutdown"]
    said.clear()
    runs.fit(recorder(said), num_epochs=3, resume=runs.context.core.run_dir)
    begin = ["trial_startup 4 uuid", "checkpoint_load_start {training}", "training_start"]
    assert said == [*begin, *epoch(2), *VALIDATION, *SAVE, "trial_shutdown"]
    assert {hook.removeprefix("on_") for hook in HOOKS} == {line.split()[0] for line in said}


def test_several_callbacks_run_in_their_order_and_end_in_reverse(runs: Runs) -> None:
    said: list[str] = []
    runs.fit(recorder(said, "1 "), recorder(said, "2 "), num_epochs=1)
    for hook in HOOKS:
        told = [line[0] for line in said if line[2:].split()[0] == hook.removeprefix("on_")]
        order = {"on_checkpoint_load_start": "", "on_trial_shutdown": "21"}
        assert "".join(told) == order.get(hook, "12"), hook


@pytest.mark.parametrize("hook", [name for name in HOOKS if name != "on_checkpoint_load_start"])
def test_a_hook_that_fails_ends_the_training_with_its_error(runs: Runs, hook: str) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError(hook)

    said: list[str] = []
    with pytest.raises(ZeroDivisionError, match=hook):
        runs.fit(recorder(said, "1 "), recorder([], **{hook: fail}), num_epochs=1)
    assert said[-1] == "1 trial_shutdown"


def test_what_a_hook_changes_is_stored_and_restored(runs: Runs) -> None:
    def add(_: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["training"]["callbacks"]["0"] = {"added": 5}

    def double(_: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["training"]["callbacks"]["0"]["added"] *= 2

    loaded = []

    def load(_: Any, state: dict[str, Any]) -> None:
        loaded.append(state)

    runs.fit(recorder([], on_checkpoint_save_start=add), num_epochs=1)
    changed = recorder([], on_checkpoint_load_start=double, load_state_dict=load)
    runs.fit(changed, num_epochs=2, resume=runs.context.core.run_dir)
    assert loaded == [{"added": 10}]


def test_a_file_of_a_hook_becomes_part_of_the_checkpoint(runs: Runs) -> None:
    def write(_: Any, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "note.txt").write_text("kept")

    result = runs.fit(recorder([], on_checkpoint_end=write), num_epochs=1)
    (uuid,) = result.checkpoints
    run = runs.context.core.run_dir
    assert (run / "checkpoints" / uuid / "note.txt").read_text() == "kept"


def test_facts_of_a_trial_without_a_master(runs: Runs) -> None:
    first_of_epoch = []

    class Asking(Trial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            first_of_epoch.append(self.context.is_epoch_start())
            self.context.set_stop_requested(batch_idx == 2)
            stops.append(self.context.get_stop_requested())
            return super().train_batch(batch, epoch_idx, batch_idx)

    stops: list[bool] = []
    result = runs.fit(num_epochs=5, trial_class=Asking)
    assert first_of_epoch == [True, False, True]
    assert stops == [False, False, True]
    assert result.steps_completed == 3
    context = runs.context
    assert (context.get_experiment_id(), context.get_trial_id()) == (0, 0)
    assert (context.get_experiment_config(), context.get_data_config()) == ({}, {})


def test_switches_that_scripts_of_the_predecessor_use(runs: Runs) -> None:
    seen: list[tuple[type, torch.dtype]] = []

    class Switched(Trial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.experimental.use_amp()
            context.experimental.disable_auto_to_device()
            context.experimental.disable_dataset_reproducibility_checks()

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            moved = self.context.to_device(batch)
            seen.append((type(batch), self.model(moved).dtype))
            return super().train_batch([moved], epoch_idx, batch_idx)

        def evaluate_batch(self, batch: Any) -> Any:
            return super().evaluate_batch([self.context.to_device(batch)])

        def build_training_data_loader(self) -> Any:
            def collate(samples: list[Any]) -> Any:
                return np.stack(samples)

            return DataLoader(np.ones((4, 1), np.float32), batch_size=2, collate_fn=collate)

    runs.fit(num_epochs=1, trial_class=Switched)
    assert seen == [(np.ndarray, torch.float16)] * 2


def test_a_hook_with_other_arguments_is_named_before_training(runs: Runs) -> None:
    class Without(pytorch.PyTorchCallback):
        def on_training_epoch_start(self) -> None:  # type: ignore[override]
            raise AssertionError

    class More(pytorch.PyTorchCallback):
        def on_validation_end(self, metrics: Any, more: Any) -> None:  # type: ignore[override]
            raise AssertionError

    class Loose(pytorch.PyTorchCallback):
        def on_validation_end(self, *arguments: Any, more: Any = None) -> None:
            said.append(f"{len(arguments)}")

    said: list[str] = []
    with pytest.raises(
        TypeError, match=r"`on_training_epoch_start` of the callback '0' must take \(epoch_idx\)"
    ):
        runs.fit(Without(), num_epochs=1)
    with pytest.raises(TypeError, match=r"Hint: def on_validation_end\(self, metrics\)"):
        runs.fit(Loose(), More(), num_epochs=1)
    runs.fit(Loose(), num_epochs=1)
    assert said == ["1"]


@pytest.mark.parametrize("reducer", [pytorch.Reducer.AVG, pytorch.Reducer.MAX])
def test_arrays_are_metrics_by_their_means_and_other_values_are_named(
    runs: Runs, reducer: pytorch.Reducer
) -> None:
    class Arrays(Trial):
        value: Any = np.array([1.0, 2.0, 6.0])

        def evaluate_batch(self, batch: Any) -> Any:
            return {"array": self.value, "tensor": torch.tensor([1.0, 3.0]), "one": np.float32(2)}

        def evaluation_reducer(self) -> Any:
            return reducer

    class Lists(Arrays):
        value: Any = ("a", "list")

    metrics = runs.fit(num_epochs=1, trial_class=Arrays).metrics
    assert {name: metrics[name] for name in ("array", "tensor", "one")} == {
        "array": 3.0,
        "tensor": 2.0,
        "one": 2.0,
    }
    with pytest.raises(TypeError, match=r"but 'array' is \('a', 'list'\) \(tuple\)\. Hint"):
        runs.fit(num_epochs=1, trial_class=Lists)
