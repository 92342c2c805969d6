"""A home with a large store, written straight into the tables: what reads are measured with.

Usage as a program: large_store.py HOME [NUM_TRIALS] [NUM_LOG_LINES].
"""

import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Table, delete, insert

from paceline._cluster.master.home_directory import Home
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.metric_summaries import Summary
from paceline._cluster.master.store.recovery_rows import begin_records
from paceline._cluster.master.store.series_reader import Points, encode_points, tagged
from paceline._cluster.master.store.trial_logs import LogStore
from paceline._cluster.messages.runner_messages import LogEntry
from paceline.config import ExperimentConfig, validate_config
from paceline.search import Create, simulate
from paceline.search._search import Search
from paceline.search._search_messages import message_to_json

_TRIALS_PER_EXPERIMENT = 5
_LONG_POINTS = 20_000
_BEGAN = 1_700_000_000.0
_WORDS = ("step", "loss", "lr", "epoch", "rate", "batch", "norm", "data wait")
_ROWS_AT_ONCE = 5000
_LINES_AT_ONCE = 20_000
_NUM_SHORT_LOGS = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeStore:
    """What is where: `wide` is an experiment with half of all trials, `logged` a trial."""

    num_experiments: int
    num_trials: int
    num_points: int
    wide: int
    logged: int
    num_lines: int


def fill_home(home: Path, *, num_trials: int, num_lines: int = 1_000_000) -> LargeStore:
    """Make a home: a tenth as many experiments as trials, half of all trials in the last one.

    Every trial has an attempt, three series and a checkpoint; each hundredth has long series, and
    the newest has a log of `num_lines` lines, and 500 before it have 20.
    """
    place = Home(home)
    place.prepare()
    database = Database(place.database_path)
    num_experiments = max(num_trials // 10, 2)
    maker = _Maker(num_experiments=num_experiments, num_trials=num_trials)
    for table, rows in maker.tables():
        _store(database, table, rows)
    # As in a home that has been at work: its records are there, and not made while reads are
    # measured.
    begin_records(database)
    database.write(lambda t: t.connection.execute(delete(tables.unrecorded))).result()
    database.close()
    _write_logs(LogStore(place.logs_path), num_trials, num_lines)
    return LargeStore(
        num_experiments=num_experiments,
        num_trials=num_trials,
        num_points=maker.num_points,
        wide=num_experiments,
        logged=num_trials,
        num_lines=num_lines,
    )


def _store(database: Database, table: Table, rows: Iterable[dict[str, Any]]) -> None:
    rows = iter(rows)
    while part := list(islice(rows, _ROWS_AT_ONCE)):

        def job(transaction: Any, part: list[dict[str, Any]] = part) -> None:
            transaction.connection.execute(insert(table), part)

        database.write(job).result()


class _Maker:
    def __init__(self, *, num_experiments: int, num_trials: int) -> None:
        self._num_experiments = num_experiments
        self._num_wide = num_trials - (num_experiments - 1) * _TRIALS_PER_EXPERIMENT
        self._num_trials = num_trials
        self._random = random.Random(7)
        self._wide_config = _config("wide", self._num_wide)
        self._search = simulate(
            self._wide_config.search_config(),
            self._wide_config.hyperparameters,
            seed=7,
            metric_of=self._metric_of,
        )
        created = [c for found in self._search.operations for c in found if isinstance(c, Create)]
        self._created = created[: self._num_wide]
        self._short = _series(self._points(10))
        self._long = _series(self._points(_LONG_POINTS))
        self.num_points = 0

    def tables(self) -> Iterator[tuple[Table, Iterable[dict[str, Any]]]]:
        """Yield the rows of each table, in the order of their references."""
        yield tables.experiments, map(self._experiment, range(1, self._num_experiments + 1))
        yield tables.trials, map(self._trial, range(1, self._num_trials + 1))
        yield tables.attempts, map(self._attempt, range(1, self._num_trials + 1))
        yield tables.series, self._all_series()
        yield tables.chunks, self._all_chunks()
        yield tables.checkpoints, map(self._checkpoint, range(1, self._num_trials + 1))
        yield tables.search_inputs, self._inputs()
        yield tables.search_snapshots, self._snapshots()

    def _metric_of(self, create: Create, length: int) -> float:
        return float(create.hparams["lr"]) + self._random.random() / length

    def _experiment(self, number: int) -> dict[str, Any]:
        is_wide = number == self._num_experiments
        config = self._wide_config if is_wide else _config(f"study {number % 97}", 5)
        first = (number - 1) * _TRIALS_PER_EXPERIMENT + 1
        return {
            "id": number,
            "name": "wide" if is_wide else f"study {number % 97} of {number}",
            "state": "COMPLETED",
            "config": config.to_json(),
            "warnings": [],
            "labels": ["nightly", f"team-{number % 7}"],
            "seed": 7,
            "created_at": _BEGAN + 100 * number,
            "ended_at": _BEGAN + 100 * number + 90,
            "progress": 1.0,
            "best_trial_id": first,
            "best_metric": self._random.random(),
            "search_end": "COMPLETED",
            "retention_done": True,
        }

    def _trial(self, number: int) -> dict[str, Any]:
        index = number - self._first_wide
        if index >= 0:
            made = self._created[index]
            request_id, hparams = made.request_id, made.hparams
        else:
            request_id = f"trial-{number}"
            hparams = {"lr": self._random.random(), "width": 64, "net": {"depth": number % 5}}
        return {
            "id": number,
            "experiment_id": self._experiment_of(number),
            "request_id": request_id,
            "state": "COMPLETED" if number % 20 else "ERROR",
            "hparams": hparams,
            "seed": number,
            "num_attempts": 1,
            "steps_completed": self._random.choice((100, 400, 1600)),
            "progress": 1.0,
            "best_metric": self._random.random(),
            "best_step": 100,
            "latest_metric": self._random.random(),
            "created_at": _BEGAN + number,
            "ended_at": _BEGAN + number + 60,
            "stop_reason": "stopped by the search" if number % 3 else "fully trained",
        }

    def _attempt(self, number: int) -> dict[str, Any]:
        return {
            "id": number, "trial_id": number, "experiment_id": self._experiment_of(number),
            "number": 1, "state": "ENDED", "slots": [0], "created_at": _BEGAN + number,
            "started_at": _BEGAN + number + 1, "ended_at": _BEGAN + number + 60,
            "exit": {"reason": "exited", "code": 0, "signal": None, "time": 60.0},
        }  # fmt: skip

    def _points(self, count: int) -> Points:
        steps = np.arange(1, count + 1) * 10
        values = (np.exp(-steps / count / 3) + self._random.random()).tolist()
        return Points(steps.tolist(), (_BEGAN + steps).astype(float).tolist(), values)

    def _all_series(self) -> Iterator[dict[str, Any]]:
        identity = 0
        for number in range(1, self._num_trials + 1):
            is_long = number % 100 == 0
            for group, key in (("training", "loss"), ("validation", "loss"), ("training", "lr")):
                identity += 1
                row = self._long[0] if is_long else self._short[0]
                self.num_points += row["num_points"]
                yield {"id": identity, "trial_id": number, "attempt": 1, "group": group,
                       "key": key, **row}  # fmt: skip

    def _all_chunks(self) -> Iterator[dict[str, Any]]:
        for number in range(100, self._num_trials + 1, 100):
            for series in range(3 * number - 2, 3 * number + 1):
                for chunk in self._long[1]:
                    yield {"series_id": series, **chunk}

    def _checkpoint(self, number: int) -> dict[str, Any]:
        return {
            "uuid": f"{number:08d}-0000-4000-8000-000000000000", "trial_id": number,
            "experiment_id": self._experiment_of(number), "attempt": 1,
            "steps_completed": 100 + number % 1000, "state": "COMPLETED",
            "metadata": {"steps_completed": 100}, "resources": {"model.pt": 1000, "meta.json": 10},
            "size": 1010, "storage": "/nowhere", "created_at": _BEGAN + number,
            "metric": self._random.random(),
        }  # fmt: skip

    def _inputs(self) -> Iterator[dict[str, Any]]:
        pairs = zip(self._search.inputs, self._search.operations, strict=True)
        for number, (given, operations) in enumerate(pairs):
            yield {
                "experiment_id": self._num_experiments, "number": number,
                "time": _BEGAN + number, "input": json.loads(message_to_json(given)),
                "operations": [json.loads(message_to_json(one)) for one in operations],
            }  # fmt: skip

    def _snapshots(self) -> Iterator[dict[str, Any]]:
        """Yield the snapshot as a master stores one: a third of the inputs came after it."""
        config = self._wide_config
        search = Search(config.search_config(), config.hyperparameters, seed=7)
        num_inputs = len(self._search.inputs) * 2 // 3
        for given in self._search.inputs[:num_inputs]:
            search.apply(given)
        yield {"experiment_id": self._num_experiments, "num_inputs": num_inputs,
               "snapshot": search.snapshot()}  # fmt: skip

    @property
    def _first_wide(self) -> int:
        return self._num_trials - self._num_wide + 1

    def _experiment_of(self, number: int) -> int:
        return min((number - 1) // _TRIALS_PER_EXPERIMENT + 1, self._num_experiments)


@lru_cache(maxsize=200)
def _config(name: str, max_trials: int) -> ExperimentConfig:
    searcher = {
        "name": "adaptive_asha", "metric": "loss", "max_trials": max_trials, "max_time": 1600,
        "time_metric": "batches", "max_concurrent_trials": 16,
    }  # fmt: skip
    return validate_config(
        {
            "name": name,
            "entrypoint": "python3 train.py",
            "description": "A study of widths and rates",
            "labels": ["nightly"],
            "hyperparameters": {
                "lr": {"type": "double", "minval": 0.0, "maxval": 1.0},
                "width": {"type": "categorical", "vals": [32, 64, 128]},
                "net": {"depth": {"type": "int", "minval": 1, "maxval": 9}},
            },
            "searcher": searcher,
        }
    )


def _series(points: Points) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the columns of a series' row and of its chunks."""
    summary = Summary()
    summary.add(points)
    count = len(points.steps)
    num_full = count // 1024 * 1024
    chunks = [_column(_part(points, start, start + 1024)) for start in range(0, num_full, 1024)]
    for start, chunk in zip(range(0, num_full, 1024), chunks, strict=True):
        chunk |= {"first_step": points.steps[start], "last_step": points.steps[start + 1023]}
    row = _column(_part(points, num_full, count)) | {
        "num_points": count, "num_numbers": count, "sum": summary.sum, "min": summary.min,
        "max": summary.max, "last": tagged(summary.last), "first_step": summary.first_step,
        "last_step": summary.last_step,
    }  # fmt: skip
    return row, chunks


def _part(points: Points, start: int, end: int) -> Points:
    return Points(points.steps[start:end], points.times[start:end], points.values[start:end])


def _column(points: Points) -> dict[str, Any]:
    column = encode_points(points)
    return {"kind": column.kind, "steps": column.steps, "times": column.times,
            "value_bytes": column.values}  # fmt: skip


def _write_logs(logs: LogStore, newest: int, num_lines: int) -> None:
    """Write a long log of the newest trial, and short ones of those before it."""
    chosen = random.Random(11)
    for trial_id in range(max(newest - _NUM_SHORT_LOGS, 1), newest + 1):
        count = num_lines if trial_id == newest else 20
        for begin in range(0, count, _LINES_AT_ONCE):
            numbers = range(begin, min(begin + _LINES_AT_ONCE, count))
            entries = [
                LogEntry(
                    number, _BEGAN + trial_id + 59 * number / count, 0, "stdout", "INFO",
                    _line(chosen, number),
                )
                for number in numbers
            ]  # fmt: skip
            logs.append(trial_id, 1, entries)


def _line(chosen: random.Random, number: int) -> str:
    if number % 200_000 == 123_456:
        return f"CUDA error: an illegal memory access was encountered at 0x{number:x}"
    word = chosen.choice(_WORDS)
    return f"[rank 0] epoch {number // 5000} step {number}: {word}={chosen.random():.6f} it/s 12.3"


if __name__ == "__main__":
    began = time.monotonic()
    given = [int(text) for text in sys.argv[2:]]
    found = fill_home(
        Path(sys.argv[1]),
        num_trials=given[0] if given else 100_000,
        num_lines=given[1] if len(given) > 1 else 1_000_000,
    )
    print(found, f"{time.monotonic() - began:.0f} s")
