"""Runners that are killed cost no restart, whatever the code fails by because of that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PRINTING = """
import os, time
from pathlib import Path
from paceline import core

notes = Path(os.environ["NOTES"])
has_others = "WORLD_SIZE" in os.environ
distributed = core.DistributedContext.from_torch_distributed() if has_others else None
with core.init(distributed=distributed) as context:
    rank = context.distributed.rank
    number = len(list(notes.iterdir()))
    context.distributed.allgather(rank)
    while number < 2:
        # Nobody reads it any more once the runner is dead.
        if rank == int(os.environ["STRUCK_RANK"]):
            print("as ever", flush=True)
            (notes / str(number)).touch()
        time.sleep(0.05)
    if rank == 0:
        context.train.report_validation_metrics(1, {"loss": 0.5})
"""
ALONE = "python3 train.py"
THREE_RANKS = "python3 -m paceline.launch.torch_distributed --nproc-per-node 3 train.py"


@pytest.mark.long
@pytest.mark.parametrize(("entrypoint", "rank"), [(ALONE, 0), (THREE_RANKS, 0), (THREE_RANKS, 2)])
def test_a_runner_that_is_killed_twice_is_no_error_of_the_user(
    shared_master: Any,
    wait_until: Callable[..., None],
    tmp_path: Path,
    entrypoint: str,
    rank: int,
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    experiment_id = shared_master.create(
        PRINTING,
        entrypoint=entrypoint,
        max_restarts=0,
        environment={"variables": {"NOTES": str(notes), "STRUCK_RANK": str(rank)}},
    )
    for number in range(2):
        wait_until((notes / str(number)).exists)
        attempts = shared_master.trial(experiment_id)["attempts"]
        shared_master.runner(attempts[number]["id"]).kill()
    trial = shared_master.wait_for_end(experiment_id)
    reasons = [attempt["exit"]["reason"] for attempt in trial["attempts"]]
    assert reasons == ["runner_lost", "runner_lost", "exited"], trial["error"]
    kinds = [attempt["exit"]["kind"] for attempt in trial["attempts"]]
    assert kinds == ["transient", "transient", None]
    assert (trial["state"], trial["restarts"], trial["retries"]) == ("COMPLETED", 0, 2)
