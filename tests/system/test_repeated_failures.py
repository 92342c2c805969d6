"""A trial that fails twice in the same way is given up; one that fails in other ways is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os, time
from pathlib import Path
from paceline import core

notes = Path(os.environ["NOTES"])
with core.init(distributed=core.DistributedContext.from_torch_distributed()) as context:
    if context.distributed.rank == int(os.environ["STRUCK_RANK"]):
        number = len(list(notes.iterdir()))
        (notes / str(number)).touch()
        raise ValueError(f"failure {number}" if os.environ["VARIES"] == "1" else "as ever")
    time.sleep(60)
"""
MAX_RESTARTS = 3


# With rank 2, others fail because of it: one more thing to see than with rank 0.
@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("varies", [True, False])
def test_restarts_go_on_while_the_failures_of_a_rank_differ(
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    tmp_path: Path,
    rank: int,
    varies: bool,
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    config = {
        "name": "failures",
        "entrypoint": "python -m paceline.launch.torch_distributed train.py",
        "max_restarts": MAX_RESTARTS,
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}},
        "resources": {"slots_per_trial": 3},
        "environment": {
            "variables": {
                "NOTES": str(notes), "STRUCK_RANK": str(rank), "VARIES": str(int(varies)),
            }
        },
    }  # fmt: skip
    experiment = make_master(3).start().client().create_experiment(config, write_context(SCRIPT))
    wait_until(lambda: experiment.reload().state.is_terminal, 120)
    (trial,) = experiment.trials()
    num_attempts = 1 + MAX_RESTARTS if varies else 2
    assert len(trial.reload().data.attempts) == num_attempts
    last = f"ValueError: failure {MAX_RESTARTS}" if varies else "ValueError: as ever"
    for error in (trial.data.error, experiment.data.error):
        # What rank 0 fails by because of another rank explains nothing.
        assert rank == 0 or f"Rank {rank} exited with code 1" in error
        assert last in error
