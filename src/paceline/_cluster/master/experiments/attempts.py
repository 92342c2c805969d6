"""Attempts: rows, leases, control, launch data."""

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline._base.journal_records import encode_float
from paceline._base.process_and_network import LOOPBACK
from paceline._base.run_directory import JournalKey, RunInfo, TrialInfo
from paceline._cluster.master.authentication import AttemptTokens
from paceline._cluster.master.executors import Launch, Machines, Place
from paceline._cluster.master.experiments.state_decisions import NotFoundError, RefusedError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.experiments.storage_calls import StorageMarks
from paceline._cluster.master.home_directory import SecretStore
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import (
    config_of,
    num_slots_of,
    read_members,
    slots_by_node,
)
from paceline._cluster.master.store.row_ids_and_counts import row_of
from paceline._cluster.messages.runner_messages import AttemptControl, AttemptSpec
from paceline._cluster.messages.states import LIVE_ATTEMPTS, AttemptState, TrialState
from paceline.config._entrypoint_command import build_command
from paceline.config._environment_and_secrets import Environment, hide_secrets
from paceline.config._experiment_config import ExperimentConfig

DEFAULT_LEASE_S = 60.0
LEAST_LEASE_S = 3.0

_TICK_S = 0.5
# A runner asks for orders at least so often within one lease.
_RENEWALS = 3


@dataclass(slots=True)
class _Lease:
    silent_s: float = 0.0
    seen_version: int = 0


class Leases:
    """Leases of attempts with a runner; safe to use from any thread.

    A runner renews its lease by each request. The time that counts is the time in which this
    process could hear: it is measured on the event loop that takes the requests, so that no runner
    is late because the master was stopped, suspended or busy. Leases are not stored: a master that
    starts gives each runner a new one. The number of an attempt is its fencing token, as it is
    unique in the trial and ended attempts are refused.

    Args:
        length_s: How long a runner may be silent, in seconds.

    Raises:
        ValueError: `length_s` is below the least.
    """

    def __init__(self, length_s: float = DEFAULT_LEASE_S) -> None:
        if not length_s >= LEAST_LEASE_S:
            raise ValueError(
                f"`runner_timeout` must be at least {LEAST_LEASE_S:g} seconds, but got"
                f" {length_s!r}."
            )
        self.length_s = length_s
        self._lock = threading.Lock()
        self._leases: dict[int, _Lease] = {}
        self._last = 0.0

    @property
    def longest_wait_s(self) -> float:
        """Longest wait of a runner's request for news; the next request then renews in time."""
        return self.length_s / _RENEWALS

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start measuring time on an event loop; without a loop no lease ends."""
        self._last = time.monotonic()
        loop.call_later(_TICK_S, self._tick, loop)

    def begin(self, attempt_id: int) -> None:
        """Start a lease for an attempt unless present."""
        with self._lock:
            self._leases.setdefault(attempt_id, _Lease())

    def renew(self, attempt_id: int, seen_version: int = 0) -> None:
        """Record a sign of life of a runner, and the control version seen by this runner."""
        with self._lock:
            if lease := self._leases.get(attempt_id):
                lease.silent_s = 0.0
                # Requests may arrive out of order: the seen version never decreases.
                lease.seen_version = max(lease.seen_version, seen_version)

    def is_over(self, attempt_id: int) -> bool:
        """Return whether a runner was silent for too long."""
        with self._lock:
            lease = self._leases.get(attempt_id)
            return lease is not None and lease.silent_s > self.length_s

    def has_seen(self, attempt_id: int, version: int) -> bool:
        """Return whether a runner has seen a control version or a later version."""
        with self._lock:
            lease = self._leases.get(attempt_id)
            return lease is not None and lease.seen_version >= version

    def end(self, attempt_id: int) -> None:
        """Remove the lease of an attempt without a runner."""
        with self._lock:
            self._leases.pop(attempt_id, None)

    def advance(self, elapsed_s: float) -> None:
        """Add silent time to all leases."""
        with self._lock:
            for lease in self._leases.values():
                lease.silent_s += elapsed_s

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        # After a pause, the requests that came meanwhile are taken before the next tick.
        self.advance(min(now - self._last, 2 * _TICK_S))
        self._last = now
        with suppress(RuntimeError):  # the loop was closed
            loop.call_later(_TICK_S, self._tick, loop)


_ATTEMPT = sa.select(tables.attempts).where(tables.attempts.c.id == sa.bindparam("wanted"))


def read_attempt(connection: sa.Connection, attempt_id: int) -> sa.Row[Any]:
    """Return an attempt's row.

    Raises:
        NotFoundError: There is none.
    """
    row = connection.execute(_ATTEMPT, {"wanted": attempt_id}).first()
    if row is None:
        raise NotFoundError(f"There is no attempt {attempt_id}.")
    return row


def live_attempts(connection: sa.Connection) -> list[sa.Row[Any]]:
    """Return the attempts to look after; attempts of unmanaged experiments have no runner."""
    attempts, experiments = tables.attempts, tables.experiments
    # Asked of each attempt that is live: a join would begin with the experiments, which are many.
    is_unmanaged = (
        sa.select(experiments.c.id)
        .where(experiments.c.id == attempts.c.experiment_id, experiments.c.external_id.is_not(None))
        .exists()
    )
    query = sa.select(attempts).where(attempts.c.state.in_(LIVE_ATTEMPTS), ~is_unmanaged)
    return list(connection.execute(query.order_by(attempts.c.id)).all())


def check_not_over(attempt: sa.Row[Any]) -> None:
    """Refuse requests for an ended attempt; its slots may already belong to another attempt.

    Raises:
        RefusedError: It has ended.
    """
    if attempt.state == AttemptState.ENDED.value:
        raise RefusedError(
            "attempt_over",
            f"Attempt {attempt.id} has ended: its runner reports and starts nothing any more.",
        )


_KILLED = (TrialState.STOPPING_KILLED.value, TrialState.STOPPING_ERROR.value)
_SHUTDOWN_GRACE_S = 5.0


def read_control_of(connection: sa.Connection, attempt_id: int) -> AttemptControl:
    """Return the master's control message for an attempt: preemption, kill, operations.

    Raises:
        NotFoundError: There is no such attempt.
        RefusedError: It has ended.
    """
    attempt = read_attempt(connection, attempt_id)
    check_not_over(attempt)
    trial = StateChanges.trial(connection, attempt.trial_id)
    experiment = StateChanges.experiment(connection, attempt.experiment_id)
    config = config_of(experiment)
    timeout_s = config.preemption_timeout
    if trial.state == TrialState.STOPPING_COMPLETED.value:
        timeout_s = config.searcher.stop_timeout
    best = experiment.best_metric
    return AttemptControl(
        version=attempt.control_version,
        should_preempt=attempt.preempt_reason is not None,
        preempt_timeout_s=timeout_s,
        should_kill=attempt.should_kill,
        # A user who kills means now; a master that shuts down wants the trial to resume later.
        kill_grace_s=0.0 if trial.state in _KILLED else _SHUTDOWN_GRACE_S,
        operation_length=trial.target_length,
        operations_closed=trial.operations_closed,
        best_validation=None if best is None else encode_float(best),
        meeting_port=attempt.meeting_port,
        sends_checkpoints=any(one.sends_checkpoints for one in read_members(attempt)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSources:
    """Sources of the launch data of attempts, besides the database.

    Attributes:
        cluster_id: The identity of the master's home.
        default_storage: Where checkpoints go unless the configuration says otherwise.
        machines: Where attempts run.
        tokens: The tokens of attempts.
        secrets: The secrets of experiments.
        marks: What shows nodes whether they share a storage directory.
        lease_s: How long a runner may be silent, in seconds.
    """

    cluster_id: str
    default_storage: str
    machines: Machines
    tokens: AttemptTokens
    secrets: SecretStore
    marks: StorageMarks
    lease_s: float = DEFAULT_LEASE_S


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlacedAttempt:
    """Attempt with its trial, experiment and placement: `parts` are places with slots.

    `member` is the part that is to be started. `memory` is as in `AttemptSpec`, `newest_report` as
    in `RunInfo`.
    """

    attempt: sa.Row[Any]
    trial: sa.Row[Any]
    experiment: sa.Row[Any]
    config: ExperimentConfig
    parts: list[tuple[Place, list[int]]]
    member: int
    storage: str
    memory: str
    newest_report: tuple[str, int] | None


def build_launch(
    connection: sa.Connection, sources: LaunchSources, attempt_id: int, member: int = 0
) -> Launch:
    """Return the launch data of an attempt for the node of a member.

    Raises:
        StoragePendingError: A storage directory has not been marked yet; ask again.
    """
    placed = _read_placed(connection, sources, attempt_id, member)
    return Launch(
        spec=_spec_of(connection, sources, placed),
        info=_run_info_of(sources.cluster_id, placed),
        secrets=sources.secrets.of(placed.experiment.id),
    )


def _read_placed(
    connection: sa.Connection, sources: LaunchSources, attempt_id: int, member: int
) -> _PlacedAttempt:
    attempts, trials, experiments = tables.attempts, tables.trials, tables.experiments
    attempt = row_of(connection, attempts, attempt_id)
    trial = row_of(connection, trials, attempt.trial_id)
    experiment = row_of(connection, experiments, trial.experiment_id)
    config, place = config_of(experiment), sources.machines.place
    memories, newest_report = _kept_memories(connection, attempt)
    return _PlacedAttempt(
        attempt=attempt,
        trial=trial,
        experiment=experiment,
        config=config,
        parts=[(place(node_id), slots) for node_id, slots in slots_by_node(attempt).items()],
        member=member,
        storage=checkpoint_root(config) or sources.default_storage,
        memory=memories[member],
        newest_report=newest_report,
    )


def _spec_of(
    connection: sa.Connection, sources: LaunchSources, placed: _PlacedAttempt
) -> AttemptSpec:
    attempt, trial, config = placed.attempt, placed.trial, placed.config
    environment, parts, member = config.environment, placed.parts, placed.member
    place, slots = parts[member]
    # A master with more slots may have placed the attempt and died before it started it.
    devices = [place.devices[slot] for slot in slots if slot < len(place.devices)]
    num_threads = place.num_cores * len(devices) // max(1, len(place.devices))
    python = environment.python or place.python
    fewest = config.resources.fewest_slots
    return AttemptSpec(
        attempt_id=attempt.id,
        trial_id=trial.id,
        number=attempt.number,
        entrypoint=build_command(
            config.entrypoint,
            hparams=trial.hparams,
            # The one of the environment that the runner makes comes first on PATH then.
            python="python3" if environment.uv else python,
            num_slots=num_slots_of(attempt),
            prefix=environment.prefix,
        ),
        python=python,
        variables=_variables(environment),
        working_dir=environment.working_dir,
        context_digest=placed.experiment.context_digest,
        slot_ids=slots,
        num_threads=max(1, num_threads),
        gpu_ids=[device for device in devices if device != "cpu"],
        keep_directory=config.debug,
        control=read_control_of(connection, attempt.id),
        lease_s=sources.lease_s,
        # Mark with the member number: two nodes of an attempt can share a machine.
        mark=f"{sources.cluster_id}.{attempt.id}" + (f".{member}" if len(parts) > 1 else ""),
        token=sources.tokens.token_of(attempt.id),
        experiment_id=placed.experiment.id,
        secret_names=sorted(environment.secrets),
        member=member,
        num_members=len(parts),
        num_shards=most if (most := config.resources.most_slots) > fewest else None,
        storage_mark=None if attempt.node_id is None else sources.marks.mark(placed.storage),
        memory=placed.memory,
        has_prefix=bool(environment.prefix),
        uses_uv=environment.uv,
        interactive="" if config.interactive is None else config.interactive.kind,
        idle_timeout_s=0.0 if config.interactive is None else config.interactive.idle_timeout,
    )


def _run_info_of(cluster_id: str, placed: _PlacedAttempt) -> RunInfo:
    attempt, trial, experiment = placed.attempt, placed.trial, placed.experiment
    parts, member = placed.parts, placed.member
    place, slots = parts[member]
    return RunInfo(
        run_id=f"trial-{trial.id}",
        name=experiment.name,
        created=attempt.created_at,
        attempt=attempt.number,
        trial=TrialInfo(
            trial_id=trial.id,
            experiment_id=experiment.id,
            trial_seed=trial.seed,
            hparams=trial.hparams,
            # The trial gets the values as variables; its directory may be copied and shown.
            config=hide_secrets(experiment.config),
        ),
        latest_checkpoint=attempt.resumed_from,
        steps_completed=attempt.resumed_steps,
        checkpoint_storage=placed.storage,
        cluster_id=cluster_id,
        agent_id=place.name,
        slot_ids=slots,
        container_addrs=[LOOPBACK] if len(parts) == 1 else [one.address for one, _ in parts],
        container_rank=member,
        container_slot_counts=[] if len(parts) == 1 else [len(held) for _, held in parts],
        judged_metrics=placed.config.searcher.judged_metrics,
        metadata=trial.metadata,
        newest_report=placed.newest_report,
    )


def has_kept_memory(connection: sa.Connection, attempt: sa.Row[Any]) -> bool:
    """Return whether the attempt before has left states in memory on a node of this one."""
    return any(_kept_memories(connection, attempt)[0])


def _kept_memories(
    connection: sa.Connection, attempt: sa.Row[Any]
) -> tuple[list[str], tuple[str, int] | None]:
    """Return of each node the key of the states in memory left by the attempt before, or "".

    Rank 0 makes the reports. If its node is lost, so may be some of them: the second value is the
    newest one that is here, as in `RunInfo.newest_report`.
    """
    attempts, marks = tables.attempts.c, tables.journal_marks.c
    query = sa.select(tables.attempts).where(
        attempts.trial_id == attempt.trial_id, attempts.number == attempt.number - 1
    )
    before, members = connection.execute(query).first(), read_members(attempt)
    nothing = [""] * (len(members) or 1), None
    if before is None or bool(before.members) != bool(members):
        return nothing
    if not members:
        return [(before.exit or {}).get("memory", "")], None
    others = read_members(before)
    ends = {one.node_id: one.exit.memory for one in others if one.exit is not None}
    keys = [ends.get(one.node_id, "") for one in members]
    first = others[0]
    if ends.get(first.node_id):
        return keys, None
    query = sa.select(marks.generation, marks.sequence).where(
        marks.attempt_id == before.id, marks.rank == 0
    )
    newest = connection.execute(query.order_by(marks.generation.desc())).first()
    if not first.is_lost or newest is None:
        return nothing
    journal = JournalKey(attempt=before.number, generation=newest.generation, rank=0)
    return keys, (journal.directory_name, newest.sequence)


def _variables(environment: Environment) -> dict[str, str]:
    found = {} if environment.warm else {"PACELINE_WARM": "0"}
    if environment.uv and environment.python is not None:
        found["UV_PYTHON"] = environment.python
    return found | environment.variables


def checkpoint_root(config: ExperimentConfig) -> str | None:
    """Return the configured directory or URL of the checkpoint storage, or None."""
    return None if config.checkpoint_storage is None else config.checkpoint_storage.root
