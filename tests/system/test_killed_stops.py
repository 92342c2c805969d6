"""A trial that the search stops ends, whichever of its processes is killed meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_lab.processes import processes_of

# The test makes and reads the files, in the directory that it names.
SCRIPT = """
import sys, time
from pathlib import Path
import paceline as det

files = Path({files!r})
with det.core.init() as context:
    context.train.report_validation_metrics(1, {{"loss": 1.0}})
    {before}
    while not context.preempt.should_preempt():
        time.sleep(0.01)
    {after}
"""
HOLD = "(files / 'there').touch()\n    while not (files / 'go').exists(): time.sleep(0.01)"
# Where the script is when a process is killed: it has not asked yet, has been told and saves its
# work, or was told and does not leave.
MOMENTS = {
    "unaware": (HOLD, "pass"),
    "saving": ("pass", HOLD),
    "staying": ("pass", "(files / 'there').touch(); time.sleep(600)"),
}
# The entrypoint is run by a shell, which counts as the training, and its Python as a loader.
VICTIMS = [
    ("master",), ("host",), ("runner",), ("training",), ("loader",), ("master", "runner"),
    ("master", "loader"), ("runner", "loader"), ("runner", "training"),
    ("master", "host", "runner", "training"),
]  # fmt: skip
QUICK = [("staying", ("master",)), ("unaware", ("runner",)), ("saving", ("training",))]
CELLS = [
    pytest.param(
        moment, victims, id=f"{moment}-{'-'.join(victims)}",
        marks=() if (moment, victims) in QUICK else pytest.mark.slow,
    )
    for moment in MOMENTS
    for victims in VICTIMS
]  # fmt: skip
SEARCHER = {
    "name": "async_halving", "metric": "loss", "num_rungs": 1, "max_trials": 1, "max_time": 1,
    "time_metric": "batches", "stop_timeout": 5,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("moment", "victims"), CELLS)
def test_a_stopped_trial_ends_although_its_processes_are_killed(
    moment: str,
    victims: tuple[str, ...],
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    before, after = MOMENTS[moment]
    files = tmp_path / "files"
    files.mkdir()
    script = SCRIPT.format(files=str(files), before=before, after=after)
    master = make_master(1).start(FAULT_LAB=str(tmp_path))
    config = {
        "entrypoint": "python3 train.py", "searcher": SEARCHER, "max_restarts": 2,
        "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1}},
    }  # fmt: skip
    experiment = master.client().create_experiment(config, write_context(script))
    wait_until((files / "there").exists)
    (trial,) = experiment.trials()
    wait_until(lambda: trial.reload().data.state.value != "ACTIVE")
    for found in processes_of(tmp_path):
        if found.kind in victims:
            assert found.kill()
    (files / "go").touch()
    if "master" in victims:
        master.wait(60)
        master.start(FAULT_LAB=str(tmp_path))
    client = master.client()
    (experiment,) = client.list_experiments()
    wait_until(lambda: experiment.reload().state.is_terminal, 120.0)
    (trial,) = experiment.trials()
    assert (experiment.state.value, trial.state.value) == ("COMPLETED", "COMPLETED")
    assert trial.data.stop_reason == "reached the search's full length"
    assert len(list(trial.iter_metrics("validation"))) == 1
    own = {"training", "loader", "runner"}
    wait_until(lambda: not any(found.kind in own for found in processes_of(tmp_path)))
