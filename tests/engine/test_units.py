"""Train units: when a period is due."""

import pytest

from paceline._training.engine.schedules import (
    Batch,
    Epoch,
    Position,
    Record,
    TrainUnit,
    checked_unit,
)


def position(batches: int = 0, epochs: int = 0, records: int = 0) -> Position:
    return Position(batches=batches, epochs=epochs, records=records)


@pytest.mark.parametrize(
    ("unit", "due"),
    [
        (Batch(1), [1, 2, 3, 4, 5, 6]),
        (Batch(3), [3, 6]),
        (Batch([2, 5]), [2, 5]),
        (Record(8), [2, 4, 6]),
        (Record(10), [3, 5]),
        (Record(1000), []),
        (Epoch(1), [4]),
    ],
)
def test_period_is_due_at_its_multiples_and_a_schedule_at_its_members(
    unit: TrainUnit, due: list[int]
) -> None:
    """Six batches of four records; an epoch ends with the fourth."""
    found = []
    for batch in range(1, 7):
        before = position(batch - 1, int(batch > 4), (batch - 1) * 4)
        after = position(batch, int(batch >= 4), batch * 4)
        if unit.is_due(before, after):
            found.append(batch)
    assert found == due


@pytest.mark.parametrize("value", [0, -1])
def test_value_below_one_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, but got {value}"):
        Batch(value)


@pytest.mark.parametrize("value", [1.5, "3", None, True])
def test_value_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="integer or a container"):
        Epoch(value)  # type: ignore[arg-type]


def test_schedule_is_no_length() -> None:
    with pytest.raises(TypeError, match="length must be an integer"):
        Batch([1, 2]).length  # noqa: B018


def test_plain_number_is_refused_as_a_unit_with_the_argument_named() -> None:
    with pytest.raises(TypeError, match="`max_length` must be a train unit.*but got 3"):
        checked_unit("max_length", 3)
