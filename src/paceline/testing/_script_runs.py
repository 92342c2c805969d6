"""Runs of scripts under test: start, end, and the values that they log."""

import csv
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from paceline import faults
from paceline._base.process_and_network import num_cores
from paceline._base.run_directory import Control, RunDirectory
from paceline._training.workers.processes.rank_environment import THREADS_MARK, THREADS_VARIABLE
from paceline._training.workers.processes.template_client import TemplateError
from paceline._training.workers.processes.templates import template_of_scripts
from paceline._training.workers.processes.worker_process import WorkerSpec
from paceline.testing._compare_runs import UnreadableFileError, difference_kind, find_run, read_file

logger = logging.getLogger(__name__)


# Variables of the verifying process: the script must not inherit them.
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
    """Command, directory and environment to start a script.

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
        # Fixed number of threads: with another number, sums may have other bits.
        threads = str(max(1, num_cores() // self.num_workers))
        if THREADS_VARIABLE not in variables:
            variables |= {THREADS_VARIABLE: threads, THREADS_MARK: threads}
        # As for trials, so that workers too can be forks of a process that has loaded torch.
        variables.setdefault("PYTHONUNBUFFERED", "1")
        return variables | dict(self.environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnd:
    """End of a script's start: exit code, output and notes of faults.

    Attributes:
        code: The exit code; None if it took too long and was ended.
        output: The file with its output.
        notes: Its processes' notes on faults, in order.
    """

    code: int | None
    output: Path
    notes: list[dict[str, Any]]

    def tail(self) -> str:
        """Return the last lines of the output."""
        lines = self.output.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    @property
    def hits(self) -> list[dict[str, Any]]:
        """Notes of the faults with an effect."""
        return [note for note in self.notes if note["event"] == "fault"]


def prepare_script_directory(script: Script, directory: Path) -> None:
    """Make a run's directory, with links to the files the script may read by relative paths."""
    directory.mkdir(parents=True)
    for entry in script.links.iterdir() if script.links is not None else ():
        # A link to a directory above this one would contain itself.
        if entry.name != "paceline_runs" and entry.absolute() not in directory.absolute().parents:
            (directory / entry.name).symlink_to(entry.absolute())


def start_script(
    script: Script,
    directory: Path,
    label: str,
    *,
    fault: str | None = None,
    resume: Path | None = None,
    kill_when: Callable[[], bool] | None = None,
) -> ScriptEnd:
    """Run the script in `directory` to its end.

    Args:
        script: The script to run.
        directory: Where; made by `prepare_script_directory`.
        label: Part of the names of this start's files.
        fault: The content of `PACELINE_FAULT`.
        resume: The run directory to resume.
        kill_when: Called again and again; if true, all processes of the script are killed.
    """
    output, log = directory / f"{label}.log", directory / f"{label}.faults"
    variables = script.variables() | {faults.FAULT_LOG_VARIABLE: str(log.absolute())}
    if fault is not None:
        variables[faults.FAULT_VARIABLE] = fault
    if resume is not None:
        variables["PACELINE_RESUME"] = str(resume)
    spec = WorkerSpec(command=script.words(), environment=variables, working_directory=directory)
    with output.open("wb") as file, ThreadPoolExecutor(1) as waiter:
        pid, wait, reap = _start_process(spec, file)
        end = waiter.submit(wait)
        try:
            code = _wait_for_script(end, script.timeout_s, directory, log, kill_when)
        finally:
            _kill_processes(pid)
            end.result()
            reap()
    return ScriptEnd(code=code, output=output, notes=list(_read_notes(log)))


def _start_process(
    spec: WorkerSpec, file: IO[bytes]
) -> tuple[int, Callable[[], int], Callable[[], object]]:
    """Start a script in a session of its own; return its id, and functions to wait and to reap.

    The script is a fork of a process that has loaded torch, unless it would see a difference.
    """
    try:
        template = template_of_scripts(spec.environment)
        if template.difference(spec, spec.environment) is None:
            forked = template.start_script(spec, file.fileno())
            return forked.pid, lambda: _exit_code(*forked.await_end()), forked.reap
    except TemplateError as error:
        logger.debug("The script starts as a new interpreter: %s.", error)
    process = subprocess.Popen(
        spec.command,
        cwd=spec.working_directory,
        env=spec.environment,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        # The end of its whole process group must not hit this process.
        start_new_session=True,
    )
    return process.pid, process.wait, process.wait


def _exit_code(code: int, signum: int | None) -> int:
    return code if signum is None else -signum


def _wait_for_script(
    end: Future[int],
    timeout_s: float,
    directory: Path,
    log: Path,
    kill_when: Callable[[], bool] | None,
) -> int | None:
    """Wait for the end; processes stopped by a fault get a pause request and are continued."""
    deadline = time.monotonic() + timeout_s
    continued: set[int] = set()
    while not end.done() and time.monotonic() < deadline:
        stopping = {note["pid"] for note in _read_notes(log) if note["signal"] == "STOP"}
        continued |= {pid for pid in stopping - continued if _pause_script(pid, directory)}
        if kill_when is not None and kill_when():
            return None
        time.sleep(_POLL_S)
    return end.result() if end.done() else None


def _pause_script(pid: int, directory: Path) -> bool:
    """Request a pause of a stopped process and continue the process; return whether stopped."""
    path = find_run(directory)
    # The process may end meanwhile.
    with suppress(psutil.NoSuchProcess):
        if path is None or psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            return False
        # Before it continues, so that it meets the request at once.
        RunDirectory(path).write_control(Control(should_preempt=True))
        os.kill(pid, signal.SIGCONT)
    return True


def _kill_processes(pid: int) -> None:
    """Kill the remaining processes: all after a timeout, else loader processes left behind."""
    with suppress(psutil.NoSuchProcess):
        # Descendants one by one: `killpg` misses those in a process group of their own.
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _read_notes(log: Path) -> Iterator[dict[str, Any]]:
    if log.exists():
        # A line that crosses a page of the file can be seen in part while it is written.
        whole, _, _ = log.read_bytes().rpartition(b"\n")
        for line in whole.splitlines():
            yield json.loads(line)


def num_threads(notes: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return each rank's last noted number of threads."""
    return {note["rank"]: note["threads"] for note in notes if note["threads"] is not None}


STEP_KEYS = ("global_step", "step", "steps_completed", "iteration", "iter", "epoch")
_LOGGED = r"(?P<name>[\w/.]*(?:loss|lr|learning_rate|grad_norm|perplexity))['\"]?\s*[:= ]\s*['\"]?"
_LOGGED_VALUE = re.compile(_LOGGED + r"(?P<value>-?\d[\d.]*(?:e[+-]?\d+)?|nan|inf)", re.IGNORECASE)
_LOGGED_STEP = re.compile(r"\b(?:global_)?(?:step|iter|iteration)['\"]?\s*[:= ]\s*(\d+)")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_LARGEST_LOG = 100_000_000

Stamps = dict[str, tuple[int, int]]
Rows = dict[int, dict[str, Any]]


def read_logs(root: Path, files: Stamps, output: Path) -> Rows:
    """Return logged values without timings by step and `file:name`; later files count."""
    rows: Rows = {}
    for path in sorted(files, key=lambda one: files[one][1]):
        if files[path][0] < _LARGEST_LOG:
            # A log may be cut within a line, or be of another kind.
            with suppress(OSError, ValueError, csv.Error):
                _take_rows(rows, Path(path).name, _log_rows(root / path))
    _take_rows(rows, "output", _output_rows(output))
    return rows


def _log_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.name == "trainer_state.json":
        yield from json.loads(path.read_bytes())["log_history"]
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            yield from csv.DictReader(file)
    elif path.suffix == ".jsonl":
        for line in path.read_bytes().splitlines():
            yield json.loads(line)


def _output_rows(output: Path) -> Iterator[Mapping[str, Any]]:
    for line in re.split(r"[\r\n]", _ESCAPES.sub("", output.read_text(errors="replace"))):
        step = _LOGGED_STEP.search(line)
        if step is not None:
            found = {one["name"]: one["value"] for one in _LOGGED_VALUE.finditer(line)}
            yield {**found, "step": step[1]}


def _take_rows(rows: Rows, source: str, found: Iterable[Any]) -> None:
    for row in found:
        step = next((row[key] for key in STEP_KEYS if row.get(key) not in (None, "")), None)
        if step is None or not str(step).isdigit():
            continue
        for name, value in row.items():
            number = _number(value)
            is_timing = difference_kind(str(name)) == "timing"
            if number is not None and name not in STEP_KEYS and not is_timing:
                rows.setdefault(int(step), {})[f"{source}:{name}"] = number


def _number(value: Any) -> float | None:
    with suppress(TypeError, ValueError):
        return float(value)
    return None


def loss_distance(left: Rows, right: Rows) -> float | None:
    """Return the largest relative distance of two runs' logged losses; None without losses."""
    distances = [0.0] if any("loss" in name for row in left.values() for name in row) else []
    for step in left.keys() & right.keys():
        for name in left[step].keys() & right[step].keys():
            a, b = left[step][name], right[step][name]
            if "loss" in name and not (a == b or (math.isnan(a) and math.isnan(b))):
                distance = abs(a - b) / max(abs(a), abs(b))
                distances.append(math.inf if math.isnan(distance) else distance)
    return max(distances, default=None)


def file_stamps(root: Path) -> Stamps:
    """Return size and time of change of a directory's files, without links and hidden ones."""
    stamps: Stamps = {}
    for parent, directories, names in os.walk(root):
        directories[:] = [name for name in directories if not name.startswith(".")]
        for name in names:
            path = os.path.join(parent, name)
            with suppress(OSError):
                if not os.path.islink(path):
                    status = os.stat(path)
                    stamp = (status.st_size, status.st_mtime_ns)
                    stamps[os.path.relpath(path, root)] = stamp
    return stamps


_STEP = re.compile(r"(?:step|checkpoint|iter|iteration)[-_=]?(\d+)")


def checkpoint_step(checkpoint: str, content: Any = None) -> int | None:
    """Return a checkpoint's step by its name or its content; None if neither tells."""
    found = _STEP.findall(checkpoint)
    if found:
        return int(found[-1])
    if isinstance(content, Mapping):
        for key in STEP_KEYS:
            if type(content.get(key)) is int:
                return int(content[key])
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """Run at its end: its files, its complete checkpoints, its logged values."""

    path: Path
    checkpoints: Mapping[str, Stamps]
    rows: Rows
    has_steps: bool = True
    problem: str = ""

    def files(self, checkpoint: str) -> dict[str, Path]:
        """Return the files of a checkpoint by their names in the checkpoint."""
        names = self.checkpoints[checkpoint]
        return {
            name.removeprefix(checkpoint).lstrip("/") or Path(name).name: self.path / name
            for name in names
        }

    def step(self, checkpoint: str, *, unpickle: bool) -> int | None:
        """Return the step of a checkpoint, by its name or its content."""
        content, files = None, self.files(checkpoint)
        if not self.has_steps:
            return None
        if checkpoint_step(checkpoint) is None and len(files) == 1:
            with suppress(UnreadableFileError):
                content = read_file(next(iter(files.values())), unpickle=unpickle)
        return checkpoint_step(checkpoint, content)
