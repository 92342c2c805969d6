"""Reports of every rank, over attempts that go back to a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import core
from paceline.core._arguments import rank_group
from paceline.journal import RunDirectory

SCRIPT = """
import json, os, sys
from paceline import core

found = []
with core.init(resume=os.environ.get("GO_ON_IN")) as context:
    rank, train = context.distributed.rank, context.train
    start = context.checkpoint.get_metadata(context.latest_checkpoint)["steps_completed"] \\
        if context.latest_checkpoint else 0
    for step in range(start + 1, start + 4):
        train.report_training_metrics(step, {"loss": float(10 * step + rank)})
        train.report_metrics("test", step, {"of": f"rank {rank}"})
        if step == 2:
            context.distributed.allgather(None)
            if rank == 0:
                with context.checkpoint.store_path({"steps_completed": 2}) as (path, _):
                    (path / "state").touch()
            context.distributed.allgather(None)
    train.report_validation_metrics(step, {"loss": float(rank)})
    # A second time the same, then something new, then another value.
    train.report_training_metrics(step, {"loss": float(10 * step + rank)})
    train.report_training_metrics(step, {"more": 1})
    for call in (
        lambda: train.report_training_metrics(step, {"loss": -1.0}),
        lambda: train.report_progress(0.5),
        lambda: train.set_status("at work"),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    context.distributed.allgather(None)
    sys.stdout.write(json.dumps(found) + "\\n")
"""


def test_every_rank_reports_and_goes_on_where_it_was(
    start_ranks: Callable[..., Any], finish_ranks: Callable[..., Any]
) -> None:
    def run(**environment: str) -> list[list[str]]:
        said = []
        for code, output, errors in finish_ranks(start_ranks(SCRIPT, **environment)):
            assert code == 0, errors
            said.append(json.loads(output.splitlines()[-1]))
        return said

    said = run()
    path = next(Path("paceline_runs").iterdir())
    for rank, refused in enumerate(said):
        assert "was " in refused[0]
        assert "and is now -1.0" in refused[0]
        told = [f"Only the chief may report this, but rank {rank} did" in why for why in refused]
        assert told == ([False] if rank == 0 else [False, True, True])

    # The second attempt goes back from step 3 to step 2.
    run(GO_ON_IN=str(path))
    directory = RunDirectory(path)
    for rank in range(3):
        group = rank_group("training", rank)
        assert group == ("training" if rank == 0 else f"training_rank_{rank}")
        rows = [*core.read_metrics(directory, group, rank=rank)]
        losses = [(row.steps_completed, row.is_superseded) for row in rows if "loss" in row.metrics]
        before = [(1, False), (2, False), (3, True)]
        assert losses == [*before, (3, False), (4, False), (5, False)]
        assert {row.metrics["loss"] % 10 for row in rows if "loss" in row.metrics} == {rank}
        own = core.read_metrics(directory, rank_group("test", rank), rank=rank)
        assert {row.metrics["of"] for row in own} == {f"rank {rank}"}
    # A search looks at the chief's.
    best = [row.metrics for row in core.read_metrics(directory, "validation")]
    assert best == [{"loss": 0.0}, {"loss": 0.0}]
