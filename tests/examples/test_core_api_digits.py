"""The five steps of the example do what its guide says."""

import difflib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import load_config
from paceline.core import list_runs, read_metrics
from paceline.journal import RunDirectory

STEPS = ["model_def", "model_def_metrics", "model_def_checkpoints"]
CONFIGS = ["const", "metrics", "checkpoints", "adaptive", "distributed"]

STRAIGHT = ["model_def_checkpoints.py", "--epochs", "3"]

Run = Callable[..., str]


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where step 3 ran to its end without being disturbed."""
    scripts = Path(__file__).resolve().parents[2] / "examples" / "core_api_digits"
    directory = tmp_path_factory.mktemp("straight")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    subprocess.run(
        [sys.executable, scripts / STRAIGHT[0], *STRAIGHT[1:]],
        cwd=directory,
        env={**kept, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=240,
        capture_output=True,
    )
    return directory


def only_run(example: Path) -> RunDirectory:
    [summary] = list_runs(example / "paceline_runs")
    assert summary.state.value == "completed"
    return RunDirectory(summary.path)


def validation(run: RunDirectory) -> dict[int, dict[str, Any]]:
    rows = read_metrics(run, "validation")
    return {row.steps_completed: row.metrics for row in rows if not row.is_superseded}


def last_state(run: RunDirectory, epochs: int) -> dict[str, Any]:
    """Return what the last checkpoint of a run holds."""
    for path in run.checkpoints_path.iterdir():
        state: dict[str, Any] = torch.load(path / "state.pt", weights_only=True)
        if state["epochs_completed"] == epochs:
            return state
    raise AssertionError(f"no checkpoint after {epochs} epochs")


def assert_same(left: Any, right: Any) -> None:
    """Compare two states bit for bit."""
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for mine, other in zip(left, right, strict=True):
            assert_same(mine, other)
    else:
        assert left == right


@pytest.mark.parametrize("name", CONFIGS)
def test_each_config_is_valid_and_names_a_metric_that_its_script_reports(
    example: Path, name: str
) -> None:
    config = load_config(example / f"{name}.yaml")
    assert not config.warnings
    script = re.search(r"model_def\w*\.py", str(config.entrypoint))
    assert script is not None
    text = (example / script[0]).read_text()
    for metric in (config.searcher.metric, getattr(config.searcher, "time_metric", None)):
        assert metric is None or name == "const" or f'"{metric}"' in text


def test_the_search_has_at_least_16_trials(example: Path) -> None:
    searcher = load_config(example / "adaptive.yaml").searcher
    assert (searcher.name, searcher.max_trials >= 16) == ("adaptive_asha", True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model_def", "model_def_metrics"),
        ("model_def_metrics", "model_def_checkpoints"),
        ("model_def_checkpoints", "model_def_adaptive"),
        ("model_def_checkpoints", "model_def_distributed"),
    ],
)
def test_every_block_that_a_step_changes_is_marked(example: Path, before: str, after: str) -> None:
    """A change lies under a `# NEW:` comment, or only unmarks what was new before."""

    def plain(name: str) -> list[str]:
        text = (example / f"{name}.py").read_text()
        return [line.replace("# NEW: ", "# ") for line in text.splitlines()]

    marked = (example / f"{after}.py").read_text().splitlines()
    old, new = plain(before), plain(after)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    changed = [block for block in matcher.get_opcodes() if block[0] in ("insert", "replace")]
    unmarked = [
        "\n".join(marked[first:last])
        for _, _, _, first, last in changed
        if not any("# NEW" in line for line in marked[max(first - 8, 0) : last])
        and not all(line.startswith(("from ", "import ", '"""')) for line in marked[first:last])
    ]
    assert unmarked == []


@pytest.mark.slow
def test_reporting_does_not_change_a_training_that_learns(run: Run, example: Path) -> None:
    outputs = [run(f"{name}.py", "--epochs", "3") for name in STEPS[:2]]
    assert outputs[0] == outputs[1]
    rows = validation(only_run(example))
    assert {step: row["epochs"] for step, row in rows.items()} == {23: 1, 46: 2, 69: 3}
    printed = re.findall(r"test loss ([\d.]+)", outputs[0])
    assert [f"{row['test_loss']:.4f}" for row in rows.values()] == printed
    assert rows[69]["accuracy"] > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_was_stopped_ends_in_the_same_bits(
    run: Run,
    example: Path,
    environment: dict[str, str],
    straight_run: Path,
    number: signal.Signals,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", *STRAIGHT],
        cwd=example,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"epoch 2 batch"):
            break
    process.send_signal(number)
    process.communicate(timeout=240)
    run(*STRAIGHT, PACELINE_RESUME="auto")
    resumed, straight = only_run(example), only_run(straight_run)
    assert len({key.attempt for key in resumed.journal_keys()}) == 2
    assert_same(last_state(resumed, 3), last_state(straight, 3))
    assert validation(resumed) == validation(straight)


@pytest.mark.slow
def test_two_processes_train_and_resume_in_the_same_bits(run: Run, example: Path) -> None:
    launch = ["-m", "paceline.launch.torch_distributed", "--nproc-per-node=2", "--"]
    command = [*launch, "python3", "model_def_distributed.py", "--epochs"]
    run(*command, "2")
    straight = only_run(example)
    expected, rows = last_state(straight, 2), validation(straight)
    straight.path.rename(example / "straight")
    assert list(rows) == [23, 46]

    run(*command, "1")
    [path] = (example / "paceline_runs").iterdir()
    run(*command, "2", PACELINE_RESUME=str(path))
    resumed = only_run(example)
    assert_same(last_state(resumed, 2), expected)
    assert validation(resumed) == rows


@pytest.mark.long
def test_the_distributed_script_runs_alone(run: Run, example: Path) -> None:
    run("model_def_distributed.py", "--epochs", "1")
    assert list(validation(only_run(example))) == [23]


@pytest.mark.long
def test_the_search_script_says_how_to_start_it(run: Run, example: Path) -> None:
    output = run("model_def_adaptive.py", code=1)
    assert output == "This step needs a search: paceline e create adaptive.yaml . -f\n"
    assert not (example / "paceline_runs").exists()


@pytest.mark.long
def test_a_trial_of_the_search_runs_locally(run: Run) -> None:
    output = run(
        *("-m", "paceline.cli", "e", "create", "adaptive.yaml", ".", "--local"),
        *("--config", "entrypoint=python3 model_def_adaptive.py --epochs 1"),
    )
    assert "learning_rate=" in output
    assert "The run is completed (exit code 0)." in output


@pytest.mark.slow
def test_a_new_trial_takes_the_weights_and_starts_afresh(
    run: Run, example: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    cli = ("-m", "paceline.cli")
    run(*cli, "up", "--detach", "--port", "0", "--slots", "1")
    try:
        short = "entrypoint=python3 model_def_checkpoints.py --epochs 2"
        run(*cli, "e", "create", "checkpoints.yaml", ".", "-f", "--config", short)
        run(*cli, "t", "continue", "1", "-f")
        rows = [
            json.loads(line)
            for trial in ("1", "2")
            for line in run(*cli, "t", "metrics", trial, "-g", "validation", "--json").splitlines()
        ]
    finally:
        run(*cli, "down", "--timeout", "1", "--home", str(home))
    assert [row["steps_completed"] for row in rows] == [23, 46, 23, 46]
    losses = [row["metrics"]["test_loss"] for row in rows]
    # Going on from the weights, one epoch is already better than the two before.
    assert losses[2] < losses[1] < losses[0]
