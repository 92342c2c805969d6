"""Trials that hold slots without use, or report nothing: told of, then paused, by a real master."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_lab.masters import MasterProcess

# Stores a checkpoint, then does what the file says at each tenth of a second.
SCRIPT = """
import os, time
from pathlib import Path
import paceline as det

Path(os.environ["DOING"] + ".pid").write_text(str(os.getpid()))
with det.core.init() as context:
    info = det.get_cluster_info()
    begin = 0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            begin = int((path / "step").read_text())
    step = begin + 1
    with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
        (path / "step").write_text(str(step))
    context.train.report_validation_metrics(step, {"loss": 1.0})
    while not begin:
        doing = Path(os.environ["DOING"]).read_text()
        if doing == "computes":
            end = time.process_time() + 0.05
            while time.process_time() < end:
                pass
        elif doing == "reports":
            context.train.report_training_metrics(step, {"loss": 1.0})
        time.sleep(0.1)
        if context.preempt.should_preempt():
            raise SystemExit
"""
LONG_S = 3600.0


@pytest.fixture
def submit(
    master: MasterProcess, write_context: Callable[..., Path], tmp_path: Path
) -> Callable[..., Any]:
    """Return a function that submits the script with limits; it does what a file says."""
    code = write_context(SCRIPT)

    def create(doing: str, **idle: Any) -> Any:
        tell(tmp_path, doing)
        config: dict[str, Any] = {
            # A shell, as a stopped entrypoint is ended by its runner.
            "entrypoint": "python3 train.py; exit $?", "max_restarts": 0, "idle": idle,
            "searcher": {"name": "single", "metric": "loss"}, "preemption_timeout": 5,
            "environment": {"variables": {"DOING": str(tmp_path / "doing")}},
        }  # fmt: skip
        return master.client().create_experiment(config, code)

    return create


def tell(directory: Path, doing: str) -> None:
    part = directory / "part"
    part.write_text(doing)
    part.replace(directory / "doing")


def alerts(experiment: Any) -> list[str]:
    return [one.title for trial in experiment.trials() for one in trial.reload().data.alerts]


def state(experiment: Any) -> str:
    return experiment.reload().state.value


@pytest.mark.long
def test_a_trial_without_use_is_told_of_and_paused_and_continues_from_its_checkpoint(
    submit: Callable[..., Any], wait_until: Callable[..., None], tmp_path: Path
) -> None:
    """A trial that falls asleep gives its slots back."""
    experiment = submit("computes", unused_after=4, pause_after=2, silent_after=LONG_S)
    [trial] = experiment.trials()
    wait_until(lambda: trial.reload().data.latest_checkpoint is not None)
    tell(tmp_path, "sleeps")
    wait_until(lambda: state(experiment) == "PAUSED")
    told, *_, paused = alerts(experiment)
    assert told == "The trial holds its slots without use"
    assert paused == "The experiment is paused, as trial 1 holds its slots without use"
    wait_until(lambda: trial.reload().data.attempts[0].state == "ENDED")
    log = "\n".join(line.text for line in trial.iter_logs())
    assert "Alert: The trial holds its slots without use: For " in log, f"{log=}"
    experiment.activate()
    assert experiment.wait().value == "COMPLETED"
    assert [one.resumed_from is not None for one in trial.reload().data.attempts] == [False, True]


@pytest.mark.long
def test_a_stopped_trial_is_paused_too(
    master: MasterProcess, submit: Callable[..., Any], wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:  # fmt: skip
    """SIGSTOP leaves no way to obey: its processes are ended, and the slots are free."""
    experiment = submit("computes", unused_after=4, pause_after=1)
    [trial] = experiment.trials()
    wait_until(lambda: trial.reload().data.latest_checkpoint is not None)
    process = psutil.Process(int((tmp_path / "doing.pid").read_text()))
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: state(experiment) == "PAUSED")
    wait_until(lambda: not process.is_running())
    wait_until(lambda: not any(one.is_used for one in master.client().slots()))


@pytest.mark.long
def test_a_pool_pauses_silent_trials_whose_configs_have_no_limit(
    master: MasterProcess, submit: Callable[..., Any], wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:  # fmt: skip
    """The limits of a pool hold for all; without `pause_after` a trial runs on."""
    experiment = submit("reports", silent_after=4)
    [trial] = experiment.trials()
    wait_until(lambda: trial.reload().data.latest_checkpoint is not None)
    tell(tmp_path, "computes")
    wait_until(lambda: "The trial reports nothing" in alerts(experiment))
    assert state(experiment) == "RUNNING"
    [pool] = master.client().pools()
    assert pool.silent_after_s is None
    master.client().set_pool("default", silent_after_s=4, pause_after_s=1)
    wait_until(lambda: state(experiment) == "PAUSED")
    experiment.activate()
    assert experiment.wait().value == "COMPLETED"
