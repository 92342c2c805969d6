"""The leaderboard fits a terminal of 80 characters."""

import io
from typing import Any

import pytest
from rich.console import Console

from paceline._cluster.messages.experiment_models import Trial as TrialData
from paceline._cluster.messages.states import ExperimentState, TrialState
from paceline.cli._experiment_description import leaderboard_table
from paceline.client import Trial
from paceline.client._http_session import HttpSession


def trial(number: int, metric: float, **hparams: Any) -> Trial:
    data = TrialData(
        id=number,
        experiment_id=1,
        request_id=f"r{number}",
        state=TrialState.COMPLETED,
        experiment_state=ExperimentState.COMPLETED,
        is_running=False,
        hparams=hparams,
        seed=0,
        restarts=0,
        num_attempts=1,
        steps_completed=10,
        progress=None,
        status=None,
        best_metric=metric,
        best_step=10 * number,
        latest_metric=metric,
        created_at=0.0,
        started_at=0.5,
        ended_at=1.0,
        stop_reason=None,
        error=None,
        latest_checkpoint=None,
        target_length=None,
    )
    return Trial(HttpSession(), data)


def rendered(*trials: Trial, metric: str = "loss", color: bool = False) -> str:
    output = io.StringIO()
    console = Console(file=output, width=400, color_system="standard" if color else None)
    console.print(leaderboard_table(trials, metric))
    return output.getvalue()


def test_hyperparameters_that_differ_have_columns() -> None:
    text = rendered(trial(4, 0.125, lr=0.1, n=8, same=1), trial(2, 0.5, lr=0.01, n=8, same=1))
    assert [line.split() for line in text.splitlines()] == [
        ["#", "Trial", "loss", "Batches", "lr"],
        [text.splitlines()[1]],
        ["1", "4", "0.125", "40", "0.1"],
        ["2", "2", "0.5", "20", "0.01"],
    ]


@pytest.mark.parametrize("count", [3, 12])
def test_no_line_is_wider_than_a_terminal_unless_values_are_joined(count: int) -> None:
    names = [f"hyperparameter_{i}" for i in range(count)]
    trials = [trial(n, n / 3, **dict.fromkeys(names, n + 0.123456)) for n in (1, 2)]
    text = rendered(*trials)
    is_joined = "hyperparameter_0=1.123" in text
    assert is_joined == (max(map(len, text.splitlines())) > 80)
    assert is_joined == (count == 12)


def test_the_best_trial_stands_out_in_colour() -> None:
    rows = rendered(trial(1, 0.1, lr=1), trial(2, 0.2, lr=2), color=True).splitlines()[2:]
    assert "\x1b[1;32m" in rows[0]
    assert "\x1b[" not in rows[1]
