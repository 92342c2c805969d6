"""States in memory of several nodes: a node that is lost with its memory costs some steps alone."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline._base.process_and_network import PortReservation
from paceline.core import list_runs
from paceline.testing._compare_runs import compare_runs, read_run_facts

Script = Callable[..., str]

# No checkpoint is stored before the end. LOST is "batch-node": all ranks of the node wait there.
TRAIN = """
import os, sys, time
from pathlib import Path

from paceline.pytorch import _memory_checkpoints
from paceline.pytorch._loop_agreement import RankAgreement

RankAgreement.look_interval_s = _memory_checkpoints._LEAST_INTERVAL_S = 1e-6


def before_batch(distributed, batch_idx):
    memory = trainer._training.checkpoints.memory
    while memory is not None and (memory._saver.is_storing or memory._parts.num_pending):
        time.sleep(0.001)
    if Path("was-lost").exists():
        return
    place = f"{batch_idx}-{distributed.cross_rank}"
    if place in os.environ["LOST"].split():
        wait(f"waits-{distributed.rank}")
    if batch_idx == 7 and "NOTICE" in os.environ:
        # The storage takes longer than it is to the kill.
        trainer._training.save = lambda: wait(f"waits-{distributed.rank}")
        if distributed.cross_rank == 1:
            Path(f"listens-{distributed.rank}").touch()
            while not trainer._training._core.preempt.has_signal:
                time.sleep(0.01)


def wait(name):
    path = Path(name)
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    while True:
        time.sleep(0.1)


with pytorch.init(
    hparams={"global_batch_size": 12},
    seed=3,
    name=os.environ["NAME"],
    data_parallel=os.environ.get("DATA_PARALLEL", "flat"),
) as context:
    trial = Trial(context)
    trainer = pytorch.Trainer(trial, context)
    for length in map(int, os.environ["LENGTHS"].split()):
        trainer.fit(
            max_length=pytorch.Batch(length),
            reporting_period=pytorch.Batch(1),
            memory_checkpoints=float(os.environ.get("EVERY", "0.99")),
        )
"""


class Nodes:
    """Launchers of the nodes of a test, each with memory of its own."""

    def __init__(self, start_launcher: Callable[..., Any], root: Path, number: int) -> None:
        self._start, self._root, self._number = start_launcher, root, number
        self.launchers: dict[int, Any] = {}

    def start(self, node: int, port: int, *arguments: str, **variables: str) -> None:
        """Start the launcher of a node, as a machine that has just been switched on."""
        memory = self._root / f"memory-{node}-{time.monotonic_ns()}"
        if not (node and "BARE" in variables):
            memory.mkdir()
        place = [f"--nnodes={self._number}", f"--node-rank={node}", "--master-addr=127.0.0.1"]
        self.launchers[node] = self._start(
            *place,
            f"--master-port={port}",
            *arguments,
            **variables,
            GLOO_SOCKET_IFNAME="lo",
            PACELINE_MEMORY_DIR=str(memory),
        )

    def lose(self, lost: Sequence[int], per_node: int) -> None:
        """Kill nodes with their launchers, once all of their ranks wait."""
        ranks = [node * per_node + local for node in lost for local in range(per_node)]
        paths = [self._root / f"waits-{rank}" for rank in ranks]
        deadline = time.monotonic() + 240
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for node in lost:
            self.launchers[node].kill()
        for path in paths:
            os.kill(int(path.read_text()), signal.SIGKILL)
        (self._root / "was-lost").touch()
        for node in lost:
            self.launchers[node].communicate(timeout=60)

    def notify(self, node: int, per_node: int) -> None:
        """Send a node the notice that it will go, once all of its ranks listen."""
        ranks = range(node * per_node, (node + 1) * per_node)
        deadline = time.monotonic() + 240
        while not all((self._root / f"listens-{rank}").exists() for rank in ranks):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.launchers[node].send_signal(signal.SIGTERM)

    def ends(self) -> list[tuple[int, str]]:
        """Wait for all, and return their exit codes and errors."""
        found = []
        for launcher in self.launchers.values():
            _, err = launcher.communicate(timeout=240)
            found.append((launcher.returncode, err))
        return found

    def memory_left(self) -> list[Path]:
        """Return the files that are left in the memory of all nodes."""
        return [path for memory in self._root.glob("memory-*") for path in memory.rglob("*")]


RunNodes = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def straight_runs() -> dict[tuple[object, ...], dict[str, Any]]:
    """Return what came of the undisturbed trainings so far, by what they were given."""
    return {}


@pytest.fixture
def run_straight(
    run_nodes: RunNodes, straight_runs: dict[tuple[object, ...], dict[str, Any]]
) -> RunNodes:
    """Run an undisturbed training on nodes, or return what came of the same one before."""

    def run(number: int, per_node: int = 1, **variables: str) -> dict[str, Any]:
        given = number, per_node, *sorted(variables.items())
        if given not in straight_runs:
            straight_runs[given] = run_nodes("straight", number, per_node, **variables)
        return straight_runs[given]

    return run


@pytest.fixture
def run_nodes(
    start_launcher: Callable[..., Any], script: Script, tmp_path: Path, dropout_trial: str
) -> RunNodes:
    """Run a training on nodes, some of which may be lost, and return its facts and errors."""

    def run(
        name: str,
        number: int,
        per_node: int = 1,
        lost: Sequence[int] = (),
        then: Callable[[], object] = lambda: None,
        **variables: str,
    ) -> dict[str, Any]:
        options = [
            f"--nproc-per-node={per_node}",
            "--max-restarts=5",
            script(dropout_trial + TRAIN),
        ]
        nodes = Nodes(start_launcher, tmp_path, number)
        (tmp_path / "was-lost").unlink(missing_ok=True)
        variables = (
            {"LENGTHS": "20"}
            | variables
            | {"NAME": name, "LOST": " ".join(f"13-{node}" for node in lost)}
        )
        with PortReservation() as reservation:
            for node in range(number):
                nodes.start(node, reservation.port, *options, **variables)
            if "NOTICE" in variables:
                nodes.notify(1, per_node)
            nodes.lose(lost, per_node)
            then()
            for node in lost:
                nodes.start(node, reservation.port, *options, **variables)
            found = nodes.ends()
        errors = "".join(err for _, err in found)
        assert [code for code, _ in found] == [0] * number, errors
        assert not nodes.memory_left()
        [path] = [run.path for run in list_runs(tmp_path / "paceline_runs") if run.name == name]
        facts = read_run_facts(path)
        assert facts.checkpoint_steps == [*map(int, variables["LENGTHS"].split())]
        starts = [attempt.start_step for attempt in facts.attempts]
        return {"facts": facts, "starts": starts, "errors": errors}

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "per_node", "lost", "variables"),
    [
        pytest.param(2, 2, 1, {}, marks=pytest.mark.slow),
        pytest.param(3, 1, 1, {}, marks=pytest.mark.slow),
        (3, 1, 2, {}),
        (2, 1, 1, {"LENGTHS": "10 20"}),
        # Each node has a part of the weights that no other one has trained.
        (2, 2, 1, {"DATA_PARALLEL": "fsdp"}),
    ],
)
@pytest.mark.timeout(300)
def test_a_node_that_is_lost_with_its_memory_repeats_some_steps_in_the_same_bits(
    run_nodes: RunNodes,
    run_straight: RunNodes,
    number: int,
    per_node: int,
    lost: int,
    variables: dict[str, str],
) -> None:
    straight = run_straight(number, per_node, **variables)
    killed = run_nodes("lost", number, per_node, [lost], **variables)
    assert compare_runs(straight["facts"], killed["facts"]) == []
    assert "is not used" not in killed["errors"]
    assert len(killed["starts"]) == 2
    # A second training in the same process has states in memory as well.
    assert 0 <= 13 - killed["starts"][1] < 3, killed["starts"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("per_node", "variables"),
    [
        (1, {}),
        (2, {}),
        pytest.param(2, {"DATA_PARALLEL": "fsdp"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
def test_a_node_that_goes_after_a_notice_leaves_its_last_step_on_the_next_one(
    run_nodes: RunNodes, run_straight: RunNodes, per_node: int, variables: dict[str, str]
) -> None:
    straight = run_straight(2, per_node, **variables)
    # But for the notice, the only state in memory would be that of the first step.
    killed = run_nodes("noticed", 2, per_node, lost=[1], NOTICE="1", EVERY="1e6", **variables)
    assert compare_runs(straight["facts"], killed["facts"]) == []
    [begin, again] = killed["starts"]
    assert (begin, again >= 8) == (0, True), killed["starts"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_signal_to_a_node_that_stays_ends_all_though_another_one_goes(
    start_launcher: Callable[..., Any], script: Script, tmp_path: Path, dropout_trial: str
) -> None:
    """As Slurm does, which sends its signal to all nodes and kills some of them sooner."""
    nodes = Nodes(start_launcher, tmp_path, 2)
    options = ["--nproc-per-node=1", "--max-restarts=5", "--grace-s=2"]
    given = {"LENGTHS": "20", "NAME": "ended", "LOST": "", "NOTICE": "1"}
    with PortReservation() as reservation:
        for node in range(2):
            nodes.start(node, reservation.port, *options, script(dropout_trial + TRAIN), **given)
        nodes.notify(1, 1)
        nodes.launchers[0].send_signal(signal.SIGTERM)
        nodes.lose([1], 1)
        _, err = nodes.launchers[0].communicate(timeout=240)
    assert nodes.launchers[0].returncode
    assert "No restart follows, as this process received SIGTERM" in err
    assert not [*tmp_path.glob("memory-0-*/*")]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nodes_that_held_the_only_copies_are_lost_and_training_begins_anew(
    run_nodes: RunNodes, run_straight: RunNodes
) -> None:
    straight = run_straight(3)
    killed = run_nodes("lost", 3, lost=[1, 2])
    assert compare_runs(straight["facts"], killed["facts"]) == []
    assert killed["starts"] == [0, 0]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_damaged_copy_is_named_and_never_resumed_from(
    run_nodes: RunNodes, run_straight: RunNodes, tmp_path: Path
) -> None:
    def damage() -> None:
        files = [path for path in tmp_path.glob("memory-0-*/**/rank_1*") if path.is_file()]
        assert files
        for path in files:
            path.chmod(0o600)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)

    straight = run_straight(2)
    killed = run_nodes("lost", 2, lost=[1], then=damage)
    assert compare_runs(straight["facts"], killed["facts"]) == []
    assert killed["starts"] == [0, 0]
    assert "A state in memory is not used:" in killed["errors"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "rank"),
    [
        ("storage.between_files:25", 0),
        ("storage.between_files:25", 1),
        ("storage.before_manifest:5", 0),
        ("storage.after_manifest:5", 0),
        ("storage.before_manifest:5", 1),
    ],
)
@pytest.mark.timeout(300)
def test_a_kill_within_a_copy_or_its_commit_leaves_a_whole_state(
    run_nodes: RunNodes, run_straight: RunNodes, point: str, rank: int
) -> None:
    straight = run_straight(2)
    killed = run_nodes("killed", 2, PACELINE_FAULT=f"{point},rank={rank}")
    assert compare_runs(straight["facts"], killed["facts"]) == []
    assert len(killed["starts"]) > 1
    assert killed["starts"] == sorted(set(killed["starts"]))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_node_without_memory_is_told_and_training_goes_on(run_nodes: RunNodes) -> None:
    found = run_nodes("bare", 2, BARE="1")
    assert "`memory_checkpoints` has no effect" in found["errors"]
    assert found["starts"] == [0]
