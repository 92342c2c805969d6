"""The example of config objects: a script, a file, and a search by a master."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.core import list_runs

Run = Callable[..., str]


@pytest.fixture
def example_name() -> str:
    """Return the name of the example."""
    return "declarative_trainer"


@pytest.mark.long
def test_the_script_learns_and_goes_on(run: Run, example: Path) -> None:
    run("train.py", "--epochs", "1")
    output = run("train.py", "--epochs", "8", "--checkpoint-dir", "results")
    assert "Epoch 1:" not in output
    assert "Epoch 2:" in output
    (digits, darkness) = re.findall(r"([\d.]+)% (?:are recognised|of the variance)", output)
    assert float(digits) > 90
    assert float(darkness) > 20
    assert (example / "results" / "loss_history.png").exists()


@pytest.mark.slow
def test_the_file_is_the_same_run(run: Run, example: Path) -> None:
    run("train.py", "--epochs", "2")
    scripted = (example / "results" / "training_info.txt").read_text()
    run("-m", "paceline.declarative", "run.yaml", "num_epochs=2", "model_save_dir=filed")
    assert (example / "filed" / "training_info.txt").read_text() == scripted


@pytest.mark.slow
def test_one_batch_is_tried_before_a_search(run: Run, example: Path) -> None:
    options = ("search.yaml", ".", "--local", "--test")
    run("-m", "paceline.cli", "e", "create", *options)
    [summary] = list_runs(example / "paceline_runs")
    assert (summary.state.value, summary.last_step) == ("completed", 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_master_searches_by_fields(run: Run, tmp_path: Path) -> None:
    cli = ("-m", "paceline.cli")
    run(*cli, "up", "--detach", "--port", "0", "--slots", "2")
    try:
        shorter = ("--config", "searcher.max_time=2", "--config", "searcher.max_trials=2")
        output = run(*cli, "e", "create", "search.yaml", ".", "-f", *shorter)
        lines = run(*cli, "t", "metrics", "1", "-g", "validation", "--json").splitlines()
    finally:
        run(*cli, "down", "--timeout", "1", "--home", str(tmp_path / "home"))
    assert "is COMPLETED" in output
    rows = [json.loads(line) for line in lines]
    assert {"val_loss", "val_acc_digit", "val_acc_darkness"} <= rows[-1]["metrics"].keys()


def test_the_search_is_valid(example: Path) -> None:
    config = load_config(example / "search.yaml")
    assert not config.warnings
    assert config.searcher.metric == "val_loss"


def test_every_file_is_in_the_guide(example: Path) -> None:
    named = set(re.findall(r"`([\w.]+\.(?:py|yaml))`", (example / "README.md").read_text()))
    assert named == {path.name for path in example.iterdir() if path.suffix in (".py", ".yaml")}
