"""A storage that some machines see in another way; `tests/system` has the real thing."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.core import _run_storage as _shared_storage
from paceline.core._run_storage import check_shared_storage
from paceline.storage import storage_from


class Rank:
    """The exchanges of one of three ranks, which are threads here."""

    cross_size = 3

    def __init__(self, rank: int, values: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self._values = values
        self._barrier = barrier

    def allgather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(60)
        found = [self._values[rank] for rank in range(3)]
        self._barrier.wait(60)
        return found

    def broadcast(self, value: Any) -> Any:
        return self.allgather(value)[0]


def check_on_all(root: Path) -> dict[int, BaseException | None]:
    """Have three ranks of three machines check; return what each raised."""
    raised: dict[int, BaseException | None] = {}
    values: dict[int, Any] = {}
    barrier = threading.Barrier(3)

    def check(rank: int) -> None:
        distributed: Any = Rank(rank, values, barrier)
        try:
            check_shared_storage(storage_from(root), distributed)
            raised[rank] = None
        except Exception as error:
            raised[rank] = error

    ranks = [threading.Thread(target=check, args=[rank]) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return raised


def test_a_shared_directory_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    assert check_on_all(tmp_path / "store") == {0: None, 1: None, 2: None}
    assert os.listdir(tmp_path / "store") == []


def test_a_file_that_shows_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def is_there(path: Path) -> bool:
        looks.append(path)
        return len(looks) > 20

    monkeypatch.setattr(_shared_storage, "_is_there", is_there)
    assert check_on_all(tmp_path) == {0: None, 1: None, 2: None}


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_a_file_system_that_fails_is_one_that_is_not_shared(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Any) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(_shared_storage, "_PATIENCE_S", 0.2)
    monkeypatch.setattr("paceline.core._run_storage.os.listdir", fail)
    # It takes each error of the system for an absence.
    monkeypatch.setattr("paceline.core._run_storage.os.path.exists", lambda path: False)
    for error in check_on_all(tmp_path).values():
        assert isinstance(error, ValueError)
        assert "rank(s) 0, 1, 2 do not see" in str(error)


def test_a_directory_below_one_that_nobody_may_list_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(_shared_storage, "_PATIENCE_S", 0.2)
    monkeypatch.setattr("paceline.core._run_storage.os.listdir", refuse)
    assert check_on_all(tmp_path / "store") == {0: None, 1: None, 2: None}


def test_a_mark_that_cannot_be_removed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "unlink", fail)
    assert check_on_all(tmp_path) == {0: None, 1: None, 2: None}
