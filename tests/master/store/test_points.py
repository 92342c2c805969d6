"""All points of a series, one after the other, without all of them in memory."""

from collections.abc import Callable
from itertools import islice
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline._base.journal_records import encode_metrics
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.metric_rows import add_metrics, iter_points, read_rows
from paceline._cluster.master.store.series_reader import Selection
from paceline.journal import MetricsReported

AddTrial = Callable[..., int]
CHUNK = 1024
CHUNK_BYTES = CHUNK * 24


def store(
    database: Database, trial: int, steps: Any, value: Any, attempt: int = 1, resumed: int = 0
) -> None:
    records = [
        MetricsReported(
            time=float(step), group="training", steps_completed=step,
            metrics=encode_metrics({"loss": value}),
        )
        for step in steps
    ]  # fmt: skip
    database.write(
        lambda transaction: add_metrics(
            transaction.connection, trial_id=trial, attempt=attempt, resumed_steps=resumed,
            records=records,
        )
    ).result()  # fmt: skip


def selection(trial: int, after: int = -1) -> Selection:
    return Selection(trial_id=trial, group="training", key="loss", after_step=after)


def test_the_first_points_are_there_before_the_rest_is_read(
    database: Database, add_trial: AddTrial, count_reads: Any
) -> None:
    trial = add_trial(0, 64 * CHUNK)
    for start in range(0, 64 * CHUNK, 4 * CHUNK):
        store(database, trial, range(start, start + 4 * CHUNK), 0.5)
    store(database, trial, range(64 * CHUNK, 64 * CHUNK + 9), 0.5, 2, 64 * CHUNK)
    with count_reads(database._reader._engine) as reads, database.read() as connection:
        points = iter_points(connection, selection(trial, after=99))
        assert [step for step, _, _ in islice(points, 10)] == list(range(100, 110))
        assert reads.num_bytes <= 4 * CHUNK_BYTES
        rest = list(points)
    assert [step for step, _, _ in rest] == list(range(110, 64 * CHUNK + 9))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3000), st.sampled_from([1, 7, -1, -3]), st.integers(1, 1500),
            st.sampled_from([1, 2]),
        ),
        min_size=1, max_size=8,
    ),
    st.integers(-1, 4000),
    st.integers(0, 3000),
)  # fmt: skip
def test_points_are_those_that_count_in_whatever_order_steps_came(
    database: Database, add_trial: AddTrial, batches: Any, after: int, resumed: int
) -> None:
    trial = add_trial(0, resumed)
    for number, (start, stride, count, attempt) in enumerate(sorted(batches, key=lambda b: b[3])):
        steps = [step for step in range(start, start + stride * count, stride) if step >= 0]
        if attempt == 2:
            steps = [step for step in steps if step > resumed]
        store(database, trial, steps, float(number), attempt, resumed if attempt == 2 else 0)
    with database.read() as connection:
        rows = read_rows(connection, trial, "training", after_step=after)
        points = list(iter_points(connection, selection(trial, after)))
    assert points == [(row.step, row.time, row.metrics["loss"]) for row in rows]
