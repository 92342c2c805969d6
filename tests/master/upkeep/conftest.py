"""Homes that a release has stored, and processes that die at a named point."""

import os
import shutil
import signal
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from paceline import faults
from paceline._cluster.master.store.recovery_rows import RECORDS_BEGUN

STORED = Path(__file__).parents[2] / "stored"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home without records: two ended searches, a paused trial, code, checkpoints."""
    with tarfile.open(STORED / "home_13.tar.xz") as archive:
        archive.extractall(tmp_path / "home", filter="data")
    # As if it had been made here.
    with closing(sqlite3.connect(tmp_path / "home/master.sqlite")) as connection, connection:
        storage = str(tmp_path / "home/checkpoints")
        connection.execute("UPDATE checkpoints SET storage = ?", (storage,))
        connection.execute("DELETE FROM meta WHERE key = ?", (RECORDS_BEGUN,))
    shutil.rmtree(tmp_path / "home/records")
    return tmp_path / "home"


@pytest.fixture
def die_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], None]:
    """Return what does something in a process of its own, which a SIGKILL at a point ends."""

    def die(point: str, action: Callable[[], object]) -> None:
        with monkeypatch.context() as patch:
            patch.setenv(faults.FAULT_VARIABLE, point)
            pid = os.fork()
            if pid == 0:
                try:
                    action()
                finally:
                    os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"{point} was not reached"
        assert os.WTERMSIG(status) == signal.SIGKILL

    return die
