"""Nodes as processes of their own: started, killed and started again."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from fault_lab.machines import Machine
from fault_lab.processes import end_all
from paceline._cluster.runner.attempt_directory import AttemptDirectory


def can_mount() -> bool:
    """Tell whether nodes can have disks of their own here."""
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


class NodeProcess:
    """`paceline runner` on a directory of its own, as a user starts it.

    It finds an empty disk of its own at the paths of `hidden`. It runs on `machine` if given.
    """

    def __init__(
        self,
        master: Any,
        token: Path,
        directory: Path,
        *options: str,
        hidden: Sequence[Path] = (),
        machine: Machine | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.master = master
        self.token = token
        self.directory = directory
        self.options = options
        self.hidden = hidden
        self.machine = machine
        self.log_path = log_path or directory.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Its name among the nodes."""
        return self.directory.name

    def start(self, **variables: str) -> "NodeProcess":
        """Start it, with more variables of the environment."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        environment |= {"PACELINE_TOKEN": "secret-of-the-user", "GATE": str(self.gate)}
        environment |= variables
        command = [sys.executable, "-m", "paceline.cli", "runner", "--name", self.name]
        command += ["--master", self.master.client().url, "--token-file", str(self.token)]
        # Checks of the machine are for tests about them: each imports torch.
        command += ["--dir", str(self.directory), "--check-every", "0", *self.options]
        if self.hidden:
            mounts = " && ".join(f"mount -t tmpfs tmpfs {path}" for path in self.hidden)
            command = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", *command]
        if self.machine is not None:
            command = self.machine.command(*command)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        return self

    @property
    def gate(self) -> Path:
        """A file that scripts on it can wait for."""
        return self.token.with_name("gate")

    def runner(self, attempt_id: int) -> psutil.Process:
        """Return the runner of an attempt that runs here."""
        directory = AttemptDirectory(self.directory / "attempts" / str(attempt_id))
        deadline = time.monotonic() + 60
        # It may not have its lock yet, or not have written its id.
        while not (pid := directory.runner_pid()):
            assert time.monotonic() < deadline, self.log_path.read_text()
            time.sleep(0.02)
        return psutil.Process(pid)

    def training(self) -> list[psutil.Process]:
        """Return the processes that attempts on the node have started."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("PACELINE_RUN_DIR", "").startswith(str(self.directory)):
                    found.append(process)
        return found

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the node."""
        found = []
        for process in psutil.process_iter():
            try:
                # Runners of attempts are forks, which show by where they work alone.
                words = [*process.cmdline(), process.environ().get("PACELINE_RUN_DIR", "")]
                words.append(process.cwd())
            except psutil.Error:
                continue
            if any(word.startswith(str(self.directory)) for word in words):
                found.append(process)
        return found

    def log_end(self) -> str:
        """Return the last words of its runner."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return text[-500:]

    def close(self) -> None:
        """Kill all of it at once, until nothing is left."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        end_all(self.processes)
