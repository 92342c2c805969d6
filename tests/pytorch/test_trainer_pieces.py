"""Training piece by piece, timing, retention, NaN, precision: in one process."""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline import core, pytorch


class OneWeight(pytorch.PyTorchTrial):
    """One weight w, loss w * x over x = 0..9 in batches of 4, learning rate 0.1."""

    def __init__(self, context: pytorch.PyTorchTrialContext, **changes: Any) -> None:
        self.context = context
        self.changes = changes
        self.said: list[str] = []
        self.model = context.wrap_model(nn.Linear(1, 1, bias=False).double())
        nn.init.zeros_(self.model.weight)  # type: ignore[arg-type]
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if "train" in self.changes:
            return self.changes["train"](self, batch[0], batch_idx)
        loss = self.model(batch[0]).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss, "mean_x": batch[0].mean()}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"weight": self.model.weight.sum()}

    def build_training_data_loader(self) -> Any:
        x = torch.arange(10, dtype=torch.float64).reshape(10, 1)
        return self.changes.get("training", DataLoader(TensorDataset(x), batch_size=4))

    def build_validation_data_loader(self) -> Any:
        zeros = TensorDataset(torch.zeros(1, 1, dtype=torch.float64))
        return self.changes.get("validation", DataLoader(zeros))

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"tell": Tell(self.said)}


class Tell(pytorch.PyTorchCallback):
    """Note which of some hooks ran."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.said.append(f"startup {first_batch_idx}")

    def on_trial_shutdown(self) -> None:
        self.said.append("shutdown")


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


Made = tuple[OneWeight, pytorch.Trainer]


@pytest.fixture
def make() -> Iterator[Callable[..., Made]]:
    """Return a function that makes a trial and its trainer in a context of their own."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def run(changes: dict[str, Any] | None = None, **options: Any) -> Made:
            options = {"hparams": {"global_batch_size": 4}, "seed": 1, **options}
            context = stack.enter_context(pytorch.init(**options))
            trial = OneWeight(context, **(changes or {}))
            return trial, pytorch.Trainer(trial, context)

        yield run


Make = Callable[..., Made]


def rows(trial: OneWeight, group: str) -> dict[int, dict[str, Any]]:
    from paceline.core import read_metrics
    from paceline.journal import RunDirectory

    run = RunDirectory(trial.context.core.run_dir)
    found: dict[int, dict[str, Any]] = {}
    for row in read_metrics(run, group):
        found.setdefault(row.steps_completed, {}).update(row.metrics)
    return found


# ---- piece by piece --------------------------------------------------------------------------


def test_training_in_pieces_gives_the_metrics_of_each_and_the_weight_of_the_whole(
    make: Make,
) -> None:
    trial, trainer = make()
    first = trainer.train_for(pytorch.Batch(1))
    assert (first["mean_x"], first["batches"], trainer.steps_completed) == (1.5, 1, 1)
    rest = trainer.train_for(pytorch.Epoch(1))
    assert (rest["mean_x"], trainer.steps_completed) == (pytest.approx((5.5 * 4 + 8.5 * 2) / 6), 3)
    assert trainer.validate()["weight"] == pytest.approx(-0.1 * (1.5 + 5.5 + 8.5))
    uuid = trainer.save_checkpoint()
    assert trainer.save_checkpoint() == uuid
    result = trainer.fit(max_length=pytorch.Epoch(2))
    assert result.steps_completed == 6
    assert trial.model.weight.item() == pytest.approx(-0.1 * 2 * (1.5 + 5.5 + 8.5), rel=1e-14)
    assert trial.said == ["startup 0", "shutdown"]


def test_second_fit_goes_on_where_the_first_one_ended(make: Make) -> None:
    trial, trainer = make()
    trainer.fit(max_length=pytorch.Epoch(1))
    result = trainer.fit(max_length=pytorch.Epoch(2))
    assert result.steps_completed == 6
    assert len(result.checkpoints) == 1
    assert trial.said == ["startup 0", "shutdown", "startup 3", "shutdown"]


def test_training_in_pieces_goes_on_from_a_checkpoint(make: Make) -> None:
    trial, trainer = make()
    trainer.train_for(pytorch.Batch(2))
    trainer.save_checkpoint()
    trial.context.core.close()
    again, other = make(resume=trial.context.core.run_dir)
    assert other.steps_completed == 2
    other.train_for(pytorch.Batch(1))
    assert again.model.weight.item() == pytest.approx(-0.1 * (1.5 + 5.5 + 8.5), rel=1e-14)


def test_training_begins_with_a_checkpoint_of_another_run(make: Make) -> None:
    trial, trainer = make()
    trainer.train_for(pytorch.Batch(2))
    uuid = trainer.save_checkpoint()
    trial.context.core.close()
    # The order of samples is that of the checkpoint's seed.
    again, other = make(seed=None)
    assert again.context.core.run_dir != trial.context.core.run_dir
    other.restore(trial.context.core.run_dir / "checkpoints" / uuid)
    assert other.steps_completed == 2
    other.train_for(pytorch.Batch(1))
    assert again.model.weight.item() == pytest.approx(-0.1 * (1.5 + 5.5 + 8.5), rel=1e-14)
    with pytest.raises(RuntimeError, match=r"`restore` must come before training"):
        other.restore(trial.context.core.run_dir / "checkpoints" / uuid)


def test_other_data_are_evaluated_and_nothing_is_reported(make: Make) -> None:
    trial, trainer = make()
    trainer.train_for(pytorch.Batch(1))
    other = DataLoader(TensorDataset(torch.zeros(3, 1, dtype=torch.float64)), batch_size=2)
    assert trainer.evaluate(other) == {"weight": pytest.approx(-0.15)}
    assert trial.model.training
    assert rows(trial, "validation") == {}


def test_a_device_is_where_the_trial_trains() -> None:
    with pytorch.init(hparams={"global_batch_size": 4}, device="meta") as context:
        assert context.wrap_model(nn.Linear(1, 1)).weight.device == torch.device("meta")


def test_preempted_piece_stores_the_state_and_ends_the_block() -> None:
    passed = []
    with pytorch.init(hparams={"global_batch_size": 4}, seed=1) as context:
        trial = OneWeight(context)
        trainer = pytorch.Trainer(trial, context)
        trainer.train_for(pytorch.Batch(1))
        control = context.core.run_dir / "control.json"
        control.write_text('{"should_preempt": true}')
        while True:
            trainer.train_for(pytorch.Batch(1))
            passed.append(trainer.steps_completed)
    from paceline.core import RunState, summarize_run

    summary = summarize_run(context.core.run_dir)
    assert summary.state is RunState.PREEMPTED
    assert summary.latest_checkpoint is not None
    assert trial.said == ["startup 0", "shutdown"]


def test_new_run_can_begin_with_the_state_of_an_unfinished_one(make: Make) -> None:
    def fail_late(trial: OneWeight, x: torch.Tensor, batch: int) -> Any:
        if batch == 4:
            raise RuntimeError("lost")
        loss = trial.model(x).mean()
        trial.context.backward(loss)
        trial.context.step_optimizer(trial.optimizer)
        return {"loss": loss, "mean_x": x.mean()}

    options: dict[str, Any] = {
        "max_length": pytorch.Epoch(2),
        "checkpoint_period": pytorch.Batch(2),
    }
    now = time.time
    with pytest.MonkeyPatch.context() as clock:
        # It is set right before the next run begins.
        clock.setattr(time, "time", lambda: now() + 7200)
        with (
            pytest.raises(RuntimeError, match="lost"),
            pytorch.init(hparams={"global_batch_size": 4}, seed=1, name="same") as context,
        ):
            pytorch.Trainer(OneWeight(context, train=fail_late), context).fit(**options)
    trial, trainer = make(name="same")
    result = trainer.fit(**options, resume="auto")
    assert trial.said[0] in ("startup 2", "startup 4")
    assert result.steps_completed == 6
    assert trial.model.weight.item() == pytest.approx(-0.1 * 2 * (1.5 + 5.5 + 8.5), rel=1e-14)


# ---- timing ----------------------------------------------------------------------------------


def test_profiler_times_the_batches_of_its_window_and_a_later_call_replaces_an_earlier(
    make: Make,
) -> None:
    trial, trainer = make()
    trainer.configure_profiler(enabled=True, begin_on_batch=0)
    trainer.configure_profiler(enabled=True, begin_on_batch=1, end_after_batch=2)
    trainer.fit(max_length=pytorch.Batch(6))
    timed = {step: row for step, row in rows(trial, "profiling").items() if "train_batch_s" in row}
    assert sorted(timed) == [2, 3]
    for row in timed.values():
        assert row.keys() >= {"data_wait_s", "to_device_s", "train_batch_s", "optimizer_step_s"}
        assert 0 < row["optimizer_step_s"] < row["train_batch_s"] < 10


def test_throughput_is_recorded_apart_from_the_metrics(make: Make) -> None:
    trial, trainer = make()
    trainer.fit(max_length=pytorch.Batch(4), reporting_period=pytorch.Batch(2))
    recorded = rows(trial, "profiling")
    assert sorted(recorded) == [2, 4]
    assert all(row["samples_per_second"] > 0 for row in recorded.values())
    assert not rows(trial, "training")[2].keys() & recorded[2].keys()


def test_a_run_that_was_ended_and_resumed_tells_what_its_time_went_to(make: Make) -> None:
    """It stores at batch 2, is ended in batch 4, and goes on from 2. Each batch sleeps 0.05 s."""
    is_failing = True

    def train(trial: OneWeight, x: torch.Tensor, batch: int) -> Any:
        time.sleep(0.05)
        if batch == 3 and is_failing:
            raise RuntimeError("ended")
        loss = trial.model(x).mean()
        trial.context.backward(loss)
        trial.context.step_optimizer(trial.optimizer)
        return {"loss": loss}

    options: dict[str, Any] = {
        "max_length": pytorch.Batch(6),
        "checkpoint_period": pytorch.Batch(2),
    }
    hparams = {"global_batch_size": 4}
    with (
        pytest.raises(RuntimeError, match="ended"),
        pytorch.init(hparams=hparams, seed=1, name="timed") as context,
    ):
        pytorch.Trainer(OneWeight(context, train=train), context).fit(**options)
    before = core.time_shares_of_run(context.core.run_dir)
    assert before.goodput is not None
    is_failing = False
    with pytorch.init(hparams=hparams, seed=1, name="timed", resume="auto") as context:
        trial = OneWeight(context, train=train)
        pytorch.Trainer(trial, context).fit(**options)
    assert core.list_runs(context.core.run_dir.parent)[0].num_attempts == 2
    after = core.time_shares_of_run(context.core.run_dir)
    # What no sleep can be shorter than: two batches, one that failed, and six that stand.
    assert before.lost_s >= 0.1
    assert after.lost_s >= 0.1
    assert after.training_s >= 0.3
    assert min(after.validation_s, after.checkpoint_s, after.start_s) > 0
    assert after.undivided_s == 0
    assert after.total_s > before.total_s
    assert after.goodput is not None
    assert 0 < after.goodput < 1


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"begin_on_batch": -1}, "`begin_on_batch` must be at least 0"),
        ({"begin_on_batch": 3, "end_after_batch": 2}, "must not lie before `begin_on_batch`"),
    ],
)
def test_empty_windows_are_refused(make: Make, window: dict[str, int], message: str) -> None:
    _, trainer = make()
    with pytest.raises(ValueError, match=message):
        trainer.configure_profiler(enabled=True, **window)


@pytest.mark.long
def test_traces_follow_the_batches_of_the_training_also_after_a_resume() -> None:
    """Batches 3 and 4 are recorded; the first process leaves between them."""
    options: dict[str, Any] = {"hparams": {"global_batch_size": 4}, "seed": 1}
    cpu = [torch.profiler.ProfilerActivity.CPU]
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)

    def run(until: int, *, resume: Path | None = None, is_traced: bool = True) -> tuple[Path, Any]:
        with pytorch.init(**options, resume=resume) as context:
            trial = OneWeight(context)
            if is_traced:
                context.set_profiler(activities=cpu, schedule=schedule)
            else:
                with pytest.raises(TypeError, match="activity"):
                    context.set_profiler(activity="cpu")
            result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(until))
            return result.run_dir, trial.model.weight.detach().clone()

    first, _ = run(3)
    run_dir, weight = run(6, resume=first)
    traces = sorted((run_dir / "tensorboard").iterdir())
    assert [path.name for path in traces] == ["batch_3.pt.trace.json", "batch_4.pt.trace.json"]
    for path in traces:
        names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert any(name.startswith("Optimizer.step") for name in names)
    untraced, same = run(6, is_traced=False)
    assert torch.equal(weight, same)
    assert not (untraced / "tensorboard").exists()


def test_a_trace_that_cannot_be_written_does_not_end_the_training(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trial, trainer = make(name="full")
    run_dir = Path(trial.context.core.run_dir)
    (run_dir / "tensorboard").write_text("in the way")
    trial.context.set_profiler(activities=[torch.profiler.ProfilerActivity.CPU])
    assert trainer.fit(max_length=pytorch.Batch(2)).steps_completed == 2
    assert "batch_2.pt.trace.json cannot be kept" in caplog.text


# ---- retention -------------------------------------------------------------------------------


def test_newest_and_best_checkpoints_are_kept(make: Make) -> None:
    """The weight falls all the time, so the first checkpoint has the largest."""
    trial, trainer = make()
    result = trainer.fit(
        max_length=pytorch.Batch(6), validation_period=pytorch.Batch(1),
        checkpoint_policy="all", metric="weight", smaller_is_better=False,
        keep_latest=2, keep_best=1,
    )  # fmt: skip
    checkpoint = trial.context.core.checkpoint
    kept = [checkpoint.get_metadata(uuid)["steps_completed"] for uuid in result.checkpoints]
    assert kept == [1, 5, 6]
    assert {*result.checkpoints} == {*checkpoint.storage.list()}


def test_keeping_the_best_needs_a_metric(make: Make) -> None:
    _, trainer = make()
    with pytest.raises(ValueError, match="`keep_best` needs a metric"):
        trainer.fit(max_length=pytorch.Batch(1), keep_best=1)


# ---- what is not finite ----------------------------------------------------------------------


def broken_at(batch: int) -> Callable[[OneWeight, torch.Tensor, int], Any]:
    def train(trial: OneWeight, x: torch.Tensor, index: int) -> Any:
        loss = trial.model(x).mean()
        trial.context.backward(loss)
        trial.context.step_optimizer(trial.optimizer)
        return {"loss": loss * (math.nan if index == batch else 1.0)}

    return train


def test_nan_stops_training_before_a_checkpoint(make: Make) -> None:
    trial, trainer = make({"train": broken_at(3)})
    with pytest.raises(pytorch.NonFiniteError, match="'loss' must be finite.* rank 0 at batch 3"):
        trainer.fit(max_length=pytorch.Batch(6), checkpoint_period=pytorch.Batch(2))
    latest = trial.context.core.checkpoint.latest
    assert latest is not None
    assert trial.context.core.checkpoint.get_metadata(latest)["steps_completed"] == 2


def test_nan_stops_a_piece_unless_that_is_turned_off(make: Make) -> None:
    _, trainer = make({"train": broken_at(3)})
    with pytest.raises(pytorch.NonFiniteError, match="rank 0 at batch 3"):
        trainer.train_for(pytorch.Batch(6))
    _, trainer = make({"train": broken_at(3)})
    assert math.isnan(trainer.train_for(pytorch.Batch(6), stop_on_nan=False)["loss"])


def test_nan_is_reported_and_training_goes_on_if_that_is_wanted(make: Make) -> None:
    trial, trainer = make({"train": broken_at(3)})
    result = trainer.fit(
        max_length=pytorch.Batch(6), reporting_period=pytorch.Batch(2), stop_on_nan=False
    )
    assert result.steps_completed == 6
    losses = {step: row["loss"] for step, row in rows(trial, "training").items()}
    assert [math.isnan(loss) for loss in losses.values()] == [False, True, False]


# ---- precision -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_forward_pass_computes_in_the_precision_and_the_rest_in_full(
    make: Make, precision: str, dtype: torch.dtype
) -> None:
    seen: dict[str, Any] = {}

    def train(trial: OneWeight, x: torch.Tensor, index: int) -> Any:
        linear = trial.changes["linear"]
        output = linear(0.01 * x.float())
        loss = nn.functional.mse_loss(output, torch.ones_like(output))
        trial.context.backward(loss)
        seen.update(output=output.dtype, loss=loss.dtype, gradient=linear.weight.grad.dtype)
        trial.context.step_optimizer(trial.changes["optimizer"])
        return loss

    changes: dict[str, Any] = {"train": train}
    trial, trainer = make(changes, precision=precision)
    trial.changes["linear"] = trial.context.wrap_model(nn.Linear(1, 1))
    before = trial.changes["linear"].weight.detach().clone()
    optimizer = torch.optim.SGD(trial.changes["linear"].parameters(), lr=0.01)
    trial.changes["optimizer"] = trial.context.wrap_optimizer(optimizer)
    trainer.fit(max_length=pytorch.Batch(3))
    assert seen == {"output": dtype, "loss": torch.float32, "gradient": torch.float32}
    assert trial.changes["linear"].weight.dtype is torch.float32
    assert not torch.equal(trial.changes["linear"].weight, before)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_only_forward_passes_compute_under_autocast(make: Make, precision: str) -> None:
    """The first and the last batch of an epoch are trained by other code than the rest."""
    seen: list[tuple[bool, ...]] = []

    def is_enabled() -> bool:
        return torch.is_autocast_enabled("cpu")

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            noted.append(is_enabled())
            return super().step(closure)

    noted: list[bool] = []

    def train(trial: OneWeight, x: torch.Tensor, index: int) -> Any:
        noted.clear()
        noted.append(is_enabled())
        loss = 0.01 * trial.changes["linear"](0.01 * x.float()).float().mean()
        loss.register_hook(lambda gradient: noted.append(is_enabled()))
        trial.context.backward(loss)
        noted.append(is_enabled())
        trial.context.step_optimizer(trial.changes["optimizer"])
        noted.append(is_enabled())
        seen.append(tuple(noted))
        return loss

    changes: dict[str, Any] = {"train": train}
    trial, trainer = make(changes, precision=precision)
    linear = trial.changes["linear"] = trial.context.wrap_model(nn.Linear(1, 1))
    optimizer = trial.context.wrap_optimizer(Noting(linear.parameters(), lr=0.01))
    trial.changes["optimizer"] = optimizer
    trainer.fit(max_length=pytorch.Batch(7))
    # In the forward pass, in the backward pass, after it, in the step, and after that.
    assert seen == [(True, False, True, False, True)] * 7
    assert not is_enabled()


def test_gradient_scale_halves_on_overflow_and_survives_a_resume(make: Make) -> None:
    """An infinite loss skips one step and halves the scale, which a checkpoint holds."""

    def train(trial: OneWeight, x: torch.Tensor, index: int) -> Any:
        loss = trial.model(x).mean() * (math.inf if index == 1 else 1.0)
        trial.context.backward(loss)
        trial.context.step_optimizer(trial.optimizer)
        return {"mean_x": x.mean()}

    trial, trainer = make({"train": train}, precision="fp16")
    start = trial.context.scaler.get_scale()
    trainer.fit(max_length=pytorch.Batch(3))
    assert trial.context.scaler.get_scale() == start / 2
    assert trial.model.weight.item() == pytest.approx(-0.1 * (1.5 + 8.5), rel=1e-12)
    trial.context.core.close()
    again, other = make({"train": train}, precision="fp16", resume=trial.context.core.run_dir)
    other.fit(max_length=pytorch.Batch(3))
    assert again.context.scaler.get_scale() == start / 2


def test_unknown_precision_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="'fp32', 'bf16', 'fp16', but got 'int8'"):
        make(precision="int8")


def test_scaler_by_hand_beside_automatic_scaling_is_refused(make: Make) -> None:
    trial, _ = make(precision="fp16")
    with pytest.raises(RuntimeError, match="`wrap_scaler` is for mixed precision by hand"):
        trial.context.wrap_scaler(torch.amp.GradScaler("cpu"))


def test_scaler_by_hand_is_kept_in_the_checkpoint(make: Make) -> None:
    def train(trial: OneWeight, x: torch.Tensor, index: int) -> Any:
        scaler = trial.context.scaler
        trial.context.backward(scaler.scale(trial.model(x).mean()))
        trial.context.step_optimizer(trial.optimizer, scaler=scaler)
        scaler.update(64.0)
        return {"mean_x": x.mean()}

    trial, trainer = make({"train": train})
    trial.context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=8.0))
    trainer.fit(max_length=pytorch.Batch(3))
    assert trial.model.weight.item() == pytest.approx(-0.1 * (1.5 + 5.5 + 8.5), rel=1e-12)
    trial.context.core.close()
    again, other = make({"train": train}, resume=trial.context.core.run_dir)
    again.context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=8.0))
    other.fit(max_length=pytorch.Batch(3))
    assert again.context.scaler.get_scale() == 64.0


# ---- streams ---------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Ten numbers, an epoch; it knows where it stands and counts what it had to read."""

    def __init__(self) -> None:
        self.next = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < 10:
            value, self.next = self.next, self.next + 1
            self.num_read += 1
            yield (torch.tensor([float(value)], dtype=torch.float64),)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_stream_that_knows_its_place_is_not_read_again_on_resume(make: Make) -> None:
    trial, trainer = make({"training": DataLoader(Stream(), batch_size=4)})
    trainer.fit(max_length=pytorch.Batch(2))
    trial.context.core.close()
    stream = Stream()
    again, other = make(
        {"training": DataLoader(stream, batch_size=4)}, resume=trial.context.core.run_dir
    )
    other.fit(max_length=pytorch.Epoch(1))
    assert stream.num_read == 2
    assert again.model.weight.item() == pytest.approx(-0.1 * (1.5 + 5.5 + 8.5), rel=1e-14)


def test_stream_may_be_the_validation_data(make: Make) -> None:
    trial, trainer = make({"validation": DataLoader(Stream(), batch_size=4)})
    trainer.fit(max_length=pytorch.Batch(2), validation_period=pytorch.Batch(1))
    weights = {step: row["weight"] for step, row in rows(trial, "validation").items()}
    assert weights == {1: pytest.approx(-0.15), 2: pytest.approx(-0.7)}


# ---- results ---------------------------------------------------------------------------------


def test_training_with_nothing_left_to_do_still_tells_its_results(make: Make) -> None:
    trial, trainer = make()
    first = trainer.fit(max_length=pytorch.Batch(3), metric="weight")
    trial.context.core.close()
    _, other = make(resume=trial.context.core.run_dir)
    again = other.fit(max_length=pytorch.Batch(3), metric="weight")
    assert (again.metrics, again.best_metrics) == (first.metrics, first.best_metrics)
    assert again.checkpoints == []


# ---- samplers --------------------------------------------------------------------------------


class Turning:
    """A sampler that knows how often it was drawn: each time it begins one further."""

    def __init__(self) -> None:
        self.num_drawn = 0

    def __iter__(self) -> Iterator[int]:
        self.num_drawn += 1
        yield from ((index + self.num_drawn - 1) % 10 for index in range(10))

    def __len__(self) -> int:
        return 10


def test_sampler_with_a_state_of_its_own_goes_on_where_it_was(make: Make) -> None:
    def loader() -> Any:
        x = torch.arange(10, dtype=torch.float64).reshape(10, 1)
        return DataLoader(TensorDataset(x), batch_size=4, sampler=Turning())

    trial, trainer = make({"training": loader()})
    trainer.fit(max_length=pytorch.Batch(7))
    trial.context.core.close()
    again, other = make({"training": loader()}, resume=trial.context.core.run_dir)
    other.fit(max_length=pytorch.Batch(9))
    straight, whole = make({"training": loader()})
    whole.fit(max_length=pytorch.Batch(9))
    assert torch.equal(again.model.weight, straight.model.weight)


# ---- the short way ---------------------------------------------------------------------------


def test_plain_batches_are_trained_as_all_others_are(make: Make) -> None:
    """Timed batches take the long way, batches between which nothing is due a short one."""

    def train(trial: OneWeight, x: torch.Tensor, index: int) -> Any:
        loss = (nn.functional.dropout(trial.model(x)) + trial.context.current_train_batch()).mean()
        trial.context.backward(loss)
        trial.context.step_optimizer(trial.optimizer)
        return {"loss": loss, "index": index}

    weights, reported = [], []
    for is_timed in (False, True):
        x = torch.arange(90, dtype=torch.float64).reshape(90, 1) / 90
        loader = DataLoader(TensorDataset(x), batch_size=4, shuffle=True)
        trial, trainer = make({"train": train, "training": loader})
        trainer.configure_profiler(enabled=is_timed)
        schedule = {"max_length": pytorch.Batch(60), "reporting_period": pytorch.Batch(7)}
        result = trainer.fit(**schedule, validation_period=pytorch.Record(100))
        weights.append(trial.model.weight.detach().clone())
        reported.append(
            [row[1:] for group in ("training", "validation") for row in result.history(group)]
        )
    assert torch.equal(*weights)
    assert reported[0] == reported[1]
