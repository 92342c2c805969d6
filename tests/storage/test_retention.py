"""Which checkpoints go: what no rule keeps, and what is too many bytes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.storage._retention_rules import Kept, RetentionRules, to_delete

# Steps 1 to 5; the score of step 3 is unknown, and those of 2 and 5 are equal.
CHECKPOINTS = [
    Kept(f"c{step}", step, score)
    for step, score in [(1, 0.1), (2, 0.9), (3, None), (4, 0.5), (5, 0.9)]
]


@pytest.mark.parametrize(
    ("keep_latest", "keep_best", "gone"),
    [
        (None, None, []),
        (2, None, [1, 2, 3]),
        (None, 1, [1, 3, 4]),
        (1, 2, [1, 3, 4]),
        (1, 3, [1, 3]),
        (9, None, []),
    ],
)
def test_what_no_rule_keeps_goes(
    keep_latest: int | None, keep_best: int | None, gone: list[int]
) -> None:
    rules = RetentionRules(latest=keep_latest, best=keep_best)
    found = to_delete(CHECKPOINTS, rules, now_s=0.0)
    assert [kept.steps_completed for kept in found] == gone


def test_newest_is_what_was_stored_last_though_the_run_went_back() -> None:
    went_back = [Kept("old", 10, None), Kept("new", 6, None)]
    rules = RetentionRules(latest=1)
    assert [kept.uuid for kept in to_delete(went_back, rules, now_s=0.0)] == ["old"]


def test_age_and_bytes_decide_with_the_counts() -> None:
    checkpoints = [Kept(f"c{n}", n, float(n == 2), 10, 100.0 * n) for n in range(1, 6)]

    def gone(now_s: float = 600.0, **rules: Any) -> list[int]:
        found = to_delete(checkpoints, RetentionRules(**rules), now_s=now_s)
        return [kept.steps_completed for kept in found]

    assert gone(age_s=250.0) == [1, 2, 3]
    assert gone(age_s=250.0, best=1) == [1, 3]
    # The newest one stays, as the run goes on from it.
    assert gone(age_s=1.0) == [1, 2, 3, 4]
    assert gone(num_bytes=1) == [1, 2, 3, 4]
    assert gone(num_bytes=35) == [1, 2]
    # The best goes last.
    assert gone(best=1, latest=3, num_bytes=35) == [1, 3]
    assert gone(best=1, latest=3, num_bytes=15) == [1, 2, 3, 4]


counts = st.none() | st.integers(1, 4)
rule_sets = st.builds(
    RetentionRules,
    latest=counts,
    best=counts,
    age_s=st.none() | st.integers(0, 20).map(float),
    num_bytes=st.none() | st.integers(1, 30),
)
runs = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.none() | st.floats(),
        st.integers(0, 9),
        st.integers(0, 3),
    ),
    max_size=8,
).map(
    lambda rows: [
        Kept(str(number), step, score, size, float(sum(row[3] for row in rows[: number + 1])))
        for number, (step, score, size, _) in enumerate(rows)
    ]
)


def kept_of(checkpoints: list[Kept], rules: RetentionRules, now_s: float) -> set[str]:
    gone = {kept.uuid for kept in to_delete(checkpoints, rules, now_s=now_s)}
    return {kept.uuid for kept in checkpoints} - gone


@given(runs, rule_sets, st.integers(0, 30).map(float))
def test_policy_has_its_properties_for_all_runs(
    checkpoints: list[Kept], rules: RetentionRules, now_s: float
) -> None:
    kept = kept_of(checkpoints, rules, now_s)
    newest = {each.uuid for each in checkpoints[-1:]}
    assert newest <= kept
    if rules.is_empty:
        assert len(kept) == len(checkpoints)
    # What it keeps once, it keeps when it is asked again.
    rest = [each for each in checkpoints if each.uuid in kept]
    assert kept_of(rest, rules, now_s) == kept
    # Bytes only take away, and no more than they must.
    free = kept_of(checkpoints, replace(rules, num_bytes=None), now_s)
    assert kept <= free
    size = {each.uuid: each.num_bytes for each in checkpoints}
    if rules.num_bytes is not None:
        total = sum(size[uuid] for uuid in kept)
        assert total <= rules.num_bytes or kept == newest
    else:
        assert kept == free
    # Each further rule keeps more, as time passes an age keeps less.
    if (rules.latest, rules.best, rules.age_s) != (None, None, None):
        for name, more in (("latest", 3), ("best", 3), ("age_s", 9.0)):
            larger = replace(rules, num_bytes=None, **{name: (getattr(rules, name) or 0) + more})
            assert free <= kept_of(checkpoints, larger, now_s)
        assert free >= kept_of(checkpoints, replace(rules, num_bytes=None), now_s + 5)


@given(runs, rule_sets, st.integers(0, 30).map(float))
def test_deleting_with_each_checkpoint_ends_as_deleting_once_without_bytes_and_age(
    checkpoints: list[Kept], rules: RetentionRules, now_s: float
) -> None:
    """A run that is retained as it goes on has what one look at its end would have left."""
    rules = replace(rules, num_bytes=None, age_s=None)
    present: list[Kept] = []
    for checkpoint in checkpoints:
        present.append(checkpoint)
        for gone in to_delete(present, rules, now_s=now_s):
            present.remove(gone)
    assert {each.uuid for each in present} == kept_of(checkpoints, rules, now_s)
