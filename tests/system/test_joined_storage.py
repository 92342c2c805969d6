"""Processes of an outer launcher, one on each machine, and a storage that one of them lacks."""

import subprocess
import sys
from pathlib import Path

import pytest
from forked_processes import free_ports

TRAIN = """
import os
from pathlib import Path
from paceline import train

def function():
    Path(f"trained_{os.environ['RANK']}").touch()
    train.report(loss=1.0)
    train.save_checkpoint(step=0)

if __name__ == "__main__":
    train.Trainer(num_workers=3, checkpoint_storage="store").run(function)
"""
PYTORCH = """
import os
from pathlib import Path
import torch
from paceline import pytorch

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build_training_data_loader(self):
        return pytorch.DataLoader(torch.ones(6, 1), batch_size=1)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.ones(3, 1), batch_size=1)

    def train_batch(self, batch, epoch_idx, batch_idx):
        Path(f"trained_{os.environ['RANK']}").touch()
        loss = self.model(batch).sum()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": self.model(batch).sum()}

if __name__ == "__main__":
    with pytorch.init(hparams={"global_batch_size": 3}, checkpoint_storage="store") as context:
        pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(2))
"""
# As `torchrun --nnodes 3` places its processes.
PLACE = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "apart"),
    [
        pytest.param(TRAIN, None, id="train-None"),
        pytest.param(TRAIN, 0, id="train-0"),
        pytest.param(TRAIN, 2, id="train-2", marks=pytest.mark.slow),
        pytest.param(PYTORCH, None, id="pytorch-None", marks=pytest.mark.slow),
        pytest.param(PYTORCH, 0, id="pytorch-0", marks=pytest.mark.slow),
        pytest.param(PYTORCH, 2, id="pytorch-2"),
    ],
)
def test_a_storage_that_one_machine_does_not_see_is_refused_before_training(
    script: str, apart: int | None, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "store").mkdir()
    mount = "mount -t tmpfs tmpfs store"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], cwd=tmp_path).returncode != 0:
        pytest.skip("NOT TESTED: a node with files of its own needs the right to mount a tmpfs")
    environment = clean_environment | PLACE | {"MASTER_PORT": str(free_ports(1))}
    own_disk = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    processes = [
        subprocess.Popen(
            [*(own_disk if rank == apart else ()), sys.executable, "script.py"],
            cwd=tmp_path,
            env=environment | {"RANK": str(rank), "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "3"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    trained = sorted(path.name for path in tmp_path.glob("trained_*"))
    if apart is None:
        assert [process.returncode for process in processes] == [0, 0, 0], errors
        assert trained == ["trained_0", "trained_1", "trained_2"]
        return
    assert [process.returncode for process in processes] == [1, 1, 1], errors
    assert not trained
    blind = "1, 2" if apart == 0 else "2"
    for error in errors:
        assert f"must be a directory that all machines see, but rank(s) {blind} do not" in error
    # The mark is gone again.
    assert not list((tmp_path / "store").glob(".paceline-*"))
