"""Resuming at the edges: pieces, several calls, streams, several optimizers, the last step."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline import pytorch
from paceline.storage import CheckpointNotFoundError, Manifest
from paceline.storage._s3_azure_gcs_storage import BucketStorage

HPARAMS = {"global_batch_size": 2}
Mode = pytorch.LRScheduler.StepMode


class Pair(pytorch.PyTorchTrial):
    """Two models; the second one steps every second batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext, **changes: Any) -> None:
        self.context, self.changes = context, changes
        torch.manual_seed(3)
        self.first = context.wrap_model(nn.Linear(1, 2).double())
        self.second = context.wrap_model(nn.Linear(2, 1).double())
        self.optimizers = [
            context.wrap_optimizer(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
            for m in (self.first, self.second)
        ]
        self.schedulers = [
            context.wrap_lr_scheduler(torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5), mode)
            for o, mode in zip(
                self.optimizers,
                (Mode.STEP_EVERY_EPOCH, Mode.STEP_EVERY_OPTIMIZER_STEP),
                strict=True,
            )
        ]
        self.seen: list[Any] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        (x,) = batch
        self.seen.append(x.flatten().tolist())
        if self.changes.get("fail_at") == batch_idx:
            raise RuntimeError("lost")
        loss = (self.second(self.first(x)) ** 2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizers[0])
        if batch_idx % 2:
            self.context.step_optimizer(self.optimizers[1])
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"size": self.second.weight.abs().sum()}

    def build_training_data_loader(self) -> Any:
        x = torch.arange(10, dtype=torch.float64).reshape(10, 1) / 10
        return self.changes.get("loader", DataLoader(TensorDataset(x), batch_size=2))

    def build_validation_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(1, 1, dtype=torch.float64)))

    def weights(self) -> list[list[float]]:
        return [p.flatten().tolist() for m in (self.first, self.second) for p in m.parameters()]


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def use(
    train: Callable[[pytorch.Trainer], Any], resume: Any = None, **changes: Any
) -> tuple[Pair, pytorch.PyTorchTrialContext]:
    with pytorch.init(hparams=HPARAMS, seed=1, resume=resume) as context:
        trial = Pair(context, **changes)
        train(pytorch.Trainer(trial, context))
    return trial, context


def rows(context: pytorch.PyTorchTrialContext, group: str = "training") -> list[Any]:
    from paceline.core import read_metrics
    from paceline.journal import RunDirectory

    run = RunDirectory(context.core.run_dir)
    return [r[1:3] for r in read_metrics(run, group) if not r.is_superseded]


def checkpoints(context: pytorch.PyTorchTrialContext) -> list[tuple[str, int]]:
    from paceline.core import read_checkpoints
    from paceline.journal import RunDirectory

    stored = read_checkpoints(RunDirectory(context.core.run_dir))
    return [(each.uuid, each.steps_completed) for each in stored]


def fit(**options: Any) -> Callable[[pytorch.Trainer], Any]:
    return lambda trainer: trainer.fit(**options)


def interrupted(
    train: Callable[[pytorch.Trainer], Any], fail_at: int, **changes: Any
) -> tuple[Pair, pytorch.PyTorchTrialContext]:
    """Train until it fails, then again from the last checkpoint."""
    with pytest.raises(RuntimeError, match="lost"):
        use(train, fail_at=fail_at, **changes)
    return use(train, resume=newest_run(), **changes)


def newest_run() -> Path:
    from paceline.core import list_runs

    return list_runs(Path("paceline_runs"))[-1].path


def test_gradients_that_wait_for_a_later_batch_survive_and_schedulers_count_their_own() -> None:
    train = fit(max_length=pytorch.Batch(9), checkpoint_period=pytorch.Batch(5))
    straight, _ = use(train)
    resumed, _ = interrupted(train, fail_at=8)
    assert resumed.weights() == straight.weights()
    learning_rates = [o.param_groups[0]["lr"] for o in straight.optimizers]
    assert learning_rates == [0.05, 0.1 / 2**4]
    assert [o.param_groups[0]["lr"] for o in resumed.optimizers] == learning_rates


def test_two_calls_in_a_row_resume_in_the_second() -> None:
    def train(trainer: pytorch.Trainer) -> None:
        trainer.fit(max_length=pytorch.Batch(4), reporting_period=pytorch.Batch(3))
        trainer.fit(
            max_length=pytorch.Batch(10), reporting_period=pytorch.Batch(3),
            checkpoint_period=pytorch.Batch(2),
        )  # fmt: skip

    straight, first = use(train)
    resumed, second = interrupted(train, fail_at=9)
    assert resumed.weights() == straight.weights()
    for group in ("training", "validation"):
        assert rows(second, group) == rows(first, group)


def test_length_that_is_reached_with_open_sums_can_be_resumed() -> None:
    """The run dies in its last validation, after the last report."""

    class Dies(Pair):
        def evaluate_batch(self, batch: Any) -> Any:
            raise RuntimeError("lost")

    options = {"max_length": pytorch.Batch(4), "checkpoint_period": pytorch.Batch(4)}
    with (
        pytest.raises(RuntimeError, match="lost"),
        pytorch.init(hparams=HPARAMS, seed=1) as context,
    ):
        pytorch.Trainer(Dies(context), context).fit(**options)
    _, context = use(fit(**options), resume=newest_run())
    assert [step for step, _ in rows(context)] == [4]
    assert [step for step, _ in rows(context, "validation")] == [4]


def preempting_at(batch: int) -> type[Pair]:
    class Preempting(Pair):
        def train_batch(self, data: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == batch:
                control = self.context.core.run_dir / "control.json"
                control.write_text('{"should_preempt": true}')
                import time

                # Longer than the trainer looks away.
                time.sleep(0.1)
            return super().train_batch(data, epoch_idx, batch_idx)

    return Preempting


def test_preemption_with_the_last_batch_lets_training_end() -> None:
    with pytorch.init(hparams=HPARAMS, seed=1) as context:
        result = pytorch.Trainer(preempting_at(3)(context), context).fit(
            max_length=pytorch.Batch(4)
        )
    assert result.stop_reason == "reached max_length"
    assert result.metrics["batches"] == 4
    assert "size" in result.metrics


def test_preempted_piece_is_finished_first_on_resume() -> None:
    def in_pieces(trainer: pytorch.Trainer) -> None:
        while trainer.steps_completed < 12:
            trainer.train_for(pytorch.Batch(4))

    straight, first = use(in_pieces)
    with pytorch.init(hparams=HPARAMS, seed=1) as context:
        in_pieces(pytorch.Trainer(preempting_at(5)(context), context))
    resumed, second = use(in_pieces, resume=context.core.run_dir)
    assert resumed.weights() == straight.weights()
    assert rows(second) == rows(first)


def test_preempted_call_is_not_followed_by_more_training() -> None:
    with pytorch.init(hparams=HPARAMS, seed=1) as context:
        trainer = pytorch.Trainer(preempting_at(1)(context), context)
        trainer.fit(max_length=pytorch.Batch(8))
        result = trainer.fit(max_length=pytorch.Batch(12), aggregation_frequency=2)
    assert (result.stop_reason, result.steps_completed) == ("preempted", 2)


class Drawn(IterableDataset[Any]):
    """Numbers in an order that is drawn when the epoch begins, with noise drawn for each."""

    def __iter__(self) -> Iterator[Any]:
        for value in torch.randperm(10).tolist():
            yield (torch.tensor([value / 10 + float(torch.rand(())) / 20], dtype=torch.float64),)


def test_stream_that_draws_goes_on_with_the_same_samples_and_steps_epochs() -> None:
    def train(trainer: pytorch.Trainer) -> None:
        trainer.fit(max_length=pytorch.Epoch(3), checkpoint_period=pytorch.Batch(2))

    straight, _ = use(train, loader=DataLoader(Drawn(), batch_size=2))
    resumed, _ = interrupted(train, fail_at=8, loader=DataLoader(Drawn(), batch_size=2))
    assert resumed.seen == straight.seen[-len(resumed.seen) :]
    assert resumed.weights() == straight.weights()
    assert straight.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 2**3)


def test_epoch_end_is_known_after_a_resume_in_its_middle() -> None:
    known = []

    class Asks(Pair):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            known.append(self.context.is_epoch_end())
            return super().train_batch(batch, epoch_idx, batch_idx)

    _, context = use(fit(max_length=pytorch.Batch(3)))
    with pytorch.init(hparams=HPARAMS, seed=1, resume=context.core.run_dir) as context:
        pytorch.Trainer(Asks(context), context).fit(max_length=pytorch.Batch(6))
    assert known == [False, True, False]


def test_loader_without_a_whole_batch_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match="must give at least one batch an epoch"):
        use(fit(max_length=pytorch.Batch(5)), loader=loader)


class ReadsBatchSize(Pair):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.context.get_per_slot_batch_size()
        return super().train_batch(batch, epoch_idx, batch_idx)


@pytest.mark.parametrize("hparams", [None, {}, {"lr": 0.1}])
def test_local_training_needs_a_global_batch_size_only_if_it_is_read(hparams: Any) -> None:
    with pytorch.init(hparams=hparams, seed=1) as context:
        trainer = pytorch.Trainer(Pair(context), context)
        assert trainer.fit(max_length=pytorch.Batch(1)).steps_completed == 1
    with (
        pytorch.init(hparams=hparams, seed=1) as context,
        pytest.raises(ValueError, match=r"`hparams.global_batch_size` must be an integer"),
    ):
        pytorch.Trainer(ReadsBatchSize(context), context).fit(max_length=pytorch.Batch(1))


def test_a_wrong_global_batch_size_is_refused_though_nothing_reads_it() -> None:
    with (
        pytorch.init(hparams={"global_batch_size": "32"}, seed=1) as context,
        pytest.raises(ValueError, match=r"`hparams.global_batch_size` must be an integer"),
    ):
        pytorch.Trainer(Pair(context), context).fit(max_length=pytorch.Batch(1))


class Counted(IterableDataset[Any]):
    """Numbers with noise drawn for each, from a place that is kept from epoch to epoch."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < 10:
            self.place += 1
            noise = float(torch.rand(())) / 20
            yield (torch.tensor([self.place / 10 + noise], dtype=torch.float64),)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


# Torch counts the steps of the process alone.
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("length", [5, 10, 7])
def test_stream_with_a_state_goes_on_from_the_edge_of_an_epoch_too(length: int) -> None:
    whole = fit(max_length=pytorch.Batch(15))
    straight, _ = use(whole, loader=DataLoader(Counted(), batch_size=2))
    first, context = use(
        fit(max_length=pytorch.Batch(length)), loader=DataLoader(Counted(), batch_size=2)
    )
    run = context.core.run_dir
    resumed, _ = use(whole, resume=run, loader=DataLoader(Counted(), batch_size=2))
    assert first.seen + resumed.seen == straight.seen
    assert resumed.weights() == straight.weights()


def test_the_last_checkpoint_of_a_stream_is_of_the_end_of_its_epoch() -> None:
    def train(trainer: pytorch.Trainer) -> None:
        trainer.fit(max_length=pytorch.Epoch(1), checkpoint_period=pytorch.Batch(5))

    _, context = use(train, loader=DataLoader(Drawn(), batch_size=2))
    last = checkpoints(context)[-1][0]
    again, _ = use(
        fit(max_length=pytorch.Epoch(1), latest_checkpoint=last),
        resume=context.core.run_dir,
        loader=DataLoader(Drawn(), batch_size=2),
    )
    assert again.seen == []
    assert again.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 2)


def numbers(count: int, batch_size: int = 2) -> Any:
    x = torch.arange(count, dtype=torch.float64).reshape(count, 1) / 10
    return DataLoader(TensorDataset(x), batch_size=batch_size)


def test_data_with_too_few_batches_for_the_middle_of_an_epoch_are_refused() -> None:
    _, context = use(fit(max_length=pytorch.Batch(4)))
    with pytest.raises(
        pytorch.CheckpointMismatchError,
        match="more than 4 global batches an epoch, as the checkpoint lies within an epoch of 5,"
        " but they have 3",
    ):
        use(fit(max_length=pytorch.Batch(9)), resume=context.core.run_dir, loader=numbers(6))


def test_data_with_another_number_of_batches_are_told_in_the_middle_of_an_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, context = use(fit(max_length=pytorch.Batch(4)))
    resumed, _ = use(
        fit(max_length=pytorch.Batch(6)), resume=context.core.run_dir, loader=numbers(14)
    )
    assert resumed.seen == [[0.8, 0.9], [1.0, 1.1]]
    assert "within an epoch of 5 global batches, and the present data have 7" in caplog.text


def test_an_earlier_checkpoint_of_the_run_may_be_gone_on_from() -> None:
    def train(trainer: pytorch.Trainer) -> None:
        period = pytorch.Batch(2)
        trainer.fit(max_length=pytorch.Batch(8), checkpoint_period=period, reporting_period=period)

    straight, context = use(train)
    run = context.core.run_dir
    (earlier,) = [uuid for uuid, steps in checkpoints(context) if steps == 4]
    again, context = use(
        fit(
            max_length=pytorch.Batch(8),
            latest_checkpoint=earlier,
            reporting_period=pytorch.Batch(2),
        ),
        resume=run,
    )
    assert len(again.seen) == 4
    assert again.weights() == straight.weights()
    assert [step for step, _ in rows(context, "profiling")] == [2, 4, 6, 8]


def test_layers_thawed_by_a_hook_stay_so() -> None:
    class Thaw(pytorch.PyTorchCallback):
        def __init__(self, layer: nn.Module) -> None:
            self.layer = layer.requires_grad_(False)

        def on_training_epoch_start(self, epoch_idx: int) -> None:
            if epoch_idx == 1:
                self.layer.requires_grad_(True)

    class Thaws(Pair):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"thaw": Thaw(self.first)}

    def trained(length: int, resume: Any = None) -> Any:
        with pytorch.init(hparams=HPARAMS, seed=1, resume=resume) as context:
            trial = Thaws(context)
            pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(length))
        return trial.weights(), context.core.run_dir

    straight, _ = trained(12)
    at_start, run = trained(7)
    resumed, _ = trained(12, run)
    assert resumed == straight
    assert at_start[:2] != straight[:2]


# ---- once more after an error ----------------------------------------------------------------


def test_training_after_an_error_of_a_batch_misses_none() -> None:
    straight, _ = use(fit(max_length=pytorch.Batch(12)))

    def train(trainer: pytorch.Trainer) -> None:
        with pytest.raises(RuntimeError, match="lost"):
            trainer.fit(max_length=pytorch.Batch(12))
        trial.changes.clear()
        trainer.fit(max_length=pytorch.Batch(12))

    with pytorch.init(hparams=HPARAMS, seed=1) as context:
        trial = Pair(context, fail_at=3)
        train(pytorch.Trainer(trial, context))
    # The batch that failed was seen twice.
    assert trial.seen[:3] + trial.seen[4:] == straight.seen
    assert trial.weights() == straight.weights()


def test_a_validation_that_failed_is_made_up_for() -> None:
    class Fails(Pair):
        def evaluate_batch(self, batch: Any) -> Any:
            if "fails" in self.changes:
                raise RuntimeError("no validation")
            return super().evaluate_batch(batch)

    with pytorch.init(hparams=HPARAMS, seed=1) as context:
        trial = Fails(context, fails=True)
        trainer = pytorch.Trainer(trial, context)
        with pytest.raises(RuntimeError, match="no validation"):
            trainer.fit(max_length=pytorch.Batch(2))
        trial.changes.clear()
        result = trainer.fit(max_length=pytorch.Batch(2))
    assert "size" in result.metrics
    assert [step for step, _ in rows(context, "validation")] == [2]


def test_a_checkpoint_that_failed_is_stored_by_the_next_call() -> None:
    class FailsOnce(pytorch.PyTorchCallback):
        has_failed = False

        def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
            if not self.has_failed:
                self.has_failed = True
                raise RuntimeError("no space")

    class Stores(Pair):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"fails": FailsOnce()}

    with pytorch.init(hparams=HPARAMS, seed=1) as context:
        trainer = pytorch.Trainer(Stores(context), context)
        trainer.train_for(pytorch.Batch(3))
        with pytest.raises(RuntimeError, match="no space"):
            trainer.save_checkpoint()
        uuid = trainer.save_checkpoint()
    assert checkpoints(context) == [(uuid, 3)]


def test_the_current_batch_is_the_one_that_is_being_trained() -> None:
    told = []

    class Asks(Pair):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            told.append((self.context.current_train_batch(), batch_idx))
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytorch.init(hparams=HPARAMS, seed=1) as context:
        trial = Asks(context, loader=numbers(100))
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(60))
    assert told == [(index, index) for index in range(60)]


def test_a_stop_that_is_asked_for_by_the_first_validation_counts() -> None:
    class Stops(Pair):
        def evaluate_batch(self, batch: Any) -> Any:
            self.context.set_stop_requested(True)
            return super().evaluate_batch(batch)

    with pytorch.init(hparams=HPARAMS, seed=1) as context:
        trainer = pytorch.Trainer(Stops(context), context)
        result = trainer.fit(max_length=pytorch.Batch(50), step_zero_validation=True)
    assert result.steps_completed == 1


def test_a_stop_that_is_asked_for_within_a_piece_is_stored() -> None:
    class Stops(Pair):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.context.set_stop_requested(batch_idx == 2)
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytorch.init(hparams=HPARAMS, seed=1) as context:
        metrics = pytorch.Trainer(Stops(context), context).train_for(pytorch.Batch(50))
    assert "loss" in metrics
    assert [steps for _, steps in checkpoints(context)] == [3]


def test_each_callback_is_shut_down_whatever_the_others_do() -> None:
    done = []

    class Ends(pytorch.PyTorchCallback):
        def on_trial_shutdown(self) -> None:
            done.append(self)
            raise RuntimeError("no end")

    class Ended(Pair):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return {"one": Ends(), "other": Ends()}

    with pytorch.init(hparams=HPARAMS, seed=1) as context, pytest.raises(RuntimeError):
        pytorch.Trainer(Ended(context), context).fit(max_length=pytorch.Batch(1))
    assert len(done) == 2


def test_weights_and_trials_are_loaded_from_the_url_of_a_checkpoint(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytorch.init(hparams=HPARAMS, seed=1, checkpoint_storage=s3) as context:
        trained = Pair(context)
        result = pytorch.Trainer(trained, context).fit(max_length=pytorch.Batch(4))
    [place] = result.checkpoint_urls
    trial = pytorch.load_trial_from_checkpoint_path(place, Pair)
    assert isinstance(trial, Pair)
    assert trial.weights() == trained.weights()
    weights = pytorch.load_weights_from_checkpoint_path(place, model=1)
    assert weights["weight"].equal(trained.second.weight)
    model = nn.Linear(2, 1).double()
    pytorch.load_weights(model, place, stored_model=1)
    assert model.weight.equal(trained.second.weight)
    with pytest.raises(CheckpointNotFoundError, match="must be committed in"):
        pytorch.load_weights(model, f"{s3}/nothing")
    read = BucketStorage.manifest

    def read_and_delete(self: BucketStorage, uuid: str) -> Manifest:
        found = read(self, uuid)
        self.delete(uuid)
        return found

    monkeypatch.setattr(BucketStorage, "manifest", read_and_delete)
    with pytest.raises(CheckpointNotFoundError, match="it was deleted meanwhile"):
        pytorch.load_weights(model, place)


@pytest.mark.long
def test_training_goes_on_elsewhere_from_the_url_of_a_checkpoint(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = pytorch.Batch(8)
    straight = use(lambda trainer: trainer.fit(max_length=length))[0]
    with pytorch.init(hparams=HPARAMS, seed=1, checkpoint_storage=s3) as context:
        result = pytorch.Trainer(Pair(context), context).fit(
            max_length=length, checkpoint_period=pytorch.Batch(3), checkpoint_policy="none"
        )
    assert result.checkpoint_storage == s3
    assert result.checkpoint_urls == [f"{s3}/{uuid}" for uuid in result.checkpoints]
    place = result.checkpoint_urls[0]
    # Another machine knows nothing of the run.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def restore(trainer: pytorch.Trainer) -> None:
        trainer.restore(place)
        trainer.fit(max_length=length)

    for way in (
        restore,
        lambda trainer: trainer.fit(max_length=length, latest_checkpoint=place),
        lambda trainer: trainer.fit(max_length=length, resume=place),
    ):
        resumed = use(way)[0]
        assert len(resumed.seen) == 5
        assert resumed.weights() == straight.weights()
    # Without a word in the script; the seed comes from the checkpoint.
    monkeypatch.setenv("PACELINE_RESUME", place)
    with pytorch.init(hparams=HPARAMS) as context:
        resumed = Pair(context)
        again = pytorch.Trainer(resumed, context).fit(max_length=length)
    assert context.get_trial_seed() == 1
    assert resumed.weights() == straight.weights()
    # Its own go beside the one that it began with.
    assert again.checkpoint_storage == s3
