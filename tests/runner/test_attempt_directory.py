import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline._cluster.messages.runner_messages import AttemptEnd
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner import attempt_processes as _attempt_processes
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.attempt_processes import AttemptProcesses

MakeAttempt = Callable[..., AttemptDirectory]

HOLD = """
import sys
from pathlib import Path
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner import attempt_processes as _attempt_processes
from paceline._cluster.runner.attempt_processes import AttemptProcesses
with AttemptDirectory(Path(sys.argv[1])).hold_lock() as is_mine:
    print(is_mine, flush=True)
    sys.stdin.readline()
"""


def test_the_specification_comes_back(make_attempt: MakeAttempt) -> None:
    directory = make_attempt(entrypoint="python3 train.py", variables={"A": "ü"}, gpu_ids=["0"])
    spec = AttemptDirectory(directory.path).read_spec()
    assert (spec.entrypoint, spec.variables, spec.gpu_ids) == (
        "python3 train.py", {"A": "ü"}, ["0"],
    )  # fmt: skip


def test_an_attempt_is_prepared_once_specification_and_run_directory_are_there(
    tmp_path: Path, make_attempt: MakeAttempt
) -> None:
    assert not AttemptDirectory(tmp_path / "none").is_prepared
    directory = make_attempt()
    assert directory.is_prepared
    (directory.run.path / "run.json").unlink()
    assert not directory.is_prepared


@pytest.mark.parametrize("lost", ["attempt.json", "run/run.json"])
def test_what_a_power_cut_left_of_a_preparation_is_prepared_again(
    lost: str, tmp_path: Path, make_attempt: MakeAttempt
) -> None:
    directory = make_attempt()
    spec, info = directory.read_spec(), directory.run.read_info()
    (directory.path / lost).unlink()
    AttemptProcesses(directory.path.parent, tmp_path).prepare(spec, info)
    assert directory.is_prepared
    assert (directory.read_spec(), directory.run.read_info()) == (spec, info)


def test_what_has_been_started_is_not_prepared_again(
    tmp_path: Path, make_attempt: MakeAttempt
) -> None:
    directory = make_attempt()
    spec, info = directory.read_spec(), directory.run.read_info()
    (directory.run.path / "journal" / "a1.g0.r0").mkdir(parents=True)
    (directory.path / "attempt.json").unlink()
    with pytest.raises(FileExistsError, match="is a run directory already"):
        AttemptProcesses(directory.path.parent, tmp_path).prepare(spec, info)
    assert (directory.run.path / "journal" / "a1.g0.r0").exists()


def test_an_attempt_with_a_journal_was_started(make_attempt: MakeAttempt) -> None:
    """A power cut may leave the journal, which is forced to disk, and not the mark."""
    directory = make_attempt()
    assert not directory.was_started
    (directory.run.path / "journal" / "a1.g0.r0").mkdir(parents=True)
    assert directory.was_started


def test_a_start_removes_secrets_and_nothing_else(
    make_attempt: MakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(str(path))

    directory = make_attempt()
    directory.write_secrets({"A": "b"})
    directory.mark_started()
    assert not (directory.path / "secrets.json").exists()
    monkeypatch.setattr(Path, "unlink", refuse)
    directory.mark_started()
    assert directory.was_started


def test_marks_stay(make_attempt: MakeAttempt) -> None:
    directory = make_attempt()
    assert not directory.was_started
    assert directory.read_process() is None
    assert directory.read_end() is None
    directory.mark_started()
    directory.mark_started()
    directory.write_process(123, 45.5)
    end = AttemptEnd(reason=ExitReason.EXITED, code=3, signal=None, time=1.5, detail="no")
    directory.write_end(end)
    again = AttemptDirectory(directory.path)
    assert again.was_started
    assert again.read_process() == (123, 45.5)
    assert again.read_end() == end


def test_everything_is_private(make_attempt: MakeAttempt) -> None:
    directory = make_attempt()
    directory.mark_started()
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.run.path.stat().st_mode) == 0o700
    for name in ("attempt.json", "started"):
        assert stat.S_IMODE((directory.path / name).stat().st_mode) & 0o077 == 0


def test_one_holder_at_a_time_and_its_process_is_known(make_attempt: MakeAttempt) -> None:
    directory = make_attempt()
    assert directory.runner_pid() is None
    with directory.hold_lock() as is_mine:
        assert is_mine
        assert directory.runner_pid() == os.getpid()
        with AttemptDirectory(directory.path).hold_lock() as is_mine_too:
            assert not is_mine_too
        assert directory.runner_pid() == os.getpid()
    assert directory.runner_pid() is None
    with directory.hold_lock() as is_mine:
        assert is_mine


def test_a_runner_that_ends_before_a_signal_reaches_it_is_no_error(
    make_attempt: MakeAttempt,
) -> None:
    directory = make_attempt()
    processes = AttemptProcesses(directory.path.parent, directory.path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with directory.hold_lock():
        # As if it had ended a moment after it was found.
        (directory.path / "runner.lock").write_text(str(ended.pid))
        assert directory.runner_pid() == ended.pid
        processes.kill_runner(1)
        processes.signal_runner(1, signal.SIGTERM)


def test_a_runner_that_is_not_wanted_and_stays_is_killed(
    make_attempt: MakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_attempt()
    root = directory.path.parent
    processes = AttemptProcesses(root, root)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        for keep in ({1}, set()):
            processes.clean(keep)
            assert process.poll() is None
        monkeypatch.setattr(_attempt_processes, "_LEAVE_S", 0.0)
        processes.clean(set())
        assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_lock_ends_with_its_process_however_it_ends(
    make_attempt: MakeAttempt, is_killed: bool
) -> None:
    directory = make_attempt()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"True\n"
        assert directory.runner_pid() == process.pid
        with directory.hold_lock() as is_mine:
            assert not is_mine
        if is_killed:
            process.kill()
        else:
            process.stdin.close()
            process.stdin = None
        process.wait(60)
    assert directory.runner_pid() is None
    with directory.hold_lock() as is_mine:
        assert is_mine
