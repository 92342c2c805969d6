"""What the guide to hyperparameter search shows runs."""

import signal
from collections.abc import Callable
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


@pytest.mark.long
def test_a_kill_between_save_and_report_loses_no_report(run_python: Callable[..., Any]) -> None:
    report = "        train.report(**result)\n"
    assert report in BLOCKS[0]
    code = BLOCKS[0].replace(report, f"        kill_driver_once(epoch)\n{report}") + KILLED
    killed = run_python(code, "kill", name="search.py")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_python(code, name="search.py")
    assert resumed.returncode == 0, resumed.stderr
    assert "trial: completed 8 8.0" in resumed.stdout
