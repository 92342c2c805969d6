"""A more important experiment takes the slot of one that runs, which goes on later, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Experiment

MODEL = """
import os
import time
from pathlib import Path

import torch
from paceline import pytorch


class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Dropout(0.3),
                                    torch.nn.Linear(5, 1))
        self.model = context.wrap_model(model)
        adam = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer = context.wrap_optimizer(adam)

    def train_batch(self, batch, epoch_idx, batch_idx):
        gate = Path(os.environ["GATE"])
        while batch_idx == 15 and not gate.exists():
            time.sleep(0.02)
            if Path(os.environ["LEAVE"]).exists():
                break
        if batch_idx > 15 and not gate.exists():
            time.sleep(0.5 * (batch_idx - 15))  # until it hears that it is to leave
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": self.model(batch).square().mean()}

    def build_training_data_loader(self):
        data = torch.randn(96, 3, generator=torch.Generator().manual_seed(1))
        return pytorch.DataLoader(data, batch_size=4, shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.ones(8, 3), batch_size=4)
"""
HIGH = """
import time
from pathlib import Path
import os

import paceline

with paceline.core.init() as context:
    while not Path(os.environ["DONE"]).exists():
        time.sleep(0.02)
    context.train.report_validation_metrics(1, {"validation_loss": 1.0})
"""


def curves(experiment: Experiment) -> dict[str, list[Any]]:
    """Return all that the trial of an experiment reported, as the bits are."""
    [trial] = experiment.trials()
    return {
        group: [(row.steps_completed, row.metrics) for row in trial.iter_metrics(group)]
        for group in ("training", "validation")
    }


@pytest.mark.long
def test_it_takes_the_slot_and_the_other_one_goes_on_bit_for_bit_after_a_restart_of_the_master(
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    master = make_master(1).start()
    code = write_context("")
    (code / "model_def.py").write_text(MODEL)
    (code / "high.py").write_text(HIGH)
    files = {name: tmp_path / name.lower() for name in ("GATE", "LEAVE", "DONE")}
    config = {
        "entrypoint": "model_def:Trial",
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 30}},
        "min_validation_period": {"batches": 10},
        "scheduling_unit": 1,
        "resources": {"priority": 80},
        "reproducibility": {"experiment_seed": 11},
        "environment": {"variables": {name: str(path) for name, path in files.items()}},
        "max_restarts": 0,
    }
    client = master.client()
    client.set_pool("default", policy="priority")
    low = client.create_experiment(config, code)
    wait_until(lambda: client.get_experiment(low.id).trials()[0].data.steps_completed >= 10)
    urgent = {"entrypoint": "python3 high.py", "resources": {"priority": 5}}
    single = {"searcher": {"name": "single", "metric": "validation_loss"}}
    high = client.create_experiment(config | urgent | single, code)

    def preempted() -> bool:
        attempts = client.get_trial(low.trials()[0].id).data.attempts
        return attempts[-1].preempt_reason is not None

    wait_until(preempted)
    files["LEAVE"].touch()
    wait_until(lambda: client.get_experiment(high.id).data.num_running == 1)
    wait_until(client.queue)
    [waits] = client.queue()
    assert (waits.experiment_id, waits.priority, waits.reason) == (low.id, 80, "slots_in_use")
    left_at = client.get_experiment(low.id).trials()[0].data.steps_completed
    assert 10 <= left_at < 30

    master.kill()
    master.start()
    client = master.client()
    [pool] = client.pools()
    assert pool.policy == "priority"
    assert client.get_experiment(high.id).data.num_running == 1
    [waits] = client.queue()
    assert (waits.experiment_id, waits.priority) == (low.id, 80)

    files["GATE"].touch()
    files["DONE"].touch()
    assert client.get_experiment(high.id).wait(0.1).value == "COMPLETED"
    assert client.get_experiment(low.id).wait(0.1).value == "COMPLETED"
    trial = client.get_trial(client.get_experiment(low.id).trials()[0].id).data
    assert [attempt.resumed_steps for attempt in trial.attempts] == [0, left_at]
    assert (trial.restarts, trial.retries) == (0, 0)
    straight = client.create_experiment(config, code)
    assert straight.wait(0.1).value == "COMPLETED"
    assert curves(client.get_experiment(low.id)) == curves(client.get_experiment(straight.id))
    assert len(curves(straight)["training"]) == 30
