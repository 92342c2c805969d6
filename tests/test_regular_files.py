"""Files in directories that a stranger can write to."""

import os
import socket
from pathlib import Path

import pytest

from paceline._base.files import (
    NotRegularFileError,
    open_directory_below,
    open_regular_below,
    opened_directory,
    read_regular,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    secret = tmp_path / "secret"
    secret.write_text("token")
    root = tmp_path / "shared"
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").write_text("content")
    (root / "a/link").symlink_to(secret)
    (root / "up").symlink_to(tmp_path)
    os.mkfifo(root / "fifo")
    return root


def test_a_regular_file_below_a_directory_is_read(root: Path) -> None:
    with opened_directory(root) as directory, open_regular_below(directory, "a/b/file") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize("name", ["a/link", "up/secret", "fifo", "a", "socket"])
def test_links_and_special_files_are_refused_without_waiting(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as listening, opened_directory(root) as directory:
        listening.bind("socket")
        with pytest.raises(NotRegularFileError):
            open_regular_below(directory, name)


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/passwd", "a\0b"])
def test_paths_that_leave_the_directory_are_refused(root: Path, name: str) -> None:
    with opened_directory(root) as directory:
        with pytest.raises(ValueError, match="stay below its directory"):
            open_regular_below(directory, name)
        with pytest.raises(ValueError, match="stay below its directory"):
            os.close(open_directory_below(directory, name))


def test_missing_files_are_told_as_such(root: Path) -> None:
    with opened_directory(root) as directory:
        with pytest.raises(FileNotFoundError, match="a/none"):
            open_regular_below(directory, "a/none")
        with pytest.raises(NotADirectoryError):
            open_regular_below(directory, "a/b/file/below")


def test_files_of_other_owners_are_refused(root: Path) -> None:
    with opened_directory(root) as directory:
        with pytest.raises(NotRegularFileError, match="must belong to one of the users"):
            open_regular_below(directory, "a/b/file", owners=[os.getuid() + 1])
        open_regular_below(directory, "a/b/file", owners=[os.getuid()]).close()


def test_the_size_is_limited(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(11))

    assert read_regular(tmp_path / "file", max_bytes=11) == bytes(11)
    with pytest.raises(NotRegularFileError, match="at most 10 bytes"):
        read_regular(tmp_path / "file", max_bytes=10)


def test_no_descriptor_is_left_open(root: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    with opened_directory(root) as directory:
        for name in ("a/link", "up/secret", "fifo", "a", "a/none"):
            with pytest.raises(OSError, match=r"."):
                open_regular_below(directory, name)
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give links away")
def test_links_of_other_users_lead_to_nothing_of_this_users_own(tmp_path: Path) -> None:
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    own.mkdir()
    (own / "file").write_text("secret")
    foreign.mkdir()
    os.chown(foreign, 1000, 1000)
    links = {name: tmp_path / name for name in ("mine", "theirs", "to_theirs", "through")}
    links["mine"].symlink_to(own)
    links["theirs"].symlink_to("own")
    links["to_theirs"].symlink_to(foreign)
    links["through"].symlink_to("theirs")
    for name in ("theirs", "to_theirs"):
        os.lchown(links[name], 1000, 1000)

    for path in (own, links["mine"], links["to_theirs"]):
        with opened_directory(path):
            pass
    for name in ("theirs", "through"):
        with pytest.raises(NotRegularFileError, match="No link of another user"):
            opened_directory(links[name]).__enter__()
    with pytest.raises(NotRegularFileError, match="No link of another user"):
        opened_directory(links["theirs"] / "../own").__enter__()
    links["loop"] = tmp_path / "loop"
    links["loop"].symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        opened_directory(links["loop"]).__enter__()
    with pytest.raises(NotADirectoryError):
        opened_directory(own / "file").__enter__()
