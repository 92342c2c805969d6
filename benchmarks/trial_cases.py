"""A thousand trivial trials, beside Optuna with two processes and Ray Tune in the same minutes.

Each trial reports one number. Those of Paceline and Ray Tune are processes; those of Optuna are
calls of a function in one of two processes that share a database of SQLite.

`PACELINE_BENCH_NUM_TRIALS` sets the number of trials. `PACELINE_BENCH_OPTUNA` and
`PACELINE_BENCH_RAY` name an interpreter that has the other library, by default the present one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from bench_cases import start_master, upload_code
from figures import Figure

_NUM_TRIALS = int(os.environ.get("PACELINE_BENCH_NUM_TRIALS", "1000"))
_SCRIPT = """
from paceline import core

with core.init() as context:
    context.train.report_validation_metrics(1, {"loss": 0.5})
"""
# It writes when each step was done, and computes for as long as asked, to train for a while.
_TRAINING = """
import sys, time, torch
from paceline import core

size, num_steps = int(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(max(1, size // 400))))
optimizer = torch.optim.Adam(model.parameters())
with core.init() as context:
    first = 0
    if context.info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(context.info.latest_checkpoint) as path:
            stored = torch.load(path / "state.pt", mmap=True)
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        first = stored["step"]
    for step in range(first + 1, num_steps + 1):
        model(torch.ones(1, size)).sum().backward()
        optimizer.step()
        context.train.report_training_metrics(step, {"at": time.time()})
        if step == num_steps or context.preempt.should_preempt():
            metadata = {"steps_completed": step}
            with context.checkpoint.store_path(metadata) as (path, _):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, path / "state.pt")
            break
"""
_OPTUNA = """
import subprocess, sys, time
import optuna
optuna.logging.set_verbosity(optuna.logging.ERROR)
url, number = sys.argv[1], int(sys.argv[2])

def objective(trial):
    trial.suggest_float("lr", 0.0, 1.0)
    return 0.5

if len(sys.argv) > 3:
    optuna.load_study(study_name="s", storage=url).optimize(objective, n_trials=number // 2)
else:
    began = time.perf_counter()
    sampler = optuna.samplers.RandomSampler(seed=7)
    optuna.create_study(study_name="s", storage=url, sampler=sampler)
    workers = [subprocess.Popen([sys.executable, *sys.argv, "worker"]) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert len(optuna.load_study(study_name="s", storage=url).trials) == number // 2 * 2
    print(time.perf_counter() - began)
"""
_RAY = """
import sys, time
import ray
from ray import tune
number = int(sys.argv[1])
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)

def trainable(config):
    tune.report({"loss": 0.5})

began = time.perf_counter()
tuner = tune.Tuner(
    trainable,
    param_space={"lr": tune.uniform(0.0, 1.0)},
    tune_config=tune.TuneConfig(num_samples=number),
    run_config=tune.RunConfig(storage_path=sys.argv[2], verbose=0),
)
assert len(tuner.fit()) == number
print(time.perf_counter() - began)
"""


def measure_thousand_trials() -> list[Figure]:
    """Trivial trials on two slots, and the same number with the others."""
    with tempfile.TemporaryDirectory() as directory:
        seconds, master_ms, memory = _paceline(Path(directory))
        beside = {"Optuna": _optuna(Path(directory)), "Ray Tune": _ray(Path(directory))}
    told = ", ".join(f"{name}: {found}" for name, found in beside.items())
    return [
        Figure(what=f"{_NUM_TRIALS:,} trivial trials through the master, 2 slots", unit="s",
               values=[seconds], bar=0.05 * _NUM_TRIALS, beside=told),
        Figure(what="processor time of the master for one of them", unit="ms",
               values=[master_ms], bar=None),
        Figure(what="master after them, resident", unit="MiB", values=[memory], bar=500),
    ]  # fmt: skip


def measure_starts() -> list[Figure]:
    """What a trial with torch waits for its first step, and a paused one for its next."""
    with tempfile.TemporaryDirectory() as directory, start_master(num_slots=1) as (_, call):
        (Path(directory) / "train.py").write_text(_TRAINING)
        digest = upload_code(call, Path(directory))
        # The first trials teach the template what they import.
        starts = [_first_step(call, digest) for _ in range(8)][2:]
        paused, resumed = zip(*_pauses(call, digest, 4), strict=True)
    return [
        Figure(what="a trial that imports torch: created to first step", unit="s", values=starts,
               bar=0.15),
        Figure(what="a trial of 25 million parameters: order to pause to the checkpoint", unit="s",
               values=list(paused), bar=None),
        Figure(what="the same: order to resume to the next step", unit="s", values=list(resumed),
               bar=1),
    ]  # fmt: skip


def _create(call: Any, digest: str, size: int, num_steps: int) -> int:
    config = {
        "entrypoint": f"python3 train.py {size} {num_steps}",
        "searcher": {"name": "single", "metric": "loss"},
    }
    made = call("POST", "experiments", {"config": config, "context_digest": digest})
    return int(made["id"])


def _await(call: Any, experiment: int, state: str) -> None:
    while call("GET", f"experiments/{experiment}")["state"] != state:
        time.sleep(0.02)


def _steps(call: Any, experiment: int) -> list[float]:
    trial = call("GET", f"experiments/{experiment}/trials")["items"][0]["id"]
    rows = call("GET", f"trials/{trial}/metrics?group=training&limit=1000")["items"]
    return [row["metrics"]["at"] for row in rows]


def _first_step(call: Any, digest: str) -> float:
    began = time.time()
    experiment = _create(call, digest, 100, 1)
    _await(call, experiment, "COMPLETED")
    return _steps(call, experiment)[0] - began


def _pauses(call: Any, digest: str, number: int) -> list[tuple[float, float]]:
    """Return how long each order to pause and to resume took."""
    experiment = _create(call, digest, 2300, 1_000_000)
    found: list[tuple[float, float]] = []
    for _ in range(number):
        before = len(_steps(call, experiment)) if found else 0
        while len(_steps(call, experiment)) <= before + 2:
            time.sleep(0.1)
        ordered = time.time()
        call("POST", f"experiments/{experiment}/pause")
        _await(call, experiment, "PAUSED")
        while call("GET", f"experiments/{experiment}")["num_running"]:
            time.sleep(0.02)
        paused, known = time.time() - ordered, _steps(call, experiment)[-1]
        ordered = time.time()
        call("POST", f"experiments/{experiment}/activate")
        while (newest := _steps(call, experiment)[-1]) == known:
            time.sleep(0.05)
        later = [at for at in _steps(call, experiment) if at > known]
        found.append((paused, min(newest, *later) - ordered))
    call("POST", f"experiments/{experiment}/kill")
    return found


def _paceline(directory: Path) -> tuple[float, float, float]:
    context = directory / "context"
    context.mkdir()
    (context / "train.py").write_text(_SCRIPT)
    searcher = {"name": "random", "metric": "loss", "max_trials": _NUM_TRIALS}
    config = {"entrypoint": "python3 train.py", "searcher": searcher | {"max_concurrent_trials": 4}}
    with start_master(num_slots=2) as (home, call):
        master = psutil.Process(json.loads((home / "master.json").read_text())["pid"])
        digest = upload_code(call, context)
        before, began = master.cpu_times(), time.perf_counter()
        made = call("POST", "experiments", {"config": config, "context_digest": digest})
        experiment: dict[str, Any] = {"state": "ACTIVE"}
        # Seldom, as each look costs the master some milliseconds.
        while experiment["state"] == "ACTIVE":
            time.sleep(1.0)
            experiment = call("GET", f"experiments/{made['id']}")
        seconds, after = time.perf_counter() - began, master.cpu_times()
        assert (experiment["state"], experiment["num_trials"]) == ("COMPLETED", _NUM_TRIALS)
        memory = master.memory_info().rss / 2**20
    spent = after.user + after.system - before.user - before.system
    return seconds, spent * 1000 / _NUM_TRIALS, memory


def _optuna(directory: Path) -> str:
    python = os.environ.get("PACELINE_BENCH_OPTUNA", sys.executable)
    script = directory / "with_optuna.py"
    script.write_text(_OPTUNA)
    database = f"sqlite:///{directory}/optuna.sqlite"
    return _seconds([python, str(script), database, str(_NUM_TRIALS)])


def _ray(directory: Path) -> str:
    python = os.environ.get("PACELINE_BENCH_RAY", sys.executable)
    script = directory / "with_ray.py"
    script.write_text(_RAY)
    return _seconds([python, str(script), str(_NUM_TRIALS), str(directory / "ray")])


def _seconds(command: list[str]) -> str:
    """Return what a program says of its time, or why it has none."""
    limit_s = float(os.environ.get("PACELINE_BENCH_PEER_LIMIT", "600"))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"more than {limit_s:.0f} s"
    if done.returncode != 0:
        return f"not measured ({(done.stderr.strip().splitlines() or ['no word'])[-1][:100]})"
    return f"{float(done.stdout.strip().splitlines()[-1]):.1f} s"


NAMED_CASES: dict[str, Callable[[], list[Figure]]] = {
    "thousand-trials": measure_thousand_trials,
    "trial-starts": measure_starts,
}
