"""Trainers whose methods are overridden with plain PyTorch, on 1, 2 and 3 ranks."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from paceline import declarative
from paceline.declarative import ParallelizationConfig, TrainingConfig

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8, dtype=torch.float64)
        self.phase = nn.Linear(8, 3, dtype=torch.float64)
        self.energy = nn.Linear(8, 2, dtype=torch.float64)
    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.phase(hidden), self.energy(hidden)

class Trainer(declarative.Trainer):
    pass

class ModelUpdate(Trainer):
    def run_model_update_step(self, loss_node):
        self.optimizer.zero_grad()
        loss_node.backward()
        self.optimizer.step()

class ClippedUpdate(Trainer):
    def run_model_update_step(self, loss_node):
        loss_node.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad()

class Closure(Trainer):
    "All of a step in the method that computes the loss."
    def load_data_and_get_loss(self, data_and_labels, loss_buffer):
        data, labels = self.process_data_loader_yield(data_and_labels)
        def closure():
            self.optimizer.zero_grad()
            preds = list(self.model(*data))
            self.results = *self.compute_losses(loss_buffer, preds, labels), preds, labels
            if torch.is_grad_enabled():
                self.results[1].backward()
            return self.results[1]
        if torch.is_grad_enabled():
            self.optimizer.step(closure)
        else:
            closure()
        return self.results
    def run_model_update_step(self, loss_node):
        pass

class DataYield(ModelUpdate):
    def process_data_loader_yield(self, data_and_labels):
        return [data_and_labels[0].to(self.device)], list(data_and_labels[1:])

class Move(ModelUpdate):
    def move_to_device(self, var):
        return var.to(self.device)

class Losses(ModelUpdate):
    def compute_losses(self, loss_records, preds, labels):
        distance = preds[1].sub(labels[1]).abs().mean()
        losses = nn.functional.cross_entropy(preds[0], labels[0]), distance
        total = losses[0] + 2 * losses[1]
        loss_records[:3] = total, *losses
        return loss_records, total

class Names(ModelUpdate):
    def get_pred_dict(self, preds):
        return {"phase": preds[0], "energy": preds[1]}

class Buffer(ModelUpdate):
    def get_epoch_loss_buffer(self):
        return [torch.zeros(()) for _ in range(3)]

class Split(ModelUpdate):
    def build_split_datasets(self):
        sizes = [len(self.configs.dataset) - 9, 9]
        self.training_dataset, self.validation_dataset = random_split(self.configs.dataset, sizes)
        self.test_dataset = None

class Loaders(ModelUpdate):
    def build_dataloaders(self):
        size = self.configs.batch_size_per_process
        self.training_dataloader = DataLoader(self.training_dataset, size, shuffle=True)
        self.validation_dataloader = DataLoader(self.validation_dataset, size)
        self.test_dataloader = DataLoader(self.validation_dataset, size)
        self.iterations_per_epoch = -(-len(self.training_dataset) // self.all_proc_batch_size)

class Model(ModelUpdate):
    def build_model(self):
        self._encoder_name = ""
        self.model = self._plain_model = self.context.wrap_model(Net())

class Scheduler(ModelUpdate):
    def build_scheduler(self):
        every = declarative_step.STEP_EVERY_OPTIMIZER_STEP
        decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scheduler = self.context.wrap_lr_scheduler(decay, every)

class Validation(ModelUpdate):
    def run_validation(self):
        with torch.no_grad():
            losses = [
                nn.functional.cross_entropy(self.model(batch[0])[0], batch[1], reduction="sum")
                for batch in self.validation_dataloader
            ]
        self.own = (sum(losses) / len(self.validation_dataset)).item()
        super().run_validation()

class Test(ModelUpdate):
    def build_split_datasets(self):
        super().build_split_datasets()
        self.test_dataset = self.validation_dataset
    def run_test(self):
        super().run_test()
        with torch.enable_grad():
            self.model(self.test_dataset[0][0])[0].sum().backward()

class PlainModel(ModelUpdate):
    "A model that is not wrapped."
    def build_model(self):
        self._encoder_name = ""
        self.model = self._plain_model = Net()

class PlainOptimizer(ModelUpdate):
    "An optimizer that is not wrapped."
    def build_optimizer(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.learning_rate)

class Epoch(ModelUpdate):
    "A loop over the loader instead of the engine's."
    def run_training_epoch(self):
        for batch in self.training_dataloader:
            buffer = self.get_epoch_loss_buffer()
            self.run_model_update_step(self.load_data_and_get_loss(batch, buffer)[1])

class Mixed(Trainer):
    def run_model_update_step(self, loss_node):
        self.context.backward(loss_node)
        self.optimizer.step()
        self.optimizer.zero_grad()

class Accumulated(ModelUpdate):
    fields = {"accumulation_steps": 2}

from paceline.pytorch import LRScheduler
declarative_step = LRScheduler.StepMode
num_ranks = int(sys.argv[1])
for case in sys.argv[2:]:
    kind = globals()[case]
    x = torch.randn(47, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    config = TrainingConfig(
        model_class=Net,
        dataset=TensorDataset(x, x[:, :3].argmax(1), x[:, 2:].clone()),
        validation_ratio=0.2,
        pred_names_and_types=[("phase", "cls"), ("energy", "regr")],
        loss_function=[nn.CrossEntropyLoss(), nn.MSELoss()],
        task_type=None,
        batch_size_per_process=12 // num_ranks,
        learning_rate_per_process=0.12 / num_ranks,
        optimizer=torch.optim.SGD,
        num_epochs=3,
        random_seed=4,
        model_save_dir=f"out-{case}",
        parallelization_params=ParallelizationConfig(parallelization_type="multi_node"),
        **getattr(kind, "fields", {}),
    )
    said = {}
    trainer = kind(config)
    try:
        trainer.build()
        tracker = trainer.run_training()
        said["loss"], said["val_loss"] = tracker["loss"], tracker["val_loss"]
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        said["weights"] = [value.hex() for value in weights.tolist()]
        said["own"] = getattr(trainer, "own", 0.0)
    except (RuntimeError, ValueError, KeyError) as error:
        said["raised"] = str(error)
    Path(f"{case}-{trainer.rank}.json").write_text(json.dumps(said))
    trainer.cleanup()
"""

TRAINED = (
    *("ModelUpdate", "ClippedUpdate", "Closure", "DataYield", "Move", "Losses", "Names", "Buffer"),
    *("Split", "Loaders", "Model", "Scheduler", "Validation", "Test"),
    *("PlainModel", "PlainOptimizer", "Epoch"),
)
REFUSED = {
    "Accumulated": "`Accumulated.run_model_update_step` must not call .* has 2 batches",
}
REFUSED_ON_SEVERAL = {
    "Mixed": "`Mixed.run_model_update_step` must step its optimizer by `context.step_optimizer`",
}

Said = Mapping[str, list[dict[str, Any]]]


def run(ranks: Any, directory: Path, num_ranks: int) -> Said:
    (directory / "train.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment["OMP_NUM_THREADS"] = "1"
    cases = [*TRAINED, *REFUSED, *REFUSED_ON_SEVERAL]
    arguments = str(directory / "train.py"), str(num_ranks), *cases
    done = ranks.run(num_ranks, *arguments, directory=directory, environment=environment)
    assert done.returncode == 0, done.stdout
    return {
        case: [
            json.loads((directory / f"{case}-{rank}.json").read_text()) for rank in range(num_ranks)
        ]
        for case in cases
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any) -> Said:
    return run(torch_ranks, tmp_path_factory.mktemp("alone"), 1)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def several(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any
) -> Said:
    """An epoch ends with a batch of 2 samples, of which the last rank has none."""
    return run(torch_ranks, tmp_path_factory.mktemp("several"), request.param)


@pytest.mark.long
@pytest.mark.parametrize("case", TRAINED)
def test_overridden_methods_train_all_ranks_as_one(alone: Said, several: Said, case: str) -> None:
    expected = alone[case][0]
    weights = [float.fromhex(value) for value in expected["weights"]]
    for said in several[case]:
        assert "raised" not in said
        assert said["weights"] == several[case][0]["weights"]
        values = [float.fromhex(value) for value in said["weights"]]
        assert values == pytest.approx(weights, rel=1e-6, abs=1e-9)
        for name in ("loss", "val_loss", "own"):
            assert said[name] == pytest.approx(expected[name], rel=1e-6)


@pytest.mark.parametrize("case", REFUSED)
def test_overridden_methods_that_would_train_something_else_are_refused(
    alone: Said, several: Said, case: str
) -> None:
    for said in (*alone[case], *several[case]):
        with pytest.raises(RuntimeError, match=REFUSED[case]):
            raise RuntimeError(said.get("raised"))


@pytest.mark.parametrize("case", REFUSED_ON_SEVERAL)
def test_overridden_methods_that_would_train_ranks_apart_are_refused(
    alone: Said, several: Said, case: str
) -> None:
    assert "weights" in alone[case][0]
    for said in several[case]:
        with pytest.raises(RuntimeError, match=REFUSED_ON_SEVERAL[case]):
            raise RuntimeError(said.get("raised"))
