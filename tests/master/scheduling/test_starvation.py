"""No trial that fits starves, and each reason for waiting holds: pairs of all rules, in time."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_simulation import Job, Simulation, ours

from paceline._cluster.master.scheduling.pool_policies import Sharing
from paceline._cluster.master.scheduling.pools import (
    Holding,
    NodeSlots,
    PolicyName,
    PoolSettings,
    QuotaLimits,
    Reason,
    SchedulingResult,
    Waiting,
    fits_nodes,
    in_pools,
)
from paceline._cluster.master.scheduling.schedule import decide, schedule

FIFO, PRIORITY, FAIR_SHARE = PolicyName.FIFO, PolicyName.PRIORITY, PolicyName.FAIR_SHARE
# Those of trials that no limit, no rule and no missing node holds: they are in line.
IN_LINE = {
    None, Reason.SLOTS_IN_USE, Reason.BEHIND_OTHERS, Reason.PREEMPTING, Reason.POOL_LIMIT,
    Reason.ELSEWHERE,
}  # fmt: skip
LAST_CHANGE = 60


@dataclass
class World:
    """A pool whose nodes and hours change, with users, quotas and a stream of trials."""

    simulation: Simulation
    settings: PoolSettings
    jobs: list[Job]
    nodes: list[NodeSlots]
    num_changes: int = 0
    in_line: dict[int, set[int]] = field(default_factory=dict)
    # Starts of others since a trial is in line, by user, under fair shares.
    starts: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def pools(self) -> dict[str, PoolSettings]:
        return {"default": self.settings}

    def results(self) -> list[SchedulingResult]:
        simulation = self.simulation
        return list(
            decide(
                simulation.queue(), list(simulation.running.values()), simulation.nodes,
                self.pools, simulation.shares(),
            )
        )  # fmt: skip


def make_world(seed: int, policy: PolicyName, *, backfill: bool, changes: bool) -> World:
    """Return a world of a few nodes and users; a stream of small trials, and some large ones."""
    draw = random.Random(seed)
    can_join = draw.random() < 0.5
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
    nodes = [
        NodeSlots(
            node_id=n, slots=tuple(range(size)), can_join=can_join, owner=draw.choice("ab"),
        )
        for n, size in enumerate(sizes)
    ]  # fmt: skip
    total = sum(sizes)
    users = "abcd"
    groups = {"a": "@g", "b": "@g"} if draw.random() < 0.5 else {}
    limited = [one for one in (*users, "@g", 1, 2) if draw.random() < 0.25]
    quotas = {one: QuotaLimits(whose=str(one), max_slots=draw.randint(1, total)) for one in limited}
    jobs = []
    for experiment_id in range(1, 9):
        size = draw.choice([1, 1, 2, draw.randint(1, total)])
        kind = {
            "experiment_id": experiment_id, "num_slots": size, "user": draw.choice(users),
            "project": draw.randint(1, 2), "priority": draw.choice([10, 42]),
            "max_slots": draw.choice([None, None, size, size + 2]),
            "max_trials": draw.choice([None, None, 2]), "allow_uneven": draw.random() < 0.3,
            "is_interactive": draw.random() < 0.3, "is_task": draw.random() < 0.2,
            "excluded": frozenset({0} if draw.random() < 0.1 else ()),
            "failed_on": frozenset({1} if draw.random() < 0.1 else ()),
        }  # fmt: skip
        for _ in range(draw.choice([1, 8])):
            trial = Waiting(trial_id=0, **kind)
            jobs.append(Job(draw.uniform(0, 50), trial, draw.choice([1.0, 3.0, 15.0])))
    jobs.sort(key=lambda job: job.at)
    jobs = [
        replace(job, trial=replace(job.trial, trial_id=n, queue_place=float(n)))
        for n, job in enumerate(jobs, 1)
    ]
    # A limit of the pool below that of a trial holds it for ever.
    limit = draw.choice([None, None, max(total - 1, 1)])
    pool = PoolSettings(policy=policy, backfill=backfill, max_slots=limit)
    leaving_s = draw.choice([0.0, 2.0])
    simulation = Simulation(
        nodes=nodes, rule=ours(pool), sharing=Sharing(quotas=quotas, groups=groups),
        leaving_s=leaving_s,
    )  # fmt: skip
    world = World(simulation, pool, jobs, nodes)
    simulation.rule = lambda waiting, holding, nodes, sharing: schedule(
        waiting, holding, nodes, world.pools, sharing
    )
    simulation.add(jobs)
    if changes:
        for at in sorted(draw.uniform(0, LAST_CHANGE) for _ in range(6)):
            simulation.call_at(at, lambda: change(world, draw))
    simulation.call_at(LAST_CHANGE, lambda: change(world, None))
    return world


def change(world: World, draw: random.Random | None) -> None:
    """Reserve, drain, close or rest a node, or change the rules; None undoes all of it."""
    simulation, settings = world.simulation, world.settings
    world.num_changes += 1
    world.in_line.clear()
    if draw is None:
        simulation.nodes = world.nodes
        world.settings = replace(settings, is_interactive_now=False, open_to=frozenset())
        return
    nodes = list(simulation.nodes)
    n = draw.randrange(len(nodes))
    slots = frozenset(nodes[n].slots)
    nodes[n] = replace(
        world.nodes[n],
        **draw.choice(
            [
                {"reserved_for": frozenset({draw.choice("abcd")})},
                {"is_owners": True},
                {"drained": slots},
                {"is_open": False},
                {"is_pausing": True},
                {},
            ]
        ),
    )
    simulation.nodes = nodes
    hours = draw.random() < 0.5
    open_to = frozenset("abc") if draw.random() < 0.2 else frozenset()
    world.settings = replace(settings, is_interactive_now=hours, open_to=open_to)
    for attempt_id, one in list(simulation.running.items()):
        on = [node for node in nodes if node.node_id in dict(one.parts)]
        if any(node.drained or node.is_closed_to(one.user) for node in on):
            simulation.leave(attempt_id)


def check_reasons(world: World, results: list[SchedulingResult]) -> None:
    """Check that what starts breaks no rule, and that each reason really holds the trial."""
    simulation, pool = world.simulation, world.settings
    nodes, sharing = list(simulation.nodes), simulation.sharing
    holding = list(simulation.running.values())
    held = {(node_id, slot) for one in holding for node_id, slots in one.parts for slot in slots}
    used_by: Counter[object] = Counter()
    for one in holding:
        count(used_by, sharing, one, one.num_slots)
    # With what is kept for those that wait: no more than these may hold up others.
    kept_by = used_by.copy()
    before: dict[int, SchedulingResult] = {}
    for result in results:
        trial, reason = result.waiting, result.reason
        mine = [node for node in nodes if not node.is_closed_to(trial.user)]
        mine = [node for node in mine if node.node_id not in trial.excluded]
        owners = owners_of(sharing, trial)
        if reason is None:
            parts = [(result.node_id, result.slots), *result.others]
            own = {(node_id, slot) for node_id, slots in parts for slot in slots}
            assert len(own) == trial.num_slots
            assert not own & held
            held |= own
            for node_id, slots in parts:
                node = next(node for node in mine if node.node_id == node_id)
                assert node.is_open
                assert not node.is_pausing
                assert set(slots) <= set(node.slots) - node.drained
            assert not trial.is_task or (len(parts) == 1 and not result.is_filler)
            count(used_by, sharing, trial, trial.num_slots)
            for owner in owners:
                quota = sharing.quotas.get(owner)
                assert quota is None or used_by[owner] <= quota.max_slots
            assert (
                trial.max_slots is None or used_by["slots", trial.experiment_id] <= trial.max_slots
            )
            most = trial.max_trials
            assert most is None or used_by["trials", trial.experiment_id] <= most
            assert pool.max_slots is None or used_by["all"] <= pool.max_slots
            assert pool.is_open_to(trial.user, sharing.groups.get(trial.user), trial.project)
            first = [one for one in before.values() if one.reason is Reason.SLOTS_IN_USE]
            assert result.is_filler or not first
        elif reason is Reason.QUOTA:
            assert result.quota in [sharing.quotas.get(owner) for owner in owners]
            owner = next(one for one in owners if sharing.quotas.get(one) == result.quota)
            assert kept_by[owner] + trial.num_slots > result.quota.max_slots
        elif reason is Reason.MAX_SLOTS:
            assert kept_by["slots", trial.experiment_id] + trial.num_slots > trial.max_slots
        elif reason is Reason.MAX_TRIALS:
            assert kept_by["trials", trial.experiment_id] >= trial.max_trials
        elif reason is Reason.POOL_LIMIT:
            assert kept_by["all"] + trial.num_slots > pool.max_slots
        elif reason is Reason.CLOSED_POOL:
            assert trial.user == "d"
            assert pool.open_to
        elif reason is Reason.TOO_LARGE:
            assert not fits(nodes, trial)
        elif reason is Reason.RESERVED:
            assert fits(nodes, trial)
            assert not fits(mine, trial)
        elif reason is Reason.PAUSING:
            assert not fits([node for node in mine if not node.is_pausing], trial)
        elif reason is Reason.BEHIND_OTHERS:
            behind = before[result.behind.trial_id]
            assert behind.reason in (Reason.SLOTS_IN_USE, Reason.POOL_LIMIT)
            if pool.is_interactive_now:
                assert behind.waiting.is_interactive >= trial.is_interactive
        elif reason is Reason.SLOTS_IN_USE:
            free = [
                replace(node, drained=node.drained | {s for n, s in held if n == node.node_id})
                for node in mine
                if node.is_open and not node.is_pausing
            ]
            keepers = {Reason.PREEMPTING, Reason.ELSEWHERE}
            assert not fits(free, trial) or keepers & {one.reason for one in before.values()}
        elif reason is Reason.PREEMPTING:
            preempting = [one for one in before.values() if one.preempts]
            assert result.preempts or preempting or any(one.is_leaving for one in holding)
        count(kept_by, sharing, trial, trial.num_slots)
        before[trial.trial_id] = result


def fits(nodes: list[NodeSlots], trial: Waiting) -> bool:
    if trial.is_task:
        return any(fits_nodes([node], trial.num_slots) for node in nodes)
    return fits_nodes(nodes, trial.num_slots, allow_uneven=trial.allow_uneven)


def owners_of(sharing: Sharing, one: Waiting | Holding) -> list[object]:
    group = sharing.groups.get(one.user)
    return [owner for owner in (one.user, group, one.project) if owner is not None]


def count(used: Counter[object], sharing: Sharing, one: Waiting | Holding, slots: int) -> None:
    for owner in (*owners_of(sharing, one), "all", ("slots", one.experiment_id)):
        used[owner] += slots
    used["trials", one.experiment_id] += 1


def check_line(world: World, results: list[SchedulingResult]) -> None:
    """Check that each trial in line waits for those that ran or were before it when it came.

    So it starts within as many ends: those of attempts that ran then, and of trials before it. More
    important ones may come later, and under fair shares, one trial of each user that has no slots.
    """
    simulation, policy = world.simulation, world.settings.policy
    running = {simulation.trial_of[n].trial_id: one for n, one in simulation.running.items()}
    groups = simulation.sharing.groups
    for result in results:
        if policy is FAIR_SHARE and (result.preempts or result.slots and not result.is_filler):
            note_turn(world, result.waiting)
    before: list[Waiting] = []
    started: list[Waiting] = []
    for result in results:
        trial = result.waiting
        top = groups.get(trial.user, trial.user)
        # What its own user and group have counts in their share, so that others come before it.
        holds = policy is FAIR_SHARE and any(
            top == groups.get(one.user, one.user)
            for one in (*started, *(one for one in running.values() if not one.is_filler))
        )
        # A node that does not answer is lost in a moment, or back. Until then, a trial for it
        # may hold up others.
        has_room = all(
            can_ever_start(world, one, nodes_for(simulation.nodes, one))
            for one in (trial, result.behind)
            if one is not None
        )
        if result.reason not in IN_LINE or holds or not has_room:
            world.in_line.pop(trial.trial_id, None)
        elif result.reason is not None:
            present = set(running) | {one.trial_id for one in before}
            if trial.trial_id not in world.in_line:
                world.in_line[trial.trial_id] = set(present)
                world.starts[trial.trial_id] = {}
            known = world.in_line[trial.trial_id]
            others = [*before, *running.values()]
            allowed = bool(known & present) or result.reason is Reason.PREEMPTING
            if policy is PRIORITY:
                allowed = allowed or any(one.priority < trial.priority for one in others)
            if world.settings.is_interactive_now and not trial.is_interactive:
                allowed = allowed or any(one.is_interactive for one in others)
            assert allowed, (simulation.now, result, before, running)
        before.append(trial)
        started += [trial] * bool(result.slots or result.preempts)


def nodes_for(nodes: Iterable[NodeSlots], trial: Waiting) -> list[NodeSlots]:
    return [
        node
        for node in nodes
        if node.is_open and not node.is_pausing and not node.is_closed_to(trial.user)
    ]


def note_turn(world: World, started: Waiting) -> None:
    """Let those in line wait for one trial of each user that had its turn."""
    for trial_id, starts in world.starts.items():
        if trial_id in world.in_line:
            world.in_line[trial_id].add(starts.setdefault(started.user, started.trial_id))


def can_ever_start(world: World, trial: Waiting, nodes: list[NodeSlots]) -> bool:
    sharing, pool = world.simulation.sharing, world.settings
    quotas = [sharing.quotas.get(owner) for owner in owners_of(sharing, trial)]
    limits = [one.max_slots for one in quotas if one is not None] + [pool.max_slots]
    nodes = [node for node in nodes if node.node_id not in trial.excluded]
    return fits(nodes, trial) and all(one is None or trial.num_slots <= one for one in limits)


@pytest.mark.long
@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("backfill", [False, True])
@given(st.integers(0, 10**9), st.booleans())
def test_each_trial_starts_after_those_that_came_before_and_waits_for_a_reason_that_holds(
    policy: PolicyName, backfill: bool, seed: int, changes: bool
) -> None:
    world = make_world(seed, policy, backfill=backfill, changes=changes)
    for number, _ in enumerate(world.simulation.steps()):
        results = world.results()
        check_reasons(world, results)
        check_line(world, results)
        assert number < 5000, "The schedule never comes to rest."
    ended = world.simulation.ended
    starved = [
        job.trial
        for job in world.jobs
        if job.trial.trial_id not in ended and can_ever_start(world, job.trial, world.nodes)
    ]
    assert starved == []


# ---- a large trial, and small ones for ever -----------------------------------------------------


def ends_before(
    large: Waiting,
    small: list[Waiting],
    pool: PoolSettings,
    *,
    num_slots: int,
    quotas: dict[str | int, QuotaLimits] | None = None,
    groups: dict[str, str] | None = None,
    large_at: float = 0.5,
) -> int:
    """Return how many trials end before a large one starts, of a stream of small ones.

    Each of `small` comes 200 times, one per second, and trains for two seconds or more. The trials
    of the stream have ids, and places in the queue, from 100 on.
    """
    nodes = [NodeSlots(slots=tuple(range(num_slots)))]
    sharing = Sharing(quotas=quotas or {}, groups=groups or {})
    simulation = Simulation(nodes=nodes, rule=ours(pool), sharing=sharing)
    for n, kind in enumerate(small):
        for number in range(200):
            trial_id = 100 + number * len(small) + n
            trial = replace(kind, trial_id=trial_id, queue_place=float(trial_id))
            at = kind.queue_place if kind.queue_place else number + n / len(small)
            simulation.add([Job(at, trial, 2.0 + n)])
    simulation.add([Job(large_at, large, 1.0)])
    for _ in simulation.steps():
        if large.trial_id in simulation.began:
            break
    assert large.trial_id in simulation.began
    began = simulation.began[large.trial_id]
    return sum(at <= began and at > large_at for at in simulation.ended.values())


def kind(experiment_id: int, num_slots: int, user: str, **more: object) -> Waiting:
    values = {"trial_id": experiment_id, "max_slots": None, "last_served": 0.0} | more
    return Waiting(
        experiment_id=experiment_id, num_slots=num_slots, user=user, **values,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("owner", ["ada", "@lab", 7])
def test_a_large_trial_is_not_kept_waiting_by_small_ones_of_its_own_quota(
    policy: PolicyName, owner: str | int
) -> None:
    """They would use the quota up for ever, as each of them fits in what is left of it."""
    large = kind(1, 4, "ada", project=7, queue_place=2.0)
    user = "ada" if owner == "ada" else "bob"
    small = [kind(2, 1, user, project=7), kind(3, 1, "eve")]
    quotas = {owner: QuotaLimits(whose="x", max_slots=4)}
    groups = {"ada": "@lab", "bob": "@lab"}
    number = ends_before(
        large, small, PoolSettings(policy=policy), num_slots=8, quotas=quotas, groups=groups
    )
    assert number <= 4


@pytest.mark.parametrize("policy", PolicyName)
def test_fillers_use_up_no_quota_of_the_trial_in_front(policy: PolicyName) -> None:
    """Others would pass by while its own small trials in the gap hold its quota."""
    large = kind(1, 4, "ada", queue_place=2.0)
    small = [kind(2, 1, "bob"), kind(3, 1, "ada"), kind(4, 1, "bob")]
    quotas = {"ada": QuotaLimits(whose="x", max_slots=4)}
    pool = PoolSettings(policy=policy, backfill=True)
    assert ends_before(large, small, pool, num_slots=4, quotas=quotas) <= 8


def test_early_trials_do_not_fill_the_gap_in_front_of_a_large_one_for_ever() -> None:
    """Under fair shares, those of others that came first come after one whose user has nothing."""
    small = [kind(2, 1, "bob", queue_place=0.25), kind(3, 2, "eve", queue_place=0.25)]
    pool = PoolSettings(policy=FAIR_SHARE, backfill=True)
    large = kind(1, 4, "ada", queue_place=10_000.0)
    assert ends_before(large, small, pool, num_slots=4) <= 4


def test_a_users_own_small_trials_in_the_gap_put_no_others_before_its_large_one() -> None:
    small = [kind(2, 1, "ada"), kind(3, 1, "bob"), kind(4, 1, "eve")]
    pool = PoolSettings(policy=FAIR_SHARE, backfill=True)
    assert ends_before(kind(1, 4, "ada", queue_place=2.0), small, pool, num_slots=4) <= 6


def test_many_experiments_of_one_user_take_turns_with_one_of_another() -> None:
    """Each of them got nothing yet, but their user did."""
    nodes = [NodeSlots(slots=(0,))]
    simulation = Simulation(nodes=nodes, rule=ours(PoolSettings(policy=FAIR_SHARE)))
    for number in range(100, 160):
        trial = kind(number, 1, "bob", queue_place=float(number))
        simulation.add([Job(0.0, trial, 1.0)])
    for number in range(1, 6):
        trial = kind(number, 1, "ada", queue_place=float(1000 + number))
        simulation.add([Job(0.5, trial, 1.0)])
    simulation.run()
    assert [simulation.began[number] for number in range(1, 6)] == [1, 3, 5, 7, 9]


def test_who_can_never_start_holds_up_nobody() -> None:
    """A trial larger than the limit of its pool, and one for a node that its token keeps closed."""
    nodes = [NodeSlots(node_id=1, slots=(0, 1))]
    pools = {"default": PoolSettings(max_slots=1)}
    waiting = [kind(1, 2, "ada"), kind(2, 1, "bob")]
    found = [one.reason for one in decide(waiting, [], nodes, pools)]
    assert found == [Reason.POOL_LIMIT, None]
    labels = {"gpu": "a100"}
    known = [
        NodeSlots(node_id=1, slots=(0, 1, 2, 3), labels=labels, only_pool="default"),
        NodeSlots(node_id=2, slots=(0,)),
    ]
    pools = {"big": PoolSettings(labels=labels)}
    waiting = [kind(1, 4, "ada"), kind(2, 1, "bob")]
    found = [one.reason for one in decide(waiting, [], in_pools(known, pools), pools)]
    assert found == [Reason.TOO_LARGE, None]


@pytest.mark.parametrize("policy", PolicyName)
def test_a_task_that_no_node_has_room_for_holds_up_nobody_and_clears_no_nodes(
    policy: PolicyName,
) -> None:
    """All of its slots are on one node: two nodes together do not help it."""
    nodes = [NodeSlots(node_id=n, slots=(0, 1), can_join=True) for n in (1, 2)]
    pools = {"default": PoolSettings(policy=policy)}
    task, small = kind(1, 4, "ada", is_task=True, priority=1), kind(2, 1, "bob")
    assert [one.reason for one in decide([task, small], [], nodes, pools)] == [
        Reason.TOO_LARGE, None,
    ]  # fmt: skip
    # Nor does it take slots of both if a larger node is there, but in use.
    nodes.append(NodeSlots(node_id=3, slots=(0, 1, 2, 3), can_join=True))
    held = [
        Holding(
            experiment_id=n, attempt_id=n, node_id=n, slots=(0, 1), user="eve",
            priority=99 if n < 3 else 1,
        )
        for n in (1, 2, 3)
    ]  # fmt: skip
    [result, *_] = decide([task], held, nodes, pools)
    assert {one.node_id for one in result.preempts} == ({3} if policy is FAIR_SHARE else set())


def test_a_trial_that_waits_for_another_node_keeps_its_room_in_the_limit_of_the_pool() -> None:
    nodes = [NodeSlots(node_id=1, slots=(0, 1)), NodeSlots(node_id=2, slots=(0, 1))]
    pools = {"default": PoolSettings(max_slots=3)}
    held = [Holding(experiment_id=9, attempt_id=1, node_id=1, slots=(0,))]
    failed = kind(1, 2, "ada", failed_on=frozenset({2}))
    waiting = [failed, kind(2, 1, "bob")]
    found = [one.reason for one in decide(waiting, held, nodes, pools)]
    assert found == [Reason.ELSEWHERE, Reason.POOL_LIMIT]
