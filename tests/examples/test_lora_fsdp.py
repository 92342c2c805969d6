"""The example of LoRA with FSDP2 trains on two processes, and goes on in the same bits."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import load_config
from paceline.core import list_runs, read_checkpoints
from paceline.journal import RunDirectory

TRAIN = ["-m", "paceline.launch.torch_distributed", "--nproc-per-node", "2", "train.py"]

Run = Callable[..., str]


@pytest.fixture
def example_name() -> str:
    return "lora_fsdp"


def test_the_config_is_valid_and_names_what_the_script_uses(example: Path) -> None:
    config = load_config(example / "experiment.yaml")
    assert not config.warnings
    script = (example / "train.py").read_text()
    assert f'"{config.searcher.metric}"' in script
    assert all(f'"{name}": ' in script for name in config.hyperparameters)


def test_every_file_is_in_the_guide(example: Path) -> None:
    named = set(re.findall(r"\| `(\w+\.(?:py|yaml))` \|", (example / "README.md").read_text()))
    assert named == {path.name for path in example.iterdir()} - {"README.md"}


def only_run(example: Path) -> RunDirectory:
    [summary] = list_runs(example / "paceline_runs")
    return RunDirectory(summary.path)


def last_checkpoint(example: Path) -> Path:
    run = only_run(example)
    *_, last = sorted(read_checkpoints(run), key=lambda each: each.steps_completed)
    return Path(run.checkpoints_path / last.uuid)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, by their file and name."""
    files = checkpoint.glob("*.safetensors")
    return {f"{f.stem}:{name}": value for f in files for name, value in load_file(f).items()}


# It starts ten processes that load Transformers, one pair after the other.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_training_ends_in_the_same_adapters(run: Run, example: Path, rank: int) -> None:
    run("make_base.py", "--steps", "20")
    run(*TRAIN, "--batches", "24")
    straight = last_checkpoint(example)
    (example / "paceline_runs").rename(example / "straight")
    straight = example / "straight" / straight.relative_to(example / "paceline_runs")

    fault = f"engine.batch:17,signal=KILL,rank={rank},after=0.5"
    output = run(*TRAIN, "--batches", "24", code=137, PACELINE_FAULT=fault)
    assert f"Rank {rank} was ended by SIGKILL" in output
    run(*TRAIN, "--batches", "24", "--resume", "auto")
    found, expected = tensors(last_checkpoint(example)), tensors(straight)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    # No weight of the base is stored, and each process has a piece of each adapter.
    stored = {name for name in found if ":model_0." in name}
    assert stored
    assert all(re.search(r"\.(down|up)\.weight$", name) for name in stored)
    assert {name.split(":")[0] for name in stored} == {"shard_0", "shard_1"}

    text = run("use.py", str(last_checkpoint(example)), "--text", "7-2=")
    assert "7-2=" in text

    run("make_base.py", "--steps", "2")
    earlier = str(only_run(example).path)
    refused = run(*TRAIN, "--batches", "30", "--resume", earlier, code=1)
    assert "must be built on the same base (the Llama in base)" in refused
