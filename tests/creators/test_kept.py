"""The state between passes is in a file in memory, which is gone when it is not needed."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.creators import PyTorchTrainer
from paceline.creators._pass_states import KeptState, MemoryFile, read_parts
from paceline.creators._replica import join_pass_state

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Same = Callable[[Any, Any], bool]

pytestmark = pytest.mark.skipif(
    not MemoryFile.is_possible(), reason="NOT TESTED: the system has no files in memory"
)


def make(**options: Any) -> PyTorchTrainer:
    return PyTorchTrainer(
        model_creator=lambda config: torch.nn.Linear(4, 1),
        data_creator=lambda config: TensorDataset(X, X[:, :1]),
        optimizer_creator=lambda model, config: torch.optim.Adam(model.parameters(), lr=0.1),
        loss_creator=torch.nn.MSELoss,
        batch_size=8,
        cluster="local",
        **options,
    )


def num_files(pid: int | str = "self", least_size: int = 0) -> int:
    num = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # The process may close some meanwhile.
        with suppress(FileNotFoundError):
            num += "paceline_state" in os.readlink(path) and path.stat().st_size >= least_size
    return num


def train_and_die_late(
    model: Any, train_iterator: Any, criterion: Any, optimizer: Any, config: dict[str, Any]
) -> dict[str, Any]:
    """Train; rank 1 dies when the chief has stored its state after the pass, once."""
    for x, y in train_iterator:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    order = Path(config["order"])
    if os.environ["RANK"] == "1" and order.exists():
        order.unlink()
        while num_files(config["driver"], least_size=1) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"loss": loss}


def run(trainer: PyTorchTrainer, kills: int | None, order: Path | None = None) -> Any:
    told = [trainer.train()]
    if order is not None:
        # The state before the next pass is in a file by now.
        order.touch()
    if kills is not None:
        os.kill(trainer.apply_all_workers(os.getpid)[kills], signal.SIGKILL)
    told += [trainer.train(), trainer.train()]
    return told, trainer.state_dict()


@pytest.mark.parametrize("lost", [0, 1])
def test_what_all_share_goes_through_a_file_and_there_is_one_at_a_time(
    are_same: Same, lost: int
) -> None:
    with make(num_workers=2) as trainer:
        assert num_files() == 0
        beginning = trainer.state_dict()
        undisturbed = run(trainer, None)
        assert num_files() == 1
        trainer.load_state_dict(beginning)
        # A state of the user's is sent to the workers.
        assert num_files() == 0
        disturbed = run(trainer, lost)
        assert num_files() == 1
        kept = trainer._workers._kept
        assert kept is not None
        assert kept.parts[0] is None
        assert kept.path is not None
    assert num_files() == 0
    assert are_same(disturbed, undisturbed)


@pytest.mark.long
def test_the_state_before_a_pass_stays_until_all_ranks_have_ended_it(
    are_same: Same, tmp_path: Path
) -> None:
    order = tmp_path / "order"
    config = {"order": str(order), "driver": os.getpid()}
    given = {"train_function": train_and_die_late, "config": config}
    # A comparison would have the chief wait for the rank that is to die.
    with make(num_workers=2, check_ranks=False, **given) as trainer:
        beginning = trainer.state_dict()
        expected = run(trainer, None)
        trainer.load_state_dict(beginning)
        assert are_same(run(trainer, None, order), expected)
        assert not order.exists()
        assert num_files() == 1


@pytest.mark.long
def test_without_such_files_the_state_comes_in_messages(
    are_same: Same, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(num_workers=2) as trainer:
        expected = run(trainer, 1)
    monkeypatch.setattr(MemoryFile, "is_possible", staticmethod(lambda: False))
    with make(num_workers=2) as trainer:
        told = run(trainer, 1)
        assert num_files() == 0
        kept = trainer._workers._kept
        assert kept is not None
        assert kept.path is None
    assert are_same(told, expected)


def test_a_file_that_the_chief_cannot_write_is_done_without(are_same: Same) -> None:
    with make(num_workers=2) as trainer:
        trainer.train()
        expected = trainer.state_dict()
        # As if it belonged to somebody else, or no memory were left for it.
        for path in ("/proc/self/no_such_file", "/dev/full"):
            parts = trainer._workers._execute("state_part", path)
            kept = KeptState(parts, MemoryFile())
            assert are_same(join_pass_state(read_parts(kept.path, kept.parts)), expected)


def test_passes_whose_state_is_not_wanted_keep_none() -> None:
    with make(num_workers=1) as trainer:
        trainer.train(max_retries=0)
        assert num_files() == 0
        trainer.train()
        assert num_files() == 1
        trainer.train(max_retries=0)
        assert num_files() == 0
