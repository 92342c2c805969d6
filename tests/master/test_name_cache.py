"""Names that are kept while nothing comes or goes."""

import pytest

from paceline._cluster.master.store import experiment_list as _name_cache
from paceline._cluster.master.store.experiment_list import NameCache


def test_names_are_gathered_again_only_for_another_state_or_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered: list[str] = []

    def gather() -> list[str]:
        gathered.append("name")
        return list(gathered)

    kept = NameCache()
    assert kept.read((1, 1), gather) == kept.read((1, 1), gather) == ["name"]
    assert kept.read((2, 2), gather) == ["name"] * 2
    monkeypatch.setattr(_name_cache, "_FRESH_S", 0.0)
    assert kept.read((2, 2), gather) == ["name"] * 3
