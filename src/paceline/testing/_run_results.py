"""Facts of one run, read from its run directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core import RUNS_DIRECTORY, read_metrics
from paceline.journal import (
    AttemptFinished,
    AttemptStarted,
    CheckpointDeleted,
    CheckpointFilesDeleted,
    CheckpointStored,
    MetricsReported,
    RunDirectory,
)
from paceline.testing._errors import NotResumableError

# What tells of time, which no two runs share.
_TIMING_GROUPS = frozenset({"profiling", "system"})


@dataclass(slots=True, kw_only=True)
class RunAttempt:
    """One attempt as its chief's journal tells it; `outcome` is None if it did not say its end."""

    start_step: int = 0
    resumed_from: str | None = None
    checkpoints: list[CheckpointStored] = field(default_factory=list)
    reported_steps: list[int] = field(default_factory=list)
    outcome: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run that has ended.

    Attributes:
        path: The run directory.
        attempts: Its attempts, in order.
        groups: The metric groups that are compared.
        deleted: The UUIDs of the checkpoints that the script deleted again.
        points: The fault points that it reached.
        threads: The number of torch's threads by rank.
    """

    path: Path
    attempts: list[RunAttempt]
    groups: frozenset[str]
    deleted: frozenset[str]
    points: frozenset[str] = frozenset()
    threads: Mapping[int, int] = field(default_factory=dict)

    @property
    def outcome(self) -> str | None:
        """How the last attempt ended."""
        return self.attempts[-1].outcome if self.attempts else None

    @property
    def final_checkpoint(self) -> CheckpointStored | None:
        """The last checkpoint that was stored and kept."""
        kept = [
            stored
            for attempt in self.attempts
            for stored in attempt.checkpoints
            if stored.uuid not in self.deleted
        ]
        return kept[-1] if kept else None

    @property
    def checkpoint_steps(self) -> list[int]:
        """The steps of the checkpoints, as they were stored."""
        return [one.steps_completed for attempt in self.attempts for one in attempt.checkpoints]

    @property
    def reported_steps(self) -> list[int]:
        """The step of each report of metrics, in order."""
        return [step for attempt in self.attempts for step in attempt.reported_steps]

    @property
    def steps_completed(self) -> int:
        """The last step that was reported or stored."""
        return max([*self.checkpoint_steps, *self.reported_steps], default=0)

    def metrics(self, group: str, *, first_attempt: bool = False) -> dict[int, dict[str, Any]]:
        """Return a group's metrics by step.

        Args:
            group: The metric group.
            first_attempt: Return all that the first attempt reported, instead of what stands in
                the end.
        """
        rows: dict[int, dict[str, Any]] = {}
        for row in read_metrics(RunDirectory(self.path), group):
            if row.attempt == 0 if first_attempt else not row.is_superseded:
                rows.setdefault(row.steps_completed, {}).update(row.metrics)
        return rows


def find_run(directory: Path) -> Path | None:
    """Return the run directory of the run that a script made in `directory`, None without any.

    Raises:
        NotResumableError: There are several runs.
    """
    paths = [path.parent for path in (directory / RUNS_DIRECTORY).glob("*/run.json")]
    if len(paths) > 1:
        raise NotResumableError(
            f"The script must make one run, but made {len(paths)}:"
            f" {', '.join(sorted(path.name for path in paths))}. Hint: verify a script that calls"
            " `init` once."
        )
    return paths[0] if paths else None


def read_run_facts(
    path: Path, points: frozenset[str] = frozenset(), threads: Mapping[int, int] | None = None
) -> RunFacts:
    """Read all journals of a run's chief."""
    run = RunDirectory.open(path)
    attempts: dict[int, RunAttempt] = {}
    groups: set[str] = set()
    deleted: set[str] = set()
    for key in run.journal_keys():
        if key.rank:
            continue
        attempt = attempts.setdefault(key.attempt, RunAttempt())
        for entry in run.reader(key):
            record = entry.decode()
            _take_in(attempt, record)
            if isinstance(record, MetricsReported):
                groups.add(record.group)
            elif isinstance(record, (CheckpointDeleted, CheckpointFilesDeleted)):
                deleted.add(record.uuid)
    return RunFacts(
        path=path,
        attempts=[attempts[number] for number in sorted(attempts)],
        groups=frozenset(groups - _TIMING_GROUPS),
        deleted=frozenset(deleted),
        points=points,
        threads=threads or {},
    )


def _take_in(attempt: RunAttempt, record: object) -> None:
    if isinstance(record, AttemptStarted):
        attempt.start_step, attempt.resumed_from = record.steps_completed, record.resumed_from
    elif isinstance(record, CheckpointStored):
        attempt.checkpoints.append(record)
    elif isinstance(record, MetricsReported):
        attempt.reported_steps.append(record.steps_completed)
    elif isinstance(record, AttemptFinished):
        attempt.outcome = record.outcome
