"""Train functions that leave by `sys.exit()` or end their process, instead of returning."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch.distributed as dist

from paceline import core, train
from paceline.core import RunState, list_runs

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Leave = Callable[[], Any]


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers are replaced between the tests."""


@pytest.fixture(scope="module")
def trainer() -> Iterator[train.Trainer]:
    """Return a trainer of three workers, which are started again after each test."""
    with train.Trainer(num_workers=3, max_retries=2) as trainer:
        yield trainer


def left_by(leave: Leave, rank: int | None) -> Callable[[], None]:
    """Return a function that leaves on one rank, or on all, while the others wait for it."""

    def function() -> None:
        train.report(value=1.0)
        if rank is None or train.world_rank() == rank:
            leave()
        dist.barrier()

    return function


def leave_with_0() -> None:
    sys.exit(0)


def leave_with_nothing() -> None:
    sys.exit()


def leave_with_3() -> None:
    sys.exit(3)


def leave_with_text() -> None:
    sys.exit("no data")


def end_process() -> None:
    os._exit(0)


WITH_0 = [(leave_with_0, "`sys.exit(0)`"), (leave_with_nothing, "`sys.exit()`")]
OTHERS = [(leave_with_3, "`sys.exit(3)`", 3), (leave_with_text, "`sys.exit('no data')`", 1)]


@pytest.mark.parametrize("rank", [0, 2, None])
@pytest.mark.parametrize(("leave", "what"), [*WITH_0, (end_process, "ended with exit code 0")])
def test_a_worker_that_leaves_with_0_is_one_error_at_once(
    trainer: train.Trainer, leave: Leave, what: str, rank: int | None
) -> None:
    class Seen(train.TrainingCallback):
        restarts: list[Exception] = []

        def handle_restart(self, error: Exception, generation: int) -> None:
            self.restarts.append(error)

    with pytest.raises(train.WorkerFailedError) as info:
        trainer.run(left_by(leave, rank), callbacks=[Seen()])
    error = info.value
    assert what in str(error)
    assert "exit code 0, the first of 3 to fail" in str(error)
    assert f"rank {error.rank} " in str(error)
    assert error.exit_code == 0
    assert rank in (None, error.rank)
    assert Seen.restarts == []
    assert trainer.run_dir is not None
    assert core.summarize_run(trainer.run_dir).state is RunState.CRASHED
    # The same trainer goes on with other workers.
    assert trainer.run(train.world_rank) == [0, 1, 2]


@pytest.mark.parametrize(("leave", "what", "code"), OTHERS)
def test_a_worker_that_leaves_with_another_code_again_is_one_error(
    trainer: train.Trainer, leave: Leave, what: str, code: int
) -> None:
    with pytest.raises(train.WorkersLostError) as info:
        trainer.run(left_by(leave, 2))
    assert f"rank 2 left by {what} with exit code {code}" in str(info.value)
    cause = info.value.__cause__
    assert isinstance(cause, train.WorkerFailedError)
    assert (cause.rank, cause.exit_code) == (2, code)


@pytest.mark.parametrize(
    ("leave", "what", "code"), [*((leave, what, 0) for leave, what in WITH_0), *OTHERS]
)
def test_a_function_that_leaves_in_the_drivers_process_is_one_error(
    leave: Leave, what: str, code: int
) -> None:
    num_calls = 0

    def function() -> None:
        nonlocal num_calls
        num_calls += 1
        leave()

    trainer = train.Trainer(num_workers=0)

    def start(hook: Leave) -> None:
        trainer.start(initialization_hook=hook)

    for call in (trainer.run, trainer.execute, start):
        with pytest.raises(train.WorkerFailedError) as info:
            call(function)
        assert f"rank 0 left by {what} with exit code {code}." in str(info.value)
        assert (info.value.rank, info.value.exit_code) == (0, code)
        assert leave.__name__ in str(info.value.__cause__)
    assert num_calls == 3


def test_the_traceback_shows_where_a_worker_left(trainer: train.Trainer) -> None:
    with pytest.raises(train.WorkerFailedError) as info:
        trainer.run(left_by(leave_with_0, 2))
    text = str(info.value.__cause__)
    assert "in leave_with_0\n" in text
    assert text.count("Traceback") == 1


@pytest.mark.long
def test_a_rank_that_leaves_is_named_on_every_rank_of_a_launcher(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
from paceline import train

def function():
    if train.world_rank() == 2:
        sys.exit(0)

trainer = train.Trainer(num_workers=3, run_dir="run")
try:
    trainer.run(function)
except Exception as error:
    sys.stdout.write(f"{type(error).__name__} {error}\\n")
"""
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    result = subprocess.run(
        [sys.executable, *launch, str(script)],
        cwd=tmp_path,
        env={**clean_environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3, result.stdout
    assert sum("rank 2 left by `sys.exit(0)` with exit code 0" in line for line in lines) == 3
    assert sum(line.startswith("WorkerFailedError") for line in lines) == 1
    (run,) = list_runs(tmp_path)
    assert run.state is RunState.CRASHED
