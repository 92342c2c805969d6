"""What all ranks find alike when they go on is told by one of them."""

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
from paceline import pytorch

first = sys.argv[1] == "first"

class Remembers(pytorch.PyTorchCallback):
    def state_dict(self):
        return {"value": 1}
    def load_state_dict(self, state):
        pass

class Collects(pytorch.MetricReducer):
    "What it has is no plain data."
    def reset(self):
        self.values = [object()]
    def per_slot_reduce(self):
        return 0.0
    def cross_slot_reduce(self, values):
        return 0.0

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        for name in ("one",) if first else ("one", "two"):
            context.wrap_reducer(Collects(), name)
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
    def evaluate_batch(self, batch):
        return {"error": 0.0}
    def build_training_data_loader(self):
        samples = torch.zeros(60 if first else 72, 1)
        return pytorch.DataLoader(samples, self.context.get_per_slot_batch_size())
    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.zeros(6, 1), batch_size=2)
    def build_callbacks(self):
        return {"before" if first else "after": Remembers()}

run = None if first else str(next(Path("paceline_runs").iterdir()))
with pytorch.init(hparams={"global_batch_size": 6}, resume=run) as context:
    pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(3 if first else 5))
"""
TEXTS = (
    "the present data have 12: some samples of this epoch",
    "has no state of the callback 'after'",
    "has a state of 'before', which is no callback now",
    "The state of 1 reducers does not fit 2",
    "What Collects collects between reports is not part of checkpoints",
)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_all_ranks_find_is_told_once(
    num_ranks: int, tmp_path: Path, clean_environment: dict[str, str], torch_ranks: Any
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**clean_environment, "OMP_NUM_THREADS": "1"}
    for part in ("first", "second"):
        done = torch_ranks.run(num_ranks, script, part, directory=tmp_path, environment=environment)
        assert done.returncode == 0, done.stdout
    said = done.stdout + (done.stderr or "")
    assert {text: said.count(text) for text in TEXTS} == dict.fromkeys(TEXTS, 1)
