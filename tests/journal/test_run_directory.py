import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from paceline._base.files import write_atomically
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import Control, JournalKey, RunInfo, TrialInfo
from paceline.journal import NotARunDirectoryError, RunDirectory, RunVersionError, StatusReported

INFO = RunInfo(
    run_id="r1",
    name="train",
    created=12.5,
    trial=TrialInfo(
        trial_id=3, experiment_id=2, trial_seed=1, hparams={"lr": 0.1}, config={"name": "x"}
    ),
    checkpoint_storage="/somewhere",
    slot_ids=[0, 1],
)


def test_run_info_is_read_as_it_was_written(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", INFO)
    assert RunDirectory.open(tmp_path / "run").read_info() == INFO


def test_run_directory_is_private(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", INFO)
    assert run.path.stat().st_mode & 0o777 == 0o700


def test_run_directory_is_made_only_once(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", INFO)
    with pytest.raises(FileExistsError, match="is a run directory already"):
        RunDirectory.create(tmp_path / "run", INFO)


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b'{"version":'])
def test_other_directory_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(NotARunDirectoryError, match="must be a Paceline run directory"):
        RunDirectory.open(tmp_path)


def test_run_directory_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(msgspec.json.encode({"version": 2, "other": 1}))
    with pytest.raises(RunVersionError, match="format version 1, but has 2"):
        RunDirectory.open(tmp_path)


def test_control_has_defaults_until_it_is_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", INFO)
    assert run.read_control() == Control()
    control = Control(should_preempt=True, operation_length=4, best_validation={"$float": "nan"})
    run.write_control(control)
    assert run.read_control() == control


def test_control_is_never_seen_half_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", INFO)
    run.write_control(Control(operation_length=0))
    is_done = threading.Event()

    def write() -> None:
        for length in range(1000):
            run.write_control(Control(operation_length=length))
        is_done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = [0]
    while not is_done.is_set():
        seen.append(run.read_control().operation_length or 0)
    thread.join()
    assert seen == sorted(seen)


def test_atomic_write_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(OSError, match="target"):
        write_atomically(tmp_path / "target", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_journals_are_listed_in_order(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", INFO)
    assert run.journal_keys() == []
    keys = [JournalKey(0, 0, 0), JournalKey(0, 0, 10), JournalKey(0, 2, 1), JournalKey(10, 0, 0)]
    for key in reversed(keys):
        writer = JournalWriter(run.journal_path(key))
        writer.append(StatusReported(time=0, status=key.directory_name))
        writer.close()
    (run.path / "journal" / "notes").mkdir()
    assert run.journal_keys() == keys
    (entry,) = run.reader(keys[2])
    assert entry.decode() == StatusReported(time=0, status="a0.g2.r1")


def test_attempt_lock_tells_that_a_run_is_alive(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", INFO)
    assert not run.is_alive()
    with run.hold_attempt_lock() as is_ours:
        assert is_ours
        assert run.is_alive()
        with run.hold_attempt_lock() as is_ours_too:
            assert not is_ours_too
    assert not run.is_alive()


def test_attempt_lock_ends_with_a_killed_process(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    run = RunDirectory.create(tmp_path / "run", INFO)
    code = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from paceline.journal import RunDirectory
with RunDirectory(Path(sys.argv[1])).hold_attempt_lock():
    print("held", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, env=clean_environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert run.is_alive()
    process.kill()
    process.wait()
    process.stdout.close()
    assert not run.is_alive()


def test_ranks_keep_a_run_alive_without_their_chief(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", INFO)
    with run.hold_rank_lock():
        with run.hold_rank_lock():
            assert run.is_alive()
        assert run.is_alive()
    assert not run.is_alive()


def test_a_rank_that_does_not_see_the_run_directory_goes_on(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "on another machine").hold_rank_lock():
        pass


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_durable_file_and_its_name_are_on_disk_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_durable: bool
) -> None:
    """A file that is synced before it has its name, and a directory after."""
    path = tmp_path / "file"
    synced = []

    def fsync(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, b"content", is_durable=is_durable)
    assert path.read_bytes() == b"content"
    assert path.stat().st_mode & 0o777 == 0o600
    assert synced == ([(False, False), (True, True)] if is_durable else [])


def test_a_durable_write_that_fails_leaves_the_previous_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fsync(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(path, b"new", is_durable=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_many_that_look_at_once_do_not_take_each_other_for_the_run(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", INFO)
    with run.hold_attempt_lock():
        pass
    begin = threading.Barrier(8)

    def look() -> bool:
        begin.wait()
        return any(run.is_alive() for _ in range(200))

    with ThreadPoolExecutor(8) as threads:
        looks = [threads.submit(look) for _ in range(8)]
    assert not any(one.result() for one in looks)
