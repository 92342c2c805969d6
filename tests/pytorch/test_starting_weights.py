"""Weights to begin with, in models that are divided among the ranks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline._training.engine.checkpoints.state_format import save_state
from paceline._training.engine.checkpoints.weight_exports import export_dcp, export_weights
from paceline.storage._checkpoint_errors import STATE_VERSION

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import sys

import torch
import torch.distributed.checkpoint as dcp
from paceline import pytorch

kind, place, target = sys.argv[1:]


def make_model(seed):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5, bias=False)]
    return torch.nn.Sequential(*layers)


with pytorch.init({"global_batch_size": 12}, data_parallel=kind) as context:
    with torch.device("meta" if target == "meta" else "cpu"):
        model = make_model(1)
    model = context.wrap_model(model)
    expected = make_model(0).state_dict()
    if place == "itself":
        pytorch.load_weights(model, target + ".safetensors")
        dcp.save({"model": model.state_dict()}, checkpoint_id=target)
    elif target == "plain":
        dcp.load({"model": model.state_dict()}, checkpoint_id=place)
    else:
        pytorch.load_weights(model, place)
    state = model.module.state_dict() if kind == "overlapped" else model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        is_divided = kind == "fsdp" and name in dict(model.named_parameters())
        assert hasattr(value, "full_tensor") == is_divided, name
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, expected[name]), name
    if context.distributed.rank == 0:
        print("all equal")
"""


def run(directory: Path, num_ranks: int, *arguments: str) -> None:
    (directory / "script.py").write_text(SCRIPT)
    launcher = ["-m", "paceline.launch.torch_distributed", "--nproc-per-node", str(num_ranks)]
    result = subprocess.run(
        [sys.executable, *launcher, "--", "script.py", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all equal" in result.stdout


def stored_model(directory: Path) -> Path:
    torch.manual_seed(0)
    layers: list[Any] = [torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(7, 5, bias=False))
    (directory / "checkpoint").mkdir()
    save_state(dict(model.state_dict()), directory / "checkpoint", "model_0")
    save_state({"version": STATE_VERSION, "num_models": 1}, directory / "checkpoint", "training")
    return directory / "checkpoint"


def test_a_sharded_model_begins_with_what_other_ranks_have_stored(tmp_path: Path) -> None:
    checkpoint = stored_model(tmp_path)
    export_dcp(checkpoint, tmp_path / "exported")
    export_weights(checkpoint, tmp_path / "theirs.safetensors")
    # DCP itself stores the pieces of three ranks, which other numbers of ranks load.
    run(tmp_path, 3, "fsdp", "itself", "theirs")
    assert len(list((tmp_path / "theirs").glob("*.distcp"))) == 3
    run(tmp_path, 2, "fsdp", "theirs", "ours")
    run(tmp_path, 3, "fsdp", "theirs", "meta")
    run(tmp_path, 2, "overlapped", "theirs", "ours")
    run(tmp_path, 1, "flat", "theirs", "ours")
    # DCP itself loads what we have exported.
    run(tmp_path, 2, "fsdp", "exported", "plain")
    run(tmp_path, 3, "fsdp", "checkpoint", "ours")
