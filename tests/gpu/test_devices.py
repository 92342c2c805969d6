"""What the library says of GPUs, beside nvidia-smi; and each trial of a master has its own."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline._base.gpus import machine_gpus
from paceline._cluster.runner.node_facts import find_slots

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: needs a GPU")
START_S = 60.0
# A machine with two GPUs, as nvidia-smi tells of it.
FAKE = """#!/bin/sh
case "$*" in
  *uuid*) echo "0, GPU-aaaa"; echo "1, GPU-bbbb" ;;
  *) echo 0; echo 1 ;;
esac
"""
SCRIPT = """
import json, os, sys
import paceline
info = paceline.get_cluster_info()
told = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "slots": info.slot_ids,
        "order": os.environ.get("CUDA_DEVICE_ORDER"), "uuids": info.gpu_uuids}
if "ASKS_TORCH" in os.environ:
    import torch
    told["seen"] = [f"GPU-{torch.cuda.get_device_properties(i).uuid}"
                    for i in range(torch.cuda.device_count())]
with paceline.core.init() as context:
    here = os.path.join(os.environ["NOTES"], str(info.trial.trial_id))
    with open(here + ".new", "w") as file:
        json.dump(told, file)
    os.rename(here + ".new", here)
    import time
    deadline = time.monotonic() + 60
    # No slot is free again before all have told.
    while len(os.listdir(os.environ["NOTES"])) < int(os.environ["AT_ONCE"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    context.train.report_validation_metrics(1, {"loss": 0.5})
"""


def listed(fields: str) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        pytest.skip("NOT RUN: needs nvidia-smi")
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]


@pytest.mark.skipif("CUDA_VISIBLE_DEVICES" in os.environ, reason="NOT RUN: some GPUs are hidden")
@NEEDS_GPU
def test_gpus_are_those_that_nvidia_smi_lists() -> None:
    indices = [row[0] for row in listed("index")]
    slots = find_slots(None)
    assert [slot.id for slot in slots] == indices
    assert [slot.name for slot in slots] == [row[0] for row in listed("name")]
    sizes = [float(row[0]) for row in listed("memory.total")]
    assert [slot.memory_bytes / 2**20 for slot in slots] == pytest.approx(sizes, rel=0.01)
    assert len(machine_gpus()) == torch.cuda.device_count() == len(indices)


@NEEDS_GPU
def test_torch_and_nvidia_smi_tell_the_same_of_a_gpu() -> None:
    known = torch.cuda.get_device_properties(0)
    rows = {row[0]: row for row in listed("uuid,name,memory.total")}
    _, name, total_mib = rows[f"GPU-{known.uuid}"]
    assert name == known.name
    # The driver keeps some for itself.
    assert known.total_memory / 2**20 == pytest.approx(float(total_mib), rel=0.05)


@pytest.fixture
def run_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that runs trials on a master, and returns what each has told."""
    for module in ("fastapi", "uvicorn", "sqlalchemy", "alembic", "httpx2", "argon2"):
        pytest.importorskip(module, reason=f"NOT RUN: needs {module}")
    from paceline.client import Client

    home, notes, code = tmp_path / "home", tmp_path / "notes", tmp_path / "code"
    for path in (home, notes, code):
        path.mkdir()
    (code / "train.py").write_text(SCRIPT)
    started: list[subprocess.Popen[bytes]] = []

    def run(num_trials: int, **variables: str) -> list[Any]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        command = [sys.executable, "-m", "paceline.cli", "up", "--port", "0", "--home", str(home)]
        with (tmp_path / "log").open("wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=kept | variables))
        wait_until(lambda: (home / "master.json").exists() or started[-1].poll() is not None)
        assert started[-1].poll() is None, (tmp_path / "log").read_text()
        url = json.loads((home / "master.json").read_text())["url"]
        config = {
            "entrypoint": "python3 train.py",
            "environment": {
                "python": sys.executable,
                "variables": {"NOTES": str(notes), "AT_ONCE": str(num_trials), **variables},
            },
            "searcher": {"name": "random", "metric": "loss", "max_trials": num_trials},
        }
        with Client(url, (home / "token").read_text().strip()) as client:
            experiment = client.create_experiment(config, code)
            wait_until(lambda: client.get_experiment(experiment.id).state == "COMPLETED")
        return [json.loads(path.read_text()) for path in sorted(notes.iterdir())]

    yield run
    for process in started:
        process.terminate()
        process.wait(60)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("visible", [None, "1"])
def test_each_trial_sees_the_gpu_of_its_slot_alone(
    visible: str | None,
    run_trials: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The numbers are nvidia-smi's, unless the master was given some GPUs itself."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(FAKE)
    (programs / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    # NVML would tell of the GPUs that are there.
    (programs / "pynvml.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{programs}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert run_trials(1) == [
            {"visible": "1", "slots": [0], "order": None, "uuids": ["GPU-bbbb"]}
        ]
        return
    told = sorted(run_trials(2), key=lambda one: one["visible"])
    assert [one["visible"] for one in told] == ["0", "1"]
    assert [one["uuids"] for one in told] == [["GPU-aaaa"], ["GPU-bbbb"]]
    assert {one["order"] for one in told} == {"PCI_BUS_ID"}


@pytest.mark.skipif("CUDA_VISIBLE_DEVICES" in os.environ, reason="NOT RUN: some GPUs are hidden")
@NEEDS_GPU
def test_a_trial_computes_on_the_gpu_that_it_was_given(run_trials: Callable[..., Any]) -> None:
    uuids = [row[0] for row in listed("uuid")]
    (told,) = run_trials(1, ASKS_TORCH="1")
    assert told["seen"] == told["uuids"] == uuids[:1]
