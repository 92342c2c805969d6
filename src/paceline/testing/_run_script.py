"""Starting a script as a user does, with a fault in its environment, and seeing it end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline import faults
from paceline.journal import Control, RunDirectory
from paceline.testing._run_results import find_run
from paceline.workers import THREADS_VARIABLE, num_cores

# What belongs to the process that verifies, and not to the script.
_REMOVED = (
    "PACELINE_RUN_DIR",
    "PACELINE_RESUME",
    faults.FAULT_VARIABLE,
    faults.FAULT_LOG_VARIABLE,
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_POLL_S = 0.02
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Command, directory and environment that start a script.

    Attributes:
        command: A script and its arguments, or a whole command line.
        num_workers: How many workers Paceline's launcher starts; one runs without it.
        environment: Variables on top of this process's.
        links: A directory whose entries each run finds in its own directory; None for none.
        timeout_s: How long one start may take, in seconds.
    """

    command: tuple[str, ...]
    num_workers: int
    environment: Mapping[str, str]
    links: Path | None
    timeout_s: float

    def words(self) -> list[str]:
        """Return the command line."""
        first, *rest = self.command
        if Path(first).is_file() and first.endswith(".py"):
            first = str(Path(first).absolute())
        if self.num_workers > 1:
            launcher = [sys.executable, "-m", "paceline.launch.torch_distributed"]
            return [*launcher, "--nproc-per-node", str(self.num_workers), "--", first, *rest]
        is_python = first.endswith(".py") or first == "-m"
        return [*([sys.executable] if is_python else []), first, *rest]

    def variables(self) -> dict[str, str]:
        """Return the environment of every start."""
        variables = {name: value for name, value in os.environ.items() if name not in _REMOVED}
        threads = max(1, num_cores() // self.num_workers)
        variables.setdefault(THREADS_VARIABLE, str(threads))
        return variables | dict(self.environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnd:
    """End of one start.

    Attributes:
        code: The exit code; None if it took too long and was ended.
        output: The file with what it wrote.
        notes: What its processes noted of faults, in order.
    """

    code: int | None
    output: Path
    notes: list[dict[str, Any]]

    def tail(self) -> str:
        """Return the last lines that it wrote."""
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    @property
    def hits(self) -> list[dict[str, Any]]:
        """The notes of faults that hit."""
        return [note for note in self.notes if note["event"] == "fault"]


def prepare_script_directory(script: Script, directory: Path) -> None:
    """Make a run's directory, with links to what the script may read by relative paths."""
    directory.mkdir(parents=True)
    for entry in script.links.iterdir() if script.links is not None else ():
        if entry.name != "paceline_runs" and entry.absolute() not in directory.absolute().parents:
            (directory / entry.name).symlink_to(entry.absolute())


def start_script(
    script: Script,
    directory: Path,
    label: str,
    *,
    fault: str | None = None,
    resume: Path | None = None,
) -> ScriptEnd:
    """Run the script in `directory` to its end.

    Args:
        script: What to run.
        directory: Where; made by `prepare_script_directory`.
        label: Names the files that tell of this start.
        fault: The content of `PACELINE_FAULT`.
        resume: The run directory to go on in.
    """
    output, log = directory / f"{label}.log", directory / f"{label}.faults"
    variables = script.variables() | {faults.FAULT_LOG_VARIABLE: str(log.absolute())}
    if fault is not None:
        variables[faults.FAULT_VARIABLE] = fault
    if resume is not None:
        variables["PACELINE_RESUME"] = str(resume)
    with output.open("wb") as file:
        process = subprocess.Popen(
            script.words(),
            cwd=directory,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _wait_for_script(process, script.timeout_s, directory, log)
        finally:
            _end_script(process)
    return ScriptEnd(code=code, output=output, notes=list(_read_notes(log)))


def _wait_for_script(
    process: "subprocess.Popen[bytes]", timeout_s: float, directory: Path, log: Path
) -> int | None:
    """Wait for the end; what stops itself at a fault is told to pause, and continued."""
    deadline = time.monotonic() + timeout_s
    continued: set[int] = set()
    while (code := process.poll()) is None and time.monotonic() < deadline:
        stopping = {note["pid"] for note in _read_notes(log) if note["signal"] == "STOP"}
        continued |= {pid for pid in stopping - continued if _pause_script(pid, directory)}
        time.sleep(_POLL_S)
    return code


def _pause_script(pid: int, directory: Path) -> bool:
    """Say what a runner says for a pause, once the process has stopped; tell whether it has."""
    path = find_run(directory)
    with suppress(psutil.NoSuchProcess):
        if path is None or psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            return False
        RunDirectory(path).write_control(Control(should_preempt=True))
        os.kill(pid, signal.SIGCONT)
    return True


def _end_script(process: "subprocess.Popen[bytes]") -> None:
    """End what is left: after a timeout everything, else loader processes without their parent."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_notes(log: Path) -> Iterator[dict[str, Any]]:
    if log.exists():
        # A line that crosses a page of the file can be seen in part while it is written.
        whole, _, _ = log.read_bytes().rpartition(b"\n")
        for line in whole.splitlines():
            yield json.loads(line)


def num_threads(notes: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return each rank's number of threads, as it was last noted."""
    return {note["rank"]: note["threads"] for note in notes if note["threads"] is not None}
