"""Batch inference as the entrypoint of an experiment."""

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os
import signal
from pathlib import Path

import torch
from paceline import pytorch


class Processor(pytorch.TorchBatchProcessor):
    def __init__(self, context):
        self.context = context
        self.total = context.wrap_reducer(sum, "total")
        self.rows = []

    def process_batch(self, batch, batch_idx):
        killed = Path("TARGET/killed")
        if batch_idx == 13 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.rows += batch.tolist()
        self.total.update(int(batch.sum()))

    def on_checkpoint_start(self):
        (self.context.output_path() / "rows").write_text(" ".join(map(str, self.rows)))
        self.rows = []


pytorch.torch_batch_process(
    Processor, torch.arange(50), 2, checkpoint_interval=3, output_dir="TARGET/results"
)
"""


@pytest.mark.slow
def test_a_killed_worker_of_an_experiment_loses_no_row(
    mastered: Any, code: Path, tmp_path: Path
) -> None:
    (code / "predict.py").write_text(SCRIPT.replace("TARGET", str(tmp_path)))
    config = {
        "name": "inference",
        "entrypoint": "python3 -m paceline.launch.torch_distributed -- predict.py",
        "searcher": {"name": "single", "metric": "total"},
        "resources": {"slots_per_trial": 2},
        "max_restarts": 1,
    }
    (code / "config.yaml").write_text(json.dumps(config))
    experiment = json.loads(mastered("e", "create", "config.yaml", ".", "--json", cwd=code).stdout)
    mastered("e", "wait", experiment["id"])
    assert (tmp_path / "killed").exists()
    files = (tmp_path / "results").rglob("rows")
    assert sorted(int(row) for path in files for row in path.read_text().split()) == [*range(50)]
    [trial] = json.loads(mastered("e", "list-trials", experiment["id"], "--json").stdout)
    assert trial["best_metric"] == sum(range(50)), trial
    # Such a directory would be deleted with the attempt.
    (code / "predict.py").write_text(SCRIPT.replace("TARGET/results", "results"))
    created = json.loads(mastered("e", "create", "config.yaml", ".", "--json", cwd=code).stdout)
    mastered("e", "wait", created["id"], code=None)
    logs = mastered("e", "logs", created["id"], code=None).stdout
    assert "`output_dir` must be an absolute path under a master" in logs
