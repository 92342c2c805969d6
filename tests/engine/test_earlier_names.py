"""Names of earlier versions go on working."""

import pytest

from paceline import engine


@pytest.mark.parametrize(
    ("earlier", "present"),
    [
        ("JoinedBatch", "WorkerBatch"),
        ("Reader", "JsonReader"),
        ("TrainedObjects", "ModelsAndOptimizers"),
        ("TrainedParts", "RegisteredModels"),
        ("Writer", "JsonWriter"),
        ("joined_batches", "worker_batches"),
    ],
)
def test_an_earlier_name_is_the_present_one(earlier: str, present: str) -> None:
    assert getattr(engine, earlier) is getattr(engine, present)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        engine.Nothing  # noqa: B018
