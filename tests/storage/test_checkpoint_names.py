"""UUIDs of checkpoints."""

from uuid import UUID

from paceline.storage._checkpoint_storage import is_of_other_trial, new_uuid, series_uuid

CLUSTER = "5a3c2ee0-9f0f-4a8e-8a37-6f2d57d3e8a2"


def test_names_tell_their_trial() -> None:
    name = new_uuid(CLUSTER, 3)
    later = series_uuid(name, 1)
    assert len({name, later, series_uuid(name, 2), new_uuid(CLUSTER, 3)}) == 4
    assert series_uuid(name, 1) == later
    for each in (name, later):
        assert str(UUID(each)) == each
        assert UUID(each).version == 8
        assert not is_of_other_trial(each, CLUSTER, 3)
        assert is_of_other_trial(each, CLUSTER, 4)
        assert is_of_other_trial(each, "other", 3)


def test_other_names_may_be_of_any_trial() -> None:
    name = new_uuid()
    for each in (name, series_uuid(name, 1), "one", "a-8"):
        assert not is_of_other_trial(each, CLUSTER, 3)
    assert new_uuid(CLUSTER) != new_uuid("", 3)
    assert UUID(name).version == 4
