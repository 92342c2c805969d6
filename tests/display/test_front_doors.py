"""What a person sees of a training of each front door, on a real terminal and through a pipe."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRIAL = """
import itertools, sys, time
import torch
from paceline import pytorch

mode = "slow" if sys.argv[1:] else ""


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.ones(32, 1))


class Trial(pytorch.PyTorchTrial):
    data = torch.utils.data.TensorDataset(torch.ones(32, 1))

    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.001))

    def train_batch(self, batch, epoch_idx, batch_idx):
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        loss = self.model(x).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        if mode == "stop" and batch_idx == 11:
            self.context.set_stop_requested(True)
        if mode == "error" and batch_idx == 11:
            raise ValueError("broken")
        if mode == "slow":
            # From the second epoch on so slowly that it is interrupted before it ends.
            time.sleep(0.02 if batch_idx < 10 else 0.5)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        return {"loss": self.model(x).square().mean()}

    def build_training_data_loader(self):
        return pytorch.DataLoader(self.data, batch_size=self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader


class StreamTrial(Trial):
    data = Stream()


def fit(length, trial=Trial, **options):
    options.setdefault("validation_period", pytorch.Epoch(1))
    options.setdefault("reporting_period", pytorch.Batch(6))
    with pytorch.init({"global_batch_size": 4}, seed=1) as context:
        return pytorch.Trainer(trial(context), context).fit(max_length=length, **options)
"""

UNITS = """
for length, trial in (
    (pytorch.Epoch(2), Trial), (pytorch.Batch(10), Trial), (pytorch.Record(50), Trial),
    (pytorch.Epoch(2), StreamTrial),
):
    fit(length, trial)
    print("next", file=sys.stderr, flush=True)
with pytorch.init({"global_batch_size": 4}, seed=1) as context:
    trainer = pytorch.Trainer(Trial(context), context)
    for _ in range(2):
        trainer.train_for(pytorch.Epoch(1))
        trainer.validate()
        print("between", file=sys.stderr, flush=True)
    trainer.save_checkpoint()
for mode in ("stop", "error"):
    print("next", file=sys.stderr, flush=True)
    fit(pytorch.Epoch(5))
"""

Start = Callable[..., "tuple[list[str], int]"]
StartScript = Callable[..., Any]


def told(lines: list[str]) -> list[str]:
    """Return lines without what depends on the time or on chance."""
    shown = []
    for line in lines:
        text = re.sub(
            r"  [\d.,]+ (batches|records|reports)/s|  (\d+\w ?)+ (left|elapsed)", "", line
        )
        text = re.sub(r" (in|after) (\d+\w ?)+", r" \1 TIME ", f"{text} ").rstrip()
        text = re.sub(r"=[\d.e-]+", "=N", text)
        text = re.sub(r"run paceline_runs/\S+", "run DIR", text)
        text = re.sub(r"^look: paceline runs show \d{8}-\d{6}-\S+$", "look", text)
        resume = r"^resume: PACELINE_RESUME=\S+ (\S*python script.py.*|before the same command)$"
        text = re.sub(resume, "resume", text)
        shown.append(re.sub(r"checkpoint (\S+/)?[0-9a-f-]{36}", r"checkpoint \1UUID", text))
    return shown


def parts_of(lines: list[str]) -> list[list[str]]:
    """Return what was told of each training."""
    return [part.splitlines() for part in "\n".join(told(lines)).split("\nnext\n")]


def narrow(lines: list[str]) -> list[str]:
    """Return lines without that for which a terminal does not always have room."""
    return [re.sub(r"(?<=  )(batch|epoch) \d+  | (in|after) TIME", "", line) for line in lines]


def check_places(lines: list[str], directory: Path) -> None:
    """Check that the run and the checkpoint that lines name are there."""
    text = "\n".join(lines)
    runs = re.findall(r"run (paceline_runs/\S+)", text)
    assert runs
    checkpoints = re.findall(r"checkpoint ([0-9a-f-]{36})", text)
    for run in runs:
        assert (directory / run / "run.json").exists()
    for uuid in checkpoints:
        assert any((directory / run / "checkpoints" / uuid).exists() for run in runs)


@pytest.fixture
def piped(run_with_torch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that runs a script and returns what it wrote to standard error."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PACELINE_PROGRESS", raising=False)

    def run(code: str, *arguments: str, **variables: str) -> tuple[list[str], int]:
        result = run_with_torch(code, *arguments, CI="", **variables)
        return result.stderr.splitlines(), result.returncode

    return run


@pytest.fixture
def at_terminal(
    start_script: StartScript, tmp_path: Path, clean_environment: dict[str, str]
) -> Start:
    """Return a function that runs a script and returns what the terminal shows at the end."""
    return lambda code, *arguments: start_script(code, *arguments).finish()


def test_through_a_pipe_each_report_and_the_end_are_a_line_in_any_unit(
    piped: Start, tmp_path: Path
) -> None:
    lines, code = piped(TRIAL + UNITS)
    assert code == 1, lines
    epochs, batches, records, stream, pieces, stopped, failed = parts_of(lines)
    begin, places = "script.py  run DIR", ["run DIR", "checkpoint UUID", "look"]
    assert epochs == [
        begin,
        "epoch 1 of 2  37%  batch 6  loss=N",
        "epoch 1 of 2  50%  batch 8  validation: loss=N",
        "epoch 2 of 2  75%  batch 12  loss=N",
        "epoch 2 of 2  100%  batch 16  validation: loss=N",
        "epoch 2 of 2  100%  batch 16  loss=N",
        "epoch 2 of 2  100%  batch 16  completed in TIME  loss=N  validation_loss=N",
        *places,
    ]
    assert batches == [
        begin,
        "batch 6 of 10  60%  epoch 1  loss=N",
        "batch 8 of 10  80%  epoch 1  validation: loss=N",
        "batch 10 of 10  100%  epoch 2  loss=N",
        "batch 10 of 10  100%  epoch 2  validation: loss=N",
        "batch 10 of 10  100%  epoch 2  completed in TIME  loss=N  validation_loss=N",
        *places,
    ]
    # 52 records, as a batch is not cut.
    assert records[1] == "record 24 of 50  48%  epoch 1  loss=N"
    assert records[-4:] == [
        "record 50 of 50  100%  epoch 2  completed in TIME  loss=N  validation_loss=N",
        *places,
    ]
    assert stream[:4] == [
        begin,
        "epoch 1 of 2  batch 6  loss=N",
        "epoch 1 of 2  50%  batch 8  validation: loss=N",
        "epoch 2 of 2  batch 12  loss=N",
    ]
    assert stream[-4] == epochs[-4]
    assert pieces == [
        begin,
        "batch 8  epoch 1  loss=N",
        "batch 8  epoch 1  validation: loss=N",
        "between",
        "batch 16  epoch 2  loss=N",
        "batch 16  epoch 2  validation: loss=N",
        "between",
        "batch 16  epoch 2  completed in TIME  loss=N  validation_loss=N",
        *places,
    ]
    assert stopped[-4] == (
        "epoch 2 of 5  30%  batch 12  stopped after TIME  loss=N  validation_loss=N"
    )
    assert failed[3:9] == [
        "epoch 2 of 5  27%  batch 11  failed (ValueError) after TIME  loss=N  validation_loss=N",
        *places,
        "resume",
        "Traceback (most recent call last):",
    ]
    assert failed[-1] == "ValueError: broken"
    check_places(lines, tmp_path)


@pytest.mark.long
def test_a_terminal_shows_the_end_of_each_training_and_where_it_is(
    at_terminal: Start, tmp_path: Path
) -> None:
    lines, code = at_terminal(TRIAL + UNITS)
    assert code == 1, lines
    *parts, pieces, stopped, failed = map(narrow, parts_of(lines))
    begin, places = "script.py  run DIR", ["run DIR", "checkpoint UUID", "look"]
    assert parts == [
        [begin, "epoch 2 of 2  100%  completed  loss=N  validation_loss=N", *places],
        [begin, "batch 10 of 10  100%  completed  loss=N  validation_loss=N", *places],
        [begin, "record 50 of 50  100%  completed  loss=N  validation_loss=N", *places],
        [begin, "epoch 2 of 2  100%  completed  loss=N  validation_loss=N", *places],
    ]
    end = "batch 16  completed  loss=N  validation_loss=N"
    assert pieces == [begin, "between", "between", end, *places]
    assert stopped == [begin, "epoch 2 of 5  30%  stopped  loss=N  validation_loss=N", *places]
    assert failed[1].startswith("epoch 2 of 5  27%  failed (ValueError)  loss=N")
    assert failed[2:7] == [*places, "resume", "Traceback (most recent call last):"]
    assert failed[-1] == "ValueError: broken"
    check_places(lines, tmp_path)


@pytest.mark.long
def test_ctrl_c_at_the_terminal_stores_a_checkpoint_and_the_resumed_run_begins_there(
    terminal: Any, start_script: StartScript, tmp_path: Path, piped: Start
) -> None:
    # The terminal shows losses that are not reported yet.
    code = TRIAL + "fit(pytorch.Epoch(5), reporting_period=pytorch.Batch(1000))"
    script = start_script(code, "slow")
    script.await_text(r"epoch 2 of 5.*\r")
    terminal.type("\x03")
    lines, exit_code = script.finish()
    assert exit_code == 0, lines
    *_, end, run, checkpoint, _, resume = narrow(told(lines))
    assert re.fullmatch(r"epoch [2345] of 5  \d+%  interrupted  .*validation_loss=N", end)
    assert (run, checkpoint, resume) == ("run DIR", "checkpoint UUID", "resume")
    check_places(lines, tmp_path)
    [percentage] = re.findall(r"(\d+)%", lines[-5])
    begin, first, *_, end, _, _, _ = told(piped(code, PACELINE_RESUME="auto")[0])
    assert re.fullmatch(r"script.py  run DIR  resumes at step \d+ from [0-9a-f-]{36}", begin)
    assert first.startswith("epoch ")
    assert int(re.findall(r"(\d+)%", first)[0]) >= int(percentage)
    assert end == "epoch 5 of 5  100%  batch 40  completed in TIME  loss=N  validation_loss=N"


DECLARATIVE = """
import sys
import torch
from torch.utils.data import TensorDataset
from paceline.declarative import ModelParameters, Trainer, TrainingConfig

x = torch.ones(40, 2)
trainer = Trainer(TrainingConfig(
    model_class=torch.nn.Linear,
    model_params=ModelParameters.of({"in_features": 2, "out_features": 1}),
    dataset=TensorDataset(x, x.sum(1, keepdim=True)), pred_names=["sum"],
    loss_function=torch.nn.MSELoss(), batch_size_per_process=8, num_epochs=int(sys.argv[1]),
    early_stopping_patience=2, learning_rate_per_process=float(sys.argv[2]),
    scheduler=None, model_save_dir="results",
))
trainer.build()
trainer.run_training()
"""


@pytest.mark.long
def test_config_objects_show_epochs_losses_and_the_end(
    piped: Start, at_terminal: Start, tmp_path: Path
) -> None:
    lines, code = piped(DECLARATIVE, "2", "0.01")
    assert code == 0, lines
    assert told(lines) == [
        "script.py  run DIR",
        "epoch 1 of 2  50%  batch 5  loss=N",
        "epoch 1 of 2  50%  batch 5  validation: val_loss=N",
        "epoch 2 of 2  100%  batch 10  loss=N",
        "epoch 2 of 2  100%  batch 10  validation: val_loss=N",
        "epoch 2 of 2  100%  batch 10  completed in TIME  loss=N  val_loss=N",
        "run DIR",
        "checkpoint results/checkpoints/UUID",
        "look",
    ]
    # A rate of 0 makes no progress, so that its patience ends after three of nine epochs.
    lines, code = at_terminal(DECLARATIVE, "9", "1e-30")
    assert code == 0, lines
    _, end, run, checkpoint, _ = narrow(told(lines))
    assert end == "epoch 3 of 9  33%  stopped  loss=N  val_loss=N"
    assert (run, checkpoint) == ("run DIR", "checkpoint results/checkpoints/UUID")
    [stored] = re.findall(r"results/checkpoints/\S+", "\n".join(lines))
    assert (tmp_path / stored).exists()


FUNCTION = """
import sys
from paceline import train


def train_func():
    for epoch in range(3):
        if epoch == 2 and sys.argv[1:]:
            raise ValueError("broken")
        train.save_checkpoint(epoch=epoch)
        train.report(loss=1 / (epoch + 1), name="x")


if __name__ == "__main__":
    progress = train.ProgressCallback(3, unit="epochs")
    with train.Trainer(num_workers=0) as trainer:
        trainer.run(train_func, callbacks=[progress])
"""


@pytest.mark.long
def test_a_train_function_shows_its_reports_and_the_end(
    piped: Start, at_terminal: Start, tmp_path: Path
) -> None:
    lines, code = piped(FUNCTION)
    assert code == 0, lines
    assert told(lines) == [
        "script.py  run DIR",
        "epoch 1 of 3  33%  loss=N",
        "epoch 2 of 3  66%  loss=N",
        "epoch 3 of 3  100%  loss=N",
        "epoch 3 of 3  100%  completed in TIME  loss=N",
        "run DIR",
        "checkpoint UUID",
        "look",
    ]
    check_places(lines, tmp_path)
    lines, code = at_terminal(FUNCTION, "error")
    assert code == 1
    shown = narrow(told(lines))
    assert shown[1] == "epoch 2 of 3  66%  failed (ValueError)  loss=N"
    assert shown[2:6] == ["run DIR", "checkpoint UUID", "look", "resume"]
    assert shown[-1] == "ValueError: broken"
