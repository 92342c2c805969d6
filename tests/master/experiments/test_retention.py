import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._cluster.master.experiments.retention import (
    Candidate,
    RetentionPolicy,
    plan_retention,
)

# Checkpoint number -> (trial, metric), as the table of the platform that Paceline follows has it.
TABLE: dict[int, tuple[int, float | None]] = {
    1: (1, None), 2: (1, None), 3: (1, 0.6), 4: (1, 0.5), 5: (1, 0.4),
    6: (2, None), 7: (2, 0.2), 8: (2, 0.3), 9: (2, None), 10: (2, None),
}  # fmt: skip


def candidate(number: int, trial_id: int, metric: float | None) -> Candidate:
    return Candidate(uuid=str(number), trial_id=trial_id, steps_completed=number, metric=metric)


def kept(
    candidates: list[Candidate],
    experiment_best: int,
    trial_best: int,
    trial_latest: int,
    *,
    smaller_is_better: bool = True,
    protected: frozenset[str] = frozenset(),
) -> set[int]:
    policy = RetentionPolicy(
        save_experiment_best=experiment_best,
        save_trial_best=trial_best,
        save_trial_latest=trial_latest,
    )
    doomed = plan_retention(
        candidates, policy, smaller_is_better=smaller_is_better, protected=protected
    )
    assert len(doomed) == len(set(doomed))
    return {int(c.uuid) for c in candidates} - set(map(int, doomed))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ((0, 0, 0), set()),
        ((2, 0, 0), {7, 8}),
        ((5, 0, 0), {3, 4, 5, 7, 8}),
        ((9, 0, 0), {3, 4, 5, 7, 8}),
        ((0, 1, 0), {5, 7}),
        ((0, 3, 0), {3, 4, 5, 7, 8}),
        ((0, 9, 0), {3, 4, 5, 7, 8}),
        ((0, 0, 1), {5, 10}),
        ((0, 0, 3), {3, 4, 5, 8, 9, 10}),
        ((2, 1, 0), {5, 7, 8}),
        ((2, 0, 1), {5, 7, 8, 10}),
        ((0, 1, 1), {5, 7, 10}),
        ((2, 1, 1), {5, 7, 8, 10}),
    ],
)
def test_the_kept_checkpoints_are_those_of_the_table(
    policy: tuple[int, int, int], expected: set[int]
) -> None:
    assert kept([candidate(n, *facts) for n, facts in TABLE.items()], *policy) == expected


@pytest.mark.parametrize(("factor", "expected"), [(0.9, {8, 9, 10}), (1.1, {1, 2, 3, 9, 10})])
def test_ten_steps_of_one_trial_keep_the_best_and_the_latest(
    factor: float, expected: set[int]
) -> None:
    assert kept([candidate(n, 1, factor**n) for n in range(1, 11)], 3, 1, 2) == expected


def test_where_larger_is_better_the_largest_is_kept() -> None:
    candidates = [candidate(n, 1, float(n % 7)) for n in range(1, 10)]
    assert kept(candidates, 0, 1, 0, smaller_is_better=False) == {6}


def test_a_nan_is_no_better_than_no_metric() -> None:
    candidates = [candidate(1, 1, math.nan), candidate(2, 1, 5.0), candidate(3, 1, math.nan)]
    assert kept(candidates, 9, 9, 0) == {2}
    assert kept(candidates, 0, 0, 1) == {3}


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_what_is_not_finite_is_never_among_the_best(smaller_is_better: bool) -> None:
    values = [math.inf, 0.0, -math.inf, math.nan]
    candidates = [candidate(number, 1, value) for number, value in enumerate(values, 1)]
    assert kept(candidates, 0, 3, 0, smaller_is_better=smaller_is_better) == {2}


def test_a_protected_checkpoint_is_kept_and_takes_nobodys_place() -> None:
    candidates = [candidate(n, 1, float(n)) for n in range(1, 6)]
    assert kept(candidates, 0, 1, 1, protected=frozenset({"3", "elsewhere"})) == {1, 3, 5}


def test_the_defaults_keep_each_trials_best_and_latest() -> None:
    candidates = [candidate(n, *facts) for n, facts in TABLE.items()]
    doomed = plan_retention(candidates, RetentionPolicy(), smaller_is_better=True)
    assert set(map(int, doomed)) == set(TABLE) - {5, 7, 10}


metrics = st.none() | st.floats() | st.sampled_from([0.0, 1.0])
candidate_lists = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 5), metrics), max_size=12
).map(
    lambda rows: [
        Candidate(uuid=str(number), trial_id=trial, steps_completed=steps, metric=metric)
        for number, (trial, steps, metric) in enumerate(rows)
    ]
)
counts = st.tuples(*[st.integers(0, 4)] * 3)


@given(candidate_lists, counts, counts, st.booleans())
def test_a_larger_policy_never_keeps_less(
    candidates: list[Candidate],
    policy: tuple[int, int, int],
    more: tuple[int, int, int],
    smaller: bool,
) -> None:
    larger = tuple(a + b for a, b in zip(policy, more, strict=True))
    few = kept(candidates, *policy, smaller_is_better=smaller)
    many = kept(candidates, *larger, smaller_is_better=smaller)
    assert few <= many


@given(candidate_lists, counts, st.booleans())
def test_no_more_is_kept_than_the_policy_asks_for(
    candidates: list[Candidate], policy: tuple[int, int, int], smaller: bool
) -> None:
    experiment_best, trial_best, trial_latest = policy
    num_trials = len({c.trial_id for c in candidates})
    most = experiment_best + num_trials * (trial_best + trial_latest)
    assert len(kept(candidates, *policy, smaller_is_better=smaller)) <= most


@given(candidate_lists, counts, st.booleans())
def test_everything_that_is_better_than_a_kept_best_is_kept_too(
    candidates: list[Candidate], policy: tuple[int, int, int], smaller: bool
) -> None:
    sign = 1 if smaller else -1
    best = kept(candidates, policy[0], 0, 0, smaller_is_better=smaller)
    for one in candidates:
        for other in candidates:
            if one.metric is None or other.metric is None or int(other.uuid) not in best:
                continue
            if sign * one.metric < sign * other.metric:
                assert int(one.uuid) in best


@given(candidate_lists, st.booleans())
def test_the_latest_of_each_trial_has_its_highest_step(
    candidates: list[Candidate], smaller: bool
) -> None:
    latest = kept(candidates, 0, 0, 1, smaller_is_better=smaller)
    for trial_id in {c.trial_id for c in candidates}:
        of_trial = [c for c in candidates if c.trial_id == trial_id]
        newest = [c for c in of_trial if int(c.uuid) in latest]
        assert [c.steps_completed for c in newest] == [max(c.steps_completed for c in of_trial)]
