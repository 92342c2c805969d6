"""Workers of the launcher that are stopped or hang; with real signals."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[..., str]

STOPS_ONCE = """
import os, pathlib, signal, sys, time
stopped, again = pathlib.Path("stopped"), pathlib.Path("again")
if os.environ["RANK"] == "1":
    if not stopped.exists():
        stopped.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    again.touch()
while not again.exists():
    time.sleep(0.01)
sys.stdout.write("done\\n")
"""

HOLDS_THE_LOCK = """
import os, re, sys
if sys.argv[1] == "uses-paceline":
    from paceline import core
    context = core.init()
# The matching of expressions gives Python's lock to nobody.
re.match("(a+)+$", "a" * int(sys.argv[2]) + "b")
"""


def test_a_stopped_worker_counts_as_lost_and_all_start_again(
    launch: Launch, script: Script
) -> None:
    options = ["--nproc-per-node=2", "--max-restarts=1", "--heartbeat-timeout-s=1", "--grace-s=1"]
    result = launch(*options, script(STOPS_ONCE))
    assert result.returncode == 0, result.stderr
    assert "Rank 1 was stopped (SIGSTOP): it gave no sign of life for 1" in result.stderr
    assert "the first of 2 to fail; starting the workers again, restart 1 of 1" in result.stderr
    assert sorted(result.stdout.splitlines()) == ["[rank=0] done", "[rank=1] done"]


def test_what_a_shell_has_started_counts_as_the_worker(launch: Launch) -> None:
    command = ["sh", "-c", "sleep 600 & kill -STOP $!; wait"]
    result = launch("--heartbeat-timeout-s=1", *command)
    assert result.returncode == 128 + 9
    assert "Rank 0 was stopped (SIGSTOP): it gave no sign of life for 1" in result.stderr


def test_a_worker_that_holds_pythons_lock_is_found_if_it_uses_paceline(
    launch: Launch, script: Script
) -> None:
    name = script(HOLDS_THE_LOCK)
    result = launch("--heartbeat-timeout-s=2", name, "uses-paceline", "60")
    assert result.returncode == 128 + 9
    assert "Rank 0 hung: it gave no sign of life for 2" in result.stderr


@pytest.mark.slow
def test_a_script_without_paceline_may_hold_pythons_lock_for_long(
    launch: Launch, script: Script, tmp_path: Path
) -> None:
    # Some seconds on any machine.
    result = launch("--heartbeat-timeout-s=1", script(HOLDS_THE_LOCK), "plain", "27")
    assert result.returncode == 0, result.stderr
