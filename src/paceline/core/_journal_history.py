"""History of a run's earlier attempts, from the journals of its run directory."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from paceline.journal import (
    AlertRaised,
    AttemptFinished,
    AttemptStarted,
    CheckpointDeleted,
    CheckpointStored,
    Entry,
    JournalKey,
    MetricsReported,
    OperationCompleted,
    RunDirectory,
    RunMetadataSet,
    decode_value,
    encode_record,
)

_METRICS_START = encode_record(MetricsReported(time=0, group="", steps_completed=0, metrics={}))[
    : len(b'{"type":"metrics",')
]
_ALERT = b'"type":"alert"'
_NUM_ALERTS = 20
_INVALID_HP = "invalid_hp"


class MetricsRow(NamedTuple):
    """One report as it stands in a journal; later rows of the same step add to it.

    `is_superseded` tells that a later attempt went back to an earlier step.
    """

    attempt: int
    steps_completed: int
    metrics: dict[str, Any]
    is_superseded: bool


@dataclass(slots=True, kw_only=True)
class History:
    """A summary of all chief's journals of a run; superseded rows are left out.

    Attributes:
        num_attempts: The number of the next attempt.
        last_steps: The last step of each metric group.
        checkpoints: The checkpoints that were stored and not deleted by the run, oldest first.
        completed_length: The length of the last completed search operation, or 0.
        metadata: What the run was last said to be, by `set_metadata`; None if nothing was.
        restart_causes: What ended workers that were started again, oldest first.
        finished: How the last attempt ended, or None if it did not say. Any rank can end it for
            all by invalid hyperparameters.
    """

    num_attempts: int = 0
    last_steps: dict[str, int] = field(default_factory=dict)
    checkpoints: list[CheckpointStored] = field(default_factory=list)
    completed_length: int = 0
    metadata: dict[str, Any] | None = None
    restart_causes: list[str] = field(default_factory=list)
    finished: AttemptFinished | None = None


def read_history(run: RunDirectory) -> History:
    """Read all journals that the chiefs of a run wrote."""
    history = History()
    stored: dict[str, CheckpointStored] = {}
    for key, last_step in _standing_journals(run):
        history.num_attempts = key.attempt + 1
        history.finished = None
        for entry in run.reader(key):
            record = entry.decode()
            if isinstance(record, MetricsReported):
                step = record.steps_completed
                if history.last_steps.get(record.group, -1) < step <= last_step:
                    history.last_steps[record.group] = step
            elif isinstance(record, CheckpointStored):
                stored[record.uuid] = record
            elif isinstance(record, CheckpointDeleted):
                stored.pop(record.uuid, None)
            elif isinstance(record, OperationCompleted):
                history.completed_length = max(history.completed_length, record.length)
            elif isinstance(record, AttemptStarted):
                history.restart_causes.extend(record.restart_causes)
            elif isinstance(record, RunMetadataSet):
                history.metadata = record.metadata
            elif isinstance(record, AttemptFinished):
                history.finished = record
    history.checkpoints = list(stored.values())
    finished = history.finished
    if history.num_attempts and (
        finished is None
        or finished.outcome == "error"
        or (finished.outcome == _INVALID_HP and finished.error is None)
    ):
        history.finished = _refusal_of_attempt(run, history.num_attempts - 1) or finished
    return history


def read_checkpoints(run: RunDirectory) -> list[CheckpointStored]:
    """Return the checkpoints that a run has stored and not deleted, oldest first."""
    return read_history(run).checkpoints


def read_metrics(
    run: RunDirectory, group: str | None = None, *, rank: int = 0
) -> Iterator[MetricsRow]:
    """Yield the metrics of one group, or of all, that a rank has reported, in order of writing.

    Args:
        run: The run directory; it may still be written to.
        group: The metric group, such as "training", or "training_rank_2" for rank 2.
        rank: Who has reported them.
    """
    for key, last_step in _standing_journals(run, rank):
        for record in _metrics_records(run, key):
            if group is None or record.group == group:
                yield MetricsRow(
                    key.attempt,
                    record.steps_completed,
                    decode_value(record.metrics),
                    record.steps_completed > last_step,
                )


def read_alerts(run: RunDirectory) -> list[AlertRaised]:
    """Return the newest alerts of a run, from all ranks, oldest first; 20 at most."""
    alerts = [
        record
        for key in run.journal_keys()
        for entry in run.reader(key)
        if _ALERT in entry.payload and isinstance(record := entry.decode(), AlertRaised)
    ]
    return sorted(alerts, key=lambda alert: alert.time)[-_NUM_ALERTS:]


def last_steps(run: RunDirectory, rank: int) -> dict[str, int]:
    """Return the last step of each metric group that a rank has reported and that stands."""
    found: dict[str, int] = {}
    for key, last_step in _standing_journals(run, rank):
        for record in _metrics_records(run, key):
            if found.get(record.group, -1) < record.steps_completed <= last_step:
                found[record.group] = record.steps_completed
    return found


def standing_metrics(
    run: RunDirectory, group: str, steps_completed: int, rank: int
) -> dict[str, Any]:
    """Return what a rank has reported for a group and step, merged, in its encoded form."""
    merged: dict[str, Any] = {}
    for key, last_step in _standing_journals(run, rank):
        if steps_completed <= last_step:
            for record in _metrics_records(run, key):
                if record.steps_completed == steps_completed and record.group == group:
                    merged.update(record.metrics)
    return merged


def _standing_journals(run: RunDirectory, rank: int = 0) -> list[tuple[JournalKey, float]]:
    """Return a rank's journals, each with the last step at which its rows stand."""
    standing: list[tuple[JournalKey, float]] = []
    last_step = inf
    for key in reversed([key for key in run.journal_keys() if key.rank == rank]):
        standing.append((key, last_step))
        last_step = min(last_step, _first_step_of_attempt(run, key))
    return standing[::-1]


def _refusal_of_attempt(run: RunDirectory, attempt: int) -> AttemptFinished | None:
    """Return the end of a rank that found the hyperparameters of an attempt invalid."""
    found: AttemptFinished | None = None
    for key in run.journal_keys():
        if key.attempt == attempt and key.rank != 0:
            for entry in run.reader(key):
                record = entry.decode()
                if isinstance(record, AttemptFinished) and record.outcome == _INVALID_HP:
                    # Those that only heard of it do not know why.
                    found = record if found is None or found.error is None else found
    return found


def _first_step_of_attempt(run: RunDirectory, key: JournalKey) -> float:
    """Return the step from which a journal's attempt went on."""
    for entry in run.reader(key).read(1):
        record = entry.decode()
        if isinstance(record, AttemptStarted):
            return record.steps_completed
    # A journal that was cut off at its very start has reported nothing and replaces nothing.
    return inf


def _metrics_records(run: RunDirectory, key: JournalKey) -> Iterator[MetricsReported]:
    for entry in run.reader(key):
        if _is_metrics(entry):
            record = entry.decode()
            assert isinstance(record, MetricsReported)
            yield record


def _is_metrics(entry: Entry) -> bool:
    return entry.payload.startswith(_METRICS_START)
