"""End of an attempt: recording, retries and restarts, and the resulting trial state."""

import errno
import signal
import time
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline import faults
from paceline._cluster.master.experiments.attempts import read_attempt
from paceline._cluster.master.experiments.failure_causes import (
    end_cause,
    is_failed_start,
    is_lost_runner,
    is_not_formed,
    is_store_failure,
    is_transient_start,
    log_hit,
    num_in_a_row,
)
from paceline._cluster.master.experiments.scheduler_input import read_cluster
from paceline._cluster.master.experiments.state_decisions import (
    INVALID_HP,
    MAX_FAILED_STARTS,
    MAX_NOT_FORMED,
    MAX_RUNNERS_LOST,
    MAX_SHORTAGES,
    MAX_STORE_FAILURES,
    AttemptFacts,
    ExitDecision,
    judge_exit,
)
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.searches.best_values import end_unmeasured
from paceline._cluster.master.searches.search_operations import (
    describe_missing_metric,
    describe_nan_metric,
    describe_untrained,
    is_single,
    others_have_reported,
)
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of, num_slots_of
from paceline._cluster.master.store.attempt_times import attempt_spent
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.quotas import note_use
from paceline._cluster.master.store.row_ids_and_counts import update_attempt
from paceline._cluster.messages.runner_messages import (
    DEFAULT_POOL,
    LOCAL_NAME,
    LOCAL_NODE,
    AttemptEnd,
)
from paceline._cluster.messages.states import (
    AttemptState,
    ErrorKind,
    ExitReason,
    TrialState,
    end_kind,
)
from paceline.config._experiment_config import ExperimentConfig
from paceline.search._search import Search
from paceline.search._search_messages import ExitReason as SearchExit

faults.register("master.attempt.ended")

NO_RUNNER = "the runner died"
_FAILED_OUTCOME = "error"
# A shell reports the end of its command by a signal as such a code.
_BY_SIGNAL = 128
# Prefix of `OSError` texts, set by Python; the words after the prefix may be Paceline's own.
_FULL_DISK = tuple(f"[Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT))
# Of errors of torch, of libraries of CUDA, and of Python.
_NO_MEMORY = ("out of memory", "MemoryError", "STATUS_ALLOC_FAILED", "can't allocate memory")


def end_attempt(
    changes: StateChanges, transaction: Transaction, attempt_id: int, end: AttemptEnd
) -> None:
    """Record the end of an attempt and apply the decision; repeated calls change nothing.

    Raises:
        NotFoundError: There is no such attempt.
    """
    connection = transaction.connection
    attempt = read_attempt(connection, attempt_id)
    if attempt.state == AttemptState.ENDED.value:
        return
    error = _chief_error(attempt, end)
    end = msgspec.structs.replace(end, kind=_end_error_kind(end, attempt, error))
    stored = msgspec.to_builtins(end) | {"outcome": attempt.outcome, "error": error}
    del stored["sent_at"]
    ended = AttemptState.ENDED.value
    spent = attempt_spent(connection, attempt, end.time)
    update_attempt(connection, attempt_id, state=ended, ended_at=end.time, exit=stored, spent=spent)
    transaction.emit(
        "attempt_ended", attempt.experiment_id, attempt.trial_id,
        number=attempt.number, exit=stored,
    )  # fmt: skip
    trial = changes.trial(connection, attempt.trial_id)
    experiment = changes.experiment(connection, attempt.experiment_id)
    config = config_of(experiment)
    note_use(
        connection, experiment, config.resources.pool, num_slots_of(attempt), attempt.created_at,
        end.time, is_filler=attempt.is_filler,
    )  # fmt: skip
    facts = _end_facts(changes, transaction, trial, attempt, config, end, error)
    _note_node(changes, transaction, attempt, facts)
    decision = judge_exit(facts)
    if decision.note:
        changes.note(transaction, trial.id, attempt.number, decision.level, decision.note)
    _follow_end(changes, transaction, trial, experiment, decision)
    # Effects outside of the database wait for the commit, as the transaction may fail.
    transaction.after_commit(partial(changes.failing_stores.forget, attempt_id))
    transaction.after_commit(changes.wakeups.wake)
    faults.reach("master.attempt.ended")


def describe_attempt_end(end: AttemptEnd, error: str | None) -> str:
    """Say in words how an attempt's process ended."""
    if end.signal is not None:
        how = f"killed by signal {end.signal}"
    elif end.code is not None:
        how = f"exit code {end.code}"
    else:
        how = end.reason.value.replace("_", " ")
    details = error or end.detail
    if end.reason is ExitReason.RUNNER_LOST:
        # The code may have failed by the loss.
        return end.detail or error or NO_RUNNER
    if details and end.reason is ExitReason.START_FAILED:
        return details  # which says more than that, and stands behind words that say it
    return f"{how}: {details}" if details else how


def _chief_error(attempt: sa.Row[Any], end: AttemptEnd) -> str | None:
    """Return the error of rank 0; None if possibly a mere reaction to another rank's failure.

    On several nodes, or if a launcher names another cause, it may.
    """
    if attempt.members is not None or not attempt.error:
        return None
    first_line = attempt.error.splitlines()[0]
    is_answer = end.is_launch_error and first_line not in (end.detail or "")
    return None if is_answer else attempt.error


def _is_successful_end(end: AttemptEnd, outcome: str | None) -> bool:
    """Return whether the code did its work.

    A process with gloo threads may abort while Python ends, after all its work.
    """
    has_aborted = end.signal == signal.SIGABRT or end.code == 128 + signal.SIGABRT
    return end.code == 0 or (has_aborted and outcome in ("completed", "preempted"))


def _end_error_kind(end: AttemptEnd, attempt: sa.Row[Any], error: str | None) -> ErrorKind | None:
    is_success = _is_successful_end(end, attempt.outcome) or attempt.early_exit == INVALID_HP
    if is_success and end.reason is ExitReason.EXITED:
        return None
    kind = end.kind or end_kind(end.reason, is_success)
    if kind is ErrorKind.USER and end.reason is ExitReason.EXITED:
        text = error or end.detail or ""
        if any(mark in text for mark in _NO_MEMORY):
            return ErrorKind.MEMORY
        return ErrorKind.TRANSIENT if any(mark in text for mark in _FULL_DISK) else kind
    return kind


def _end_facts(
    changes: StateChanges,
    transaction: Transaction,
    trial: sa.Row[Any],
    attempt: sa.Row[Any],
    config: ExperimentConfig,
    end: AttemptEnd,
    error: str | None,
) -> AttemptFacts:
    where = _describe_node(transaction, attempt)
    return AttemptFacts(
        trial_state=TrialState(trial.state),
        restarts=trial.restarts,
        max_restarts=config.max_restarts,
        retries=trial.retries,
        reason=end.reason,
        kind=end.kind,
        is_success=_is_successful_end(end, attempt.outcome),
        was_asked_to_stop=attempt.preempt_reason is not None or attempt.should_kill,
        acknowledged=attempt.preempt_acknowledged,
        early_exit=attempt.early_exit,
        outcome=attempt.outcome,
        num_runners_lost=num_in_a_row(
            transaction.connection, trial.id, is_lost_runner, MAX_RUNNERS_LOST + 1
        ),
        num_not_formed=num_in_a_row(
            transaction.connection, trial.id, is_not_formed, MAX_NOT_FORMED + 1
        ),
        num_shortages=num_in_a_row(
            transaction.connection, trial.id, is_transient_start, MAX_SHORTAGES + 1
        ),
        store=end.store,
        num_store_failures=num_in_a_row(
            transaction.connection, trial.id, is_store_failure, MAX_STORE_FAILURES + 1
        ),
        num_failed_starts=num_in_a_row(
            transaction.connection, trial.id, is_failed_start, MAX_FAILED_STARTS
        ),
        has_other_nodes=bool(where),
        where=where,
        is_repeated=_is_repeated_end(changes, transaction, attempt, config, end, error),
        has_stored=_has_stored(transaction, attempt),
        text=describe_attempt_end(end, error),
        no_retry=log_hit(attempt, "no_retry"),
        is_interactive=config.interactive is not None,
        detail=end.detail,
    )


def _describe_node(transaction: Transaction, attempt: sa.Row[Any]) -> str:
    """Return the node of an attempt in words; "" without an alternative, or for several nodes.

    Nodes that have left or are drained do not count.
    """
    if attempt.members is not None:
        return ""
    nodes = tables.nodes.c
    query = sa.select(nodes.id, nodes.name).where(
        sa.or_(nodes.id == attempt.node_id, ~nodes.has_left & ~nodes.is_draining)
    )
    names = {row.id: row.name for row in transaction.connection.execute(query)}
    names.setdefault(LOCAL_NODE, LOCAL_NAME)
    name = names.get(attempt.node_id or LOCAL_NODE)
    return f" on the node {name!r}" if len(names) > 1 and name is not None else ""


def _note_node(
    changes: StateChanges, transaction: Transaction, attempt: sa.Row[Any], facts: AttemptFacts
) -> None:
    """Note the end of an attempt on a single node; the node may cause many failures."""
    if attempt.members is not None or attempt.run_attempt is not None:
        return
    node_id, nodes = attempt.node_id or LOCAL_NODE, changes.failing_nodes
    has_ended = facts.reason in (ExitReason.EXITED, ExitReason.START_FAILED)
    if has_ended and (facts.kind is None or _has_stored(transaction, attempt)):
        transaction.after_commit(lambda: nodes.note_success(node_id))
    elif (
        has_ended
        and facts.kind not in (ErrorKind.TRANSIENT, ErrorKind.MEMORY)
        and attempt.outcome in (None, _FAILED_OUTCOME)
    ):
        trial_id, now = attempt.trial_id, time.time()
        transaction.after_commit(lambda: nodes.note_failure(node_id, trial_id, now))


def _has_stored(transaction: Transaction, attempt: sa.Row[Any]) -> bool:
    checkpoints = tables.checkpoints
    stored = sa.select(checkpoints.c.uuid).where(
        checkpoints.c.trial_id == attempt.trial_id, checkpoints.c.attempt == attempt.number
    )
    return transaction.connection.execute(stored.limit(1)).first() is not None


def _has_other_node(
    changes: StateChanges, transaction: Transaction, attempt: sa.Row[Any], config: ExperimentConfig
) -> bool:
    """Return whether another suitable node is open, or was open a moment ago."""
    connection, machines, now = transaction.connection, changes.machines, time.time()
    failing = changes.failing_nodes.all(now)
    cluster = read_cluster(
        connection, machines.slots(), now, returning=machines.returning_slots(), failing=failing
    )
    owner = changes.experiment(connection, attempt.experiment_id).owner
    pool, num_slots = config.resources.pool or DEFAULT_POOL, config.resources.fewest_slots
    excluded = cluster.excluded.get(attempt.trial_id, frozenset())
    avoided = {attempt.node_id or LOCAL_NODE, *failing, *excluded}
    nodes = [node for node in cluster.nodes if node.is_open and not node.problem]
    return any(node.suits(pool, owner, num_slots, avoided) for node in [*nodes, *cluster.returning])


def _is_repeated_end(
    changes: StateChanges,
    transaction: Transaction,
    attempt: sa.Row[Any],
    config: ExperimentConfig,
    end: AttemptEnd,
    error: str | None,
) -> bool:
    """Return whether an attempt failed in the same way as the previous attempt, without progress.

    An attempt ended by a signal was lost, and may succeed the next time. If both failed on one
    node, that may be the cause, unless there is no other one.
    """
    if end.reason is not ExitReason.EXITED or end.code is None or end.code >= _BY_SIGNAL:
        return False
    attempts = tables.attempts
    before = transaction.connection.execute(
        sa.select(attempts.c.exit, attempts.c.node_id, attempts.c.members).where(
            attempts.c.trial_id == attempt.trial_id, attempts.c.number == attempt.number - 1
        )
    ).first()
    if before is None or before.exit is None or before.exit["reason"] != end.reason.value:
        return False
    stored_end = msgspec.to_builtins(end) | {"error": error}
    is_same = end_cause(before.exit) == end_cause(stored_end)
    if not is_same or _has_stored(transaction, attempt):
        return False
    is_on_one_node = attempt.members is before.members is None and attempt.node_id == before.node_id
    return not (is_on_one_node and _has_other_node(changes, transaction, attempt, config))


def _follow_end(
    changes: StateChanges,
    transaction: Transaction,
    trial: sa.Row[Any],
    experiment: sa.Row[Any],
    decision: ExitDecision,
) -> None:
    if decision.restarts != trial.restarts:
        changes.update_trial(transaction, trial.id, restarts=decision.restarts)
    if decision.retries is not None:
        changes.update_trial(transaction, trial.id, retries=decision.retries)
    if decision.search_exit is None:
        return
    if decision.search_exit is SearchExit.INVALID_HP:
        _end_invalid(changes, transaction, trial, decision)
        return
    problem = None
    if decision.state is TrialState.COMPLETED and TrialState(trial.state) is TrialState.ACTIVE:
        if untrained := describe_untrained(transaction, trial, experiment):
            changes.end_trial(
                transaction, trial, TrialState.ERROR, error=untrained, kind=ErrorKind.USER
            )
            return
        problem = describe_missing_metric(transaction, trial, experiment)
    warning = problem
    if warning is None and decision.state is TrialState.COMPLETED:
        warning = describe_nan_metric(transaction, trial, experiment)
    if warning is not None:
        changes.note(transaction, trial.id, trial.num_attempts, "WARNING", warning)
    if problem is not None and not is_single(experiment):
        have_others = others_have_reported(transaction, trial, experiment)
        changes.end_trial(transaction, trial, TrialState.ERROR, error=problem, kind=ErrorKind.USER)
        if not have_others:
            end_unmeasured(changes, transaction, trial, problem)
    else:
        changes.end_trial(
            transaction,
            trial,
            decision.state,
            exit_reason=decision.search_exit,
            reason=decision.stop_reason,
            error=decision.error,
            kind=decision.kind,
        )


def _end_invalid(
    changes: StateChanges, transaction: Transaction, trial: sa.Row[Any], decision: ExitDecision
) -> None:
    changes.end_trial(
        transaction,
        trial,
        decision.state,
        exit_reason=decision.search_exit,
        reason=INVALID_HP,
    )
    if _are_newest_invalid(transaction, trial.experiment_id):
        changes.fail_experiment(
            transaction,
            trial.experiment_id,
            f"{Search.max_invalid_in_a_row} trials in a row refused their hyperparameters"
            " (InvalidHP). Hint: narrow the ranges, or look at the condition that raises it.",
        )
        changes.end_experiment_if_done(transaction, trial.experiment_id)


def _are_newest_invalid(transaction: Transaction, experiment_id: int) -> bool:
    """Return whether the newest ended trials all refused their parameters, up to a limit."""
    trials = tables.trials
    query = (
        sa.select(trials.c.stop_reason)
        .where(trials.c.experiment_id == experiment_id, trials.c.ended_at.is_not(None))
        .order_by(trials.c.ended_at.desc())
        .limit(Search.max_invalid_in_a_row)
    )
    reasons = transaction.connection.execute(query).scalars().all()
    return len(reasons) == Search.max_invalid_in_a_row and set(reasons) == {INVALID_HP}
