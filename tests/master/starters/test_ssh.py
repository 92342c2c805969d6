"""Runners that a master starts by a real sshd."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from starter_contract import Cluster, Pool, StarterContract


class Hosts(Cluster):
    tells_ends = False
    num_places = 1

    def __init__(self, options: dict[str, Any], place: Path) -> None:
        self.definition = {"starter": "ssh", "options": options}
        self._place = str(place)

    def jobs(self) -> list[bool]:
        return [True for _ in self._runners()]

    def num_groups(self) -> int:
        return len(self._runners())

    def end_one(self) -> None:
        self._runners()[0].send_signal(signal.SIGTERM)

    def _runners(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "runner" in words and self._place in " ".join(words):
                found.append(process)
        return found


@pytest.fixture
def cluster(sshd: dict[str, Any], tmp_path: Path) -> Hosts:
    return Hosts(sshd, tmp_path)


def await_listener(port: int) -> None:
    """Wait until something listens on a port."""
    deadline = time.monotonic() + 60
    while True:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def sshd(tmp_path: Path, free_port: int) -> Iterator[dict[str, Any]]:
    """Start a real sshd on loopback, and return the options of the pool."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd and ssh (openssh-server, openssh-client)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    place = tmp_path / "ssh"
    place.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)], check=True
        )
    (place / "keys").write_text((place / "user.pub").read_text())
    port = free_port
    (place / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {place}/host\nPidFile none\n"
        f"AuthorizedKeysFile {place}/keys\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin yes\n"
    )
    process = subprocess.Popen(
        [program, "-D", "-e", "-f", str(place / "config")], stderr=subprocess.DEVNULL
    )
    await_listener(port)
    key = (place / "host.pub").read_text().split()
    (place / "known").write_text(f"[127.0.0.1]:{port} {key[0]} {key[1]}\n")
    options = [
        "-F", "none", "-p", str(port), "-i", str(place / "user"),
        "-o", f"UserKnownHostsFile={place}/known",
    ]  # fmt: skip
    yield {"hosts": [f"{getpass.getuser()}@127.0.0.1"], "ssh_options": options}
    process.terminate()
    process.wait(60)


class TestSsh(StarterContract):
    pass


def test_a_host_that_refuses_is_told_in_the_log(
    sshd: dict[str, Any], make_pool: Callable[..., Pool]
) -> None:
    sshd["ssh_options"] += ["-o", "PreferredAuthentications=none"]
    pool = make_pool({"starter": "ssh", "options": sshd}, {})
    with pool.client() as client:
        pool.create(client)
        pool.wait(lambda: "Pool far: Host " in pool.log() and "`ssh` failed" in pool.log())
