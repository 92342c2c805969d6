"""The program that answers requests, and the guard of a runner on Ray; neither needs Ray."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline._base.request_program import RequestProgram
from paceline._cluster.master.starters import ray_guard as _ray_guard
from paceline._cluster.master.starters.slurm_ssh_ray_starters import StarterError

PROGRAM = """
import json, sys, time
for number, line in enumerate(sys.stdin):
    request = json.loads(line)
    if request["method"] == "end":
        sys.exit("out of paper")
    if request["method"] == "hang":
        time.sleep(600)
    if request["method"] == "fail":
        print(json.dumps({"error": "no such thing"}), flush=True)
    else:
        print(json.dumps({"value": [number, request]}), flush=True)
"""


@pytest.fixture
def program() -> Iterator[RequestProgram]:
    program = RequestProgram("Lab", [sys.executable, "-c", PROGRAM], StarterError)
    yield program
    program.close()


def test_a_program_answers_until_it_is_closed(program: RequestProgram) -> None:
    assert program.ask("look", at="it") == [0, {"method": "look", "at": "it"}]
    with pytest.raises(StarterError, match="^Lab: no such thing$"):
        program.ask("fail")
    assert program.ask("look") == [2, {"method": "look"}]
    program.close()
    with pytest.raises(StarterError, match="the master ends"):
        program.ask("look")


def test_a_program_that_ends_or_hangs_is_told_and_started_again(program: RequestProgram) -> None:
    with pytest.raises(StarterError, match="^Lab: its process has ended: out of paper$"):
        program.ask("end")
    assert program.ask("look")[0] == 0
    with pytest.raises(StarterError, match=r"did not answer within 0\.1 s"):
        program.ask("hang", timeout_s=0.1)
    assert program.ask("look")[0] == 0


RUNNER = """
import os, signal, sys
os.makedirs("attempts")
if sys.argv[1] == "fail":
    sys.exit("no module")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open("../begun", "w").write(" ".join(sys.argv[1:]))
signal.pause()
"""


def start_guard(directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    guard = subprocess.Popen(
        [sys.executable, "-c", Path(_ray_guard.__file__).read_text()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guard.stdin is not None
    order = {
        "name": "far-1", "token": "secret", "certificate": None, "directory": str(directory),
        "command": [sys.executable, "-c", RUNNER, *arguments],
    }  # fmt: skip
    guard.stdin.write(json.dumps(order) + "\n")
    guard.stdin.flush()
    # The guard itself is no child.
    assert guard.wait(60) == 0
    return guard


def test_a_guard_ends_its_runner_with_its_input_and_leaves_nothing(tmp_path: Path) -> None:
    guard = start_guard(tmp_path)
    assert guard.stdin is not None
    assert guard.stdout is not None
    begun = tmp_path / "begun"
    while not begun.exists() or not begun.read_text():
        pass
    token = tmp_path / "far-1" / "token"
    assert token.read_text() == "secret"
    assert token.stat().st_mode & 0o077 == 0
    assert begun.read_text() == f"--dir {token.parent} --token-file {token}"
    guard.stdin.close()
    assert guard.stdout.read() == ""
    assert not token.parent.exists()
    guard.stdout.close()


def test_a_guard_says_why_its_runner_failed_and_keeps_its_log(tmp_path: Path) -> None:
    guard = start_guard(tmp_path, "fail")
    assert guard.stdin is not None
    assert guard.stdout is not None
    assert json.loads(guard.stdout.read()) == "It ended with exit code 1: no module"
    assert (tmp_path / "far-1" / "runner.log").exists()
    guard.stdin.close()
    guard.stdout.close()
