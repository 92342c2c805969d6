"""What the README shows works."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from guides import Guide, line_trial

from paceline.config import validate_config
from paceline.core import list_runs, read_metrics
from paceline.journal import RunDirectory

README = Guide("README.md")


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work beside the script with the trainer; its trial is that of the guide."""
    (tmp_path / "model_def.py").write_text(f"{line_trial()}\nMyTrial = LineTrial\n")
    (tmp_path / "train.py").write_text(README.blocks("python")[0])
    monkeypatch.chdir(tmp_path)


def test_the_trainer_trains(trainer: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_path("train.py")
    sys.modules.pop("model_def")
    [run] = list_runs(tmp_path / "paceline_runs")
    rows = list(read_metrics(RunDirectory(run.path), "validation"))
    assert [row.steps_completed for row in rows] == list(range(10, 101, 10))
    assert rows[-1].metrics["validation_loss"] < rows[0].metrics["validation_loss"]


def test_the_trainer_is_an_experiment_with_its_hyperparameters(
    trainer: None, environment: dict[str, str]
) -> None:
    config = README.blocks("yaml")[0].replace("metric: loss", "metric: validation_loss")
    assert "`metric: validation_loss`" in README.text
    [hyperparameters] = re.findall(r"`(hyperparameters: \{.*?\})`", README.text)
    create = ("e", "create", "config.yaml", "--local", "--test")
    command = [sys.executable, "-m", "paceline.cli", *create]
    options: Any = {"env": environment, "timeout": 100, "capture_output": True, "text": True}
    Path("config.yaml").write_text(f"{config}{hyperparameters}\n")
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    Path("config.yaml").write_text(f"{config}hyperparameters: {{lr: 0.1}}\n")
    refused = subprocess.run(command, **options)
    assert "Hint: `hyperparameters: {global_batch_size: 32}` in the experiment's" in refused.stderr


def test_the_script_trains(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text(README.blocks("python")[1])
    subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True, timeout=100
    )
    [run] = list_runs(tmp_path / "paceline_runs")
    rows = list(read_metrics(RunDirectory(run.path), "validation"))
    assert [row.steps_completed for row in rows] == list(range(10, 101, 10))
    assert rows[-1].metrics["loss"] < rows[0].metrics["loss"]
    assert run.latest_checkpoint is not None


def test_the_config_is_valid() -> None:
    config = validate_config(yaml.safe_load(README.blocks("yaml")[0]))
    assert config.searcher.metric == "loss"


def test_the_readme_stays_short() -> None:
    assert len(README.text.splitlines()) < 150
