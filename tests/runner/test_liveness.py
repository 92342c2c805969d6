"""Runners and trainings that hang, are killed together, or come back too late."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

# Longer than a busy machine keeps a healthy runner waiting.
LEASE_S = 12.0

# The first attempt leaves a process in a session of its own, whose parent has ended, and sleeps.
LEAVE_AND_SLEEP = """
import os, subprocess, sys, time
if os.path.exists({mark!r}):
    raise SystemExit
subprocess.run([sys.executable, "-c", '''
import os, subprocess, sys
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                          start_new_session=True)
with open({mark!r} + ".part", "w") as file:
    file.write(str(daemon.pid))
os.rename({mark!r} + ".part", {mark!r})
'''], start_new_session=True)
time.sleep(300)
"""


@pytest.fixture(scope="module")
def impatient_master(tmp_path_factory: pytest.TempPathFactory, master_class: Any) -> Iterator[Any]:
    """Return a master with eight slots whose runners must give signs of life within seconds."""
    home = tmp_path_factory.mktemp("impatient") / "home"
    made = master_class(home, 8, runner_timeout_s=LEASE_S)
    yield made.start()
    made.close()


class Trial:
    """A trial whose first attempt sleeps, and has left a process that nobody waits for."""

    def __init__(self, master: Any, mark: Path, **changed: Any) -> None:
        self.master = master
        self.id = master.create(LEAVE_AND_SLEEP.format(mark=str(mark)), **changed)
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < deadline, master.log()
            time.sleep(0.02)
        self.daemon = psutil.Process(int(mark.read_text()))
        self.runner = master.runner(master.trial(self.id)["attempts"][0]["id"])
        self.processes = [self.daemon, *self.runner.children(recursive=True)]

    def are_gone(self) -> bool:
        """Whether all processes of the first attempt have ended."""
        return not any(is_running(process) for process in self.processes)


def kill_at_once(runner: psutil.Process) -> None:
    """Kill a runner and all that it has started."""
    for process in (runner, *runner.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.long
def test_hung_and_killed_runners_are_noticed_and_nothing_of_their_attempts_lives_on(
    impatient_master: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    master = impatient_master
    hung, stopped, killed = (Trial(master, tmp_path / name) for name in ("a", "b", "c"))
    healthy = Trial(master, tmp_path / "d")
    hung.runner.send_signal(signal.SIGSTOP)
    stopped.runner.send_signal(signal.SIGSTOP)
    master.post(f"/experiments/{stopped.id}/kill")
    # The runner cannot see to it that the training ends, nor the other way round.
    kill_at_once(killed.runner)
    for trial in (hung, killed):
        ended = master.wait_for_end(trial.id)
        assert [attempt["exit"]["reason"] for attempt in ended["attempts"]] == [
            "runner_lost",
            "exited",
        ]
        assert ended["state"] == "COMPLETED"
        assert trial.are_gone()
    assert master.wait_for_end(stopped.id)["state"] == "CANCELED"
    assert stopped.are_gone()
    notes = master.read(f"/trials/{master.trial(hung.id)['id']}/logs")["items"]
    assert any(f"no sign of life for {LEASE_S:g} s" in note["text"] for note in notes)
    assert len(master.trial(healthy.id)["attempts"]) == 1
    master.post(f"/experiments/{healthy.id}/kill")
    assert master.wait_for_end(healthy.id)["state"] == "CANCELED"
    assert healthy.are_gone()


@pytest.mark.long
def test_a_runner_that_has_lost_its_attempt_ends_its_processes_and_reports_nothing(
    impatient_master: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """As if the master had not been able to end it, and had given the attempt away."""
    master = impatient_master
    trial = Trial(master, tmp_path / "a", max_restarts=1)
    attempt = master.trial(trial.id)["attempts"][0]["id"]
    trial.runner.send_signal(signal.SIGSTOP)
    end = {"reason": "runner_lost", "code": None, "signal": None, "time": time.time()}
    master.post(f"/attempts/{attempt}/end", **end)
    record = {"type": "metrics", "time": 0.0, "group": "validation", "steps_completed": 1,
              "metrics": {"loss": 0.5}}  # fmt: skip
    batch = {"generation": 0, "rank": 0, "records": [[0, record]]}
    requests = {
        "records": {"batches": [batch]},
        "logs": {"entries": [[0, 0.0, None, "stdout", None, "late"]]},
    }
    for name, body in requests.items():
        reply = master.http.post(f"/attempts/{attempt}/{name}", json=body)
        assert (reply.status_code, reply.json()["code"]) == (409, "attempt_over")
    assert master.http.get(f"/attempts/{attempt}/control").status_code == 409
    trial.runner.send_signal(signal.SIGCONT)
    wait_until(trial.are_gone)
    wait_until(lambda: not is_running(trial.runner))
    ended = master.wait_for_end(trial.id)
    assert ended["state"] == "COMPLETED"
    assert len(ended["attempts"]) == 2
    assert "late" not in master.output(ended)
    assert ended["best_metric"] is None


@pytest.mark.slow
def test_runners_outlive_a_master_that_is_stopped_for_long(
    impatient_master: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    master = impatient_master
    trial = Trial(master, tmp_path / "a")
    master.send(signal.SIGSTOP)
    time.sleep(4 * LEASE_S)
    master.send(signal.SIGCONT)
    time.sleep(2 * LEASE_S)
    assert is_running(trial.runner)
    assert [row["state"] for row in master.trial(trial.id)["attempts"]] == ["RUNNING"]
    master.post(f"/experiments/{trial.id}/kill")
    master.wait_for_end(trial.id)


@pytest.mark.slow
def test_what_a_whole_killed_tree_has_left_is_ended_by_the_next_master(
    master: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """A process of another attempt, and one that only looks alike, live on."""
    master.start()
    trial = Trial(master, tmp_path / "a")
    spec = (master.home / "attempts").glob("*/attempt.json")
    mark = psutil.Process(trial.daemon.pid).environ()["PACELINE_WORKER_GROUP"]
    assert len(list(spec)) == 1
    other = psutil.Popen(["sleep", "300"], env=os.environ | {"PACELINE_WORKER_GROUP": mark + "1"})
    [host] = [process for process in psutil.Process(master.pid).children() if is_host(process)]
    master.kill()
    kill_at_once(trial.runner)
    assert is_running(trial.daemon)
    host.wait(60)
    master.start()
    assert master.wait_for_end(trial.id)["state"] == "COMPLETED"
    wait_until(lambda: not is_running(trial.daemon))
    assert is_running(other)
    other.kill()
    other.wait()


@pytest.mark.long
def test_the_master_answers_a_runner_in_time_for_its_next_sign_of_life(
    impatient_master: Any, tmp_path: Path
) -> None:
    master = impatient_master
    trial = Trial(master, tmp_path / "a")
    attempt = master.trial(trial.id)["attempts"][0]["id"]
    path = f"/attempts/{attempt}/control?after=99&timeout_s=30"
    # Much shorter than what was asked for.
    reply = master.http.get(path, timeout=httpx2.Timeout(20.0))
    assert reply.status_code == 200
    master.post(f"/experiments/{trial.id}/kill")
    master.wait_for_end(trial.id)


@pytest.mark.long
def test_runners_outlive_the_process_that_forks_them_and_others_can_start(
    impatient_master: Any, tmp_path: Path
) -> None:
    master = impatient_master
    first = Trial(master, tmp_path / "a")
    [host] = [process for process in psutil.Process(master.pid).children() if is_host(process)]
    assert first.runner.parent() == host
    host.kill()
    second = Trial(master, tmp_path / "b")
    assert is_running(first.runner)
    assert second.runner.parent() not in (None, host)
    for trial in (first, second):
        assert len(master.trial(trial.id)["attempts"]) == 1
        master.post(f"/experiments/{trial.id}/kill")
    for trial in (first, second):
        assert master.wait_for_end(trial.id)["state"] == "CANCELED"
        assert trial.are_gone()


def is_host(process: psutil.Process) -> bool:
    return process.status() != psutil.STATUS_ZOMBIE and "template" in process.cmdline()
