from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.search._rungs import Rung


def _filled(*values: float) -> Rung:
    rung = Rung(1)
    for index, value in enumerate(values):
        rung.insert(str(index), value)
    return rung


@pytest.mark.parametrize(
    ("present", "value", "rank"),
    [
        pytest.param([0, 1.5, 2.1], 1.2, 1, id="S-30"),
        pytest.param([0, 1.5, 2], 3.0, 3, id="S-31"),
        pytest.param([-3, -2, -1], -3.4, 0, id="S-32"),
        pytest.param([], 1.2, 0, id="S-33"),
        pytest.param([1, 2, 2, 3], 2, 3, id="behind-equals"),
        pytest.param([1, math.inf], math.inf, 2, id="infinity"),
        pytest.param([1, 2], -math.inf, 2, id="minus-infinity-behind-numbers"),
        pytest.param([math.inf], 7, 0, id="number-before-infinity"),
        pytest.param([math.nan, 1, math.nan], math.nan, 3, id="nan-behind-nan"),
        pytest.param([], math.nan, 0, id="nan-alone"),
    ],
)
def test_rank_of_a_newcomer(present: list[float], value: float, rank: int) -> None:
    assert _filled(*present).insert("new", value) == rank


def test_entries_come_ranked_and_keep_their_order_when_equal() -> None:
    entries = list(_filled(2, math.nan, 1, 2, -math.inf))
    assert [request_id for request_id, _ in entries] == ["2", "0", "3", "1", "4"]
    assert [value for _, value in entries[:3]] == [1, 2, 2]
    assert all(math.isnan(value) for _, value in entries[3:])


@pytest.mark.parametrize("request_id", ["0", "1", "2", "3"])
def test_removing_takes_the_entry_of_that_trial(request_id: str) -> None:
    rung = _filled(2, math.nan, 1, 2)
    before = [key for key, _ in rung]
    rung.remove(request_id)
    assert [key for key, _ in rung] == [key for key in before if key != request_id]
    assert len(rung) == 3


@given(st.lists(st.floats(), max_size=20), st.floats())
def test_snapshot_keeps_everything(values: list[float], value: float) -> None:
    rung = _filled(*values)
    twin = Rung(1)
    twin.load(json.loads(json.dumps(rung.snapshot(), allow_nan=False)))
    assert [key for key, _ in twin] == [key for key, _ in rung]
    assert twin.insert("new", value) == rung.insert("new", value)
    assert twin.snapshot() == rung.snapshot()
