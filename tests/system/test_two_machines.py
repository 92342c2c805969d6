"""The guide's two machines as namespaces: a search over both, one of which is pulled out.

The master has a machine of its own. Each machine has a home of its own, and none sees the master's
checkpoints. Needs root.
"""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fault_lab.checker import (
    Verdict,
    check_checkpoints,
    check_decisions,
    check_reports,
    given_away,
    read_notes,
)
from fault_lab.machines import Machine, Network, has_namespaces
from fault_lab.nodes import can_mount
from fault_lab.processes import Found, processes_of
from fault_lab.scripts import ONE_PROCESS

from paceline.client import Client, Trial

pytestmark = pytest.mark.skipif(
    not (has_namespaces() and can_mount()),
    reason="NOT TESTED: needs root, network namespaces and the right to mount",
)

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "clusters.md").read_text()
(START_MASTER,) = re.findall(r"`(paceline up [^`]+ --unencrypted)`", GUIDE)
(MAKE_TOKEN,) = re.findall(r"^ +(\(umask .* paceline token create box .*)$", GUIDE, re.MULTILINE)
(RUN,) = re.findall(r"^ +(paceline runner --master http:.*)$", GUIDE, re.MULTILINE)
(LIST_NODES,) = re.findall(r"^ +(paceline runner list)$", GUIDE, re.MULTILINE)
(SUBMIT,) = re.findall(r"^ +(paceline e create .*)$", GUIDE, re.MULTILINE)
TUNNEL, DIRECT = "http://127.0.0.1:8080", "http://head:8080"
# Long enough for a busy machine.
LEASE_S = 10
# The second trial of each machine waits after a report that no checkpoint has.
SCRIPT = """
import os, time
from pathlib import Path
import paceline as det

def hold(epoch):
    info, shared = det.get_cluster_info(), Path(os.environ["NOTES"]).parent
    (shared / f"{info.agent_id}-{info.trial.trial_id}").touch()
    is_second = len(list(shared.glob(f"{info.agent_id}-*"))) == 2
    while epoch == 4 and is_second and not (shared / "go").exists():
        time.sleep(0.02)
""" + ONE_PROCESS.replace("time.sleep(0.01)", "hold(epoch)")
NUM_TRIALS, NUM_STEPS = 6, 6


class Place:
    """A machine with a home of its own, in which command lines run."""

    def __init__(
        self, machine: Machine, home: Path, environment: dict[str, str], hidden: Path | None = None
    ) -> None:
        self.machine = machine
        self.home = home
        self._environment = environment | {
            "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
            "HOME": str(home),
            # What `processes` finds them by.
            "FAULT_LAB": str(home),
        }
        self._before = "" if hidden is None else f"mount -t tmpfs tmpfs {hidden} && "
        self.log_path = home.with_suffix(".log")
        self.started: list[subprocess.Popen[bytes]] = []
        home.mkdir()

    def start(self, line: str, directory: str = ".") -> "subprocess.Popen[bytes]":
        """Start a command line."""
        shell = ("unshare", "--mount", "sh", "-c", self._before + line)
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(
                self.machine.command(*shell), cwd=self.home / directory, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def run_all(self, *lines: str) -> None:
        """Run command lines at once, until all of them have ended well."""
        for process in [self.start(line) for line in lines]:
            assert process.wait(120) == 0, self.log_path.read_text()

    def processes(self) -> list[Found]:
        """Return all that runs there."""
        return processes_of(self.home)

    def pull(self) -> None:
        """Cut it off, and kill all that runs there."""
        self.machine.cut()
        self.kill()

    def kill(self) -> None:
        """Kill all that runs there."""
        while found := self.processes():
            for process in found:
                process.kill()
        for process in self.started:
            process.wait(60)


@pytest.fixture
def places(
    network: Network, tmp_path: Path, clean_environment: dict[str, str]
) -> Iterator[dict[str, Place]]:
    """Return the master's machine, `head`, and two others, on which nothing runs yet."""
    made = {"head": Place(network.add(), tmp_path / "head", clean_environment)}
    hidden = tmp_path / "head" / ".paceline" / "checkpoints"
    for name in ("box", "barn"):
        made[name] = Place(network.add(), tmp_path / name, clean_environment, hidden)
    yield made
    for place in made.values():
        place.kill()


def start_cluster(places: dict[str, Place]) -> Client:
    """Do what the guide says: a master, a token and a runner for each of the others."""
    head = places["head"]
    head.run_all(f"{START_MASTER} --slots 0 --runner-timeout {LEASE_S}")
    url = DIRECT.replace("head", head.machine.address)
    assert f"`{DIRECT}`" in GUIDE
    assert TUNNEL in RUN
    head.run_all(*(MAKE_TOKEN.replace("box", name) for name in ("box", "barn")))
    for name in ("box", "barn"):
        shutil.move(head.home / f"{name}.token", places[name].home)
        line = RUN.replace(TUNNEL, url).replace("box", name)
        places[name].start(f"exec {line} --slots 1")
    return Client(url, (head.home / ".paceline" / "token").read_text().strip())


def are_ready(client: Client, places: dict[str, Place]) -> bool:
    """Tell whether both runners have joined; none may have ended."""
    for name in ("box", "barn"):
        [runner] = places[name].started
        assert runner.poll() is None, places[name].log_path.read_text()
    return [node.state for node in client.nodes()] == ["ready", "ready"]


def submit(places: dict[str, Place], notes: Path) -> "subprocess.Popen[bytes]":
    """Submit a grid search as the guide says, and follow it."""
    config = {
        "entrypoint": "python3 train.py",
        "max_restarts": 0,
        "hyperparameters": {
            "lr": {"type": "categorical", "vals": [n / NUM_TRIALS for n in range(NUM_TRIALS)]}
        },
        "searcher": {"name": "grid", "metric": "loss"},
        "reproducibility": {"experiment_seed": 11},
        "checkpoint_storage": {"save_trial_latest": 1, "save_trial_best": 0},
        "environment": {"variables": {"NOTES": str(notes)}},
    }
    code = places["head"].home / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    (code / "experiment.yaml").write_text(yaml.safe_dump(config))
    return places["head"].start(SUBMIT, "code")


def rows(trial: Trial) -> list[tuple[int, float]]:
    return [(row.steps_completed, row.metrics["loss"]) for row in trial.iter_metrics("validation")]


def expected(trial: Trial) -> list[tuple[int, float]]:
    lr = trial.hparams["lr"]
    return [(step, abs(lr - 0.3) + 1.0 / step) for step in range(1, NUM_STEPS + 1)]


def names(trial: Trial) -> list[str]:
    """Return the machines of the attempts of a trial."""
    return [node.name for attempt in trial.reload().data.attempts for node in attempt.nodes]


@pytest.mark.long
def test_a_search_over_the_machines_of_the_guide_loses_nothing_with_one_of_them(
    places: dict[str, Place], tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with start_cluster(places) as client:
        wait_until(lambda: are_ready(client, places))
        followed = submit(places, shared / "notes")
        places["head"].run_all(LIST_NODES)
        wait_until(client.list_experiments)
        [experiment] = client.list_experiments()

        def held() -> list[Trial]:
            trials = [one for one in experiment.trials() if one.state.value == "RUNNING"]
            return [one for one in trials if rows(one) == expected(one)[:3] and one.checkpoints()]

        wait_until(lambda: len(held()) == 2)
        before = {trial.id: rows(trial) for trial in experiment.trials()}
        begun = [names(trial) for trial in experiment.trials() if names(trial)]
        assert sorted(begun) == [["barn"], ["barn"], ["box"], ["box"]]
        [lost] = [trial for trial in held() if names(trial) == ["box"]]

        places["box"].pull()
        (shared / "go").touch()
        assert followed.wait(240) == 0, places["head"].log_path.read_text()
        assert experiment.reload().state.value == "COMPLETED"
        trials = experiment.trials()
        assert [trial.state.value for trial in trials] == NUM_TRIALS * ["COMPLETED"]
        for trial in trials:
            assert rows(trial) == expected(trial)
            assert before[trial.id] == rows(trial)[: len(before[trial.id])]
            assert trial.data.restarts == 0
            assert len(names(trial)) == (2 if trial.id == lost.id else 1)
        first, second = lost.reload().data.attempts
        assert names(lost) == ["box", "barn"]
        assert first.exit.reason.value == "runner_lost"
        assert second.resumed_steps == 2
        assert verdict_of(experiment, places, shared / "notes").problems == []
    stop(places, wait_until)


def verdict_of(experiment: Any, places: dict[str, Place], notes: Path) -> Verdict:
    """Return what the history checker finds."""
    verdict, home = Verdict(), places["head"].home / ".paceline"
    trials, noted = experiment.trials(), read_notes(notes)
    unsent = given_away(trials)
    check_decisions(experiment, home, None, verdict)
    check_reports(trials, noted, verdict, unsent=unsent)
    check_checkpoints(home, noted, verdict, unsent)
    assert verdict.num_acknowledged >= NUM_TRIALS * NUM_STEPS
    return verdict


def stop(places: dict[str, Place], wait_until: Callable[..., None]) -> None:
    """Stop what still runs as a user does, and see that no process is left."""
    [runner] = places["barn"].started
    runner.send_signal(signal.SIGINT)
    assert runner.wait(120) == 0, places["barn"].log_path.read_text()
    wait_until(lambda: not places["barn"].processes())
    places["head"].run_all("paceline down")
    wait_until(lambda: not places["head"].processes())
    assert not places["box"].processes()
