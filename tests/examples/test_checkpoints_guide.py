"""What the guide to checkpoints shows runs."""

import inspect
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from guides import Guide, line_trial

from paceline import core, pytorch
from paceline.config import validate_config

GUIDE = Guide("docs/checkpoints.md")
Run = Callable[[str], None]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Train the model of the guide to the trainer, and return what the blocks use."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide", "MyModel": lambda: torch.nn.Linear(1, 1)}
    exec(line_trial(), names)
    with pytorch.init({"global_batch_size": 32, "lr": 0.1}, seed=1) as context:
        trial = names["LineTrial"](context)
        result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Epoch(1))
    shutil.copytree(result.checkpoint_urls[-1], "CHECKPOINT")
    names["trained"] = trial.model.state_dict()
    return names


def command_with(text: str) -> str:
    """Return the command of the guide that exports to somewhere."""
    [command] = {line for line in GUIDE.commands("paceline checkpoint export") if text in line}
    return command


def assert_trained(names: dict[str, Any]) -> None:
    """Check that the model of the blocks has the weights of the checkpoint."""
    for name, weight in names["model"].state_dict().items():
        assert torch.equal(weight, names["trained"][name])


def test_weights_are_loaded_without_paceline(names: dict[str, Any], run_command: Run) -> None:
    GUIDE.run([GUIDE.block('load_file("CHECKPOINT/model_0.safetensors")')], names)
    assert_trained(names)
    run_command(command_with("weights.safetensors"))
    names["model"] = names["MyModel"]()
    pytorch.load_weights(names["model"], "weights.safetensors")
    assert_trained(names)


def test_other_programs_load_weights_and_an_optimizer(
    names: dict[str, Any], run_command: Run
) -> None:
    run_command(f"{command_with('--format dcp')} --optimizer 0")
    names["model"] = names["MyModel"]()
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.5)
    blocks = [GUIDE.block('dcp.load({"model"'), GUIDE.block("set_optimizer_state_dict(model")]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        GUIDE.run(blocks, names)
    assert_trained(names)
    assert names["optimizer"].param_groups[0]["lr"] == 0.1


def test_a_checkpoint_leaves_out_the_base(names: dict[str, Any]) -> None:
    def add_adapters(model: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.Sequential(model.requires_grad_(False), torch.nn.Linear(1, 1))

    [block] = [block for block in GUIDE.blocks("python") if "trainable_only" in block]
    with pytorch.init({"global_batch_size": 32, "lr": 0.1}) as context:
        trial = names["LineTrial"](context)
        more = {"self": trial, "context": context, "pretrained_model": names["MyModel"]}
        GUIDE.run([block], {**more, "add_adapters": add_adapters})
        result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Epoch(1))
    weights = pytorch.load_weights_from_checkpoint_path(result.checkpoint_urls[-1], model=1)
    assert weights.keys() == {"1.weight", "1.bias"}


def test_ranks_store_parts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts = [GUIDE.block("shard=True"), GUIDE.block("restore_path").replace("...", "part = path")]
    with core.init() as context:
        names = {"context": context, "torch": torch, "step": 3, "rank": 0, "own_part": [1, 2]}
        GUIDE.run(parts, names)
        part = names["part"] / "part_0.pt"
        assert torch.load(part) == [1, 2]
        assert context.checkpoint.get_metadata(names["uuid"]) == {"steps_completed": 3}


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
