"""Stores that fail trials: the reports of ranks, and the reason shown to people."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline._base.journal_records import StoreChecked
from paceline._cluster.master.store import tables
from paceline._cluster.messages.states import AttemptState, TrialState

_MOST_TRIALS = 5
_FIRST_MOMENTS_S = 60.0
_MAX_TEXT = 500
_MOST_COUNTS = 1000


@dataclass(frozen=True, slots=True)
class _Failure:
    """Storage failing for a trial, with the start of the failure in seconds since the epoch."""

    experiment_id: int
    trial_id: int
    storage: str
    since: float
    reason: str


class FailingStores:
    """Storages failing for trials; safe for any thread. Forgotten when the master ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: dict[tuple[int, int], _Failure] = {}
        self._num_failed: Counter[tuple[int, str]] = Counter()

    def note(self, attempt: sa.Row[Any], rank: int, record: StoreChecked) -> None:
        """Record a rank's report about its storage; no reason means working again."""
        with self._lock:
            if record.reason is None:
                self._failures.pop((attempt.id, rank), None)
            else:
                key = attempt.experiment_id, record.storage
                # A job can name any storages, and many.
                if key in self._num_failed or len(self._num_failed) < _MOST_COUNTS:
                    self._num_failed[key] += 1
                self._failures[attempt.id, rank] = _Failure(
                    attempt.experiment_id,
                    attempt.trial_id,
                    _one_line(record.storage),
                    record.time,
                    _one_line(record.reason),
                )

    def forget(self, attempt_id: int) -> None:
        """Forget the failures reported by an ended attempt."""
        with self._lock:
            self._failures = {
                key: one for key, one in self._failures.items() if key[0] != attempt_id
            }

    def counts(self) -> dict[tuple[int, str], int]:
        """Return how often writes failed, by experiment and the storage that its trials named."""
        with self._lock:
            return dict(self._num_failed)

    def describe(
        self, connection: sa.Connection, is_own: Callable[[sa.Connection, int, str], bool]
    ) -> list[str]:
        """Return a sentence for each storage and experiment.

        Args:
            connection: Where to read.
            is_own: Tells whether an experiment may have a storage: a job can name any.
        """
        with self._lock:
            failures = [*self._failures.values()]
        failures += _waiting_trial_failures(connection)
        by_store: dict[tuple[int, str], list[_Failure]] = {}
        for one in failures:
            by_store.setdefault((one.experiment_id, one.storage), []).append(one)
        return [_describe(by_store[key]) for key in sorted(by_store) if is_own(connection, *key)]


def _one_line(text: str) -> str:
    """Return a job's text without line ends, so nobody takes a part for another line."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}..."


def _waiting_trial_failures(connection: sa.Connection) -> list[_Failure]:
    """Return the failures of trials last ended by a storage without an answer.

    The next attempt reports its own findings, but not in its first moments.
    """
    trials, attempts = tables.trials.c, tables.attempts.c
    query = (
        sa.select(
            attempts.experiment_id,
            attempts.trial_id,
            attempts.number,
            attempts.ended_at,
            attempts.exit,
            trials.num_attempts,
        )
        .join(tables.trials, trials.id == attempts.trial_id)
        .where(
            trials.state == TrialState.ACTIVE.value,
            trials.retries > 0,
            attempts.number >= trials.num_attempts - 1,
            attempts.state == AttemptState.ENDED.value,
        )
        .order_by(attempts.number)
    )
    newest = {row.trial_id: row for row in connection.execute(query)}
    begun_s = time.time() - _FIRST_MOMENTS_S
    return [
        _Failure(
            row.experiment_id,
            row.trial_id,
            _one_line(row.exit["store"]),
            row.ended_at,
            _one_line(_reason(row.exit)),
        )
        for row in newest.values()
        if row.exit
        and row.exit.get("store") is not None
        and (row.number == row.num_attempts or row.ended_at > begun_s)
    ]


def _reason(exit_: dict[str, Any]) -> str:
    told = exit_["error"] or exit_["detail"] or "an attempt failed by that."
    return str(told).partition("\n")[0]


def _describe(failures: Iterable[_Failure]) -> str:
    first, *_ = ordered = sorted(failures, key=lambda one: one.since)
    ids = sorted({one.trial_id for one in ordered})
    more = f" and {len(ids) - _MOST_TRIALS} more" if len(ids) > _MOST_TRIALS else ""
    trials = f"trial{'s' * (len(ids) > 1)} {', '.join(map(str, ids[:_MOST_TRIALS]))}{more}"
    return (
        f"Experiment {first.experiment_id} waits for its store {first.storage}, which does not"
        f" answer {trials} for {max(0.0, time.time() - first.since):.0f} s: {first.reason}"
    )
