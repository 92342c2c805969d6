"""Metrics against a plain model: a dictionary of what is visible."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, update

from paceline._base.journal_records import decode_value, encode_metrics, same_value
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.metric_rows import (
    Conflict,
    add_metrics,
    has_points_beyond,
    read_rows,
    read_series,
)
from paceline._cluster.master.store.metric_summaries import Summary, read_summary, trim_summaries
from paceline.journal import MetricsReported

AddTrial = Callable[..., int]


def report(step: int, group: str = "training", **metrics: Any) -> MetricsReported:
    return MetricsReported(
        time=float(step), group=group, steps_completed=step, metrics=encode_metrics(metrics)
    )


def store(
    database: Database,
    trial_id: int,
    *reports: MetricsReported,
    attempt: int = 1,
    resumed_steps: int = 0,
) -> list[Conflict]:
    return database.write(
        lambda transaction: add_metrics(
            transaction.connection,
            trial_id=trial_id,
            attempt=attempt,
            resumed_steps=resumed_steps,
            records=reports,
        )
    ).result()


def rows(database: Database, trial_id: int, group: str = "training", **options: Any) -> list[Any]:
    with database.read() as connection:
        found = read_rows(connection, trial_id, group, **options)
    return [(row.step, row.metrics) for row in found]


def same_rows(left: list[Any], right: list[Any]) -> bool:
    """Compare rows exactly: types, signs of zeros and NaNs included."""
    return repr(left) == repr(right)


def recomputed(points: list[tuple[int, Any]]) -> Summary:
    """Return the summary of visible points, worked out the slow way."""
    summary = Summary(count=len(points), last=points[-1][1])
    summary.first_step, summary.last_step = points[0][0], points[-1][0]
    numbers = [v for _, v in points if type(v) in (int, float) and math.isfinite(v)]
    summary.num_numbers = len(numbers)
    if numbers:
        summary.sum = float(sum(numbers))
        summary.min, summary.max = float(min(numbers)), float(max(numbers))
    return summary


def check_summary(database: Database, trial_id: int) -> None:
    with database.read() as connection:
        summaries = read_summary(connection, trial_id)
        for group, by_key in summaries.items():
            found_keys = {k for row in read_rows(connection, trial_id, group) for k in row.metrics}
            assert set(by_key) == found_keys
            for key, found in by_key.items():
                wanted = recomputed(read_series(connection, trial_id, group, key))
                assert (found.count, found.num_numbers) == (wanted.count, wanted.num_numbers)
                assert (found.min, found.max) == (wanted.min, wanted.max)
                steps = (found.first_step, found.last_step)
                assert steps == (wanted.first_step, wanted.last_step)
                assert same_value(decode_value(found.last), wanted.last)
                assert found.sum == pytest.approx(wanted.sum, rel=1e-9, abs=1e-6, nan_ok=True)


VALUES = [
    0, -1, 2**63 - 1, -(2**63), 0.0, -0.0, 0.1, 1e-310, 1.7e308, -1.4375114074503293e-292,
    math.nan, math.inf, -math.inf,
    True, False, "", "text", "NaN", "ünïcode\u2028\0", [], [1, 2.5, "x"], {}, {"a": {"b": 1}},
    [math.nan, [math.inf]], {"deep": {"nan": math.nan}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_exactly(database: Database, add_trial: AddTrial, value: Any) -> None:
    trial_id = add_trial(0)
    store(database, trial_id, report(1, x=value))
    assert same_rows(rows(database, trial_id), [(1, {"x": value})])
    check_summary(database, trial_id)


numbers = st.floats() | st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
names = st.text("abcx.", min_size=1, max_size=3)
values = st.recursive(
    numbers | texts | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(names, inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)
# Series mostly hold one kind, now and then another.
kinds = st.sampled_from([st.floats(), st.integers(-(2**63), 2**63 - 1), values])
batches = st.lists(
    kinds.flatmap(lambda kind: st.lists(st.dictionaries(names, kind, max_size=3), max_size=6)),
    max_size=5,
)


@pytest.mark.long
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches)
def test_any_reports_come_back_exactly(
    database: Database, add_trial: AddTrial, batches: list[list[dict[str, Any]]]
) -> None:
    trial_id = add_trial(0)
    step, expected = 0, []
    for batch in batches:
        reports = []
        for metrics in batch:
            step += 1
            reports.append(report(step, **metrics))
            if metrics:
                expected.append((step, metrics))
        store(database, trial_id, *reports)
    found = [(step, dict(sorted(metrics.items()))) for step, metrics in rows(database, trial_id)]
    wanted = [(step, dict(sorted(metrics.items()))) for step, metrics in expected]
    assert same_rows(found, wanted)
    check_summary(database, trial_id)


@pytest.mark.parametrize("batch_size", [1, 37, 1000, 1024, 5000])
def test_thousands_of_points_lie_in_chunks_and_come_back_in_order(
    database: Database, add_trial: AddTrial, batch_size: int
) -> None:
    trial_id, total = add_trial(0), 300 if batch_size == 1 else 5000
    reports = [report(step, f=step / 3, i=step, m=step if step % 7 else 0.5) for step in
               range(total)]  # fmt: skip
    for start in range(0, total, batch_size):
        store(database, trial_id, *reports[start : start + batch_size])
    expected = [(r.steps_completed, r.metrics) for r in reports]
    assert same_rows(rows(database, trial_id), expected)
    assert same_rows(
        rows(database, trial_id, after_step=total // 2, limit=10),
        expected[total // 2 + 1 : total // 2 + 11],
    )
    assert rows(database, trial_id, after_step=total) == []
    check_summary(database, trial_id)


def test_a_series_that_changes_its_kind_keeps_every_value(
    database: Database, add_trial: AddTrial
) -> None:
    trial_id = add_trial(0)
    given = [1, 2, 0.5, 1.5, "x", 3, True, [1], 4.0, 5]
    for step, value in enumerate(given):
        store(database, trial_id, report(step, x=value))
    assert same_rows(rows(database, trial_id), [(s, {"x": v}) for s, v in enumerate(given)])
    check_summary(database, trial_id)


def test_sums_that_overflow_do_not_stop_the_series(database: Database, add_trial: AddTrial) -> None:
    """Infinity less infinity is NaN, which the database keeps as null."""
    trial_id = add_trial(0)
    for start, value in ((0, 1.7e308), (4, -1.7e308), (8, 1.0)):
        store(database, trial_id, *[report(start + n, x=value) for n in range(4)])
    assert len(rows(database, trial_id)) == 12
    with database.read() as connection:
        summary = read_summary(connection, trial_id)["training"]["x"]
    assert (summary.count, summary.min, summary.max) == (12, -1.7e308, 1.7e308)


def test_groups_and_trials_do_not_mix(database: Database, add_trial: AddTrial) -> None:
    one, two = add_trial(0), add_trial(0)
    store(database, one, report(1, x=1), report(1, "validation", x=2), report(1, "mine", x=3))
    store(database, two, report(1, x=4))
    assert rows(database, one) == [(1, {"x": 1})]
    assert rows(database, one, "validation") == [(1, {"x": 2})]
    assert rows(database, one, "mine") == [(1, {"x": 3})]
    assert rows(database, two) == [(1, {"x": 4})]
    assert rows(database, one, "unknown") == []


@pytest.mark.parametrize("is_one_request", [True, False])
def test_reports_of_one_step_are_merged(
    database: Database, add_trial: AddTrial, is_one_request: bool
) -> None:
    trial_id = add_trial(0)
    reports = [report(3, a=1), report(3, b=2), report(4, a=3)]
    for batch in [reports] if is_one_request else [[r] for r in reports]:
        store(database, trial_id, *batch)
    assert rows(database, trial_id) == [(3, {"a": 1, "b": 2}), (4, {"a": 3})]
    check_summary(database, trial_id)


def test_steps_may_be_reported_out_of_order(database: Database, add_trial: AddTrial) -> None:
    trial_id = add_trial(0)
    store(database, trial_id, report(5, x=5), report(2, x=2))
    store(database, trial_id, report(3, x=3))
    assert rows(database, trial_id) == [(2, {"x": 2}), (3, {"x": 3}), (5, {"x": 5})]
    assert rows(database, trial_id, after_step=2, limit=1) == [(3, {"x": 3})]
    check_summary(database, trial_id)


def test_what_an_earlier_attempt_reported_beyond_the_resumed_step_is_superseded(
    database: Database, add_trial: AddTrial
) -> None:
    trial_id = add_trial(0, 4)
    store(database, trial_id, *[report(n, x=n) for n in range(1, 8)])
    store(database, trial_id, report(5, x=50), attempt=2, resumed_steps=4)
    assert rows(database, trial_id) == [
        (1, {"x": 1}), (2, {"x": 2}), (3, {"x": 3}), (4, {"x": 4}), (5, {"x": 50}),
    ]  # fmt: skip
    check_summary(database, trial_id)
    with database.read() as connection:
        assert has_points_beyond(connection, trial_id, 6)
        assert not has_points_beyond(connection, trial_id, 7)
        stored = connection.execute(select(tables.series.c.num_points)).scalars().all()
    assert sorted(stored) == [1, 7]


def test_an_attempt_that_never_started_supersedes_nothing(
    database: Database, add_trial: AddTrial
) -> None:
    trial_id = add_trial(0, 0)
    store(database, trial_id, report(1, x=1))
    attempts = tables.attempts
    database.write(
        lambda t: t.connection.execute(
            update(attempts).where(attempts.c.number == 2).values(started_at=None)
        )
    ).result()
    assert rows(database, trial_id) == [(1, {"x": 1})]
    check_summary(database, trial_id)


def test_an_attempt_that_started_over_leaves_nothing_of_the_earlier_ones(
    database: Database, add_trial: AddTrial
) -> None:
    trial_id = add_trial(0, 5, 0)
    store(database, trial_id, *[report(n, x=n) for n in range(1, 8)])
    store(database, trial_id, report(6, x=60), attempt=2, resumed_steps=5)
    assert rows(database, trial_id) == []
    store(database, trial_id, report(1, y=1), attempt=3)
    assert rows(database, trial_id) == [(1, {"y": 1})]
    check_summary(database, trial_id)


@pytest.mark.parametrize(
    ("value", "other"),
    [(0.5, 0.25), (math.nan, 0.0), (0.0, math.nan), (1, 1.5), (1, True), ("a", "b"), ([1], [2])],
)
def test_another_value_at_or_before_the_resumed_step_is_a_conflict_and_the_earlier_one_stays(
    database: Database, add_trial: AddTrial, value: Any, other: Any
) -> None:
    trial_id = add_trial(0, 3)
    store(database, trial_id, *[report(n, x=value) for n in (1, 2, 3, 4)])
    conflicts = store(
        database, trial_id, report(3, x=other), report(4, x=other), attempt=2, resumed_steps=3
    )
    assert [(c.group, c.step, c.key) for c in conflicts] == [("training", 3, "x")]
    assert same_value(conflicts[0].kept, value)
    assert same_value(decode_value(conflicts[0].refused), other)
    expected = [(1, {"x": value}), (2, {"x": value}), (3, {"x": value}), (4, {"x": other})]
    assert same_rows(rows(database, trial_id), expected)
    check_summary(database, trial_id)


@pytest.mark.parametrize("value", [v for v in VALUES if v is not True], ids=repr)
def test_the_same_value_at_or_before_the_resumed_step_is_stored_once(
    database: Database, add_trial: AddTrial, value: Any
) -> None:
    trial_id = add_trial(0, 3)
    store(database, trial_id, report(3, x=value))
    assert store(database, trial_id, report(3, x=value), attempt=2, resumed_steps=3) == []
    with database.read() as connection:
        assert connection.execute(select(tables.series.c.num_points)).scalars().all() == [1]


def test_new_names_at_an_old_step_are_merged_and_change_no_later_last_value(
    database: Database, add_trial: AddTrial
) -> None:
    trial_id = add_trial(0, 4)
    store(database, trial_id, report(2, x=2), report(4, x=4, y=4))
    later = report(2, x=2, y=20, z=200)
    assert store(database, trial_id, later, attempt=2, resumed_steps=4) == []
    assert rows(database, trial_id) == [(2, {"x": 2, "y": 20, "z": 200}), (4, {"x": 4, "y": 4})]
    check_summary(database, trial_id)


# An attempt: the step it resumed from, and how many further steps it reported in requests.
attempts = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 25), st.integers(1, 30)), min_size=1, max_size=5
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(attempts)
def test_after_any_restarts_what_is_visible_is_the_path_that_led_here(
    database: Database, add_trial: AddTrial, attempts: list[tuple[int, int, int]]
) -> None:
    """An attempt cannot resume from beyond what was reached."""
    reached, starts, model = 0, [], {}
    plans = []
    for wanted, num_steps, batch_size in attempts:
        start = min(wanted, reached) if starts else 0
        starts.append(start)
        reached = start + num_steps
        plans.append((start, reached, batch_size))
    trial_id = add_trial(*starts)
    for number, (start, end, batch_size) in enumerate(plans, 1):
        model = {step: row for step, row in model.items() if step <= start}
        reports = []
        for step in range(start + 1, end + 1):
            metrics = {"x": number + step / 100, f"only{number}": step}
            model[step] = metrics
            reports.append(report(step, **metrics))
        for first in range(0, len(reports), batch_size):
            store(
                database, trial_id, *reports[first : first + batch_size],
                attempt=number, resumed_steps=start,
            )  # fmt: skip
    assert rows(database, trial_id) == sorted(model.items())
    check_summary(database, trial_id)


def test_trimmed_summaries_hold_what_later_attempts_left(
    database: Database, add_trial: AddTrial
) -> None:
    trial_id = add_trial(0, 2)
    store(database, trial_id, report(1, x=5.0), report(2, x=4.0), report(3, x=-9.0, y=1.0))
    database.write(lambda transaction: trim_summaries(transaction.connection, trial_id)).result()
    with database.read() as connection:
        found = connection.execute(select(tables.series).order_by(tables.series.c.key))
        kept = [(row.key, row.min, row.max, row.last) for row in found]
    assert kept == [("x", 4.0, 5.0, 4.0), ("y", None, None, None)]
