"""Run directories go to a temporary place, and torch's loaders leave no signal handler."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Put back what torch and a train function in this process change of it."""
    handler = signal.getsignal(signal.SIGCHLD)
    mode = torch.get_deterministic_debug_mode()
    yield
    signal.signal(signal.SIGCHLD, handler)
    torch.set_deterministic_debug_mode(mode)


NODE = """
import sys
from ray._private.node import Node
from ray._private.parameter import RayParams

params = RayParams(
    gcs_address=sys.argv[1],
    num_cpus=1,
    resources={"elsewhere": 1},
    object_store_memory=150 * 1024**2,
    min_worker_port=0,
    max_worker_port=0,
    node_manager_port=0,
    include_log_monitor=False,
)
node = Node(params, head=False, shutdown_at_exit=True, spawn_reaper=True)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def nodes_with_own_disks(ray_cluster: Any, tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a function that adds nodes to the cluster, which do not see a directory.

    Each has an empty disk of its own there, and one of the resource "elsewhere". The function
    returns the directory, which this process and its other nodes see.
    """
    directory = tmp_path / "project"
    directory.mkdir()
    mount = f"mount -t tmpfs tmpfs {directory}"

    def add(num_nodes: int) -> Path:
        if subprocess.run(["unshare", "--mount", "sh", "-c", mount], check=False).returncode != 0:
            pytest.skip("NOT TESTED: a node with files of its own needs the right to mount a tmpfs")
        for _ in range(num_nodes):
            _start_node(stack, mount, ray_cluster.address)
        return directory

    with ExitStack() as stack:
        yield add


def _start_node(stack: ExitStack, mount: str, address: str) -> None:
    start = [sys.executable, "-c", NODE, address]
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f'{mount} && cd / && exec "$@"', "sh", *start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert node.stdin is not None
    assert node.stdout is not None
    stack.callback(node.wait, 60)
    stack.callback(node.stdout.close)
    stack.callback(node.stdin.close)
    assert node.stdout.readline() == b"ready\n"
