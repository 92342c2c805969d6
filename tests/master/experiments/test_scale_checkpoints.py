"""The searched metric is kept beside each checkpoint, whatever came first and whatever stands."""

import math
from typing import Any

import pytest

from paceline._cluster.master.store import tables


def metrics(bench: Any) -> dict[int, float | None]:
    rows = bench.rows(tables.checkpoints)
    return {row.steps_completed: row.metric for row in rows}


@pytest.mark.parametrize("is_validated_first", [True, False])
def test_a_checkpoint_carries_the_searched_metric_of_its_step(
    bench: Any, is_validated_first: bool
) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    if is_validated_first:
        bench.validate(attempt_id, 5, loss=0.5, other=3.0)
    bench.checkpoint(attempt_id, 5)
    bench.checkpoint(attempt_id, 6)
    if not is_validated_first:
        bench.validate(attempt_id, 5, other=3.0)
        bench.validate(attempt_id, 5, loss=0.5)
    assert metrics(bench) == {5: 0.5, 6: None}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.nan, None), (math.inf, None), (-math.inf, None), (2, 2.0), (True, None), ("low", None)],
)
def test_a_checkpoint_without_a_number_carries_none(
    bench: Any, value: Any, expected: float | None
) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    bench.validate(attempt_id, 1, loss=value)
    bench.checkpoint(attempt_id, 1)
    bench.checkpoint(attempt_id, 2)
    bench.validate(attempt_id, 2, loss=value)
    assert metrics(bench) == {1: expected, 2: expected}


def test_what_a_restart_superseded_is_no_longer_a_checkpoints_metric(bench: Any) -> None:
    """The second attempt starts from step 2, so that the validation at step 4 is taken back."""
    bench.create("single")
    first = bench.start(1)
    for step in (2, 4):
        bench.validate(first, step, loss=step / 10)
        bench.checkpoint(first, step)
    bench.write(
        lambda t: t.connection.execute(
            tables.checkpoints.update()
            .where(tables.checkpoints.c.steps_completed == 4)
            .values(state="DELETED")
        )
    )
    bench.end(first, code=1)
    second = bench.start(1)
    assert bench.attempt(second).resumed_steps == 2
    assert metrics(bench) == {2: 0.2, 4: None}
    bench.validate(second, 2, loss=0.9)
    bench.validate(second, 4, loss=0.7)
    assert metrics(bench) == {2: 0.2, 4: 0.7}
