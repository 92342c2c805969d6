"""What lies in the place of a home's files: nothing else than a file is opened, or waited for."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline._base.files import NotRegularFileError, read_secret
from paceline._cluster.master.home_directory import Home, HomeUnusableError
from paceline._cluster.master.store.log_files import LogFile
from paceline._cluster.master.upkeep.recovery_records import append_recovery_rows, read_record
from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.code_archive import ArchiveLimits, open_archive
from paceline.client import MasterUnreachableError
from paceline.client._http_session import read_master_file, read_token

FILES = ["token", "attempt_key", "cluster_id", "secrets.json", "pools.yaml", "master.sqlite",
         "master.sqlite-wal", "master.lock", "master.json", "master.log", "restoring"]  # fmt: skip
DIRECTORIES = ["contexts", "attempts", "logs", "files", "checkpoints", "records"]


def hold(home: Path) -> None:
    with Home(home).hold():
        pass


@pytest.mark.parametrize("name", FILES + DIRECTORIES)
def test_a_fifo_in_the_place_of_anything_is_refused_by_name(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    kind = "regular file" if name in FILES else "directory"
    expected = f"{name}' must be a {kind}, but is a FIFO. Hint: move it away"
    with pytest.raises(HomeUnusableError, match=expected):
        hold(tmp_path)
    assert (tmp_path / name).is_fifo()


@pytest.mark.parametrize("name", FILES)
def test_a_directory_in_the_place_of_a_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(HomeUnusableError, match=f"{name}' must be a regular file, but is a dir"):
        hold(tmp_path)


@pytest.mark.parametrize("name", ["master.sqlite", "master.sqlite-wal", "master.lock"])
def test_a_link_in_the_place_of_a_file_that_is_written_in_place_is_refused(
    tmp_path: Path, name: str
) -> None:
    other = tmp_path / "other"
    other.write_text("somebody needs this")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / name).symlink_to(other)
    with pytest.raises(HomeUnusableError, match=f"{name}' must be a regular file, but is a link"):
        hold(tmp_path / "home")
    assert other.read_text() == "somebody needs this"


def test_directories_may_lie_elsewhere_and_what_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "checkpoints").symlink_to(elsewhere)
    (home / "pools.yaml").touch()
    hold(home)
    (home / "logs").symlink_to(tmp_path / "gone")
    (home / "token").mkdir()
    with pytest.raises(HomeUnusableError, match="which is missing") as caught:
        hold(home)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a file of another user needs root")
def test_a_file_of_somebody_else_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    os.chown(tmp_path / "token", 12345, 12345)
    with pytest.raises(HomeUnusableError, match="must belong to the owner of the home"):
        hold(tmp_path)


READERS: dict[str, Callable[[Path], object]] = {
    "attempt.json": lambda path: AttemptDirectory(path.parent).read_spec(),
    "exit.json": lambda path: AttemptDirectory(path.parent).read_end(),
    "process.json": lambda path: AttemptDirectory(path.parent).read_process(),
    "control.json": lambda path: AttemptDirectory(path.parent.parent).run.read_control(),
    "context.tar.gz": lambda path: open_archive(path, ArchiveLimits.from_environment()).__enter__(),
    "attempt-1.jsonl": lambda path: LogFile(path, 1, lambda _: None).load(),
    "record.jsonl": lambda path: list(read_record(path)),
    "written.jsonl": lambda path: append_recovery_rows(path, 1, [], anew=True),
    "token": read_secret,
}


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_is_waited_for_by_no_reader(tmp_path: Path, name: str) -> None:
    place = tmp_path / "run" if name == "control.json" else tmp_path
    place.mkdir(exist_ok=True)
    os.mkfifo(place / name)
    with pytest.raises(NotRegularFileError, match="regular file must be there"):
        READERS[name](place / name)


def test_a_fifo_in_the_place_of_a_runners_lock_is_no_runner(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "runner.lock")
    assert AttemptDirectory(tmp_path).runner_pid() is None


def test_programs_say_that_a_token_is_no_file_and_see_no_master(tmp_path: Path) -> None:
    for name in ("token", "master.json"):
        os.mkfifo(tmp_path / name)
    assert read_master_file(tmp_path) is None
    with pytest.raises(MasterUnreachableError, match="must be readable at .* regular file"):
        read_token(tmp_path)


def test_code_that_is_a_fifo_counts_as_missing_and_can_be_sent_again(
    make_master: Callable[..., Any],
) -> None:
    served = make_master()
    code = b"packed"
    path = f"/contexts/{hashlib.sha256(code).hexdigest()}"
    assert served.http.put(path, content=code).status_code == 204
    file = served.home.path / f"{path[1:]}.tar.gz"
    file.unlink()
    os.mkfifo(file)
    assert served.http.get(path).status_code == 404
    assert served.http.put(path, content=code).status_code == 204
    assert served.http.get(path).content == code
