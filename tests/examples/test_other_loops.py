"""The examples of other libraries' loops: to their end, and on after they were killed."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.core import RunState, list_runs

Run = Callable[..., str]
LIBRARIES = ("lightning", "transformers", "accelerate")


@pytest.fixture
def example_name() -> str:
    """Return the name of the example."""
    return "other_loops"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_loop_learns_and_goes_on_after_its_script_was_killed(
    run: Run, example: Path, environment: dict[str, str], name: str
) -> None:
    # Importing it here would change variables of this process.
    if find_spec(name) is None:
        pytest.skip(f"NOT TESTED: needs pip install {name}")
    script = subprocess.Popen(
        [sys.executable, f"use_{name}.py"],
        cwd=example,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 200
    while len(committed(example)) < 2:
        assert script.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    script.send_signal(signal.SIGKILL)
    script.wait()
    output = run(f"use_{name}.py", PACELINE_RESUME="auto")
    (percent,) = re.findall(r"recognises ([\d.]+)% of the test images", output)
    assert float(percent) > 90
    (summary,) = list_runs(example / "paceline_runs")
    assert summary.state == RunState.COMPLETED
    assert "12 checkpoints are in" in output
    # What was reported before is not reported again.
    first, *_ = re.findall(r"report (\d+):", output)
    assert int(first) > 1


def committed(example: Path) -> list[Path]:
    """Return the manifests of the checkpoints of the only run."""
    return list(example.glob("paceline_runs/*/checkpoints/*/manifest.json"))
