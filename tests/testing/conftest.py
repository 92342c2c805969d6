"""A training script on the core API alone: no torch, so that a start takes a moment."""

from pathlib import Path

import pytest

SCRIPT = """
import json, os, random, time
from paceline import core

WRONG, STEPS, EVERY = os.environ.get("WRONG"), 20, int(os.environ.get("EVERY", "5"))
if WRONG != "seed":
    random.seed(3)

def store(context, step, total):
    metadata = {"steps_completed": step, "total": total}
    with context.checkpoint.store_path(metadata) as (path, _):
        state = {"total": total, "random": random.getstate()}
        (path / "state.json").write_text(json.dumps(state))
        (path / "total.txt").write_text(str(total))

with core.init() as context:
    total, first = 0.0, 1
    if context.latest_checkpoint:
        if WRONG == "resume":
            raise SystemError("no way back")
        with context.checkpoint.restore_path(context.latest_checkpoint) as path:
            state = json.loads((path / "state.json").read_text())
        version, internal, gauss = state["random"]
        if WRONG != "random":
            random.setstate((version, tuple(internal), gauss))
        total = state["total"]
        first = context.checkpoint.get_metadata(context.latest_checkpoint)["steps_completed"] + 1
    for step in range(first, STEPS + 1):
        total += random.random()
        context.train.report_training_metrics(step, {"total": total})
        context.train.report_metrics("profiling", step, {"seconds": time.time()})
        should_leave = context.preempt.should_preempt()
        if step % EVERY == 0 or step == STEPS or should_leave:
            store(context, step, total)
        if should_leave:
            break
"""


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the script's path; it is not to be changed."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path
