"""What a page and a batch read from the database, counted."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from paceline._base.journal_records import encode_metrics
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.metric_rows import (
    add_metrics,
    metric_at,
    read_rows,
    read_series,
)
from paceline.journal import MetricsReported

AddTrial = Callable[..., int]
CHUNK = 1024
CHUNK_BYTES = CHUNK * 24


def report(step: int, **metrics: Any) -> MetricsReported:
    return MetricsReported(
        time=float(step), group="training", steps_completed=step, metrics=encode_metrics(metrics)
    )


def store(
    database: Database, trial_id: int, reports: list[MetricsReported], attempt: int = 1,
    resumed_steps: int = 0,
) -> None:  # fmt: skip
    database.write(
        lambda transaction: add_metrics(
            transaction.connection,
            trial_id=trial_id,
            attempt=attempt,
            resumed_steps=resumed_steps,
            records=reports,
        )
    ).result()


@pytest.fixture
def long_trial(database: Database, add_trial: AddTrial) -> int:
    """Return a trial with 64 chunks of points of each of two metrics."""
    trial_id = add_trial(0, 64 * CHUNK)
    for start in range(0, 64 * CHUNK, 4 * CHUNK):
        steps = range(start, start + 4 * CHUNK)
        store(database, trial_id, [report(step, x=step / 2, y=float(step)) for step in steps])
    return trial_id


@pytest.mark.parametrize(("after", "limit"), [(-1, 100), (5000, 1000), (60 * CHUNK, 10), (99, 1)])
def test_a_page_of_metrics_reads_the_chunks_it_lies_in_and_no_more(
    database: Database, long_trial: int, count_reads: Any, after: int, limit: int
) -> None:
    with count_reads(database._reader._engine) as reads, database.read() as connection:
        rows = read_rows(connection, long_trial, "training", after_step=after, limit=limit)
    expected = range(after + 1, after + 1 + limit)
    assert [(row.step, row.metrics) for row in rows] == [
        (step, {"x": step / 2, "y": float(step)}) for step in expected
    ]
    # Per metric the chunk in which the page begins, the one in which it ends, and the tail's steps.
    assert reads.num_bytes <= 2 * 2.5 * CHUNK_BYTES
    assert reads.num_statements <= 8


def test_a_page_does_not_read_what_a_later_attempt_superseded(
    database: Database, add_trial: AddTrial, count_reads: Any
) -> None:
    trial_id = add_trial(0, 10)
    for start in range(0, 32 * CHUNK, 4 * CHUNK):
        store(database, trial_id, [report(step, x=1.0) for step in range(start, start + 4 * CHUNK)])
    store(database, trial_id, [report(11, x=2.0)], attempt=2, resumed_steps=10)
    with count_reads(database._reader._engine) as reads, database.read() as connection:
        rows = read_rows(connection, trial_id, "training")
    assert [(row.step, row.attempt) for row in rows] == [*[(n, 1) for n in range(11)], (11, 2)]
    assert reads.num_bytes <= 2.5 * CHUNK_BYTES


@pytest.mark.parametrize("value", [1.0, 1, "text"])
def test_a_large_request_is_cut_into_chunks(
    database: Database, add_trial: AddTrial, value: Any
) -> None:
    trial_id = add_trial(0)
    for end in (5000, 10_000):
        store(database, trial_id, [report(step, x=value) for step in range(end - 5000, end)])
        with database.read() as connection:
            sizes = [len(s) for s in connection.execute(select(tables.chunks.c.steps)).scalars()]
            assert connection.execute(select(tables.series.c.steps)).scalar() == b""
            series = read_series(connection, trial_id, "training", "x")
        assert sum(sizes) == end * 8
        assert max(sizes) == CHUNK * 8
        assert series == [(step, value) for step in range(end)]


def test_a_batch_that_repeats_old_steps_reads_what_is_known_once(
    database: Database, long_trial: int, count_reads: Any
) -> None:
    again = [report(step, x=step / 2, y=float(step)) for step in range(100, 600)]
    with count_reads(database._writer_engine) as reads:
        store(database, long_trial, again, attempt=2, resumed_steps=64 * CHUNK)
    assert reads.num_bytes <= 2 * 2.5 * CHUNK_BYTES
    assert reads.num_statements <= 12
    with database.read() as connection:
        attempts = connection.execute(select(tables.series.c.attempt).distinct()).scalars().all()
    assert attempts == [1]


def test_a_metric_at_a_step_is_read_from_its_chunk(
    database: Database, long_trial: int, count_reads: Any
) -> None:
    with count_reads(database._reader._engine) as reads, database.read() as connection:
        assert metric_at(connection, long_trial, "training", "x", 3333) == 3333 / 2
        assert metric_at(connection, long_trial, "training", "z", 3333) is None
        assert metric_at(connection, long_trial, "training", "x", 10**9) is None
    assert reads.num_bytes <= 2.5 * CHUNK_BYTES


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.5, 0.5), (3, 3.0), (float("inf"), None), (float("nan"), None), (True, None),
     ("x", None), ([1.0], None)],
)  # fmt: skip
def test_a_metric_at_a_step_is_a_number_or_nothing(
    database: Database, add_trial: AddTrial, value: Any, expected: float | None
) -> None:
    trial_id = add_trial(0)
    store(database, trial_id, [report(4, x=value)])
    with database.read() as connection:
        assert metric_at(connection, trial_id, "training", "x", 4) == expected


# Batches of (step, name): in any order, repeated, and large enough to fill chunks.
batches = st.lists(
    st.tuples(
        st.integers(0, 3000),
        st.sampled_from([1, 7, -1, -3]),
        st.integers(1, 1500),
        st.sampled_from("xyz"),
    ),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches, st.integers(-1, 4000), st.integers(1, 800))
def test_any_page_is_a_slice_of_the_whole_in_whatever_order_steps_came(
    database: Database,
    add_trial: AddTrial,
    batches: list[tuple[int, int, int, str]],
    after: int,
    limit: int,
) -> None:
    trial_id, model = add_trial(0), dict[int, dict[str, float]]()
    for number, (start, stride, count, name) in enumerate(batches):
        steps = [step for step in range(start, start + stride * count, stride) if step >= 0]
        for step in steps:
            model.setdefault(step, {}).setdefault(name, float(number))
        store(database, trial_id, [report(step, **{name: float(number)}) for step in steps])
    with database.read() as connection:
        rows = read_rows(connection, trial_id, "training", after_step=after, limit=limit)
    expected = [step for step in sorted(model) if step > after][:limit]
    assert [(row.step, row.metrics) for row in rows] == [(step, model[step]) for step in expected]
