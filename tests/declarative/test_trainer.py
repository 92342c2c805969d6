"""Building and training: life cycle, exact resume, files, and methods that are overridden."""

import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset, TensorDataset

from paceline.core import NonFiniteError, RunState, list_runs, read_metrics
from paceline.declarative import LossTracker, ModelParameters, Trainer, TrainingConfig
from paceline.journal import RunDirectory
from paceline.pytorch import CheckpointMismatchError
from paceline.storage import CheckpointCorruptError, storage_from

MakeConfig = Callable[..., TrainingConfig]


def trained(config: TrainingConfig, kind: type[Trainer] = Trainer) -> Trainer:
    trainer = kind(config)
    trainer.build()
    trainer.run_training()
    return trainer


def weights(trainer: Trainer) -> list[float]:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist()


class Weight(nn.Module):
    """One weight w, which starts at 1; the prediction is w * x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def mean(pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return w * mean(x), whose gradient is mean(x), whatever the label."""
    return pred.mean()


def one_weight(**changes: Any) -> TrainingConfig:
    """Return a training of one weight on x = 0..9 in batches of 4, with SGD of rate 0.1."""
    x = torch.arange(10, dtype=torch.float64).reshape(10, 1)
    fields: dict[str, Any] = {
        "model_class": Weight,
        "training_dataset": TensorDataset(x, x),
        "validation_dataset": TensorDataset(x[:1] + 2, x[:1]),
        "pred_names": ["y"],
        "loss_function": mean,
        "task_type": None,
        "optimizer": torch.optim.SGD,
        "learning_rate_per_process": 0.1,
        "scheduler": None,
        "batch_size_per_process": 4,
        "num_epochs": 1,
    }
    return TrainingConfig(**{**fields, **changes})


# ---- losses that are not finite, and files of earlier runs ------------------------------------


def never(pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return pred.mean() * math.nan


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_no_model_of_an_earlier_one() -> None:
    trained(one_weight(model_save_dir="out"))
    earlier = Path("out", "best_model.pth").read_bytes()
    with pytest.raises(NonFiniteError, match="'loss' must be finite.* rank 0 at batch 0"):
        trained(one_weight(model_save_dir="out", loss_function=never))
    assert not Path("out", "best_model.pth").exists()
    assert not Path("out", "final_model.pth").exists()
    assert Path("out", "earlier_run_1", "best_model.pth").read_bytes() == earlier


def test_training_goes_on_with_nan_if_that_is_wanted() -> None:
    tracker = trained(one_weight(loss_function=never, stop_on_nan=False)).loss_tracker
    assert math.isnan(tracker["loss"][0])


def test_a_run_that_goes_on_keeps_its_files_and_another_one_moves_them() -> None:
    trained(one_weight(model_save_dir="out"))
    trained(one_weight(model_save_dir="out", checkpoint_dir="out", num_epochs=2))
    assert not Path("out", "earlier_run_1").exists()
    best = str(Path("out", "best_model.pth"))
    trained(one_weight(model_save_dir="out", pretrained_model_path=best))
    moved = {path.name for path in Path("out", "earlier_run_1").iterdir()}
    assert moved == {"checkpoint_model.pth", "final_model.pth", "training_info.txt"}


# ---- what training computes ------------------------------------------------------------------


def test_one_weight_follows_the_closed_form() -> None:
    """Each epoch's batches have means that weigh 4, 4 and 2; all steps subtract their mean.

    The last batch is smaller, so the sum over steps depends on the order; accumulating all three
    makes one step of the mean of all samples, 4.5.
    """
    tracker = trained(one_weight(accumulation_steps=3, num_epochs=2)).loss_tracker
    assert tracker["val_loss"] == pytest.approx([2 * (1 - 0.45), 2 * (1 - 0.9)], rel=1e-14)
    assert tracker["loss"] == pytest.approx([4.5, 4.5 * (1 - 0.45)], rel=1e-14)
    assert tracker["loss_y"] == tracker["loss"]
    assert tracker["lrs"] == [0.1] * 6
    assert (tracker["epochs"], tracker["epoch_best_val_loss"]) == ([0, 1], 1)


def test_gradients_are_clipped_by_norm_and_by_value() -> None:
    for changes, step in (
        ({"gradient_clip_norm": 1.5}, 1.5),
        ({"gradient_clip_value": 0.5}, 0.5),
        ({"gradient_clip_value": 0.5, "gradient_clip_norm": 0.25}, 0.25),
    ):
        trainer = trained(one_weight(accumulation_steps=3, **changes))
        assert trainer.model.w.item() == pytest.approx(1 - 0.1 * step)


def test_weights_count_for_one_loss_for_each_and_for_regularizers() -> None:
    def half(y: torch.Tensor) -> torch.Tensor:
        return y.mean() / 2

    for losses, factors, total in (
        (mean, 3, 3.0),
        ([mean], [3], 3.0),
        ([mean, half], 2, 3.0),
        ([mean, half], [1, 10], 6.0),
    ):
        config = one_weight(loss_function=losses, loss_weights=factors, accumulation_steps=3)
        trainer = trained(config)
        assert trainer.loss_tracker["loss"] == pytest.approx([4.5 * total])
        assert trainer.model.w.item() == pytest.approx(1 - 0.45 * total)


def test_the_default_schedule_rises_from_a_tenth_for_six_epochs() -> None:
    """There are 3 batches an epoch: after batch k the rate is 0.1 r + 0.9 r k / 18."""
    trainer = trained(one_weight(scheduler=CyclicLR, num_epochs=2))
    expected = [0.01 + 0.09 * k / 18 for k in range(1, 7)]
    assert trainer.loss_tracker["lrs"] == pytest.approx(expected)


def test_other_schedulers_have_their_own_parameters_and_steps() -> None:
    stepped = one_weight(
        scheduler=StepLR,
        scheduler_params={"step_size": 1, "gamma": 0.5},
        scheduler_step="epoch",
        num_epochs=2,
    )
    assert trained(stepped).loss_tracker["lrs"] == [0.1, 0.1, 0.05, 0.05, 0.05, 0.025]
    waiting = one_weight(
        scheduler=ReduceLROnPlateau, scheduler_params={"patience": 0, "mode": "max"}, num_epochs=3
    )
    assert trained(waiting).scheduler.get_last_lr() == pytest.approx([1e-3])


def test_parameter_groups_keep_their_own_rates(make_config: MakeConfig) -> None:
    groups = [
        {"params": "encoder", "lr": 1e-3},
        {"params": "self.get_model_object().head.parameters()", "lr": 1e-2},
    ]
    trainer = Trainer(make_config(multi_optimizer_param_dicts=groups))
    trainer.build()
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [1e-4, 1e-3]
    assert trainer.scheduler.max_lrs == [1e-3, 1e-2]
    trainer.cleanup()
    with pytest.raises(ValueError, match=r"'tail' is none of encoder, head"):
        Trainer(make_config(multi_optimizer_param_dicts=[{"params": "tail"}])).build()


def test_a_shorter_format_is_used_and_its_scaler_is_stored() -> None:
    class Told(Trainer):
        def compute_losses(self, *args: Any) -> Any:
            told.add(args[1][0].dtype)
            return super().compute_losses(*args)

    class Linear(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)

    told: set[torch.dtype] = set()
    x = torch.rand(8, 1)
    config = one_weight(
        model_class=Linear,
        dataset=TensorDataset(x, x),
        training_dataset=None,
        loss_function=nn.MSELoss(),
        automatic_mixed_precision=True,
    )
    trainer = trained(config, Told)
    assert told == {torch.float16}
    assert trainer.context.scaler is not None
    config.mixed_precision_type = "bf16"
    told.clear()
    assert trained(config, Told).context.scaler is None
    assert told == {torch.bfloat16}


def test_training_stops_when_validation_gets_no_better() -> None:
    trainer = trained(one_weight(optimizer_params={"maximize": True}, early_stopping_patience=2))
    assert trainer.loss_tracker["epochs"] == [0]
    config = one_weight(
        optimizer_params={"maximize": True}, early_stopping_patience=2, num_epochs=9
    )
    trainer = trained(config)
    assert trainer.loss_tracker["epochs"] == [0, 1, 2]
    assert trainer.is_finished
    config.checkpoint_dir = "."
    assert trained(config).loss_tracker["epochs"] == [0, 1, 2]


# ---- accuracies ------------------------------------------------------------------------------


def test_accuracies_are_those_of_all_samples(make_config: MakeConfig) -> None:
    config = make_config(
        task_type="classification and regression", test_dataset=make_config().dataset
    )
    trainer = trained(config)
    tracker = trainer.loss_tracker
    trainer.model.eval()
    with torch.no_grad():
        for part, data in (("val", trainer.validation_dataset), ("test", trainer.test_dataset)):
            x, phase, energy = (torch.stack(items) for items in zip(*data, strict=True))
            classes, numbers = trainer.model(x)
            share = (classes.argmax(1) == phase).double().mean().item()
            assert tracker[f"{part}_acc_phase"][-1] == pytest.approx(share)
            explained = 1 - (energy - numbers).square().sum(0) / (
                energy - energy.mean(0)
            ).square().sum(0)
            assert tracker[f"{part}_acc_energy"][-1] == pytest.approx(
                explained.mean().item(), rel=1e-5, abs=1e-5
            )
    assert len(tracker["train_acc_phase"]) == len(tracker["train_acc_energy"]) == 2
    assert tracker["loss_phase"][-1] + tracker["loss_energy"][-1] == pytest.approx(
        tracker["loss"][-1]
    )


# ---- exact resume ----------------------------------------------------------------------------


def noisy(make_config: MakeConfig, **changes: Any) -> TrainingConfig:
    """Return a training of four epochs whose dropout draws random numbers."""
    parameters = make_config().model_params
    parameters.dropout = 0.3  # type: ignore[attr-defined]
    return make_config(model_params=parameters, num_epochs=4, **changes)


def test_a_training_that_goes_on_in_another_directory_ends_in_the_same_bits(
    make_config: MakeConfig,
) -> None:
    straight = trained(noisy(make_config, random_seed=5, model_save_dir="straight"))
    config = noisy(make_config, random_seed=5, model_save_dir="first")
    config.num_epochs = 2
    trained(config)
    Path("first").rename("moved")
    # The seed is not given again: the state has it, and with it the split.
    config = noisy(make_config, model_save_dir="second", checkpoint_dir="moved")
    resumed = trained(config)
    assert resumed.validation_dataset.indices == straight.validation_dataset.indices
    assert weights(resumed) == weights(straight)
    assert dict(resumed.loss_tracker) == dict(straight.loss_tracker)
    config.checkpoint_dir = "second"
    assert weights(trained(config)) == weights(resumed)
    config.num_epochs = 5
    assert trained(config).loss_tracker["epochs"] == [0, 1, 2, 3, 4]
    assert len(os.listdir("second/checkpoints")) == 2
    assert sorted(os.listdir("moved/checkpoints")) == sorted(
        json.loads(Path("moved/checkpoint.state").read_text())["checkpoints"]
    )


@pytest.mark.long
def test_a_training_goes_on_from_a_bucket_in_the_same_bits(
    make_config: MakeConfig, s3: str
) -> None:
    straight = trained(noisy(make_config, random_seed=5, model_save_dir="straight"))
    config = noisy(make_config, random_seed=5, model_save_dir="first", checkpoint_storage=s3)
    config.num_epochs = 2
    trained(config)
    assert not Path("first/checkpoints").exists()
    config = noisy(
        make_config, model_save_dir="first", checkpoint_dir="first", checkpoint_storage=s3
    )
    resumed = trained(config)
    assert weights(resumed) == weights(straight)
    assert dict(resumed.loss_tracker) == dict(straight.loss_tracker)
    # Older ones are deleted there.
    kept = json.loads(Path("first/checkpoint.state").read_text())["checkpoints"]
    assert storage_from(s3).list() == sorted(kept)
    assert len(kept) == 2


def test_a_training_goes_on_if_an_old_checkpoint_is_gone(make_config: MakeConfig, s3: str) -> None:
    storage = storage_from(s3)
    stored: list[str] = []

    def spoil() -> None:
        """Remove the first checkpoint, as somebody else might."""
        if not stored and (found := storage.list()):
            stored.extend(found)
            storage.delete(found[0])

    config = make_config(
        num_epochs=3,
        model_save_dir="spoiled",
        checkpoint_storage=s3,
        post_training_epoch_hook=spoil,
    )
    trained(config)
    kept = json.loads(Path("spoiled/checkpoint.state").read_text())["checkpoints"]
    assert storage.list() == sorted(kept)
    assert stored[0] not in kept


def test_the_directory_of_outputs_is_local(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="`model_save_dir` must be a directory of this machine"):
        Trainer(make_config(model_save_dir="s3://bucket/x")).build()
    Path("file").touch()
    Path("link").symlink_to("nowhere")
    for name in ("file", "file/below", "link"):
        match = rf"`model_save_dir` must be a directory, but got '{name}', and '.*/(file|link)' is"
        with pytest.raises(ValueError, match=match):
            Trainer(make_config(model_save_dir=name)).build()


class Interrupted(Trainer):
    """Is told to leave after some batches of the third epoch."""

    num_steps = 0

    def run_model_update_step(self, loss_node: torch.Tensor) -> None:
        super().run_model_update_step(loss_node)
        self.num_steps += 1
        if self.num_steps == 10:
            os.kill(os.getpid(), signal.SIGUSR1)
            # The loop looks every 50 ms.
            time.sleep(0.1)


class InterruptedInValidation(Trainer):
    """Is told to leave by Ctrl-C in the second validation, which has one batch."""

    def process_data_loader_yield(self, data_and_labels: Any) -> Any:
        if not self.model.training and self.current_epoch == 1:
            signal.raise_signal(signal.SIGINT)
        return super().process_data_loader_yield(data_and_labels)


class InterruptedInOwnLoop(Trainer):
    """Has a loop of its own, which leaves no history, and is told to leave in the third epoch."""

    strikes = True

    def run_training_epoch(self) -> None:
        for index, batch in enumerate(self.training_dataloader):
            if self.strikes and (self.current_epoch, index) == (2, 1):
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.1)
            _, loss, _, _ = self.load_data_and_get_loss(batch, self.get_epoch_loss_buffer())
            self.run_model_update_step(loss)


@pytest.mark.long
def test_a_loop_of_ones_own_that_is_told_to_leave_loses_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Straight(InterruptedInOwnLoop):
        strikes = False

    straight = trained(noisy(make_config, random_seed=5, model_save_dir="straight"), Straight)
    losses = straight.loss_tracker["val_loss"]
    assert len(set(losses)) == len(losses) == 4
    left = trained(noisy(make_config, random_seed=5), InterruptedInOwnLoop)
    assert not left.is_finished
    assert left.context.loop is not None
    assert left.context.loop.position.batches == 2 * 4 + 2
    monkeypatch.setenv("PACELINE_RESUME", "auto")
    resumed = trained(noisy(make_config), Straight)
    assert weights(resumed) == weights(straight)
    assert dict(resumed.loss_tracker) == dict(straight.loss_tracker)
    # What the methods have told is recorded, as with those of the trainer.
    run = RunDirectory(resumed.context.core.run_dir)
    rows = list(read_metrics(run, "validation"))
    assert [row.metrics["val_loss"] for row in rows] == losses
    assert [row.steps_completed for row in rows] == [4, 8, 12, 16]


def test_an_early_stop_counts_epochs_of_a_loop_of_ones_own() -> None:
    class Worse(Trainer):
        def run_training_epoch(self) -> None:
            for batch in self.training_dataloader:
                self.run_model_update_step(-self.load_data_and_get_loss(batch, [0.0] * 2)[1])

    config = one_weight(early_stopping_patience=2, num_epochs=9)
    trainer = trained(config, Worse)
    assert trainer.loss_tracker["epochs"] == [0, 1, 2]
    config.checkpoint_dir = "."
    assert trained(config, Worse).loss_tracker["epochs"] == [0, 1, 2]


class StepsInLoop(Trainer):
    """The loop of generic_trainer, which steps the scheduler by itself."""

    def run_training_epoch(self) -> None:
        losses = self.get_epoch_loss_buffer()
        for batch in self.training_dataloader:
            losses, loss, _, _ = self.load_data_and_get_loss(batch, losses)
            self.run_model_update_step(loss)
            self.scheduler.step()
            self.loss_tracker["lrs"].append(self.scheduler.get_last_lr()[0])
        self.loss_tracker.update_losses([4.0, 4.0], "loss", self.current_epoch)


class StepsAfterLoop(StepsInLoop):
    """Steps the scheduler once more in each validation."""

    def run_training_epoch(self) -> None:
        Trainer.run_training_epoch(self)

    def run_validation(self) -> None:
        super().run_validation()
        self.scheduler.step()


def test_a_scheduler_is_stepped_by_the_trainer_or_by_code_of_ones_own() -> None:
    config = one_weight(
        scheduler=StepLR, scheduler_params={"step_size": 2, "gamma": 0.5}, num_epochs=2
    )
    usual = trained(config).loss_tracker["lrs"]
    assert trained(config, StepsInLoop).loss_tracker["lrs"] == usual
    config.num_epochs = 3
    config.checkpoint_dir = "."
    assert trained(config, StepsInLoop).loss_tracker["lrs"][:6] == usual
    with pytest.raises(RuntimeError, match="stepped by the trainer alone, .* StepLR was also"):
        trained(one_weight(scheduler=StepLR, scheduler_params={"step_size": 2}), StepsAfterLoop)


@pytest.mark.parametrize("kind", [Interrupted, InterruptedInValidation])
def test_a_training_that_is_told_to_leave_loses_nothing(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, kind: type[Trainer]
) -> None:
    straight = trained(noisy(make_config, random_seed=5, model_save_dir="straight"))
    left = trained(noisy(make_config, random_seed=5), kind)
    assert not left.is_finished
    assert not Path("out/final_model.pth").exists()
    assert left.loss_tracker["epochs"] == [0, 1]
    assert list_runs(Path("paceline_runs"))[-1].state is RunState.PREEMPTED
    monkeypatch.setenv("PACELINE_RESUME", "auto")
    resumed = trained(noisy(make_config))
    assert resumed.is_finished
    assert weights(resumed) == weights(straight)
    assert dict(resumed.loss_tracker) == dict(straight.loss_tracker)
    run = list_runs(Path("paceline_runs"))[-1]
    assert (run.state, run.num_attempts) == (RunState.COMPLETED, 2)
    assert len(os.listdir("out/checkpoints")) == 2
    assert Path("out/final_model.pth").exists()


BAD_STATES: list[tuple[Callable[[Path], Any], type[Exception], str]] = [
    (
        lambda out: (out / "checkpoint.state").unlink(),
        FileNotFoundError,
        r"'out' has no checkpoint",
    ),
    (
        lambda out: (out / "checkpoint.state").write_bytes(b"PK\x80\x02"),
        ValueError,
        r"must hold a checkpoint.state that Paceline wrote, but that of 'out' cannot be read",
    ),
    (
        lambda out: (out / "checkpoint.state").write_text('{"format": "x"}'),
        ValueError,
        r"its format is 'x'",
    ),
]


@pytest.mark.parametrize(("damage", "kind", "message"), BAD_STATES)
def test_a_state_that_cannot_be_read_is_named(
    damage: Callable[[Path], Any], kind: type[Exception], message: str
) -> None:
    trained(one_weight(model_save_dir="out"))
    damage(Path("out"))
    with pytest.raises(kind, match=message):
        Trainer(one_weight(checkpoint_dir="out")).build()


def test_a_crashed_run_is_told_with_what_a_config_can_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trained(one_weight(num_epochs=2, post_training_epoch_hook=fail))
    caplog.clear()
    trained(one_weight())
    assert ", or set `checkpoint_dir` to its `model_save_dir`." in caplog.text
    assert "init()" not in caplog.text


def test_changed_fields_are_applied_and_named_and_another_seed_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = trained(one_weight(accumulation_steps=3, random_seed=1, model_save_dir="out"))
    assert first.model.w.item() == pytest.approx(1 - 0.45)
    changed = one_weight(
        accumulation_steps=3,
        model_save_dir="out",
        checkpoint_dir="out",
        num_epochs=2,
        learning_rate_per_process=0.2,
    )
    assert trained(changed).model.w.item() == pytest.approx(1 - 0.45 - 0.9)
    for change in (
        "hyperparameter learning_rate_per_process, optimizer 0: lr was 0.1 and is 0.2",
        "hyperparameter num_epochs was 1 and is 2",
    ):
        assert change in caplog.text
    # Neither is a setting of what goes on.
    assert "random_seed" not in caplog.text
    assert "checkpoint_dir was" not in caplog.text
    caplog.clear()
    x = torch.arange(9, dtype=torch.float64).reshape(9, 1)
    data = TensorDataset(x, x)
    trained(
        one_weight(model_save_dir="out", checkpoint_dir="out", num_epochs=3, training_dataset=data)
    )
    assert "the number of samples of an epoch was 10 and is 9" in caplog.text
    with pytest.raises(
        ValueError, match="`random_seed` must be 1, as with the checkpoint in 'out'"
    ):
        Trainer(one_weight(model_save_dir="out", checkpoint_dir="out", random_seed=2)).build()


def test_a_damaged_checkpoint_and_one_of_another_model_are_refused(make_config: MakeConfig) -> None:
    trained(one_weight(model_save_dir="out"))
    with pytest.raises(CheckpointMismatchError, match=r"another model"):
        Trainer(
            make_config(checkpoint_dir="out", scheduler=None, optimizer=torch.optim.SGD)
        ).build()
    uuid = json.loads(Path("out/checkpoint.state").read_text())["checkpoints"][-1]
    file = Path("out/checkpoints") / uuid / "training.json"
    file.chmod(0o600)
    file.write_text(file.read_text() + " ")
    with pytest.raises(CheckpointCorruptError, match=r"'training.json' was altered"):
        Trainer(one_weight(checkpoint_dir="out")).build()


# ---- files -----------------------------------------------------------------------------------


def test_every_file_is_written_and_can_be_read(make_config: MakeConfig) -> None:
    trainer = trained(make_config(num_epochs=3))
    names = {path.name for path in Path("out").iterdir()}
    assert names == {
        *("best_model.pth", "checkpoint_model.pth", "final_model.pth", "configs.json"),
        *("checkpoint.state", "checkpoints", "training_info.txt"),
    }
    final = torch.load("out/final_model.pth", weights_only=True)
    assert torch.equal(final["head.bias"], trainer.model.head.bias)
    assert final.keys() == torch.load("out/checkpoint_model.pth", weights_only=True).keys()
    tracker = LossTracker(["phase", "energy"])
    tracker.load("out/training_info.txt")
    assert tracker == trainer.loss_tracker
    assert len(os.listdir("out/checkpoints")) == 2


def test_the_run_is_recorded_for_everyone_to_see(make_config: MakeConfig) -> None:
    trainer = trained(make_config(test_dataset=make_config().dataset))
    run = RunDirectory(trainer.context.core.run_dir)
    for group, name in (("training", "loss"), ("validation", "val_loss"), ("test", "test_loss")):
        rows = [row.metrics[name] for row in read_metrics(run, group)]
        assert rows == trainer.loss_tracker[name]
    recorded = run.read_info().hparams
    assert recorded is not None
    assert recorded["global_batch_size"] == 8
    assert recorded["optimizer"] == "Adam"
    assert recorded["model_params"]["width"] == 6


def test_weights_are_loaded_whole_or_for_the_encoder_alone(make_config: MakeConfig) -> None:
    first = trained(make_config(random_seed=1, model_save_dir="first"))
    first.update_saved_model("encoder.pth", subcomponent="encoder")
    tuned = Trainer(make_config(pretrained_model_path="first/final_model.pth"))
    tuned.build()
    assert weights(tuned) == weights(first)
    tuned.cleanup()
    for file in ("first/encoder.pth", "first/final_model.pth"):
        config = make_config(pretrained_model_path=file, load_pretrained_encoder_only=True)
        probe = trained(config)
        assert torch.equal(probe.model.encoder[0].weight, first.model.encoder[0].weight)
        assert not torch.equal(probe.model.head.weight, first.model.head.weight)
    config.load_pretrained_classifier = True
    probe = Trainer(config)
    probe.build()
    assert weights(probe) == weights(first)
    probe.cleanup()
    with pytest.raises(ValueError, match=r"weights of this model, but 'first/encoder.pth'"):
        Trainer(make_config(pretrained_model_path="first/encoder.pth")).build()
    Path("text.pth").write_text("text")
    with pytest.raises(ValueError, match=r"a file of weights, but 'text.pth' cannot be read"):
        Trainer(make_config(pretrained_model_path="text.pth")).build()
    with pytest.raises(FileNotFoundError, match=r"a file of weights, but 'no.pth' is not there"):
        Trainer(make_config(pretrained_model_path="no.pth")).build()


# ---- overriding ------------------------------------------------------------------------------


def test_every_method_of_a_step_and_an_epoch_can_be_overridden(make_config: MakeConfig) -> None:
    said: list[str] = []

    def telling(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            said.append(name)
            return getattr(Trainer, name)(self, *args, **kwargs)

        return method

    points = [
        *(
            "check_configs",
            "build_loss_tracker",
            "build_ranks",
            "build_scalable_parameters",
            "build_device",
        ),
        *("build_split_datasets", "build_dataloaders", "build_model", "build_optimizer"),
        *("build_scheduler", "build_dir", "load_state_checkpoint"),
        *("run_training_epoch", "load_data_and_get_loss", "process_data_loader_yield"),
        *("move_to_device", "compute_losses", "get_pred_dict", "run_model_update_step"),
        *("run_validation", "update_saved_model", "run_test"),
        *("write_training_info", "save_model_and_states_checkpoint"),
    ]
    kind = type("Telling", (Trainer,), {name: telling(name) for name in points})
    losses = [nn.CrossEntropyLoss(), nn.MSELoss(), lambda energy, phase: energy.square().mean()]
    config = make_config(num_epochs=1, test_dataset=make_config().dataset, loss_function=losses)
    trained(config, kind)
    assert list(dict.fromkeys(said)) == points


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"automatic_mixed_precision": True}, {"cpu_only": True}])
def test_a_step_that_nobody_overrides_is_the_same_in_fewer_calls(changes: dict[str, Any]) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))

        def forward(self, x: torch.Tensor) -> Any:
            return [self.layers(x)]

    class Overridden(Trainer):
        def get_epoch_loss_buffer(self) -> list[Any]:
            return super().get_epoch_loss_buffer()

    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    config = one_weight(
        model_class=Classifier,
        training_dataset=data,
        validation_dataset=data,
        loss_function=nn.CrossEntropyLoss(),
        task_type="classification",
        gradient_clip_norm=0.5,
        random_seed=2,
        num_epochs=3,
        **changes,
    )
    plain, overridden = trained(config), trained(config, Overridden)
    assert (plain.is_plain(), overridden.is_plain()) == (True, False)
    assert weights(plain) == weights(overridden)
    assert dict(plain.loss_tracker) == dict(overridden.loss_tracker)


def test_losses_of_ones_own_may_be_numbers_added_to_the_records(make_config: MakeConfig) -> None:
    class Own(Trainer):
        def compute_losses(self, loss_records: Any, preds: Any, labels: Any) -> Any:
            loss = sum(pred.square().mean() for pred in preds)
            loss_records[0] += loss.detach().item()
            return loss_records, loss

    tracker = trained(make_config(), Own).loss_tracker
    assert tracker["loss"][1] < tracker["loss"][0]
    assert tracker["loss_phase"] == [0.0, 0.0]


def test_a_plain_plateau_scheduler_of_ones_own_sees_each_validation() -> None:
    class Own(Trainer):
        def build_scheduler(self) -> None:
            self.scheduler = ReduceLROnPlateau(self.optimizer, patience=0, mode="max")

    assert trained(one_weight(num_epochs=3), Own).scheduler.get_last_lr() == pytest.approx([1e-3])


def test_a_plateau_scheduler_that_a_validation_steps_again_is_refused() -> None:
    class Again(Trainer):
        def run_validation(self) -> None:
            super().run_validation()
            self.scheduler.step(1.0)

    class Alone(Trainer):
        def run_validation(self) -> None:
            self.scheduler.step(1.0)

    config = one_weight(scheduler=ReduceLROnPlateau, num_epochs=1)
    with pytest.raises(RuntimeError, match=r"`Again.run_validation` has stepped it 2 times"):
        trained(config, Again)
    assert trained(config, Alone).scheduler.last_epoch == 1


def test_a_validation_of_ones_own_is_in_inference_mode_and_precision() -> None:
    class Own(Trainer):
        def run_validation(self) -> None:
            for batch in self.validation_dataloader:
                preds = self.load_data_and_get_loss(batch, self.get_epoch_loss_buffer())[2]
                told.append((self.model.training, preds[0].dtype))

    told: list[Any] = []
    x = torch.rand(8, 1)
    data = TensorDataset(x, x)
    config = one_weight(
        model_class=nn.Linear,
        model_params=ModelParameters.of({"in_features": 1, "out_features": 1}),
        training_dataset=data,
        validation_dataset=data,
        loss_function=nn.MSELoss(),
        automatic_mixed_precision=True,
        mixed_precision_type="bf16",
    )
    trained(config, Own)
    assert set(told) == {(False, torch.bfloat16)}


def test_hooks_are_called_after_each_epoch_and_see_its_losses(make_config: MakeConfig) -> None:
    seen: list[Any] = []
    config = make_config(test_dataset=make_config().dataset)
    config.post_training_epoch_hook = lambda: seen.append(("loss", trainer.current_epoch))
    config.post_validation_epoch_hook = lambda: seen.append(trainer.loss_tracker["val_loss"][-1])
    config.post_test_epoch_hook = lambda: seen.append("test")
    trainer = Trainer(config)
    trainer.build()
    losses = trainer.run_training()["val_loss"]
    assert seen == [("loss", 0), losses[0], "test", ("loss", 1), losses[1], "test"]


def test_predictions_may_be_named_and_come_in_any_order(make_config: MakeConfig) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> Any:
            both = self.layer(x)
            return {"energy": both[:, 3:], "phase": both[:, :3], "more": both}

    config = make_config(
        model_class=Named, model_params=ModelParameters(), task_type="classification"
    )
    assert len(trained(config).loss_tracker["val_acc_phase"]) == 2
    config.pred_names_and_types = [("phase", "cls"), ("mass", "regr")]
    trainer = Trainer(config)
    trainer.build()
    with pytest.raises(ValueError, match=r"the prediction 'mass', but returns energy, phase, more"):
        trainer.run_training()


def test_a_model_that_returns_too_many_predictions_is_refused(make_config: MakeConfig) -> None:
    config = make_config(pred_names_and_types=[("phase", "cls")], loss_function=nn.MSELoss())
    trainer = Trainer(config)
    trainer.build()
    with pytest.raises(ValueError, match=r"must return 1 predictions.* but returns 2"):
        trainer.run_training()
    assert list_runs(Path("paceline_runs"))[-1].state is RunState.CRASHED


# ---- the order of calls ----------------------------------------------------------------------


def test_names_of_generic_trainer_are_told_apart_from_mistakes(make_config: MakeConfig) -> None:
    trainer = Trainer(make_config(num_workers=2, loss_weights=[1, 2]))
    assert trainer.loss_criterion is trainer.configs.loss_function
    assert (trainer.loss_weights, trainer.num_workers) == ((1, 2), 2)
    with pytest.raises(AttributeError, match=r"no attribute 'gatekeeper'. Hint: `self.rank == 0`"):
        trainer.gatekeeper.should_proceed()
    with pytest.raises(AttributeError, match=r"`Trainer` has no attribute 'loss_criterium'.$"):
        _ = trainer.loss_criterium
    trainer.build()
    assert not trainer.grad_scaler.is_enabled()
    with pytest.raises(RuntimeError, match="Hint: `gradient_clip_norm`"):
        trainer.grad_scaler.unscale_(trainer.optimizer)
    trainer.cleanup()


def test_training_follows_building_once(make_config: MakeConfig) -> None:
    trainer = Trainer(make_config(num_epochs=1))
    with pytest.raises(RuntimeError, match=r"`run_training` must follow `build`"):
        trainer.run_training()
    trainer.build()
    with pytest.raises(RuntimeError, match=r"`build` must be called once before each training"):
        trainer.build()
    trainer.run_training()
    with pytest.raises(RuntimeError, match=r"`run_training` must follow `build`"):
        trainer.run_training()
    assert math.isfinite(trainer.communicate_value_across_ranks(1.0))
    assert trainer.communicate_value_across_ranks(2, mode="gather") == [2]
    with pytest.raises(ValueError, match=r"'average' or 'gather', but got 'sum'"):
        trainer.communicate_value_across_ranks(2, mode="sum")


def test_a_place_that_is_not_this_process_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match=r"`rank` must be that of the process group, 0, but got 1"):
        Trainer(make_config(), rank=1, num_processes=2).build()
    trainer = Trainer(make_config(), rank=0, num_processes=1)
    trainer.build()
    trainer.cleanup()


def test_one_process_may_be_called_multi_node(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(num_epochs=1)
    config.parallelization_params.parallelization_type = "multi_node"
    with caplog.at_level(logging.INFO):
        assert trained(config).num_processes == 1
    assert "Rank 0 trains on" in caplog.text


class Growing(Dataset[Any]):
    """A data set of a class of one's own, whose worker processes draw random numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index)) + torch.rand(4), index % 3, torch.zeros(2)


@pytest.fixture
def child_signal() -> Iterator[None]:
    """Put the handler back that torch sets for a loader's processes."""
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.usefixtures("child_signal")
def test_loading_in_worker_processes_gives_the_same_every_time(make_config: MakeConfig) -> None:
    one, other = (
        trained(make_config(dataset=Growing(), num_workers=1, num_epochs=1, random_seed=2))
        for _ in range(2)
    )
    assert weights(one) == weights(other)


# ---- pictures --------------------------------------------------------------------------------


@pytest.mark.long
def test_histories_are_drawn_into_files(make_config: MakeConfig) -> None:
    trainer = trained(make_config(task_type="classification"))
    (losses,) = trainer.plot_training_history().axes[:1]
    assert losses.get_ylabel().startswith("Loss")
    figures = trainer.plot_accuracy_history()
    assert {*figures} == {"phase", "energy"}
    pictures = {path.name: path.read_bytes()[:4] for path in Path("out").glob("*.png")}
    names = ("loss_history", "lr_history", "acc_history_phase", "acc_history_energy")
    assert pictures == {f"{name}.png": b"\x89PNG" for name in names}


def test_without_matplotlib_the_error_says_what_to_install(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trained(make_config(num_epochs=1))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'paceline\[plot\]'"):
        trainer.plot_training_history()
