"""Script runs with faults: kinds and points of interruptions, start, and end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from paceline import faults
from paceline._base.process_and_network import num_cores
from paceline._base.run_directory import Control, RunDirectory
from paceline._training.workers.processes.rank_environment import THREADS_VARIABLE
from paceline.testing._compare_runs import FaultMissedError, RunFacts, find_run

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
        threads = max(1, num_cores() // self.num_workers)
        variables.setdefault(THREADS_VARIABLE, str(threads))
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
    with output.open("wb") as file:
        process = subprocess.Popen(
            script.words(),
            cwd=directory,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # The end of its whole process group must not hit this process.
            start_new_session=True,
        )
        try:
            code = _wait_for_script(process, script.timeout_s, directory, log, kill_when)
        finally:
            _end_script(process)
    return ScriptEnd(code=code, output=output, notes=list(_read_notes(log)))


def _wait_for_script(
    process: "subprocess.Popen[bytes]",
    timeout_s: float,
    directory: Path,
    log: Path,
    kill_when: Callable[[], bool] | None,
) -> int | None:
    """Wait for the end; processes stopped by a fault get a pause request and are continued."""
    deadline = time.monotonic() + timeout_s
    continued: set[int] = set()
    while (code := process.poll()) is None and time.monotonic() < deadline:
        stopping = {note["pid"] for note in _read_notes(log) if note["signal"] == "STOP"}
        continued |= {pid for pid in stopping - continued if _pause_script(pid, directory)}
        if kill_when is not None and kill_when():
            return None
        time.sleep(_POLL_S)
    return code


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


def _end_script(process: "subprocess.Popen[bytes]") -> None:
    """Kill the remaining processes: all after a timeout, else loader processes left behind."""
    with suppress(psutil.NoSuchProcess):
        # Descendants one by one: `killpg` misses those in a process group of their own.
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
    """Return each rank's last noted number of threads."""
    return {note["rank"]: note["threads"] for note in notes if note["threads"] is not None}


FaultKind = Literal["kill", "preempt", "pause"]

# A kill right behind a checkpoint would show little: lost steps must be trained again.
MIN_REPLAYED_STEPS = 3

_SIGNALS = {"kill": "KILL", "preempt": "TERM", "pause": "STOP"}
_BATCH, _REPORT = "engine.batch", "core.report"
# Time before a kill: enough for a checkpoint being stored in the background.
_BEFORE_KILL_S = 0.5
_GOOD_PART = 0.6


@dataclass(frozen=True, slots=True)
class Fault:
    """Interruption of a run, at a step or at a fault point.

    A step is a batch where Paceline trains, and for a script with its own loop one
    report of `steps_completed`. Without a step and a point a step is chosen that lies about 60 %
    into the run, for a kill at least three steps after a checkpoint.

    Attributes:
        kind: "kill" (SIGKILL), "preempt" (SIGTERM) or "pause" (the word of a master's runner).
        step: Interrupt when so many steps are completed.
        point: Interrupt at this point of `paceline.faults` instead.
        count: Interrupt when the point is reached for the `count`-th time.
        rank: The rank that it hits. By default a kill hits the last one, SIGTERM all of them; a
            pause is always the chief's.

    Raises:
        ValueError: A value is not allowed, or both `step` and `point` are given.
    """

    kind: FaultKind
    step: int | None = None
    point: str | None = None
    count: int = 1
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(
                f"`kind` must be one of {', '.join(get_args(FaultKind))}, but got {self.kind!r}."
            )
        if self.step is not None and self.point is not None:
            raise ValueError(
                "A fault must come at a step or at a point, but got"
                f" step={self.step} and point={self.point!r}."
            )
        for name, value, least in (("step", self.step, 0), ("count", self.count, 1)):
            if value is not None and value < least:
                raise ValueError(f"`{name}` must be at least {least}, but got {value}.")
        if self.kind == "pause" and self.rank:
            raise ValueError(f"A pause must be the chief's, but got rank={self.rank}.")

    def __str__(self) -> str:
        if self.point is not None:
            times = f":{self.count}" if self.count > 1 else ""
            return f"{self.kind} at {self.point}{times}"
        return f"{self.kind} at {'a step of choice' if self.step is None else f'step {self.step}'}"


def fault_variable(fault: Fault, straight: RunFacts, num_workers: int) -> str:
    """Return the value of `PACELINE_FAULT` for a fault.

    Raises:
        FaultMissedError: The straight run does not get there.
    """
    if fault.point is not None:
        return _fault_variable(fault, fault.point, fault.count, num_workers)
    step = _chosen_step(fault, straight) if fault.step is None else fault.step
    if step >= straight.steps_completed:
        raise FaultMissedError(
            f"The fault must come before the script ends, but step {step} is not below its"
            f" {straight.steps_completed} steps."
        )
    if _BATCH in straight.points:
        return _fault_variable(fault, _BATCH, step + 1, num_workers)
    count = next(
        (number for number, done in enumerate(straight.reported_steps, 1) if done >= step), None
    )
    if count is None:
        raise FaultMissedError(
            "A script with a loop of its own is interrupted at one of its reports, but none comes"
            f" at step {step} or later. Hint: report metrics at every step or every few."
        )
    return _fault_variable(fault, _REPORT, count, num_workers)


def _fault_variable(fault: Fault, point: str, count: int, num_workers: int) -> str:
    rank = fault.rank
    if rank is None and fault.kind == "kill" and point.startswith("engine."):
        rank = num_workers - 1
    if fault.kind == "pause":
        rank = 0
    text = f"{point}:{count},signal={_SIGNALS[fault.kind]}"
    if rank is not None:
        text += f",rank={rank}"
    if fault.kind == "kill" and fault.point is None:
        text += f",after={_BEFORE_KILL_S}"
    return text


def _chosen_step(fault: Fault, straight: RunFacts) -> int:
    """Return a step about 60 % into the run, with a meaningful result of a fault there."""
    wanted = max(1, round(straight.steps_completed * _GOOD_PART))
    if fault.kind != "kill":
        return min(wanted, straight.steps_completed - 1)
    stops = _possible_stops(straight)
    replayed = {stop: stop - _last(straight.checkpoint_steps, stop) for stop in stops}
    # The first checkpoint may still be in the making when the second one begins.
    first = straight.checkpoint_steps[min(1, len(straight.checkpoint_steps) - 1)]
    good = [stop for stop in stops if replayed[stop] >= MIN_REPLAYED_STEPS]
    for choice in ([stop for stop in good if stop > first], good):
        if choice:
            return min(choice, key=lambda stop: abs(stop - wanted))
    # Checkpoints are that close to each other: the best there is.
    return max(stops, key=lambda stop: (replayed[stop], -abs(stop - wanted)), default=wanted)


def _possible_stops(straight: RunFacts) -> Collection[int]:
    """Return the steps open to a fault, from the first checkpoint on."""
    end, first = straight.steps_completed, straight.checkpoint_steps[0]
    stops: Sequence[int] = (
        range(end) if _BATCH in straight.points else sorted(set(straight.reported_steps))
    )
    return [stop for stop in stops if first <= stop < end]


def _last(steps: Sequence[int], before: int) -> int:
    return max(step for step in steps if step <= before)
