"""Runs in the driver's own process: what a train function sees, saves and goes on from."""

import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from paceline import core, train
from paceline._training.engine.checkpoints.state_format import StateFormatError
from paceline.journal import RunDirectory
from paceline.storage import CheckpointNotFoundError, DirectoryStorage, storage_from


def run(function: Any, config: dict[str, Any] | None = None, **options: Any) -> train.Results:
    return train.Trainer(num_workers=0).run(function, config, **options)


# ---- what the function is given --------------------------------------------------------------


def test_function_takes_the_config_or_nothing_or_anything() -> None:
    def nothing() -> str:
        return "nothing"

    def anything(*args: Any) -> Any:
        return args

    def optional(config: Any = None) -> Any:
        return config

    assert run(nothing) == ["nothing"]
    assert run(nothing, {"a": 1}) == ["nothing"]
    assert run(anything) == [()]
    assert run(anything, {"a": 1}) == [({"a": 1},)]
    assert run(optional, {"a": 1}) == [{"a": 1}]
    assert run(lambda config: config) == [{}]


def test_function_knows_that_it_is_in_a_worker() -> None:
    def rank_info() -> Any:
        return train.in_worker(), train.world_rank(), train.world_size(), train.cross_rank()

    assert run(rank_info) == [(True, 0, 1, 0)]
    assert rank_info() == (False, 0, 1, 0)


def test_same_function_runs_outside_of_a_run(caplog: pytest.LogCaptureFixture) -> None:
    def function() -> Any:
        model = train.prepare_model(nn.Linear(1, 1))
        optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        loader = train.prepare_data_loader(DataLoader(TensorDataset(torch.ones(6, 1)), 4))
        assert train.load_checkpoint() is None
        for (x,) in loader:
            optimizer.zero_grad()
            train.backward((model(x) - 2).square().mean())
            optimizer.step()
        train.report(loss=1.5)
        train.save_checkpoint(model)
        train.restore_random_state()
        return len(loader), train.local_rank(), train.node_rank(), str(train.get_device())

    with caplog.at_level("INFO"):
        assert function()[:3] == (2, 0, 0)
    assert "Reported outside of a run: {'loss': 1.5}" in caplog.text
    assert "no checkpoint is stored" in caplog.text


# ---- where the time goes ---------------------------------------------------------------------


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.ones(1)


def test_a_run_tells_what_its_time_went_to() -> None:
    """It begins with the first batch, long before the first report."""

    def function() -> None:
        for _ in train.prepare_data_loader(DataLoader(Slow(), batch_size=2)):
            time.sleep(0.05)
        train.report(loss=0.5)
        train.save_checkpoint(epoch=1)

    shares = core.time_shares_of_run(run(function).run_dir)
    assert shares.training_s >= 0.1
    assert shares.data_wait_s >= 0.04
    assert min(shares.checkpoint_s, shares.start_s) > 0
    assert shares.undivided_s == shares.lost_s == 0
    assert shares.goodput is not None


def test_work_after_the_last_checkpoint_of_a_run_that_failed_is_lost(work_here: Path) -> None:
    fails = True

    def function() -> None:
        done = train.load_checkpoint() or {"epoch": 0}
        for epoch in range(done["epoch"], 3):
            time.sleep(0.05)
            if fails and epoch == 2:
                raise RuntimeError("ended")
            train.report(epoch=epoch)
            if epoch == 0:
                train.save_checkpoint(epoch=1)

    with pytest.raises(RuntimeError, match="ended"):
        train.Trainer(num_workers=0, run_dir="lossy").run(function)
    fails = False
    results = train.Trainer(num_workers=0, run_dir="lossy").run(function)
    shares = core.time_shares_of_run(results.run_dir)
    # Epochs 1 and 2 of the first attempt.
    assert shares.lost_s >= 0.1
    assert shares.training_s >= 0.1


# ---- reports ---------------------------------------------------------------------------------


def test_reports_reach_callbacks_and_results_and_the_journal(work_here: Path) -> None:
    class Seen(train.TrainingCallback):
        calls: list[Any]

        def start_training(self, run_dir: Path, config: Any, num_workers: int) -> None:
            self.calls = [("start", run_dir.parent.name, config, num_workers)]

        def handle_result(self, report: train.Report) -> None:
            self.calls.append((report.number, dict(report)))

        def finish_training(self, error: BaseException | None) -> None:
            self.calls.append(("finish", error))

    def function() -> None:
        train.report(loss=torch.tensor(0.5), best=float("inf"))
        train.report({"loss": 0.25}, epoch=np.int64(1))

    seen = Seen()
    results = run(function, {"lr": 0.1}, callbacks=[seen])
    reports = [(1, {"loss": 0.5, "best": float("inf")}), (2, {"loss": 0.25, "epoch": 1})]
    start = ("start", "paceline_runs", {"lr": 0.1}, 0)
    assert seen.calls == [start, *reports, ("finish", None)]
    assert [(r.number, dict(r)) for r in results.metrics] == reports
    (summary,) = core.list_runs(work_here / "paceline_runs")
    assert (summary.state, summary.last_step) == (core.RunState.COMPLETED, 2)
    (info,) = [core.summarize_run(results.run_dir)]
    assert info.path == results.run_dir


def test_report_of_what_is_no_metric_names_it() -> None:
    with pytest.raises(TypeError, match="Metric `model` must be a number"):
        run(lambda config: train.report(model=object()))


def test_callback_that_fails_ends_the_run_and_tells_the_others() -> None:
    class Failing(train.TrainingCallback):
        def handle_result(self, report: train.Report) -> None:
            raise ZeroDivisionError("in a callback")

    class Seen(train.TrainingCallback):
        error: BaseException | None = None

        def finish_training(self, error: BaseException | None) -> None:
            self.error = error

    seen = Seen()
    with pytest.raises(ZeroDivisionError, match="in a callback"):
        run(lambda config: train.report(x=1), callbacks=[Failing(), seen])
    assert isinstance(seen.error, ZeroDivisionError)


def test_deterministic_operations_are_chosen_for_one_run_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def function() -> int:
        train.enable_reproducibility(1)
        return torch.get_deterministic_debug_mode()

    assert run(function) == [2]
    assert run(lambda config: torch.get_deterministic_debug_mode()) == [0]


def test_error_of_the_function_is_recorded(work_here: Path) -> None:
    with pytest.raises(KeyError, match="missing"):
        run(lambda config: config["missing"])
    (summary,) = core.list_runs(work_here / "paceline_runs")
    assert (summary.state, summary.error) == (core.RunState.CRASHED, "KeyError: 'missing'")


# ---- checkpoints -----------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


def test_state_comes_back_as_it_was_saved() -> None:
    def save() -> None:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, 3.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        array = np.arange(3)
        train.save_checkpoint((model, optimizer, {"epoch": 3, "a": array, 1: [None, True, "x"]}))
        array += 1

    trainer = train.Trainer(num_workers=0)
    trainer.run(save)
    model, optimizer, rest = trainer.get_last_checkpoint()
    assert model["weight"].tolist() == [[3.0, 3.0]]
    assert optimizer["param_groups"][0]["lr"] == 0.1
    assert rest["a"].tolist() == [0, 1, 2]
    assert (rest["epoch"], rest[1]) == (3, [None, True, "x"])
    checkpoint = trainer.latest_checkpoint
    assert checkpoint is not None
    assert sorted(path.name for path in checkpoint.path.glob("*.json")) == [
        "manifest.json",
        "rank_0.json",
        "state.json",
    ]
    assert trainer.best_checkpoint == checkpoint
    (again,) = trainer.run(lambda config: train.load_checkpoint(), checkpoint=checkpoint)
    assert again[0]["weight"].tolist() == [[3.0, 3.0]]
    (again,) = trainer.run(lambda config: train.load_checkpoint(), checkpoint=checkpoint.path)
    assert again[2]["epoch"] == 3
    (again,) = trainer.run(lambda config: train.load_checkpoint(), checkpoint={"epoch": 7})
    assert again == {"epoch": 7}
    assert trainer.run(lambda config: train.load_checkpoint()) == [None]


def test_state_by_keywords_and_by_position_is_not_mixed() -> None:
    def save(config: Any) -> None:
        train.save_checkpoint(*config["args"], **config["kwargs"])

    run(save, {"args": (), "kwargs": {"epoch": 1}})
    with pytest.raises(TypeError, match=r"a state or keywords, but got both: keywords \['epoch'\]"):
        run(save, {"args": ({},), "kwargs": {"epoch": 1}})
    with pytest.raises(TypeError, match="must be given what to save, but got nothing"):
        run(save, {"args": (), "kwargs": {}})
    with pytest.raises(core.NotOfferedError, match="shard=True"):
        run(save, {"args": ({},), "kwargs": {"shard": True}})


def test_what_the_safe_format_does_not_know_is_named_or_pickled() -> None:
    def save(config: Any) -> None:
        state = {"epoch": 1, "parts": [Pair(1, {2, 3})]}
        train.save_checkpoint(state, allow_pickle=config["allow_pickle"])

    with pytest.raises(TypeError, match=r"`state\['parts'\]\[0\]\[1\]` is a builtins.set"):
        run(save, {"allow_pickle": False})
    trainer = train.Trainer(num_workers=0)
    trainer.run(save, {"allow_pickle": True})
    assert trainer.get_last_checkpoint() == {"epoch": 1, "parts": [(1, {2, 3})]}

    def save_lock() -> None:
        import threading

        train.save_checkpoint(lock=threading.Lock(), allow_pickle=True)

    with pytest.raises(TypeError, match=r"`state\['lock'\]` cannot be pickled"):
        run(save_lock)


def test_keys_that_no_state_can_have_are_named() -> None:
    with pytest.raises(StateFormatError, match="Keys of a state must be strings or integers"):
        run(lambda config: train.save_checkpoint({(1, 2): 3}))


def test_what_is_nested_too_deep_or_too_large_is_named() -> None:
    itself: list[Any] = [1]
    itself.append(itself)
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    for value in (itself, deep):
        with pytest.raises(TypeError, match=r"200 deep at most, but `state\['x'\]\[.*holds itself"):
            run(lambda config, value=value: train.save_checkpoint(x=value))
    with pytest.raises(TypeError, match=r"`state\['x'\]` is an integer of more than 4300 digits"):
        run(lambda config: train.save_checkpoint(x=10**4300))
    with pytest.raises(TypeError, match=r"of 4300 digits at most, but `state\['x'\]` has a longer"):
        run(lambda config: train.save_checkpoint(x={10**4300: [1]}))


def test_files_travel_with_a_checkpoint(work_here: Path) -> None:
    (work_here / "vocabulary.txt").write_text("one two")
    folder = work_here / "folder"
    folder.mkdir()
    (folder / "inner.txt").write_text("three")

    def save() -> None:
        paths = [work_here / "vocabulary.txt", folder]
        train.save_checkpoint(1, files=paths)
        (work_here / "vocabulary.txt").write_text("changed")

    trainer = train.Trainer(num_workers=0)
    trainer.run(save)
    checkpoint = trainer.latest_checkpoint
    assert checkpoint is not None
    checkpoint.copy_files("copy")
    assert Path("copy/vocabulary.txt").read_text() == "one two"
    assert Path("copy/folder/inner.txt").read_text() == "three"
    trainer.run(lambda config: train.load_checkpoint(files_to="again"), checkpoint=checkpoint)
    assert Path("again/vocabulary.txt").read_text() == "one two"
    trainer.run(lambda config: train.save_checkpoint(1, files=True))
    with pytest.raises(FileNotFoundError, match="`files` must name existing paths, but got 'no"):
        trainer.run(lambda config: train.save_checkpoint(1, files="nothing"))
    with pytest.raises(ValueError, match="`files` must have different names"):
        trainer.run(lambda config: train.save_checkpoint(1, files=[folder, folder]))


def test_strategy_keeps_the_best_and_the_newest() -> None:
    def function() -> None:
        for loss in (3.0, 1.0, float("nan"), 2.0, 1.0, 4.0):
            train.report(loss=loss)
            train.save_checkpoint(state=loss)

    strategy = train.CheckpointStrategy(
        num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    trainer = train.Trainer(num_workers=0)
    results = trainer.run(function, checkpoint_strategy=strategy)
    assert [c.load() for c in results.checkpoints] == [1.0, 1.0, 4.0]
    assert [c.number for c in results.checkpoints] == [2, 5, 6]
    assert results.best_checkpoint is not None
    assert (results.best_checkpoint.number, results.best_checkpoint.score) == (2, 1.0)
    assert trainer.get_last_checkpoint() == 4.0
    newest = trainer.run(function, checkpoint_strategy=train.CheckpointStrategy(num_to_keep=2))
    assert [c.number for c in newest.checkpoints] == [5, 6]


def test_the_best_of_an_earlier_attempt_stays_where_smaller_is_better() -> None:
    strategy = train.CheckpointStrategy(
        num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    for losses in ([1.0, 5.0], [4.0]):
        trainer = train.Trainer(num_workers=0, run_dir="again")
        results = trainer.run(
            lambda config: [train.save_checkpoint(loss=loss) for loss in config["losses"]],
            {"losses": losses},
            checkpoint_strategy=strategy,
        )
    assert [c.score for c in results.checkpoints] == [1.0, 4.0]
    assert results.best_checkpoint is not None
    assert results.best_checkpoint.score == 1.0


def test_strategy_must_find_a_number() -> None:
    strategy = train.CheckpointStrategy(checkpoint_score_attribute="loss")
    with pytest.raises(ValueError, match="goes by 'loss', which must be in the state"):
        run(lambda config: train.save_checkpoint(epoch=1), checkpoint_strategy=strategy)
    with pytest.raises(ValueError, match="goes by 'loss', which must be a number, but got 'low'"):
        run(lambda config: train.save_checkpoint(loss="low"), checkpoint_strategy=strategy)


@pytest.mark.parametrize("has_files", [True, False])
def test_the_checkpoint_in_one_of_ray_tune_is_found(tmp_path: Path, has_files: bool) -> None:
    trainer = train.Trainer(num_workers=0)
    (stored,) = trainer.run(lambda: train.save_checkpoint(step=3)).checkpoints
    of_tune = tmp_path / "checkpoint_000002"
    of_tune.mkdir()
    if has_files:
        shutil.copytree(stored.path, of_tune / stored.uuid)
    facts = {"uuid": stored.uuid, "url": None if has_files else stored.url, "recent": {}}
    (of_tune / "paceline.json").write_text(json.dumps(facts))
    assert train.Checkpoint.from_path(of_tune).load()["step"] == 3
    (of_tune / "paceline.json").write_text(json.dumps({**facts, "uuid": None, "url": None}))
    with pytest.raises(CheckpointNotFoundError, match="must have one of the train function"):
        train.Checkpoint.from_path(of_tune)
    empty = trainer.run(lambda: None)
    with pytest.raises(CheckpointNotFoundError, match="must have a checkpoint to load"):
        train.Checkpoint.from_path(empty.run_dir)


def test_checkpoints_of_other_doors_are_refused(work_here: Path) -> None:
    with core.init() as context, context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
        (path / "weights").write_text("1")
    trainer = train.Trainer(num_workers=0)
    with pytest.raises(ValueError, match="must be one that a train function has saved"):
        trainer.run(lambda config: None, checkpoint=context.run_dir)


# ---- going on --------------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Numbers with random noise, drawn where they are fetched."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index + random.random()]), torch.tensor([2.0 * index])


def fit(config: dict[str, Any]) -> Any:
    """Train with dropout, batch norm and noise; stop where the config says."""
    model: Any = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = train.accelerate(
        model, optimizer, gradient_accumulation=config.get("accumulation", 1)
    )
    loader = train.prepare_data_loader(
        DataLoader(Augmented(), 4, shuffle=True, num_workers=config["loaders"])
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    parts = (model, optimizer, scheduler)
    epoch, losses = 0, []
    stored = train.load_checkpoint()
    if stored is not None:
        for part, state in zip(parts, stored["parts"], strict=True):
            part.load_state_dict(state)
        epoch, losses = stored["epoch"], stored["losses"]
    step = len(losses)
    while epoch < 3:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            step += 1
            train.report(loss=losses[-1])
            if step in config["saves"]:
                train.save_checkpoint(parts=parts, epoch=epoch, losses=losses)
            if step == config.get("stop"):
                raise KeyboardInterrupt
        epoch += 1
        if f"epoch {epoch}" in config["saves"]:
            train.save_checkpoint(parts=parts, epoch=epoch, losses=losses)
            if config.get("stop") == f"epoch {epoch}":
                raise KeyboardInterrupt
    return losses, model, torch.rand(2), random.random()


@pytest.mark.long
@pytest.mark.parametrize(
    ("loaders", "save", "accumulation"),
    [(0, 9, 1), (2, 9, 1), (0, "epoch 1", 1), (0, 8, 4)],
)
def test_run_that_goes_on_ends_in_the_same_bits(
    loaders: int, save: Any, accumulation: int, work_here: Path
) -> None:
    config = {"loaders": loaders, "saves": [save], "accumulation": accumulation}
    trainer = train.Trainer(num_workers=0, run_dir="straight")
    ((losses, model, draw, number),) = trainer.run(fit, config)
    # The other run has the seed of the first.
    info = (work_here / "straight" / "run.json").read_text()
    assert '"seed"' in info
    checkpoint = trainer.latest_checkpoint
    assert checkpoint is not None
    again = trainer.run(fit, {**config, "saves": []}, checkpoint=checkpoint)
    ((losses_2, model_2, draw_2, number_2),) = again
    assert losses_2 == losses
    assert number_2 == number
    assert torch.equal(draw_2, draw)
    for name, value in model.state_dict().items():
        assert torch.equal(model_2.state_dict()[name], value), name
    # Reports go on where those of the checkpoint end.
    first = 10 if save == 9 else 7 if save == "epoch 1" else 9
    assert again.metrics[0].number == first
    assert len(again.metrics) == len(losses) - first + 1


@pytest.mark.long
def test_run_directory_is_gone_on_with_by_its_name(work_here: Path) -> None:
    config = {"loaders": 0, "saves": [7], "stop": 10}
    with pytest.raises(KeyboardInterrupt):
        train.Trainer(num_workers=0, run_dir="again").run(fit, config)
    results = train.Trainer(num_workers=0, run_dir="again").run(fit, {"loaders": 0, "saves": []})
    assert results[0][0] is not None
    assert [r.number for r in results.metrics] == list(range(8, 19))
    straight = train.Trainer(num_workers=0).run(
        fit, {"loaders": 0, "saves": []}, checkpoint=work_here / "again"
    )
    assert straight[0][0] == results[0][0]
    rows = list(core.read_metrics(core_run(work_here / "again"), "training"))
    standing = [row.steps_completed for row in rows if not row.is_superseded]
    assert standing == list(range(1, 19))


def test_run_that_goes_on_has_the_checkpoints_of_its_earlier_attempts(work_here: Path) -> None:
    def function(config: Any) -> None:
        first = train.load_checkpoint() or 0
        for number in range(first + 1, config["last"] + 1):
            train.report(number=number)
            train.save_checkpoint(number)

    strategy = train.CheckpointStrategy(num_to_keep=2)
    for last in (3, 4, 4):
        trainer = train.Trainer(num_workers=0, run_dir="again")
        callbacks = [train.JsonLinesCallback()]
        results = trainer.run(
            function, {"last": last}, callbacks=callbacks, checkpoint_strategy=strategy
        )
        assert [c.load() for c in results.checkpoints] == [last - 1, last]
        assert trainer.get_last_checkpoint() == last
    assert len(list((work_here / "again" / "checkpoints").iterdir())) == 2
    lines = (work_here / "again" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["metrics"]["number"] for line in lines] == [1, 2, 3, 4]


def noisy_steps(config: dict[str, Any]) -> Any:
    """Train a model with dropout to a step."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))
    model = train.prepare_model(model)
    optimizer = train.prepare_optimizer(torch.optim.Adam(model.parameters()))
    step = 0
    if state := train.load_checkpoint():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        train.restore_random_state()
    while step < config["last"]:
        optimizer.zero_grad()
        model(torch.rand(2, 3)).sum().backward()
        optimizer.step()
        step += 1
        train.save_checkpoint(model=model, optimizer=optimizer, step=step)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.long
def test_run_goes_on_from_a_bucket_in_the_same_bits_and_deletes_there(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    storage = storage_from(f"{s3}/again")
    with storage.store_path("somebodys") as path:
        (path / "file").touch()
    [straight] = run(noisy_steps, {"last": 4})
    strategy = train.CheckpointStrategy(num_to_keep=2)
    for last in (2, 4):
        trainer = train.Trainer(num_workers=0, run_dir="again", checkpoint_storage=storage.url)
        results = trainer.run(noisy_steps, {"last": last}, checkpoint_strategy=strategy)
        assert [c.load()["step"] for c in results.checkpoints] == [last - 1, last]
    assert all(map(torch.equal, results[0], straight))
    assert storage.list() == sorted(c.uuid for c in results.checkpoints)
    # What others are storing there stays.
    assert storage.missing_shards("somebodys", 1) == []
    assert not (tmp_path / "again" / "checkpoints").exists()
    # A run on another machine begins with the checkpoint of this one by its URL.
    monkeypatch.chdir(tmp_path.parent)
    first = results.checkpoints[0].url
    assert first == f"{storage.url}/{results.checkpoints[0].uuid}"
    elsewhere = train.Trainer(num_workers=0, run_dir=tmp_path / "elsewhere")
    [resumed] = elsewhere.run(noisy_steps, {"last": 4}, checkpoint=first)
    assert all(map(torch.equal, resumed, straight))


def test_a_run_directory_is_local() -> None:
    with pytest.raises(
        ValueError,
        match=r"`run_dir` must be a directory of this machine, where the journal of a run stays,"
        " but got 's3://bucket/x'. Hint: `checkpoint_storage` takes URLs.",
    ):
        train.Trainer(num_workers=0, run_dir="s3://bucket/x")


KILLED_BETWEEN = """
from paceline import train

def function():
    for number in (1, 2, 3):
        train.save_checkpoint(number)

train.Trainer(num_workers=0, run_dir="again").run(function)
"""


@pytest.mark.long
def test_checkpoint_of_which_no_journal_tells_is_removed(
    work_here: Path, run_python: Callable[..., Any]
) -> None:
    killed = run_python(KILLED_BETWEEN, PACELINE_FAULT="storage.after_manifest:2")
    assert killed.returncode == -signal.SIGKILL
    storage = DirectoryStorage(work_here / "again" / "checkpoints")
    assert len(storage.list()) == 2
    with storage.store_path("somebodys") as path:
        (path / "file").touch()
    storage.commit("somebodys", {})
    results = train.Trainer(num_workers=0, run_dir="again").run(train.load_checkpoint)
    assert results[0] == 1
    assert storage.list() == sorted(["somebodys", *(c.uuid for c in results.checkpoints)])
    assert len(results.checkpoints) == 1


def test_tensorboard_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'paceline\[tensorboard\]'"):
        train.TensorBoardCallback()


def test_tensorboard_gets_the_numbers_of_the_chief(work_here: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="NOT TESTED: TensorBoard is not installed",
    )

    def function() -> None:
        for number in range(3):
            train.report(loss={"train": number / 2}, name="text")

    results = run(function, callbacks=[train.TensorBoardCallback()])
    events = accumulator.EventAccumulator(str(results.run_dir / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [(1, 0), (2, 0.5), (3, 1)]


def core_run(path: Path) -> Any:
    from paceline.journal import RunDirectory

    return RunDirectory(path)


class ShuffledStream(IterableDataset[Any]):
    """Eight numbers in an order that chance decides."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8).tolist())


def test_each_epoch_of_a_stream_has_a_seed_of_its_own() -> None:
    def two_epochs(loader: Any) -> list[list[int]]:
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    loader = train.prepare_data_loader(DataLoader(ShuffledStream(), 2))
    first, second = two_epochs(loader)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


def count_batches(config: dict[str, Any]) -> None:
    """Train four batches in an epoch, and validate; report once or twice after that."""
    loader = train.prepare_data_loader(DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2))
    state = train.load_checkpoint() or {"epoch": 0}
    for epoch in range(state["epoch"], config["epochs"]):
        for _ in loader:
            pass
        with torch.no_grad():
            for _ in loader:
                pass
        train.report(loss=1.0 / (epoch + 1))
        train.report(epoch=epoch)
        if config.get("repeats"):
            train.report(epoch=epoch + 0.5)
        train.save_checkpoint(epoch=epoch + 1)


def test_the_steps_of_reports_are_the_batches_that_were_trained(work_here: Path) -> None:
    trainer = train.Trainer(num_workers=0, run_dir="counted")
    results = trainer.run(count_batches, {"epochs": 2})
    steps = [(each.number, each.step) for each in results.metrics]
    assert steps == [(1, 4), (2, 4), (3, 8), (4, 8)]
    assert [each.metadata["steps_completed"] for each in results.checkpoints] == [4, 8]
    again = train.Trainer(num_workers=0).run(
        count_batches, {"epochs": 4, "repeats": True}, checkpoint=results.checkpoints[0]
    )
    # A name has one value at each step; the same value again is no other one.
    steps = [(each.number, each.step) for each in again.metrics]
    assert steps == [(3, 8), (4, 8), (5, 9), (6, 12), (7, 12), (8, 13), (9, 16), (10, 16), (11, 17)]
    rows = list(core.read_metrics(core_run(work_here / "counted"), "training"))
    assert [row.steps_completed for row in rows] == [4, 4, 8, 8]


def test_media_of_a_function_are_in_its_run() -> None:
    def function() -> None:
        for step in (1, 2):
            train.report(loss=1.0)
            train.media().report_text(step, "said", f"hello {step}")

    results = run(function)
    found = [row.report for row in core.read_media(RunDirectory(results.run_dir))]
    assert [(one.value, one.steps_completed) for one in found] == [("hello 1", 1), ("hello 2", 2)]
    with pytest.raises(RuntimeError, match=r"`train.media\(\)` must be called within a run"):
        train.media()
