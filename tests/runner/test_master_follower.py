"""What a master wants reaches an attempt's processes, whatever the disk and the master do.

The master is real; the attempt that it started only sleeps, and the processes that are told are
another group's.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline._base.run_directory import Control
from paceline._cluster.messages.runner_messages import AttemptControl
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.master_follower import MasterFollower
from paceline._cluster.runner.master_link import MasterLink
from paceline._training.workers.processes.local_worker_group import LocalGroup
from paceline._training.workers.processes.worker_process import WorkerSpec
from paceline.journal import RunDirectory

SLEEP = "import time\ntime.sleep(120)\n"
MakeFollower = Callable[..., MasterFollower]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[LocalGroup]:
    """Return a group of one process that sleeps."""
    spec = WorkerSpec(
        command=["sleep", "120"], environment=dict(os.environ), working_directory=tmp_path
    )
    made = LocalGroup([spec], lambda _: None)
    made.start()
    yield made
    made.stop(0.0)


@pytest.fixture
def make_follower(group: LocalGroup, tmp_path: Path) -> Iterator[MakeFollower]:
    """Return a function that makes a follower; without a home no master is there."""
    made: list[tuple[MasterFollower, MasterLink]] = []

    def make(run: RunDirectory | None = None, home: Path | None = None) -> MasterFollower:
        link = MasterLink.of_home(home or tmp_path / "nowhere")
        follower = MasterFollower(run or RunDirectory(tmp_path), 1, link)
        follower.lead(group)
        made.append((follower, link))
        return follower

    yield make
    for follower, _ in made:
        follower.stop()
        follower.leave()


@pytest.fixture
def full_disk(small_disk: Path, fill_disk: Callable[..., None]) -> Path:
    """Return a file system without space; to delete its `filler` gives some."""
    fill_disk(small_disk)
    return small_disk


@pytest.fixture
def sleeping(master: Any, wait_until: Callable[..., None]) -> Any:
    """Return a started master whose attempt 1 runs."""
    master.start()
    experiment_id = master.create(SLEEP)
    wait_until(lambda: master.trial(experiment_id)["attempts"])
    return master


def report(master: Any, sequence: int, loss: float) -> None:
    """Let another rank's journal report a value, which all attempts are told."""
    record = {
        "type": "metrics", "time": 0.0, "group": "validation", "steps_completed": sequence,
        "metrics": {"loss": loss},
    }  # fmt: skip
    batch = {"generation": 7, "rank": 7, "records": [[sequence, record]]}
    master.post("/attempts/1/records", batches=[batch])


@pytest.mark.parametrize(
    ("timeout_s", "begin_s", "grace_s"),
    [(600.0, 595.0, 5.0), (30.0, 25.0, 5.0), (4.0, 2.0, 2.0), (1e300, None, 5.0)],
)
def test_a_kill_begins_so_early_that_it_is_done_at_the_timeout(
    make_follower: MakeFollower, timeout_s: float, begin_s: float | None, grace_s: float
) -> None:
    follower = make_follower()
    follower._obey(AttemptControl(version=1, should_preempt=True, preempt_timeout_s=timeout_s))
    timer = follower._kill_timer
    assert timer is not None
    assert begin_s in (timer.interval, None)
    assert timer.args == (ExitReason.PREEMPTION_TIMEOUT, grace_s)
    assert timer.is_alive()


def test_a_timeout_of_zero_kills_at_once(make_follower: MakeFollower, group: LocalGroup) -> None:
    follower = make_follower()
    follower._obey(AttemptControl(version=1, should_preempt=True, preempt_timeout_s=0.0))
    exits = group.wait(60)
    assert exits is not None
    assert exits[0].signal == 9
    assert follower.kill_reason is ExitReason.PREEMPTION_TIMEOUT


@pytest.mark.parametrize(("grace_s", "signum"), [(0.0, 9), (60.0, 15)])
def test_a_kill_asks_nobody_unless_it_gives_time(
    make_follower: MakeFollower, group: LocalGroup, grace_s: float, signum: int, tmp_path: Path
) -> None:
    follower = make_follower()
    follower._obey(AttemptControl(version=1, should_kill=True, kill_grace_s=grace_s))
    exits = group.wait(60)
    assert exits is not None
    assert exits[0].signal == signum
    assert follower.kill_reason is ExitReason.KILLED
    assert not RunDirectory(tmp_path).read_control().should_preempt


def test_a_kill_at_once_stays_one_though_a_kill_with_time_follows(
    tmp_path: Path, group: LocalGroup
) -> None:
    follower = MasterFollower(RunDirectory(tmp_path), 1, MasterLink.of_home(tmp_path / "nowhere"))
    for version, grace_s in enumerate((0.0, 60.0), 1):
        follower._obey(AttemptControl(version=version, should_kill=True, kill_grace_s=grace_s))
    follower.lead(group)
    exits = group.wait(60)
    assert exits is not None
    assert exits[0].signal == 9
    follower.stop()
    follower.leave()


@pytest.mark.parametrize("data", [b"", b'{"version":1', b'{"best_validation":0.75}', None])
def test_a_control_file_that_was_damaged_or_removed_is_written_again(
    make_follower: MakeFollower, tmp_path: Path, data: bytes | None
) -> None:
    run = RunDirectory(tmp_path)
    follower = make_follower(run)
    follower._obey(AttemptControl(version=1, best_validation=0.5))
    assert run.read_control().best_validation == 0.5
    if data is None:
        run.control_path.unlink()
    else:
        run.control_path.write_bytes(data)
    follower._mend()
    assert run.read_control().best_validation == 0.5


@pytest.mark.root
def test_a_kill_needs_no_space_on_the_disk(
    make_follower: MakeFollower, group: LocalGroup, full_disk: Path
) -> None:
    follower = make_follower(RunDirectory(full_disk))
    follower._obey(AttemptControl(version=1, should_kill=True))
    assert group.wait(60)
    assert follower.kill_reason is ExitReason.KILLED


@pytest.mark.root
def test_news_that_a_full_disk_holds_up_arrive_once_there_is_space(
    make_follower: MakeFollower, sleeping: Any, full_disk: Path, wait_until: Callable[..., None]
) -> None:
    run = RunDirectory(full_disk)
    follower = make_follower(run, sleeping.home)
    follower.start()
    report(sleeping, 1, 0.5)
    wait_until(lambda: follower._write_timer is not None)
    report(sleeping, 2, 0.25)
    wait_until(lambda: follower._wanted.best_validation == 0.25)
    assert run.read_control() == Control()
    (full_disk / "filler").unlink()
    wait_until(lambda: run.read_control().best_validation == 0.25)
    report(sleeping, 3, 0.125)
    wait_until(lambda: run.read_control().best_validation == 0.125)
    follower.stop()
    sleeping.kill()


@pytest.mark.root
def test_a_signal_to_leave_is_remembered_while_the_disk_is_full(
    make_follower: MakeFollower, full_disk: Path, wait_until: Callable[..., None]
) -> None:
    run = RunDirectory(full_disk)
    follower = make_follower(run)
    follower.terminate()
    follower._obey(AttemptControl(version=1, operation_length=3))
    assert run.read_control() == Control()
    (full_disk / "filler").unlink()
    wait_until(lambda: run.read_control() == Control(should_preempt=True, operation_length=3))


def test_of_two_answers_the_newer_one_stands_whichever_comes_first(
    make_follower: MakeFollower, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    follower = make_follower(run)
    follower._obey(AttemptControl(version=3, operation_length=8))
    follower.pass_on(AttemptControl(version=2, operation_length=4), (0, 7))
    assert run.read_control() == Control(operation_length=8, judged=(0, 7))
    follower.pass_on(AttemptControl(version=3, operation_length=8), (0, 5))
    assert run.read_control() == Control(operation_length=8, judged=(0, 7))
    follower.pass_on(None, (1, 0))
    follower._obey(AttemptControl(version=4, should_preempt=True))
    assert run.read_control() == Control(should_preempt=True, judged=(1, 0))


def test_an_unforeseen_error_does_not_end_the_following(
    make_follower: MakeFollower, sleeping: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    class Faulty(RunDirectory):
        num_errors = 0

        def write_control(self, control: Control) -> None:
            if self.num_errors < 2:
                self.num_errors += 1
                raise RuntimeError("unforeseen")
            super().write_control(control)

    run = Faulty(tmp_path)
    follower = make_follower(run, sleeping.home)
    report(sleeping, 1, 0.5)
    follower.start()
    wait_until(lambda: run.read_control().best_validation == 0.5)
    assert run.num_errors == 2
    follower.stop()
    sleeping.kill()
