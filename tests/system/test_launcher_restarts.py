"""The launcher restarts workers within an attempt, so that training goes on without the master."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LENGTH = 12
SCRIPT = """
import os, signal, time
from pathlib import Path
import torch
from paceline import pytorch

NOTES = Path(os.environ["NOTES"])

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.rank = context.distributed.rank
        self.model = context.wrap_model(torch.nn.Linear(1, 1).double())
        adam = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.optimizer = context.wrap_optimizer(adam)

    def train_batch(self, batch, epoch_idx, batch_idx):
        with (NOTES / f"steps-{self.rank}").open("a") as file:
            file.write(f"{batch_idx}\\n")
        if batch_idx == 7 and self.rank == int(os.environ["STRUCK_RANK"]):
            if not (NOTES / "struck").exists():
                (NOTES / "waits").touch()
                while not (NOTES / "strike").exists():
                    time.sleep(0.02)
                (NOTES / "struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"loss": self.model(batch).mean()}

    def build_training_data_loader(self):
        x = torch.arange(36, dtype=torch.float64).reshape(36, 1) / 36
        return pytorch.DataLoader(x, batch_size=1, shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.ones(3, 1, dtype=torch.float64), batch_size=1)

def main():
    with pytorch.init() as context:
        trial = Trial(context)
        pytorch.Trainer(trial, context).fit(
            checkpoint_period=pytorch.Batch(2), reporting_period=pytorch.Batch(1)
        )
        weights = [value.item().hex() for value in trial.model.parameters()]
    (NOTES / f"done-{trial.rank}").write_text(" ".join(weights))

if __name__ == "__main__":
    main() if "RANK" in os.environ else pytorch.launch(main, 3, max_restarts=2)
"""
LAUNCHER = "python -m paceline.launch.torch_distributed --max-restarts 2 train.py"


@pytest.mark.slow
@pytest.mark.parametrize("entrypoint", [LAUNCHER, "python train.py"])
def test_ranks_that_are_lost_while_the_master_is_away_are_started_again(
    make_master: Any,
    write_context: Callable[..., Path],
    tmp_path: Path,
    wait_until: Callable[..., None],
    entrypoint: str,
) -> None:
    master = make_master(9).start()
    code = write_context(SCRIPT)

    def create(struck_rank: int) -> tuple[int, Path]:
        notes = tmp_path / str(struck_rank)
        notes.mkdir()
        config = {
            "name": "restarts",
            "entrypoint": entrypoint,
            "max_restarts": 0,
            "hyperparameters": {"global_batch_size": 3},
            "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": LENGTH}},
            "resources": {"slots_per_trial": 3},
            "reproducibility": {"experiment_seed": 5},
            "environment": {"variables": {"NOTES": str(notes), "STRUCK_RANK": str(struck_rank)}},
        }
        return master.client().create_experiment(config, code).id, notes

    def are_done(notes: Path) -> bool:
        return len(list(notes.glob("done-*"))) == 3

    _, straight = create(-1)
    struck = [create(0), create(2)]
    for _, notes in struck:
        wait_until((notes / "waits").exists, 120)
    wait_until(lambda: are_done(straight), 120)
    master.kill()
    for _, notes in struck:
        (notes / "strike").touch()
    wait_until(lambda: all(are_done(notes) for _, notes in struck), 120)
    assert not master.is_alive
    master.start()
    for number, notes in struck:
        experiment = master.client().get_experiment(number)
        wait_until(lambda one=experiment: one.reload().state.is_terminal)
        assert experiment.state.value == "COMPLETED", master.log()
        (trial,) = experiment.trials()
        [attempt] = trial.reload().data.attempts
        assert (trial.data.restarts, attempt.restarts) == (0, 1)
        rank = 0 if number == struck[0][0] else 2
        assert attempt.last_restart_cause is not None
        assert attempt.last_restart_cause.startswith(f"Rank {rank} was ended by SIGKILL")
        steps = [row.steps_completed for row in trial.iter_metrics("training")]
        assert steps == list(range(1, LENGTH + 1))
        assert any("restart 1 of 2" in line.text for line in trial.iter_logs())
        for rank in range(3):
            done = f"done-{rank}"
            assert (notes / done).read_text() == (straight / done).read_text()
            # It went on from the checkpoint after six batches.
            executed = (notes / f"steps-{rank}").read_text().split()
            assert executed[-6:] == [str(step) for step in range(6, LENGTH)]
            assert len(executed) <= 8 + 6
