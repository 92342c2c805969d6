"""Names that pickles of earlier versions have are found."""

import pickle
from importlib import import_module
from typing import Any

import pytest

from paceline import core, search, storage, testing, train
from paceline.messages import experiments, metrics, node_runners, nodes_and_slots, trials


@pytest.mark.parametrize(
    ("module", "present"),
    [
        ("paceline.core._attempt_history", core.MetricsRow),
        ("paceline.search._search_views", search.TrialView),
        ("paceline.testing._fault_kinds", testing.Fault),
        ("paceline.train._preparing_functions", train.prepare_model),
        ("paceline.train._preparing_functions", train.get_dataset),
        ("paceline.storage._storage_setting", storage.storage_from),
        ("paceline.messages.resources", experiments.Experiment),
        ("paceline.messages.resources", trials.Trial),
        ("paceline.messages.resources", nodes_and_slots.Slot),
        ("paceline.messages.views", experiments.ForkExperiment),
        ("paceline.messages.views", metrics.Series),
        ("paceline.messages.times", trials.TrialTime),
        ("paceline.messages.nodes", node_runners.NodeFacts),
    ],
)
def test_a_pickle_that_names_an_earlier_module_loads(module: str, present: Any) -> None:
    pickled = f"c{module}\n{present.__name__}\n.".encode()
    assert pickle.loads(pickled) is present


def test_other_names_are_not_found() -> None:
    earlier = import_module("paceline.core._attempt_history")
    with pytest.raises(AttributeError):
        earlier.Nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        import_module("paceline.core._nothing")
