"""What passes leave in a run directory."""

import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from paceline import core
from paceline.core import RunState
from paceline.creators import PyTorchTrainer
from paceline.journal import RunDirectory

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def model_creator(config: dict[str, Any]) -> nn.Module:
    return nn.Linear(4, 1)


def data_creator(config: dict[str, Any]) -> Any:
    return DATA, DATA


def optimizer_creator(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.01))


def make(**given: Any) -> PyTorchTrainer:
    options: dict[str, Any] = {
        "data_creator": data_creator,
        "config": {"lr": 0.02},
        "batch_size": 4,
        "dataloader_config": {"num_workers": 0},
    }
    return PyTorchTrainer(
        model_creator,
        optimizer_creator=optimizer_creator,
        loss_creator=nn.MSELoss,
        **{**options, **given},
    )


def rows(path: Path, group: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the reports of a group that stand."""
    return [
        (row.steps_completed, row.metrics)
        for row in core.read_metrics(RunDirectory(path), group)
        if not row.is_superseded
    ]


def test_passes_are_reported_as_any_run_is() -> None:
    with make(num_workers=2, seed=5) as trainer:
        assert trainer.run_dir is None
        told = [trainer.train(), trainer.train(num_steps=2, reduce_results=False)]
        checked = trainer.validate()
        path = trainer.run_dir
        assert path is not None
        assert path.parent == Path.cwd() / "paceline_runs"
        assert core.summarize_run(path).state is RunState.RUNNING
    assert core.summarize_run(path).state is RunState.COMPLETED
    assert rows(path, "training")[0] == (6, told[0])
    assert rows(path, "training")[1][1]["num_samples"] == 8
    assert [step for step, _ in rows(path, "training")] == [6, 8]
    assert rows(path, "validation") == [(8, checked)]
    info = RunDirectory(path).read_info()
    assert (info.hparams, info.seed) == ({"lr": 0.02}, 5)


class Deadly(Dataset[Any]):
    """Samples of which one kills its process once, while a file is there."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        order = Path(os.environ["DEADLY"])
        if index == 20 and order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return DATA[index]


def test_a_pass_that_was_retried_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = tmp_path / "order"
    monkeypatch.setenv("DEADLY", str(order))
    with make(num_workers=2, run_dir="here", data_creator=lambda config: Deadly()) as trainer:
        trainer.train()
        order.touch()
        told = trainer.train()
        assert not order.exists()
    reports = list(core.read_metrics(RunDirectory(tmp_path / "here")))
    assert [report.steps_completed for report in reports] == [6, 12]
    assert reports[1].metrics == told


def test_steps_go_on_whatever_state_is_loaded() -> None:
    with make() as trainer:
        trainer.train()
        state = trainer.state_dict()
        trainer.train()
        before = trainer.validate()
        trainer.load_state_dict(state)
        told = trainer.train(num_steps=3)
        after = trainer.validate()
        path = trainer.run_dir
    assert path is not None
    assert [step for step, _ in rows(path, "training")] == [6, 12, 15]
    assert rows(path, "training")[2] == (15, told)
    assert rows(path, "validation") == [(12, before), (15, after)]


def test_a_run_goes_on_where_an_earlier_process_has_ended(tmp_path: Path) -> None:
    for _ in range(2):
        with make(run_dir="run") as trainer:
            trainer.train()
            trainer.validate()
    assert [step for step, _ in rows(tmp_path / "run", "training")] == [6, 12]
    assert [step for step, _ in rows(tmp_path / "run", "validation")] == [6, 12]
    assert core.summarize_run(tmp_path / "run").num_attempts == 2


def test_trainers_at_the_same_time_are_runs_of_their_own() -> None:
    config = {"lr": 0.02}
    with make(config=config) as one:
        config["lr"] = 0.5
        with make(config=config) as other:
            for trainer in (one, other, one):
                trainer.train()
            paths = one.run_dir, other.run_dir
    assert paths[0] is not None
    assert paths[1] is not None
    assert [len(rows(path, "training")) for path in paths if path is not None] == [2, 1]
    found = [RunDirectory(path).read_info().hparams for path in paths if path is not None]
    assert found == [{"lr": 0.02}, {"lr": 0.5}]


def test_of_several_validations_of_one_state_the_first_stands() -> None:
    with make() as trainer:
        first = trainer.validate()
        part = trainer.validate(num_steps=1, profile=True)
        trainer.validate()
        path = trainer.run_dir
    assert path is not None
    assert rows(path, "validation") == [(0, first), (0, {"profile": part["profile"]})]


def without_the_data(model: nn.Module, info: dict[str, Any]) -> dict[str, Any]:
    values = {"reward": float(info["round"]), "huge": 2**70, "nan": math.nan}
    return {**values, "curve": [0.5] * 3, "name": "x", "of": {"one": 1, "text": "y"}}


def test_passes_without_batches_and_odd_values_are_reported_too() -> None:
    with make(train_function=without_the_data) as trainer:
        for number in range(3):
            told = trainer.train(info={"round": number})
        path = trainer.run_dir
    assert told["curve"] == [0.5] * 3
    assert path is not None
    reported = rows(path, "training")
    assert [(step, metrics["reward"]) for step, metrics in reported] == [(1, 0), (2, 1), (3, 2)]
    counts = {"epoch", "batch_count", "num_samples"}
    assert reported[0][1].keys() == {*counts, "reward", "nan", "of"}
    assert reported[0][1]["of"] == {"one": 1}


def test_a_program_that_reports_by_itself_gets_no_second_run() -> None:
    with core.init(name="own") as context, make() as trainer:
        told = trainer.train()
        context.train.report_training_metrics(1, {"loss": told["train_loss"]})
        assert trainer.run_dir is None
    assert [run.name for run in core.list_runs(Path("paceline_runs"))] == ["own"]
    with make() as trainer:
        trainer.train()
        assert trainer.run_dir is not None


def test_a_program_in_a_trial_says_itself_what_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path / "trial"))
    with make() as trainer:
        trainer.train()
        assert trainer.run_dir is None
    assert not (tmp_path / "trial").exists()
    assert not (tmp_path / "paceline_runs").exists()


def test_training_goes_on_where_no_run_directory_can_be_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Path("paceline_runs").write_text("no directory")
    with caplog.at_level(logging.WARNING), make() as trainer:
        assert trainer.train()["batch_count"] == 6
        assert trainer.train()["batch_count"] == 6
    assert caplog.text.count("Passes are not recorded") == 1


def test_a_run_directory_that_was_asked_for_must_be_possible() -> None:
    Path("taken").write_text("no directory")
    with make(run_dir="taken/run") as trainer:
        for _ in range(2):
            with pytest.raises(OSError, match="taken"):
                trainer.train()


def test_nothing_is_said_of_going_on_with_an_earlier_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no stored state to go on from."""
    monkeypatch.setenv("PACELINE_RESUME", "auto")
    for number in range(1, 3):
        with pytest.raises(RuntimeError, match="enough"):
            end_in_with(None, RuntimeError("enough"))
        runs = core.list_runs(Path("paceline_runs"))
        assert [run.num_attempts for run in runs] == [1] * number
    assert "PACELINE_RESUME" not in caplog.text


SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from paceline.creators import PyTorchTrainer

data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
trainer = PyTorchTrainer(
    lambda config: nn.Linear(4, 1),
    lambda config: data,
    lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
    nn.MSELoss,
    dataloader_config={"num_workers": 0},
)
trainer.train()
if sys.argv[1:] == ["raise"]:
    raise KeyError("why it ended")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "state", "error"),
    [((), RunState.COMPLETED, None), (("raise",), RunState.CRASHED, "KeyError: 'why it ended'")],
)
def test_a_program_may_end_without_shutdown(
    run_with_torch: Callable[..., "subprocess.CompletedProcess[str]"],
    tmp_path: Path,
    arguments: tuple[str, ...],
    state: RunState,
    error: str | None,
) -> None:
    ended = run_with_torch(SCRIPT, *arguments)
    assert ended.returncode == (1 if arguments else 0), ended.stderr
    [run] = core.list_runs(tmp_path / "paceline_runs")
    assert (run.name, run.state, run.error, run.last_step) == ("script", state, error, 1)


def end_in_with(path: Path | None, error: BaseException) -> None:
    with make(run_dir=path) as trainer:
        trainer.train()
        raise error


@pytest.mark.parametrize(
    ("error", "text"),
    [(RuntimeError("enough"), "RuntimeError: enough"), (SystemExit(0), None)],
)
def test_what_ends_the_block_is_how_the_run_ended(
    tmp_path: Path, error: BaseException, text: str | None
) -> None:
    with pytest.raises(type(error)):
        end_in_with(tmp_path / "run", error)
    assert core.summarize_run(tmp_path / "run").error == text


def fail_when_asked(model: nn.Module, info: dict[str, Any]) -> dict[str, Any]:
    if info.get("fails"):
        raise ArithmeticError("on purpose")
    return {}


def test_a_failed_pass_is_how_the_run_ended_unless_another_succeeds(tmp_path: Path) -> None:
    for name in ("last", "first"):
        trainer = make(run_dir=name, train_function=fail_when_asked)
        trainer.train()
        with pytest.raises(ArithmeticError):
            trainer.train(info={"fails": True})
        if name == "first":
            trainer.train()
        trainer.shutdown()
    summary = core.summarize_run(tmp_path / "last")
    assert (summary.state, summary.error) == (RunState.CRASHED, "ArithmeticError: on purpose")
    assert core.summarize_run(tmp_path / "first").state is RunState.COMPLETED


def slow_function(config: dict[str, Any], train_iterator: Any) -> dict[str, Any]:
    """Train for a tenth of a second; the chief may be told to die in it, once."""
    for _ in train_iterator:
        time.sleep(0.02)
    mark = config.get("mark")
    if mark is not None and not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def slow_validation(config: dict[str, Any], val_iterator: Any) -> dict[str, Any]:
    time.sleep(0.05)
    return {}


def test_the_time_of_passes_is_divided(tmp_path: Path) -> None:
    functions = {"train_function": slow_function, "validation_function": slow_validation}
    with make(**functions) as trainer:
        trainer.train()
        trainer.validate()
        time.sleep(0.03)
        trainer.train()
        trainer.save(tmp_path / "state.pt")
    assert trainer.run_dir is not None
    shares = core.time_shares_of_run(trainer.run_dir)
    assert shares.training_s >= 2 * 6 * 0.02
    assert shares.validation_s >= 0.05
    assert shares.other_s >= 0.03
    assert min(shares.checkpoint_s, shares.data_wait_s) > 0
    assert shares.lost_s == shares.undivided_s == 0
    assert shares.goodput is not None


def test_the_time_of_lost_workers_is_lost(tmp_path: Path) -> None:
    config = {"lr": 0.02, "mark": str(tmp_path / "mark")}
    with make(train_function=slow_function, config=config) as trainer:
        trainer.train()
    assert trainer.run_dir is not None
    shares = core.time_shares_of_run(trainer.run_dir)
    assert (tmp_path / "mark").exists()
    assert min(shares.lost_s, shares.training_s) >= 6 * 0.02
    with make(train_function=fail) as trainer, pytest.raises(ValueError, match="no good"):
        trainer.train()
    assert trainer.run_dir is not None
    shares = core.time_shares_of_run(trainer.run_dir)
    # The run ended without a word of its times but that they began.
    assert shares.training_s == 0


def fail(config: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no good")


def test_media_are_in_the_run_of_the_trainer() -> None:
    trainer = make()
    assert trainer.media is None
    trainer.train()
    assert trainer.media is not None
    assert trainer.run_dir is not None
    trainer.media.report_histogram(1, "weights", trainer.get_model().weight, num_bins=2)
    trainer.shutdown()
    [row] = core.read_media(RunDirectory(trainer.run_dir))
    assert (row.report.name, sum(row.report.value["counts"])) == ("weights", 4)
