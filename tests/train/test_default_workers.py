"""The number of workers of a trainer that was given none."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from forked_processes import free_ports

from paceline import train
from paceline._base import gpus as _visible_gpus
from paceline._base.gpus import KnownGpu

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


@pytest.mark.long
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
    monkeypatch.setattr("paceline.train._trainer_arguments.num_visible_gpus", lambda: 0)
    with train.Trainer() as trainer:
        assert trainer.execute(lambda: os.environ["WORLD_SIZE"]) == ["1"]


@pytest.mark.parametrize(
    ("visible", "gpus_per_worker", "expected"),
    [
        (None, None, 4),
        ("0,2", None, 2),
        ("", None, 1),
        ("-1", None, 1),
        ("1,-1,2", None, 1),
        ("0,1,2,3,9", None, 4),
        (None, 2, 2),
        (None, 0.5, 8),
        (None, 0, 1),
    ],
)
def test_each_visible_gpu_has_a_worker(
    visible: str | None,
    gpus_per_worker: float | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    gpus = [KnownGpu(id=str(number), number=str(number)) for number in range(4)]
    monkeypatch.setattr(_visible_gpus, "_found", gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    trainer = train.Trainer(gpus_per_worker=gpus_per_worker)
    assert trainer._settings.num_workers == expected
    # A copy has as many where there are fewer GPUs, or none.
    pickled = cloudpickle.dumps(trainer)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(
        "paceline._training.workers.worker_settings.WorkerResources.check_machine", lambda *_: None
    )
    assert pickle.loads(pickled)._settings.num_workers == expected


def test_a_number_of_workers_that_was_given_is_replaced() -> None:
    for given in ({"num_workers": 3}, {"workers": 3}):
        trainer = train.Trainer(cpus_per_worker=None, **given)  # type: ignore[arg-type]
        name = next(iter(given))
        assert trainer.replace(**{name: 2})._settings.num_workers == 2
