"""Quotas of users, groups and projects, and the use of slots that counts against them."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.scheduling.pool_policies import (
    DEFAULT_HALF_LIFE_S,
    Sharing,
    as_slots,
    faded,
    recent_use,
)
from paceline._cluster.master.scheduling.pools import (
    Holding,
    NodeSlots,
    PolicyName,
    PoolSettings,
    QuotaLimits,
)
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.api_models_from_rows import num_slots_of
from paceline._cluster.master.store.row_ids_and_counts import CHECKPOINTS, FILES
from paceline._cluster.messages.master_models import Quota, Reservation, Usage, UsageKey
from paceline._cluster.messages.runner_messages import DEFAULT_POOL, LOCAL_NAME, LOCAL_NODE
from paceline._cluster.messages.states import CheckpointState

DELETED_PROJECT = "deleted-project"
"""Kind of the documents with the names of deleted projects, by their ids."""
_AMOUNTS = ("slot_s", "wait_s", "num_trials", "gpu_s", "training_s", "lost_s", "known_s")
_Key = tuple[str, str, int, str]
_Amounts = tuple[float, ...]


def month_of(moment: float) -> str:
    """Return the month of a time in seconds since the epoch, in UTC: `2026-11`."""
    return f"{datetime.fromtimestamp(moment, timezone.utc):%Y-%m}"


def beginning_of(month: str) -> float:
    """Return when a month begins, in seconds since the epoch."""
    return datetime.strptime(month, "%Y-%m").replace(tzinfo=timezone.utc).timestamp()


def next_month(month: str) -> str:
    """Return the month after another one."""
    return month_of(beginning_of(month) + 32 * 86400)


def read_usage(
    connection: sa.Connection, since: str, until: str, by: Iterable[UsageKey]
) -> list[Usage]:
    """Return what was used in some months, those with most slot hours first.

    Args:
        connection: Shows the projects that count.
        since: The first month.
        until: The last month.
        by: What tells rows apart; the rest is summed up.
    """
    usage, projects = user_tables.usage.c, user_tables.projects.c
    chosen = sa.select(user_tables.usage).where(usage.month.between(since, until))
    found = [(tuple(row[:4]), tuple(row[4:])) for row in connection.execute(chosen)]
    found += _used_by_attempts(connection, beginning_of(since), beginning_of(next_month(until)))
    names = {row.id: row.name for row in connection.execute(sa.select(projects.id, projects.name))}
    documents = tables.documents.c
    gone = sa.select(documents.name, documents.content).where(documents.kind == DELETED_PROJECT)
    names |= {int(number): content["name"] for number, content in connection.execute(gone)}
    wanted = set(by)
    sums: defaultdict[tuple[str | None, ...], list[float]] = defaultdict(
        lambda: [0.0] * len(_AMOUNTS)
    )
    for (month, user, project, pool), amounts in found:
        values = (month, user, names.get(project, str(project)), pool)
        key = tuple(v if k in wanted else None for k, v in zip(UsageKey, values, strict=True))
        _add(sums[key], amounts)
    return [
        Usage(
            **dict(zip((key.value for key in UsageKey), key, strict=True)),
            slot_hours=slot_s / 3600,
            wait_hours=wait_s / 3600,
            num_trials=int(num_trials),
            gpu_hours=gpu_s / 3600,
            training_hours=training_s / 3600,
            lost_hours=lost_s / 3600,
            known_hours=known_s / 3600,
        )
        for key, (slot_s, wait_s, num_trials, gpu_s, training_s, lost_s, known_s) in sorted(
            sums.items(), key=lambda item: (-item[1][0], [part or "" for part in item[0]])
        )
    ]


def keep_usage(connection: sa.Connection, experiment_id: int) -> None:
    """Keep what an experiment used, before its attempts are deleted."""
    sums: defaultdict[_Key, list[float]] = defaultdict(lambda: [0.0] * len(_AMOUNTS))
    for key, amounts in _used_by_attempts(connection, 0.0, time.time(), experiment_id):
        _add(sums[key], amounts)
    usage = user_tables.usage
    for key, amounts_now in sums.items():
        place = [usage.c[name] == value for name, value in zip(_KEYS, key, strict=True)]
        before = connection.execute(sa.select(usage).where(*place)).first()
        if before is not None:
            _add(amounts_now, tuple(before[4:]))
            connection.execute(sa.delete(usage).where(*place))
        values = dict(zip((*_KEYS, *_AMOUNTS), (*key, *amounts_now), strict=True))
        connection.execute(sa.insert(usage).values(values))


def _add(sums: list[float], amounts: Iterable[float]) -> None:
    for index, amount in enumerate(amounts):
        sums[index] += amount


def _used_by_attempts(
    connection: sa.Connection, since_s: float, until_s: float, experiment_id: int | None = None
) -> Iterator[tuple[_Key, _Amounts]]:
    """Yield what the attempts of runners used between two moments, month by month."""
    attempts, trials, experiments = tables.attempts.c, tables.trials.c, tables.experiments.c
    query = (
        sa.select(
            attempts.slots, attempts.members, attempts.node_id, attempts.created_at,
            attempts.ended_at, attempts.number, attempts.num_gpus, attempts.spent,
            trials.created_at.label("asked_at"),
            experiments.owner, experiments.project_id,
            experiments.config[("resources", "pool")].as_string().label("pool"),
        )
        .join(tables.trials, trials.id == attempts.trial_id)
        .join(tables.experiments, experiments.id == attempts.experiment_id)
        .where(
            experiments.external_id.is_(None),
            attempts.created_at < until_s,
            attempts.ended_at.is_(None)
            | (attempts.ended_at >= since_s)
            | (attempts.created_at >= since_s),
        )
    )  # fmt: skip
    if experiment_id is not None:
        query = query.where(attempts.experiment_id == experiment_id)
    found: Iterable[sa.Row[Any]] = connection.execute(query)
    for row in found:
        yield from _by_month(row, since_s, until_s)


def _by_month(row: sa.Row[Any], since_s: float, until_s: float) -> Iterator[tuple[_Key, _Amounts]]:
    key = (row.owner, row.project_id, row.pool or DEFAULT_POOL)
    num_slots = num_slots_of(row)
    if row.number == 1 and row.created_at >= since_s:
        wait_s = max(row.created_at - row.asked_at, 0.0)
        yield (month_of(row.created_at), *key), (0.0, wait_s, 1, *[0.0] * 4)
    spent = row.spent or {}
    # Shares of its time: of each month as of the whole.
    whole_s = max((row.ended_at or 0.0) - row.created_at, 1e-9)
    training, lost = (spent.get(name, 0.0) / whole_s for name in ("training_s", "lost_s"))
    begin = max(row.created_at, since_s)
    end = min(row.ended_at or time.time(), until_s)
    while begin < end:
        month = month_of(begin)
        part_end = min(end, beginning_of(next_month(month)))
        part_s = part_end - begin
        slot_s = num_slots * part_s
        known_s = slot_s if spent else 0.0
        gpu_s = (row.num_gpus or 0) * part_s
        yield (month, *key), (slot_s, 0.0, 0, gpu_s, slot_s * training, slot_s * lost, known_s)
        begin = part_end


# In the time before a reservation, trials of others do not start on its node: how long they take
# is not known, and they would have to leave soon.
_LEAD_S = 3600.0
_KEYS = ("month", "user", "project_id", "pool")
_Owner = str | int
_GROUP = "@"


def group_owner(group: str) -> str:
    """Return the name under which a group stands in place of a user."""
    return f"{_GROUP}{group}"


def read_groups(connection: sa.Connection) -> dict[str, str]:
    """Return the groups of users that are in one, as `group_owner` names them."""
    users = user_tables.users.c
    query = sa.select(users.name, users.member_of).where(users.member_of.is_not(None))
    return {row.name: group_owner(row.member_of) for row in connection.execute(query)}


def note_use(
    connection: sa.Connection,
    experiment: sa.Row[Any],
    pool: str | None,
    num_slots: int,
    begin: float,
    end: float,
    *,
    is_filler: bool,
) -> None:
    """Count the slots of an attempt that ends for its user, project and pool."""
    now, pool = time.time(), pool or DEFAULT_POOL
    # A runner's clock is not ours.
    end = min(end, now)
    settings = tables.pools.c
    hours = connection.scalar(sa.select(settings.half_life_hours).where(settings.name == pool))
    half_life_s = hours * 3600 if hours else DEFAULT_HALF_LIFE_S
    month, use = month_of(end), user_tables.slot_use
    key = (month, experiment.owner, experiment.project_id, pool)
    place = [use.c[name] == value for name, value in zip(_KEYS, key, strict=True)]
    slot_s = num_slots * max(end - max(begin, beginning_of(month)), 0.0)
    recent_s = recent_use(num_slots, begin, end, half_life_s)
    before, at = connection.execute(sa.select(use).where(*place)).first(), end
    if before is not None:
        slot_s += before.slot_s
        if is_filler and before.at <= end:
            # Slots in a gap are no turn of the user: `at` stays, and the use is that of then.
            at = before.at
            recent_s *= 2 ** ((end - at) / half_life_s)
        recent_s += faded(before.recent_s, before.at, at, half_life_s)
        connection.execute(sa.delete(use).where(*place))
    values = {"slot_s": slot_s, "recent_s": recent_s, "at": at}
    connection.execute(sa.insert(use).values(**dict(zip(_KEYS, key, strict=True)), **values))


def note_use_of_month(connection: sa.Connection) -> None:
    """Count what has ended in this month, in a database that was upgraded or made anew."""
    if connection.scalar(sa.select(sa.func.count()).select_from(user_tables.slot_use)):
        return
    attempts, experiments = tables.attempts, tables.experiments.c
    pool = experiments.config[("resources", "pool")].as_string().label("pool")
    query = (
        sa.select(attempts, experiments.owner, experiments.project_id, pool)
        .join(tables.experiments, experiments.id == attempts.c.experiment_id)
        .where(
            experiments.external_id.is_(None),
            attempts.c.ended_at >= beginning_of(month_of(time.time())),
        )
        .order_by(attempts.c.ended_at)
    )
    for row in connection.execute(query).all():
        note_use(connection, row, row.pool, num_slots_of(row), row.created_at, row.ended_at,
                 is_filler=row.is_filler)  # fmt: skip


def read_quotas(connection: sa.Connection) -> Sequence[sa.Row[Any]]:
    """Return the rows of the quotas, those of users first."""
    quotas = user_tables.quotas.c
    order = (quotas.project_id, quotas.user)
    return connection.execute(sa.select(user_tables.quotas).order_by(*order)).all()


def read_sharing(
    connection: sa.Connection,
    rows: Sequence[sa.Row[Any]],
    holding: Sequence[Holding],
    nodes: Iterable[NodeSlots],
    pools: Mapping[str, PoolSettings],
    now: float,
) -> Sharing:
    """Return weights, past use and quotas at a moment.

    Args:
        connection: The database.
        rows: Those of `read_quotas`.
        holding: Attempts that hold slots.
        nodes: The nodes in their pools.
        pools: The settings of the pools.
        now: The time in seconds since the epoch.
    """
    half_lives = {
        name: one.half_life_s
        for name, one in pools.items()
        if one.half_life_s is not None and one.policy is PolicyName.FAIR_SHARE
    }
    groups = read_groups(connection)
    past = _past_use(connection, half_lives, holding, nodes, now) if half_lives else {}
    fair = [name for name, one in pools.items() if one.policy is PolicyName.FAIR_SHARE]
    for known in past.values():
        for user, use in list(known.items()):
            if user in groups:
                known[groups[user]] = known.get(groups[user], 0.0) + use
    return Sharing(
        weights={row.user: row.weight for row in rows if row.user},
        past=past,
        served=_last_served(connection, fair, groups, now) if fair else {},
        quotas=_limits(connection, rows, holding, groups, now),
        groups=groups,
    )


def _past_use(
    connection: sa.Connection,
    half_lives: Mapping[str, float],
    holding: Sequence[Holding],
    nodes: Iterable[NodeSlots],
    now: float,
) -> dict[str, dict[str, float]]:
    past: dict[str, dict[str, float]] = {name: defaultdict(float) for name in half_lives}
    use = user_tables.slot_use.c
    for row in connection.execute(sa.select(user_tables.slot_use).where(use.pool.in_(half_lives))):
        half_life_s = half_lives[row.pool]
        recent_s = faded(row.recent_s, row.at, now, half_life_s)
        past[row.pool][row.user] += as_slots(recent_s, half_life_s)
    pool_of = {node.node_id: node.pool for node in nodes}
    for one in holding:
        pool = pool_of.get(one.node_id, "")
        if pool in past:
            recent_s = recent_use(one.num_slots, one.since, now, half_lives[pool])
            past[pool][one.user] += as_slots(recent_s, half_lives[pool])
    return past


def _last_served(
    connection: sa.Connection, pools: Sequence[str], groups: Mapping[str, str], now: float
) -> dict[str, dict[str, float]]:
    """Return by pool when users and groups last had slots that they have given back."""
    use = user_tables.slot_use.c
    # Not those of a clock that was set back: such users would come last until it is there again.
    is_past = use.at <= now
    query = sa.select(use.pool, use.user, sa.func.max(use.at)).where(use.pool.in_(pools), is_past)
    found: dict[str, dict[str, float]] = {name: {} for name in pools}
    for pool, user, at in connection.execute(query.group_by(use.pool, use.user)):
        for owner in (user, groups[user]) if user in groups else (user,):
            found[pool][owner] = max(found[pool].get(owner, 0.0), at)
    return found


def _limits(
    connection: sa.Connection,
    rows: Sequence[sa.Row[Any]],
    holding: Sequence[Holding],
    groups: Mapping[str, str],
    now: float,
) -> dict[_Owner, QuotaLimits]:
    limits: dict[_Owner, QuotaLimits] = {}
    month, names = month_of(now), _project_names(connection) if rows else {}
    hours: Mapping[_Owner, float] = {}
    sizes: Mapping[_Owner, int] = {}
    media: Mapping[_Owner, int] = {}
    if any(row.slot_hours is not None for row in rows):
        hours = slot_hours(connection, holding, groups, now)
    if wanted := [_owner(row) for row in rows if row.checkpoint_bytes is not None]:
        sizes = stored_bytes(connection, wanted, groups, CHECKPOINTS)
    if wanted := [_owner(row) for row in rows if row.media_bytes is not None]:
        media = stored_bytes(connection, wanted, groups, FILES)
    for row in rows:
        owner, spent = _owner(row), None
        if row.slot_hours is not None and hours.get(owner, 0.0) >= row.slot_hours:
            spent = f"{row.slot_hours:g} slot hours of {month}, until {next_month(month)}-01 UTC"
        elif row.checkpoint_bytes is not None and sizes.get(owner, 0) >= row.checkpoint_bytes:
            size = f"{row.checkpoint_bytes / 2**30:.4g} GiB of checkpoints"
            spent = f"{size}, until some are deleted"
        elif row.media_bytes is not None and media.get(owner, 0) >= row.media_bytes:
            size = f"{row.media_bytes / 2**30:.4g} GiB of media and files"
            spent = f"{size}, until experiments with some are deleted"
        whose = f"user {row.user}" if row.user else f"project {names.get(owner, owner)}"
        if row.user.startswith(_GROUP):
            whose = f"group {row.user[1:]}"
        limits[owner] = QuotaLimits(whose=whose, max_slots=row.max_slots, spent=spent)
    return limits


def _owner(row: sa.Row[Any]) -> _Owner:
    return row.user or int(row.project_id)


def _owners(user: str, project: int, groups: Mapping[str, str]) -> tuple[_Owner, ...]:
    """Return all whose quotas count what a user has in a project."""
    return (user, groups[user], project) if user in groups else (user, project)


def _project_names(connection: sa.Connection) -> dict[_Owner, str]:
    projects = user_tables.projects.c
    return {row.id: row.name for row in connection.execute(sa.select(projects.id, projects.name))}


def slot_hours(
    connection: sa.Connection, holding: Iterable[Holding], groups: Mapping[str, str], now: float
) -> Mapping[_Owner, float]:
    """Return the slot hours of users, groups and projects in the month of a moment."""
    hours: defaultdict[_Owner, float] = defaultdict(float)
    use, month = user_tables.slot_use.c, month_of(now)
    for row in connection.execute(sa.select(user_tables.slot_use).where(use.month == month)):
        for owner in _owners(row.user, row.project_id, groups):
            hours[owner] += row.slot_s / 3600
    for one in holding:
        slot_s = one.num_slots * max(now - max(one.since, beginning_of(month)), 0.0)
        for owner in _owners(one.user, one.project, groups):
            hours[owner] += slot_s / 3600
    return hours


def stored_bytes(
    connection: sa.Connection, owners: Iterable[_Owner], groups: Mapping[str, str], kind: str
) -> Mapping[_Owner, int]:
    """Return the bytes of checkpoints or files that some users, groups and projects have."""
    counts, experiments, wanted = tables.counts.c, tables.experiments.c, list(owners)
    wanted += [user for user, group in groups.items() if group in wanted]
    columns = (experiments.owner, experiments.project_id)
    query = (
        sa.select(*columns, sa.func.sum(counts.num_bytes).label("size"))
        .join(tables.counts, counts.experiment_id == experiments.id)
        .where(
            counts.kind == kind,
            counts.state != CheckpointState.DELETED.value,
            sa.or_(experiments.owner.in_(wanted), experiments.project_id.in_(wanted)),
        )
        .group_by(*columns)
    )
    sizes: defaultdict[_Owner, int] = defaultdict(int)
    for row in connection.execute(query):
        for owner in _owners(row.owner, row.project_id, groups):
            sizes[owner] += row.size
    return sizes


def list_quotas(connection: sa.Connection, holding: Sequence[Holding], now: float) -> list[Quota]:
    """Return the quotas with what counts against them."""
    rows = read_quotas(connection)
    names, groups = _project_names(connection), read_groups(connection)
    hours = slot_hours(connection, holding, groups, now)
    owners = [_owner(row) for row in rows]
    sizes = stored_bytes(connection, owners, groups, CHECKPOINTS)
    media = stored_bytes(connection, owners, groups, FILES)
    return [
        Quota(
            user=None if row.user.startswith(_GROUP) else row.user or None,
            group=row.user[1:] if row.user.startswith(_GROUP) else None,
            project=None if row.user else names.get(row.project_id, str(row.project_id)),
            weight=row.weight,
            max_slots=row.max_slots,
            slot_hours=row.slot_hours,
            checkpoint_bytes=row.checkpoint_bytes,
            revision=row.revision,
            num_slots_used=sum(
                one.num_slots
                for one in holding
                if _owner(row) in (one.user, groups.get(one.user), one.project)
            ),
            slot_hours_used=hours.get(_owner(row), 0.0),
            checkpoint_bytes_used=sizes.get(_owner(row), 0),
            media_bytes=row.media_bytes,
            media_bytes_used=media.get(_owner(row), 0),
        )
        for row in rows
    ]


def read_reservations(connection: sa.Connection, now: float) -> list[Reservation]:
    """Return the reservations that are not over, the next first."""
    columns = user_tables.reservations.c
    query = (
        sa.select(user_tables.reservations).where(columns.ends_at > now).order_by(columns.begins_at)
    )
    found = connection.execute(query.order_by(columns.id))
    return [Reservation.model_validate(row, from_attributes=True) for row in found]


def reserve(connection: sa.Connection, nodes: Iterable[NodeSlots], now: float) -> list[NodeSlots]:
    """Return nodes with the users for whom they are reserved now, or soon."""
    found = [one for one in read_reservations(connection, now) if one.begins_at - _LEAD_S <= now]
    if not found:
        return list(nodes)
    columns = tables.nodes.c
    ids = {row.name: row.id for row in connection.execute(sa.select(columns.name, columns.id))}
    ids[LOCAL_NAME] = LOCAL_NODE
    of_node: defaultdict[int | None, list[Reservation]] = defaultdict(list)
    for one in found:
        of_node[ids.get(one.node)].append(one)
    for node_id, known in of_node.items():
        # One that has begun lets in no users of a later one.
        of_node[node_id] = [one for one in known if one.begins_at <= now] or known
    return [
        replace(
            node,
            reserved_for=frozenset(one.user for one in own),
            reserved_from=min(one.begins_at for one in own),
            reserved_until=max(one.ends_at for one in own),
        )
        if (own := of_node.get(node.node_id))
        else node
        for node in nodes
    ]
