"""Launchers of several nodes, which all run on this machine; with real processes and signals."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from paceline.workers import PortReservation

Script = Callable[..., str]
Nodes = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_node(start_launcher: Callable[..., Any]) -> Callable[..., "subprocess.Popen[str]"]:
    """Start the launcher of one node of a test's group."""
    with PortReservation() as reservation:
        port = reservation.port

    def start(rank: int, *arguments: str, nodes: int = 2, **environment: str) -> Any:
        place = [f"--nnodes={nodes}", f"--node-rank={rank}", "--master-addr=127.0.0.1"]
        return start_launcher(*place, f"--master-port={port}", *arguments, **environment)

    return start


def end_of(launcher: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = launcher.communicate(timeout=120)
    return launcher.returncode, out, err


@pytest.mark.parametrize("rank", [0, 3])
def test_the_exit_of_a_worker_on_any_node_is_told(
    start_node: Nodes, script: Script, rank: int
) -> None:
    text = "import os, sys\nif os.environ['RANK'] == sys.argv[1]: sys.exit(3)"
    arguments = ["--nproc-per-node=2", "--grace-s=2", script(text), str(rank)]
    launchers = [start_node(node, *arguments) for node in range(2)]
    code, _, err = end_of(launchers[rank // 2])
    assert code == 3
    assert f"Rank {rank} exited with code 3, the first of 4 to fail" in err
    assert "Traceback" not in err
    assert end_of(launchers[1 - rank // 2])[0] in (0, 3)
