"""Reconciler: compares the wanted state in the database with running attempts, and acts."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from paceline import faults
from paceline._cluster.master.executors import AttemptStatus, Executor, Machines
from paceline._cluster.master.experiments.attempt_runners import (
    AttemptRunner,
    RunnerWatch,
    end_runner,
    give_back_node,
    runners_of_attempt,
)
from paceline._cluster.master.experiments.attempts import (
    LaunchSources,
    Leases,
    build_launch,
    live_attempts,
)
from paceline._cluster.master.experiments.checkpoints import usable_checkpoint
from paceline._cluster.master.experiments.failure_causes import start_delay_after
from paceline._cluster.master.experiments.scheduler_input import Cluster, read_cluster
from paceline._cluster.master.experiments.state_decisions import MAX_SHORTAGES
from paceline._cluster.master.experiments.state_writer import (
    StateChanges,
    experiments_without_live_trials,
)
from paceline._cluster.master.experiments.storage_calls import StoragePendingError
from paceline._cluster.master.scheduling.pool_policies import QuotaUse
from paceline._cluster.master.scheduling.pools import PolicyName, PoolNeed, SlotAssignment, needs_of
from paceline._cluster.master.scheduling.schedule import Schedule, decide, schedule
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import Member, config_of, stored_members
from paceline._cluster.master.store.database import Database, DatabaseLostError, Transaction
from paceline._cluster.master.store.row_ids_and_counts import insert_row
from paceline._cluster.messages.master_models import RUNNER_GRACE_S
from paceline._cluster.messages.runner_messages import AttemptEnd
from paceline._cluster.messages.states import AttemptState, ErrorKind, ExitReason
from paceline._cluster.runner.attempt_preparation import judge_start

logger = logging.getLogger(__name__)

faults.register("master.attempt.created")


def create_attempt(
    changes: StateChanges, transaction: Transaction, assignment: SlotAssignment
) -> None:
    """Create an attempt for a waiting trial on its assigned slots."""
    connection, trial_id = transaction.connection, assignment.trial_id
    trial = changes.trial(connection, trial_id)
    number = trial.num_attempts + 1
    latest = usable_checkpoint(changes, transaction, trial_id, number)
    if latest is None and trial.source_checkpoint is not None:
        # A warm start brings weights, not steps: the trial counts from its own beginning.
        latest = (trial.source_checkpoint, 0)
    uuid, steps = latest or (None, 0)
    node_id = assignment.node_id or None
    insert_row(
        connection,
        tables.attempts,
        trial_id=trial_id,
        experiment_id=trial.experiment_id,
        number=number,
        state=AttemptState.PENDING.value,
        slots=list(assignment.slots),
        node_id=node_id,
        node_name=changes.machines.place(node_id).name if node_id else None,
        members=_attempt_members(changes.machines, assignment),
        num_gpus=_num_gpus(changes.machines, assignment),
        created_at=time.time(),
        resumed_from=uuid,
        resumed_steps=steps,
        is_filler=assignment.is_filler,
    )
    changes.update_trial(transaction, trial_id, num_attempts=number)
    # The directory of the attempt must not outlive its row: after a power cut, another attempt
    # would get the same number and find it.
    transaction.force()
    faults.reach("master.attempt.created")


def _num_gpus(machines: Machines, assignment: SlotAssignment) -> int:
    """Return how many slots of an attempt are GPUs."""
    parts = [(assignment.node_id, assignment.slots), *assignment.others]
    devices = [machines.place(node_id).devices[slot] for node_id, slots in parts for slot in slots]
    return sum(device != "cpu" for device in devices)


def _attempt_members(machines: Machines, assignment: SlotAssignment) -> Any:
    parts = [(assignment.node_id, assignment.slots), *assignment.others]
    if len(parts) == 1:
        return None
    return stored_members(
        [
            Member(node_id=node_id, name=machines.place(node_id).name, slots=list(slots))
            for node_id, slots in parts
        ]
    )


faults.register("master.attempt.spawned")

_TICK_S = 1.0
_MAX_EVENTS = 200_000
_PRUNE_INTERVAL_S = 600.0


class Reconciler:
    """Thread to start, watch and end attempts; woken by changes and once a second."""

    def __init__(
        self,
        database: Database,
        changes: StateChanges,
        executor: Executor,
        sources: LaunchSources,
        leases: Leases,
        upkeep: Sequence[Callable[[Transaction], None]] = (),
        clean_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._changes = changes
        self._executor = executor
        self._sources = sources
        self._upkeep = upkeep
        self._clean_up = clean_up
        self._wakeup = changes.wakeups.event()
        self._is_closing = False
        self._is_draining = False
        self._runners = RunnerWatch(database, changes, executor, leases)
        # How many runners each attempt was given that did not start it, and when the next may be.
        self._num_runners: dict[int, int] = {}
        self._next_runner: dict[int, float] = {}
        # Since when the nodes of attempts were waited for.
        self._waiting_since: dict[int, float] = {}
        self._next_prune = 0.0
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def cluster(self, connection: sa.Connection, now: float) -> Cluster:
        """Return the cluster: nodes with their states, holders of slots, pool settings."""
        return read_cluster(
            connection,
            self._changes.machines.slots(),
            now,
            returning=self._changes.machines.returning_slots(),
            failing=self._changes.failing_nodes.all(now),
        )

    def resting_nodes(self, connection: sa.Connection, now: float) -> dict[int, float]:
        """Return the nodes resting after failures of several trials, and their rest ends."""
        if not self._changes.failing_nodes.all(now):
            return {}
        return self.cluster(connection, now).failing_nodes

    def start(self) -> None:
        """Begin."""
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Ask for a pass soon; safe from any thread."""
        self._wakeup.set()

    def close(self) -> None:
        """Stop making passes; attempts continue."""
        self._is_closing = True
        self.wake()
        self._thread.join()
        self._executor.close()

    def drain(self, timeout_s: float) -> None:
        """Start no more attempts, let all checkpoint and exit, then kill the rest in the end.

        The trials stay active: they continue when a master starts on this home again. With a
        database that stores nothing more, nothing is changed, and the attempts continue without a
        master.
        """
        if self._database.failure is not None:
            return
        with self._database.read() as connection:
            # Remembered now: a runner outlives the end of its attempt by a moment.
            left = [
                runner.id
                for attempt in live_attempts(connection)
                for runner in runners_of_attempt(attempt)
            ]
        self._is_draining = True
        self.wake()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._has_attempts():
            time.sleep(0.05)
        self._database.write(self._kill_all).result()
        deadline = time.monotonic() + RUNNER_GRACE_S
        while time.monotonic() < deadline and (self._has_attempts() or self._any_alive(left)):
            time.sleep(0.05)

    def _any_alive(self, runners: list[int]) -> bool:
        """Return whether any runner is alive; a runner exits a moment after its last report."""
        return any(self._executor.status(id_) is AttemptStatus.ALIVE for id_ in runners)

    def _run(self) -> None:
        while not self._is_closing:
            self._wakeup.wait(_TICK_S)
            # Cleared before the steps: a change during them causes another pass.
            self._wakeup.clear()
            # Each by itself, so that one that fails does not hold up the others.
            for step in (
                self._make_pass,
                self._watch_attempts,
                self._clean_up,
                self._prune_events,
            ):
                try:
                    step()
                except DatabaseLostError:
                    # The database has reported the failure, and decides nothing more.
                    return
                except Exception:
                    logger.exception("A step of the reconciler failed; the next pass tries again.")
                    time.sleep(_TICK_S)

    def _make_pass(self) -> None:
        self._database.write(self._pass).result()

    # ---- one pass, in a transaction ------------------------------------------------------

    def _pass(self, transaction: Transaction) -> None:
        connection = transaction.connection
        for step in self._upkeep:
            step(transaction)
        for experiment_id in experiments_without_live_trials(connection):
            self._changes.end_experiment_if_done(transaction, experiment_id)
        if self._is_draining:
            for attempt in live_attempts(connection):
                self._changes.preempt(transaction, attempt, "the master is shutting down")
        else:
            self._schedule(transaction)

    def _schedule(self, transaction: Transaction) -> None:
        connection, now = transaction.connection, time.time()
        cluster = self.cluster(connection, now)
        self._clear_reserved(transaction, cluster, now)
        if cluster.is_full and not cluster.preempts:
            return
        waiting = (
            trial
            for trial in cluster.waiting_trials(connection)
            if trial.trial_id not in cluster.pausing_trials
        )
        found = schedule(waiting, cluster.holding, cluster.nodes, cluster.pools, cluster.sharing)
        self._preempt(transaction, found, cluster.policies)
        for assignment in found.assignments:
            create_attempt(self._changes, transaction, assignment)

    def _clear_reserved(self, transaction: Transaction, cluster: Cluster, now: float) -> None:
        """Ask attempts of others to leave nodes whose reservation has begun, as by a drain."""
        begun = {one.node_id: one for one in cluster.nodes if one.reserved_from <= now}
        leaving = {
            one.attempt_id
            for one in cluster.holding
            for node_id, _ in one.parts
            if node_id in begun and begun[node_id].is_closed_to(one.user) and not one.is_leaving
        }
        for attempt in live_attempts(transaction.connection) if leaving else ():
            if attempt.id in leaving:
                self._changes.preempt(transaction, attempt, "its node is reserved for others")

    def _preempt(
        self, transaction: Transaction, found: Schedule, policies: dict[int, PolicyName]
    ) -> None:
        """Ask attempts to release their slots for preferred trials."""
        if not found.preemptions:
            return
        live = {attempt.id: attempt for attempt in live_attempts(transaction.connection)}
        for one, trial in found.preemptions:
            why = "is more important"
            if policies[one.node_id] is PolicyName.FAIR_SHARE:
                why = "has less than its share of the slots"
            if one.is_filler:
                why = "came before it and has room now"
            reason = f"makes room for experiment {trial.experiment_id}, which {why}"
            self._changes.preempt(transaction, live[one.attempt_id], reason)

    def pool_needs(self) -> dict[str, PoolNeed]:
        """Return for each pool the present use for further nodes.

        Pools that need none are absent. For executors that start runners by need.
        """
        with self._database.read() as connection:
            cluster = self.cluster(connection, time.time())
            waiting = cluster.waiting_trials(connection)
            sharing, holding = cluster.sharing, cluster.holding
            results = decide(waiting, holding, cluster.nodes, cluster.pools, sharing)
            return needs_of(results, holding, QuotaUse(sharing, holding))

    def _kill_all(self, transaction: Transaction) -> None:
        for attempt in live_attempts(transaction.connection):
            if not attempt.should_kill:
                self._changes.change_attempt(transaction, attempt.id, should_kill=True)

    # ---- outside of transactions ---------------------------------------------------------

    def _has_attempts(self) -> bool:
        with self._database.read() as connection:
            return bool(live_attempts(connection))

    def _watch_attempts(self) -> None:
        with self._database.read() as connection:
            attempts = live_attempts(connection)
        runners = [runner for attempt in attempts for runner in runners_of_attempt(attempt)]
        for runner in runners:
            status = self._executor.status(runner.id)
            if status is AttemptStatus.NOT_STARTED:
                self._start(runner)
            elif status is AttemptStatus.GONE:
                # Leftover records and perhaps the exit lie in the runner's directory.
                self._runners.ship(runner.id)
            elif self._runners.look(runner):
                # Killed runner: the next pass ships its leftovers.
                self.wake()
        keep = {runner.id for runner in runners}
        self._runners.keep(keep)
        for runner_id in self._num_runners.keys() - keep:
            del self._num_runners[runner_id], self._next_runner[runner_id]
        self._executor.clean(keep={attempt.id for attempt in attempts})
        for attempt in attempts:
            self._give_back_if_late(attempt)

    def _give_back_if_late(self, attempt: sa.Row[Any]) -> None:
        """End an attempt if its nodes did not all start in time, to free its slots."""
        if attempt.members is None or attempt.meeting_port is not None:
            return
        # Clock of this process: downtime of the master must not make an attempt late.
        since = self._waiting_since.setdefault(attempt.id, time.monotonic())
        with self._database.read() as connection:
            experiment = StateChanges.experiment(connection, attempt.experiment_id)
            timeout_s = config_of(experiment).resources.start_timeout
        if time.monotonic() > since + timeout_s:
            self._database.write(
                lambda transaction: give_back_node(
                    self._changes, transaction, attempt.id, timeout_s
                )
            ).result()

    def _start(self, runner: AttemptRunner) -> None:
        """Start a runner, or end its attempt if unwanted or impossible to start."""
        end = None
        num_before = self._num_runners.get(runner.id, 0)
        if runner.should_kill:
            end = _unstarted(ExitReason.KILLED, "not started")
        elif num_before > MAX_SHORTAGES:
            end = _unstarted(ExitReason.START_FAILED, f"{num_before} runners ended before it began")
        elif time.monotonic() < self._next_runner.get(runner.id, 0.0):
            return
        else:
            try:
                with self._database.read() as connection:
                    launch = build_launch(
                        connection, self._sources, runner.attempt_id, runner.member
                    )
                self._num_runners[runner.id] = num_before + 1
                self._next_runner[runner.id] = time.monotonic() + start_delay_after(num_before + 1)
                self._executor.start(launch)
            except StoragePendingError:
                # The next pass asks again; nothing else waits for the storage.
                return
            except Exception as error:
                logger.exception("Attempt %d cannot be started.", runner.attempt_id)
                reason, kind = judge_start(error)
                end = _unstarted(reason, f"{type(error).__name__}: {error}", kind)
        faults.reach("master.attempt.spawned")
        if end is not None:
            ended = end
            self._database.write(
                lambda transaction: end_runner(
                    self._changes, transaction, runner.attempt_id, runner.member, ended
                )
            ).result()

    def _prune_events(self) -> None:
        """Keep the newest events; whoever is further behind reads the present state instead."""
        if time.monotonic() < self._next_prune:
            return
        self._next_prune = time.monotonic() + _PRUNE_INTERVAL_S
        events = tables.events

        def prune(transaction: Transaction) -> None:
            newest = (
                transaction.connection.execute(sa.select(sa.func.max(events.c.id))).scalar() or 0
            )
            transaction.connection.execute(
                sa.delete(events).where(events.c.id <= newest - _MAX_EVENTS)
            )

        self._database.write(prune).result()


def _unstarted(reason: ExitReason, detail: str, kind: ErrorKind | None = None) -> AttemptEnd:
    return AttemptEnd(
        reason=reason, code=None, signal=None, time=time.time(), detail=detail, kind=kind
    )
