"""The process that forks runners for a master."""

import json
import socket
import subprocess
import sys
from pathlib import Path


def test_it_ends_quietly_if_its_master_is_killed_while_it_forks(tmp_path: Path) -> None:
    asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with asking, asked:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline._cluster.runner", "--host", str(asked.fileno())],
            pass_fds=[asked.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        request = {
            "directory": str(tmp_path / "1"),
            "ship": False,
            "log": str(tmp_path / "runner.log"),
            "cwd": str(tmp_path),
        }
        asking.send(json.dumps(request).encode())
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "")
    assert (tmp_path / "runner.log").exists()
