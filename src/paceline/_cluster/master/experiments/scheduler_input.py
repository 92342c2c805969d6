"""Input of the scheduler: nodes, pools, holders of slots, and waiting trials in order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sqlalchemy as sa

from paceline._cluster.master.experiments.attempts import live_attempts
from paceline._cluster.master.experiments.failure_causes import (
    excluded_nodes,
    failed_attempt_nodes,
    nodes_in_start_delay,
    resting_nodes,
    trials_in_start_delay,
)
from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.master.scheduling.interactive_hours import parse_hours
from paceline._cluster.master.scheduling.pool_policies import Sharing
from paceline._cluster.master.scheduling.pools import (
    DEFAULT_PRIORITY,
    Holding,
    IdleLimits,
    NodeSlots,
    PolicyName,
    PoolSettings,
    Waiting,
    fits_nodes,
    in_pools,
)
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.api_models_from_rows import config_of, slots_by_node
from paceline._cluster.master.store.quotas import read_groups, read_quotas, read_sharing, reserve
from paceline._cluster.master.store.reach import current_project, current_reach, current_user
from paceline._cluster.messages.runner_messages import (
    DEFAULT_POOL,
    INTERACTIVE_PACKAGES,
    LOCAL_NODE,
    MAX_TIME_S,
)
from paceline._cluster.messages.states import LIVE_ATTEMPTS, ExperimentState, TrialState
from paceline._cluster.runner.node_facts import installed_packages
from paceline.config._experiment_config import ExperimentConfig
from paceline.config._searcher_registry import MissingSearcher

_NUM_READ_AT_ONCE = 200
PROJECT_PREFIX = "project:"
_NOWHERE: Mapping[int, frozenset[int]] = {}
_NEVER: Mapping[int, float] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The nodes in their pools, and who holds their slots.

    Attributes:
        pausing_nodes: The nodes that get nothing for a moment, and until when.
        failing_nodes: The nodes on which several trials failed.
        returning: Nodes that are not open, but were a moment ago.
        pausing_trials: The same of trials.
        failed_on: Of trials whose last attempts failed, the nodes of these.
        excluded: Nodes on which trials never start.
        sharing: Weights, past use and quotas.
    """

    nodes: list[NodeSlots]
    holding: list[Holding]
    pools: Mapping[str, PoolSettings]
    pausing_nodes: dict[int, float]
    failing_nodes: dict[int, float]
    returning: list[NodeSlots]
    pausing_trials: dict[int, float]
    failed_on: dict[int, frozenset[int]]
    excluded: dict[int, frozenset[int]]
    sharing: Sharing

    def waiting_trials(self, connection: sa.Connection) -> "Iterator[Waiting]":
        """Yield the waiting trials in order, marking those with a better node about to return."""
        for trial in waiting_trials(
            connection, is_by_arrival=self.is_by_arrival, failed_on=self.failed_on
        ):
            excluded = self.excluded.get(trial.trial_id, frozenset())
            awaits = bool(trial.failed_on) and any(
                node.suits(trial.pool, trial.user, trial.num_slots, trial.failed_on | excluded)
                for node in self.returning
            )
            if awaits or excluded:
                yield replace(trial, awaits_node=awaits, excluded=excluded)
            else:
                yield trial

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        held = sum(one.num_slots for one in self.holding)
        return held >= sum(len(node.slots) for node in self.nodes)

    @property
    def preempts(self) -> bool:
        """Whether trials may take the slots of others, by a policy or from fillers."""
        return any(policy is not PolicyName.FIFO for policy in self._policies) or any(
            one.is_filler for one in self.holding
        )

    @property
    def policies(self) -> dict[int, PolicyName]:
        """Scheduling policy of each node, by node id."""
        return {node.node_id: self._policy_of(node.pool) for node in self.nodes}

    @property
    def is_by_arrival(self) -> bool:
        """Whether experiments need not be asked when they last got slots."""
        return PolicyName.FAIR_SHARE not in self._policies

    @property
    def _policies(self) -> set[PolicyName]:
        return {self._policy_of(pool) for pool in {node.pool for node in self.nodes}}

    def _policy_of(self, pool: str) -> PolicyName:
        settings = self.pools.get(pool)
        return PolicyName.FIFO if settings is None else settings.policy


def read_cluster(
    connection: sa.Connection,
    nodes: Sequence[NodeSlots],
    now: float,
    *,
    returning: Sequence[NodeSlots] = (),
    failing: Mapping[int, float] = _NEVER,
) -> Cluster:
    """Return the nodes with their pools, rests, holders of slots and failed trials.

    Args:
        connection: The database.
        nodes: The nodes that are there.
        now: The time in seconds since the epoch.
        returning: Nodes that are not open, but were a moment ago.
        failing: Nodes on which several trials failed, and until when they would rest.
    """
    pools, drained = read_pools(connection), drained_slots(connection)
    for name, one in pools.items():
        if one.interactive_first is not None:
            pools[name] = replace(one, is_interactive_now=one.interactive_first.has(now))
    lacking = nodes_in_start_delay(connection, now)
    placed, returning = in_pools(nodes, pools), in_pools(returning, pools)
    failing = resting_nodes(failing, placed, returning)
    resting = lacking | failing
    returning = [
        replace(node, drained=node.drained | drained.get(node.node_id, frozenset()))
        for node in reserve(connection, returning, now)
    ]
    known = [
        replace(
            node,
            drained=node.drained | drained.get(node.node_id, frozenset()),
            is_pausing=node.node_id in resting or bool(node.problem),
        )
        if node.node_id in drained or node.node_id in resting or node.problem
        else node
        for node in placed
    ]
    # Lacking nodes count as returning: their shortage may pass in a moment.
    returning += [node for node in known if node.node_id in lacking and node.node_id not in failing]
    known, quotas = reserve(connection, known, now), read_quotas(connection)
    is_reserved = any(node.reserved_for is not None for node in known)
    is_ranked = any(one.policy is not PolicyName.FIFO for one in pools.values())
    is_limited = any(one.open_to or one.own_runners for one in pools.values())
    is_interactive = any(one.is_interactive_now for one in pools.values())
    is_owned = is_ranked or is_reserved or is_limited or is_interactive or bool(quotas)
    holding = _slot_holdings(connection, is_ranked=is_owned)
    return Cluster(
        nodes=known,
        holding=holding,
        sharing=read_sharing(connection, quotas, holding, known, pools, now),
        pools=pools,
        pausing_nodes=resting,
        failing_nodes=failing,
        returning=returning,
        pausing_trials=trials_in_start_delay(connection, now),
        failed_on=failed_attempt_nodes(connection) if len(known) + len(returning) > 1 else {},
        excluded=excluded_nodes(connection),
    )


def read_pools(connection: sa.Connection) -> dict[str, PoolSettings]:
    """Return the settings of all stored pools, by name."""
    projects = user_tables.projects.c
    ids: dict[str, int] = {}
    rows = connection.execute(sa.select(tables.pools)).all()
    if any(row.open_to for row in rows):
        named = sa.select(projects.name, projects.id)
        ids = {f"{PROJECT_PREFIX}{row.name}": row.id for row in connection.execute(named)}
    return {
        row.name: PoolSettings(
            policy=PolicyName(row.policy),
            max_slots=row.max_slots,
            labels=row.labels,
            backfill=row.backfill,
            half_life_s=None if row.half_life_hours is None else row.half_life_hours * 3600,
            idle=IdleLimits(
                silent_after_s=row.silent_after_s,
                unused_after_s=row.unused_after_s,
                pause_after_s=row.pause_after_s,
            ),
            best_priority=row.best_priority,
            open_to=frozenset(ids.get(one, one) for one in row.open_to or ()),
            own_runners=row.own_runners,
            interactive_first=parse_hours(row.interactive_first) if row.interactive_first else None,
        )
        for row in rows
    }


def estimated_ends(connection: sa.Connection, now: float) -> dict[int, float]:
    """Return when attempts at work end, if their trials go on as their progress says."""
    trials, attempts = tables.trials.c, tables.attempts.c
    live = sa.select(attempts.trial_id).where(attempts.state.in_(LIVE_ATTEMPTS))
    worked_s = sa.func.sum(sa.func.coalesce(attempts.ended_at, now) - attempts.created_at)
    query = (
        sa.select(sa.func.max(attempts.id), worked_s, trials.progress)
        .join(tables.trials, trials.id == attempts.trial_id)
        .where(attempts.trial_id.in_(live), trials.progress > 0)
        .group_by(attempts.trial_id, trials.progress)
    )
    rows = connection.execute(query)
    ends = {id_: now + max(worked, 0.0) * (1 - done) / done for id_, worked, done in rows}
    # Progress is a stranger's: no clock shows what a tiny one would make of it.
    return {id_: end for id_, end in ends.items() if end <= MAX_TIME_S}


def drained_slots(connection: sa.Connection) -> dict[int, frozenset[int]]:
    """Return the drained slots by node."""
    found: dict[int, set[int]] = {}
    for row in connection.execute(sa.select(tables.drained_slots)).all():
        found.setdefault(row.node_id, set()).add(row.slot)
    return {node_id: frozenset(slots) for node_id, slots in found.items()}


def _slot_holdings(connection: sa.Connection, *, is_ranked: bool) -> list[Holding]:
    """Return the holders of slots; with ranks and owners only if the decisions need these."""
    ranks = _QueueRanks(connection)
    attempts = live_attempts(connection)
    if is_ranked:
        ranks.load({attempt.experiment_id for attempt in attempts})
    found: list[Holding] = []
    places = _moved_places(connection) if any(one.is_filler for one in attempts) else {}
    for attempt in attempts:
        rank = ranks.of(attempt.experiment_id) if is_ranked else {}
        parts = [(node_id, tuple(held)) for node_id, held in slots_by_node(attempt).items()]
        (node_id, slots), *others = parts
        found.append(
            Holding(
                experiment_id=attempt.experiment_id,
                slots=slots,
                node_id=node_id,
                others=tuple(others),
                attempt_id=attempt.id,
                is_leaving=attempt.preempt_reason is not None or attempt.should_kill,
                queue_place=places.get(attempt.experiment_id, attempt.trial_id),
                is_filler=attempt.is_filler,
                since=attempt.created_at,
                **rank,
            )
        )
    return found


def _moved_places(connection: sa.Connection) -> dict[int, float]:
    """Return the queue places of experiments that were moved."""
    experiments = tables.experiments.c
    query = sa.select(experiments.id, experiments.queue_place).where(
        experiments.queue_place.is_not(None)
    )
    return {row.id: row.queue_place for row in connection.execute(query)}


def waiting_trials(
    connection: sa.Connection,
    *,
    is_by_arrival: bool = False,
    failed_on: Mapping[int, frozenset[int]] = _NOWHERE,
) -> Iterator[Waiting]:
    """Yield the waiting trials in order; the caller stops once all slots are used.

    Args:
        connection: The database.
        is_by_arrival: Nobody asks when their experiments last got slots.
        failed_on: Of trials whose last attempts failed, the nodes of these.
    """
    trials, experiments, attempts = tables.trials, tables.experiments, tables.attempts
    running = sa.select(attempts.c.trial_id).where(attempts.c.state.in_(LIVE_ATTEMPTS))
    is_active = experiments.c.state == ExperimentState.ACTIVE.value
    query = (
        sa.select(trials.c.id, trials.c.experiment_id, experiments.c.queue_place)
        .join(experiments, experiments.c.id == trials.c.experiment_id)
        .where(
            trials.c.state == TrialState.ACTIVE.value,
            ~trials.c.is_waiting,
            is_active,
            experiments.c.external_id.is_(None),
            trials.c.id.not_in(running),
        )
    )
    was_moved = sa.select(experiments.c.id).where(is_active, experiments.c.queue_place.is_not(None))
    # The order of ids needs no sorting.
    if connection.execute(was_moved.limit(1)).first() is not None:
        query = query.order_by(
            sa.func.coalesce(experiments.c.queue_place, trials.c.id), trials.c.id
        )
    else:
        query = query.order_by(trials.c.id)
    ranks = _QueueRanks(connection)
    # Streamed in parts: the queue may be long, and the caller usually stops early.
    with connection.execution_options(yield_per=_NUM_READ_AT_ONCE).execute(query) as rows:
        for part in rows.partitions():
            # Lazy reading: only experiments reached by the caller are loaded.
            experiment_ids = {experiment_id for _, experiment_id, _ in part}
            ranks.load(experiment_ids)
            if not is_by_arrival:
                ranks.load_last_served(experiment_ids)
            for trial_id, experiment_id, place in part:
                make_waiting = ranks.waiting(experiment_id)
                if make_waiting is not None:
                    yield make_waiting(
                        trial_id=trial_id,
                        failed_on=failed_on.get(trial_id, frozenset()),
                        queue_place=trial_id if place is None else place,
                    )


class _QueueRanks:
    """Data for the queue order, read once per experiment."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection
        self._known: dict[int, tuple[sa.Row[Any], ExperimentConfig]] = {}
        self._served: dict[int, float] = {}
        self._waiting: dict[int, Callable[..., Waiting] | None] = {}

    def load(self, experiment_ids: set[int]) -> None:
        """Read several experiments at once."""
        wanted = experiment_ids - self._known.keys()
        if not wanted:
            return
        experiments = tables.experiments
        query: sa.Select[Any] = sa.select(
            experiments.c.id,
            experiments.c.config,
            experiments.c.priority,
            experiments.c.weight,
            experiments.c.max_slots,
            experiments.c.created_at,
            experiments.c.owner,
            experiments.c.project_id,
        ).where(experiments.c.id.in_(wanted))
        self._known |= {row.id: (row, config_of(row)) for row in self._connection.execute(query)}

    def load_last_served(self, experiment_ids: set[int]) -> None:
        """Read when several experiments last got slots."""
        wanted = experiment_ids - self._served.keys()
        if not wanted:
            return
        attempts = tables.attempts.c
        query = (
            sa.select(attempts.experiment_id, sa.func.max(attempts.created_at))
            .where(attempts.experiment_id.in_(wanted))
            .group_by(attempts.experiment_id)
        )
        # Fallback for experiments never given slots: they wait since their creation.
        self._served |= {id_: self._known[id_][0].created_at for id_ in wanted}
        self._served |= {row[0]: row[1] for row in self._connection.execute(query)}

    def of(self, experiment_id: int) -> dict[str, Any]:
        """Return priority, weight, user, project and kind of an experiment, as fields."""
        row, config = self._known[experiment_id]
        priority, weight = rank_of(row, config)
        owner = {"user": row.owner, "project": row.project_id}
        kind = {"is_interactive": is_interactive(config)}
        return {"priority": priority, "weight": weight, **owner, **kind}

    def waiting(self, experiment_id: int) -> Callable[..., Waiting] | None:
        """Return a factory of `Waiting` for an experiment; None without its search method.

        Without its method a search decides nothing: its trials wait, others get the slots.
        """
        if experiment_id not in self._waiting:
            self._waiting[experiment_id] = self._make_waiting(experiment_id)
        return self._waiting[experiment_id]

    def _make_waiting(self, experiment_id: int) -> Callable[..., Waiting] | None:
        config = self._known[experiment_id][1]
        if isinstance(config.searcher, MissingSearcher):
            return None
        wanted = config.resources
        return partial(
            Waiting,
            experiment_id=experiment_id,
            num_slots=wanted.fewest_slots,
            max_slots=_max_slots_of(*self._known[experiment_id]),
            # Brackets and trials that are continued may be more than a search may run.
            max_trials=getattr(config.searcher, "max_concurrent_trials", None) or None,
            pool=wanted.pool or DEFAULT_POOL,
            **self.of(experiment_id),
            last_served=self._served.get(experiment_id, 0.0),
            most_slots=wanted.most_slots,
            allow_uneven=wanted.allow_uneven,
            is_task=config.interactive is not None,
        )


def is_interactive(config: ExperimentConfig) -> bool:
    """Return whether somebody works with the trials of an experiment while they run."""
    return config.resources.interactive or config.interactive is not None


def _max_slots_of(experiment: sa.Row[Any], config: ExperimentConfig) -> int | None:
    """Return how many slots an experiment may use at once, None for any number."""
    if experiment.max_slots is None:
        return config.resources.max_slots
    return experiment.max_slots or None


def rank_of(experiment: sa.Row[Any], config: ExperimentConfig) -> tuple[int, float]:
    """Return priority and weight of an experiment: its own settings, or the configuration's."""
    priority, weight = experiment.priority, experiment.weight
    if priority is None:
        priority = config.resources.priority or DEFAULT_PRIORITY
    return priority, config.resources.weight if weight is None else weight


def check_slots(
    connection: sa.Connection, config: ExperimentConfig, known: Sequence[NodeSlots]
) -> None:
    """Refuse a configuration if its trials could never get enough slots in the pool.

    Args:
        connection: Reads the pools.
        config: The configuration.
        known: The slots of all nodes.

    Raises:
        RefusedError: There is no such pool, or its nodes have too few slots.
    """
    wanted, pool = config.resources.fewest_slots, config.resources.pool or DEFAULT_POOL
    nodes = in_pools(known, read_pools(connection))
    pools = sorted({node.pool for node in nodes})
    if pool not in pools:
        raise RefusedError(
            "no_such_pool",
            f"`resources.pool` must be a pool that has a node ({', '.join(pools)}), but got"
            f" {pool!r}. Hint: start `paceline runner --pool {pool}` first.",
        )
    of_pool = [node for node in nodes if node.pool == pool]
    if config.interactive is not None:
        _check_interactive(config, pool, of_pool)
    if fits_nodes(of_pool, wanted, allow_uneven=config.resources.allow_uneven):
        return
    if fits_nodes(of_pool, wanted, allow_uneven=True):
        raise RefusedError(
            "uneven_slots",
            f"`resources.slots_per_trial` must be a number that nodes of the pool {pool!r} have"
            f" together, equally many on each, but got {wanted}. Hint: choose another number,"
            " or allow different numbers by `resources: {allow_uneven: true}`.",
        )
    most = max(len(node.slots) for node in of_pool)
    total = sum(len(node.slots) for node in of_pool if node.can_join)
    whose = "this master" if len(nodes) == 1 else "the largest node of its pool"
    if total > most:
        most, whose = total, "the nodes of its pool that reach each other"
    raise RefusedError(
        "not_enough_slots",
        f"`resources.slots_per_trial` must be at most {most}, the slots of {whose}, but got"
        f" {wanted}. Hint: lower it, or start the master or a runner with more `--slots`.",
    )


def _check_interactive(config: ExperimentConfig, pool: str, nodes: Sequence[NodeSlots]) -> None:
    """Refuse an interactive task that no single node of a pool can run."""
    assert config.interactive is not None
    kind, wanted = config.interactive.kind, config.resources.fewest_slots
    most = max(len(node.slots) for node in nodes)
    if most < wanted:
        raise RefusedError(
            "not_enough_slots",
            f"`resources.slots_per_trial` must be at most {most} for a {kind}, the slots of the"
            f" largest node of the pool {pool!r}, but got {wanted}. Hint: lower `--slots`.",
        )
    package, environment = INTERACTIVE_PACKAGES.get(kind), config.environment
    if package is None or environment.python or environment.uv or environment.prefix:
        return
    known = [
        installed_packages() if node.node_id == LOCAL_NODE else node.packages
        for node in nodes
        if node.slots
    ]
    if all(packages is not None and package not in packages for packages in known):
        raise RefusedError(
            "not_installed",
            f"A node of the pool {pool!r} must have the package {package!r} for a {kind}, but none"
            f" has. Hint: `pip install {package}` for the interpreter of its runner, and start that"
            " again; or name another interpreter by `--python`.",
        )


def check_pool_rules(connection: sa.Connection, pool: str, priority: int | None) -> None:
    """Refuse what the rules of a pool do not allow to what the sender of the request creates.

    Args:
        connection: Reads the pools.
        pool: The pool.
        priority: The priority that the sender chooses, if any.

    Raises:
        RefusedError: The pool is closed to the sender, or takes no such priority from the sender.
    """
    reach, settings = current_reach(), read_pools(connection).get(pool)
    if settings is None or reach is None:
        return
    project = current_project()
    group = read_groups(connection).get(reach.user)
    if not settings.is_open_to(reach.user, group, project):
        raise RefusedError(
            "pool_closed",
            f"`resources.pool` must be a pool that is open to {reach.user!r}, but {pool!r} is not."
            " Hint: `paceline pool list` says to whom it is; an administrator opens it.",
        )
    _check_priority(settings, pool, priority or DEFAULT_PRIORITY, project)


def check_changed_rank(
    connection: sa.Connection,
    experiment: sa.Row[Any],
    changed: ExperimentConfig,
    priority: int | None,
) -> None:
    """Refuse another pool or priority of an experiment if the sender may not choose it.

    To whom the pool is open is seen when its trials want slots: they are its owner's.

    Args:
        connection: Reads the pools.
        experiment: The experiment as it is.
        changed: Its configuration after the change.
        priority: Its own priority after the change, if any.
    """
    before = config_of(experiment)
    pools = [one.resources.pool or DEFAULT_POOL for one in (before, changed)]
    wanted = priority or changed.resources.priority or DEFAULT_PRIORITY
    settings = read_pools(connection).get(pools[1])
    if settings is not None and (rank_of(experiment, before)[0], pools[0]) != (wanted, pools[1]):
        _check_priority(settings, pools[1], wanted, experiment.project_id)


def check_own_runners(
    connection: sa.Connection, experiment: sa.Row[Any], changed: ExperimentConfig
) -> None:
    """Refuse another configuration that would run as somebody else: as the experiment's owner."""
    pool = changed.resources.pool or DEFAULT_POOL
    settings, user = read_pools(connection).get(pool), current_user()
    if settings is not None and settings.own_runners and experiment.owner != user:
        raise RefusedError(
            "other_owner",
            f"The sender of another configuration must be {experiment.owner!r}, as whom trials run"
            f" in the pool {pool!r}, but is {user!r}. Hint: `paceline e fork {experiment.id}` makes"
            " an experiment of your own.",
        )


def _check_priority(settings: PoolSettings, pool: str, priority: int, project: int) -> None:
    """Refuse a priority that only administrators of the project may choose, to others."""
    reach, best = current_reach(), settings.best_priority
    if reach is None or reach.administers is None or project in reach.administers:
        return
    if best is not None and priority < best:
        raise RefusedError(
            "priority_too_high",
            f"`resources.priority` must be {best} or a less important one in the pool {pool!r}, but"
            f" got {priority}. Hint: an administrator of the project may choose it.",
        )
