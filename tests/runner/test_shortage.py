"""Attempts that cannot start for want of inodes, on file systems that have few of them."""

import errno
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.attempt_preparation import is_shortage, judge_start

SCRIPT = """
import paceline as det
with det.core.init() as context:
    context.train.report_validation_metrics(1, {"loss": 0.5})
print("done")
"""


class FewInodes:
    """A mounted file system that runs out of inodes, and gets them back, when it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fillers: list[Path] = []

    def use_up(self, *, but: int = 0) -> None:
        """Leave so many inodes."""
        number = 0
        while True:
            filler = self.path / f"filler-{number}"
            try:
                filler.touch()
            except OSError:
                break
            self._fillers.append(filler)
            number += 1
        for _ in range(but):
            self._fillers.pop().unlink()

    def give_back(self) -> None:
        """Free all that were used up."""
        while self._fillers:
            self._fillers.pop().unlink()


@pytest.fixture
def few_inodes(tmp_path: Path, make_small_disk: Callable[..., Path]) -> FewInodes:
    """Return a file system with two hundred inodes."""
    return FewInodes(make_small_disk(size="64m", nr_inodes=200))


@pytest.fixture
def cramped(tmp_path: Path, master_class: Any, few_inodes: FewInodes) -> Iterator[Any]:
    """Return a master, not yet started, whose attempts lie on that file system.

    Its runners may not be silent for as long as they wait for space.
    """
    made = master_class(tmp_path / "home", 2, runner_timeout_s=6.0)
    made.home.mkdir()
    (made.home / "attempts").symlink_to(few_inodes.path)
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.root
@pytest.mark.parametrize(
    "num_left",
    [0, 8, 11, *(pytest.param(num, marks=pytest.mark.slow) for num in (4, 10, 12, 13))],
)
def test_an_attempt_that_lacks_inodes_starts_once_there_are_some(
    cramped: Any, few_inodes: FewInodes, wait_until: Callable[..., None], num_left: int
) -> None:
    """They are used up before its directory is made, or while its runner prepares it."""
    cramped.start()
    few_inodes.use_up(but=num_left)
    experiment_id = cramped.create(SCRIPT, max_restarts=0)
    wait_until(lambda: has_lacked(cramped, experiment_id))
    few_inodes.give_back()
    trial = cramped.wait_for_end(experiment_id)
    assert (trial["state"], trial["restarts"]) == ("COMPLETED", 0), trial["error"]
    assert trial["best_metric"] == 0.5


def has_lacked(master: Any, experiment_id: int) -> bool:
    """Tell whether something that the attempts of an experiment need has been missing."""
    trial = master.trial(experiment_id)
    ends = [attempt["exit"] and attempt["exit"]["reason"] for attempt in trial["attempts"]]
    lines = master.read(f"/trials/{trial['id']}/logs")["items"]
    text = master.log() + "".join(line["text"] for line in lines)
    return "shortage" in ends or "No space left" in text


FULL = """
import pathlib
import paceline as det
with det.core.init() as context:
    size = 1 << 16
    with open("../../filler", "ab", buffering=0) as filler:
        while size:
            try:
                filler.write(bytes(size))
            except OSError:
                size //= 2
    print("on a full disk")
pathlib.Path(PRINTED).touch()
"""


@pytest.mark.long
@pytest.mark.root
@pytest.mark.parametrize("has_space_again", [True, False])
def test_output_on_a_full_disk_arrives_or_is_told_to_be_lost(
    cramped: Any, few_inodes: FewInodes, wait_until: Callable[..., None], tmp_path: Path,
    has_space_again: bool,
) -> None:  # fmt: skip
    cramped.start()
    printed = tmp_path / "printed"
    experiment_id = cramped.create(FULL.replace("PRINTED", repr(str(printed))), max_restarts=0)
    wait_until(printed.exists)
    if has_space_again:
        (few_inodes.path / "filler").unlink()
    trial = cramped.wait_for_end(experiment_id)
    assert trial["state"] == "COMPLETED", trial["error"]
    lines = [text for text in cramped.output(trial) if "journal" not in text]
    error = trial["attempts"][0]["exit"]["error"] or ""
    if has_space_again:
        assert (lines, error) == (["on a full disk"], "")
    else:
        assert lines == []
        assert "sign of life" not in cramped.log()
        assert "of the attempt's output could not be kept, because its disk was full" in error


FILLS = """
import paceline as det
with det.core.init() as context:
    context.train.report_validation_metrics(1, {"loss": 0.5})
    with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
        (path / "weights").write_bytes(bytes(2_000_000))
"""
LAUNCHER = "python3 -m paceline.launch.torch_distributed --nproc-per-node 1 python3 train.py"


@pytest.mark.long
@pytest.mark.root
@pytest.mark.parametrize("entrypoint", ["python3 train.py", LAUNCHER])
def test_a_disk_that_is_full_while_a_trial_trains_may_pass(
    shared_master: Any, small_disk: Path, entrypoint: str
) -> None:
    """Restarts count, as the code may have filled it; the error does not blame the code."""
    experiment_id = shared_master.create(
        FILLS, entrypoint=entrypoint, checkpoint_storage=str(small_disk), max_restarts=0
    )
    trial = shared_master.wait_for_end(experiment_id)
    [attempt] = trial["attempts"]
    assert "No space left on device" in trial["error"]
    assert (attempt["exit"]["reason"], attempt["exit"]["kind"]) == ("exited", "transient")
    assert (trial["state"], trial["error_kind"]) == ("ERROR", "transient")
    assert "max_restarts is 0" in trial["error"]


@pytest.mark.long
@pytest.mark.root
@pytest.mark.parametrize("num_left", [0, 1, 2])
def test_a_runner_that_lacks_inodes_says_so_or_leaves_the_attempt_to_be_tried_again(
    shared_master: Any, few_inodes: FewInodes, make_attempt: Callable[..., AttemptDirectory],
    wait_until: Callable[..., None], num_left: int,
) -> None:  # fmt: skip
    experiment_id = shared_master.create("import time\ntime.sleep(120)")
    wait_until(lambda: shared_master.trial(experiment_id)["attempts"])
    attempt_id = shared_master.trial(experiment_id)["attempts"][0]["id"]
    made = make_attempt(shared_master.home, attempt_id)
    path = few_inodes.path / str(attempt_id)
    directory = AttemptDirectory(Path(shutil.move(made.path, path)))
    few_inodes.use_up(but=num_left)
    command = [sys.executable, "-m", "paceline._cluster.runner", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert "No space left on device" in done.stderr
    attempt = shared_master.trial(experiment_id)["attempts"][0]
    if done.returncode == 0:
        assert attempt["exit"]["reason"] == "shortage"
        assert "No space left on device" in attempt["exit"]["error"]
    else:
        assert attempt["exit"] is None
        assert not directory.was_started
    shared_master.post(f"/experiments/{experiment_id}/kill")


def chained(error: BaseException) -> ValueError:
    """Return an error that was raised from another one."""
    outer = ValueError("outer")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((OSError(number, "x"), True) for number in (
            errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)),
        *((OSError(number, "x"), False) for number in (
            errno.ENOENT, errno.EACCES, errno.EROFS, errno.EIO, errno.ENOTDIR)),
        (MemoryError(), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("something else"), False),
        (chained(OSError(errno.ENOSPC, "x")), True),
        (chained(OSError(errno.ENOENT, "x")), False),
        (ValueError("x"), False),
    ],
)  # fmt: skip
def test_a_shortage_is_told_apart_from_what_will_not_pass(
    error: BaseException, expected: bool
) -> None:
    assert is_shortage(error) is expected
    assert (judge_start(error)[0] is ExitReason.SHORTAGE) is expected


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "x"), "transient"),
        (chained(OSError(errno.ESTALE, "x")), "transient"),
        (TimeoutError(errno.ETIMEDOUT, "x"), "transient"),
        (OSError(errno.ENOENT, "x"), "permanent"),
        (chained(EOFError("an archive that is cut")), "permanent"),
    ],
)
def test_an_error_of_a_start_has_a_kind(error: BaseException, kind: str) -> None:
    assert judge_start(error)[1].value == kind


@pytest.mark.parametrize(
    "changed",
    [
        {"environment": {"python": "/no/such/python"}},
        {"environment": {"working_dir": "/no/such/directory"}},
    ],
)
def test_a_configuration_that_cannot_start_is_the_users_error(
    shared_master: Any, changed: dict[str, Any]
) -> None:
    trial = shared_master.wait_for_end(shared_master.create("", max_restarts=2, **changed))
    [attempt] = trial["attempts"]
    assert (attempt["exit"]["reason"], attempt["exit"]["kind"]) == ("start_failed", "user")
    assert (trial["state"], trial["error_kind"], trial["retries"]) == ("ERROR", "user", 0)
