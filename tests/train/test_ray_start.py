"""A script joins a cluster that `ray start --head` has started, as the guide to Ray says."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline._listening import PortReservation

TRAIN = """
import argparse
import ray
from paceline import train

def fit(config):
    train.report(rank=train.world_rank())
    return train.world_size()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    args = parser.parse_args()
    if args.address:
        ray.init(address=args.address, log_to_driver=False)
    with train.Trainer(num_workers=2, run_dir="run") as trainer:
        print("sizes:", *trainer.run(fit, {}))
"""


@pytest.fixture
def started_cluster(tmp_path: Path, clean_environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Start Ray as on a head node, and return the environment with its address."""
    # Importing it here would change variables of this process.
    if find_spec("ray") is None:
        pytest.skip("NOT TESTED: Ray is not installed")
    with PortReservation() as reservation:
        port = reservation.port
    command = [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()"),
        *("start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"),
        *("--num-cpus=2", "--include-dashboard=false"),
        "--dashboard-agent-listen-port=0",
    ]
    token = "a-token-for-tests-alone-and-nothing-else"
    environment = {**clean_environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with (tmp_path / "ray.log").open("w") as log:
        head = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    deadline = time.monotonic() + 180
    while "Ray runtime started" not in (tmp_path / "ray.log").read_text():
        assert head.poll() is None, (tmp_path / "ray.log").read_text()
        assert time.monotonic() < deadline, (tmp_path / "ray.log").read_text()
        time.sleep(0.2)
    yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    head.terminate()
    head.wait(60)
    # What Ray started has the group of its own.
    with suppress(ProcessLookupError):
        os.killpg(head.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("arguments", [[], ["--address=auto"]])
def test_a_script_joins_the_cluster(
    started_cluster: dict[str, str],
    run_python: Callable[..., Any],
    arguments: list[str],
) -> None:
    done = run_python(TRAIN, *arguments, name="train.py", **started_cluster)
    assert done.returncode == 0, done.stderr
    assert "sizes: 2 2" in done.stdout


SEARCH = """
from paceline import train

def fit(config):
    for epoch in range(2):
        train.report(loss=config["lr"], size=train.world_size(), epochs=epoch + 1)

if __name__ == "__main__":
    results = train.search(
        fit,
        {"lr": {"type": "double", "minval": 1.0, "maxval": 2.0}},
        {"name": "random", "metric": "loss", "max_trials": 2, "max_length": {"epochs": 2}},
        trainer=train.Trainer(num_workers=1, cluster="ray"),
    )
    print("trials:", *(f"{each.state}-{each.metrics['size']}" for each in results))
"""


@pytest.mark.slow
def test_a_search_starts_ray_once_for_all_of_its_trials(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    if find_spec("ray") is None:
        pytest.skip("NOT TESTED: Ray is not installed")
    (tmp_path / "search.py").write_text(SEARCH)
    done = subprocess.run(
        [sys.executable, "search.py"],
        cwd=tmp_path,
        env=clean_environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "trials: completed-1 completed-1" in done.stdout, done.stderr
