"""A master under trials for an hour: do its memory, files, answers and disk grow without need?

Searches of trivial trials run one after another. Every few seconds the script notes the master's
memory and open files, how long it takes to answer, and how large its home is. At the end it fits a
line through the second half of the notes. Usage: python benchmarks/soak.py [--minutes 60].
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from bench_cases import Call, start_master, upload_code
from figures import Figure, print_table, store

SCRIPT = """
import paceline as det
with det.core.init() as context:
    for step in range(1, 11):
        context.train.report_training_metrics(step, {"loss": 1.0 / step})
    context.train.report_validation_metrics(10, {"loss": 0.1})
"""
CONFIG = {
    "entrypoint": "python3 train.py",
    "hyperparameters": {"x": {"type": "double", "minval": 0.0, "maxval": 1.0}},
    "searcher": {"name": "random", "metric": "loss", "max_trials": 50},
}
ROUTES = ("health", "experiments?limit=50", "experiments/{id}", "experiments/{id}/trials", "queue")
NOTE_EVERY_S = 5.0
NUM_KEPT = 40  # ended experiments; older ones are deleted, as their owners would


def main() -> None:
    """Run the searches, print what grew and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--trials", type=int, default=10_000, help="stop after so many")
    parser.add_argument("--delete", action="store_true", help="delete all but the newest searches")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, start_master(num_slots=2) as (home, call):
        context = Path(directory) / "context"
        context.mkdir()
        (context / "train.py").write_text(SCRIPT)
        notes = soak(home, call, context, options)
    figures = figures_of(notes)
    print_table(figures)
    store(figures)


def soak(
    home: Path, call: Call, context: Path, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Run searches until the time or the trials are over; return the notes."""
    master = psutil.Process(json.loads((home / "master.json").read_text())["pid"])
    notes: list[dict[str, float]] = []
    begin = time.monotonic()
    created: list[int] = []
    num_ended = 0
    while time.monotonic() - begin < 60 * options.minutes and num_ended < options.trials:
        digest = upload_code(call, context)
        experiment = call("POST", "experiments", {"config": CONFIG, "context_digest": digest})
        created.append(experiment["id"])
        while experiment["state"] not in ("COMPLETED", "ERROR", "CANCELED"):
            experiment = call("GET", f"experiments/{experiment['id']}")
            time.sleep(0.1)
            if not notes or time.monotonic() - begin - notes[-1]["time"] > NOTE_EVERY_S:
                now = time.monotonic() - begin
                num_now = num_ended + experiment["num_trials"] - experiment["num_running"]
                notes.append(note(master, home, call, now, num_now, experiment["id"]))
        assert experiment["state"] == "COMPLETED", experiment
        num_ended += experiment["num_trials"]
        if options.delete and len(created) > NUM_KEPT:
            call("DELETE", f"experiments/{created.pop(0)}", None)
        if sys.stderr.isatty():
            print(f"\r{num_ended} trials", end="", file=sys.stderr)
    return notes


def note(
    master: psutil.Process, home: Path, call: Call, now: float, num_ended: int, newest: int
) -> dict[str, float]:
    """Return what the master holds and how fast it answers: MB, numbers and ms."""
    answers = []
    for route in ROUTES:
        begin = time.perf_counter()
        call("GET", route.format(id=newest))
        answers.append(1000 * (time.perf_counter() - begin))
    sizes = []
    for directory, _, names in os.walk(home):
        for name in names:
            try:
                sizes.append(os.lstat(Path(directory, name)).st_size)
            except FileNotFoundError:
                continue
    return {
        "time": now,
        "trials": num_ended,
        "memory": master.memory_info().rss / 2**20,
        "files": master.num_fds(),
        "threads": master.num_threads(),
        "answer": statistics.median(answers),
        "disk": sum(sizes) / 2**20,
        "cpu": sum(master.cpu_times()[:2]),
    }


def slope(notes: list[dict[str, float]], name: str) -> float:
    """Return how much a value grew for each thousand trials of the second half."""
    late = notes[len(notes) // 2 :]
    fit = statistics.linear_regression([n["trials"] for n in late], [n[name] for n in late])
    return 1000 * fit.slope


def figures_of(notes: list[dict[str, float]]) -> list[Figure]:
    """Return the slopes and the last values."""
    last = notes[-1]
    beside = f"{last['trials']:.0f} trials in {last['time'] / 60:.0f} minutes"
    units: dict[str, tuple[str, str]] = {
        "memory": ("memory of the master", "MiB"),
        "files": ("open files of the master", ""),
        "threads": ("threads of the master", ""),
        "answer": ("median answer", "ms"),
        "disk": ("home", "MiB"),
        "cpu": ("processor time of the master", "s"),
    }
    figures = []
    for name, (what, unit) in units.items():
        raw: Any = {"values": [round(n[name], 3) for n in notes]}
        figures.append(
            Figure(what=f"{what}: growth for 1,000 trials", unit=unit,
                   values=[slope(notes, name)], bar=None,
                   beside=f"at last {last[name]:.1f} {unit}; {beside}", raw=raw)
        )  # fmt: skip
    return figures


if __name__ == "__main__":
    main()
