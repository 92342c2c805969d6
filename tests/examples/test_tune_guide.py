"""What the guide to hyperparameter search shows runs."""

import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from guides import Guide

GUIDE = Guide("docs/tune.md")
BLOCKS = GUIDE.blocks("python")
KILLED = """
import contextlib, os, signal, sys, time

def kill_driver_once(epoch):
    while epoch == 3 and "DRIVER" in os.environ:
        # The checkpoint must exist before, and its report must not.
        with contextlib.suppress(Exception):
            state = train.Checkpoint.from_path("search/trials/0001").load()
            if state["result"]["epochs"] == 4:
                os.kill(int(os.environ["DRIVER"]), signal.SIGKILL)
                time.sleep(60)
        time.sleep(0.01)

if __name__ == "__main__":
    if sys.argv[1:]:
        os.environ["DRIVER"] = str(os.getpid())
    (trial,) = train.search(
        train_func,
        {"lr": 0.1, "batch_size": 16},
        {"name": "random", "metric": "loss", "max_trials": 1, "max_length": {"epochs": 8}},
        dataset=DATA,
        directory="search",
    )
    print("trial:", trial.state, trial.num_reports, trial.time)
"""
FIRST_OF_TUNE = next(n for n, block in enumerate(BLOCKS) if "from ray import tune" in block)


def test_the_search_without_ray_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}
    GUIDE.run(BLOCKS[:FIRST_OF_TUNE], names)
    assert "4 trial(s), best loss" in capsys.readouterr().out
    assert len(names["results"]) == 2
    assert (tmp_path / "paceline_runs" / "my-search" / "trials" / "0002" / "run.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_code_for_ray_tune_runs(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    # Importing it here would change variables of this process.
    if find_spec("ray") is None:
        pytest.skip("NOT TESTED: needs pip install 'ray[tune]'")

    code = "\n".join([BLOCKS[0], *BLOCKS[FIRST_OF_TUNE:]])
    code = code.replace(
        "from ray import tune",
        "import ray\nfrom ray import tune\nray.init('local', num_cpus=4, include_dashboard=False)",
        1,
    )
    (tmp_path / "guide.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "guide.py"],
        cwd=tmp_path,
        env={**clean_environment, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "{'lr': 0.1" in done.stdout


def test_a_kill_between_save_and_report_loses_no_report(run_python: Callable[..., Any]) -> None:
    report = "        train.report(**result)\n"
    assert report in BLOCKS[0]
    code = BLOCKS[0].replace(report, f"        kill_driver_once(epoch)\n{report}") + KILLED
    killed = run_python(code, "kill", name="search.py")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_python(code, name="search.py")
    assert resumed.returncode == 0, resumed.stderr
    assert "trial: completed 8 8.0" in resumed.stdout
