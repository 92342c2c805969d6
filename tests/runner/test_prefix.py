"""Entrypoints below a program of the user: signals, exit codes and what is left behind."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

PREFIXES = {
    "nice": ["nice", "-n", "5"],
    "env": ["env", "MORE=1"],
    "setsid": ["setsid"],
    "setsid that waits": ["setsid", "--wait"],
    "script": ["./wrap.sh"],
}
WRAP = '#!/bin/sh\n"$@"\ncode=$?\nexit $code\n'
EXIT = """
import os, sys
print(os.getsid(0) == os.getpid(), os.nice(0), os.environ.get("MORE"))
sys.exit(7)
"""
SAVE_AT_SIGNAL = """
import os, signal, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
def save(number, frame):
    time.sleep(0.3)
    print("saved", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture(params=list(PREFIXES))
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return the section of a config, with a script that does not become what it runs."""
    script = tmp_path / "wrap.sh"
    script.write_text(WRAP)
    script.chmod(0o755)
    prefix = [word.replace("./wrap.sh", str(script)) for word in PREFIXES[request.param]]
    return {"prefix": prefix}


@pytest.mark.parametrize("entrypoint", ["python3 train.py", ["python3", "train.py"]])
def test_the_exit_code_comes_through(
    shared_master: Any, environment: dict[str, Any], entrypoint: object
) -> None:
    number = shared_master.create(EXIT, environment=environment, entrypoint=entrypoint)
    trial = shared_master.wait_for_end(number)
    assert trial["attempts"][0]["exit"]["code"] == 7
    leads, nice, more = shared_master.output(trial)[0].split()
    program = environment["prefix"][0]
    # A command as one string has a shell between.
    assert leads == str(program == "setsid" and isinstance(entrypoint, list))
    assert (nice == "5") == (program == "nice")
    assert (more == "1") == (program == "env")


def test_what_ends_by_a_signal_is_told_as_such(
    shared_master: Any, environment: dict[str, Any]
) -> None:
    script = "import os; os.kill(os.getpid(), 9)"
    trial = shared_master.wait_for_end(shared_master.create(script, environment=environment))
    assert trial["attempts"][0]["exit"]["code"] == 128 + signal.SIGKILL


@pytest.mark.long
def test_a_signal_lets_the_script_save_and_nothing_is_left(
    shared_master: Any, environment: dict[str, Any], wait_until: Callable[..., None]
) -> None:
    master = shared_master
    number = master.create(SAVE_AT_SIGNAL, environment=environment, preemption_timeout=10.0)
    wait_until(lambda: master.output(master.trial(number)))
    family = master.runner(master.trial(number)["attempts"][0]["id"]).children(recursive=True)
    assert any("train.py" in process.cmdline() for process in family)
    master.post(f"/experiments/{number}/pause")
    wait_until(lambda: "saved" in master.output(master.trial(number)))
    wait_until(lambda: not any(is_running(process) for process in family))
    master.post(f"/experiments/{number}/kill")


@pytest.mark.parametrize("prefix", [["setsid"], ["nice"]])
def test_a_kill_leaves_nothing(
    shared_master: Any, prefix: list[str], wait_until: Callable[..., None]
) -> None:
    master = shared_master
    number = master.create(SAVE_AT_SIGNAL, environment={"prefix": prefix})
    wait_until(lambda: master.output(master.trial(number)))
    family = master.runner(master.trial(number)["attempts"][0]["id"]).children(recursive=True)
    master.post(f"/experiments/{number}/kill")
    assert master.wait_for_end(number)["attempts"][0]["exit"]["reason"] == "killed"
    wait_until(lambda: not any(is_running(process) for process in family))


def test_a_killed_runner_leaves_nothing(
    shared_master: Any, environment: dict[str, Any], wait_until: Callable[..., None]
) -> None:
    master = shared_master
    number = master.create(SAVE_AT_SIGNAL, environment=environment)
    wait_until(lambda: master.output(master.trial(number)))
    runner = master.runner(master.trial(number)["attempts"][0]["id"])
    family = runner.children(recursive=True)
    runner.kill()
    wait_until(lambda: not any(is_running(process) for process in family))
    master.post(f"/experiments/{number}/kill")
    master.wait_for_end(number)


def test_a_program_that_is_not_there_is_named(shared_master: Any) -> None:
    number = shared_master.create("", environment={"prefix": ["no-such-program"]})
    trial = shared_master.wait_for_end(number)
    assert trial["attempts"][0]["exit"]["code"] == 127
    assert "no-such-program" in "\n".join(shared_master.output(trial))


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
