"""A database that is lost while a search runs: made again, and the search decides as it would."""

import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.master.upkeep.check import check, fix

SCRIPT = """
import time
import paceline as det

info = det.get_cluster_info()
with det.core.init() as context:
    for step in range(1, 121):
        context.train.report_training_metrics(step, {"total": step * 0.5})
        if step % 5 == 0:
            loss = 100.0 / step * info.trial.hparams["factor"]
            context.train.report_validation_metrics(step, {"loss": loss})
        time.sleep(0.05)
        if context.preempt.should_preempt():
            break
"""
CONFIG = {
    "name": "halving", "entrypoint": "python3 train.py", "max_restarts": 0,
    "searcher": {
        "name": "async_halving", "metric": "loss", "time_metric": "batches", "num_rungs": 2,
        "max_time": 120, "divisor": 2, "max_trials": 3, "max_concurrent_trials": 1,
    },
    "hyperparameters": {"factor": {"type": "categorical", "vals": [1, 2, 4]}},
    "reproducibility": {"experiment_seed": 5},
}  # fmt: skip


def inputs(home: Path) -> list[Any]:
    """Return what the search was told and decided, without its random names."""
    with closing(sqlite3.connect(home / "master.sqlite")) as connection:
        names = [name for (name,) in connection.execute("SELECT request_id FROM trials")]
        found = []
        for row in connection.execute("SELECT number, input, operations FROM search_inputs"):
            text = repr(row)
            for number, name in enumerate(names):
                text = text.replace(name, f"trial {number}")
            found.append(text)
        return found


@pytest.mark.slow
def test_a_search_goes_on_with_a_database_that_was_made_again(
    make_master: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    master = make_master(1).start()
    client = master.client()
    whole = client.create_experiment(CONFIG, tmp_path / "code")
    assert whole.wait().value == "COMPLETED"
    expected_trials = [[tuple(r.metrics.items()) for r in t.iter_metrics("validation")]
                       for t in whole.trials()]  # fmt: skip
    expected = inputs(master.home)
    master.kill()
    shutil.move(master.home, tmp_path / "whole")

    client = master.start().client()
    experiment = client.create_experiment(CONFIG, tmp_path / "code")
    for num_validations in (3, 9):
        while sum(len(list(t.iter_metrics("validation"))) for t in experiment.trials()) < (
            num_validations
        ):
            time.sleep(0.02)
        master.kill()
        for path in master.home.glob("master.sqlite*"):
            path.unlink()
        (found,) = fix(master.home).findings
        assert found.fix is not None
        client = master.start().client()
        (experiment,) = client.list_experiments()
    assert experiment.wait().value == "COMPLETED"
    assert inputs(master.home) == expected
    assert expected_trials == [
        [tuple(r.metrics.items()) for r in t.iter_metrics("validation")]
        for t in experiment.trials()
    ]
    assert all(trial.data.num_records_lost == 0 for trial in experiment.trials())
    assert check(master.home).findings == []
