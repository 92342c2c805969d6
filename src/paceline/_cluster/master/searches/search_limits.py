"""Limits of searches: the time that they take, changes by users, and what is used and left."""

import time
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline._cluster.master.experiments.config_rules import check_changed_config
from paceline._cluster.master.experiments.state_decisions import INVALID_HP, RefusedError
from paceline._cluster.master.experiments.state_writer import StateChanges
from paceline._cluster.master.searches.search_operations import takes_inputs
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import config_of, num_slots_of
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.row_ids_and_counts import insert_document
from paceline._cluster.messages.states import AttemptState, ExperimentState, TrialState
from paceline.config._validate_config import validate_config
from paceline.search._search_messages import Limited, Spent
from paceline.search._search_state import SPENT_INTERVAL_S, Budget

# The kind of the document with what a search had taken when it ended.
_LAST = "search_time"
# A pass of the master takes so long at most, mostly.
_PASS_S = 5.0


class SearchClock:
    """Tells searches with a limit of time what they have taken: a step of each pass.

    It goes by a clock that never jumps. Only what happened before its first look at a search, such
    as while there was no master, is measured by the stored times.

    Args:
        changes: Applies the inputs of searches.
    """

    def __init__(self, changes: StateChanges) -> None:
        self._changes = changes
        self._last = time.monotonic()
        self._taken: dict[int, tuple[float, float]] = {}
        self._is_active: dict[int, bool] = {}

    def __call__(self, transaction: Transaction) -> None:
        """Count the time since the last pass; searches out of time end."""
        connection, now = transaction.connection, time.monotonic()
        passed_s, self._last = now - self._last, now
        experiments = tables.experiments
        query = sa.select(experiments).where(
            experiments.c.ended_at.is_(None),
            experiments.c.external_id.is_(None),
            experiments.c.config[("searcher", "limits")].as_string().is_not(None),
        )
        taken, self._taken = self._taken, {}
        was_active, self._is_active = self._is_active, {}
        for row in connection.execute(query).all():
            search = self._changes.searches.peek(transaction, row.id) if takes_inputs(row) else None
            if search is None:
                continue
            if row.id in taken:
                wall_s, slot_s = taken[row.id]
                wall_s += passed_s if row.state == ExperimentState.ACTIVE.value else 0.0
                slot_s += passed_s * sum(map(num_slots_of, _attempts(connection, row.id, True)))
            else:
                wall_s, slot_s = _taken_before(connection, row, search.budget)
            self._taken[row.id] = wall_s, slot_s
            is_active = self._is_active[row.id] = row.state == ExperimentState.ACTIVE.value
            is_changed = was_active.get(row.id, is_active) != is_active
            if _is_due(search.budget, wall_s, slot_s, is_changed=is_changed):
                given = Spent(wall_s=wall_s, slot_s=slot_s)
                self._changes.search_operations.apply_input(transaction, row.id, given)
        for experiment_id in taken.keys() - self._taken.keys():
            _keep_last(connection, experiment_id, *taken[experiment_id])


def _keep_last(connection: sa.Connection, experiment_id: int, wall_s: float, slot_s: float) -> None:
    """Keep what a search has taken that takes no inputs any more."""
    place = {"kind": _LAST, "parent": str(experiment_id), "name": ""}
    documents = tables.documents
    # An experiment that was deleted meanwhile is gone with its documents.
    if (
        connection.scalar(sa.select(tables.experiments.c.id).filter_by(id=experiment_id))
        is not None
    ):
        connection.execute(sa.delete(documents).filter_by(**place))
        content = {"wall_s": wall_s, "slot_s": slot_s}
        insert_document(connection, **place, content=content, experiment_id=experiment_id)


def _is_due(budget: Budget, wall_s: float, slot_s: float, *, is_changed: bool) -> bool:
    """Return whether a search is to be told the time: now and then, and when a limit is reached.

    So it is at the begin and the end of a pause, which a new master could not tell from work.
    """
    limits = budget.limits
    pairs = (
        (budget.wall_s, wall_s, limits.max_wall_time),
        (budget.slot_s, slot_s, limits.max_slot_hours and limits.max_slot_hours * 3600),
    )
    if any(limit is not None and told >= limit for told, _, limit in pairs):
        return False
    if any(limit is not None and now >= limit for _, now, limit in pairs):
        return True
    is_late = is_changed or wall_s - budget.wall_s >= SPENT_INTERVAL_S
    return is_late and any(limit is not None for *_, limit in pairs)


def _taken_before(
    connection: sa.Connection, row: sa.Row[Any], budget: Budget
) -> tuple[float, float]:
    """Return what a search took before now by the stored times; a clock set back adds nothing."""
    told, now = _last_spent(connection, row.id), time.time()
    since = row.created_at if told is None else told[1]
    wall_s, slot_s = budget.wall_s, budget.slot_s
    if row.state == ExperimentState.ACTIVE.value:
        wall_s += max(now - since, 0.0)
    for attempt in _attempts(connection, row.id, False):
        seconds = (attempt.ended_at or now) - max(attempt.created_at, since)
        slot_s += num_slots_of(attempt) * max(seconds, 0.0)
    return wall_s, slot_s


def _attempts(connection: sa.Connection, experiment_id: int, is_live: bool) -> list[sa.Row[Any]]:
    attempts = tables.attempts
    query = sa.select(attempts).where(attempts.c.experiment_id == experiment_id)
    if is_live:
        query = query.where(attempts.c.state != AttemptState.ENDED.value)
    return list(connection.execute(query))


def _last_spent(
    connection: sa.Connection, experiment_id: int
) -> tuple[dict[str, Any], float] | None:
    inputs = tables.search_inputs.c
    query = (
        sa.select(inputs.input, inputs.time)
        .where(inputs.experiment_id == experiment_id, inputs.input["type"].as_string() == "spent")
        .order_by(inputs.number.desc())
        .limit(1)
    )
    row = connection.execute(query).first()
    return None if row is None else (row.input, row.time)


def change_limits(
    transaction: Transaction,
    changes: StateChanges,
    row: sa.Row[Any],
    given: dict[str, Any],
    *,
    is_reopened: bool = False,
) -> None:
    """Change limits of a search, and tell the search; null removes a limit.

    Raises:
        paceline.config.ConfigError: A value is not valid, or a policy is not met.
        RefusedError: The search has no more trials, or does not decide any more.
    """
    searcher = row.config["searcher"]
    limits = {**(searcher.get("limits") or {}), **given}
    config = {**row.config, "searcher": {**searcher, "limits": limits}}
    checked = validate_config(config)
    section = checked.searcher.limits
    check_changed_config(transaction.connection, row, config=checked, is_reopened=is_reopened)
    experiments = tables.experiments
    transaction.connection.execute(
        sa.update(experiments)
        .where(experiments.c.id == row.id)
        .values(
            config={
                **row.config,
                "searcher": {**searcher, "limits": section and section.model_dump()},
            }
        )
    )
    if not takes_inputs(row) or changes.searches.peek(transaction, row.id) is None:
        raise RefusedError(
            "search_over",
            f"The search of experiment {row.id} must be going on to get other limits, but it has"
            " ended. Hint: `paceline experiment continue --max-trials N` goes on with more trials.",
        )
    told = Limited() if section is None else section.as_input()
    try:
        best = row.best_metric
        told = told if told.target is None else msgspec.structs.replace(told, best=best)
        changes.search_operations.apply_input(transaction, row.id, told)
    except ValueError as error:
        raise RefusedError("limits_refused", str(error)) from error


def tell_time_before(transaction: Transaction, changes: StateChanges, experiment_id: int) -> None:
    """Tell a search that goes on after its end what it took before; the time between is free."""
    connection = transaction.connection
    limits = config_of(changes.experiment(connection, experiment_id)).searcher.limits
    if limits is not None and (limits.max_wall_time or limits.max_slot_hours):
        wall_s, slot_s = _told(connection, experiment_id)
        given = Spent(wall_s=wall_s, slot_s=slot_s)
        changes.search_operations.apply_input(transaction, experiment_id, given)


def _told(connection: sa.Connection, experiment_id: int) -> tuple[float, float]:
    """Return the wall time and the slot time that a search was told, or had at its end."""
    place = {"kind": _LAST, "parent": str(experiment_id), "name": ""}
    last = connection.scalar(sa.select(tables.documents.c.content).filter_by(**place)) or {}
    told, _ = _last_spent(connection, experiment_id) or ({}, 0.0)
    pairs = ((each.get("wall_s", 0.0), each.get("slot_s", 0.0)) for each in (last, told))
    return max(pairs)


def _taken_now(connection: sa.Connection, row: sa.Row[Any]) -> tuple[float, float]:
    """Return the wall time and the slot time that a search has taken, about now."""
    wall_s, slot_s = _told(connection, row.id)
    if row.ended_at is None:
        since = _taken_before(connection, row, Budget())
        most_s = SPENT_INTERVAL_S + _PASS_S
        slots = sum(map(num_slots_of, _attempts(connection, row.id, True)))
        wall_s += min(since[0], most_s)
        slot_s += min(since[1], most_s * max(slots, 1))
    return wall_s, slot_s


def used_limits(connection: sa.Connection, row: sa.Row[Any]) -> list[dict[str, Any]]:
    """Return each limit of a search, with the used and the remaining amount.

    What a search has taken since it was told last goes by the clock of the day, for as long as it
    is not told again at most. Nothing is left of a target.
    """
    searcher = config_of(row).searcher
    given = {} if searcher.limits is None else searcher.limits.model_dump(exclude_none=True)
    # The plan of a method is a limit too, unless a later one is set.
    if (planned := _planned_trials(searcher)) is not None:
        given.setdefault("max_trials", planned)
    if not given:
        return []
    trials, budget = tables.trials.c, Budget(limits=Limited(**given), best=row.best_metric)
    number = sa.select(sa.func.count()).where(trials.experiment_id == row.id)
    # Each reads rows of all trials or attempts, which are many.
    if "max_trials" in given:
        is_counted = sa.or_(trials.stop_reason.is_(None), trials.stop_reason != INVALID_HP)
        budget.num_trials = connection.scalar(number.where(is_counted)) or 0
    if "max_failures" in given:
        is_failed = trials.state == TrialState.ERROR.value
        budget.num_failed = connection.scalar(number.where(is_failed)) or 0
    if "max_wall_time" in given or "max_slot_hours" in given:
        budget.wall_s, budget.slot_s = _taken_now(connection, row)
    found, reached = [], budget.reached(searcher.smaller_is_better)
    for name, used in budget.used().items():
        if (limit := given.get(name)) is not None:
            is_value = name == "target"
            left = None if is_value or used is None else max(limit - used, 0)
            each = {"name": name, "limit": limit, "used": used, "left": left}
            found.append({**each, "is_reached": name == reached})
    return found


def end_reason(row: sa.Row[Any], limits: list[dict[str, Any]]) -> str | None:
    """Return which of the used limits has ended the search of an experiment; None without one."""
    by_name = {each["name"]: each for each in limits}
    reached = next((each["name"] for each in limits if each["is_reached"]), None)
    trials = by_name.get("max_trials")
    if reached is None and trials is not None and not trials["left"]:
        planned = _planned_trials(config_of(row).searcher)
        # A search that has made all trials of its plan has just ended.
        reached = "max_trials" if planned is None or trials["limit"] < planned else None
    if row.search_end is None or reached is None:
        return None
    told = f"the search has reached its limit `{reached}` of {by_name[reached]['limit']:g}"
    if trials is not None:
        told += f", with {trials['used']:.0f} of {trials['limit']:.0f} trials"
    return told


def _planned_trials(searcher: Any) -> int | None:
    planned = getattr(searcher, "max_trials", None)
    return planned if isinstance(planned, int) else None
