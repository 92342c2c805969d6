"""Trials that hold slots without use or report nothing."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from paceline._base import journal_records as records
from paceline._cluster.master.experiments.attempts import live_attempts
from paceline._cluster.master.experiments.scheduler_input import read_pools
from paceline._cluster.master.scheduling.pools import IdleLimits
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.messages.runner_messages import DEFAULT_POOL
from paceline._cluster.messages.states import AttemptState

_REPORTS = (
    records.AlertRaised, records.CheckpointStored, records.MediaReported,
    records.OperationCompleted, records.ProgressReported, records.StatusReported,
)  # fmt: skip
# Metrics of the machine come from a thread that goes on while the training hangs.
_SYSTEM_GROUP = "system"
_LOOK_S = 1.0
_NONE = IdleLimits()


@dataclass(slots=True)
class _Activity:
    """When an attempt last reported, and last used its slots; by the monotonic clock."""

    began: float
    reported: float
    used: dict[int, float] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)


class Activities:
    """What is known of attempts at work since this master began; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[int, _Activity] = {}

    def note_records(self, attempt_id: int, reported: Iterable[records.AnyRecord]) -> None:
        """Record that an attempt reported, if any of its records is a report."""
        if any(_is_report(record) for record in reported):
            now = time.monotonic()
            self._find(attempt_id, now).reported = now

    def note_unused(self, attempt_id: int, member: int, unused_s: float) -> None:
        """Record for how long a member of an attempt has not used its slots, by its runner."""
        now = time.monotonic()
        found = self._find(attempt_id, now)
        # A claim: it cannot have been idle before this master knew the attempt.
        found.used[member] = max(now - unused_s, found.began)

    def idle(self, attempt_id: int) -> Iterator[tuple[str, float]]:
        """Yield in which ways an attempt is idle, and for how many seconds."""
        now = time.monotonic()
        found = self._find(attempt_id, now)
        yield "silent", now - found.reported
        if found.used:
            yield "unused", now - max(found.used.values())

    def told(self, attempt_id: int) -> set[str]:
        """Return the ways in which an attempt was told to be idle; the set may be changed."""
        return self._find(attempt_id, time.monotonic()).told

    def keep(self, attempt_ids: set[int]) -> None:
        """Forget all other attempts."""
        with self._lock:
            self._of = {id_: one for id_, one in self._of.items() if id_ in attempt_ids}

    def _find(self, attempt_id: int, now: float) -> _Activity:
        with self._lock:
            return self._of.setdefault(attempt_id, _Activity(began=now, reported=now))


def _is_report(record: records.AnyRecord) -> bool:
    if isinstance(record, records.MetricsReported):
        return not record.group.startswith(_SYSTEM_GROUP)
    return isinstance(record, _REPORTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleDecision:
    """What is due for an attempt: ways in which it is idle, new ones of these, and a pause."""

    told: frozenset[str]
    new: dict[str, float]
    pauses: bool


def judge_idle(
    idle: Iterable[tuple[str, float]], told: set[str], limits: Sequence[IdleLimits]
) -> IdleDecision:
    """Return what is due; of several limits, each holds for itself, so the earliest counts.

    An attempt is never paused before it was told, in an earlier look, to be idle in the same way.
    """
    over, new, pauses = set(), {}, False
    for way, idle_s in idle:
        for one in limits:
            limit_s = one.silent_after_s if way == "silent" else one.unused_after_s
            if limit_s is None or idle_s < limit_s:
                continue
            over.add(way)
            if way not in told:
                new[way] = idle_s
            elif one.pause_after_s is not None and idle_s >= limit_s + one.pause_after_s:
                pauses = True
    return IdleDecision(told=frozenset(over), new=new, pauses=pauses)


_DOES = {"silent": "reports nothing", "unused": "holds its slots without use"}


class IdleTrials:
    """Tells of idle trials and pauses their experiments: a step of each pass.

    Args:
        activities: What is known of attempts.
        alert: Adds an alert to a trial.
        pause: Pauses an experiment.
    """

    def __init__(
        self,
        activities: Activities,
        alert: Callable[[Transaction, sa.Row[Any], str, str], None],
        pause: Callable[[Transaction, int], None],
    ) -> None:
        self._activities, self._alert, self._pause = activities, alert, pause
        self._next = 0.0

    def __call__(self, transaction: Transaction) -> None:
        """Look at the attempts at work, once a second at most."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LOOK_S
        connection = transaction.connection
        running = [
            one for one in live_attempts(connection) if one.state == AttemptState.RUNNING.value
        ]
        self._activities.keep({one.id for one in running})
        limits = _limits(connection, running)
        for attempt in running:
            if attempt.preempt_reason is None and limits[attempt.experiment_id]:
                self._look(transaction, attempt, limits[attempt.experiment_id])

    def _look(
        self, transaction: Transaction, attempt: sa.Row[Any], limits: Sequence[IdleLimits]
    ) -> None:
        told = self._activities.told(attempt.id)
        found = judge_idle(self._activities.idle(attempt.id), told, limits)
        will_pause = any(one.pause_after_s is not None for one in limits)
        for way, idle_s in found.new.items():
            next_step = "If it stays so, its experiment is paused." if will_pause else ""
            text = f"For {idle_s:.0f} s now. {next_step}".strip()
            self._alert(transaction, attempt, f"The trial {_DOES[way]}", text)
        told.clear()
        told |= found.told
        if found.pauses:
            ways = " and ".join(_DOES[way] for way in sorted(found.told))
            hint = (
                f"`paceline e activate {attempt.experiment_id}` continues it from its checkpoint."
            )
            title = f"The experiment is paused, as trial {attempt.trial_id} {ways}"
            self._alert(transaction, attempt, title, f"Hint: {hint}")
            self._pause(transaction, attempt.experiment_id)


def _limits(
    connection: sa.Connection, running: Sequence[sa.Row[Any]]
) -> defaultdict[int, list[IdleLimits]]:
    """Return the limits of experiments and of their pools; no entries without any."""
    experiments, pools = tables.experiments.c, read_pools(connection)
    found: defaultdict[int, list[IdleLimits]] = defaultdict(list)
    wanted = {one.experiment_id for one in running}
    # Only these parts of the configs are decoded, as this is asked each second.
    idle, pool = experiments.config["idle"], experiments.config[("resources", "pool")].as_string()
    query = sa.select(experiments.id, idle.label("idle"), pool.label("pool"))
    for row in connection.execute(query.where(experiments.id.in_(wanted))) if wanted else ():
        own = IdleLimits(**{f"{name}_s": value for name, value in (row.idle or {}).items()})
        settings = pools.get(row.pool or DEFAULT_POOL)
        found[row.id] = [one for one in (own, settings.idle if settings else _NONE) if one != _NONE]
    return found
