"""When an idle trial is told of, and when it is paused: a pure function, and claims of runners."""

import time

from hypothesis import given
from hypothesis import strategies as st

from paceline._base.journal_records import MetricsReported, TimeSpent
from paceline._cluster.master.experiments.idle_trials import Activities, judge_idle
from paceline._cluster.master.scheduling.pools import IdleLimits

WAYS = ("silent", "unused")
SECONDS = st.floats(0, 10_000)
LIMITS = st.lists(
    st.builds(
        IdleLimits,
        silent_after_s=st.none() | st.floats(1, 1000),
        unused_after_s=st.none() | st.floats(1, 1000),
        pause_after_s=st.none() | st.floats(1, 1000),
    ),
    max_size=2,
)


@given(idle=st.tuples(SECONDS, SECONDS), told=st.sets(st.sampled_from(WAYS)), limits=LIMITS)
def test_nobody_is_paused_untold_or_within_a_limit(
    idle: tuple[float, float], told: set[str], limits: list[IdleLimits]
) -> None:
    """Each decision follows from the earliest limit of its way."""
    found = judge_idle(zip(WAYS, idle, strict=True), told, limits)
    for way, idle_s in zip(WAYS, idle, strict=True):
        own = [getattr(one, f"{way}_after_s") for one in limits]
        least = min((one for one in own if one is not None), default=None)
        is_over = least is not None and idle_s >= least
        assert (way in found.told) is is_over
        assert (way in found.new) is (is_over and way not in told)
    if found.pauses:
        assert found.told & told
        assert any(one.pause_after_s is not None for one in limits)


def test_a_trial_is_told_first_and_paused_later() -> None:
    """The pause comes so long after the limit, and not without the alert."""
    limits = [IdleLimits(unused_after_s=10, pause_after_s=5)]
    assert judge_idle([("unused", 9.9)], set(), limits).told == frozenset()
    assert judge_idle([("unused", 99.0)], set(), limits).pauses is False
    assert judge_idle([("unused", 14.9)], {"unused"}, limits).pauses is False
    assert judge_idle([("unused", 15.0)], {"unused"}, limits).pauses is True
    assert judge_idle([("silent", 99.0)], {"silent"}, limits).told == frozenset()


def test_only_reports_count_and_claims_have_a_bound() -> None:
    """Samples of the machine are no reports; nobody was idle before the master knew the attempt."""
    activities = Activities()
    time.sleep(0.05)
    spent = TimeSpent(time=0.0, steps_completed=0, seconds={}, event="now")
    sample = MetricsReported(time=0.0, group="system", steps_completed=0, metrics={})
    activities.note_records(1, [spent])
    first = dict(activities.idle(1))
    assert set(first) == {"silent"}
    time.sleep(0.05)
    activities.note_records(1, [spent, sample])
    assert dict(activities.idle(1))["silent"] >= 0.05
    activities.note_records(
        1, [MetricsReported(time=0.0, group="t", steps_completed=0, metrics={})]
    )
    activities.note_unused(1, 0, 1e9)
    activities.note_unused(1, 1, 0.0)
    found = dict(activities.idle(1))
    # The member that works counts for all.
    assert found["unused"] < 1e9
    activities.keep(set())
    assert set(dict(activities.idle(1))) == {"silent"}
