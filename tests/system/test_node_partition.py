"""A node in a network namespace of its own, cut off from its master by lost packets.

Both ends of the link get a wrong hardware address for the other one, so that every packet is
dropped and nobody is told. Needs root and `ip`.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

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
# Long enough for a busy machine.
LEASE_S = 10
_NUMBERS = itertools.count()


def has_namespaces() -> bool:
    """Tell whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"paceline-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], check=True)
    return True


pytestmark = pytest.mark.skipif(
    not has_namespaces(), reason="NOT TESTED: needs root and network namespaces"
)


class Link:
    """A second machine: a namespace with one link to this one."""

    def __init__(self) -> None:
        # A link goes a moment after its namespace, so each one has names of its own.
        number = next(_NUMBERS)
        name = f"{os.getpid()}-{number}"
        self.namespace, self.near, self.far = f"paceline-{name}", f"pa{name}", f"pb{name}"
        network = f"10.{200 + number}.{os.getpid() % 256}"
        self.near_ip, self.far_ip = f"{network}.1", f"{network}.2"
        self._ip("netns", "add", self.namespace)
        self._ip("link", "add", self.near, "type", "veth", "peer", "name", self.far,
                 "netns", self.namespace)  # fmt: skip
        self._ip("addr", "add", f"{self.near_ip}/24", "dev", self.near)
        self._ip("link", "set", self.near, "up")
        self._far("addr", "add", f"{self.far_ip}/24", "dev", self.far)
        for device in (self.far, "lo"):
            self._far("link", "set", device, "up")

    def cut(self) -> None:
        wrong = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
        self._ip("neigh", "replace", self.far_ip, "dev", self.near, *wrong)
        self._far("neigh", "replace", self.near_ip, "dev", self.far, *wrong)

    def heal(self) -> None:
        self._ip("neigh", "del", self.far_ip, "dev", self.near)
        self._far("neigh", "del", self.near_ip, "dev", self.far)

    def close(self) -> None:
        self._ip("netns", "del", self.namespace)

    def _far(self, *words: str) -> None:
        self._ip("-n", self.namespace, *words)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)


@pytest.fixture
def link() -> Iterator[Link]:
    """Return a link to another machine, which may be cut."""
    made = Link()
    yield made
    made.close()


class Setup:
    """A master here, a node `far` in the namespace, and a node `spare` here."""

    def __init__(
        self,
        make_master: Callable[..., Any],
        link: Link,
        root: Path,
        waits: str,
        lease_s: int = LEASE_S,
    ) -> None:
        self.link = link
        self.root = root
        self.gate = root / "gate"
        self.waits = waits
        options = ("--runner-timeout", str(lease_s), "--host", link.near_ip, "--unencrypted")
        self.master = make_master(0, "home", *options).start()
        self.client = self.master.client()
        self.token = root / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(self.client.create_token("nodes", scope="runner").secret)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a node's runner: `far` in the namespace, any other one here."""
        command = ["ip", "netns", "exec", self.link.namespace] if name == "far" else []
        command += [sys.executable, "-m", "paceline.cli", "runner", "--name", name]
        command += ["--master", self.client.url, "--token-file", str(self.token), "--slots", "1"]
        command += ["--dir", str(self.root / name)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        environment |= {"GATE": str(self.gate), "WAITS": self.waits}
        with (self.root / f"{name}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )
        return self._processes[-1]

    def state(self, name: str) -> str:
        return {node.name: node.state for node in self.client.nodes()}.get(name, "unknown")

    def attempts(self, trial_id: int = 1) -> list[Any]:
        return self.client.get_trial(trial_id).data.attempts

    def processes_of(self, name: str) -> list[psutil.Process]:
        """Return the processes of attempts that run on a node."""
        found = []
        for process in psutil.process_iter():
            try:
                place = process.environ().get("PACELINE_RUN_DIR", "")
            except psutil.Error:
                continue
            if place.startswith(str(self.root / name)):
                found.append(process)
        return found

    def all_of(self, name: str) -> list[psutil.Process]:
        """Return all processes of a node: its runner, those of attempts, and what these started."""
        place, found = str(self.root / name), []
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), process.environ().get("PACELINE_RUN_DIR", "")]
                if any(word.startswith(place) for word in [*words, process.cwd()]):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for name in ("far", "spare"):
            for process in self.all_of(name):
                with suppress(psutil.Error):
                    process.kill()


@pytest.fixture
def make_setup(
    make_master: Callable[..., Any], link: Link, tmp_path: Path
) -> Iterator[Callable[..., Setup]]:
    """Return a function that starts a master with a node that can be cut off."""
    made: list[Setup] = []

    def make(waits: str, **options: Any) -> Setup:
        made.append(Setup(make_master, link, tmp_path, waits, **options))
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

    setup.link.cut()
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

    setup.link.heal()
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
    setup.link.cut()
    setup.gate.touch()
    time.sleep(0.5)
    setup.link.heal()
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
