"""Runners of attempts, their ends, and the watch over them."""

import logging
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline._cluster.master.executors import Executor
from paceline._cluster.master.experiments.attempt_end import (
    NO_RUNNER,
    describe_attempt_end,
    end_attempt,
)
from paceline._cluster.master.experiments.attempts import Leases, check_not_over, read_attempt
from paceline._cluster.master.experiments.state_decisions import NotFoundError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.store.api_models_from_rows import Member, read_members, stored_members
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.row_ids_and_counts import update_attempt
from paceline._cluster.messages.master_models import RUNNER_GRACE_S
from paceline._cluster.messages.runner_messages import AttemptEnd, runner_id
from paceline._cluster.messages.states import AttemptState, ErrorKind, ExitReason

logger = logging.getLogger(__name__)

_NODE = re.compile(r"Node (\d{1,4}): (.*)", re.DOTALL)
# Messages of launchers after waiting for each other in vain.
_NEVER_MET = re.compile(
    r"The launchers of all \d+ nodes must come |"
    r"The launcher of node \d{1,4} was lost: it was not reached within "
)
_LAUNCHER_LOST = re.compile(r"The launcher of node (\d{1,4}) was lost: ")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRunner:
    """Runner of an attempt, started or not yet started; `id` is unique among all runners.

    `place` names its node if the attempt has several.
    """

    id: int
    attempt_id: int
    member: int
    trial_id: int
    number: int
    should_kill: bool
    control_version: int
    place: str = ""


def runners_of_attempt(attempt: sa.Row[Any]) -> list[AttemptRunner]:
    """Return the runners to watch: a single runner, or the runners of members still at work."""
    members = read_members(attempt)
    return [
        AttemptRunner(
            id=runner_id(attempt.id, number),
            attempt_id=attempt.id,
            member=number,
            trial_id=attempt.trial_id,
            number=attempt.number,
            should_kill=bool(attempt.should_kill),
            control_version=attempt.control_version,
            place=_name(members, number) if members else "",
        )
        for number in range(len(members) or 1)
        if not members or members[number].exit is None
    ]


def note_begun(
    changes: StateChanges,
    transaction: Transaction,
    attempt_id: int,
    member: int,
    *,
    port: int,
    sends_checkpoints: bool,
) -> None:
    """Record the presence of a member's runner; once all are present, publish the meeting port.

    Args:
        changes: Writes the changes that follow.
        transaction: The transaction.
        attempt_id: The attempt.
        member: Which of its runners.
        port: A port that is free there.
        sends_checkpoints: Whether its node does not share the checkpoint directory.

    Raises:
        NotFoundError: There is no such attempt or member.
        RefusedError: It has ended.
    """
    attempt = read_attempt(transaction.connection, attempt_id)
    check_not_over(attempt)
    members = read_members(attempt)
    if not members and member == 0:
        return
    if member >= len(members):
        raise NotFoundError(f"Attempt {attempt_id} has no member {member}.")
    # Port already published: the launchers may use it, so nothing changes any more.
    if attempt.meeting_port is not None:
        return
    # First report wins: a repeated request must not move the start time.
    begun_at = members[member].begun_at or time.time()
    members[member] = msgspec.structs.replace(
        members[member], begun_at=begun_at, port=port, sends_checkpoints=sends_checkpoints
    )
    values: dict[str, Any] = {"members": stored_members(members)}
    if all(one.begun_at is not None for one in members):
        changes.change_attempt(transaction, attempt_id, meeting_port=members[0].port or 0, **values)
    else:
        update_attempt(transaction.connection, attempt_id, **values)


def end_runner(
    changes: StateChanges,
    transaction: Transaction,
    attempt_id: int,
    member: int,
    end: AttemptEnd,
    *,
    is_lost: bool = False,
) -> None:
    """Record the end of an attempt's runner and apply its effects; repeated calls change nothing.

    Args:
        changes: Writes the changes that follow.
        transaction: The transaction.
        attempt_id: The attempt.
        member: Which of its runners.
        end: How it ended.
        is_lost: Its node cannot be reached.

    Raises:
        NotFoundError: There is no such attempt or member.
    """
    attempt = read_attempt(transaction.connection, attempt_id)
    members = read_members(attempt)
    if not members:
        end_attempt(changes, transaction, attempt_id, end)
        return
    if member >= len(members):
        raise NotFoundError(f"Attempt {attempt_id} has no member {member}.")
    if attempt.state == AttemptState.ENDED.value or members[member].exit is not None:
        return
    members[member] = msgspec.structs.replace(
        members[member], exit=end, ended_at=time.time(), is_lost=is_lost
    )
    update_attempt(transaction.connection, attempt_id, members=stored_members(members))
    warn = partial(changes.note, transaction, attempt.trial_id, attempt.number, "WARNING")
    if is_lost:
        warn(f"{_name(members, member)} is lost with its part of the attempt: {end.detail}.")
    if all(one.exit is not None for one in members):
        end_attempt(changes, transaction, attempt_id, _end_of_all(members))
        return
    # Member preempted before its start: the others would wait for its launcher in vain.
    has_left = end.reason is ExitReason.KILLED
    if (end.has_failed or has_left) and not attempt.should_kill:
        warn(
            f"{_name(members, member)} has ended ({describe_attempt_end(end, None)}); the other"
            " nodes of the attempt end, too.",
        )
        changes.change_attempt(transaction, attempt_id, should_kill=True)
    transaction.after_commit(changes.wakeups.wake)


def give_back_node(
    changes: StateChanges, transaction: Transaction, attempt_id: int, timeout_s: float
) -> None:
    """End an attempt if some nodes missed the start timeout, to free its slots for others."""
    attempt = read_attempt(transaction.connection, attempt_id)
    members = read_members(attempt)
    if attempt.state == AttemptState.ENDED.value or attempt.meeting_port is not None:
        return
    missing = [one.name for one in members if one.begun_at is None]
    end = AttemptEnd(
        reason=ExitReason.NOT_FORMED,
        code=None,
        signal=None,
        time=time.time(),
        detail=f"of its {len(members)} nodes, {', '.join(missing)} did not begin within"
        f" {timeout_s:g} s (`resources.start_timeout`)",
    )
    end_attempt(changes, transaction, attempt_id, end)


def _end_of_all(members: list[Member]) -> AttemptEnd:
    """Return the end of the whole attempt: its first failed member's, or else rank 0's."""
    failed = [n for n, one in enumerate(members) if one.exit is not None and one.exit.has_failed]
    lost = [n for n in failed if members[n].is_lost]
    # Lost nodes first: errors of the other members are mere reactions to the loss.
    first = min(lost or failed, key=lambda n: members[n].ended_at or 0.0, default=0)
    end = members[first].exit
    assert end is not None
    if not failed:
        return end
    if not lost and _have_never_met(members, first):
        detail = f"{_name(members, first)}: {end.detail}"
        return _without_process(end, ExitReason.NOT_FORMED, detail)
    silent = _LAUNCHER_LOST.match(end.detail or "")
    if silent is not None and not lost and int(silent[1]) < len(members):
        number = int(silent[1])
        own = members[number].exit
        if own is None or not own.has_failed or _LAUNCHER_LOST.match(own.detail or ""):
            # Nothing has failed but the network between the nodes.
            detail = f"{_name(members, number)}: {end.detail}"
            return _without_process(end, ExitReason.RUNNER_LOST, detail)
        # The launcher was lost by an event on its own node.
        first, end = number, own
    # The process of the store's error may be on another node than the one that ended first.
    store = next((one.exit.store for one in members if one.exit and one.exit.store), None)
    if store is not None:
        end = msgspec.structs.replace(end, store=store, kind=ErrorKind.TRANSIENT)
    return msgspec.structs.replace(end, detail=_why_failed(members, first, end))


def _without_process(end: AttemptEnd, reason: ExitReason, detail: str) -> AttemptEnd:
    """Return an end with another reason, and without the process's code, signal and kind."""
    return msgspec.structs.replace(
        end, reason=reason, code=None, signal=None, kind=None, store=None, detail=detail
    )


def _why_failed(members: list[Member], first: int, end: AttemptEnd) -> str:
    """Return the node and the cause of an attempt's failure."""
    # The launchers agree on the first failure and its node. One on a full disk may
    # not be able to say anything.
    others = "" if end.detail else _told_of(members, first)
    told = _NODE.match(end.detail or others)
    if told is not None and int(told[1]) < len(members):
        return f"{_name(members, int(told[1]))}: {told[2]}"
    why = end.detail or (NO_RUNNER if end.reason is ExitReason.RUNNER_LOST else None)
    if why is None and end.code:
        why = f"it ended with code {end.code}, and could not say why; its disk may be full"
    return ": ".join(filter(None, (_name(members, first), why)))


def _told_of(members: list[Member], number: int) -> str:
    """Return the message of another node's launcher about a failed node; "" if none."""
    details = (one.exit.detail or "" for one in members if one.exit is not None)
    return next((text for text in details if text.startswith(f"Node {number}: ")), "")


def _have_never_met(members: list[Member], first: int) -> bool:
    """Return whether the launchers waited for each other in vain; a kill of the rest is allowed."""
    exits = [one.exit for one in members if one.exit is not None]
    return _is_in_vain(exits[first]) and all(
        _is_in_vain(end) or end.reason is ExitReason.KILLED for end in exits
    )


def _is_in_vain(end: AttemptEnd) -> bool:
    return end.has_failed and _NEVER_MET.match(end.detail or "") is not None


def _name(members: list[Member], number: int) -> str:
    return f"Node {number} ({members[number].name})"


# Grace period of a runner with the kill request still unseen: such a runner is hung.
_NOTE_GRACE_S = 3.0
# Grace period for an unreachable runner: the other members wait for the end of this runner.
_ABSENT_GRACE_S = 1.0
# A runner that cannot be killed has lost its attempt after so long.
_LAST_GRACE_S = 30.0


class RunnerWatch:
    """Watch over running runners, once per pass of the reconciler.

    Args:
        database: Where ends of attempts are recorded.
        changes: Writes to the logs of trials.
        executor: Ends runners.
        leases: What is known of the runners' signs of life.
    """

    def __init__(
        self,
        database: Database,
        changes: StateChanges,
        executor: Executor,
        leases: Leases,
    ) -> None:
        self._executor = executor
        self._database = database
        self._changes = changes
        self._leases = leases
        # When each attempt was told to kill, and when its silent runner was killed.
        self._told_at: dict[int, float] = {}
        self._killed_at: dict[int, float] = {}
        self._signs: dict[int, object] = {}
        self._shipping: set[int] = set()

    def look(self, runner: AttemptRunner) -> bool:
        """Check the lease and kill request of a running runner; True if just killed."""
        self._leases.begin(runner.id)
        sign = self._executor.sign_of_life(runner.id)
        # Any change is a sign of life; the first look only stores a reference value.
        if sign != self._signs.setdefault(runner.id, sign):
            self._signs[runner.id] = sign
            self._leases.renew(runner.id)
        if self._leases.is_over(runner.id):
            return self._end_silent(runner)
        return bool(runner.should_kill) and self._kill_when_late(runner)

    def ship(self, runner_id: int) -> None:
        """Have a runner's leftover data sent; the sending process polls no control updates."""
        self._forget(runner_id)
        self._shipping.add(runner_id)
        self._executor.ship(runner_id)

    def _forget(self, runner_id: int) -> None:
        self._shipping.discard(runner_id)
        self._leases.end(runner_id)
        self._told_at.pop(runner_id, None)
        self._killed_at.pop(runner_id, None)
        self._signs.pop(runner_id, None)

    def keep(self, runner_ids: Collection[int]) -> None:
        """Forget all other attempts."""
        for gone in (self._signs.keys() | self._shipping) - set(runner_ids):
            self._forget(gone)

    def _kill_when_late(self, runner: AttemptRunner) -> bool:
        now = time.monotonic()
        has_noted = self._leases.has_seen(runner.id, runner.control_version)
        is_hung = not has_noted and runner.id not in self._shipping
        grace_s = _NOTE_GRACE_S if is_hung else RUNNER_GRACE_S
        if is_hung and self._executor.is_out_of_reach(runner.id):
            grace_s = _ABSENT_GRACE_S
        if now < self._told_at.setdefault(runner.id, now) + grace_s:
            return False
        logger.warning("The runner of attempt %d does not follow and is killed.", runner.attempt_id)
        return self._kill(runner)

    def _end_silent(self, runner: AttemptRunner) -> bool:
        if runner.id in self._killed_at:
            return self._kill(runner)
        of_node = f" of {runner.place}" if runner.place else ""
        text = (
            f"The runner{of_node} gave no sign of life for {self._leases.length_s:g} s"
            " (`paceline up --runner-timeout`) and is ended with the attempt's processes."
        )
        logger.warning("Attempt %d: %s", runner.attempt_id, text)
        self._database.write(
            lambda transaction: self._changes.note(
                transaction, runner.trial_id, runner.number, "WARNING", text
            )
        ).result()
        return self._kill(runner)

    def _kill(self, runner: AttemptRunner) -> bool:
        """Kill a runner; after a grace period its attempt counts as lost in any case."""
        now = time.monotonic()
        is_out_of_reach = self._executor.is_out_of_reach(runner.id)
        if runner.id not in self._killed_at:
            self._killed_at[runner.id] = now
            self._executor.kill_runner(runner.id)
            if not is_out_of_reach:
                return True
        if is_out_of_reach or now > self._killed_at[runner.id] + _LAST_GRACE_S:
            end = AttemptEnd(
                reason=ExitReason.RUNNER_LOST,
                code=None,
                signal=None,
                time=time.time(),
                detail="the runner gave no sign of life and could not be ended",
            )
            self._database.write(
                lambda transaction: end_runner(
                    self._changes,
                    transaction,
                    runner.attempt_id,
                    runner.member,
                    end,
                    is_lost=is_out_of_reach,
                )
            ).result()
        return False
