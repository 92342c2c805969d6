"""Processes of an outer launcher, one on each machine, and a storage that one of them lacks."""

import subprocess
import sys
from pathlib import Path

import pytest
from forked_processes import free_ports

SCRIPT = """
import torch
from paceline import train

def function():
    for step in range(3):
        train.report(loss=1.0)
        train.save_checkpoint(step=step)

if __name__ == "__main__":
    train.Trainer(num_workers=3, checkpoint_storage="store").run(function)
"""
# As `torchrun --nnodes 3` places its processes.
PLACE = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize("apart", [0, 2])
def test_a_storage_that_one_machine_does_not_see_is_named_while_they_train_and_at_the_end(
    apart: int, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
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
            env=environment | {"RANK": str(rank), "GROUP_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1], errors
    missing = "1, 2" if apart == 0 else "2"
    assert f"The checkpoint of step 1 waits for rank(s) {missing}: all ranks" in errors[0]
    for error in errors:
        assert "all machines must see the storage" in error.splitlines()[-1]
