"""Groups of workers that run at once on one machine have GPUs of their own."""

import pytest

from paceline._base.process_and_network import num_cores
from paceline._training.workers import worker_settings as _worker_resources
from paceline._training.workers.worker_settings import WorkerResources, WorkerSettings


def test_groups_at_once_share_out_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(num_workers=2)
    assert settings.num_concurrent() == max(1, num_cores() // 2)
    assert settings.own_devices(1) == {}

    # There need not be any on this machine.
    monkeypatch.setattr(_worker_resources, "num_visible_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert settings.own_devices(1) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert settings.own_devices(0) == {"CUDA_VISIBLE_DEVICES": "4,5"}
    halves = WorkerSettings(num_workers=1, resources=WorkerResources(gpus=0.5))
    assert [halves.own_devices(index)["CUDA_VISIBLE_DEVICES"] for index in range(3)] == [
        "4",
        "4",
        "5",
    ]
    without = WorkerSettings(num_workers=1, resources=WorkerResources(gpus=0))
    assert without.own_devices(1) == {"CUDA_VISIBLE_DEVICES": ""}
