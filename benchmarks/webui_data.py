"""What the web UI is measured with: long series in a home, and runs that report all the time.

Usage as a program: webui_data.py DIRECTORY NUM_RUNS REPORTS_PER_SECOND, until it is terminated.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import insert, update

from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import JournalKey, RunInfo
from paceline._cluster.master.home_directory import Home
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.series_reader import Points
from paceline._cluster.master.store.series_writer import store_columns
from paceline.journal import AttemptStarted, MetricsReported, RunDirectory

NUM_LONG = 1_000_000
NUM_TRIALS = 100
NUM_EACH = 100_000
NUM_EXPERIMENTS = 10_000
NUM_COMPARED, NUM_RATES, NUM_MANY, NUM_METRICS, NUM_POINTS = 1000, 5, 50, 200, 1000


def fill_home(path: Path) -> dict[str, int]:
    """Store long series, and as many experiments as a list must carry; return what is where."""
    home = Home(path)
    home.prepare()
    master = Master(home, ["cpu"])
    found: dict[str, int] = {}

    def store(transaction: Any) -> None:
        connection = transaction.connection
        for number in range(NUM_EXPERIMENTS - 2):
            register(f"run {number}")
        long = register("long")
        found["long"] = long.trial_id
        add(long.trial_id, "wave", NUM_LONG)
        wide = register("wide")
        found["wide"] = wide.experiment_id
        for number in range(NUM_TRIALS):
            add(add_trial(wide.experiment_id, number, {}), "loss", NUM_EACH)
        store_compared()
        connection.execute(update(tables.experiments).values(state="COMPLETED", ended_at=2.0))

    def store_compared() -> None:
        grouped = register("grouped")
        found["grouped"] = grouped.experiment_id
        for number in range(NUM_COMPARED):
            hparams = {"lr": number % NUM_RATES, "seed": number // NUM_RATES}
            add(add_trial(grouped.experiment_id, number, hparams), "loss", NUM_POINTS)
        many = register("many")
        found["many"] = many.experiment_id
        for number in range(NUM_MANY):
            trial = add_trial(many.experiment_id, number, {"seed": number})
            for metric in range(NUM_METRICS):
                add(trial, f"layer{metric:03}", NUM_POINTS)

    transactions: list[Any] = []

    def add_trial(experiment_id: int, number: int, hparams: dict[str, Any]) -> int:
        row = {"experiment_id": experiment_id, "state": "COMPLETED", "hparams": hparams, "seed": 0,
               "created_at": 1.0, "ended_at": 2.0, "num_attempts": 1, "request_id": f"t{number}",
               "best_metric": number / NUM_TRIALS, "steps_completed": NUM_POINTS}  # fmt: skip
        reply = transactions[-1].connection.execute(insert(tables.trials).values(row))
        return int(reply.inserted_primary_key[0])

    def register(name: str) -> Any:
        info = RunInfo(run_id=name, name=name, created=1.0, checkpoint_storage="/none")
        return master.unmanaged.register(transactions[-1], info, f"/none/{name}")

    def add(trial: int, metric: str, count: int) -> None:
        steps = np.arange(count)
        noise = np.random.default_rng(trial).normal(0, 0.05, count)
        values = (np.exp(-steps / count * 3) + noise).tolist()
        points = Points(steps.tolist(), steps.astype(float).tolist(), values)
        connection = transactions[-1].connection
        store_columns(connection, trial, 1, {("validation", metric): points})

    def job(transaction: Any) -> None:
        transactions.append(transaction)
        store(transaction)

    master.database.write(job).result()
    master.database.close()
    return found


def store_runs(path: Path, runs: list[list[float]]) -> int:
    """Store runs with a series `loss` each as trials of an experiment; return its id."""
    home = Home(path)
    home.prepare()
    master = Master(home, ["cpu"])

    def store(transaction: Any) -> int:
        info = RunInfo(run_id="runs", name="runs", created=1.0, checkpoint_storage="/none")
        found = master.unmanaged.register(transaction, info, "/none/runs")
        for number, values in enumerate(runs):
            row = {"experiment_id": found.experiment_id, "state": "COMPLETED", "seed": 0,
                   "hparams": {"seed": number}, "created_at": 1.0, "ended_at": 2.0,
                   "num_attempts": 1, "request_id": f"t{number}",
                   "steps_completed": len(values)}  # fmt: skip
            reply = transaction.connection.execute(insert(tables.trials).values(row))
            steps = list(range(len(values)))
            points = Points(steps, [float(step) for step in steps], values)
            trial = int(reply.inserted_primary_key[0])
            store_columns(transaction.connection, trial, 1, {("validation", "loss"): points})
        return int(found.experiment_id)

    experiment = master.database.write(store).result()
    master.database.close()
    return int(experiment)


def report_for_ever(directory: Path, num_runs: int, rate: float) -> None:
    """Let runs report at a rate each, until the process is terminated."""
    held, journals = [], []
    for number in range(num_runs):
        path = directory / f"run-{number}"
        info = RunInfo(
            run_id=f"live-{number}", name=f"live {number}", created=time.time(),
            checkpoint_storage=str(path / "checkpoints"),
        )  # fmt: skip
        run = RunDirectory.create(path, info)
        hold = run.hold_attempt_lock()
        hold.__enter__()
        held.append(hold)
        journals.append(JournalWriter(run.journal_path(JournalKey(0, 0, 0))))
        journals[-1].append(
            AttemptStarted(
                time=time.time(), attempt=0, generation=0, rank=0, world_size=1, pid=0, host="here",
                resumed_from=None, steps_completed=0,
            )
        )  # fmt: skip
    step, began = 0, time.monotonic()
    while True:
        step += 1
        for number, journal in enumerate(journals):
            metrics = {"loss": 1 / step + number, "accuracy": 1 - 1 / step}
            journal.append(
                MetricsReported(
                    time=time.time(), group="training", steps_completed=step, metrics=metrics
                )
            )
        time.sleep(max(0.0, began + step / rate - time.monotonic()))


if __name__ == "__main__":
    report_for_ever(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
