"""The cases of `run.py` about worker groups: starts, runs, reports, losses and first batches."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import driver_data
from figures import Figure
from worker_children import HEARTBEAT_S, TORCHRUN_SCRIPT

_CHILDREN = Path(__file__).with_name("worker_children.py")
_NUM_ROUNDS = 3


def measure_worker_starts() -> list[Figure]:
    """Two local workers with their process group, and a second run of nothing."""
    rounds, torchrun = [], []
    for _ in range(_NUM_ROUNDS):
        rounds.append(_run_child("starts"))
        torchrun.append(_torchrun_seconds())
    imported = statistics.median(r["import torch"] for r in rounds)
    beside = f"torchrun, whole: {statistics.median(torchrun):.2f} s"
    return [
        Figure(what="two workers ready, cold, beyond torch's import in the same run", unit="s",
               values=[r["cold"] - r["import torch"] for r in rounds], bar=0.4, raw=rounds,
               beside=f"import torch: {imported:.2f} s; {beside}"),
        Figure(what="two workers ready, from a warm fork server", unit="s",
               values=[r["warm"] for r in rounds], bar=0.3, beside=beside),
        Figure(what="a second `run()` of an empty function", unit="ms",
               values=[r["empty"] * 1000 for r in rounds], bar=20),
    ]  # fmt: skip


def measure_worker_reports() -> list[Figure]:
    """`train.report()` in one worker, and in eight at once."""
    rounds = [_run_child("reports") for _ in range(_NUM_ROUNDS)]
    return [
        Figure(what="one `train.report()` in the worker, median of 20,000", unit="us",
               values=[r["one_us"] for r in rounds], bar=10),
        Figure(what="reports of 8 workers, none lost", unit="reports/s",
               values=[r["rate"] for r in rounds], bar=5000, is_smaller_better=False),
    ]  # fmt: skip


def measure_worker_losses() -> list[Figure]:
    """From a signal to one of two workers to the user's code again."""
    rounds = [_run_child("losses") for _ in range(_NUM_ROUNDS)]
    return [
        Figure(what="SIGKILL of one of two workers to user code again", unit="s",
               values=[r["kill"] for r in rounds], bar=1.5, raw=rounds),
        Figure(what=f"SIGSTOP to being noticed, with a deadline of {HEARTBEAT_S:g} s", unit="s",
               values=[r["stop, noticed"] for r in rounds], bar=HEARTBEAT_S + 1),
    ]  # fmt: skip


def measure_creators() -> list[Figure]:
    """Empty passes of creators, and a pass whose worker was killed before it."""
    rounds = [_run_child("creators") for _ in range(_NUM_ROUNDS)]
    large_ms = statistics.median(r["large, empty"] for r in rounds) * 1000
    return [
        Figure(what="an empty pass of creators, two warm workers, with the state kept", unit="ms",
               values=[r["kept"] * 1000 for r in rounds], bar=20,
               beside=f"not kept: {statistics.median(r['empty'] for r in rounds) * 1000:.1f} ms"),
        Figure(what="the same with a model of 100 MB", unit="ms",
               values=[r["large"] * 1000 for r in rounds], bar=300,
               beside=f"not kept: {large_ms:.1f} ms"),
        Figure(what="a pass of creators with one of two workers killed before it", unit="s",
               values=[r["kill"] for r in rounds], bar=1.5, raw=rounds),
    ]  # fmt: skip


def measure_first_batches() -> list[Figure]:
    """The first of a million samples' batches, beside a plain loader's."""
    rounds = [_run_child("first_batches") for _ in range(_NUM_ROUNDS)]
    return [
        Figure(what=f"first batch over a plain DataLoader's, {num_workers} loader workers",
               unit="times", values=[r[num_workers][0] for r in rounds], bar=1.1,
               beside=f"plain: {statistics.median(r[num_workers][2] for r in rounds):.3f} s")
        for num_workers in ("0", "2")
    ]  # fmt: skip


def measure_ray_train() -> list[Figure]:
    """Starts, runs and losses with Ray Train; needs the environment of `make bench-peers`."""
    rounds = [_run_child("ray_train") for _ in range(3)]
    names = {
        "first": "Ray Train: `fit()` of a barrier on two workers, Ray running",
        "second": "Ray Train: a second `fit()` of an empty function",
        "kill": "Ray Train: SIGKILL of one of two workers to user code again",
    }
    return [
        Figure(what=what, unit="s", values=[r[name] for r in rounds], bar=None)
        for name, what in names.items()
    ]


def measure_ray_elastic() -> list[Figure]:
    """An elastic group on Ray whose nodes come and go, beside a fixed one; takes five minutes."""
    script = Path(__file__).with_name("ray_elastic.py")
    told = json.loads(_run([sys.executable, str(script), "--json"]).splitlines()[-1])
    assert told["changes"], "No node has changed."
    assert told["steps compared"], "No step can be compared."
    return [
        Figure(what="work on flapping Ray nodes, of that of a fixed group of the mean size",
               unit="times", values=[told["share"]], bar=0.85, is_smaller_better=False, raw=told,
               beside=f"a fixed group of three: {told['steps/s of a fixed group of three']:.1f}"
                      " steps/s"),
        Figure(what="optimizer steps with other samples than in a fixed group", unit="steps",
               values=[told["steps with other samples"]], bar=0,
               beside=f"steps compared: {told['steps compared']}"),
    ]  # fmt: skip


def _torchrun_seconds() -> float:
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "meet.py")
        script.write_text(TORCHRUN_SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
        begin = time.perf_counter()
        _run([*command, str(script)])
        return time.perf_counter() - begin


def _run_child(name: str) -> Any:
    return json.loads(_run([sys.executable, str(_CHILDREN), name]).splitlines()[-1])


def _run(command: list[str]) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "RAY_"))}
    done = subprocess.run(
        command, capture_output=True, text=True, env=kept | {"OMP_NUM_THREADS": "1"}
    )
    assert not done.returncode, done.stderr
    return done.stdout


CASES: dict[str, Callable[[], list[Figure]]] = {
    "worker-starts": measure_worker_starts,
    "worker-reports": measure_worker_reports,
    "worker-losses": measure_worker_losses,
    "creators": measure_creators,
    "driver-data": driver_data.measure_driver_data,
    "first-batches": measure_first_batches,
}
# Only by name: they need more than Paceline.
NAMED_CASES: dict[str, Callable[[], list[Figure]]] = {
    "ray-train": measure_ray_train,
    "ray-elastic": measure_ray_elastic,
}
