"""A small trial runs in the gap in front of a large one, and resumes where it was afterwards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CODE = """
import os
import time
from pathlib import Path

import paceline

files = Path(os.environ["FILES"])
with paceline.core.init() as context:
    latest = paceline.get_cluster_info().latest_checkpoint
    step = 0
    if latest is not None:
        with context.checkpoint.restore_path(latest) as path:
            step = int((path / "step").read_text())
    while not (files / os.environ["UNTIL"]).exists():
        step += 1
        context.train.report_training_metrics(step, {"loss": 1.0 / step})
        if context.preempt.should_preempt():
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "step").write_text(str(step))
            break
        time.sleep(0.05)
    else:
        context.train.report_validation_metrics(step, {"loss": 1.0})
"""


@pytest.mark.long
def test_a_filler_leaves_for_the_large_trial_and_resumes_its_steps(
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    """The master is killed and started meanwhile."""
    master = make_master(3).start()
    code = write_context(CODE)
    client = master.client()
    client.set_pool("default", backfill=True)

    def create(num_slots: int, until: str) -> Any:
        config = {
            "entrypoint": "python3 train.py", "max_restarts": 0,
            "resources": {"slots_per_trial": num_slots},
            "environment": {"variables": {"FILES": str(tmp_path), "UNTIL": until}},
            "searcher": {"name": "single", "metric": "loss"},
        }  # fmt: skip
        return client.create_experiment(config, code)

    def attempts(experiment: Any) -> list[Any]:
        [trial] = client.get_experiment(experiment.id).trials()
        return client.get_trial(trial.id).data.attempts

    def runs(experiment: Any) -> bool:
        return client.get_experiment(experiment.id).data.num_running == 1

    first = create(2, "first")
    wait_until(lambda: runs(first))
    large = create(3, "large")
    small = create(1, "small")
    wait_until(lambda: runs(small))
    [filler] = attempts(small)
    assert filler.is_filler
    assert not attempts(first)[0].is_filler
    [waits] = client.queue()
    assert (waits.experiment_id, waits.reason) == (large.id, "slots_in_use")

    master.kill()
    master.start()
    client = master.client()
    assert client.pools()[0].backfill
    (tmp_path / "first").touch()
    wait_until(lambda: runs(large))
    [left] = attempts(small)
    assert left.preempt_reason == (
        f"makes room for experiment {large.id}, which came before it and has room now"
    )
    [waits] = client.queue()
    assert (waits.experiment_id, waits.reason) == (small.id, "slots_in_use")
    for name in ("large", "small"):
        (tmp_path / name).touch()
    for experiment in (first, large, small):
        assert client.get_experiment(experiment.id).wait(0.1).value == "COMPLETED"
    [left, again] = attempts(small)
    assert again.resumed_steps > 0
    assert not again.is_filler
    [trial] = client.get_experiment(small.id).trials()
    assert (trial.data.restarts, trial.data.retries) == (0, 0)
    steps = [row.steps_completed for row in trial.iter_metrics("training")]
    assert steps == list(range(1, len(steps) + 1))
