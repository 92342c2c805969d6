"""The example of a search method over the API: killed and started again, it finds its place."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.client import Client

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_search"


def start(home: Path, experiment_id: int) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return subprocess.Popen(
        [sys.executable, EXAMPLE / "search.py", str(experiment_id)],
        env={**kept, "PACELINE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
def test_a_method_over_the_api_goes_on_after_it_was_killed(
    tmp_path: Path, master_server: Any
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    master_server.start_master(home, "--port", 0, "--slots", 2)
    url = str(json.loads((home / "master.json").read_text())["url"])
    with Client(token=(home / "token").read_text().strip(), master=url) as client:
        try:
            config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
            experiment = client.create_experiment(config, EXAMPLE)
            method = start(home, experiment.id)
            while len(experiment.trials()) < 3:
                assert method.poll() is None, method.communicate()
                time.sleep(0.05)
            method.send_signal(signal.SIGKILL)
            method.communicate()
            method = start(home, experiment.id)
            output, _ = method.communicate(timeout=240)
            assert method.returncode == 0, output
            assert experiment.reload().state.value == "COMPLETED"
            trials = experiment.trials()
            assert 6 <= len(trials) <= 12
            early = [trial for trial in trials if trial.steps_completed < 60]
            assert early
            assert {trial.state.value for trial in early} == {"CANCELED"}
            # A stop may come while a trial ends by itself.
            others = {trial.state.value for trial in trials if trial not in early}
            assert others <= {"COMPLETED", "CANCELED"}
            why = [trial.decisions() for trial in trials]
            assert any("near the best so far" in str(each) for each in why)
            assert not any("nobody has answered" in str(each) for each in why)
        finally:
            client.shut_down(timeout_s=1)
