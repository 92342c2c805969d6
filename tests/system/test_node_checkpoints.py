"""Checkpoints of nodes whose disks nobody else sees: they travel through the master.

Each node finds an empty disk of its own where the master has its checkpoints. Needs root.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_lab.nodes import NodeProcess

from paceline.storage import DirectoryStorage

# Draws random numbers whose state is in the checkpoint, so that one that is lost or doubled shows.
SCRIPT = """
import json, os, random, time
from pathlib import Path
import paceline as det

info = det.get_cluster_info()
print("runs on", info.agent_id)
draw, weight, begin = random.Random(7), 0.0, 0
with det.core.init() as context:
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            begin, weight, (version, words, gauss) = json.loads((path / "deep/state").read_text())
        draw.setstate((version, tuple(words), gauss))
    for step in range(begin + 1, 7):
        weight += draw.random()
        context.train.report_validation_metrics(step, {"loss": weight})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "deep").mkdir()
            (path / "deep" / "state").write_text(json.dumps([step, weight, draw.getstate()]))
            (path / "empty").touch()
            (path / "large").write_bytes(draw.randbytes(0) + bytes(int(os.environ["LARGE"])))
        while step == 3 and not begin and not Path(os.environ["GATE"]).exists():
            time.sleep(0.02)
"""


def _can_mount() -> bool:
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(
    not _can_mount(), reason="NOT TESTED: a node with a disk of its own needs the right to mount"
)


@pytest.fixture
def master(make_master: Callable[..., Any]) -> Any:
    """Return a master without slots of its own, whose leases are short."""
    return make_master(0, "home", "--runner-timeout", "6")


@pytest.fixture
def make_node(master: Any, tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Return a function that makes a node that does not see the master's checkpoints."""
    made: list[NodeProcess] = []
    token = tmp_path / "token"

    def make(name: str, *options: str) -> NodeProcess:
        if not token.exists():
            token.touch(mode=0o600)
            token.write_text(master.client().create_token("nodes", scope="runner").secret)
        hidden = [master.home / "checkpoints"]
        made.append(NodeProcess(master, token, tmp_path / name, *options, hidden=hidden))
        return made[-1]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def submit(master: Any, write_context: Callable[..., Path]) -> Callable[..., Any]:
    """Return a function that submits the script."""
    code = write_context(SCRIPT)

    def create(large: int = 10, **changed: Any) -> Any:
        config: dict[str, Any] = {
            "entrypoint": "python3 train.py", "max_restarts": 0,
            "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 6}},
            "environment": {"variables": {"LARGE": str(large)}},
            "checkpoint_storage": {"save_trial_latest": 2, "save_trial_best": 0},
        }  # fmt: skip
        return master.client().create_experiment(config | changed, code)

    return create


def losses(trial: Any) -> list[tuple[int, float]]:
    return [(row.steps_completed, row.metrics["loss"]) for row in trial.iter_metrics("validation")]


def expected() -> list[tuple[int, float]]:
    import random

    draw, weight, found = random.Random(7), 0.0, []
    for step in range(1, 7):
        weight += draw.random()
        found.append((step, weight))
    return found


def told(master: Any, trial: Any) -> str:
    """Return what is known of a trial that went wrong."""
    ends = [attempt.exit for attempt in master.client().get_trial(trial.id).data.attempts]
    return "\n".join([*map(str, ends), *(line.text for line in trial.iter_logs()), master.log()])


def test_a_trial_goes_on_on_another_node_when_its_own_is_gone(
    master: Any, make_node: Callable[..., NodeProcess], submit: Callable[..., Any],
    wait_until: Callable[..., None], tmp_path: Path,
) -> None:  # fmt: skip
    master.start()
    first = make_node("first", "--slots", "1").start()
    wait_until(lambda: master.client().nodes())
    experiment = submit()
    wait_until(lambda: [len(trial.checkpoints()) for trial in experiment.trials()] == [3])
    first.close()
    shutil.rmtree(first.directory)
    second = make_node("second", "--slots", "1").start()
    second.gate.touch()
    [trial] = experiment.trials()
    assert experiment.wait().value == "COMPLETED", told(master, trial)
    assert losses(trial) == expected()
    said = [line.text.split()[2] for line in trial.iter_logs() if line.text.startswith("runs on")]
    assert said == ["first", "second"]
    attempts = master.client().get_trial(trial.id).data.attempts
    assert [attempt.resumed_steps for attempt in attempts] == [0, 3]
    # They are where the master's own would be, and are deleted by the same policy.
    storage = DirectoryStorage(master.home / "checkpoints")
    wait_until(lambda: len(storage.list()) == 2)
    kept = {each.uuid: each for each in trial.checkpoints() if each.state.value == "COMPLETED"}
    assert sorted(kept) == storage.list()
    for uuid in kept:
        manifest = storage.verify(uuid)
        assert sorted(manifest.files) == ["deep/state", "empty", "large"]
        assert (storage.root / uuid / "rank-0.done").exists()
    assert not (storage.root / ".incoming").exists()
    target = tmp_path / "download"
    next(iter(kept.values())).download(target)
    assert (target / "deep" / "state").exists()
