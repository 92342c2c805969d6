"""What the guide to the trainer lists is all there is."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from guides import Guide, line_trial

from paceline import pytorch
from paceline.config import validate_config

GUIDE = Guide("docs/pytorch.md")


def test_other_guides_use_the_first_trial_of_this_one() -> None:
    trial = GUIDE.blocks("python")[0].partition("HPARAMS =")[0].strip()
    assert line_trial().endswith(f"\n\n{trial}\n")


def test_the_config_is_valid() -> None:
    config = validate_config(yaml.safe_load(GUIDE.blocks("yaml")[0]))
    assert not config.warnings


def test_every_hook_is_listed() -> None:
    table = GUIDE.text.partition("## Callbacks")[2].partition("## Piece by piece")[0]
    listed = set(re.findall(r"`(\w+)\([\w, ]*\)`", table))
    assert listed == {name for name in vars(pytorch.PyTorchCallback) if not name.startswith("__")}
    assert len(listed) == 17


def test_names_of_determined_have_an_answer() -> None:
    """Each is in one row of the table, with its replacement."""
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", GUIDE.text, re.MULTILINE)
    names = (
        *("launch.wrap_rank", "transformers.DetCallback", "experimental.core_v2"),
        *("get_tensorboard_path", "get_tensorboard_writer", "get_initial_batch"),
        *("autocast_forward_pass", "overwrite_deepspeed_config", "set_mpu"),
        *("ModelParallelUnit", "use_pipeline_parallel"),
    )
    for name in names:
        assert len([answer for given, answer in rows if name in given and answer]) == 1, name


def test_every_mode_of_a_scheduler_is_listed() -> None:
    for mode in pytorch.LRScheduler.StepMode:
        assert f"| `{mode.name}` |" in GUIDE.text


@pytest.mark.long
def test_hyperparameters_of_the_script_must_be_in_the_config(
    environment: dict[str, str], tmp_path: Path
) -> None:
    call = "pytorch.Trainer(LineTrial(context), context).fit(max_length=pytorch.Epoch(1))"
    hparams = {"global_batch_size": 32, "lr": 0.1}
    script = f"{line_trial()}\n\nwith pytorch.init({hparams}) as context:\n    {call}\n"
    (tmp_path / "train.py").write_text(script)
    searcher = "searcher: {name: single, metric: validation_loss}"
    command = [sys.executable, "-m", "paceline.cli", "e", "create", "c.yaml", "--local", "--test"]
    options: Any = {"cwd": tmp_path, "env": environment, "timeout": 250, "capture_output": True}
    config = f"entrypoint: python3 train.py\n{searcher}\nhyperparameters: "
    (tmp_path / "c.yaml").write_text(f"{config}{{global_batch_size: 32, lr: 0.1}}\n")
    done = subprocess.run(command, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    (tmp_path / "c.yaml").write_text(f"{config}{{lr: 0.1}}\n")
    refused = subprocess.run(command, text=True, check=False, **options)
    assert "Hint: `hyperparameters: {global_batch_size: 32}` in the experiment's" in refused.stderr
