"""Ends that must arrive, whatever the attempt left; each is told to a real master.

The attempt that the master started only sleeps; what is reported lies in a directory of the test's.
"""

import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from paceline._base.journal_reading_and_writing import JournalWriter, segment_name
from paceline._cluster.messages.runner_messages import AttemptEnd
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.attempt_end import make_attempt_end
from paceline._cluster.runner.master_link import encode
from paceline.journal import AttemptFinished, RecordsDropped

SLEEP = "import time\ntime.sleep(120)\n"
MakeAttempt = Callable[..., AttemptDirectory]

# It ends by itself when it is told to, long after it was asked to leave.
END_AT_THE_LAST_MOMENT = """
import signal, time
import paceline as det

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with det.core.init() as context:
    context.train.report_validation_metrics(1, {"loss": 0.5})
    while not asked:
        time.sleep(0.02)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeping:
    """An attempt that a master has started."""

    master: Any
    experiment_id: int
    attempt_id: int

    def exit(self) -> tuple[str, int | None]:
        """Return the reason and the code of the attempt's end."""
        ended = self.trial()["attempts"][0]["exit"]
        return ended["reason"], ended["code"]

    def trial(self) -> Any:
        """Return the attempt's trial."""
        return self.master.trial(self.experiment_id)


@pytest.fixture
def sleeping(shared_master: Any, wait_until: Callable[..., None]) -> Iterator[Sleeping]:
    """Return a running attempt of the shared master."""
    experiment_id = shared_master.create(SLEEP)
    wait_until(lambda: shared_master.trial(experiment_id)["attempts"])
    attempt_id = shared_master.trial(experiment_id)["attempts"][0]["id"]
    yield Sleeping(master=shared_master, experiment_id=experiment_id, attempt_id=attempt_id)
    shared_master.http.post(f"/experiments/{experiment_id}/kill")


@pytest.fixture
def left(sleeping: Sleeping, make_attempt: MakeAttempt) -> AttemptDirectory:
    """Return what a runner has left of the sleeping attempt, without its end."""
    directory = make_attempt(sleeping.master.home, sleeping.attempt_id)
    directory.mark_started()
    return directory


def copy_address(sleeping: Sleeping, home: Path) -> None:
    """Let the master be found from another home."""
    for name in ("master.json", "token"):
        shutil.copy(sleeping.master.home / name, home / name)


def run(directory: AttemptDirectory, *options: str) -> str:
    """Run the runner on a directory and return its log."""
    command = [sys.executable, "-m", "paceline._cluster.runner", str(directory.path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("outcome", "error", "expected"),
    [
        ("completed", None, ("exited", 0)),
        ("preempted", None, ("exited", 0)),
        ("invalid_hp", "InvalidHP: no", ("exited", 0)),
        # It may come from the loss of the runner.
        ("error", "BrokenPipeError: no reader", ("runner_lost", None)),
        (None, None, ("runner_lost", None)),
    ],
)
def test_a_lost_runners_attempt_ends_as_its_journal_says(
    sleeping: Sleeping, left: AttemptDirectory, write_journal: Callable[..., JournalWriter],
    report: Callable[[int], Any], outcome: str | None, error: str | None,
    expected: tuple[str, int | None],
) -> None:  # fmt: skip
    journal = write_journal(left)
    journal.append(report(1))
    if outcome is not None:
        journal.append(AttemptFinished(time=5.0, outcome=outcome, error=error))
        journal.append(RecordsDropped(time=6.0, count=1))
    journal.close()
    write_journal(left, rank=1).close()
    run(left, "--ship")
    assert sleeping.exit() == expected
    end = left.read_end()
    assert end is not None
    told = "the runner died, and the code failed: " if outcome == "error" else ""
    assert end.detail == (told + error if error else None)
    if outcome == "completed":
        assert (sleeping.trial()["state"], end.time) == ("COMPLETED", 5.0)


def test_an_end_that_was_left_goes_before_the_journal(
    sleeping: Sleeping, left: AttemptDirectory, write_journal: Callable[..., JournalWriter]
) -> None:
    journal = write_journal(left)
    journal.append(AttemptFinished(time=5.0, outcome="completed"))
    journal.close()
    left.write_end(AttemptEnd(reason=ExitReason.EXITED, code=3, signal=None, time=1.0))
    run(left, "--ship")
    assert sleeping.exit() == ("exited", 3)


@pytest.mark.parametrize("name", ["exit.json", "process.json", "attempt.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_damaged_file_does_not_keep_an_end_back(
    sleeping: Sleeping, left: AttemptDirectory, tmp_path: Path, name: str, content: bytes
) -> None:
    copy_address(sleeping, tmp_path)
    (left.path / name).write_bytes(content)
    run(left, "--ship")
    assert sleeping.exit() == ("runner_lost", None)


@pytest.mark.long
@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_an_attempt_whose_specification_cannot_be_read_is_followed_by_another_one(
    sleeping: Sleeping, make_attempt: MakeAttempt, tmp_path: Path, content: bytes | None
) -> None:
    directory = make_attempt(sleeping.master.home, sleeping.attempt_id)
    copy_address(sleeping, tmp_path)
    if content is None:
        (directory.path / "attempt.json").unlink()
    else:
        (directory.path / "attempt.json").write_bytes(content)
    assert "specification cannot be read" in run(directory)
    assert sleeping.exit()[0] == "start_failed"
    assert sleeping.trial()["state"] != "ERROR"
    assert directory.was_started


def test_a_directory_without_a_number_is_left_alone(
    make_attempt: MakeAttempt, tmp_path: Path
) -> None:
    directory = make_attempt()
    other = AttemptDirectory(directory.path.rename(tmp_path / "attempts" / "other"))
    (other.path / "attempt.json").unlink()
    assert "number is not known" in run(other)


@pytest.mark.long
def test_reports_that_cannot_be_read_do_not_keep_the_end_back(
    sleeping: Sleeping, left: AttemptDirectory
) -> None:
    """The line's checksum is right, but nothing else: the line counts as damaged."""
    path = left.run.path / "journal" / "a1.g0.r0"
    path.mkdir(parents=True)
    (path / segment_name(0)).write_bytes(b"%08x nonsense\n" % zlib.crc32(b"nonsense"))
    left.write_end(AttemptEnd(reason=ExitReason.EXITED, code=0, signal=None, time=1.0))
    run(left, "--ship")
    assert sleeping.exit() == ("exited", 0)


def test_an_end_keeps_to_what_can_be_sent() -> None:
    """A file's name may hold bytes that are no text; JSON cannot."""
    end = make_attempt_end(ExitReason.START_FAILED, detail="\udcff" * 9000)
    sent = msgspec.json.decode(encode(end), type=AttemptEnd)
    assert sent.detail == "?" * 4000


@pytest.mark.root
def test_a_full_disk_at_the_end_does_not_keep_the_end_back(
    sleeping: Sleeping, small_disk: Path, make_attempt: MakeAttempt
) -> None:
    made = make_attempt(
        sleeping.master.home,
        sleeping.attempt_id,
        entrypoint=["sh", "-c", "echo one; sleep 1; cat /dev/zero > filler; echo two"],
    )
    path = small_disk / "attempts" / str(sleeping.attempt_id)
    path.parent.mkdir()
    directory = AttemptDirectory(Path(shutil.move(made.path, path)))
    assert "cannot be written" in run(directory)
    assert sleeping.exit() == ("exited", 0)
    assert sleeping.trial()["state"] == "COMPLETED"
    assert "one" in sleeping.master.output(sleeping.trial())


@pytest.mark.root
def test_a_full_disk_does_not_keep_a_lost_runners_end_back(
    sleeping: Sleeping, small_disk: Path, fill_disk: Callable[..., None], left: AttemptDirectory,
    write_journal: Callable[..., JournalWriter],
) -> None:  # fmt: skip
    journal = write_journal(left)
    journal.append(AttemptFinished(time=5.0, outcome="completed"))
    journal.close()
    directory = AttemptDirectory(Path(shutil.move(left.path, small_disk / "left")))
    with directory.hold_lock():
        pass
    # The lock's file keeps its page, so that the process id still fits.
    fill_disk(small_disk)
    run(directory, "--ship")
    assert directory.read_end() is None
    assert sleeping.exit() == ("exited", 0)


@pytest.mark.long
def test_what_ends_well_while_it_is_being_killed_has_ended_well(
    shared_master: Any, wait_until: Callable[..., None]
) -> None:
    """Paused, the attempt is told at half the timeout, and finishes all of its work."""
    master = shared_master
    experiment_id = master.create(END_AT_THE_LAST_MOMENT, preemption_timeout=10)
    wait_until(lambda: master.trial(experiment_id)["best_metric"] == 0.5)
    master.post(f"/experiments/{experiment_id}/pause")
    trial = master.wait_for_end(experiment_id)
    [attempt] = trial["attempts"]
    assert (attempt["exit"]["reason"], attempt["exit"]["outcome"]) == ("exited", "completed")
    assert trial["state"] == "COMPLETED"


SAVES_SLOWLY = """
import os, time
import paceline as det
with det.core.init() as context:
    context.train.report_validation_metrics(1, {"loss": 0.5})
    begun = context.info.latest_checkpoint is None
    if begun:
        context.preempt.should_preempt()
        open(BEGUN, "w").close()
    while begun and not context.preempt.should_preempt():
        time.sleep(0.05)
    if begun:
        with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
            # Longer than a runner waits for what a shell has left behind.
            time.sleep(5)
            (path / "state").write_text("1")
"""


@pytest.mark.long
@pytest.mark.parametrize("with_runner", [True, False])
def test_a_system_that_signals_all_processes_of_a_job_costs_no_restart_and_no_checkpoint(
    shared_master: Any, wait_until: Callable[..., None], tmp_path: Path, with_runner: bool
) -> None:
    """The shell of the entrypoint ends at once, and the training process stores a checkpoint."""
    begun = tmp_path / "begun"
    script = SAVES_SLOWLY.replace("BEGUN", repr(str(begun)))
    # Not its last command, so that the shell stays.
    experiment_id = shared_master.create(script, entrypoint="python3 train.py; true")
    wait_until(begun.exists)
    runner = shared_master.runner(shared_master.trial(experiment_id)["attempts"][0]["id"])
    signalled = [runner] if with_runner else []
    for process in [*signalled, *runner.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    trial = shared_master.wait_for_end(experiment_id)
    assert (trial["state"], trial["restarts"]) == ("COMPLETED", 0), trial["error"]
    first, second = trial["attempts"]
    assert (first["exit"]["outcome"], first["exit"]["code"]) == ("preempted", 0)
    assert second["resumed_from"] == trial["latest_checkpoint"] is not None


SAVES_SLOWLY_ON_THREE_RANKS = """
import time
import paceline as det
from paceline import core
distributed = core.DistributedContext.from_torch_distributed()
with det.core.init(distributed=distributed) as context:
    rank = context.distributed.rank
    begun = context.info.latest_checkpoint is None
    if begun:
        context.preempt.should_preempt()
        open(BEGUN + str(rank), "w").close()
    while begun and not context.preempt.should_preempt():
        time.sleep(0.05)
    if begun:
        with context.checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, _):
            time.sleep(5)
            (path / f"state{rank}").write_text("1")
    elif rank == 0:
        context.train.report_validation_metrics(1, {"loss": 0.5})
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "which",
    ["all", *(pytest.param(f"rank {rank}", marks=pytest.mark.slow) for rank in (0, 2))],
)
def test_a_system_that_signals_the_ranks_of_a_job_costs_no_restart_and_no_checkpoint(
    shared_master: Any, wait_until: Callable[..., None], tmp_path: Path, which: str
) -> None:
    begun = tmp_path / "begun"
    script = SAVES_SLOWLY_ON_THREE_RANKS.replace("BEGUN", repr(str(begun)))
    launcher = "python3 -m paceline.launch.torch_distributed --nproc-per-node 3 train.py; true"
    experiment_id = shared_master.create(script, entrypoint=launcher)
    wait_until(lambda: all(Path(f"{begun}{rank}").exists() for rank in range(3)))
    runner = shared_master.runner(shared_master.trial(experiment_id)["attempts"][0]["id"])
    below = runner.children(recursive=True)
    ranks = {}
    for process in below:
        with suppress(psutil.NoSuchProcess):
            if rank := process.environ().get("RANK"):
                ranks[f"rank {rank}"] = process
    for process in [runner, *below] if which == "all" else [ranks[which]]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    trial = shared_master.wait_for_end(experiment_id)
    assert (trial["state"], trial["restarts"]) == ("COMPLETED", 0), trial["error"]
    first, second = trial["attempts"]
    assert (first["exit"]["outcome"], first["exit"]["code"]) == ("preempted", 0)
    assert second["resumed_from"] == trial["latest_checkpoint"] is not None
