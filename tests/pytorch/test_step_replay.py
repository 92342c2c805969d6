"""Steps computed twice: the training stays the same, differences are named, others are refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import hashlib, json, pickle, random
from pathlib import Path
import torch
from torch import nn
from paceline import pytorch
from paceline.core._read_runs import read_alerts, read_metrics
from paceline.journal import RunDirectory

class Counter(nn.Module):
    # State that nobody knows of: the result depends on the number of calls.
    def __init__(self, counts):
        super().__init__()
        self.counts, self.num_calls = counts, 0
    def forward(self, x):
        self.num_calls += self.counts
        return x + 1e-3 * self.num_calls

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context, what, odd):
        self.context, self.what, self.num_trained = context, what, 0
        counts = what == "counter" and context.distributed.rank == odd
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), Counter(counts)]
        self.model = context.wrap_model(nn.Sequential(*layers, nn.Linear(8, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))
        self.others = []
        if what in ("turns", "two"):
            self.others = [nn.Parameter(torch.ones(1))]
            self.second = context.wrap_optimizer(torch.optim.SGD(self.others, lr=0.01))
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        if what == "average":
            # Known, but trained by no optimizer.
            context.wrap_model(self.average)
        self.scaler = None
        if what == "scaler":
            self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", growth_interval=2))
        self.noted = context.wrap_reducer(sum, "noted", for_validation=False)
    def train_batch(self, batch, epoch_idx, batch_idx):
        context, self.num_trained = self.context, self.num_trained + 1
        if self.what == "generator":
            random.random()
            batch[0] += torch.randn((), generator=GENERATOR) * 1e-3
        if self.what == "average":
            with torch.no_grad():
                next(self.average.parameters()).mul_(0.9)
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1]) * self.num_trained
        self.noted.update(float(loss))
        if self.what == "plain":
            loss.backward()
            self.optimizer.step()
            return {"loss": loss}
        if self.what == "two":
            loss = loss * self.others[0].mean()
        if self.scaler is not None:
            context.backward(self.scaler.scale(loss))
            if context.accumulation.is_boundary:
                self.scaler.unscale_(self.optimizer)
            context.step_optimizer(self.optimizer, scaler=self.scaler)
            self.scaler.update()
        elif self.what != "never":
            context.backward(loss)
            context.step_optimizer(self.optimizer)
        if self.what == "turns":
            context.backward(self.others[0].sum() * self.model(batch[0]).mean())
        if self.what in ("turns", "two"):
            context.step_optimizer(self.second)
        self.average.update_parameters(self.model)
        return {"loss": loss}
    def evaluate_batch(self, batch):
        return {"error": 1.0}
    def data(self):
        x = torch.randn(44, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    def build_training_data_loader(self):
        return pytorch.DataLoader(self.data(), batch_size=4, shuffle=True)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(self.data(), batch_size=4)

def train(what="", odd=None, frequency=1, verify_steps=3, on_mismatch="stop", **options):
    error = None
    with pytorch.init(hparams={"global_batch_size": 12}, seed=7, **options) as context:
        trial = Trial(context, what, odd)
        trainer = pytorch.Trainer(trial, context)
        try:
            trainer.fit(
                max_length=pytorch.Batch(9), aggregation_frequency=frequency,
                reporting_period=pytorch.Batch(4), verify_steps=verify_steps,
                on_mismatch=on_mismatch,
            )
        except (RuntimeError, ValueError) as caught:
            error = f"{type(caught).__name__}: {caught}"
            if what == "counter" and on_mismatch == "stop":
                # The others only lose this rank.
                if type(caught) is pytorch.StepsDifferError:
                    Path(f"stopped-{context.distributed.rank}").write_text(error)
                raise
        state = [trial.model, trial.average, trial.optimizer, *trial.others]
        values = [getattr(each, "state_dict", lambda: each)() for each in state]
        text = repr([values, torch.get_rng_state().tolist(), random.getstate(), trial.num_trained])
        rows = read_metrics(context.core.run_dir)
        metrics = [row.metrics for row in rows if row.group == "training"]
        own = [error, hashlib.sha256(text.encode()).hexdigest(), repr(metrics)]
        by_rank = context.distributed.allgather(own)
        alerts = [[a.level, a.title, a.description] for a in
                  read_alerts(RunDirectory(context.core.run_dir))]
    return {"by_rank": by_rank, "alerts": alerts}

torch.set_printoptions(profile="full", precision=17)
GENERATOR = torch.Generator().manual_seed(3)
said = {}
"""

RUNS = """
for mode in ("flat", "overlapped"):
    for frequency in (1, 2):
        for what in ("", "scaler", "two"):
            settings = dict(what=what, frequency=frequency, data_parallel=mode)
            said[f"{mode} {frequency} {what}"] = [
                train(verify_steps=every, **settings) for every in (None, 1, 3)
            ]
for what in ("plain", "turns", "never", "average"):
    said[what] = train(what)
said["warned"] = train("counter", 2 % torch.distributed.get_world_size() if
                       torch.distributed.is_initialized() else 0, on_mismatch="warn")
said["generator"] = train("generator", on_mismatch="warn", verify_steps=100)
if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
    json.dump(said, open("said.json", "w"))
"""


def run(torch_ranks: Any, directory: Path, num_ranks: int, code: str) -> Any:
    (directory / "train.py").write_text(SCRIPT + code)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    return torch_ranks.run(
        num_ranks, directory / "train.py", directory=directory, environment=environment
    )


@pytest.fixture(scope="module", params=[1, 3])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch_ranks = request.getfixturevalue("torch_ranks")
    directory = tmp_path_factory.mktemp("replay")
    done = run(torch_ranks, directory, request.param, RUNS)
    assert done.returncode == 0, done.stdout
    return request.param, json.loads((directory / "said.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["flat", "overlapped"])
@pytest.mark.parametrize("frequency", [1, 2])
@pytest.mark.parametrize("what", ["", "scaler", "two"])
def test_a_training_with_the_check_has_the_same_bits(
    ran: Any, mode: str, frequency: int, what: str
) -> None:
    off, *others = ran[1][f"{mode} {frequency} {what}"]
    assert off["by_rank"][0][0] is None
    assert others == [off, off]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("plain", "`Trial.train_batch` must not step an optimizer by itself"),
        ("turns", "`Trial.train_batch` must run all backward passes of a batch before the first"),
        (
            "average",
            "must change no parameter before the optimizers step, as it is called twice",
        ),
        ("never", "each optimizer must step in each batch, by `context.step_optimizer`, but 0 of"),
    ],
)
def test_a_step_that_cannot_be_computed_twice_is_refused_before_it(
    ran: Any, what: str, message: str
) -> None:
    for error, *_ in ran[1][what]["by_rank"]:
        assert error.startswith("RuntimeError: With `verify_steps` ")
        assert message in error


def test_each_difference_is_an_alert_and_training_goes_on(ran: Any) -> None:
    size, said = ran
    alerts, place = said["warned"]["alerts"], "rank 2 (cpu)" if size == 3 else "rank 0 (cpu)"
    assert [alert[:2] for alert in alerts][-1] == ["warn", "Step 9 gave two results"]
    assert {alert[1].split()[1] for alert in alerts} == {"1", "3", "6", "9"}
    for _, _, text in alerts:
        assert f"but on {place} these differ: the loss 0, the gradient of `model_0." in text


def test_a_generator_of_the_users_own_is_found(ran: Any) -> None:
    text = ran[1]["generator"]["alerts"][0][2]
    assert "Step 1 must give the same bits" in text
    assert "the gradient of `model_0.0.weight`" in text


def test_a_module_with_hidden_state_on_one_rank_ends_all_of_them(
    tmp_path: Path, torch_ranks: Any
) -> None:
    done = run(torch_ranks, tmp_path, 3, 'train("counter", 2)\n')
    assert done.returncode
    assert "StepsDifferError: Step 1 must give the same bits when it is computed" in done.stdout
    assert [path.name for path in tmp_path.glob("stopped-*")] == ["stopped-2"]
    error = (tmp_path / "stopped-2").read_text()
    assert "on rank 2 (cpu) these differ: the loss 0, the gradient of `model_0.0.weight`" in error
