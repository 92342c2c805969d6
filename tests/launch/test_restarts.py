"""The launcher starts workers again, in other numbers too; with real signals."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline._base.run_directory import RUN_DIRECTORY_VARIABLE, RunInfo
from paceline.core import RunState, list_runs, summarize_run
from paceline.journal import RunDirectory
from paceline.testing._compare_runs import compare_runs, read_run_facts

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[..., str]

TRAIN = """
import glob, os, signal, sys, time
from pathlib import Path

from paceline.core._read_runs import read_checkpoints
from paceline.journal import RunDirectory


def allow(cores):
    # The launcher starts as many workers as there are cores for it.
    for task in os.listdir(f"/proc/{os.getppid()}/task"):
        os.sched_setaffinity(int(task), cores)


def before_batch(distributed, batch_idx):
    is_changing = "CORES" in os.environ
    if is_changing and (distributed.size, batch_idx, distributed.rank) == (2, 7, 1):
        allow(CORES[:1])
        os.kill(os.getpid(), signal.SIGKILL)
    if NAME == "killed" and batch_idx == 10:
        # The checkpoint of batch 10 is known to a next attempt once its record is written.
        (run,) = glob.glob(f"paceline_runs/*{NAME}")
        while len(read_checkpoints(RunDirectory(Path(run)))) < 2:
            time.sleep(0.01)
    if is_changing and distributed.size == 1:
        time.sleep(0.1)
        if batch_idx == 12:
            allow(CORES)


NAME = os.environ["NAME"]
CORES = [int(core) for core in os.environ.get("CORES", "").split()]
LENGTH = int(os.environ.get("LENGTH", "20"))
with pytorch.init(hparams={"global_batch_size": 8}, seed=3, name=NAME) as context:
    sys.stdout.write(f"workers {context.distributed.size} of {context.num_shards}\\n")
    trial = Trial(context)
    pytorch.Trainer(trial, context).fit(
        max_length=pytorch.Batch(LENGTH),
        checkpoint_period=pytorch.Batch(5),
        reporting_period=pytorch.Batch(1),
    )
    sys.stdout.write(f"weights {[p.tolist() for p in trial.model.parameters()]}\\n")
"""


def run_named(root: Path, name: str) -> Path:
    (run,) = (run for run in list_runs(root / "paceline_runs") if run.name == name)
    assert run.state is RunState.COMPLETED
    return run.path


def test_training_that_lost_a_worker_ends_in_the_same_bits(
    launch: Launch, script: Script, tmp_path: Path, dropout_trial: str
) -> None:
    name = script(dropout_trial + TRAIN)
    options = ["--nproc-per-node=2", "--max-restarts=2", name]
    assert launch(*options, NAME="straight").returncode == 0
    result = launch(*options, NAME="killed", PACELINE_FAULT="engine.batch:13,signal=KILL,rank=1")
    assert result.returncode == 0, result.stderr
    assert "Rank 1 was ended by SIGKILL, the first of 2 to fail" in result.stderr
    assert "its output is above. Starting the workers again, restart 1 of 2" in result.stderr
    assert "[rank=1] workers 2 of 2" in result.stdout
    straight, killed = (read_run_facts(run_named(tmp_path, n)) for n in ("straight", "killed"))
    assert compare_runs(straight, killed) == []
    assert [run.num_attempts for run in list_runs(tmp_path / "paceline_runs")] == [1, 2]


FUNCTION = """
import os, signal, sys, time
from pathlib import Path

from paceline import train
from paceline.core._read_runs import read_checkpoints
from paceline.journal import RunDirectory

STRUCK = int(os.environ["STRUCK"])


def fit():
    state = train.load_checkpoint()
    start = 0 if state is None else state["step"]
    sys.stdout.write(f"goes on from {start}\\n")
    for step in range(start + 1, 11):
        train.report(step=step)
        if step == 5:
            train.save_checkpoint(step=step)
        if step == 8 and not start and train.world_rank() == STRUCK:
            # The checkpoint is known to a next attempt once its record is written.
            (run,) = Path("paceline_runs").iterdir()
            while not read_checkpoints(RunDirectory(run)):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


train.Trainer(3).run(fit)
"""


@pytest.mark.long
@pytest.mark.parametrize("struck", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_train_function_that_lost_a_rank_goes_on(
    launch: Launch, script: Script, tmp_path: Path, struck: int
) -> None:
    result = launch("--nproc-per-node=3", "--max-restarts=1", script(FUNCTION), STRUCK=str(struck))
    assert result.returncode == 0, result.stderr
    assert [result.stdout.count(f"goes on from {step}\n") for step in (0, 5)] == [3, 3]
    (run,) = list_runs(tmp_path / "paceline_runs")
    assert run.state is RunState.COMPLETED


def test_a_program_that_fails_each_time_is_started_no_third_time(
    launch: Launch, script: Script
) -> None:
    name = script("import sys; sys.stdout.write('begun\\n'); raise ValueError('always')")
    result = launch("--max-restarts", "5", name)
    assert result.returncode == 1
    assert result.stdout.split() == ["begun"] * 2
    assert (
        "(ValueError: always); its output is above. Starting the workers again, restart 1 of 5"
        in result.stderr
    )
    assert "as the workers failed the same way twice with no checkpoint in between" in result.stderr


@pytest.mark.parametrize("is_in_an_attempt", [False, True])
def test_restarts_come_to_an_end(
    launch: Launch, script: Script, tmp_path: Path, is_in_an_attempt: bool
) -> None:
    name = script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    variables = {}
    if is_in_an_attempt:
        info = RunInfo(run_id="r", name="n", created=0.0, checkpoint_storage="/c", slot_ids=[0])
        variables[RUN_DIRECTORY_VARIABLE] = str(RunDirectory.create(tmp_path / "run", info).path)
    result = launch("--max-restarts", "2", name, **variables)
    assert result.returncode == 128 + 9
    assert result.stderr.count("Rank 0 was ended by SIGKILL") == 3
    assert "No restart is left of 2." in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_workers_change_in_number_and_train_on_the_same_samples(
    launch: Launch, script: Script, tmp_path: Path, dropout_trial: str
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("NOT TESTED: needs two cores")
    name = script(dropout_trial.replace("dropout = 0.2", "dropout = 0.0") + TRAIN)
    options = ["--nproc-per-node=1:2", "--max-restarts=1", name]
    straight = launch(*options, NAME="straight", LENGTH="100")
    changed = launch(*options, NAME="changed", LENGTH="100", CORES=" ".join(map(str, cores)))
    assert changed.returncode == 0, changed.stderr
    sizes = re.findall(r"workers (\d) of (\d)", changed.stdout)
    # Of two, one was lost; later two can run again.
    assert list(dict.fromkeys(sizes)) == [("2", "2"), ("1", "2")]
    assert sizes[-1] == ("2", "2")
    assert "2 workers can run: ending the present 1 after a checkpoint" in changed.stderr

    def weights(text: str) -> list[float]:
        # Workers that were stopped at a checkpoint have said theirs too.
        found = re.findall(r"weights (.*)", text)[-1]
        return [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", found)]

    assert weights(changed.stdout) == pytest.approx(weights(straight.stdout), rel=1e-3, abs=1e-5)
    assert [run.state for run in list_runs(tmp_path / "paceline_runs")] == [RunState.COMPLETED] * 2


# Starts end after rank 0 was killed, before anything was recorded, and after rank 2 was killed.
RECORDED = """
import os, signal
from pathlib import Path
from paceline import core

rank = int(os.environ["RANK"])
starts = Path(f"starts-{rank}")
starts.write_text(starts.read_text() + "." if starts.exists() else ".")
start = len(starts.read_text())
if (start, rank) == (2, 2):
    raise SystemExit(7)
with core.DistributedContext.from_torch_distributed() as distributed:
    with core.init(distributed=distributed):
        distributed.allgather(rank)
        if (start, rank) in ((1, 0), (3, 2)):
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.allgather(rank)
"""


@pytest.mark.long
@pytest.mark.parametrize("is_in_an_attempt", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_tells_what_ended_workers_that_were_started_again(
    launch: Launch, script: Script, tmp_path: Path, is_in_an_attempt: bool
) -> None:
    variables = {}
    if is_in_an_attempt:
        info = RunInfo(run_id="r", name="n", created=0.0, checkpoint_storage="/c", slot_ids=[0])
        variables[RUN_DIRECTORY_VARIABLE] = str(RunDirectory.create(tmp_path / "run", info).path)
    options = ["--nproc-per-node=3", "--max-restarts=3", script(RECORDED)]
    result = launch(*options, **variables)
    assert result.returncode == 0, result.stderr
    path = tmp_path / "run" if is_in_an_attempt else run_named(tmp_path, "train")
    causes = summarize_run(path).restart_causes
    begun = ["Rank 0 was ended by SIGKILL", "Rank 2 exited with code 7", "Rank 2 was ended by SIG"]
    assert [cause.startswith(text) for cause, text in zip(causes, begun, strict=True)] == [True] * 3
    assert "output" not in causes[0]
