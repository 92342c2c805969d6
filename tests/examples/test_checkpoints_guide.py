"""The commands and the rules of the guide to checkpoints."""

import inspect
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from guides import Guide, line_trial

from paceline import pytorch
from paceline.config import validate_config

GUIDE = Guide("docs/checkpoints.md")


def test_the_commands_that_export_weights_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Callable[[str], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(line_trial(), names)
    with pytorch.init({"global_batch_size": 32, "lr": 0.1}, seed=1) as context:
        trial = names["LineTrial"](context)
        result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Epoch(1))
    shutil.copytree(result.checkpoint_urls[-1], "CHECKPOINT")
    for target in ("weights.safetensors", "DIRECTORY --format dcp"):
        [command] = {
            line for line in GUIDE.commands("paceline checkpoint export") if target in line
        }
        run_command(command)
        model = torch.nn.Linear(1, 1)
        pytorch.load_weights(model, target.split()[0])
        assert torch.equal(model.weight, trial.model.weight)


def test_rules_of_the_table_can_be_given() -> None:
    table = GUIDE.text.partition("## Which checkpoints are kept")[2].partition("\n##")[0]
    options = set(re.findall(r"^\| `(keep_\w+)=", table, re.MULTILINE))
    assert options == {"keep_latest", "keep_best", "keep_age", "keep_bytes"}
    assert options <= inspect.signature(pytorch.Trainer.fit).parameters.keys()
    rules = dict(re.findall(r"`checkpoint_storage\.(\w+): (\w+)`", table))
    rules = {name: yaml.safe_load(value) for name, value in rules.items()}
    assert len(rules) == 5
    config = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}
    validate_config({**config, "checkpoint_storage": rules})
