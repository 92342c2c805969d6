"""A trial that the search stops has trained exactly to the rung at which it was stopped."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline.client import Client, Experiment
from paceline.core._preemption_and_search import DECISION_TIMEOUT_S

# What scripts do at each batch, so that the batches of every rank can be counted afterwards.
CORE = """
import paceline as det

lr = det.get_cluster_info().trial.hparams["lr"]
with det.core.init() as context:
    num_asked = 0
    for batch in range(1, 17):
        trained = batch
        if context.distributed.rank == 0:
            context.train.report_training_metrics(batch, {"x": batch})
        if batch % 2 == 0:
            if context.distributed.rank == 0:
                context.train.report_validation_metrics(batch, {"loss": lr, "batches": batch})
            num_asked += 1
            if context.preempt.should_preempt():
                break
    print(f"RANK {context.distributed.rank} trained {trained} asked {num_asked}\\n", end="")
"""
# Here the steps of the result count as asked.
TRAINER = """
import torch
from paceline import pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context, self.num_trained, self.num_asked = context, 0, 0
        self.model = context.wrap_model(torch.nn.Linear(1, 1, bias=False))
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = context.wrap_optimizer(sgd)
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.num_trained = batch_idx + 1
        loss = self.model(batch).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"x": loss}
    def evaluate_batch(self, batch):
        return {"loss": torch.tensor(self.context.get_hparam("lr"))}
    def build_training_data_loader(self):
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(torch.ones(80, 1), batch_size=size)
    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.ones(4, 1), batch_size=1)

with pytorch.init() as context:
    trial = Trial(context)
    result = pytorch.Trainer(trial, context).fit(validation_period=pytorch.Batch(2))
    rank = context.distributed.rank
    print(f"RANK {rank} trained {trial.num_trained} asked {result.steps_completed}\\n", end="")
"""
HALVING = {
    "name": "async_halving", "metric": "loss", "num_rungs": 3, "max_trials": 5,
    "max_concurrent_trials": 2, "time_metric": "batches", "max_time": 8, "divisor": 2,
}  # fmt: skip
ADAPTIVE = {
    "name": "adaptive_asha", "metric": "loss", "max_trials": 6, "max_concurrent_trials": 2,
    "time_metric": "batches", "max_time": 16, "divisor": 2, "max_rungs": 3,
}  # fmt: skip
# It is stopped at the last batch. The test makes and reads the files, in the attempt's directory.
WATCHED = """
import time
from pathlib import Path
import paceline as det

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.02)

with det.core.init() as context:
    for batch in range(1, 9):
        if batch == 8:
            Path("trained").touch()
            wait_for("answered")
        context.train.report_validation_metrics(batch, {"loss": 1.0})
        is_stopped = context.preempt.should_preempt()
        print("batch", batch, "stopped" if is_stopped else "goes on", flush=True)
        if batch == 1:
            Path("begun").touch()
            wait_for("killed")
"""
SPACE = {"lr": {"type": "double", "minval": 0, "maxval": 1}, "global_batch_size": 2}
ALONE = "python3 train.py"
TWO_RANKS = "python3 -m paceline.launch.torch_distributed --nproc-per-node 2 train.py"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, master_class: Any) -> Iterator[Client]:
    """Return a client of one master with two slots that most tests of this file share."""
    master = master_class(tmp_path_factory.mktemp("stops") / "home", 2).start()
    yield master.client()
    master.close()


def write_context(path: Path, script: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "train.py").write_text(textwrap.dedent(script))
    return path


def config_of(entrypoint: str, searcher: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "stops", "entrypoint": entrypoint, "hyperparameters": SPACE, "max_restarts": 0,
        "searcher": searcher, "reproducibility": {"experiment_seed": 3}, **changes,
    }  # fmt: skip


def rungs_reached(experiment: Experiment) -> dict[int, int]:
    """Return the last rung that each trial has reached, by trial."""
    reached: dict[int, int] = {}
    for bracket in experiment.search().brackets:
        for rung in bracket:
            for entry in rung.entries:
                if entry.decision != "waiting":
                    reached[entry.trial_id] = rung.length
    return reached


def counts(trial: Any) -> list[str]:
    return sorted(line.text for line in trial.iter_logs() if line.text.startswith("RANK"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "entrypoint", "searcher", "num_ranks"),
    [
        pytest.param(CORE, ALONE, HALVING, 1, id="core"),
        pytest.param(CORE, ALONE, ADAPTIVE, 1, id="core-adaptive", marks=pytest.mark.slow),
        pytest.param(CORE, TWO_RANKS, HALVING, 2, id="core-2-ranks", marks=pytest.mark.slow),
        pytest.param(TRAINER, ALONE, HALVING, 1, id="trainer", marks=pytest.mark.slow),
        pytest.param(TRAINER, TWO_RANKS, HALVING, 2, id="trainer-2-ranks"),
    ],
)
def test_stopped_trials_have_trained_exactly_to_their_rung(
    client: Client,
    tmp_path: Path,
    script: str,
    entrypoint: str,
    searcher: dict[str, Any],
    num_ranks: int,
) -> None:
    config = config_of(entrypoint, searcher, resources={"slots_per_trial": num_ranks})
    experiment = client.create_experiment(config, write_context(tmp_path / "code", script))
    assert experiment.wait().value == "COMPLETED", experiment.reload().data.error
    reached = rungs_reached(experiment)
    assert len(set(reached.values())) > 1
    for trial in experiment.trials():
        length = reached[trial.id]
        num_asked = length if script is TRAINER else length // 2
        assert counts(trial) == [
            f"RANK {rank} trained {length} asked {num_asked}" for rank in range(num_ranks)
        ]
        steps = [row.steps_completed for row in trial.iter_metrics()]
        assert max(steps) == trial.reload().steps_completed == length


@pytest.mark.long
def test_a_dead_master_is_waited_for_once_and_not_at_all_where_nothing_is_searched(
    make_master: Callable[..., Any], wait_until: Callable[..., None], tmp_path: Path
) -> None:
    """Two scripts go on while the master is dead; only that of the search notices.

    That a decision did not come within its time is told in the output. Training ended in spite of
    that, and the search is followed again once the master has come back.
    """
    master = make_master(2).start()
    code = write_context(tmp_path / "code", WATCHED)
    searched = HALVING | {"num_rungs": 1, "max_trials": 1}
    searchers = [searched, {"name": "single", "metric": "loss"}]
    client = master.client()
    for searcher in searchers:
        client.create_experiment(config_of(ALONE, searcher), code)
    directories = [AttemptDirectory(master.home / "attempts" / str(number)) for number in (1, 2)]

    def have_all(name: str) -> bool:
        return all((directory.context_path / name).exists() for directory in directories)

    wait_until(lambda: have_all("begun"))
    master.kill()
    for directory in directories:
        (directory.context_path / "killed").touch()
    wait_until(lambda: have_all("trained"))
    told = directories[0].run.read_control()
    client = master.start().client()
    wait_until(lambda: directories[0].run.read_control() != told)
    for directory in directories:
        (directory.context_path / "answered").touch()
    outputs = []
    for number, searcher in enumerate(searchers, 1):
        experiment = client.get_experiment(number)
        assert experiment.wait().value == "COMPLETED"
        (trial,) = experiment.trials()
        outputs.append([line.text for line in trial.iter_logs() if line.stream != "master"])
        lines = [f"batch {batch} goes on" for batch in range(1, 8)]
        lines.append("batch 8 stopped" if searcher is searched else "batch 8 goes on")
        assert [text for text in outputs[-1] if text.startswith("batch")] == lines
    (warning,) = [text for text in outputs[0] if "decision" in text]
    assert f"validation at step 2 has not come within {DECISION_TIMEOUT_S:g} s" in warning
    assert not [text for text in outputs[1] if "decision" in text]
