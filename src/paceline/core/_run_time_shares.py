"""What the time of a run without a master went to."""

import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from paceline.journal import (
    AttemptFinished,
    AttemptTimes,
    JournalKey,
    RunDirectory,
    TimeShares,
    TimeSpent,
    divide_time,
)


def time_shares_of_run(path: Path) -> TimeShares:
    """Return what the time of a run went to, from its creation to its last sign of life, or to now.

    Raises:
        NotARunDirectoryError: There is none at `path`.
        RunVersionError: It has another format version.
    """
    run = RunDirectory.open(path)
    began = run.read_info().created
    keys = [key for key in run.journal_keys() if key.rank == 0]
    attempts = [_times_of(run, list(group)) for _, group in groupby(keys, lambda key: key.attempt)]
    if attempts:
        # The first attempt has made the run directory.
        attempts[0] = replace(attempts[0], created_at=began)
    until = max([began, *(times.ended_at or began for times in attempts)])
    if attempts and run.is_alive():
        # The last attempt goes on.
        attempts[-1], until = replace(attempts[-1], ended_at=None), time.time()
    return divide_time(began, until, attempts)


def _times_of(run: RunDirectory, keys: list[JournalKey]) -> AttemptTimes:
    """Return the times of an attempt.

    It ended with the last record of its chief or, if it was killed, the last sign of life.
    """
    sessions, times = [], []
    has_finished = False
    for key in keys:
        session, has_finished = [], False
        for entry in run.reader(key):
            record = entry.decode()
            times.append(record.time)
            if isinstance(record, TimeSpent):
                session.append(record)
            elif isinstance(record, AttemptFinished):
                has_finished = True
                break
        sessions.append(session)
    ended_at = max(times, default=0.0)
    if not has_finished and (beat := run.last_beat(keys[0].attempt)) is not None:
        ended_at = max(ended_at, beat)
    return AttemptTimes(created_at=min(times, default=0.0), ended_at=ended_at, sessions=sessions)
