"""Checkpoints of nodes whose disks nobody else sees: they travel through the master.

Each node finds an empty disk of its own where the master has its checkpoints. Needs root.
"""

import json
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_lab.nodes import NodeProcess, can_mount
from forked_processes import free_ports

from paceline._cluster.runner.attempt_directory import AttemptDirectory
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
            (path / "large").write_bytes(bytes(int(os.environ["LARGE"]) if step == 1 else 10))
        while step == 3 and not begin and not Path(os.environ["GATE"]).exists():
            time.sleep(0.02)
"""


pytestmark = pytest.mark.skipif(
    not can_mount(), reason="NOT TESTED: a node with a disk of its own needs the right to mount"
)


@pytest.fixture
def lease_s() -> int:
    """Return how long a node may be silent, which healthy ones may be on a busy machine."""
    return 60


@pytest.fixture
def master(make_master: Callable[..., Any], lease_s: int, free_port: int) -> Any:
    """Return a master without slots of its own, which comes back at the same address."""
    return make_master(0, "home", "--runner-timeout", str(lease_s), "--port", str(free_port))


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


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.long
@pytest.mark.parametrize("lease_s", [10])
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

    def stored() -> dict[str, Any]:
        return {one.uuid: one for one in trial.checkpoints() if one.state.value == "COMPLETED"}

    # The database hears of it last.
    wait_until(lambda: len(stored()) == 2)
    kept = stored()
    assert sorted(kept) == storage.list()
    for uuid in kept:
        manifest = storage.verify(uuid)
        assert sorted(manifest.files) == ["deep/state", "empty", "large"]
        assert (storage.root / uuid / "rank-0.done").exists()
    assert not (storage.root / ".incoming").exists()
    target = tmp_path / "download"
    next(iter(kept.values())).download(target)
    assert (target / "deep" / "state").exists()


@pytest.mark.long
def test_a_runner_that_was_killed_while_it_sends_leaves_the_rest_to_the_next_one(
    master: Any, make_node: Callable[..., NodeProcess], submit: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    master.start()
    node = make_node("box", "--slots", "1").start(PACELINE_FAULT="runner.checkpoint.piece_sent:2")
    wait_until(lambda: master.client().nodes())
    experiment = submit(14 * 2**20)
    [trial] = experiment.trials()
    incoming = master.home / "checkpoints" / ".incoming"
    directory = AttemptDirectory(node.directory / "attempts" / "1")
    wait_until(lambda: incoming.exists() and directory.runner_pid() is None)
    node.process.kill()
    node.process.wait()
    node.start()
    wait_until(lambda: len(master.client().get_trial(trial.id).data.attempts) == 2)
    node.gate.touch()
    assert experiment.wait().value == "COMPLETED", told(master, trial)
    assert losses(trial) == expected()
    first, *_, last = master.client().get_trial(trial.id).data.attempts
    assert first.exit.reason.value == "runner_lost"
    assert last.resumed_steps >= 1
    storage = DirectoryStorage(master.home / "checkpoints")
    wait_until(lambda: len(storage.list()) == 2)
    assert all(storage.verify(uuid) for uuid in storage.list())
    assert not incoming.exists()


@pytest.mark.long
@pytest.mark.parametrize("lease_s", [10])
def test_what_a_node_that_is_gone_did_not_send_to_the_end_is_removed(
    master: Any, make_node: Callable[..., NodeProcess], submit: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    master.start()
    node = make_node("box", "--slots", "1").start(PACELINE_FAULT="runner.checkpoint.piece_sent:2")
    wait_until(lambda: master.client().nodes())
    experiment = submit(14 * 2**20)
    [trial] = experiment.trials()
    incoming = master.home / "checkpoints" / ".incoming"
    directory = AttemptDirectory(node.directory / "attempts" / "1")
    wait_until(lambda: incoming.exists() and directory.runner_pid() is None)
    node.close()
    wait_until(lambda: master.client().get_trial(trial.id).data.attempts[0].exit)
    wait_until(lambda: not incoming.exists(), 30)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("storage.piece_written:3", marks=pytest.mark.slow),
        "storage.before_moved_in",
        pytest.param("master.checkpoint.moved_in", marks=pytest.mark.slow),
    ],
)
def test_a_master_that_was_killed_while_it_takes_a_checkpoint_goes_on_with_it(
    fault: str, master: Any, make_node: Callable[..., NodeProcess], submit: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    master.start(fault)
    node = make_node("box", "--slots", "1").start()
    wait_until(lambda: master.client().nodes())
    submit(14 * 2**20)
    wait_until(lambda: not master.is_alive)
    node.gate.touch()
    [experiment] = master.start().client().list_experiments()
    [trial] = experiment.trials()
    assert experiment.wait().value == "COMPLETED", told(master, trial)
    assert losses(trial) == expected()
    assert len(master.client().get_trial(trial.id).data.attempts) == 1
    assert len(trial.checkpoints()) == 6
    storage = DirectoryStorage(master.home / "checkpoints")
    wait_until(lambda: len(storage.list()) == 2)
    assert all(storage.verify(uuid) for uuid in storage.list())


@pytest.mark.slow
@pytest.mark.parametrize("lease_s", [10])
def test_a_large_checkpoint_takes_little_memory_both_ways(
    master: Any, make_node: Callable[..., NodeProcess], submit: Callable[..., Any],
    wait_until: Callable[..., None], tmp_path: Path,
) -> None:  # fmt: skip
    master.start()
    pid = json.loads((master.home / "master.json").read_text())["pid"]
    first = make_node("first", "--slots", "1").start()
    wait_until(lambda: master.client().nodes())
    before = peak_bytes(pid)
    script = SCRIPT.replace("step == 3", "step == 1")
    (tmp_path / "context" / "train.py").write_text(script)
    experiment = submit(2**30)
    [trial] = experiment.trials()
    wait_until(lambda: len(trial.checkpoints()) == 1, timeout_s=300)
    sender = peak_bytes(first.runner(1).pid)
    first.close()
    second = make_node("second", "--slots", "1").start()
    second.gate.touch()
    assert experiment.wait().value == "COMPLETED", told(master, trial)
    grown = peak_bytes(pid) - before
    print(f"master +{grown / 2**20:.0f} MiB, runner {sender / 2**20:.0f} MiB in all")
    assert grown < 128 * 2**20
    assert sender < 192 * 2**20
    assert losses(trial) == expected()


def test_a_checkpoint_of_several_ranks_arrives_whole(
    master: Any, make_node: Callable[..., NodeProcess], submit: Callable[..., Any],
    wait_until: Callable[..., None], tmp_path: Path,
) -> None:  # fmt: skip
    master.start()
    make_node("box", "--slots", "3").start()
    wait_until(lambda: master.client().nodes())
    script = """
        import os
        import paceline as det

        os.environ |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        import subprocess, sys
        if "RANK" not in os.environ:
            starts = [os.environ | {"RANK": str(n), "LOCAL_RANK": str(n),
                      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["PORT"]}
                      for n in range(3)]
            ranks = [subprocess.Popen([sys.executable, __file__], env=env) for env in starts]
            raise SystemExit(max(rank.wait() for rank in ranks))
        with det.core.init() as context:
            rank = context.distributed.rank
            with context.checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, _):
                (path / f"rank {rank}").write_text(str(rank))
            if rank == 0:
                context.train.report_validation_metrics(1, {"loss": 1.0})
    """
    (tmp_path / "context" / "train.py").write_text(textwrap.dedent(script))
    resources = {"slots_per_trial": 3}
    variables = {"PORT": str(free_ports(1))}
    experiment = submit(resources=resources, environment={"variables": variables})
    [trial] = experiment.trials()
    assert experiment.wait().value == "COMPLETED", told(master, trial)
    [checkpoint] = trial.checkpoints()
    storage = DirectoryStorage(master.home / "checkpoints")
    files = sorted(path.name for path in (storage.root / checkpoint.uuid).iterdir())
    done = ["rank-0.done", "rank-1.done", "rank-2.done"]
    assert files == sorted(["manifest.json", "rank 0", "rank 1", "rank 2", *done])
    assert storage.verify(checkpoint.uuid)
