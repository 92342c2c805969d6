"""The example of a train function: by itself, without workers, and under the launcher."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core import RunState, list_runs

Run = Callable[..., str]


@pytest.fixture
def example_name() -> str:
    """Return the name of the example."""
    return "train_function"


def recognised(output: str) -> float:
    (percent, *_) = re.findall(r"recognises ([\d.]+)% of the test images", output)
    return float(percent)


@pytest.mark.long
def test_two_workers_learn_the_digits(run: Run, example: Path) -> None:
    output = run("train.py")
    assert re.findall(r"report (\d+): epoch", output) == [str(n) for n in range(1, 11)]
    assert recognised(output) > 90
    (summary,) = list_runs(example / "paceline_runs")
    assert (summary.name, summary.state) == ("train", RunState.COMPLETED)


@pytest.mark.slow
def test_the_same_script_runs_without_workers_and_under_the_launcher(run: Run) -> None:
    assert recognised(run("train.py", "0")) > 90
    launcher = ("-m", "paceline.launch.torch_distributed", "--nproc-per-node=2")
    assert recognised(run(*launcher, "train.py")) > 90
