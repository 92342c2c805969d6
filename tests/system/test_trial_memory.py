"""States in memory outlive the processes of an attempt: the next one on the node goes on there."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_lab.nodes import can_mount

LENGTH, EVERY, AT = 30, 12, 22
SCRIPT = """
import os, time
from pathlib import Path
import torch
from paceline import core, pytorch
from paceline.pytorch import _memory_checkpoints
from paceline.pytorch._loop_agreement import RankAgreement

NOTES = Path(os.environ["NOTES"])
RankAgreement.look_interval_s = _memory_checkpoints._LEAST_INTERVAL_S = 1e-6

class Trial(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        self.rank = context.distributed.rank
        self.model = context.wrap_model(
            torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)).double()
        )
        adam = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.optimizer = context.wrap_optimizer(adam)

    def train_batch(self, batch, epoch_idx, batch_idx):
        with (NOTES / f"steps-{self.rank}").open("a") as file:
            file.write(f"{batch_idx}\\n")
        memory = self.trainer._training.checkpoints.memory
        while memory is not None and (memory._saver.is_storing or memory._parts.num_pending):
            time.sleep(0.001)
        (NOTES / f"at-{batch_idx}").touch()
        time.sleep(float(os.environ["PAUSE"]))
        while batch_idx == AT and "STAYS" in os.environ and not (NOTES / "go").exists():
            time.sleep(0.02)
        if batch_idx == AT and "SLOW" in os.environ and not (NOTES / "killed").exists():
            # The storage takes longer than `preemption_timeout`.
            self.trainer._training.store = lambda: time.sleep(1e6)
        if "FAILS" in os.environ and batch_idx == AT:
            raise ValueError("boom")
        loss = self.model(batch).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"loss": self.model(batch).mean()}

    def build_training_data_loader(self):
        x = torch.arange(360, dtype=torch.float64).reshape(90, 4) / 360
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(x, batch_size=size, shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(torch.ones(3, 4, dtype=torch.float64), batch_size=1)

with pytorch.init(data_parallel=os.environ.get("DATA_PARALLEL", "flat")) as context:
    trial = Trial(context)
    trial.trainer = pytorch.Trainer(trial, context)
    trial.trainer.fit(
        checkpoint_period=pytorch.Batch(EVERY), reporting_period=pytorch.Batch(1),
        memory_checkpoints=float(os.environ.get("EVERY", "0.99")),
    )
    whole = [getattr(value, "full_tensor", lambda: value)() for value in trial.model.parameters()]
    weights = [value.tolist() for value in whole]
    (NOTES / f"done-{trial.rank}").write_text(repr(weights))
""".replace("Batch(EVERY)", f"Batch({EVERY})").replace("== AT", f"== {AT}")
ENTRYPOINTS = {1: "python3 train.py", 3: "python3 -m paceline.launch.torch_distributed train.py"}


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Return the directory where memory is made."""
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture
def num_slots() -> int:
    """Return how many slots the master has of its own."""
    return 3


@pytest.fixture
def lease_s() -> int:
    """Return how long a node may be silent."""
    return 60


@pytest.fixture
def master(make_master: Any, memory: Path, num_slots: int, lease_s: int) -> Any:
    """Return a running master."""
    made = make_master(num_slots, "home", "--runner-timeout", str(lease_s))
    return made.start(PACELINE_MEMORY_DIR=str(memory))


@pytest.fixture
def create(
    master: Any, write_context: Callable[..., Path], tmp_path: Path
) -> Callable[..., tuple[Any, Path]]:
    """Return a function that starts an experiment and returns it with its notes."""
    code = write_context(SCRIPT)

    def create(
        num_ranks: int,
        max_restarts: int = 3,
        patience_s: float = 600.0,
        fewest: int | None = None,
        **variables: str,
    ) -> tuple[Any, Path]:
        slots = num_ranks if fewest is None else {"min": fewest, "max": num_ranks}
        notes = tmp_path / f"notes-{len([*tmp_path.glob('notes-*')])}"
        notes.mkdir()
        config = {
            "name": "memory",
            "entrypoint": ENTRYPOINTS[num_ranks],
            "max_restarts": max_restarts,
            "preemption_timeout": patience_s,
            "hyperparameters": {"global_batch_size": 3},
            "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": LENGTH}},
            "resources": {"slots_per_trial": slots},
            "reproducibility": {"experiment_seed": 5},
            "environment": {"variables": {"NOTES": str(notes), "PAUSE": "0"} | variables},
        }
        return master.client().create_experiment(config, code), notes

    return create


def processes_of(master: Any, *, has_runner: bool) -> list[psutil.Process]:
    """Return the processes of attempts; their runners, too, if wanted."""
    found = []
    for process in master.processes():
        with suppress(psutil.Error):
            is_runner = process.name().startswith("runner-") and "template" not in process.name()
            if "PACELINE_RUN_DIR" in process.environ() or (is_runner and has_runner):
                found.append(process)
    return found


def strike(master: Any, *, has_runner: bool = False, rank: int | None = None) -> None:
    """Kill all processes of attempts at once, or one rank alone."""
    for process in processes_of(master, has_runner=has_runner):
        with suppress(ProcessLookupError, psutil.Error):
            if rank is None or process.environ().get("RANK") == str(rank):
                os.kill(process.pid, signal.SIGKILL)


def steps_of(notes: Path) -> list[int]:
    return [int(text) for text in (notes / "steps-0").read_text().split()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "has_runner", "rank"),
    [(1, False, None), (1, True, None), (3, False, None), (3, False, 0), (3, False, 2)],
)
@pytest.mark.timeout(300)
def test_the_next_attempt_goes_on_from_memory_in_the_same_bits(
    master: Any,
    create: Callable[..., tuple[Any, Path]],
    memory: Path,
    wait_until: Callable[..., None],
    num_ranks: int,
    has_runner: bool,
    rank: int | None,
) -> None:
    straight, straight_notes = create(num_ranks)
    assert straight.wait().value == "COMPLETED", master.log()
    # The memory of a trial that has ended goes with the next look.
    wait_until(lambda: not [*memory.iterdir()])
    killed, notes = create(num_ranks, STAYS="1")
    wait_until((notes / f"at-{AT}").exists)
    # What a job leaves there leads nowhere.
    [made] = memory.iterdir()
    outside = memory.parent / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (made / "link").symlink_to(outside)
    os.mkfifo(made / "fifo")
    strike(master, has_runner=has_runner, rank=rank)
    (notes / "go").touch()
    assert killed.wait().value == "COMPLETED", master.log()
    steps = steps_of(notes)
    [again] = [step for before, step in zip(steps, steps[1:], strict=False) if step <= before]
    # On a busy machine the newest whole state is some steps old.
    assert EVERY + 1 < again <= AT, master.log()
    (trial,) = killed.trials()
    first, second = trial.reload().data.attempts
    assert (first.resumed_steps, second.resumed_steps) == (0, again)
    rows = [row.steps_completed for row in trial.iter_metrics("training")]
    assert rows == [*range(1, LENGTH + 1)]
    (other,) = straight.trials()
    assert [row.metrics for row in trial.iter_metrics("training")] == [
        row.metrics for row in other.iter_metrics("training")
    ]
    # The start of the attempt left out what was beyond the checkpoint, until it told its step.
    losses = [one.reload().data.summary["training"]["loss"] for one in (trial, other)]
    found, wanted = ({**vars(loss)} for loss in losses)
    # The mean is summed up by attempts.
    assert found.pop("mean") == pytest.approx(wanted.pop("mean"))
    assert found == wanted
    assert trial.data.best_metric == other.data.best_metric
    for rank in range(num_ranks):
        done = f"done-{rank}"
        assert (notes / done).read_text() == (straight_notes / done).read_text()
    wait_until(lambda: not [*memory.iterdir()])
    assert (outside / "kept").exists()
    assert not [*(master.home / "attempts").glob("memory-*")]


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.timeout(300)
def test_kills_at_random_moments_end_in_the_same_bits(
    master: Any,
    create: Callable[..., tuple[Any, Path]],
    memory: Path,
    wait_until: Callable[..., None],
    num_ranks: int,
) -> None:
    draw = random.Random(num_ranks)
    straight, straight_notes = create(num_ranks)
    assert straight.wait().value == "COMPLETED", master.log()
    killed, notes = create(num_ranks, PAUSE="0.05")
    for at in sorted(draw.sample(range(2, LENGTH - 2), 3)):
        wait_until((notes / f"at-{at}").exists)
        time.sleep(draw.uniform(0.0, 0.1))
        strike(master, has_runner=draw.random() < 0.5)
    assert killed.wait().value == "COMPLETED", master.log()
    (trial,), (other,) = killed.trials(), straight.trials()
    rows = [(row.steps_completed, row.metrics) for row in trial.iter_metrics("training")]
    assert rows == [(row.steps_completed, row.metrics) for row in other.iter_metrics("training")]
    for rank in range(num_ranks):
        done = f"done-{rank}"
        assert (notes / done).read_text() == (straight_notes / done).read_text()
    assert len(steps_of(notes)) < LENGTH + 3 * 5
    wait_until(lambda: not [*memory.iterdir()])


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.timeout(300)
def test_a_trial_that_is_killed_while_it_leaves_goes_on_from_its_last_step(
    master: Any,
    create: Callable[..., tuple[Any, Path]],
    wait_until: Callable[..., None],
    num_ranks: int,
) -> None:
    # But for the request to leave, the only state in memory would be that of the first step.
    killed, notes = create(num_ranks, patience_s=15.0, EVERY="1e6", STAYS="1", SLOW="1")
    wait_until((notes / f"at-{AT}").exists)
    (trial,) = killed.trials()
    killed.pause()
    wait_until(lambda: trial.reload().data.attempts[-1].preempt_reason is not None)
    (notes / "go").touch()
    wait_until(lambda: trial.reload().data.attempts[-1].ended_at is not None)
    (notes / "killed").touch()
    killed.activate()
    assert killed.wait().value == "COMPLETED", master.log()
    steps = steps_of(notes)
    # No step is done again.
    assert steps == [*range(LENGTH)], master.log()
    rows = [row.steps_completed for row in trial.iter_metrics("training")]
    assert rows == [*range(1, LENGTH + 1)]
    assert [one.exit.reason for one in trial.reload().data.attempts][0] == "preemption_timeout"


@pytest.mark.long
@pytest.mark.parametrize("how", ["canceled", "killed"])
def test_nothing_is_left_of_a_trial_that_was_stopped(
    create: Callable[..., tuple[Any, Path]],
    memory: Path,
    wait_until: Callable[..., None],
    how: str,
) -> None:
    experiment, notes = create(1, STAYS="1")
    wait_until((notes / f"at-{AT}").exists)
    assert [*memory.glob("*/trial-*/*/manifest.json")]
    experiment.cancel() if how == "canceled" else experiment.kill()
    (notes / "go").touch()
    assert experiment.wait().value == "CANCELED"
    wait_until(lambda: not [*memory.iterdir()])


@pytest.mark.long
def test_states_without_a_note_are_not_taken_and_those_of_other_trials_stay(
    master: Any,
    create: Callable[..., tuple[Any, Path]],
    memory: Path,
    wait_until: Callable[..., None],
) -> None:
    other, other_notes = create(1, STAYS="1")
    wait_until((other_notes / f"at-{AT}").exists)
    [others] = memory.iterdir()
    killed, notes = create(1, STAYS="1")
    wait_until((notes / f"at-{AT}").exists)
    note = master.home / "attempts" / f"memory-{killed.trials()[0].id}"
    note.unlink()
    strike_of(notes)
    (notes / "go").touch()
    assert killed.wait().value == "COMPLETED", master.log()
    steps = steps_of(notes)
    [again] = [step for before, step in zip(steps, steps[1:], strict=False) if step <= before]
    assert again == EVERY
    rows = [row.steps_completed for row in killed.trials()[0].iter_metrics("training")]
    assert rows == [*range(1, LENGTH + 1)]
    assert others.exists()
    (other_notes / "go").touch()
    assert other.wait().value == "COMPLETED", master.log()
    assert sorted(set(steps_of(other_notes))) == steps_of(other_notes)


def strike_of(notes: Path) -> None:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("NOTES") == str(notes):
                os.kill(process.pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("num_slots", [0])
@pytest.mark.timeout(300)
def test_the_next_runner_of_a_node_finds_the_memory(
    master: Any,
    make_node: Callable[..., Any],
    create: Callable[..., tuple[Any, Path]],
    memory: Path,
    wait_until: Callable[..., None],
) -> None:
    node = make_node("box", "--slots", "1").start(PACELINE_MEMORY_DIR=str(memory))
    wait_until(lambda: master.client().nodes())
    killed, notes = create(1, STAYS="1")
    wait_until((notes / f"at-{AT}").exists)
    node.process.kill()
    node.process.wait()
    node.runner(killed.trials()[0].reload().data.attempts[0].id).kill()
    strike_of(notes)
    (notes / "go").touch()
    assert [*memory.glob("*/trial-*/*/manifest.json")]
    node.start(PACELINE_MEMORY_DIR=str(memory))
    assert killed.wait().value == "COMPLETED", master.log()
    steps = steps_of(notes)
    [again] = [step for before, step in zip(steps, steps[1:], strict=False) if step <= before]
    assert EVERY + 1 < again <= AT, master.log()
    wait_until(lambda: not [*memory.iterdir()])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_trial_that_failed_for_good_leaves_its_memory_for_a_minute(
    create: Callable[..., tuple[Any, Path]], memory: Path, wait_until: Callable[..., None]
) -> None:
    experiment, _ = create(1, 0, FAILS="1")
    assert experiment.wait().value == "ERROR"
    wait_until(lambda: not [*memory.iterdir()], 90)


def losses_of(experiment: Any) -> list[Any]:
    (trial,) = experiment.trials()
    return [(row.steps_completed, row.metrics) for row in trial.iter_metrics("training")]


@pytest.mark.long
@pytest.mark.parametrize("num_slots", [0])
@pytest.mark.parametrize(
    ("victim", "fewest", "lease_s", "data_parallel", "is_apart"),
    [
        (None, 3, 60, "fsdp", True),
        (0, 3, 10, "flat", True),
        (2, 2, 10, "flat", False),
        pytest.param(0, 3, 10, "fsdp", False, marks=pytest.mark.slow),
        pytest.param(1, 3, 10, "flat", False, marks=pytest.mark.slow),
        pytest.param(2, 3, 10, "fsdp", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
def test_a_trial_on_several_nodes_goes_on_from_what_they_have_in_memory(
    master: Any,
    create: Callable[..., tuple[Any, Path]],
    make_node: Callable[..., Any],
    wait_until: Callable[..., None],
    tmp_path: Path,
    victim: int | None,
    fewest: int,
    data_parallel: str,
    is_apart: bool,
) -> None:
    """One node may be lost with its memory, also that of rank 0, whose reports are here.

    Another node takes its place, or the trial is elastic and goes on without it. Nodes that are
    apart see no storage: they send their checkpoints to the master.
    """
    if is_apart and not can_mount():
        pytest.skip("NOT TESTED: a node with a disk of its own needs the right to mount")
    nodes = {}
    storage = master.home / "checkpoints"
    storage.mkdir(parents=True, exist_ok=True)
    hidden = [storage] if is_apart else []

    def add(*names: str) -> None:
        for name in names:
            (tmp_path / f"memory-{name}").mkdir()
            nodes[name] = make_node(name, "--slots", "1", hidden=hidden)
            nodes[name].start(PACELINE_MEMORY_DIR=str(tmp_path / f"memory-{name}"))
        wait_until(lambda: [n.state for n in master.client().nodes()].count("ready") == len(nodes))

    def left() -> list[Path]:
        """Return memory, and notes of living nodes."""
        notes = [each for name in nodes for each in (tmp_path / name / "attempts").glob("memory-*")]
        return [*tmp_path.glob("memory-*/*"), *notes]

    add("a", "b", "c")
    straight, straight_notes = create(3, fewest=fewest, DATA_PARALLEL=data_parallel)
    assert straight.wait().value == "COMPLETED", master.log()
    wait_until(lambda: not left())
    killed, notes = create(3, fewest=fewest, DATA_PARALLEL=data_parallel, STAYS="1")
    # Rank 0 waits there, too.
    wait_until(lambda: (notes / f"at-{AT}").exists() and steps_of(notes)[-1:] == [AT])
    (trial,) = killed.trials()
    wait_until(lambda: [step for step, _ in losses_of(killed)][-1:] == [AT])
    used = [node.name for node in trial.reload().data.attempts[0].nodes]
    if victim is None:
        for process in [process for node in nodes.values() for process in node.training()]:
            # Others end by themselves as soon as the first has gone.
            with suppress(psutil.NoSuchProcess):
                process.kill()
    else:
        if fewest == 3:
            add("d")
        nodes.pop(used[victim]).close()
        shutil.rmtree(tmp_path / f"memory-{used[victim]}")
    (notes / "go").touch()
    assert killed.wait().value == "COMPLETED", master.log()
    # Of an elastic trial, a rank may compute several shards of a batch.
    again = steps_of(notes)[AT + 1]
    first, second = trial.reload().data.attempts
    assert (first.resumed_steps, second.resumed_steps) == (0, again)
    assert EVERY + 1 < again <= AT, master.log()
    text = f"goes on from a state in memory at step {again}"
    assert text in "".join(line.text for line in trial.iter_logs())
    wanted = {*used} if victim is None else {*used} - {used[victim]} | ({"d"} & {*nodes})
    assert {node.name for node in second.nodes} == wanted
    losses = losses_of(killed), losses_of(straight)
    assert [step for step, _ in losses[0]] == [*range(1, LENGTH + 1)]
    # Fewer ranks see the same samples, but draw other random numbers.
    same = again if len(wanted) < 3 else LENGTH
    assert losses[0][:same] == losses[1][:same]
    for rank in range(3 if same == LENGTH else 0):
        done = f"done-{rank}"
        assert (notes / done).read_text() == (straight_notes / done).read_text()
    wait_until(lambda: not left())
