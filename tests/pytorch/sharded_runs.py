"""One run of sharded.py, begun and gone on with by any numbers of ranks; for tests."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.pytorch import load_weights_from_checkpoint_path

SCRIPT = Path(__file__).parent / "sharded.py"
LAUNCHER = ("-m", "paceline.launch.torch_distributed", "--nproc-per-node")
NUM_BATCHES = 23


class Training:
    """One run of sharded.py, begun and gone on with by any numbers of ranks."""

    # The server that forks the ranks, see `forked_ranks` in conftest.py.
    server: Any = None

    def __init__(self, directory: Path, **variables: str) -> None:
        self.directory = directory
        self.variables = {"LENGTH": str(NUM_BATCHES), "WINDOW": "2", **variables}
        (directory / "samples").mkdir(parents=True)

    def run(self, num_ranks: int, mode: str = "fsdp", is_killed: bool = False) -> "Training":
        """Train on, to the end or until the manifest of the checkpoint at 20 is due."""
        done = self.start(num_ranks, mode, is_killed=is_killed)
        assert (done.returncode == 0) == (not is_killed), done.stdout + done.stderr
        return self

    def start(self, ranks: int | list[str], mode: str = "fsdp", is_killed: bool = False) -> Any:
        """Return the process after it has ended; arguments of a launcher may be given."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        variables |= {"SAMPLES": str(self.directory / "samples"), "MODE": mode}
        variables |= {"OMP_NUM_THREADS": "1", **self.variables}
        if is_killed:
            variables["PACELINE_FAULT"] = "storage.before_manifest:4,signal=KILL"
        if isinstance(ranks, int):
            return self.server.run(ranks, SCRIPT, directory=self.directory, environment=variables)
        return subprocess.run(
            [sys.executable, *ranks, "--", str(SCRIPT)],
            cwd=self.directory,
            env=variables,
            text=True,
            capture_output=True,
            timeout=180,
            check=False,
        )

    def checkpoint(self) -> Path:
        """Return the directory of the last checkpoint."""
        manifests = self.directory.glob("paceline_runs/*/checkpoints/*/manifest.json")
        by_step = {
            json.loads(path.read_text())["metadata"]["steps_completed"]: path.parent
            for path in manifests
        }
        return by_step[max(by_step)]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters of the last checkpoint; buffers are each rank's own."""
        weights = load_weights_from_checkpoint_path(self.checkpoint())
        return {name: value for name, value in weights.items() if name != "num_calls"}

    def facts(self) -> dict[str, Any]:
        """Return what the chief has told at the end."""
        facts: dict[str, Any] = json.loads((self.directory / "facts.json").read_text())
        return facts

    def samples(self) -> dict[int, list[int]]:
        """Return the sorted samples of each batch; those after a checkpoint are trained again."""
        steps: dict[int, set[int]] = defaultdict(set)
        for path in (self.directory / "samples").iterdir():
            for line in path.read_text().splitlines():
                step, *ids = map(int, line.split())
                steps[step].update(ids)
        return {step: sorted(ids) for step, ids in sorted(steps.items())}


def assert_agree(one: Training, other: Training) -> None:
    """Check that two trainings ended alike, up to the order of additions."""
    assert len(one.samples()) == NUM_BATCHES
    assert one.samples() == other.samples()
    torch.testing.assert_close(one.weights(), other.weights(), rtol=1e-9, atol=1e-12)
    for fact in ("loss", "lone"):
        assert one.facts()[fact] == pytest.approx(other.facts()[fact], rel=1e-9)
