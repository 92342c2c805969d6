"""Libraries in plain scripts: callback, logger, tracker and handler make runs of their own."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import core
from paceline.journal import RunDirectory

pytestmark = [pytest.mark.slow]

TRANSFORMERS = """
import os, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch, transformers
from torch import nn
from paceline.integrations import PacelineCallback

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

class Fault(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **more):
        kind, step = os.environ.get("FAULT", "none:-1").split(":")
        if state.global_step == int(step) and kind == "raise":
            raise ZeroDivisionError("by zero")
        if state.global_step == int(step):
            os.kill(os.getpid(), getattr(signal, kind))

transformers.set_seed(3)
rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = [{"x": row, "labels": row.sum(0, keepdim=True)} for row in rows]
arguments = transformers.TrainingArguments(
    output_dir="out", num_train_epochs=2, save_steps=5, logging_steps=2, eval_strategy="epoch",
    use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
)
callback = PacelineCallback(name="net", store_checkpoints="store" in sys.argv)
trainer = transformers.Trainer(
    model=Net(), args=arguments, train_dataset=data, eval_dataset=data,
    callbacks=[Fault(), callback],
)
trainer.train(resume_from_checkpoint=callback.latest_checkpoint)
state = trainer.model.state_dict()
if int(os.environ.get("RANK", 0)) == 0 and trainer.state.global_step == trainer.state.max_steps:
    print("weights", b"".join(each.numpy().tobytes() for each in state.values()).hex())
trainer.evaluate()
"""

LIGHTNING = """
import sys, warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from paceline.integrations import PacelineLogger

class Net(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if "raise" in sys.argv and self.global_step == 6:
            raise ZeroDivisionError("by zero")
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))
    test_step = validation_step
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

if __name__ == "__main__":
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    devices = 2 if "two" in sys.argv else 1
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=devices, logger=PacelineLogger(name="net"),
        callbacks=[ModelCheckpoint(every_n_epochs=1)], log_every_n_steps=4,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net(lr=0.05), loader, loader)
    trainer.test(trainer.model, loader, verbose=False)
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from paceline.integrations import PacelineTracker

accelerator = Accelerator(cpu=True, log_with=PacelineTracker(name="net"))
accelerator.init_trackers("any", config={"lr": 0.1})
for step in range(1, 4):
    accelerator.log({"loss": 1 / step}, step=step)
accelerator.log({"eval_loss": 0.25}, step=3)
accelerator.log({"loss": 0.2})
accelerator.end_training()
print("ended", flush=True)
"""

IGNITE = """
import os, signal, sys
from ignite.engine import Engine, Events
from ignite.metrics import Average
from paceline.integrations import PacelineHandler

def step(engine, batch):
    if engine.state.iteration == 6 and "raise" in sys.argv:
        raise ZeroDivisionError("by zero")
    if engine.state.iteration == 6 and "term" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
    return {"loss": 1 / engine.state.iteration}

trainer, evaluator = Engine(step), Engine(lambda engine, batch: batch)
Average().attach(evaluator, "mean")
PacelineHandler(name="net", every=2).attach(trainer, evaluator)
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run([1.0, 2.0]))
trainer.add_event_handler(Events.TERMINATE, lambda _: print("saved at", trainer.state.iteration))
trainer.run(range(4), max_epochs=2)
"""

Run = Callable[..., Any]


@pytest.fixture
def in_here(run_python: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a script to its end, and returns what it has printed."""
    monkeypatch.chdir(tmp_path)

    def run(code: str, *arguments: str, rc: int = 0, **environment: str) -> str:
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment
        result = run_python(code, *arguments, **environment)
        assert result.returncode == rc, result.stderr
        return str(result.stdout + result.stderr)

    return run


def the_run(state: core.RunState) -> RunDirectory:
    """Return the newest run, whose state is known."""
    summary = core.list_runs(Path("paceline_runs"))[-1]
    assert summary.state is state
    return RunDirectory(summary.path)


def rows(run: RunDirectory, group: str, name: str) -> dict[int, float]:
    found = core.read_metrics(run, group)
    return {row.steps_completed: row.metrics[name] for row in found if name in row.metrics}


def weights(text: str) -> str:
    found = re.search("weights (.*)", text)
    assert found is not None, text
    return found[1]


def test_a_trainer_of_transformers_is_recorded_and_resumes_in_the_same_bits(in_here: Run) -> None:
    straight = weights(in_here(TRANSFORMERS))
    run = the_run(core.RunState.COMPLETED)
    assert list(rows(run, "training", "loss")) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert list(rows(run, "validation", "eval_loss")) == [8, 16]
    hparams = run.read_info().hparams
    assert hparams is not None
    assert (hparams["save_steps"], "fp16" in hparams) == (5, False)
    checkpoints = core.read_checkpoints(run)
    assert [each.steps_completed for each in checkpoints] == [5, 10, 15, 16]
    assert {each.metadata["path"] for each in checkpoints[-1:]} == {
        str(Path("out/checkpoint-16").absolute())
    }
    for fault, state, rc in (("SIGKILL:12", "CRASHED", -9), ("SIGTERM:6", "PREEMPTED", 0)):
        in_here(TRANSFORMERS, rc=rc, FAULT=fault)
        run = the_run(core.RunState[state])
        assert weights(in_here(TRANSFORMERS, PACELINE_RESUME=str(run.path))) == straight
        assert the_run(core.RunState.COMPLETED).path == run.path
        assert list(rows(run, "validation", "eval_loss"))[-1] == 16
        assert set(rows(run, "training", "loss")) >= {2, 4, 14, 16}


def test_an_exception_fails_the_run_and_a_missing_checkpoint_is_named(in_here: Run) -> None:
    out = in_here(TRANSFORMERS, rc=1, FAULT="raise:7")
    assert "failed (ZeroDivisionError)" in out
    run = the_run(core.RunState.CRASHED)
    os.rename("out", "moved")
    out = in_here(TRANSFORMERS, rc=1, PACELINE_RESUME=str(run.path))
    assert "must be at" in out
    assert "store_checkpoints=True" in out


def test_a_stored_copy_outlives_the_directory_of_the_trainer(in_here: Run) -> None:
    straight = weights(in_here(TRANSFORMERS, "store"))
    in_here(TRANSFORMERS, "store", rc=-9, FAULT="SIGKILL:12")
    os.rename("out", "moved")
    run = the_run(core.RunState.CRASHED)
    assert weights(in_here(TRANSFORMERS, "store", PACELINE_RESUME=str(run.path))) == straight


def test_one_signal_to_any_of_three_ranks_ends_all_and_they_resume(
    in_here: Run, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRANSFORMERS)
    launch = (
        "import os, runpy, sys\n"
        "if os.environ.get('RANK') == os.environ.get('HIT', '2') or 'RANK' not in os.environ:\n"
        "    pass\n"
        "else:\n"
        "    os.environ.pop('FAULT', None)\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    (tmp_path / "hit.py").write_text(launch)
    starter = (
        "import sys\nfrom torch.distributed.run import main\n"
        "main(['--standalone', '--nproc-per-node', '3', 'hit.py'])\n"
    )
    straight = weights(in_here(starter))
    assert len(core.list_runs(Path("paceline_runs"))) == 1
    in_here(starter, FAULT="SIGTERM:3")
    run = the_run(core.RunState.PREEMPTED)
    assert weights(in_here(starter, PACELINE_RESUME=str(run.path))) == straight
    assert the_run(core.RunState.COMPLETED).path == run.path


@pytest.mark.parametrize("devices", ["one", "two"])
def test_a_trainer_of_lightning_is_recorded(in_here: Run, devices: str) -> None:
    in_here(LIGHTNING, devices)
    assert len(core.list_runs(Path("paceline_runs"))) == 1
    run = the_run(core.RunState.COMPLETED)
    num_steps = 16 if devices == "one" else 8
    assert list(rows(run, "training", "loss")) == [*range(4, num_steps + 1, 4)]
    assert set(rows(run, "validation", "val_loss")) >= {num_steps // 2, num_steps}
    assert run.read_info().hparams == {"lr": 0.05}
    checkpoints = core.read_checkpoints(run)
    assert [each.steps_completed for each in checkpoints] == [num_steps // 2, num_steps]
    assert Path(checkpoints[-1].metadata["path"]).is_file()


def test_a_failure_in_lightning_fails_the_run(in_here: Run) -> None:
    assert "failed (ZeroDivisionError)" in in_here(LIGHTNING, "raise", rc=1)
    the_run(core.RunState.CRASHED)


def test_the_tracker_of_accelerate_makes_a_run(in_here: Run) -> None:
    assert "ended" in in_here(ACCELERATE)
    run = the_run(core.RunState.COMPLETED)
    assert rows(run, "training", "loss") == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.2}
    assert rows(run, "validation", "eval_loss") == {3: 0.25}
    assert run.read_info().hparams == {"lr": 0.1}


def test_engines_of_ignite_are_recorded_and_make_room(in_here: Run) -> None:
    pytest.importorskip("ignite")
    in_here(IGNITE)
    run = the_run(core.RunState.COMPLETED)
    assert rows(run, "training", "loss") == {2: 0.5, 4: 0.25, 6: 1 / 6, 8: 0.125}
    assert rows(run, "validation", "mean") == {4: 1.5, 8: 1.5}
    assert "saved at 6" in in_here(IGNITE, "term")
    the_run(core.RunState.PREEMPTED)
    assert "failed (ZeroDivisionError)" in in_here(IGNITE, "raise", rc=1)
    the_run(core.RunState.CRASHED)


def test_a_library_that_is_missing_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ignite", "paceline.integrations._ignite"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError):
            __import__("paceline.integrations._ignite")
