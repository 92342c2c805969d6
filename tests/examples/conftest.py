"""A copy of an example, and scripts run in it as a user runs them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Run = Callable[..., str]


@pytest.fixture
def example_name() -> str:
    """Return the name of the example to copy; modules for another one override it."""
    return "core_api_digits"


@pytest.fixture
def example(tmp_path: Path, example_name: str) -> Path:
    """Return a copy of the example."""
    ignored = shutil.ignore_patterns("__pycache__", "paceline_runs")
    return Path(shutil.copytree(EXAMPLES / example_name, tmp_path / "example", ignore=ignored))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment without a master, with one thread per process."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return {**kept, "PACELINE_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def run(example: Path, environment: dict[str, str], torch_ranks: Any) -> Run:
    """Return a function that runs a Python command in the example and returns its output.

    A script is forked from a process that has torch loaded.
    """

    def run_python(*arguments: str, code: int = 0, **variables: str) -> str:
        if arguments[0].endswith(".py"):
            result = torch_ranks.run_to_end(
                str(example / arguments[0]), *arguments[1:],
                directory=example, environment={**environment, **variables},
            )  # fmt: skip
        else:
            result = subprocess.run(
                [sys.executable, *arguments],
                cwd=example,
                env={**environment, **variables},
                capture_output=True,
                text=True,
                timeout=250,
                check=False,
            )
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout + result.stderr

    return run_python


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that runs a line with a command of Paceline, in this process."""
    from paceline.cli import main

    def run(line: str) -> None:
        monkeypatch.setattr(sys, "argv", line.split())
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, line

    return run
