"""Runners of nodes as processes of their own: a search over two, and what happens when they die."""

import os
import signal
import stat
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline._cluster.runner.attempt_directory import AttemptDirectory

# Reports where it runs, and waits at step 2 of its first attempt until the file is there.
SCRIPT = """
import os, time
from pathlib import Path
import paceline as det

info = det.get_cluster_info()
secret, token = os.environ["KEY"], os.environ.get("PACELINE_TOKEN", "")
print("runs on", info.agent_id, "with", secret, len(token))
with det.core.init() as context:
    begin = 0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            begin = int((path / "step").read_text())
    for step in range(begin + 1, 5):
        context.train.report_validation_metrics(step, {"loss": float(step)})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "step").write_text(str(step))
        while step == 2 and not begin and not Path(os.environ["GATE"]).exists():
            time.sleep(0.02)
            if context.preempt.should_preempt():
                raise SystemExit
"""


@pytest.fixture
def lease_s() -> int:
    """Return how long a node may be silent, which healthy ones may be on a busy machine."""
    return 60


@pytest.fixture
def master(make_master: Callable[..., Any], lease_s: int, free_port: int) -> Any:
    """Return a master without slots of its own, which comes back at the same address."""
    options = ("--runner-timeout", str(lease_s), "--port", str(free_port))
    return make_master(0, "home", *options).start()


@pytest.fixture
def submit(master: Any, write_context: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    """Return a function that submits the script."""
    # The nodes share this directory, as they run on one machine.
    code = write_context(SCRIPT)

    def create(num_trials: int, **changed: Any) -> Any:
        config: dict[str, Any] = {
            "entrypoint": "python3 train.py", "max_restarts": 0,
            "hyperparameters": {"n": {"type": "categorical", "vals": list(range(num_trials))}},
            "searcher": {"name": "grid", "metric": "loss"},
            "environment": {"secrets": {"KEY": "value-of-the-key"}},
        }  # fmt: skip
        return master.client().create_experiment(config | changed, code)

    return create


def attempts(master: Any, trial_id: int) -> list[Any]:
    return master.client().get_trial(trial_id).data.attempts


def lines(trial: Any) -> list[str]:
    return [line.text for line in trial.iter_logs()]


def open_gate(node: Any) -> None:
    node.gate.touch()


def is_at_step_2(master: Any, trial_id: int = 1) -> Callable[[], bool]:
    def is_there() -> bool:
        trials = [t for e in master.client().list_experiments() for t in e.trials()]
        at = {trial.id: len(trial.checkpoints()) for trial in trials}
        return at.get(trial_id, 0) >= 2

    return is_there


def test_a_search_runs_on_two_nodes_and_leaves_nothing_there(
    master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    first = make_node("first", "--slots", "1").start()
    second = make_node("second", "--slots", "1", "--labels", "gpu=none").start()
    client = master.client()
    wait_until(lambda: [node.state for node in client.nodes()] == ["ready"] * 2)
    open_gate(first)
    experiment = submit(4)
    assert experiment.wait().value == "COMPLETED"
    said = [next(x for x in lines(t) if x.startswith("runs on")) for t in experiment.trials()]
    assert {text.split()[2] for text in said} == {"first", "second"}
    starts = (e for e in experiment.events() if e is not None and e.kind == "attempt_started")
    assert {event.data["node"] for event in islice(starts, 4)} == {"first", "second"}
    # The secret is hidden in the log; the token of the user does not come through.
    assert {text.partition("with ")[2] for text in said} == {"*** 0"}
    for node in (first, second):
        wait_until(lambda node=node: not list((node.directory / "attempts").iterdir()))
        modes = [path.stat().st_mode for path in node.directory.rglob("*")]
        assert not any(stat.S_IMODE(mode) & 0o077 for mode in modes)
        assert stat.S_IMODE(node.directory.stat().st_mode) == 0o700
        command = psutil.Process(node.process.pid).cmdline()
        assert node.token.read_text() not in " ".join(command) + node.log_path.read_text()


@pytest.mark.long
@pytest.mark.parametrize("lease_s", [10])
def test_a_runner_that_was_killed_finds_its_attempt_again(
    master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    node = make_node("box", "--slots", "1").start()
    wait_until(lambda: master.client().nodes())
    experiment = submit(1)
    wait_until(is_at_step_2(master))
    runner = node.runner(1)
    node.process.kill()
    node.process.wait()
    wait_until(lambda: [found.state for found in master.client().nodes()] == ["lost"])
    # Its attempt reports by itself.
    assert runner.is_running()
    node.start()
    wait_until(lambda: [found.state for found in master.client().nodes()] == ["ready"])
    assert node.runner(1) == runner
    open_gate(node)
    assert experiment.wait().value == "COMPLETED"
    assert len(attempts(master, 1)) == 1


# `test_group_faults.py` kills a training process in every run.
@pytest.mark.parametrize("victim", ["runner", pytest.param("training", marks=pytest.mark.slow)])
def test_a_trial_goes_on_from_its_checkpoint_after_kill_9(
    victim: str, master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    node = make_node("box", "--slots", "1").start()
    wait_until(lambda: master.client().nodes())
    experiment = submit(1, max_restarts=1)
    wait_until(is_at_step_2(master))
    runner = node.runner(1)
    [training] = [p for p in runner.children() if "PACELINE_RUN_DIR" in p.environ()]
    (runner if victim == "runner" else training).kill()
    assert experiment.wait().value == "COMPLETED"
    [trial] = experiment.trials()
    assert [row.steps_completed for row in trial.iter_metrics("validation")] == [1, 2, 3, 4]
    first, second = attempts(master, 1)
    assert (first.exit.reason.value, second.resumed_steps) == (
        "runner_lost" if victim == "runner" else "exited", 2,
    )  # fmt: skip
    assert not training.is_running() or training.status() == psutil.STATUS_ZOMBIE


def test_an_attempt_whose_runner_died_before_it_began_begins_with_its_secrets(
    master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    node = make_node("box", "--slots", "1").start(PACELINE_FAULT="runner.prepared")
    wait_until(lambda: master.client().nodes())
    experiment = submit(1)
    lock = node.directory / "attempts" / "1" / "runner.lock"
    wait_until(lambda: lock.exists() and lock.read_text())
    directory = AttemptDirectory(lock.parent)
    wait_until(lambda: directory.runner_pid() is None)
    node.process.kill()
    node.process.wait()
    open_gate(node)
    node.start()
    assert experiment.wait().value == "COMPLETED"
    assert len(attempts(master, 1)) == 1
    [trial] = experiment.trials()
    assert "runs on box with *** 0" in lines(trial)


def test_a_master_that_was_killed_finds_its_nodes_and_their_attempts_again(
    master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    node = make_node("box", "--slots", "1").start()
    wait_until(lambda: master.client().nodes())
    submit(1)
    wait_until(is_at_step_2(master))
    master.kill()
    open_gate(node)
    client = master.start().client()
    [experiment] = client.list_experiments()
    assert experiment.wait().value == "COMPLETED"
    assert len(attempts(master, 1)) == 1
    wait_until(lambda: [found.state for found in client.nodes()] == ["ready"])


@pytest.mark.long
def test_down_tells_how_many_trials_run_on_nodes_and_what_becomes_of_them(
    master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None], command_server: Any, tmp_path: Path,
) -> None:  # fmt: skip
    def down(*options: str) -> str:
        command = ("-m", "paceline.cli", "down", "--home", str(master.home), *options)
        result = command_server.run_to_end(
            *command, directory=tmp_path, environment=dict(os.environ)
        )
        assert result.returncode == 0, result.stderr
        return str(result.stdout + result.stderr)

    node = make_node("box", "--slots", "2").start()
    wait_until(lambda: master.client().nodes())
    submit(2)
    wait_until(is_at_step_2(master, 1))
    wait_until(is_at_step_2(master, 2))
    told = down("--keep-trials")
    assert "2 trials go on without a master" in told
    assert "Stopping" not in told
    assert master.wait(60) == 0
    assert node.training()
    master.start()
    wait_until(lambda: [found.state for found in master.client().nodes()] == ["ready"])
    told = down()
    assert "Stopping: 2 trials get up to 30 s to store checkpoints and will go on at" in told
    assert "without a master" not in told
    assert master.wait(60) == 0
    wait_until(lambda: not node.training())
    open_gate(node)
    client = master.start().client()
    [experiment] = client.list_experiments()
    assert experiment.wait().value == "COMPLETED"
    assert [found.resumed_steps for found in attempts(master, 1)] == [0, 2]


# Far more than the test takes: no lease ends in it.
@pytest.mark.long
@pytest.mark.parametrize("lease_s", [3600])
# `test_groups.py` stops a runner in every run.
@pytest.mark.parametrize("how", ["drain", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_what_runs_on_a_node_that_leaves_goes_on_elsewhere(
    how: str, master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    first = make_node("first", "--slots", "1").start()
    wait_until(lambda: master.client().nodes())
    experiment = submit(1)
    wait_until(is_at_step_2(master))
    make_node("second", "--slots", "1").start()
    wait_until(lambda: len(master.client().nodes()) == 2)
    if how == "drain":
        master.client().drain_node("first")
    else:
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 0, first.log_path.read_text()
        told = first.log_path.read_text()
        assert "takes no more attempts. It waits for 1 attempt (trial 1): up to 30 s to" in told
        assert "The runner ends; nothing runs on this node." in told
        # It has said that nothing of it is left.
        states = {node.name: node.state for node in master.client().nodes()}
        assert states == {"first": "left", "second": "ready"}
    assert experiment.wait().value == "COMPLETED"
    [trial] = experiment.trials()
    said = [text.split()[2] for text in lines(trial) if text.startswith("runs on")]
    assert said == ["first", "second"]
    assert [found.resumed_steps for found in attempts(master, 1)] == [0, 2]


def test_a_second_ctrl_c_ends_the_runner_and_says_what_still_runs(
    master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:  # fmt: skip
    node = make_node("box", "--slots", "1").start()
    wait_until(lambda: master.client().nodes())
    submit(1, entrypoint="trap '' TERM; echo runs; sleep 600")
    wait_until(lambda: "runs" in lines(master.client().get_trial(1)))
    node.process.send_signal(signal.SIGINT)
    wait_until(lambda: "takes no more attempts" in node.log_path.read_text())
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(60) == 0
    assert "ends and leaves 1 attempt (trial 1) running." in node.log_path.read_text()


def test_a_second_runner_on_a_directory_is_refused(
    master: Any, make_node: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    node = make_node("box", "--slots", "1").start()
    wait_until(lambda: master.client().nodes())
    again = make_node("box", "--slots", "1")
    again.log_path = node.log_path.with_name("again.log")
    assert again.start().process.wait(60) == 1
    assert "must have one runner" in again.log_path.read_text()


def test_a_token_that_others_can_read_is_refused(
    make_node: Callable[..., Any],
) -> None:
    node = make_node("box")
    node.token.chmod(0o644)
    assert node.start().process.wait(60) == 1
    assert "has mode 0644" in node.log_path.read_text()


# In the place of torch, unless nobody broke it; it waits while a file says so.
BREAKABLE_TORCH = """
import os, sys, time
while os.path.exists(os.environ["BROKEN"] + ".waits"):
    time.sleep(0.05)
if os.path.exists(os.environ["BROKEN"]):
    raise ImportError("libcudart.so.13: no such file")
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.dirname(__file__))]
del sys.modules["torch"]
import torch
"""


def with_breakable_torch(directory: Path) -> dict[str, str]:
    """Return the variables of a runner whose checks the test breaks."""
    (directory / "fake" / "torch").mkdir(parents=True)
    (directory / "fake" / "torch" / "__init__.py").write_text(BREAKABLE_TORCH)
    paths = f"{directory / 'fake'}:{os.environ['PYTHONPATH']}"
    return {"PYTHONPATH": paths, "BROKEN": str(directory / "broken")}


@pytest.mark.long
def test_a_node_whose_check_fails_rests_with_its_reason_and_comes_back_by_itself(
    master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None], tmp_path: Path,
) -> None:  # fmt: skip
    """A node rests."""
    broken = tmp_path / "broken"
    broken.touch()
    node = make_node("box", "--slots", "1", "--check-every", "1")
    node.start(**with_breakable_torch(tmp_path))
    open_gate(node)
    client = master.client()
    wait_until(lambda: any("libcudart" in one.problem for one in client.nodes()))
    experiment = submit(1)
    wait_until(lambda: client.queue())
    [waiting] = client.queue()
    assert waiting.reason == "pausing", f"{waiting=}"
    told = "The node box rests until a check passes: torch: ImportError: libcudart.so.13"
    assert waiting.detail.startswith(told), f"{waiting.detail=}"
    assert any(one.startswith(told) for one in client.status().problems), f"{client.status()=}"
    assert not attempts(master, 1)
    broken.unlink()
    assert experiment.wait().value == "COMPLETED"
    assert [one.problem for one in client.nodes()] == [""]
    log = node.log_path.read_text()
    assert "takes no new trials: torch: ImportError" in log, f"{log=}"
    assert "takes trials again" in log, f"{log=}"


@pytest.mark.long
def test_a_node_that_is_idle_because_of_its_check_does_not_leave(
    master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None], tmp_path: Path,
) -> None:  # fmt: skip
    """The trial waits for the first check, however long that takes."""
    waits = tmp_path / "broken.waits"
    waits.touch()
    node = make_node("box", "--slots", "1", "--check-every", "60", "--idle-timeout", "8")
    node.start(**with_breakable_torch(tmp_path))
    open_gate(node)
    client = master.client()
    wait_until(lambda: [one.problem for one in client.nodes()] == ["its first check is not over"])
    experiment = submit(1)
    # Longer than it would be idle.
    time.sleep(10)
    assert [one.state for one in client.nodes()] == ["ready"]
    assert not attempts(master, 1)
    waits.unlink()
    assert experiment.wait().value == "COMPLETED"
    wait_until(lambda: [one.state for one in client.nodes()] == ["left"])


def with_version(directory: Path, version: str) -> dict[str, str]:
    """Return the variables of a runner that is installed as another version."""
    info = directory / version / f"paceline-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: paceline\nVersion: {version}\n")
    return {"PYTHONPATH": f"{info.parent}:{os.environ['PYTHONPATH']}"}


def test_a_runner_one_minor_version_behind_trains_and_a_newer_one_is_told_what_to_do(
    master: Any, make_node: Callable[..., Any], submit: Callable[..., Any],
    wait_until: Callable[..., None], tmp_path: Path,
) -> None:  # fmt: skip
    """As during an upgrade: the master first, then its runners."""
    newer = make_node("newer", "--slots", "1").start(**with_version(tmp_path, "0.2.0"))
    older = make_node("older", "--slots", "1").start(**with_version(tmp_path, "0.0.9"))
    open_gate(older)
    wait_until(lambda: master.client().nodes())
    experiment = submit(1)
    assert experiment.wait().value == "COMPLETED"
    [node] = master.client().nodes()
    assert (node.name, node.version, node.problem) == ("older", "0.0.9", "")
    assert newer.process.wait(60) != 0
    log = newer.log_path.read_text()
    assert "has Paceline 0.2.0" in log, f"{log=}"
    assert "Hint: upgrade the master first" in log, f"{log=}"
