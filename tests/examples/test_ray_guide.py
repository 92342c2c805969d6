"""What the guide to Ray shows runs on a cluster that is started as it says."""

import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from guides import Guide

GUIDE = Guide("docs/ray.md")
# The table of ways to start a cluster.
START_HEAD, START_OTHER = re.findall(r"`(RAY_AUTH_MODE=token ray start [^`]+)`", GUIDE.text)
(MAKE_TOKEN,) = re.findall(r"`(ray get-auth-token [^`]+)`", GUIDE.text)
START_SCRIPT = GUIDE.block("RAY_AUTH_MODE=", "bash").rstrip()

Shell = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def shell(tmp_path: Path, clean_environment: dict[str, str]) -> Iterator[Shell]:
    """Return a function that starts a command line; what still runs at the end is stopped."""
    environment = clean_environment | {
        "PATH": f"{Path(sys.executable).parent}:{clean_environment['PATH']}",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    }
    started = []

    def start(line: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            ["sh", "-c", f"exec env {line}"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in reversed(started):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.fixture
def head() -> str:
    """Return the address at which the head node is to listen."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def read_until(process: "subprocess.Popen[str]", text: str) -> None:
    """Wait until a node says something."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    raise AssertionError("".join(lines))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_code_runs_on_the_cluster_that_the_guide_starts(
    shell: Shell, head: str, tmp_path: Path
) -> None:
    # Importing it here would change variables of this process.
    if find_spec("ray") is None:
        pytest.skip("NOT TESTED: needs pip install 'ray[data,tune]'")
    port = head.partition(":")[2]
    # The nodes seem to have as many cores as the guide's workers take.
    here = "--num-cpus=20 --node-ip-address=127.0.0.1 --disable-usage-stats --block"
    assert shell(MAKE_TOKEN).wait(120) == 0
    start_head = START_HEAD.replace("6379", port)
    assert start_head != START_HEAD
    read_until(shell(f"{start_head} --include-dashboard=false {here}"), "Ray runtime started")
    other = START_OTHER.replace("HEAD:6379", head)
    assert other != START_OTHER
    read_until(shell(f"{other} {here}"), "Ray runtime started")

    (tmp_path / "train.py").write_text(GUIDE.code())
    line = START_SCRIPT.replace("HEAD:6379", head)
    assert shlex.split(line) == [
        *("RAY_AUTH_MODE=token", f"RAY_ADDRESS={head}", "python", "train.py")
    ]
    stranger = shell(line.removeprefix("RAY_AUTH_MODE=token "))
    told, _ = stranger.communicate(timeout=200)
    assert f"The Ray cluster at {head} needs its token." in told
    script = shell(line)
    output, _ = script.communicate(timeout=800)
    assert script.returncode == 0, output[-5000:]
    assert "{'lr': 0.01}" in output
    # The guide's runs: that of eight workers, of Ray Data, and of two trials.
    (first,) = tmp_path.glob("runs/first/run.json")
    assert len(list(first.parent.glob("journal/*"))) >= 8
