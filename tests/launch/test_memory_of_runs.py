"""States in memory of the launcher: its workers go on from there, and nothing is left of them."""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.core import list_runs
from paceline.testing._compare_runs import compare_runs, read_run_facts

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[..., str]

# No checkpoint is stored before the end. Kills are "batch-rank".
TRAIN = """
import os, signal, sys, time
from pathlib import Path

from paceline.pytorch import _memory_checkpoints
from paceline.pytorch._loop_agreement import RankAgreement

RankAgreement.look_interval_s = _memory_checkpoints._LEAST_INTERVAL_S = 1e-6
# Small states at each boundary, on a busy machine too.
_memory_checkpoints._MAX_STRIDE = 1


def before_batch(distributed, batch_idx):
    if "PIDS" in os.environ:
        path = Path(f"pid-{distributed.rank}")
        path.with_suffix(".part").write_text(str(os.getpid()))
        path.with_suffix(".part").rename(path)
        time.sleep(0.02)
        return
    memory = trainer._training.checkpoints.memory
    while memory is not None and (memory._saver.is_storing or memory._parts.num_pending):
        time.sleep(0.001)
    kill = f"{batch_idx}-{distributed.rank}"
    if kill in os.environ.get("KILLS", "").split() and not Path(kill).exists():
        Path(kill).touch()
        if "CORES" in os.environ:
            for task in os.listdir(f"/proc/{os.getppid()}/task"):
                os.sched_setaffinity(int(task), [int(os.environ["CORES"])])
        os.kill(os.getpid(), signal.SIGKILL)
    while batch_idx == int(os.environ.get("STAYS_AT", "-1")):
        time.sleep(0.1)


def in_step(distributed):
    if distributed.rank == 1 and trainer._training.loop.position.batches == 9:
        if not Path("in-step").exists():
            Path("in-step").touch()
            os.kill(os.getpid(), signal.SIGKILL)


with pytorch.init(hparams={"global_batch_size": 12}, seed=3, name=os.environ["NAME"]) as context:
    trial = Trial(context)
    for optimizer in trial.context.optimizers if "IN_STEP" in os.environ else ():
        optimizer.register_step_post_hook(lambda *_: in_step(context.distributed))
    trainer = pytorch.Trainer(trial, context)
    trainer.fit(
        max_length=pytorch.Batch(int(os.environ.get("LENGTH", "20"))),
        reporting_period=pytorch.Batch(1),
        memory_checkpoints=float(os.environ.get("EVERY", "0.99")),
    )
    sys.stdout.write(f"weights {[p.tolist() for p in trial.model.parameters()]}\\n")
"""


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Return the directory where launchers make their memory."""
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def straight_runs() -> dict[str, Any]:
    """Return the facts of undisturbed trainings, which several tests compare with."""
    return {}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run_named(root: Path, name: str) -> Path:
    return next(run.path for run in list_runs(root / "paceline_runs") if run.name == name)


def test_workers_that_are_lost_go_on_from_memory_in_the_same_bits(
    launch: Launch, script: Script, tmp_path: Path, dropout_trial: str, memory: Path
) -> None:
    name = script(dropout_trial + TRAIN)
    options = ["--nproc-per-node=3", "--max-restarts=4", name]
    variables = {"PACELINE_MEMORY_DIR": str(memory)}
    assert launch(*options, NAME="straight", **variables).returncode == 0
    result = launch(*options, NAME="killed", KILLS="7-0 12-2 16-0 16-2", **variables)
    assert result.returncode == 0, result.stderr
    straight, killed = (read_run_facts(run_named(tmp_path, n)) for n in ("straight", "killed"))
    assert compare_runs(straight, killed) == []
    # The last two are killed at once, or one after the other.
    starts = [attempt.start_step for attempt in killed.attempts]
    assert len(starts) in (4, 5)
    assert all(any(0 <= at - start < 4 for start in starts[1:]) for at in (7, 12, 16))
    assert killed.checkpoint_steps == [20]
    assert not [*memory.iterdir()]


@pytest.mark.long
def test_a_survivor_saves_the_state_before_the_interrupted_step(
    launch: Launch, script: Script, tmp_path: Path, dropout_trial: str, memory: Path
) -> None:
    name = script(dropout_trial + TRAIN)
    options = ["--nproc-per-node=3", "--max-restarts=6", "--grace-s=100", name]
    # The first state alone is copied to memory.
    variables = {"PACELINE_MEMORY_DIR": str(memory), "EVERY": "1e6"}
    assert launch(*options, NAME="straight", **variables).returncode == 0
    kills = "4-0 7-2 14-1 16-0 16-2"
    result = launch(*options, NAME="killed", KILLS=kills, IN_STEP="1", **variables)
    assert result.returncode == 0, result.stderr
    straight, killed = (read_run_facts(run_named(tmp_path, n)) for n in ("straight", "killed"))
    assert compare_runs(straight, killed) == []
    starts = [attempt.start_step for attempt in killed.attempts][1:]
    # The last sum before a kill may have reached some ranks alone.
    lost = [at for at in (4, 7, 14, 16) if not {at - 1, at} & {*starts}]
    assert not lost, (starts, result.stderr)
    # A rank that was lost within its optimizer step: the state in memory before that is taken.
    assert 6 <= starts[2] <= 9
    assert not [*memory.iterdir()]


# Batch 3 of rank 1 takes 30 s in its first process, in many short waits.
SLOW = """
import atexit, os, time
from pathlib import Path

IS_SLOW = "SLOW" in os.environ and not Path("waits").exists() and os.environ["RANK"] == "1"
if IS_SLOW:
    atexit.register(Path("left").touch)


def wait(where):
    if IS_SLOW and os.environ["SLOW"] == where and trainer._training.loop.position.batches == 3:
        with open("waits", "a") as file:
            file.write("x")
        time.sleep(0.1)


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        wait("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        wait("backward")
        return gradient


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Waits.apply(x * self.scale)


class Trial(Trial):
    def __init__(self, context):
        self.context = context
        layers = nn.Dropout(self.dropout), nn.Linear(8, 2), nn.BatchNorm1d(2)
        slow = (Slow() for _ in range(300))
        self.model = context.wrap_model(nn.Sequential(*layers, *slow))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        victim = os.environ.get("KILLS", "").partition("-")[2]
        is_killed = "SLOW" in os.environ and os.environ["RANK"] == victim and batch_idx == 3
        while is_killed and not Path("waits").exists():
            time.sleep(0.01)
        return super().train_batch(batch, epoch_idx, batch_idx)
"""


@pytest.mark.long
@pytest.mark.parametrize(("where", "victim"), [("forward", 0), ("backward", 2), ("backward", 0)])
def test_a_survivor_leaves_a_batch_that_cannot_be_completed(
    launch: Launch,
    script: Script,
    tmp_path: Path,
    dropout_trial: str,
    memory: Path,
    straight_runs: dict[str, Any],
    where: str,
    victim: int,
) -> None:
    name = script(dropout_trial + SLOW + TRAIN)
    options = ["--nproc-per-node=3", "--max-restarts=2", "--grace-s=100", name]
    variables = {"PACELINE_MEMORY_DIR": str(memory), "EVERY": "1e6", "LENGTH": "8"}
    if "short" not in straight_runs:
        assert launch(*options, NAME="straight", **variables).returncode == 0
        straight_runs["short"] = read_run_facts(run_named(tmp_path, "straight"))
    result = launch(*options, NAME="killed", KILLS=f"3-{victim}", SLOW=where, **variables)
    assert result.returncode == 0, result.stderr
    killed = read_run_facts(run_named(tmp_path, "killed"))
    assert compare_runs(straight_runs["short"], killed) == []
    assert [attempt.start_step for attempt in killed.attempts] == [0, 3]
    assert 0 < len((tmp_path / "waits").read_text()) < 200
    # The script ends as after any error.
    assert (tmp_path / "left").exists()
    assert "This rank lost another one" in result.stderr


def kill_at_random(
    launcher: "subprocess.Popen[str]", root: Path, draw: random.Random, num_kills: int
) -> None:
    """Kill ranks one after another, each a random time after the first batch of its process."""
    while num_kills and launcher.poll() is None:
        path = root / f"pid-{draw.randrange(3)}"
        wait_until(lambda path=path: path.exists() or launcher.poll() is not None)  # type: ignore[misc]
        time.sleep(draw.uniform(0.0, 0.6))
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)
            num_kills -= 1
        for each in root.glob("pid-?"):
            each.unlink()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10 if "PACELINE_TEST_FULL" in os.environ else 2))
@pytest.mark.timeout(300)
def test_kills_at_random_moments_end_in_the_same_bits(
    start_launcher: Callable[..., "subprocess.Popen[str]"],
    script: Script,
    tmp_path: Path,
    dropout_trial: str,
    memory: Path,
    straight_runs: dict[str, Any],
    seed: int,
) -> None:
    options = ["--nproc-per-node=3", "--max-restarts=20", script(dropout_trial + TRAIN)]
    variables = {"PACELINE_MEMORY_DIR": str(memory), "PIDS": "1", "LENGTH": "60"}
    for name, num_kills in (("straight", 0), ("killed", 6)):
        if name in straight_runs:
            continue
        launcher = start_launcher(*options, NAME=name, **variables)
        kill_at_random(launcher, tmp_path, random.Random(seed), num_kills)
        _, errors = launcher.communicate(timeout=200)
        assert launcher.returncode == 0, errors
    if "straight" not in straight_runs:
        straight_runs["straight"] = read_run_facts(run_named(tmp_path, "straight"))
    killed = read_run_facts(run_named(tmp_path, "killed"))
    assert compare_runs(straight_runs["straight"], killed) == []
    assert len(killed.attempts) > 3
    assert not [*memory.iterdir()]


@pytest.mark.slow
def test_another_number_of_workers_goes_on_from_memory(
    launch: Launch, script: Script, tmp_path: Path, dropout_trial: str, memory: Path
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("NOT TESTED: needs two cores")
    name = script(dropout_trial.replace("dropout = 0.2", "dropout = 0.0") + TRAIN)
    options = ["--nproc-per-node=1:2", "--max-restarts=1", name]
    variables = {"PACELINE_MEMORY_DIR": str(memory)}
    straight = launch(*options, NAME="straight", **variables)
    changed = launch(*options, NAME="changed", KILLS="12-1", CORES=str(cores[0]), **variables)
    assert changed.returncode == 0, changed.stderr
    facts = read_run_facts(run_named(tmp_path, "changed"))
    assert 0 < facts.attempts[1].start_step <= 12

    def weights(text: str) -> list[float]:
        found = re.findall(r"weights (.*)", text)[-1]
        return [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", found)]

    assert weights(changed.stdout) == pytest.approx(weights(straight.stdout), rel=1e-3, abs=1e-5)


@pytest.mark.long
def test_nothing_is_left_of_a_launcher_that_was_killed(
    start_launcher: Callable[..., "subprocess.Popen[str]"],
    script: Script,
    dropout_trial: str,
    memory: Path,
) -> None:
    name = script(dropout_trial + TRAIN)
    options = ["--nproc-per-node=2", "--max-restarts=1", name]
    launcher = start_launcher(*options, NAME="n", STAYS_AT="5", PACELINE_MEMORY_DIR=str(memory))
    wait_until(lambda: bool([*memory.glob("paceline-locked-*/*/*/manifest.json")]))
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: not [*memory.iterdir()])
