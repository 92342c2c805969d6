"""Routes of the queue: waiting trials, their order, and the reasons for waiting."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path, Query

from paceline._cluster.master.api.node_and_slot_routes import (
    all_drained,
    count_drained,
    drain_slots,
    resume_slots,
    seen_trials,
)
from paceline._cluster.master.api.readers import ReadingRoute
from paceline._cluster.master.api.requests_and_answers import (
    ApiError,
    MasterOf,
    utc_text,
    write_rows,
)
from paceline._cluster.master.api.route_scopes import ApiRouter
from paceline._cluster.master.experiments.experiment_edits import move_experiment
from paceline._cluster.master.experiments.scheduler_input import (
    PROJECT_PREFIX,
    Cluster,
    estimated_ends,
    read_pools,
)
from paceline._cluster.master.master import Master
from paceline._cluster.master.scheduling.interactive_hours import parse_hours
from paceline._cluster.master.scheduling.pools import (
    NodeSlots,
    PolicyName,
    PoolSettings,
    Reason,
    SchedulingResult,
    StartEstimates,
    Waiting,
    fits_nodes,
    needs_node,
)
from paceline._cluster.master.scheduling.schedule import decide
from paceline._cluster.master.starters.pool_runners import PoolRunners
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Transaction
from paceline._cluster.master.store.reach import check_object, current_reach, note_object
from paceline._cluster.messages.master_models import (
    DrainNode,
    MoveExperiment,
    Pool,
    QueueEntry,
    SetPool,
)
from paceline._cluster.messages.runner_messages import LOCAL_NAME, LOCAL_NODE, NAME_PATTERN

pool_router = ApiRouter(tags=["nodes"], route_class=ReadingRoute)

Name = Annotated[str, Path(pattern=NAME_PATTERN)]
SlotNumber = Annotated[int, Path(ge=0, le=2**31 - 1)]


@pool_router.get("/pools")
def list_pools(master: MasterOf) -> list[Pool]:
    """List the pools with nodes, settings, or runners started by the master."""
    with master.database.read(everything=True) as connection:
        cluster = master.reconciler.cluster(connection, time.time())
        drained = all_drained(master, connection)
    started = master.pool_runners
    known = {node.pool for node in cluster.nodes} | set(cluster.pools) | set(started.names())
    names = _open_to_names(master, cluster)
    pools = []
    for name in sorted(known):
        nodes = [node for node in cluster.nodes if node.pool == name]
        sizes = {node.node_id: len(node.slots) for node in nodes}
        held = [part for one in cluster.holding for part in one.parts if part[0] in sizes]
        settings = cluster.pools.get(name, PoolSettings())
        pools.append(
            Pool(
                name=name,
                policy=settings.policy.value,
                max_slots=settings.max_slots,
                backfill=settings.backfill,
                half_life_hours=settings.half_life_s and settings.half_life_s / 3600,
                labels=dict(settings.labels),
                **asdict(settings.idle),
                best_priority=settings.best_priority,
                open_to=sorted({names.get(one, str(one)) for one in settings.open_to}),
                own_runners=settings.own_runners,
                interactive_first=getattr(settings.interactive_first, "text", None),
                # A master of no slots is no node to its users.
                num_nodes=sum(1 for size in sizes.values() if size),
                num_slots=sum(sizes.values()),
                num_slots_used=sum(len(slots) for _, slots in held),
                **count_drained(drained, sizes, held),
                failure=started.failure(name),
                detail=_describe_absent(started, name, len(nodes)),
            )
        )
    return pools


def _open_to_names(master: Master, cluster: Cluster) -> dict[str | int, str]:
    """Return the projects to which pools are open, in words; only those that the sender sees."""
    named = {one for pool in cluster.pools.values() for one in pool.open_to}
    seen = {one.id: one.name for one in master.users.projects(current_reach())}
    return {
        one: f"{PROJECT_PREFIX}{seen[one]}" if one in seen else "another project"
        for one in named
        if isinstance(one, int)
    }


@pool_router.put("/pools/{name}", status_code=204)
async def set_pool(name: Name, wanted: SetPool, master: MasterOf) -> None:
    """Set a pool's sharing policy, rules and labels of its nodes."""
    for one in wanted.open_to:
        if one.startswith(PROJECT_PREFIX):
            master.users.project_id(one.removeprefix(PROJECT_PREFIX))
        elif not (master.users.has_group(one[1:]) if one[0] == "@" else master.users.reach(one)):
            raise ApiError(404, "not_found", f"There is no user or group {one!r}.")
    try:
        parse_hours(wanted.interactive_first or "00:00-24:00")
    except ValueError as error:
        raise ApiError(422, "invalid_request", f"`interactive_first` {error}") from error

    def job(transaction: Transaction) -> None:
        _forget(transaction, name)
        transaction.connection.execute(
            sa.insert(tables.pools).values(name=name, **wanted.model_dump())
        )
        _tell(transaction, master)

    await write_rows(master, job)


@pool_router.delete("/pools/{name}", status_code=204)
async def reset_pool(name: Name, master: MasterOf) -> None:
    """Reset a pool to the default policy: first come, first served."""

    def job(transaction: Transaction) -> None:
        if name not in read_pools(transaction.connection):
            raise ApiError(404, "not_found", f"The pool {name!r} has no settings.")
        _forget(transaction, name)
        _tell(transaction, master)

    await write_rows(master, job)


@pool_router.post("/nodes/{name}/slots/{slot}/drain", status_code=204)
async def drain_slot(name: Name, slot: SlotNumber, wanted: DrainNode, master: MasterOf) -> None:
    """Close a slot to new attempts; a running attempt moves elsewhere, or finishes."""
    node_id = _node_with_slot(master, name, slot)

    def job(transaction: Transaction) -> None:
        what = f"the slot {slot} of the node {name}"
        drain_slots(master, transaction, node_id, [slot], what=what, finish=wanted.finish)

    await write_rows(master, job)


@pool_router.post("/nodes/{name}/slots/{slot}/resume", status_code=204)
async def resume_slot(name: Name, slot: SlotNumber, master: MasterOf) -> None:
    """Take a drained slot back."""
    node_id = _node_with_slot(master, name, slot)

    await write_rows(master, lambda transaction: resume_slots(master, transaction, node_id, [slot]))


def _tell(transaction: Transaction, master: Master) -> None:
    transaction.after_commit(master.changes.wakeups.wake)
    transaction.after_commit(master.nodes.notify_pool_change)


def _forget(transaction: Transaction, name: str) -> None:
    transaction.connection.execute(sa.delete(tables.pools).where(tables.pools.c.name == name))


def _describe_absent(started: PoolRunners, name: str, num_nodes: int) -> str | None:
    if name in started.names() or num_nodes:
        return started.describe_absent(name, num_nodes)
    return f"No node has joined it. Hint: paceline runner --pool {name}"


def _node_with_slot(master: Master, name: str, slot: int) -> int:
    """Return the id of the node with a slot, or answer 404."""
    nodes = {LOCAL_NAME: (LOCAL_NODE, len(master.devices))}
    nodes |= {node.name: (node.id, len(node.facts.devices)) for node in master.nodes.all()}
    if name not in nodes:
        known = ", ".join(nodes)
        raise ApiError(404, "not_found", f"There is no node {name!r}. The nodes are: {known}.")
    node_id, number = nodes[name]
    if slot >= number:
        raise ApiError(
            404,
            "not_found",
            f"The node {name!r} must have the slot {slot}, but has {number}, counted from 0.",
        )
    return node_id


queue_router = ApiRouter(tags=["queue"], route_class=ReadingRoute)

# Clients know no words for those of trials that wait for another node, or for others of their
# search.
_WORDS: dict[Reason, Any] = {
    Reason.ELSEWHERE: "slots_in_use",
    Reason.MAX_TRIALS: "max_slots",
    Reason.CLOSED_POOL: "pool_limit",
}

_NEED_SLOTS = (Reason.SLOTS_IN_USE, Reason.TOO_LARGE)
_ALL_CLOSED = (
    "All slots of the pool {pool!r} are drained, or their nodes do not answer. Hint: `paceline slot"
    " list` shows them; `paceline runner resume NAME` takes a drained node back."
)


@queue_router.get("/queue")
def list_queue(
    master: MasterOf,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    pool: Annotated[str | None, Query(max_length=63)] = None,
    trial_id: Annotated[int | None, Query(ge=1)] = None,
) -> list[QueueEntry]:
    """List the trials waiting for slots in scheduling order, with the reason for each wait.

    Pools that share by another policy than first come, first served come one after the other. With
    `trial_id`, the list has that trial alone, and is empty if it does not wait.
    """
    now, seen = time.time(), seen_trials(master)
    # Trials of other projects are ahead as well, but are not named.
    with master.database.read(everything=True) as connection:
        cluster = master.reconciler.cluster(connection, now)
        ends = estimated_ends(connection, now)
        starts = StartEstimates(cluster.holding, cluster.nodes, ends, cluster.pools)
        found = (
            (one, start)
            for one in _queue_results(connection, cluster)
            # Each of them takes its turn, also those that are not shown.
            for start in [starts.note(one)]
            if pool in (None, one.waiting.pool)
            and trial_id in (None, one.waiting.trial_id)
            and (seen is None or one.waiting.trial_id in seen)
        )
        shown = list(islice(found, limit if trial_id is None else 1))
        facts = _queued_trials(connection, [one.waiting.trial_id for one, _ in shown])
    started = master.pool_runners
    failures = {
        name: started.failure(name) or started.describe_starting(name) for name in started.names()
    }
    addresses = {node.id: f"{node.name} ({node.facts.address})" for node in master.nodes.all()}
    entries = [
        _queue_entry(
            facts[one.waiting.trial_id], cluster, one, now, addresses,
            failures.get(one.waiting.pool), start,
        )
        for one, start in shown
    ]  # fmt: skip
    return [_without_hidden(entry, seen) for entry in entries]


def _without_hidden(entry: QueueEntry, seen: frozenset[int] | None) -> QueueEntry:
    """Return an entry that names no trial which the sender does not see."""
    if seen is None or entry.behind_trial_id is None or entry.behind_trial_id in seen:
        return entry
    hidden = {"behind_trial_id": None, "behind_experiment_id": None}
    return entry.model_copy(
        update={**hidden, "detail": "A trial of another project comes before it."}
    )


@queue_router.post("/queue/move", status_code=204)
async def move_in_queue(request: MoveExperiment, master: MasterOf) -> None:
    """Move an experiment within its pool's queue, among experiments of equal priority."""
    given = [one for one in (request.ahead_of, request.behind, request.to) if one is not None]
    if len(given) != 1:
        raise ApiError(
            422, "invalid_request", "One of `ahead_of`, `behind` and `to` must be given."
        )

    def job(transaction: Transaction) -> None:
        for one in (request.ahead_of, request.behind):
            check_object(transaction.connection, "experiment_id", one)
        check_object(transaction.connection, "experiment_id", request.experiment_id, changes=True)
        note_object(f"experiment {request.experiment_id}")
        move_experiment(
            transaction,
            request.experiment_id,
            ahead_of=request.ahead_of,
            behind=request.behind,
            to_end=request.to == "end",
        )
        transaction.after_commit(master.changes.wakeups.wake)

    await write_rows(master, job)


def _queue_results(connection: sa.Connection, cluster: Cluster) -> Iterator[SchedulingResult]:
    resting = []

    def ready() -> Iterator[Any]:
        for trial in cluster.waiting_trials(connection):
            if trial.trial_id in cluster.pausing_trials:
                resting.append(trial)
            else:
                yield trial

    yield from decide(ready(), cluster.holding, cluster.nodes, cluster.pools, cluster.sharing)
    for trial in resting:
        yield SchedulingResult(waiting=trial, reason=Reason.PAUSING)


def _queued_trials(connection: sa.Connection, ids: list[int]) -> dict[int, Any]:
    """Return each trial's experiment name and time of entering the queue."""
    trials, experiments, attempts = tables.trials.c, tables.experiments.c, tables.attempts.c
    query = (
        sa.select(trials.id, experiments.name, trials.created_at, sa.func.max(attempts.ended_at))
        .select_from(tables.trials)
        .join(tables.experiments, experiments.id == trials.experiment_id)
        .outerjoin(tables.attempts, attempts.trial_id == trials.id)
        .where(trials.id.in_(ids))
        .group_by(trials.id)
    )
    return {row.id: row for row in connection.execute(query).all()}


def _queue_entry(
    facts: Any,
    cluster: Cluster,
    result: SchedulingResult,
    now: float,
    addresses: Mapping[int, str],
    failure: str | None,
    start: float | None,
) -> QueueEntry:
    """Return a waiting trial; `failure` says why its pool has no runner."""
    waiting, reason, behind = result.waiting, result.reason, result.behind
    _, name, created_at, ended_at = facts
    settings = cluster.pools.get(waiting.pool, PoolSettings())
    detail = _queue_detail(cluster, settings, result, now, addresses)
    if failure is not None and needs_node(result):
        detail = f"{detail} {failure}"
    elif reason in _NEED_SLOTS and _are_all_closed(cluster, waiting.pool):
        detail = _ALL_CLOSED.format(pool=waiting.pool)
    return QueueEntry(
        trial_id=waiting.trial_id,
        experiment_id=waiting.experiment_id,
        experiment_name=name,
        num_slots=waiting.num_slots,
        waiting_since=max(created_at, ended_at or 0.0),
        reason="starting" if reason is None else _WORDS.get(reason, reason.value),
        detail=detail,
        pool=waiting.pool,
        num_ahead=result.place,
        behind_trial_id=behind.trial_id if behind else None,
        behind_experiment_id=behind.experiment_id if behind else None,
        priority=waiting.priority if settings.policy is PolicyName.PRIORITY else None,
        weight=waiting.weight if settings.policy is PolicyName.FAIR_SHARE else None,
        estimated_start=start,
    )


def _queue_detail(
    cluster: Cluster,
    settings: PoolSettings,
    result: SchedulingResult,
    now: float,
    addresses: Mapping[int, str],
) -> str:
    waiting, behind = result.waiting, result.behind
    of_pool = [
        len(set(node.slots) - node.drained)
        for node in cluster.nodes
        if node.pool == waiting.pool
        and node.node_id not in cluster.failing_nodes
        and not node.problem
        and not node.is_closed_to(waiting.user)
    ]
    total, largest = sum(of_pool), max(of_pool, default=0)
    match result.reason:
        case None:
            return "Its slots are free: it starts in a moment."
        case Reason.SLOTS_IN_USE:
            where = " on one node" * (len(of_pool) > 1 and waiting.num_slots <= largest)
            are = "is" if waiting.num_slots == 1 else "are"
            text = f"It waits until {waiting.num_slots} of {_slots_text(total)} {are} free{where}."
            there = [node for node in cluster.nodes if node.is_open and _may_use(node, result)]
            fits = fits_nodes(there, waiting.num_slots, allow_uneven=waiting.allow_uneven)
            return text if fits else text + _away_in_queue(cluster, waiting, addresses)
        case Reason.BEHIND_OTHERS:
            assert behind is not None
            return _behind_in_queue(settings, waiting, behind)
        case Reason.MAX_SLOTS | Reason.MAX_TRIALS | Reason.POOL_LIMIT | Reason.QUOTA:
            return _limit_in_queue(settings, result)
        case Reason.CLOSED_POOL:
            return f"The pool {waiting.pool!r} is not open to {waiting.user}, by its settings."
        case Reason.RESERVED:
            return _reserved_in_queue(cluster, waiting, addresses)
        case Reason.PREEMPTING:
            return "Trials behind it, or less important ones, store a checkpoint and make room."
        case Reason.ELSEWHERE:
            if waiting.awaits_node:
                return "It failed on a node, and waits for another one, which is away."
            return "It failed on a node, and waits until another one has room."
        case Reason.PAUSING:
            return _pausing_in_queue(cluster, result, now, addresses)
        case Reason.TOO_LARGE if len(cluster.nodes) == 1 and total:
            return f"It needs {_slots_text(waiting.num_slots)}, but there are only {total}."
        case _:
            return _too_large_for_queue(cluster, result, total, largest, addresses)


def _behind_in_queue(settings: PoolSettings, waiting: Waiting, behind: Waiting) -> str:
    text = (
        f"Trial {behind.trial_id} of experiment {behind.experiment_id} comes before it and"
        f" waits for {_slots_text(behind.num_slots)}."
    )
    hours = settings.interactive_first
    if hours is not None and settings.is_interactive_now and behind.is_interactive:
        text += f" Interactive trials come first: {hours.text}." * (not waiting.is_interactive)
    return text


def _away_in_queue(cluster: Cluster, waiting: Waiting, addresses: Mapping[int, str]) -> str:
    away = [
        addresses[node.node_id].partition(" ")[0]
        for node in cluster.returning
        if node.pool == waiting.pool and not node.problem and node.node_id in addresses
    ]
    return f" Away, perhaps for a moment: {', '.join(away[:3])}." if away else ""


def _limit_in_queue(settings: PoolSettings, result: SchedulingResult) -> str:
    waiting, quota = result.waiting, result.quota
    if result.reason is Reason.MAX_SLOTS:
        return f"Its experiment may use {waiting.max_slots} slots at a time."
    if result.reason is Reason.MAX_TRIALS:
        return f"Its search may run {waiting.max_trials} trial(s) at a time."
    if quota is None:
        return f"The pool {waiting.pool!r} may use {settings.max_slots} slots at a time."
    if quota.spent is None:
        return f"Quota: the {quota.whose} may use {_slots_text(quota.max_slots or 0)} at a time."
    return f"Quota: the {quota.whose} has used up {quota.spent}."


def _are_all_closed(cluster: Cluster, pool: str) -> bool:
    """Return whether a pool has slots, but all of them are closed to trials."""
    nodes = [node for node in cluster.nodes if node.pool == pool]
    is_any_left = any(node.is_open and set(node.slots) - node.drained for node in nodes)
    return any(node.slots for node in nodes) and not is_any_left


def _too_large_for_queue(
    cluster: Cluster,
    result: SchedulingResult,
    total: int,
    largest: int,
    addresses: Mapping[int, str],
) -> str:
    waiting = result.waiting
    needed = f"It needs {_slots_text(waiting.num_slots)}, but"
    if total < waiting.num_slots:
        num_drained = sum(len(node.drained) for node in cluster.nodes if node.pool == waiting.pool)
        drained = f" ({num_drained} more {'are' if num_drained > 1 else 'is'} drained)"
        return (
            f"{needed} the pool {waiting.pool!r} has {total or 'none'} now"
            f"{drained if num_drained else ''}.{_away_in_queue(cluster, waiting, addresses)}"
        )
    text = (
        f"{needed} in the pool {waiting.pool!r} no node has more than {largest}, and no nodes that"
        f" reach each other have so many"
        f" together{', equally many on each' * (not waiting.allow_uneven)}."
        f"{_away_in_queue(cluster, waiting, addresses)}"
    )
    cut_off = [
        addresses[node.node_id]
        for node in cluster.nodes
        if node.pool == waiting.pool and not node.can_join and addresses.get(node.node_id)
    ]
    if cut_off:
        text += (
            f" Other machines do not reach {', '.join(cut_off[:3])}. Hint: start the runner there"
            " with `--address HOST`."
        )
    return text


def _may_use(node: NodeSlots, result: SchedulingResult) -> bool:
    waiting = result.waiting
    return node.pool == waiting.pool and not node.is_closed_to(waiting.user)


def _pausing_in_queue(
    cluster: Cluster, result: SchedulingResult, now: float, addresses: Mapping[int, str]
) -> str:
    until = cluster.pausing_trials.get(result.waiting.trial_id)
    if until is not None:
        why = "Its runner died several times in a row, or its nodes did not come together"
    elif sick := [node for node in cluster.nodes if node.problem and _may_use(node, result)]:
        more = f" ({len(sick) - 1} more rest, too)" * (len(sick) > 1)
        name = addresses.get(sick[0].node_id, "of its pool").partition(" ")[0]
        return f"The node {name} rests until a check passes: {sick[0].problem}{more}."
    else:
        until = min(cluster.pausing_nodes.values(), default=now)
        why = "An attempt could not start on the node that it needs"
        if until in cluster.failing_nodes.values():
            return (
                "Several trials failed on the node that it needs, which rests for"
                f" {max(until - now, 0.0):.0f} s; another node would do."
            )
    return f"{why}; the next one starts in {max(until - now, 0.0):.0f} s."


def _reserved_in_queue(cluster: Cluster, waiting: Waiting, addresses: Mapping[int, str]) -> str:
    nodes = [node for node in cluster.nodes if node.pool == waiting.pool and node.slots]
    if excluded := [node for node in nodes if node.node_id in waiting.excluded]:
        names = [addresses.get(one.node_id, LOCAL_NAME).partition(" ")[0] for one in excluded]
        left = "no other node has room for it"
        return f"A log policy of its config excludes {', '.join(names)}, and {left}."
    closed = [node for node in nodes if node.is_closed_to(waiting.user)]
    if others := [node for node in closed if node.is_owners and node.owner != waiting.user]:
        own = "runners of their own user"
        return (
            f"Trials of the pool {waiting.pool!r} start only on {own}: {len(others)} of its"
            f" {len(nodes)} nodes are of others than {waiting.user}."
        )
    users = ", ".join(sorted({user for node in closed for user in node.reserved_for or ()}))
    until = utc_text(min(node.reserved_until for node in closed))
    return f"The nodes that it needs are reserved for {users}, until {until}."


def _slots_text(number: int) -> str:
    return f"{number} slot{'s' * (number != 1)}"
