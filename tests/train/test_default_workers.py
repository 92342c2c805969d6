"""The number of workers of a trainer that was given none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_processes import free_ports

from paceline import train

SCRIPT = """
import os
from pathlib import Path
from paceline import train

def function():
    Path(f"rank_{os.environ['RANK']}_of_{os.environ['WORLD_SIZE']}").touch()
    train.report(loss=1.0)

if __name__ == "__main__":
    train.Trainer().run(function)
"""


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_processes_of_a_launcher_are_the_workers(
    num_processes: int, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    command += [str(num_processes), "--master-port", str(free_ports(1)), "script.py"]
    subprocess.run(command, cwd=tmp_path, env=clean_environment, check=True, timeout=240)
    trained = sorted(path.name for path in tmp_path.glob("rank_*"))
    assert trained == [f"rank_{rank}_of_{num_processes}" for rank in range(num_processes)]


def test_one_worker_is_started_where_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.train._trainer_arguments.num_gpus", lambda: 0)
    with train.Trainer() as trainer:
        assert trainer.execute(lambda: os.environ["WORLD_SIZE"]) == ["1"]


def test_each_gpu_has_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("train._trainer_arguments", "workers._worker_resources"):
        monkeypatch.setattr(f"paceline.{module}.num_gpus", lambda: 3)
    assert "3" in repr(train.Trainer()._settings.num_workers)
