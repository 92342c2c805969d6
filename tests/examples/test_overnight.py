"""The agent's night of the example: killed and started again, it finds its place."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Client

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "overnight"
ARGUMENTS = ["--proposals", "3", "--steps", "80", "--seeds", "2"]


def start(home: Path) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return subprocess.Popen(
        [sys.executable, EXAMPLE / "agent.py", *ARGUMENTS],
        env={**kept, "PACELINE_HOME": str(home), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], object], agent: subprocess.Popen[str]) -> None:
    while not condition():
        assert agent.poll() is None, "the agent ended before"
        time.sleep(0.05)


@pytest.mark.long
def test_a_night_goes_on_after_the_agent_was_killed(tmp_path: Path, master_server: Any) -> None:
    home = tmp_path / "home"
    home.mkdir()
    master_server.start_master(home, "--port", 0, "--slots", 2)
    with Client(token=(home / "token").read_text().strip(), master=url_of(home)) as client:
        try:
            # Killed while the search runs, then while the longer training does.
            for num_experiments in (1, 2):
                agent = start(home)
                wait_for(lambda n=num_experiments: len(client.list_experiments()) >= n, agent)
                agent.send_signal(signal.SIGKILL)
                agent.communicate()
            agent = start(home)
            output, _ = agent.communicate(timeout=280)
            assert agent.returncode == 0, output
            found = client.list_experiments()[::-1]
            names = [one.name for one in found]
            assert len(names) == 4
            assert [one.state.value for one in found] == ["COMPLETED"] * 4
            assert [len(one.trials()) for one in found] == [6, 1, 2, 2]
            proposals = found[0].proposals()
            assert 1 <= len(proposals) <= 3
            assert len({one.trial_id for one in proposals}) == len(proposals)
            told = found[0].repeats()
            assert told is not None
            assert told.num_pairs == 2
            assert f"real: {told.is_real}" in output
        finally:
            client.shut_down(timeout_s=1)


def url_of(home: Path) -> str:
    import json

    return str(json.loads((home / "master.json").read_text())["url"])
