"""What each fault of one rank looks like to the user, for each way to start workers.

Every cell is a real signal or call in a real group of three. A dozen of them run with the other
tests, all of them by `make fault-matrix`, which also writes them as a table.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.core import RunState, list_runs

_WORK = Path(__file__).with_name("fault_work.py")
# Longer than the 10 s for which a rank 0 that leaves waits for the others.
_LAUNCHER = [
    "-m", "paceline.launch.torch_distributed", "--nproc-per-node=3",
    "--heartbeat-timeout-s=10", "--collective-timeout-s=20",
]  # fmt: skip
_COMMANDS = {
    "train": ["fault_work.py", "train_function"],
    "creators": ["fault_work.py", "creators"],
    "pytorch.launch": ["fault_work.py", "launch"],
    "launcher": [*_LAUNCHER, "fault_work.py", "program"],
    "Ray pool": ["fault_work.py", "ray_pool"],
}
_DOORS = [*_COMMANDS, "trial"]
# Those in which `fit` watches for signals, and stores a checkpoint for one.
_FITTING = ("pytorch.launch", "launcher", "trial")
# Nothing may take longer; a limit for a busy machine, not what is expected.
_HANGS_S = 240.0
_ORPHANS_S = 20.0

# What the message about the first cause has, with the rank in the place of R.
_FAULTS = {
    "raise": r"(?s)R (raised|exited with code 1).*?ValueError: boom",
    "InvalidHP": r"(?s)R (raised|refused the hyperparameters).*?InvalidHP: boom",
    "sys.exit(0)": r"R left by `sys.exit\(0\)`|R has (returned|ended) without",
    "sys.exit(3)": r"R left by `sys.exit\(3\)`|R (exited with|ended with|failed with) .*code 3",
    "os._exit(7)": r"R (exited|ended) with (exit )?code 7",
    "SIGKILL": r"R was ended by SIGKILL",
    "SIGSTOP": r"R is stopped \(SIGSTOP\)",
    "SIGTERM": r"R was ended by SIGTERM",
    "SIGUSR1": r"R was ended by SIGUSR1",
    "segfault": r"R was ended by SIGSEGV",
    "other collective": r"(?s)waits? in .*(must be the same|has not come|have not come)",
    "held GIL": r"R hangs",
    "sleep": r"R has not come",
    "memory limit": r"(?s)R (raised|exited with code 1).*?can't allocate memory",
}
_IN_EVERY_RUN = [
    ("raise", 0, "creators"), ("InvalidHP", 2, "trial"), ("sys.exit(3)", 2, "launcher"),
    ("SIGKILL", 2, "pytorch.launch"), ("SIGSTOP", 2, "launcher"), ("SIGTERM", 2, "launcher"),
    ("segfault", 2, "creators"), ("other collective", 2, "pytorch.launch"),
    ("held GIL", 0, "train"), ("sleep", 2, "launcher"),
]  # fmt: skip
_CELLS = [
    pytest.param(
        fault, rank, door, marks=[] if (fault, rank, door) in _IN_EVERY_RUN else pytest.mark.slow
    )
    for door in _DOORS
    for fault in _FAULTS
    for rank in (0, 2)
]


@dataclass(kw_only=True)
class Seen:
    """What the user has seen: everything printed, the exit code, and the state of the run."""

    output: str
    code: int
    run: RunState | None


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, master_class: Any) -> Iterator[Any]:
    """Return a client of a master with three slots, which all cells share."""
    master = master_class(tmp_path_factory.mktemp("shared") / "home", 3).start()
    yield master.client()
    master.close()


@pytest.mark.long
@pytest.mark.parametrize(("fault", "rank", "door"), _CELLS)
def test_a_fault_of_one_rank(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    clean_environment: dict[str, str],
    fault: str,
    rank: int,
    door: str,
) -> None:
    variables = {
        "FAULT": fault,
        "FAULT_RANK": str(rank),
        "STRUCK": str(tmp_path / "struck"),
        "OMP_NUM_THREADS": "1",
    }
    (tmp_path / "fault_work.py").write_bytes(_WORK.read_bytes())
    if door == "trial":
        seen = _run_trial(request.getfixturevalue("client"), tmp_path, variables)
    else:
        torch_ranks = request.getfixturevalue("torch_ranks")
        seen = _run_program(torch_ranks, _COMMANDS[door], tmp_path, clean_environment | variables)
    seconds = time.time() - float((tmp_path / "struck").read_text())
    orphans = _orphans(variables["STRUCK"])
    assert not orphans, orphans
    told = _check(fault, rank, door, seen)
    if cells := os.environ.get("PACELINE_FAULT_CELLS"):
        with open(cells, "a") as file:
            file.write(json.dumps([fault, rank, door, seconds, seen.code, told]) + "\n")


def _check(fault: str, rank: int, door: str, seen: Seen) -> str:
    """Check what the user has seen, and return the line that names the cause."""
    if fault in ("SIGTERM", "SIGUSR1") and door in _FITTING:
        assert seen.code == 0, seen.output
        assert seen.run in (None, RunState.PREEMPTED)
        return "a checkpoint is stored and the run is preempted"
    pattern = re.sub(r"\bR\b", rf"[Rr]ank {rank}", _FAULTS[fault])
    found = re.search(pattern, seen.output)
    assert found, seen.output
    others = "|".join(str(other) for other in range(3) if other != rank)
    assert not re.search(rf"[Rr]ank ({others})\b.*the first of 3 to fail", seen.output), seen.output
    # The program ends well, but an experiment without any other trial has failed.
    is_refused_by_program = fault == "InvalidHP" and door in _FITTING and door != "trial"
    assert (seen.code == 0) == is_refused_by_program, seen.output
    if fault == "InvalidHP" and seen.run is not None:
        assert seen.run is RunState.INVALID_HP
    start = seen.output.rfind("\n", 0, found.start()) + 1
    lines = seen.output[start : found.end()].splitlines()
    return " ".join(dict.fromkeys([lines[0], lines[-1].strip()]))


def _run_program(
    torch_ranks: Any, arguments: list[str], directory: Path, environment: dict[str, str]
) -> Seen:
    """Run a launcher as an interpreter of its own, and a script forked with torch loaded."""
    process: Any
    if arguments[0] == "-m":
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    else:
        process = torch_ranks.start(
            str(directory / arguments[0]), *arguments[1:], directory=directory,
            environment=environment, has_session=True, is_one_stream=True,
        )  # fmt: skip
    limit = threading.Timer(_HANGS_S, os.killpg, [process.pid, signal.SIGKILL])
    limit.start()
    output, _ = process.communicate(timeout=2 * _HANGS_S)
    limit.cancel()
    limit.join()
    process.kill()
    assert process.returncode != -signal.SIGKILL, f"It hangs:\n{output}"
    (run,) = list_runs(directory / "paceline_runs") or [None]
    return Seen(output=output, code=process.returncode, run=run and run.state)


def _run_trial(client: Any, directory: Path, variables: dict[str, str]) -> Seen:
    config = {
        "name": "fault",
        "entrypoint": " ".join(["python3", *_LAUNCHER, "fault_work.py", "program"]),
        "searcher": {"name": "single", "metric": "loss"},
        "resources": {"slots_per_trial": 3},
        "hyperparameters": {"global_batch_size": 3},
        "environment": {"variables": variables},
        "max_restarts": 0,
    }
    context = directory / "context"
    context.mkdir()
    (context / "fault_work.py").write_bytes(_WORK.read_bytes())
    experiment = client.create_experiment(config, context)
    deadline = time.monotonic() + _HANGS_S
    while not experiment.reload().state.is_terminal:
        if any(len(trial.reload().data.attempts) > 1 for trial in experiment.trials()):
            # It was preempted, and goes on.
            experiment.kill()
        assert time.monotonic() < deadline, [line.text for line in experiment.iter_logs()]
        time.sleep(0.2)
    output = "\n".join(line.text for line in experiment.iter_logs())
    return Seen(output=output, code=int(experiment.state.value == "ERROR"), run=None)


def _orphans(mark: str) -> list[str]:
    """Return the processes of a cell that live on, after some time to end."""
    deadline = time.monotonic() + _ORPHANS_S
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                is_marked = process.environ().get("STRUCK") == mark
                if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
