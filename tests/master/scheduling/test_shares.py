"""Shares of users with past use, quotas and reservations: what holds, whatever the clock does."""

import heapq
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._cluster.master.scheduling.pool_policies import (
    QuotaUse,
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
    Reason,
    SchedulingResult,
    Waiting,
    in_pools,
    needs_of,
)
from paceline._cluster.master.scheduling.schedule import decide, schedule

HALF_LIFE_S = 86400.0
FAIR = {"default": PoolSettings(policy=PolicyName.FAIR_SHARE, half_life_s=HALF_LIFE_S)}
NOW = 1e9


def trial(number: int, user: str, slots: int = 1, **fields: object) -> Waiting:
    values = {"trial_id": number, "experiment_id": number, "num_slots": slots, "max_slots": None}
    return Waiting(**{**values, "user": user, **fields})  # type: ignore[arg-type]


def held(number: int, user: str, slot: int, **fields: object) -> Holding:
    values = {"experiment_id": 1000 + number, "slots": (slot,), "attempt_id": number, "user": user}
    return Holding(**{**values, **fields})  # type: ignore[arg-type]


class Simulation:
    """Users with always the same number of waiting trials, on one node."""

    def __init__(
        self,
        weights: dict[str, float],
        num_slots: int,
        lengths_s: list[float],
        groups: dict[str, str] | None = None,
    ) -> None:
        self.all_weights, self.groups = weights, groups or {}
        self.weights = {user: one for user, one in weights.items() if user[0] != "@"}
        self.num_slots, self.lengths_s = num_slots, lengths_s
        self.now, self.number = NOW, 0
        self.running: list[tuple[float, int, Holding]] = []
        self.use: dict[str, tuple[float, float]] = {}
        self.slot_s: Counter[str] = Counter()
        self.served_at = dict.fromkeys(self.weights, self.now)
        self.longest_wait_s: dict[str, float] = defaultdict(float)

    def sharing(self) -> Sharing:
        past = {
            user: as_slots(faded(use, at, self.now, HALF_LIFE_S), HALF_LIFE_S)
            for user, (use, at) in self.use.items()
        }
        for _, _, one in self.running:
            recent_s = recent_use(one.num_slots, one.since, self.now, HALF_LIFE_S)
            past[one.user] = past.get(one.user, 0.0) + as_slots(recent_s, HALF_LIFE_S)
        for user, group in self.groups.items():
            past[group] = past.get(group, 0.0) + past.get(user, 0.0)
        return Sharing(weights=self.all_weights, past={"default": past}, groups=self.groups)

    def step(self) -> None:
        """Start what is due, then pass on to the next end of a trial."""
        waiting = [
            trial(self.number + n, user, last_served=self.served_at[user])
            for n, user in enumerate(user for user in self.weights for _ in range(self.num_slots))
        ]
        by_id = {one.trial_id: one for one in waiting}
        holding = [one for _, _, one in self.running]
        nodes = [NodeSlots(slots=tuple(range(self.num_slots)))]
        plan = schedule(waiting, holding, nodes, FAIR, self.sharing())
        assert not plan.preemptions or all(one.user != by.user for one, by in plan.preemptions)
        for given_ in plan.assignments:
            self.number += 1
            user = by_id[given_.trial_id].user
            one = held(self.number, user, given_.slots[0], since=self.now)
            length_s = self.lengths_s[self.number % len(self.lengths_s)]
            heapq.heappush(self.running, (self.now + length_s, self.number, one))
            waited_s = self.now - self.served_at[user]
            self.longest_wait_s[user] = max(self.longest_wait_s[user], waited_s)
            self.served_at[user] = self.now
        self.number += len(waiting)
        self.now, _, ended = heapq.heappop(self.running)
        before, at = self.use.get(ended.user, (0.0, self.now))
        recent_s = recent_use(1, ended.since, self.now, HALF_LIFE_S)
        self.use[ended.user] = (faded(before, at, self.now, HALF_LIFE_S) + recent_s, self.now)
        self.slot_s[ended.user] += self.now - ended.since


@pytest.mark.parametrize(
    ("weights", "num_slots"),
    [({"a": 2, "b": 1}, 2), ({"a": 1, "b": 1, "c": 1}, 2), ({"a": 5, "b": 3, "c": 0.5}, 8)],
)
def test_in_the_long_run_use_is_in_proportion_to_weights_and_nobody_starves(
    weights: dict[str, float], num_slots: int
) -> None:
    lengths_s = [900.0, 2500.0, 400.0, 1700.0, 60.0]
    simulation = Simulation(weights, num_slots, lengths_s)
    for _ in range(4000):
        simulation.step()
    total = sum(simulation.slot_s.values())
    for user, weight in weights.items():
        share = weight / sum(weights.values())
        assert simulation.slot_s[user] / total == pytest.approx(share, abs=0.005), user
        # A share of the slots lasts a trial, on average; the longest wait is a few such turns.
        turn_s = max(lengths_s) / (share * num_slots)
        assert simulation.longest_wait_s[user] < 5 * turn_s + max(lengths_s)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"@g": 1, "a": 1, "b": 1, "c": 1}, {"a": 0.25, "b": 0.25, "c": 0.5}),
        ({"@g": 3, "a": 2, "b": 1, "c": 1}, {"a": 0.5, "b": 0.25, "c": 0.25}),
        ({"@g": 1, "@h": 1, "a": 3, "b": 1, "c": 5, "d": 2}, {"a": 0.1875, "b": 0.0625, "c": 0.25}),
    ],
)
def test_groups_share_first_and_then_their_users_to_the_second_decimal(
    weights: dict[str, float], shares: dict[str, float]
) -> None:
    """A user without a group stands for itself; how many users a group has changes nothing."""
    groups = {"a": "@g", "b": "@g"} | ({"c": "@h"} if "@h" in weights else {})
    simulation = Simulation(weights, 3, [900.0, 2500.0, 400.0, 1700.0, 60.0], groups)
    for _ in range(6000):
        simulation.step()
    total = sum(simulation.slot_s.values())
    for user, share in shares.items():
        found = simulation.slot_s[user] / total
        assert found == pytest.approx(share, abs=0.005), f"{user=} {simulation.slot_s=}"


def test_a_group_gives_way_to_another_and_in_it_a_user_to_another() -> None:
    """Whose attempts leave follows from the first level at which two users differ."""
    nodes = [NodeSlots(slots=(0, 1, 2, 3))]
    pools = {"default": PoolSettings(policy=PolicyName.FAIR_SHARE)}
    groups = {"a": "@g", "b": "@g"}
    holding = [held(n, "a", n) for n in range(2)] + [held(n, "c", n) for n in range(2, 4)]
    # The group and the other user have two each: the group's second member takes from the first.
    plan = schedule([trial(1, "b")], holding, nodes, pools, Sharing(groups=groups))
    assert [one.user for one, _ in plan.preemptions] == ["a"]
    # Without a group, each of three has a share: who holds most gives way.
    plan = schedule([trial(1, "b")], holding, nodes, pools, Sharing())
    assert [one.user for one, _ in plan.preemptions] == ["c"]
    # A quota of the group counts both of its users.
    quotas = {"@g": QuotaLimits(whose="group g", max_slots=3)}
    waiting = [trial(1, "a"), trial(2, "b"), trial(3, "b")]
    results = list(decide(waiting, holding[:1], nodes, {}, Sharing(groups=groups, quotas=quotas)))
    assert reasons(results) == {1: None, 2: None, 3: Reason.QUOTA}


def test_who_used_little_comes_first_whatever_each_holds() -> None:
    waiting = [trial(1, "much"), trial(2, "little")]
    nodes = [NodeSlots(slots=(0, 1, 2))]
    holding = [held(1, "little", 0), held(2, "little", 1)]
    past = {"default": {"much": 50.0, "little": 1.0}}
    plan = schedule(waiting, holding, nodes, FAIR, Sharing(past=past))
    assert [one.trial_id for one in plan.assignments] == [2]
    # But nothing that runs is taken for it: each keeps what is a fair part of the slots now.
    assert plan.preemptions == []
    full = [*holding, held(3, "much", 2)]
    plan = schedule(waiting, full, nodes, FAIR, Sharing(past=past))
    assert (plan.assignments, plan.preemptions) == ([], [])
    plan = schedule(waiting, holding, nodes, FAIR, Sharing())
    assert [one.trial_id for one in plan.assignments] == [1]


def test_ten_experiments_of_a_user_are_one_share() -> None:
    waiting = [trial(n, "many") for n in range(10)] + [trial(n, "one") for n in range(10, 14)]
    nodes = [NodeSlots(slots=tuple(range(6)))]
    plan = schedule(waiting, (), nodes, FAIR, Sharing(weights={"many": 2.0}))
    users = Counter("one" if given_.trial_id >= 10 else "many" for given_ in plan.assignments)
    assert users == {"many": 4, "one": 2}


@given(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 3.0]), min_size=4),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 3)), max_size=12),
    st.lists(st.sampled_from("abcd"), max_size=8),
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.0, 3.0, 40.0, 1e6])),
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["@g", "@h"])),
    st.dictionaries(st.sampled_from(["@g", "@h"]), st.sampled_from([0.5, 3.0])),
)
def test_a_preemption_is_never_undone(
    weights: dict[str, float],
    wanted: list[tuple[str, int]],
    users: list[str],
    past: dict[str, float],
    groups: dict[str, str],
    group_weights: dict[str, float],
) -> None:
    for user, group in groups.items():
        past[group] = past.get(group, 0.0) + past.get(user, 0.0)
    waiting = [trial(n, user, slots) for n, (user, slots) in enumerate(wanted)]
    holding = [held(n, user, n) for n, user in enumerate(users)]
    nodes = [NodeSlots(slots=tuple(range(8)))]
    sharing = Sharing(weights=weights | group_weights, past={"default": past}, groups=groups)
    for number in range(100, 140):
        plan = schedule(waiting, holding, nodes, FAIR, sharing)
        if not plan.assignments and not plan.preemptions:
            break
        gone = {one.attempt_id for one, _ in plan.preemptions}
        by_id = {one.trial_id: one for one in waiting}
        again = [trial(1000 + one.attempt_id, one.user, one.num_slots) for one in holding
                 if one.attempt_id in gone]  # fmt: skip
        started = {one.trial_id for one in plan.assignments}
        holding = [one for one in holding if one.attempt_id not in gone]
        holding += [
            held(100 * number + n, by_id[one.trial_id].user, 0, slots=one.slots)
            for n, one in enumerate(plan.assignments)
        ]
        waiting = [one for one in waiting if one.trial_id not in started] + again
    else:
        pytest.fail("trials take each other's slots for ever")


@given(st.floats(-1e10, 1e10), st.floats(-1e10, 1e10), st.integers(1, 64), st.floats(3600, 1e7))
def test_no_jump_of_the_clock_makes_use_more_than_a_half_life_s_worth(
    begin: float, end: float, num_slots: int, half_life_s: float
) -> None:
    use = recent_use(num_slots, begin, end, half_life_s)
    assert 0 <= use <= 1.4427 * num_slots * half_life_s
    assert use <= num_slots * max(end - begin, 0) + 1e-3 * use
    later = faded(use, end, begin, half_life_s)
    assert 0 <= later <= use
    assert faded(use, end, end + half_life_s, half_life_s) == pytest.approx(use / 2, rel=1e-4)


def test_parts_of_a_use_count_like_the_whole() -> None:
    whole = recent_use(3, 0.0, 5e5, HALF_LIFE_S)
    first = faded(recent_use(3, 0.0, 2e5, HALF_LIFE_S), 2e5, 5e5, HALF_LIFE_S)
    assert first + recent_use(3, 2e5, 5e5, HALF_LIFE_S) == pytest.approx(whole)


def reasons(results: list[SchedulingResult]) -> dict[int, Reason | None]:
    return {one.waiting.trial_id: one.reason for one in results}


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("owner", ["ada", 7])
def test_a_quota_holds_its_own_trials_and_no_others(policy: PolicyName, owner: str | int) -> None:
    quotas = {owner: QuotaLimits(whose="x", max_slots=3)}
    waiting = [
        trial(1, "ada", 2, project=7), trial(2, "bob", 4), trial(3, "ada", 1, project=7),
        trial(4, "bob", 1),
    ]  # fmt: skip
    nodes = [NodeSlots(slots=tuple(range(10)))]
    holding = [held(1, "ada", 0, project=7)]
    pools = {"default": PoolSettings(policy=policy)}
    results = list(decide(waiting, holding, nodes, pools, Sharing(quotas=quotas)))
    assert reasons(results) == {1: None, 2: None, 3: Reason.QUOTA, 4: None}
    started = [one.waiting for one in results if one.reason is None]
    assert sum(one.num_slots for one in started if one.user == "ada") == 2
    assert all(one.quota == quotas[owner] for one in results if one.reason is Reason.QUOTA)
    # One that is used up holds them all.
    spent = {owner: QuotaLimits(whose="x", spent="5 slot hours")}
    results = list(decide(waiting, holding, nodes, pools, Sharing(quotas=spent)))
    assert [n for n, why in reasons(results).items() if why is Reason.QUOTA] == [1, 3]


def test_an_elastic_trial_gets_no_more_than_its_quota() -> None:
    quotas = {"ada": QuotaLimits(whose="x", max_slots=3)}
    [given_] = schedule(
        [trial(1, "ada", 1, most_slots=8)], (), [NodeSlots(slots=tuple(range(8)))], {},
        Sharing(quotas=quotas),
    ).assignments  # fmt: skip
    assert len(given_.slots) == 3


def test_no_node_is_started_for_trials_beyond_a_quota() -> None:
    quotas = {"ada": QuotaLimits(whose="x", max_slots=3)}
    waiting = [trial(n, "ada", 2) for n in range(4)] + [trial(9, "bob", 2)]
    results = list(decide(waiting, (), [], {}, Sharing(quotas=quotas)))
    needs = needs_of(results, (), QuotaUse(Sharing(quotas=quotas)))
    assert needs["default"].sizes == (2, 2)


@pytest.mark.parametrize("policy", PolicyName)
def test_a_reserved_node_runs_trials_of_its_user_only(policy: PolicyName) -> None:
    users = frozenset({"ada"})
    nodes = [
        NodeSlots(node_id=1, slots=(0, 1, 2, 3), reserved_for=users),
        NodeSlots(node_id=2, slots=(0, 1)),
    ]
    pools = {"default": PoolSettings(policy=policy, backfill=True)}
    waiting = [trial(1, "bob", 4), trial(2, "bob", 2), trial(3, "bob", 1), trial(4, "ada", 3)]
    results = list(decide(waiting, (), nodes, pools))
    found = {one.waiting.trial_id: (one.reason, one.node_id) for one in results}
    assert found[1][0] is Reason.RESERVED
    assert found[4] == (None, 1)
    assert all(node_id == 2 for n, (why, node_id) in found.items() if n in (2, 3) and not why)
    # Nobody makes room there for others, and no node that is lost is waited for.
    holding = [held(1, "ada", 0, node_id=1, slots=(0, 1, 2, 3), priority=99)]
    late = [trial(1, "bob", 4, priority=1)]
    assert reasons(list(decide(late, holding, nodes, pools))) == {1: Reason.RESERVED}
    assert reasons(list(decide(late, (), nodes[1:], pools))) == {1: Reason.TOO_LARGE}


@pytest.mark.parametrize("policy", PolicyName)
def test_a_trial_between_a_reserved_and_a_resting_node_holds_up_nobody(policy: PolicyName) -> None:
    """The one is closed to it, the other one to all: together they are not a place in line."""
    nodes = [
        NodeSlots(node_id=1, slots=(0, 1), reserved_for=frozenset({"ada"})),
        NodeSlots(node_id=2, slots=(0, 1), is_pausing=True),
    ]
    waiting = [trial(1, "bob", 1), trial(2, "ada", 2)]
    results = list(decide(waiting, (), nodes, {"default": PoolSettings(policy=policy)}))
    assert reasons(results) == {1: Reason.PAUSING, 2: None}


def test_a_pool_that_is_closed_to_a_trial_holds_up_nobody() -> None:
    """Users, groups and projects open it; others wait, and no node is started for them."""
    nodes = [NodeSlots(slots=tuple(range(8)))]
    pools = {"default": PoolSettings(open_to=frozenset({"ada", "@lab", 7}))}
    waiting = [
        trial(1, "eve"), trial(2, "ada"), trial(3, "bob"), trial(4, "eve", project=7),
    ]  # fmt: skip
    results = list(decide(waiting, (), nodes, pools, Sharing(groups={"bob": "@lab"})))
    assert reasons(results) == {1: Reason.CLOSED_POOL, 2: None, 3: None, 4: None}
    assert needs_of(results, (), QuotaUse()) == {}


def test_trials_start_only_on_nodes_of_their_user_if_the_pool_says_so() -> None:
    """A node without an owner is nobody's."""
    nodes = in_pools(
        [
            NodeSlots(node_id=1, slots=(0, 1), owner="ada"),
            NodeSlots(node_id=2, slots=(0,), owner=""),
        ],
        {"default": PoolSettings(own_runners=True)},
    )
    waiting = [trial(1, "bob"), trial(2, "ada"), trial(3, ""), trial(4, "ada", 2)]
    results = list(decide(waiting, (), nodes, {"default": PoolSettings()}))
    assert [one.node_id for one in results if one.slots and one.waiting.user == "ada"] == [1]
    assert reasons(results)[1] is Reason.RESERVED
    assert reasons(results)[4] is Reason.SLOTS_IN_USE
    open_ = in_pools(nodes, {})
    assert len(schedule(waiting, (), open_, {}).assignments) == 3
