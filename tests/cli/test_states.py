"""What the stored states mean for people."""

import pytest

from paceline._cluster.messages.states import ExperimentState, TrialState, shown_trial_state
from paceline.cli._console_output import EXPERIMENT_WORDS


@pytest.mark.parametrize(
    ("state", "is_running", "reason", "experiment", "expected"),
    [
        ("ACTIVE", True, None, "ACTIVE", "RUNNING"),
        ("ACTIVE", False, None, "ACTIVE", "QUEUED"),
        ("ACTIVE", False, None, "PAUSED", "PAUSED"),
        ("ACTIVE", True, None, "PAUSED", "STOPPING"),
        ("ACTIVE", False, None, "STOPPING_CANCELED", "STOPPING"),
        ("STOPPING_KILLED", True, "killed by the user", "ACTIVE", "STOPPING"),
        ("COMPLETED", False, "stopped by the search", "ACTIVE", "STOPPED"),
        ("COMPLETED", False, "reached the search's full length", "ACTIVE", "COMPLETED"),
        ("COMPLETED", False, None, "COMPLETED", "COMPLETED"),
        ("CANCELED", False, "stopped by the search", "CANCELED", "CANCELED"),
        ("ERROR", False, None, "ACTIVE", "ERROR"),
    ],
)
def test_a_trial_has_one_word_for_where_it_stands(
    state: str, is_running: bool, reason: str | None, experiment: str, expected: str
) -> None:
    shown = shown_trial_state(TrialState(state), is_running, reason, ExperimentState(experiment))
    assert shown.value == expected


def test_every_stored_state_of_an_experiment_has_a_word() -> None:
    stored = {state for states in EXPERIMENT_WORDS.values() for state in states}
    assert stored == {state.value for state in ExperimentState}
