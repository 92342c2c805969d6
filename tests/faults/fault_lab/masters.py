"""A master as a process of its own: started, killed and started again."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fault_lab.processes import end_all
from paceline.client import Client

_START_S = 120.0
# What an interpreter reads when it starts, and what others read from `/proc` to find it: that shows
# the environment that a process was started with, which is the server's for a forked one.
_OF_INTERPRETERS = ("PYTHONPATH", "LD_PRELOAD", "FAULT_LAB")


class MasterProcess:
    """A master on a home of its own, as a user starts it.

    Args:
        home: Its home.
        num_slots: How many slots it has.
        options: Further ones of `paceline up`.
        server: A process to fork it from, so that it takes less time to start; by default it is
            an interpreter of its own.
    """

    def __init__(self, home: Path, num_slots: int, *options: str, server: Any = None) -> None:
        self._server = server
        self.home = home
        self.num_slots = num_slots
        self.options = options
        self._process: Any = None
        self._clients: dict[tuple[str, str], Client] = {}

    def start(self, fault: str | None = None, **variables: str) -> "MasterProcess":
        """Start and wait until it answers, or has died at its fault point."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        environment |= variables
        if fault is not None:
            environment["PACELINE_FAULT"] = fault
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "master.json").unlink(missing_ok=True)
        command = ["-m", "paceline.cli", "up", "--port", "0"]
        command += ["--slots", str(self.num_slots), "--home", str(self.home), *self.options]
        with (self.home / "master.log").open("ab") as log:
            if self._server is not None and all(
                environment.get(name) == self._server.environment.get(name)
                for name in _OF_INTERPRETERS
            ):
                self._process = self._server.start_daemon(
                    *command, output=log, environment=environment
                )
            else:
                self._process = subprocess.Popen(
                    [sys.executable, *command],
                    stdout=log, stderr=log, env=environment, start_new_session=True,
                )  # fmt: skip
        deadline = time.monotonic() + _START_S
        while not (self.home / "master.json").exists() and self.is_alive:
            assert time.monotonic() < deadline, (self.home / "master.log").read_text()
            time.sleep(0.02)
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill it with SIGKILL; its runners go on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float) -> int:
        """Wait for its end and return the exit code."""
        assert self._process is not None
        code: int = self._process.wait(timeout_s)
        return code

    def send(self, signum: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(signum)

    def client(self) -> Client:
        """Return a client of the master that runs now, the same one each time."""
        address = json.loads((self.home / "master.json").read_text())
        key = address["url"], (self.home / "token").read_text().strip()
        if key not in self._clients:
            self._clients[key] = Client(*key)
        return self._clients[key]

    def log(self) -> str:
        """Return what the master printed."""
        return (self.home / "master.log").read_text()

    def processes(self) -> list[psutil.Process]:
        """Return every process that works for this home: the master's, runners, trials."""
        found = []
        with suppress(psutil.NoSuchProcess):
            if self.is_alive:
                found.append(psutil.Process(self._process.pid))
        for process in psutil.process_iter():
            if process in found:
                continue
            try:
                words = [*process.cmdline(), process.environ().get("PACELINE_RUN_DIR", "")]
                # Runners are forks, which show by where they work alone, as what forks them does.
                if process.name().startswith("runner-"):
                    words.append(process.cwd())
            except psutil.Error:
                continue
            if any(word.startswith(str(self.home)) for word in words):
                found.append(process)
        return found

    def close(self) -> None:
        """Stop everything that belongs to the home."""
        for client in self._clients.values():
            client.close()
        if self.is_alive:
            self.kill()
        end_all(self.processes)
