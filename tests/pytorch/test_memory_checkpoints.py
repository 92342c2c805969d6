"""States in memory between checkpoints: taken by the next start, or left with a warning."""

import logging
import math
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import core, pytorch
from paceline._base.files import remove_leftover_directories
from paceline._base.run_memory import own_run_memory, run_memory
from paceline.core._run_storage import memory_storage, newest_in_memory
from paceline.journal import RunDirectory
from paceline.pytorch import _memory_checkpoints
from paceline.pytorch._loop_agreement import RankAgreement

KILLED_AT = 6


class Lost(Exception):
    """The end of a process, as far as its training is concerned."""


class Trial(pytorch.PyTorchTrial):
    """Waits with each batch until the last state is whole in memory."""

    trainer: pytorch.Trainer
    factor = 1.0

    def __init__(
        self, context: pytorch.PyTorchTrialContext, before_batch: Callable[[int], None]
    ) -> None:
        self.context = context
        self.before_batch = before_batch
        self.model = context.wrap_model(nn.Sequential(nn.Dropout(0.3), nn.Linear(2, 1)))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = context.wrap_optimizer(sgd)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if memory := self.trainer._training.checkpoints.memory:
            memory._saver._wait()
        self.before_batch(batch_idx)
        loss = self.model(batch[0]).pow(2).mean() * self.factor
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"validation_loss": self.model(batch[0]).pow(2).mean()}

    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2) / 16), batch_size=1)

    build_validation_data_loader = build_training_data_loader


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Own memory for states, which go there after each batch; yield its directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RankAgreement, "look_interval_s", 1e-6)
    monkeypatch.setattr(_memory_checkpoints, "_LEAST_INTERVAL_S", 0.0)
    root = tmp_path / "memory"
    root.mkdir()
    monkeypatch.setenv("PACELINE_MEMORY_DIR", str(root))
    with run_memory(is_wanted=True) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        path = own_run_memory()
        assert path is not None
        yield path


def fit(
    before_batch: Callable[[int], None] = lambda batch_idx: None,
    *,
    resume: Path | None = None,
    length: int = 10,
    **options: Any,
) -> tuple[Path, list[float]]:
    """Train, and return the run directory and the weights."""
    hparams = {"global_batch_size": 1}
    with pytorch.init(hparams=hparams, seed=1, name="run", resume=resume) as context:
        trial = Trial(context, before_batch)
        trial.trainer = pytorch.Trainer(trial, context)
        options = {"memory_checkpoints": 0.99, **options}
        trial.trainer.fit(max_length=pytorch.Batch(length), **options)
        return context.core.run_dir, [p.item() for p in trial.model[1].weight.flatten()]


def lose(*, at: int = KILLED_AT, **options: Any) -> Path:
    """Lose the process before a batch, and return its run directory."""

    def before_batch(batch_idx: int) -> None:
        if batch_idx == at:
            raise Lost

    with pytest.raises(Lost):
        fit(before_batch, **options)
    return core.list_runs(Path("paceline_runs"))[-1].path


def batches_from(run: Path, **options: Any) -> tuple[list[int], list[float]]:
    """Resume a run; return the batches that it trained, and the weights."""
    batches: list[int] = []
    _, weights = fit(batches.append, resume=run, **options)
    return batches, weights


def states(memory: Path) -> list[Path]:
    return [path.parent for path in memory.glob("*/*/manifest.json")]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in found]


def test_the_next_start_takes_the_newest_state(memory: Path) -> None:
    _, straight = fit(memory_checkpoints=None)
    run = lose()
    [state] = states(memory)
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700
    batches, weights = batches_from(run)
    assert batches == [*range(KILLED_AT, 10)]
    assert weights == straight
    assert not state.exists()
    # A master and people see stored checkpoints only.
    assert [one.steps_completed for one in core.read_checkpoints(RunDirectory(run))] == [10]
    assert not [*memory.iterdir()]


def test_a_state_is_taken_until_there_is_a_newer_one(memory: Path) -> None:
    run = lose()
    lose(at=KILLED_AT, resume=run)
    assert batches_from(run)[0] == [*range(KILLED_AT, 10)]


def test_no_state_of_a_training_that_has_diverged_is_taken(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, straight = fit(memory_checkpoints=None)

    def before_batch(batch_idx: int) -> None:
        if batch_idx == KILLED_AT:
            monkeypatch.setattr(Trial, "factor", math.nan)

    with pytest.raises(pytorch.NonFiniteError, match=f"rank 0 at batch {KILLED_AT}"):
        fit(before_batch)
    monkeypatch.setattr(Trial, "factor", 1.0)
    assert len(states(memory)) == 1
    batches, weights = batches_from(core.list_runs(Path("paceline_runs"))[-1].path)
    assert batches == [*range(KILLED_AT, 10)]
    assert weights == straight


def test_a_newer_checkpoint_is_taken_instead(memory: Path) -> None:
    run = lose(checkpoint_period=pytorch.Batch(KILLED_AT))
    # The step has a checkpoint, so there is no state of it in memory.
    assert len(states(memory)) == 1
    assert batches_from(run)[0] == [*range(KILLED_AT, 10)]
    [(found, steps)] = [(s.latest_checkpoint, s.last_step) for s in core.list_runs(run.parent)]
    assert found
    assert steps == 10


def test_a_damaged_state_is_passed_over(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = lose(checkpoint_period=pytorch.Batch(4))
    [state] = states(memory)
    weights = state / "model_0.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert batches_from(run)[0] == [*range(4, 10)]
    assert any("Passing over a state in memory" in text for text in warnings(caplog))


def test_the_state_before_a_damaged_one_is_taken(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = str(uuid4())
    storage = memory_storage(run_id)
    assert storage is not None
    uuids = {step: str(uuid4()) for step in (6, 4, 5)}
    for step, uuid in uuids.items():
        with storage.store_path(uuid) as path:
            (path / "weights").write_text(str(step))
        storage.commit(uuid, {"steps_completed": step})
    weights = storage.root / uuids[6] / "weights"
    weights.chmod(0o600)
    weights.write_text("7")
    assert newest_in_memory(run_id, 3) == (uuids[5], 5)
    [state] = states(memory)
    assert state.name == uuids[5]
    [text] = warnings(caplog)
    assert "Passing over a state in memory" in text
    assert uuids[6] in text
    assert newest_in_memory(run_id, 5) == (None, 5)
    assert states(memory) == []


def test_a_half_written_state_is_never_taken(memory: Path) -> None:
    run = lose(checkpoint_period=pytorch.Batch(4))
    [state] = states(memory)
    (state / "manifest.json").unlink()
    assert batches_from(run)[0] == [*range(4, 10)]


def test_a_state_of_another_run_is_never_taken(memory: Path) -> None:
    lose()
    batches: list[int] = []
    fit(batches.append)
    assert batches == [*range(10)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", ["", "model_0.safetensors"])
def test_a_state_of_another_user_is_never_taken(memory: Path, name: str) -> None:
    run = lose(checkpoint_period=pytorch.Batch(4))
    [state] = states(memory)
    os.chown(state / name, 65534, 65534)
    assert batches_from(run)[0] == [*range(4, 10)]


@pytest.mark.parametrize("what", ["open to others", "a link"])
def test_memory_that_is_not_private_is_not_used(
    memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    run = lose(checkpoint_period=pytorch.Batch(4))
    if what == "a link":
        (tmp_path / "link").symlink_to(memory)
        monkeypatch.setenv("PACELINE_RUN_MEMORY", str(tmp_path / "link"))
    else:
        memory.chmod(0o755)
    assert batches_from(run)[0] == [*range(4, 10)]
    assert any("No state is kept in memory" in text for text in warnings(caplog))


def test_a_state_in_memory_is_stored_where_training_is_preempted(memory: Path) -> None:
    run = lose()
    hparams = {"global_batch_size": 1}
    with pytorch.init(hparams=hparams, seed=1, name="run", resume=run) as context:
        trial = Trial(context, lambda batch_idx: None)
        uuid = pytorch.Trainer(trial, context).save_checkpoint()
    [stored] = core.read_checkpoints(RunDirectory(run))
    assert (stored.uuid, stored.steps_completed) == (uuid, KILLED_AT)


def test_too_little_memory_is_one_warning(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_memory_checkpoints, "_room", lambda directory: 50)
    fit()
    [text] = warnings(caplog)
    assert "2 states need" in text
    assert "0 MB are free" in text
    assert not states(memory)


def fill(path: Path) -> None:
    """Write a file until there is no space left."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(descriptor, bytes(4096))
    os.close(descriptor)


def test_memory_that_fills_is_one_warning_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tiny)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        monkeypatch.setenv("PACELINE_MEMORY_DIR", str(tiny))
        with run_memory(is_wanted=True) as variables:
            monkeypatch.setenv(*next(iter(variables.items())))

            batches: list[int] = []

            def before_batch(batch_idx: int) -> None:
                batches.append(batch_idx)
                if batch_idx == 3:
                    fill(tiny / "other")

            fit(before_batch)
            assert batches == [*range(10)]
        texts = warnings(caplog)
        assert len(texts) == 1
        assert "States are no longer kept in memory" in texts[0]
        assert [path.name for path in tiny.iterdir()] == ["other"]
    finally:
        subprocess.run(["umount", str(tiny)], check=True)


def test_without_an_owner_there_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PACELINE_RUN_MEMORY")
    fit()
    [text] = warnings(caplog)
    assert text.startswith("`memory_checkpoints` has no effect")


@pytest.mark.parametrize("value", ["often", 0, -1.0, float("nan"), float("inf")])
def test_wrong_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="`memory_checkpoints` must be True, seconds, or a share"):
        fit(memory_checkpoints=value)


def test_seconds_pass_between_two_states(memory: Path) -> None:
    found: list[int] = []
    fit(lambda batch_idx: found.append(len(states(memory))), memory_checkpoints=1e6)
    assert found == [0, *[1] * 9]


@pytest.mark.parametrize(
    ("boundaries", "interval_s"), [(None, 5.0), (object(), 10.0)], ids=["alone", "survivors"]
)
def test_a_share_of_the_time_is_also_for_what_survivors_need(
    monkeypatch: pytest.MonkeyPatch, boundaries: object, interval_s: float
) -> None:
    memory: Any = SimpleNamespace(
        _every=0.02, boundaries=boundaries, _stall_s=0.1, _begun_s=100.0, _processor_share=1.0,
        _saver=SimpleNamespace(processor_s=0.0), _parts=SimpleNamespace(copy_s=0.0),
    )  # fmt: skip
    found = []
    for now in (interval_s - 0.1, interval_s + 0.1):
        monkeypatch.setattr(time, "monotonic", lambda now=now: 100.0 + now)
        found.append(_memory_checkpoints.MemoryCheckpoints._is_due(memory))
    assert found == [False, True]


def test_leftovers_of_killed_owners_are_removed_and_no_others(tmp_path: Path, memory: Path) -> None:
    killed = tmp_path / "memory" / "paceline-locked-killed"
    (killed / "run").mkdir(parents=True)
    (tmp_path / "memory" / "paceline-locked-link").symlink_to(tmp_path)
    foreign = tmp_path / "memory" / "paceline-locked-foreign"
    foreign.mkdir()
    if os.geteuid() == 0:
        os.chown(foreign, 65534, 65534)
    remove_leftover_directories(tmp_path / "memory")
    assert not killed.exists()
    assert memory.exists()
    assert (tmp_path / "memory" / "paceline-locked-link").is_symlink()
    assert foreign.exists() == (os.geteuid() == 0)


def test_a_state_is_not_noted_while_reports_wait_for_disk_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytorch.init(hparams={"global_batch_size": 1}, seed=1, name="run") as context:
        trial = Trial(context, lambda batch_idx: None)
        trial.trainer = pytorch.Trainer(trial, context)
        trial.trainer.fit(max_length=pytorch.Batch(2))
        training = trial.trainer._training
        assert training.small_state([]).training["position"]["batches"] == 2
        journal = context.core.checkpoint._journal
        with monkeypatch.context() as patched:
            patched.setattr(journal, "_is_disk_full", True)
            patched.setattr(journal, "_write_pending", lambda: None)
            with pytest.raises(OSError, match="reports wait for space"):
                training.small_state([])
