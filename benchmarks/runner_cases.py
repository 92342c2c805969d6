"""Trials by runners that came to the master: how many a second, beside its own slots, and lost."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_cases import Call, start_master, upload_code
from figures import Figure

_NUM_ATTEMPTS = 64
_NUM_SLOTS = 8
_NUM_TRIALS, _NUM_LOCAL_SLOTS = 16, 2
_LAUNCH_ROUNDS, _TRIAL_ROUNDS = 3, 9
# Without Python of its own, so that what is measured is ours.
_NOTHING = "true"
_REPORTS = """
from paceline import core

with core.init() as context:
    context.train.report_validation_metrics(1, {"loss": 1.0})
"""
# Both ranks say when they start, before any import that takes time. The first attempt of each trial
# waits. Each trial is killed once, as the pause before a restart grows.
_STARTS = """
import os, time
from pathlib import Path

began, rank, directory = time.time(), os.environ["RANK"], Path(os.environ["OUT"])
from paceline import core

info = core.get_cluster_info()
attempt = info.allocation_id.rpartition(".")[2]
with core.init() as context:
    path = directory / f"{attempt}-{rank}"
    path.with_suffix(".new").write_text(f"{began} {info.agent_id}")
    path.with_suffix(".new").rename(path)
    while int(attempt) % 2:
        time.sleep(0.01)
"""
_KILL_ROUNDS = 5


def measure_launches() -> list[Figure]:
    """Attempts that do nothing, on eight slots of one runner, and of eight runners."""
    figures = []
    for num_runners in (1, 8):
        rates = []
        with tempfile.TemporaryDirectory() as directory:
            context = _context(Path(directory))
            with (
                start_master(num_slots=0) as (home, call),
                _runners(home, call, Path(directory), num_runners, _NUM_SLOTS // num_runners),
            ):
                for _ in range(_LAUNCH_ROUNDS):
                    seconds = _run(call, context, _NOTHING, _NUM_ATTEMPTS, _NUM_SLOTS)
                    rates.append(_NUM_ATTEMPTS / seconds)
        what = f"attempts that do nothing, {num_runners} runner(s) with {_NUM_SLOTS} slots in all"
        figures.append(
            Figure(what=what, unit="attempts/s", values=rates, bar=None, is_smaller_better=False)
        )
    return figures


def measure_loopback() -> list[Figure]:
    """16 trivial trials by a runner on loopback and on slots of the master's own, in turn."""
    ratios, beside = [], []
    with tempfile.TemporaryDirectory() as directory:
        context = _context(Path(directory))
        with (
            start_master(num_slots=0) as (home, call),
            start_master(num_slots=_NUM_LOCAL_SLOTS) as (_, own_call),
            _runners(home, call, Path(directory), 1, _NUM_LOCAL_SLOTS),
        ):
            for _ in range(_TRIAL_ROUNDS + 1):
                by_runner, by_master = (
                    _run(one, context, "python3 train.py", _NUM_TRIALS, _NUM_LOCAL_SLOTS)
                    for one in (call, own_call)
                )
                ratios.append(by_runner / by_master)
                beside.append((by_runner, by_master))
    # The first ones load what the next ones have.
    seconds = sorted(beside[1:])[_TRIAL_ROUNDS // 2]
    return [
        Figure(
            what=f"{_NUM_TRIALS} trivial trials by a runner on loopback, in times by the master's"
            " own slots",
            unit="times",
            values=ratios[1:],
            bar=1.1,
            beside=f"such as {seconds[0]:.2f} s and {seconds[1]:.2f} s",
        )
    ]


def measure_lost_runners() -> list[Figure]:
    """From SIGKILL of an attempt's runner on one of two nodes to the start of the next attempt."""
    figures = []
    for rank in (0, 1):
        with tempfile.TemporaryDirectory() as text:
            directory = Path(text)
            context = _context(directory, _STARTS)
            with (
                start_master(num_slots=0) as (home, call),
                _runners(home, call, directory, 2, 1),
            ):
                seconds = list(_lost_runners(call, context, directory, rank))
        figures.append(
            Figure(
                what=f"from kill -9 of the runner of rank {rank} of two nodes to the next start of"
                " the last rank",
                unit="s",
                values=seconds,
                bar=5,
            )
        )
    return figures


def _lost_runners(call: Call, context: Path, directory: Path, rank: int) -> Iterator[float]:
    config: dict[str, Any] = {
        "entrypoint": "python3 -m paceline.launch.torch_distributed -- python3 train.py",
        "searcher": {"name": "single", "metric": "loss"},
        "resources": {"slots_per_trial": 2},
        "max_restarts": 1,
    }
    digest = upload_code(call, context)
    for number in range(_KILL_ROUNDS):
        out = directory / f"out-{number}"
        out.mkdir()
        config["environment"] = {"variables": {"OUT": str(out)}}
        made = call("POST", "experiments", {"config": config, "context_digest": digest})
        node = _starts(out, 1)[rank][1]
        [attempt] = call("GET", f"trials/{number + 1}")["attempts"]
        runner = directory / node / "attempts" / str(attempt["id"]) / "runner.lock"
        killed_at = time.time()
        os.kill(int(runner.read_text()), signal.SIGKILL)
        yield max(float(began) for began, _ in _starts(out, 2)) - killed_at
        _await_end(call, made["id"])


def _starts(out: Path, attempt: int) -> list[list[str]]:
    """Wait until both ranks of an attempt have started; return when they did, and on which node."""
    paths = [out / f"{attempt}-{rank}" for rank in (0, 1)]
    while not all(path.exists() for path in paths):
        time.sleep(0.01)
    return [path.read_text().split() for path in paths]


def _context(directory: Path, script: str = _REPORTS) -> Path:
    context = directory / "context"
    context.mkdir()
    (context / "train.py").write_text(script)
    return context


@contextmanager
def _runners(
    home: Path, call: Call, directory: Path, number: int, num_slots: int
) -> Iterator[None]:
    token = directory / "runner-token"
    token.touch(mode=0o600)
    token.write_text(call("POST", "tokens", {"name": "runners", "scope": "runner"})["secret"])
    url = json.loads((home / "master.json").read_text())["url"]
    command = [sys.executable, "-m", "paceline.cli", "runner", "--master", url]
    command += ["--token-file", str(token), "--slots", str(num_slots)]
    processes = [
        subprocess.Popen(
            [*command, "--name", f"runner-{n}", "--dir", str(directory / f"runner-{n}")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for n in range(number)
    ]
    try:
        while len(_ready(call)) < number:
            assert all(process.poll() is None for process in processes), "a runner has ended"
            time.sleep(0.1)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def _ready(call: Call) -> list[dict[str, Any]]:
    return [node for node in call("GET", "nodes") if node["state"] == "ready"]


def _run(call: Call, context: Path, entrypoint: str, number: int, num_slots: int) -> float:
    """Return the seconds of an experiment with so many trials, from its creation to its end."""
    config = {
        "entrypoint": entrypoint,
        "searcher": {
            "name": "random", "metric": "loss", "max_trials": number,
            "max_concurrent_trials": num_slots,
        },
        "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1}},
    }  # fmt: skip
    digest = upload_code(call, context)
    began = time.perf_counter()
    made = call("POST", "experiments", {"config": config, "context_digest": digest})
    _await_end(call, made["id"])
    return time.perf_counter() - began


def _await_end(call: Call, experiment_id: int) -> None:
    state = "ACTIVE"
    while state == "ACTIVE":
        time.sleep(0.1)
        state = call("GET", f"experiments/{experiment_id}")["state"]
    assert state == "COMPLETED", state


NAMED_CASES: dict[str, Callable[[], list[Figure]]] = {
    "launches": measure_launches,
    "loopback": measure_loopback,
    "lost-runners": measure_lost_runners,
}
