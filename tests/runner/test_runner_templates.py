"""Runners and entrypoints of trials are forks of a template."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are templates on Linux only")

LOOK = """
import os, sys
print("fork" if "paceline._cluster.runner.attempt_run" in sys.modules else "fresh")
print("loaded" if "torch" in sys.modules else "not loaded")
print(sys.argv[1:], os.environ["MINE"], "SECRET" in open("/proc/self/environ").read())
kept = open("kept", "w")
kept.write("written")
"""


def looks(master: Any, script: str = LOOK, **changed: Any) -> list[str]:
    environment = {"variables": {"MINE": "mine"}} | changed.pop("environment", {})
    id_ = master.create(script, environment=environment, **changed)
    trial = master.wait_for_end(id_)
    assert trial["state"] == "COMPLETED", master.output(trial)
    return list(master.output(trial))


@pytest.mark.long
def test_trials_are_forks_with_torch_once_one_has_loaded_torch(
    master: Any, wait_until: Callable[..., None]
) -> None:
    master.start(OTHER="SECRET")
    told = looks(master, LOOK + "import torch", entrypoint="python3 train.py --a b")
    assert told == ["fork", "not loaded", "['--a', 'b'] mine True"]
    wait_until(lambda: looks(master)[1] == "loaded", 600)
    assert looks(master) == ["fork", "loaded", "[] mine True"]
    # Both are handed over by the master's template, which never sees variables of an experiment.
    for template in psutil.Process(master.pid).children(recursive=True):
        # Runners end meanwhile.
        with suppress(psutil.Error):
            if "template" in template.cmdline():
                assert "MINE" not in template.environ()


@pytest.mark.parametrize(
    ("changed", "environment"),
    [
        ({"entrypoint": "python3 -u train.py"}, {}),
        ({"entrypoint": "python3 train.py; true"}, {}),
        ({}, {"variables": {"MINE": "mine", "PACELINE_WARM": "0"}}),
        ({}, {"variables": {"MINE": "mine", "PYTHONHASHSEED": "3"}}),
        ({}, {"variables": {"MINE": "mine", "OMP_NUM_THREADS": "3"}}),
        ({}, {"python": sys._base_executable}),  # type: ignore[attr-defined] # as in `venv`
    ],
)
def test_entrypoints_that_differ_start_afresh(
    shared_master: Any, changed: dict[str, Any], environment: dict[str, Any]
) -> None:
    told = looks(shared_master, environment=environment, **changed)
    assert told[:2] == ["fresh", "not loaded"]


TRIAL = """
import torch
from paceline import pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
    def evaluate_batch(self, batch):
        return {"validation_loss": 1.0}
    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.ones(8, 1), batch_size=2)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.ones(2, 1), batch_size=2)

if __name__ == "__main__":
    with pytorch.init({"global_batch_size": 4}) as context:
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(2))
"""


def start_of(master: Any, **changed: Any) -> str:
    length = {"max_length": {"batches": 2}}
    searcher = {"name": "single", "metric": "validation_loss", **length}
    id_ = master.create(TRIAL, searcher=searcher, **changed)
    trial = master.wait_for_end(id_)
    assert trial["state"] == "COMPLETED", master.output(trial)
    (attempt,) = master.read(f"/trials/{trial['id']}/environments")
    return str(attempt["environment"]["start"])


@pytest.mark.long
def test_a_trial_says_how_it_was_started_and_why(master: Any) -> None:
    master.start()
    assert start_of(master) == "warm"
    assert start_of(master, environment={"warm": False}) == "fresh, as warm starts are turned off"
    said = start_of(master, environment={"variables": {"PYTHONHASHSEED": "3"}})
    assert said == "fresh, as others are set that are read at the start: PYTHONHASHSEED"
    said = start_of(master, entrypoint="python3 train.py && true")
    assert said.startswith("fresh, as the command is another than that of a script or module")
    assert start_of(master, entrypoint="train:Trial") == "warm"
    launcher = "python3 -m paceline.launch.torch_distributed --nproc-per-node 3"
    for options in ("", "--max-restarts 1"):
        assert start_of(master, entrypoint=f"{launcher} {options} train.py") == "warm"
    said = start_of(master, entrypoint=f"{launcher} train.py", environment={"warm": False})
    assert said.startswith("fresh")
