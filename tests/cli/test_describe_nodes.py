"""The line of `e describe` that says where an experiment runs."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cli._experiment_description import _nodes_of

HERE = 7


def text_of(slots: list[tuple[str, int, int | None]], **changed: Any) -> str | None:
    """Return the line for slots, each with its node, experiment and trial."""
    shown = [
        SimpleNamespace(node=node, experiment_id=experiment_id, trial_id=trial_id)
        for node, experiment_id, trial_id in slots
    ]
    client: Any = SimpleNamespace(slots=lambda: shown)
    data: Any = SimpleNamespace(**{"id": HERE, "num_running": 1, "is_unmanaged": False} | changed)
    return _nodes_of(client, data)


def test_each_node_is_named_with_the_number_of_its_trials() -> None:
    slots = [("a", HERE, 1), ("a", HERE, 1), ("b", HERE, 2), ("b", HERE, 3), ("c", 8, 4)]
    assert text_of(slots) == "a (1 trial), b (2 trials)"


def test_of_many_nodes_the_first_are_named() -> None:
    found = text_of([(f"n{number}", HERE, number) for number in range(13)])
    assert found is not None
    assert found.startswith("n0 (1 trial), n1 (1 trial), ")
    assert found.endswith(", n9 (1 trial) and 3 more")


@pytest.mark.parametrize("changed", [{"num_running": 0}, {"is_unmanaged": True}])
def test_what_does_not_run_here_has_no_line(changed: dict[str, Any]) -> None:
    assert text_of([("a", HERE, 1)], **changed) is None
