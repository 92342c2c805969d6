"""Failures of attempts: comparable causes, failing nodes, delays before the next start."""

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.experiments.state_decisions import INVALID_HP
from paceline._cluster.master.scheduling.pools import NodeSlots
from paceline._cluster.master.store import tables
from paceline._cluster.messages.runner_messages import LOCAL_NODE, LogEntry
from paceline._cluster.messages.states import (
    LIVE_ATTEMPTS,
    AttemptState,
    ErrorKind,
    ExitReason,
    TrialState,
)
from paceline.config._experiment_config import LogPolicy

# Parts of error texts varying by chance (ranks, times, addresses): ignored in comparisons.
_BY_CHANCE = re.compile(
    r"""
      \bNode\ \d+(?:\ \([^)\n]*\))?:\ ?
    | ,\ the\ first\ of\ \d+\ to\ fail
    | \b[Rr]ank[\ _=-]?\d+\b
    | \b(?:cuda|[Gg][Pp][Uu])[:\ ]\d+\b
    | \b0x[0-9a-fA-F]+\b
    | \b\d{4}-\d\d-\d\d(?:[T\ ]\d\d:\d\d(?::\d\d)?)?(?:[.,]\d+)?(?:Z\b|[+-]\d\d:?\d\d\b)?
    | \b\d\d:\d\d:\d\d(?:[.,]\d+)?
    | \b\d+(?:\.\d+)?\ ?(?:ns|us|µs|ms|s|seconds?|minutes?)\b
    | \b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b
    | (?:\[[0-9a-fA-F:]+\]|\blocalhost):\d+\b
    | \b(?:port|pid|process)[\ :=]\d+\b
    | (?<=/attempts/)\d+(?=/)
    """,
    re.VERBOSE,
)


def end_cause(exit_: dict[str, Any]) -> tuple[int | None, str | None]:
    """Return the exit code and the comparable error text of a stored end.

    A launcher names the rank that failed first; the error of rank 0 may only follow from it.
    """
    told = exit_.get("error") or exit_.get("detail")
    if exit_.get("is_launch_error"):
        told = exit_.get("detail")
    return exit_["code"], None if told is None else comparable(told)


def comparable(text: str) -> str:
    """Return a text without ranks, times, addresses and numbers of attempts and processes."""
    return _BY_CHANCE.sub("*", text)


# Longest line that is kept of a log policy.
_MAX_HIT = 500
_FAILED = frozenset({ExitReason.EXITED.value, ExitReason.START_FAILED.value})


def is_failed_start(exit_: dict[str, Any]) -> bool:
    """Return whether an attempt could not start for a reason perhaps specific to its node."""
    is_transient = exit_.get("kind") == ErrorKind.TRANSIENT.value
    return bool(exit_["reason"] == ExitReason.START_FAILED.value and not is_transient)


def failed_attempt_nodes(connection: sa.Connection) -> dict[int, frozenset[int]]:
    """Return the nodes of the latest consecutive failures, for each waiting trial with any.

    An attempt that stored a checkpoint ends the row, as its node is good for the trial. So does an
    attempt on several nodes: any of them may be the cause.
    """
    trials, attempts, checkpoints = tables.trials.c, tables.attempts.c, tables.checkpoints.c
    running = sa.select(attempts.trial_id).where(attempts.state.in_(LIVE_ATTEMPTS))
    has_stored = sa.exists().where(
        checkpoints.trial_id == attempts.trial_id, checkpoints.attempt == attempts.number
    )
    query = (
        sa.select(
            attempts.trial_id,
            attempts.exit,
            attempts.node_id,
            attempts.members,
            attempts.run_attempt,
            has_stored.label("has_stored"),
        )
        .join(tables.trials, trials.id == attempts.trial_id)
        .where(
            trials.state == TrialState.ACTIVE.value,
            sa.or_(trials.restarts > 0, trials.retries > 0),
            trials.id.not_in(running),
        )
        .order_by(attempts.trial_id, attempts.number.desc())
    )
    found = {}
    for trial_id, rows in groupby(connection.execute(query), attrgetter("trial_id")):
        failed = takewhile(_has_failed_on_its_node, rows)
        if nodes := frozenset(row.node_id or LOCAL_NODE for row in failed):
            found[trial_id] = nodes
    return found


def find_log_hits(
    policies: Iterable[LogPolicy], entries: Sequence[LogEntry]
) -> dict[str, dict[str, Any]]:
    """Return the first line with each pattern of log policies, in a form to be stored."""
    found = {}
    for policy in policies:
        for entry in entries:
            if policy.matches(entry.text):
                line = entry.text[:_MAX_HIT]
                found[f"{policy.action} {policy.pattern}"] = {"action": policy.action, "line": line}
                break
    return found


def log_hit(attempt: sa.Row[Any], action: str) -> str | None:
    """Return the line of an attempt's output for which a log policy has an action, if any."""
    for hit in (attempt.log_hits or {}).values():
        if hit["action"] == action:
            return str(hit["line"])
    return None


def excluded_nodes(connection: sa.Connection) -> dict[int, frozenset[int]]:
    """Return the nodes that log policies exclude for trials."""
    trials, attempts = tables.trials.c, tables.attempts.c
    query = (
        sa.select(attempts.trial_id, attempts.log_hits)
        .join(tables.trials, trials.id == attempts.trial_id)
        .where(trials.state == TrialState.ACTIVE.value, attempts.log_hits.is_not(None))
    )
    found: dict[int, frozenset[int]] = {}
    for row in connection.execute(query):
        nodes = {hit["node"] for hit in row.log_hits.values() if hit["action"] == "exclude_node"}
        found[row.trial_id] = found.get(row.trial_id, frozenset()) | nodes
    return found


def _has_failed_on_its_node(row: sa.Row[Any]) -> bool:
    if row.exit is None or row.members is not None or row.run_attempt is not None:
        return False
    if row.exit.get("store") is not None:
        return False  # The node is not the cause.
    return row.exit["reason"] in _FAILED and row.exit.get("kind") is not None and not row.has_stored


NUM_TRIALS = 3
WITHIN_S = 60.0
REST_S = 600.0


@dataclass(slots=True)
class _Failures:
    """Recent failures on a node: times and trial ids."""

    recent: deque[tuple[float, int]] = field(default_factory=deque)
    rests_until: float = 0.0


class FailingNodes:
    """Nodes with repeated failures; safe for any thread. Times are in seconds since the epoch.

    A node fails if attempts of three different trials failed on it within a minute, and none has
    succeeded there since. Forgotten when the master ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: dict[int, _Failures] = {}

    def note_failure(self, node_id: int, trial_id: int, now: float) -> None:
        """Record the failure of a trial's attempt on a node, without a stored checkpoint."""
        with self._lock:
            failures = self._failures.setdefault(node_id, _Failures())
            failures.recent.append((now, trial_id))
            while failures.recent[0][0] < now - WITHIN_S:
                failures.recent.popleft()
            if len({trial for _, trial in failures.recent}) >= NUM_TRIALS:
                failures.rests_until = now + REST_S

    def note_success(self, node_id: int) -> None:
        """Record a success or stored checkpoint on a node: its failures are forgotten."""
        with self._lock:
            self._failures.pop(node_id, None)

    def all(self, now: float) -> dict[int, float]:
        """Return the failing nodes with the ends of their rests; a rest may be waived later."""
        with self._lock:
            return {
                node_id: failures.rests_until
                for node_id, failures in self._failures.items()
                # Upper bound: a clock that was set back must not prolong the rest.
                if now < failures.rests_until <= now + REST_S
            }


def resting_nodes(
    failing: Mapping[int, float], nodes: Iterable[NodeSlots], returning: Iterable[NodeSlots]
) -> dict[int, float]:
    """Return the failing nodes to rest; if all nodes of a pool fail, the nodes are not the cause.

    Args:
        failing: The nodes that fail, and until when they would rest.
        nodes: The nodes that are there, in their pools.
        returning: Those that were there a moment ago.
    """
    if not failing:
        return {}
    nodes = [*nodes]
    good = {
        node.pool
        for node in [*(one for one in nodes if one.is_open), *returning]
        if node.node_id not in failing and not node.problem and set(node.slots) - node.drained
    }
    return {
        node.node_id: failing[node.node_id]
        for node in nodes
        if node.node_id in failing and node.pool in good
    }


_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# More attempts than a pause of the longest kind follows.
_NUM_LOOKED_AT = 16


def is_lost_runner(exit_: dict[str, Any]) -> bool:
    """Return whether an attempt ended because its runner died."""
    return bool(exit_["reason"] == ExitReason.RUNNER_LOST.value)


def is_not_formed(exit_: dict[str, Any]) -> bool:
    """Return whether an attempt ended because its nodes did not come together."""
    return bool(exit_["reason"] == ExitReason.NOT_FORMED.value)


def is_transient_start(exit_: dict[str, Any]) -> bool:
    """Return whether an attempt could not start for a transient reason."""
    if exit_["reason"] == ExitReason.SHORTAGE.value:
        return True
    is_failed = exit_["reason"] == ExitReason.START_FAILED.value
    return is_failed and exit_.get("kind") == ErrorKind.TRANSIENT.value


def is_store_failure(exit_: dict[str, Any]) -> bool:
    """Return whether an attempt failed because a storage did not answer."""
    return exit_.get("store") is not None


def num_in_a_row(
    connection: sa.Connection,
    trial_id: int,
    has_ended_so: Callable[[dict[str, Any]], bool],
    limit: int,
) -> int:
    """Return how many of a trial's newest attempts ended in some way, `limit` at most.

    An attempt that stored a checkpoint is the first of a row: the earlier obstacle has passed.
    """
    attempts, checkpoints = tables.attempts, tables.checkpoints
    has_stored = sa.exists().where(
        checkpoints.c.trial_id == trial_id, checkpoints.c.attempt == attempts.c.number
    )
    query = (
        sa.select(attempts.c.exit, has_stored.label("has_stored"))
        .where(attempts.c.trial_id == trial_id, attempts.c.exit.is_not(None))
        .order_by(attempts.c.number.desc())
        .limit(limit)
    )
    number = 0
    for row in connection.execute(query):
        if not has_ended_so(row.exit):
            break
        number += 1
        if row.has_stored:
            break
    return number


def start_delay_after(num_shortages: int) -> float:
    """Return for how many seconds nothing is started after so many shortages in a row."""
    if num_shortages == 0:
        return 0.0
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(num_shortages - 1, 10))


def nodes_in_start_delay(connection: sa.Connection, now: float) -> dict[int, float]:
    """Return the nodes resting after recent transient start failures, with the ends of the rests.

    A shortage on a node, such as a full disk, would hit the next attempt as well,
    whatever its trial. Other nodes may be fine.
    """
    resting = {}
    failed = {
        node_id
        for row in _failed_lately(connection, now, is_transient_start)
        for node_id, exit_ in _exits_by_node(row).items()
        if exit_ is not None and is_transient_start(exit_)
    }
    for node_id in failed:
        until = _node_rests_until(connection, now, node_id)
        if now < until:
            resting[node_id] = until
    return resting


def trials_in_start_delay(connection: sa.Connection, now: float) -> dict[int, float]:
    """Return the trials resting after repeated losses or failures, with the ends of the rests.

    After its first failure a trial is tried again at once, unless its nodes did not come together
    or its storage did not answer.
    """
    resting: dict[int, float] = {}
    ends = ((is_lost_runner, 1), (is_not_formed, 0), (is_store_failure, 0))
    for has_ended_so, num_at_once in ends:
        for row in _failed_lately(connection, now, has_ended_so):
            number = num_in_a_row(connection, row.trial_id, has_ended_so, _NUM_LOOKED_AT)
            until = row.ended_at + start_delay_after(number - num_at_once)
            # A clock that was set back would make the pause longer.
            if number > num_at_once and row.ended_at <= now < until:
                resting[row.trial_id] = max(until, resting.get(row.trial_id, until))
    return resting


def _failed_lately(
    connection: sa.Connection, now: float, has_ended_so: Callable[[dict[str, Any]], bool]
) -> list[Any]:
    attempts = tables.attempts.c
    query = sa.select(
        attempts.trial_id, attempts.node_id, attempts.members, attempts.ended_at, attempts.exit
    ).where(
        attempts.ended_at > now - _LONGEST_PAUSE_S,
        # Attempts of runs made without a master say nothing about a node.
        attempts.run_attempt.is_(None),
        attempts.exit.is_not(None),
    )
    return [row for row in connection.execute(query) if has_ended_so(row.exit)]


def _exits_by_node(attempt: Any) -> dict[int, dict[str, Any] | None]:
    """Return the end of an attempt by node id; None for a node still running."""
    if attempt.members is None:
        return {attempt.node_id or LOCAL_NODE: attempt.exit}
    return {member["node_id"]: member["exit"] for member in attempt.members}


def _node_rests_until(connection: sa.Connection, now: float, node_id: int) -> float:
    attempts = tables.attempts.c
    is_own = attempts.node_id.is_(None) if node_id == LOCAL_NODE else attempts.node_id == node_id
    query = (
        sa.select(attempts.node_id, attempts.members, attempts.ended_at, attempts.exit)
        .where(
            # An attempt on several nodes counts at the node of rank 0.
            is_own | attempts.members.is_not(None),
            attempts.run_attempt.is_(None),
            attempts.state != AttemptState.PENDING.value,
        )
        .order_by(attempts.id.desc())
        .limit(_NUM_LOOKED_AT)
    )
    num_shortages, last = 0, 0.0
    for row in connection.execute(query):
        exits = _exits_by_node(row)
        if node_id not in exits:
            continue
        exit_ = exits[node_id]
        if exit_ is not None and exit_["reason"] == ExitReason.KILLED.value and len(exits) > 1:
            continue  # Another node had failed, which says nothing about this one.
        if exit_ is None or not is_transient_start(exit_):
            break
        num_shortages += 1
        last = max(last, row.ended_at or 0.0)
    # A clock that was set back would make the pause longer.
    return last + start_delay_after(num_shortages) if last <= now else 0.0


def counted_trial_states(connection: sa.Connection, experiment_id: int) -> set[TrialState]:
    """Return the states of the trials, except trials with refused hyperparameters."""
    trials = tables.trials.c
    query = sa.select(trials.state).where(
        trials.experiment_id == experiment_id,
        sa.or_(trials.stop_reason.is_(None), trials.stop_reason != INVALID_HP),
    )
    return set(map(TrialState, connection.execute(query.distinct()).scalars()))


def describe_failure(connection: sa.Connection, experiment_id: int) -> str:
    """Return the reason for the failure of an experiment without successful trials."""
    trials = tables.trials.c
    failed = connection.execute(
        sa.select(trials.id, trials.error)
        .where(
            trials.experiment_id == experiment_id,
            trials.error.is_not(None),
            sa.or_(trials.stop_reason.is_(None), trials.stop_reason != INVALID_HP),
        )
        .order_by(trials.id)
        .limit(1)
    ).first()
    others = counted_trial_states(connection, experiment_id) - {TrialState.ERROR}
    if failed is not None and others:
        return (
            "The search has reached its limit `max_failures` of failed trials. Trial"
            f" {failed.id}: {failed.error}"
        )
    if failed is not None:
        return f"All trials failed. Trial {failed.id}: {failed.error}"
    return _describe_invalid(connection, experiment_id) or "All trials failed."


def _describe_invalid(connection: sa.Connection, experiment_id: int) -> str | None:
    trials, attempts = tables.trials.c, tables.attempts.c
    first = connection.execute(
        sa.select(trials.id, attempts.error)
        .join_from(tables.trials, tables.attempts, attempts.trial_id == trials.id)
        .where(trials.experiment_id == experiment_id, trials.stop_reason == INVALID_HP)
        .order_by(trials.id, attempts.number.desc())
        .limit(1)
    ).first()
    if first is None:
        return None
    why = first.error or "InvalidHP"
    return (
        f"All trials refused their hyperparameters. Trial {first.id}: {why}. Hint: change the"
        " hyperparameters, or look at the condition that raises InvalidHP."
    )
