"""A script joins a cluster that `ray start --head` has started, as the guide to Ray says."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline._base.process_and_network import PortReservation

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


@contextmanager
def started(
    directory: Path, port: int, environment: dict[str, str], *options: str
) -> Iterator[dict[str, str]]:
    """Start Ray as on a head node, and yield the environment with its address."""
    # Importing it here would change variables of this process.
    if find_spec("ray") is None:
        pytest.skip("NOT TESTED: Ray is not installed")
    command = [
        *(sys.executable, "-c", "from ray.scripts.scripts import main; main()"),
        *("start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1"),
        *("--include-dashboard=false", "--dashboard-agent-listen-port=0", *options),
    ]
    token = "a-token-for-tests-alone-and-nothing-else"
    environment = {**environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with (directory / "ray.log").open("w") as log:
        head = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    deadline = time.monotonic() + 180
    while "Ray runtime started" not in (directory / "ray.log").read_text():
        assert head.poll() is None, (directory / "ray.log").read_text()
        assert time.monotonic() < deadline, (directory / "ray.log").read_text()
        time.sleep(0.2)
    yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    head.terminate()
    head.wait(60)
    # What Ray started has the group of its own.
    with suppress(ProcessLookupError):
        os.killpg(head.pid, signal.SIGKILL)


def free_port() -> int:
    with PortReservation() as reservation:
        return reservation.port


@pytest.fixture
def started_cluster(tmp_path: Path, clean_environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Start Ray as on a head node, and return the environment with its address."""
    with started(tmp_path, free_port(), clean_environment, "--num-cpus=2") as environment:
        yield environment


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


WITHOUT_ADDRESS = """
from paceline import train

def fit(config):
    return train.world_size()

if __name__ == "__main__":
    with train.Trainer(num_workers=1, cluster="ray") as trainer:
        print("sizes:", *trainer.run(fit, {}))
"""


@pytest.mark.slow
def test_a_script_that_names_no_cluster_is_told_of_the_one_of_its_machine(
    started_cluster: dict[str, str], run_python: Callable[..., Any]
) -> None:
    port = started_cluster.pop("RAY_ADDRESS").rpartition(":")[2]
    done = run_python(WITHOUT_ADDRESS, name="train.py", **started_cluster)
    assert "sizes: 1" in done.stdout, done.stderr
    told = re.search(r"beside the Ray cluster (\S+) that it belongs to.*=(\S+) uses", done.stderr)
    assert told is not None, done.stderr
    assert told[1] == told[2]
    assert told[1].endswith(f":{port}")


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


WITHOUT_HEAD = """
import os, sys, time
from pathlib import Path
from paceline import train

def fit(config):
    Path("begun").touch()
    while not Path("struck").exists():
        time.sleep(0.1)
    train.report(rank=train.world_rank())
    return train.world_size()

if __name__ == "__main__":
    with train.Trainer(num_workers=2) as trainer:
        print("sizes:", *trainer.run(fit, {}))
    print("went on", flush=True)
    # Ray ends a process that has lost its cluster for a minute.
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_and_its_trainer_end_after_the_head_was_killed(
    started_cluster: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_HEAD)
    with (tmp_path / "printed").open("w") as printed:
        script = subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path, env=started_cluster, stdout=printed, stderr=printed,
        )  # fmt: skip
    deadline = time.monotonic() + 180
    while not (tmp_path / "begun").exists():
        assert script.poll() is None, (tmp_path / "printed").read_text()
        assert time.monotonic() < deadline, (tmp_path / "printed").read_text()
        time.sleep(0.1)
    port = started_cluster["RAY_ADDRESS"].rpartition(":")[2]
    [server] = [
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "gcs_server" and f"--gcs_server_port={port}" in process.cmdline()
    ]
    server.kill()
    (tmp_path / "struck").touch()
    assert script.wait(120) == 0, (tmp_path / "printed").read_text()
    told = (tmp_path / "printed").read_text()
    assert "sizes: 2 2" in told
    assert "as its head node may be gone" in told
    assert "went on" in told


WITHOUT_OWN_NODE = """
import os
import psutil
import ray
from pathlib import Path
from ray.cluster_utils import Cluster
from paceline import train

def fit(config):
    step = (train.load_checkpoint() or {"step": 0})["step"]
    Path(f"pid-{os.getpid()}").touch()
    while step < 400:
        train.save_checkpoint(step=(step := step + 1))
        train.report(step=step)

class Killer(train.TrainingCallback):
    def handle_result(self, report):
        if (report.rank, report["step"]) == (0, 3):
            pid = int(next(Path().glob("pid-*")).name[4:])
            [raylet] = [p for p in psutil.Process(pid).parents() if p.name() == "raylet"]
            raylet.kill()

if __name__ == "__main__":
    # `ray start --block` would end its other processes too.
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    ray.init(address=cluster.address, log_to_driver=False)
    trainer = train.Trainer(num_workers=2, run_dir="run")
    try:
        trainer.run(fit, {}, callbacks=[Killer()])
    except train.TrainingFailedError as error:
        print("error:", error)
    trainer.shutdown()
    print("shut down", flush=True)
    cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_whose_driver_has_lost_its_raylet_ends_with_an_error_that_says_so(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    if find_spec("ray") is None:
        pytest.skip("NOT TESTED: Ray is not installed")
    (tmp_path / "train.py").write_text(WITHOUT_OWN_NODE)
    environment = {
        **clean_environment,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a-token-for-tests-alone-and-nothing-else",
        # Ray listens on the loopback interface then.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "error: The Ray node of the driver must run, but its" in done.stdout, done.stderr
    assert "shut down" in done.stdout
    pids = [int(path.name[4:]) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


GROW = """
import time
import ray
from paceline import train

def fit(config):
    step = (train.load_checkpoint() or {"step": 0})["step"]
    while train.world_size() < 2 or step < 3:
        time.sleep(0.2)
        step += 1
        train.report(step=step)
        train.save_checkpoint(step=step)
    return train.world_size()

if __name__ == "__main__":
    elastic = train.ElasticConfig(max_wait_s=2)
    with train.Trainer(2, resources_per_worker={"nowhere": 1}, elastic=elastic) as trainer:
        try:
            trainer.start()
        except train.NotEnoughWorkersError as error:
            print(error)
    # Each worker takes the one "lab" of a node.
    with train.Trainer(num_workers=(1, 2), resources_per_worker={"lab": 1}) as trainer:
        print("sizes:", *trainer.run(fit, {}))
    while sum(node["Alive"] for node in ray.nodes()) > 1:
        time.sleep(0.5)
    print("nodes are gone")
"""


@pytest.fixture
def autoscaling_cluster(
    tmp_path: Path, clean_environment: dict[str, str]
) -> Iterator[dict[str, str]]:
    """Start a head node without resources, and an autoscaler that adds nodes on this machine."""
    port, memory = free_port(), 80 * 1024**2
    lists = (
        *("initialization_commands", "setup_commands", "head_setup_commands"),
        *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
        *("cluster_synced_files", "rsync_exclude", "rsync_filter"),
    )
    kind = {"CPU": 1, "lab": 1, "object_store_memory": memory}
    config = {
        "cluster_name": "grows",
        "max_workers": 2,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": f"127.0.0.1:{port}",
        },
        "available_node_types": {
            "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "small": {"resources": kind, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        "head_node_type": "head",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.05,
        "auth": {"ssh_user": "nobody"},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in lists},
    }
    (tmp_path / "cluster.json").write_text(json.dumps(config))
    environment = {
        **clean_environment,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        # As `ray up` sets it.
        "RAY_NODE_TYPE_NAME": "head",
        # The wheel of Ray lacks a file that the second one reads for such nodes.
        "RAY_enable_autoscaler_v2": "0",
        "RAY_worker_niceness": "0",
    }
    options = ["--num-cpus=0", f"--object-store-memory={memory}"]
    options.append(f"--autoscaling-config={tmp_path / 'cluster.json'}")
    with started(tmp_path, port, environment, *options) as variables:
        yield variables


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_an_elastic_group_gets_nodes_of_an_autoscaler_which_go_after_the_run(
    autoscaling_cluster: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(GROW)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path, env=autoscaling_cluster, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert "sizes: 2 2\n" in done.stdout, done.stderr
    assert "nodes are gone" in done.stdout
    assert "2 worker(s) with 1 CPU, 1 nowhere each must find their resources within 2 s" in (
        done.stdout
    )
    # A node that was asked for a moment before may be there already.
    waits = r"room on the Ray cluster: its [12] node\(s\) have room for 0; its autoscaler may add"
    assert re.search(waits, done.stderr), done.stderr
    assert "room for 2 more worker(s) with 1 CPU, 1 lab each" in done.stderr
