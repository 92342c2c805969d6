"""Train functions, Lightning, Transformers and Accelerate under a search: the same by all drivers.

`searched.py` has the functions.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Client

SCRIPT = Path(__file__).with_name("searched.py")
SPACE = {"lr": {"type": "double", "minval": 1.0, "maxval": 2.0}}


def searcher(metric: str) -> dict[str, Any]:
    """Have trials stop after one epoch, or go on to the fourth."""
    return {
        "name": "async_halving", "metric": metric, "num_rungs": 2, "max_trials": 4, "divisor": 4,
        "max_concurrent_trials": 2, "time_metric": "step", "max_time": 16,
    }  # fmt: skip


DOORS = [
    pytest.param("function", "loss", 0, id="function"),
    pytest.param("function", "loss", 2, id="function-2-workers", marks=pytest.mark.slow),
    pytest.param("accelerate", "loss", 0, id="accelerate", marks=pytest.mark.slow),
    pytest.param("lightning", "loss", 0, id="lightning", marks=pytest.mark.slow),
    pytest.param("transformers", "eval_loss", 0, id="transformers", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, master_class: Any) -> Iterator[Client]:
    """Return a client of one master with two slots."""
    master = master_class(tmp_path_factory.mktemp("searched") / "home", 2).start()
    yield master.client()
    master.close()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("door", "metric", "num_workers"), DOORS)
def test_a_masters_search_judges_what_a_train_function_evaluates(
    client: Client, tmp_path: Path, door: str, metric: str, num_workers: int
) -> None:
    (tmp_path / "searched.py").write_text(SCRIPT.read_text())
    config = {
        "name": door, "entrypoint": f"{sys.executable} searched.py {door} {num_workers}",
        "hyperparameters": SPACE, "searcher": searcher(metric), "max_restarts": 0,
        "reproducibility": {"experiment_seed": 3},
    }  # fmt: skip
    experiment = client.create_experiment(config, tmp_path)
    state = experiment.wait().value
    trials = experiment.trials()
    told = [line.text for trial in trials for line in trial.iter_logs()]
    assert state == "COMPLETED", (experiment.reload().data.error, told)
    rates = {trial.id: trial.hparams["lr"] for trial in trials}
    # Judged by the training, the largest would be the best, and its value would be negative.
    assert experiment.best_metric == pytest.approx(min(rates.values()))
    assert all(trial.best_metric == pytest.approx(rates[trial.id]) for trial in trials)
    first, last = experiment.search().brackets[0]
    assert len(first.entries) == 4
    for trial in trials:
        goes_on = trial.id in {entry.trial_id for entry in last.entries}
        rows = [row.metrics for row in trial.iter_metrics("validation") if metric in row.metrics]
        # Each evaluation once, and none after the search has stopped the trial.
        assert [row["step"] for row in rows] == ([4, 8, 12, 16] if goes_on else [4])
        assert [row[metric] for row in rows] == pytest.approx([rates[trial.id]] * len(rows))
        if door != "accelerate":
            # It does not count them.
            assert trial.reload().steps_completed == rows[-1]["step"]
            steps = [row.steps_completed for row in trial.iter_metrics("validation")]
            assert steps == [row["step"] for row in rows]
