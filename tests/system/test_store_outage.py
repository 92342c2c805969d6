"""An object store that is away for a while ends no trial and uses no restart; it is named."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STORING = """
import time
import paceline as det
from paceline import core

info = det.get_cluster_info()
distributed = core.DistributedContext.from_torch_distributed()
with core.init(distributed=distributed) as context:
    step = 0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            step = int((path / f"of_{distributed.rank}").read_text())
    while step < 4:
        step += 1
        if distributed.rank == 0:
            context.train.report_validation_metrics(step, {"loss": 1.0 / step})
        with context.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
            (path / f"of_{distributed.rank}").write_text(str(step))
"""
# What is tried is tried for two seconds.
PART_S = "1"


@pytest.mark.long
@pytest.mark.parametrize(
    "struck",
    [
        pytest.param("", id="all", marks=pytest.mark.slow),
        pytest.param("of_0", id="rank 0", marks=pytest.mark.slow),
        pytest.param("of_2", id="rank 2"),
    ],
)
def test_trials_go_on_after_an_outage_without_a_restart(
    s3: str,
    faulty: Any,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    struck: str,
) -> None:
    """Files are stored and restored meanwhile; the metric is that of the last step."""
    master = make_master(3)
    client = master.start().client()
    config = {
        "entrypoint": "python3 -m paceline.launch.torch_distributed train.py",
        "max_restarts": 0,
        "resources": {"slots_per_trial": 3},
        "checkpoint_storage": s3,
        "environment": {"variables": {"PACELINE_STORE_PART_TIMEOUT_S": PART_S}},
        "searcher": {"name": "random", "max_trials": 2, "metric": "loss",
                     "max_length": {"batches": 4}},
    }  # fmt: skip
    # After the first checkpoint.
    seen: list[str] = []

    def be_away(line: str, _client: Any) -> bool:
        is_struck = struck in line and any("manifest.json" in each for each in seen)
        seen.append(line)
        faulty.num_faults += is_struck
        return not is_struck

    faulty.fault = be_away
    experiment = client.create_experiment(config, write_context(STORING))
    problem = rf"Experiment {experiment.id} waits for its store {s3}, which does not answer trial 1"

    def is_named() -> bool:
        return any(re.match(problem, each) for each in client.status().problems)

    wait_until(is_named, 120)
    wait_until(lambda: experiment.trials()[0].data.retries, 120)
    # Also while the trial waits for its next attempt, or that waits for the store.
    wait_until(is_named, 120)
    shown = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "e", "describe", str(experiment.id)],
        env=os.environ | {"PACELINE_HOME": str(master.home), "COLUMNS": "500"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"waits for its store {s3}" in shown.stdout
    [attempt, *_] = experiment.trials()[0].reload().data.attempts
    assert (attempt.exit.reason, attempt.exit.kind) == ("exited", "transient")
    faulty.pass_on()
    wait_until(lambda: experiment.reload().state.is_terminal)
    assert experiment.data.state.value == "COMPLETED"
    for trial in experiment.trials():
        assert (trial.data.state.value, trial.data.restarts) == ("COMPLETED", 0)
        assert trial.data.best_metric == 0.25
    wait_until(lambda: not any(s3 in each for each in client.status().problems))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("minutes", [1, 5])
def test_an_outage_of_minutes_ends_no_trial_of_a_search_with_all_defaults(
    s3: str,
    faulty: Any,
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    minutes: int,
) -> None:
    """Trials store while the store is away, and others begin and end meanwhile."""
    client = make_master(4).start().client()
    code = STORING.replace("step += 1", "step += 1; time.sleep(2)")
    config = {
        "entrypoint": "python3 -m paceline.launch.torch_distributed --nproc-per-node 1 train.py",
        "checkpoint_storage": s3,
        "searcher": {"name": "random", "max_trials": 6, "metric": "loss",
                     "max_length": {"batches": 4}},
    }  # fmt: skip
    experiment = client.create_experiment(config, write_context(code))
    wait_until(lambda: any(trial.checkpoints() for trial in experiment.trials()), 120)
    faulty.fault = lambda _line, _client: False
    wait_until(lambda: any(s3 in each for each in client.status().problems), 60)
    time.sleep(60 * minutes)
    faulty.pass_on()
    wait_until(lambda: experiment.reload().state.is_terminal, 900)
    trials = experiment.trials()
    assert [trial.data.state.value for trial in trials] == ["COMPLETED"] * 6
    assert [trial.data.restarts for trial in trials] == [0] * 6
