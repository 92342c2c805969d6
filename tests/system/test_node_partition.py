"""A node on a machine of its own, cut off from its master by lost packets. Needs root."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_lab.machines import Network, has_namespaces
from fault_lab.nodes import NodeProcess, can_mount

from paceline.storage import DirectoryStorage

SCRIPT = """
import os, time
from pathlib import Path
import paceline as det

info = det.get_cluster_info()
print("runs on", info.agent_id)
gate, here = Path(os.environ["GATE"]), os.environ["WAITS"]

def wait(place, step, begin):
    while place == here and step == 2 and info.agent_id == "far" and not gate.exists():
        time.sleep(0.02)

with det.core.init() as context:
    begin = 0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            begin = int((path / "step").read_text())
    for step in range(begin + 1, 5):
        context.train.report_validation_metrics(step, {"loss": float(step)})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "step").write_text(str(step))
            wait("checkpoint", step, begin)
        wait("training", step, begin)
"""
# Its second checkpoint is large. It ends long before that is sent.
SENDER = """
import os, random
import paceline as det

info = det.get_cluster_info()
print("runs on", info.agent_id)
with det.core.init() as context:
    begin = 0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            begin = int((path / "step").read_text())
    for step in range(begin + 1, 4):
        context.train.report_validation_metrics(step, {"loss": float(step)})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "step").write_text(str(step))
            if step == 2:
                data = random.Random(2).randbytes(int(os.environ["LARGE"]))
                (path / "large").write_bytes(data)
"""
LARGE_BYTES = 128 * 2**20
# A cut comes after a quarter of the file, and seconds before its end.
BYTES_PER_S = 40 * 2**20
# Long enough for a busy machine.
LEASE_S = 10

pytestmark = pytest.mark.skipif(
    not has_namespaces(), reason="NOT TESTED: needs root and network namespaces"
)


class Setup:
    """A master here, a node `far` on another machine, and a node `spare` here."""

    def __init__(
        self,
        make_master: Callable[..., Any],
        network: Network,
        root: Path,
        waits: str,
        lease_s: int = LEASE_S,
        has_own_disks: bool = False,
    ) -> None:
        self.machine = network.add()
        self.gate = root / "gate"
        self._waits = waits
        options = ("--runner-timeout", str(lease_s), "--host", network.address, "--unencrypted")
        self.master = make_master(0, "home", *options).start()
        self.client = self.master.client()
        token = root / "token"
        token.touch(mode=0o600)
        token.write_text(self.client.create_token("nodes", scope="runner").secret)
        places = {"far": self.machine, "spare": None}
        self.storage = DirectoryStorage(self.master.home / "checkpoints")
        hidden = [self.storage.root] if has_own_disks else []
        self._nodes = {
            name: NodeProcess(
                self.master, token, root / name, "--slots", "1", machine=machine, hidden=hidden
            )
            for name, machine in places.items()
        }

    def start(self, name: str) -> psutil.Process:
        """Start a node's runner."""
        process = self._nodes[name].start(WAITS=self._waits).process
        assert process is not None
        return psutil.Process(process.pid)

    def state(self, name: str) -> str:
        return {node.name: node.state for node in self.client.nodes()}.get(name, "unknown")

    def attempts(self, trial_id: int = 1) -> list[Any]:
        return self.client.get_trial(trial_id).data.attempts

    def processes_of(self, name: str) -> list[psutil.Process]:
        """Return the processes of attempts that run on a node."""
        return self._nodes[name].training()

    def all_of(self, name: str) -> list[psutil.Process]:
        """Return all processes of a node: its runner, those of attempts, and what these started."""
        return self._nodes[name].processes()

    @property
    def incoming(self) -> Path:
        """Where the master keeps what is not sent to the end."""
        return self.storage.root / ".incoming"

    def num_bytes_sent(self) -> int:
        """Return how much of the large file the master has."""
        with suppress(OSError):  # it may be moved just now
            return sum(path.stat().st_size for path in self.incoming.glob("*/*/large"))
        return 0

    def runner(self, name: str, attempt_id: int) -> psutil.Process:
        """Return the process that sends what an attempt on a node has stored."""
        return self._nodes[name].runner(attempt_id)

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()


@pytest.fixture
def make_setup(
    make_master: Callable[..., Any], network: Network, tmp_path: Path
) -> Iterator[Callable[..., Setup]]:
    """Return a function that starts a master with a node that can be cut off."""
    made: list[Setup] = []

    def make(waits: str, **options: Any) -> Setup:
        made.append(Setup(make_master, network, tmp_path, waits, **options))
        return made[-1]

    yield make
    for setup in made:
        setup.close()


def submit(setup: Setup, code: Path) -> Any:
    config = {
        "entrypoint": "python3 train.py", "max_restarts": 0,
        "searcher": {"name": "single", "metric": "loss"},
    }  # fmt: skip
    return setup.client.create_experiment(config, code)


@pytest.mark.long
@pytest.mark.parametrize("waits", ["training", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_a_node_that_is_cut_off_loses_its_attempt_and_reports_nothing_for_it_later(
    waits: str,
    make_setup: Callable[..., Setup],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
) -> None:
    setup = make_setup(waits)
    setup.start("far")
    wait_until(lambda: setup.state("far") == "ready")
    code = write_context(SCRIPT)
    experiment = submit(setup, code)
    done = 2 if waits == "training" else 1
    wait_until(
        lambda: len(experiment.trials()) == 1 and len(experiment.trials()[0].checkpoints()) == done
    )
    setup.start("spare")
    wait_until(lambda: setup.state("spare") == "ready")

    setup.machine.cut()
    wait_until(lambda: setup.state("far") == "lost")
    assert experiment.wait().value == "COMPLETED"
    ends = [one.exit for one in setup.attempts()]
    assert [end.reason.value for end in ends] == ["runner_lost", "exited"], ends
    assert setup.attempts()[1].resumed_steps == done
    # The one that was cut off trains on, and stores what it reports.
    assert setup.processes_of("far")
    setup.gate.touch()
    before = experiment.trials()[0]
    rows = [(row.steps_completed, row.metrics) for row in before.iter_metrics("validation")]
    said = [line.text for line in before.iter_logs()]

    setup.machine.heal()
    wait_until(lambda: setup.state("far") == "ready")
    wait_until(lambda: not setup.processes_of("far"))
    assert [row for row, _ in rows] == [1, 2, 3, 4]
    [trial] = experiment.trials()
    assert [(row.steps_completed, row.metrics) for row in trial.iter_metrics("validation")] == rows
    assert [line.text for line in trial.iter_logs()] == said
    assert [text for text in said if text.startswith("runs on")] == [
        "runs on far", "runs on spare",
    ]  # fmt: skip
    assert len(setup.attempts()) == 2
    # It gets attempts again, and this one is another.
    setup.client.drain_node("spare")
    again = submit(setup, code)
    assert again.wait().value == "COMPLETED"
    assert "runs on far" in [line.text for line in again.trials()[0].iter_logs()]


@pytest.mark.long
def test_a_network_that_fails_for_less_than_a_lease_changes_nothing(
    make_setup: Callable[..., Setup],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
) -> None:
    setup = make_setup("training", lease_s=60)
    setup.start("far")
    wait_until(lambda: setup.state("far") == "ready")
    experiment = submit(setup, write_context(SCRIPT))
    wait_until(lambda: setup.processes_of("far") and experiment.trials()[0].checkpoints())
    setup.machine.cut()
    setup.gate.touch()
    time.sleep(0.5)
    setup.machine.heal()
    assert experiment.wait().value == "COMPLETED"
    assert len(setup.attempts()) == 1


@pytest.mark.slow
def test_a_runner_that_hangs_for_longer_than_its_lease_comes_back_without_its_attempt(
    make_setup: Callable[..., Setup],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
) -> None:
    setup = make_setup("training")
    node = setup.start("far")
    wait_until(lambda: setup.state("far") == "ready")
    experiment = submit(setup, write_context(SCRIPT))
    wait_until(lambda: experiment.trials()[0].checkpoints())
    setup.start("spare")
    wait_until(lambda: setup.state("spare") == "ready")
    # As a machine that is suspended: everything on it stops.
    stopped = setup.all_of("far")
    assert node.pid in [process.pid for process in stopped]
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    assert experiment.wait().value == "COMPLETED"
    for process in stopped:
        process.send_signal(signal.SIGCONT)
    setup.gate.touch()
    wait_until(lambda: setup.state("far") == "ready")
    wait_until(lambda: not setup.processes_of("far"))
    assert [one.exit.reason.value for one in setup.attempts()] == ["runner_lost", "exited"]
    [trial] = experiment.trials()
    assert [row.steps_completed for row in trial.iter_metrics("validation")] == [1, 2, 3, 4]


def start_sending(
    setup: Setup, write_context: Callable[..., Path], wait_until: Callable[..., None]
) -> Any:
    """Submit a trial on `far`, and return when it has sent a part of a large checkpoint."""
    if not setup.machine.limit(BYTES_PER_S):
        pytest.skip("NOT TESTED: needs `tc` with the discipline tbf")
    setup.start("far")
    wait_until(lambda: setup.state("far") == "ready")
    config = {
        "entrypoint": "python3 train.py", "max_restarts": 0,
        "searcher": {"name": "single", "metric": "loss"},
        "environment": {"variables": {"LARGE": str(LARGE_BYTES)}},
        "checkpoint_storage": {"save_trial_latest": 2, "save_trial_best": 0},
    }  # fmt: skip
    experiment = setup.client.create_experiment(config, write_context(SENDER))
    wait_until(lambda: setup.num_bytes_sent() >= LARGE_BYTES // 4)
    return experiment


def check_sent(setup: Setup, experiment: Any, target: Path) -> None:
    """See that the reports and the checkpoints of the trial are there once, and whole."""
    [trial] = experiment.trials()
    rows = [(row.steps_completed, row.metrics) for row in trial.iter_metrics("validation")]
    assert rows == [(step, {"loss": float(step)}) for step in (1, 2, 3)]
    # The master deletes the others a moment after the end.
    deadline = time.monotonic() + 60
    kept: dict[int, Any] = {}
    while sorted(kept) != [2, 3]:
        assert time.monotonic() < deadline, sorted(kept)
        stored = [one for one in trial.checkpoints() if one.state.value == "COMPLETED"]
        kept = {one.steps_completed: one for one in stored}
        time.sleep(0.1)
    assert setup.storage.list() == sorted(one.uuid for one in kept.values())
    assert all(setup.storage.verify(one.uuid) for one in kept.values())
    kept[2].download(target)
    assert (target / "large").read_bytes() == random.Random(2).randbytes(LARGE_BYTES)
    assert not setup.incoming.exists()


# After a long cut, the node gives the request up and asks the master what it has.
@pytest.mark.long
@pytest.mark.parametrize("cut_s", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.skipif(not can_mount(), reason="NOT TESTED: needs the right to mount")
def test_a_checkpoint_that_is_cut_off_for_less_than_a_lease_goes_on_where_it_was(
    cut_s: float,
    make_setup: Callable[..., Setup],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    setup = make_setup("", lease_s=300, has_own_disks=True)
    experiment = start_sending(setup, write_context, wait_until)
    setup.machine.cut()
    time.sleep(cut_s / 2)
    before = setup.num_bytes_sent()
    time.sleep(cut_s / 2)
    assert LARGE_BYTES / 4 <= setup.num_bytes_sent() == before < LARGE_BYTES
    setup.machine.heal()
    sizes = [before]

    def is_over() -> bool:
        # None are left once the checkpoint is whole.
        sizes.append(setup.num_bytes_sent() or sizes[-1])
        return experiment.reload().state.is_terminal

    wait_until(is_over)
    assert experiment.state.value == "COMPLETED"
    assert sizes == sorted(sizes)
    [attempt] = setup.attempts()
    assert attempt.exit.reason.value == "exited"
    check_sent(setup, experiment, tmp_path / "download")


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="NOT TESTED: needs the right to mount")
def test_a_checkpoint_that_is_cut_off_for_longer_than_a_lease_leaves_nothing_behind(
    make_setup: Callable[..., Setup],
    write_context: Callable[..., Path],
    wait_until: Callable[..., None],
    tmp_path: Path,
) -> None:
    setup = make_setup("", has_own_disks=True)
    experiment = start_sending(setup, write_context, wait_until)
    setup.machine.cut()
    setup.start("spare")
    assert setup.incoming.exists()
    assert experiment.wait().value == "COMPLETED"
    ends = [one.exit.reason.value for one in setup.attempts()]
    assert ends == ["runner_lost", "exited"], setup.attempts()
    # It goes on from what had arrived before.
    assert setup.attempts()[1].resumed_steps == 1
    wait_until(lambda: not setup.incoming.exists())
    check_sent(setup, experiment, tmp_path / "download")

    sender = setup.runner("far", 1)
    setup.machine.heal()
    wait_until(lambda: setup.state("far") == "ready")
    wait_until(lambda: not sender.is_running())
    assert len(setup.attempts()) == 2
    check_sent(setup, experiment, tmp_path / "again")
