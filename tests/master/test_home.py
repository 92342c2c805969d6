"""Which homes a master takes over: those whose folders belong to their database."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.master.home_directory import Home, LostDatabaseError
from paceline._cluster.master.master import Master
from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.store.row_ids_and_counts import raise_ids
from paceline._cluster.runner.attempt_directory import AttemptDirectory


def load(home: Path) -> None:
    """Make a home with a database that knows the trials and attempts 1 and 2."""
    database = Database(home / "master.sqlite")
    newest = {tables.trials: 2, tables.attempts: 2}
    database.write(lambda transaction: raise_ids(transaction.connection, newest)).result()
    database.close()


def begin(home: Path) -> Master:
    """Open a home as a master does when it starts."""
    assign_slots = Home(home)
    assign_slots.prepare()
    return Master(assign_slots, ["cpu"])


def open_and_close(home: Path) -> str:
    """Open a home as a master does, and return its identity."""
    master = begin(home)
    master.database.close()
    return master.home.cluster_id


def test_a_new_home_is_taken_over_again_and_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert len({open_and_close(home) for _ in range(3)}) == 1


def test_a_home_that_was_never_used_may_lose_its_database(tmp_path: Path) -> None:
    home = tmp_path / "home"
    open_and_close(home)
    (home / "master.sqlite").unlink()
    open_and_close(home)


def test_a_context_that_no_experiment_uses_is_known(
    make_master: Callable[..., Any], tmp_path: Path
) -> None:
    """Its experiment may have been refused, or its client killed."""
    served = make_master()
    code = b"packed"
    digest = hashlib.sha256(code).hexdigest()
    for _ in range(2):
        assert served.http.put(f"/contexts/{digest}", content=code).status_code == 204
    crashed = Path(shutil.copytree(served.home.path, tmp_path / "crashed"))
    open_and_close(crashed)
    (crashed / "contexts" / f"{'0' * 64}.tar.gz").write_bytes(b"unknown")
    with pytest.raises(LostDatabaseError, match="1 context in 'contexts'"):
        open_and_close(crashed)


def test_a_home_whose_experiments_were_deleted_is_taken_over(
    make_master: Callable[..., Any], tmp_path: Path
) -> None:
    served = make_master()
    served.create()
    served.schedule()
    served.attempt(1, "logs", entries=[[0, 0.0, 0, "stdout", None, "hello"]])
    served.http.post("/experiments/1/kill")
    for number in (1, 2):
        served.attempt(number, "end", reason="killed", code=None, signal=9, time=1.0, detail=None)
    assert served.http.delete("/experiments/1").status_code == 200
    # What an earlier deletion could not remove.
    (served.home.logs_path / "trial-2").mkdir()
    (served.home.attempts_path / "2.set_aside.jsonl").touch()
    open_and_close(Path(shutil.copytree(served.home.path, tmp_path / "copy")))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("logs/trial-3", "the log of trial 3 in 'logs'"),
        ("logs/trial-30", "the logs of trials 30 to 31 in 'logs'"),
        ("attempts/3", "attempt 3 in 'attempts'"),
        ("attempts/77.set_aside.jsonl", "attempt 77 in 'attempts'"),
    ],
)
def test_an_older_database_than_the_folders_is_refused(
    tmp_path: Path, name: str, found: str
) -> None:
    load(tmp_path)
    for existing in ("attempts/1", "logs/trial-1", "checkpoints/c", name):
        (tmp_path / existing).mkdir(parents=True)
    if name.endswith("30"):
        (tmp_path / "logs" / "trial-31").mkdir()
    with pytest.raises(LostDatabaseError, match=found) as caught:
        open_and_close(tmp_path)
    assert "does not know them" in str(caught.value)
    assert "checkpoint" not in str(caught.value).split("Hint")[0]


def test_only_unknown_files_are_set_aside(tmp_path: Path) -> None:
    load(tmp_path)
    for name in ("attempts/1", "attempts/9", "logs/trial-1", "logs/trial-9", "checkpoints/c"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "attempts" / "newest").write_text("12")
    with pytest.raises(LostDatabaseError, match="attempts 9 to 12 in 'attempts'"):
        open_and_close(tmp_path)
    Home(tmp_path).prepare(set_aside=True)
    open_and_close(tmp_path)
    (aside,) = (tmp_path / "set_aside").iterdir()
    moved = {str(path.relative_to(aside)) for path in aside.glob("*/*")}
    assert moved == {"attempts/9", "attempts/newest", "logs/trial-9"}
    for name in ("attempts/1", "logs/trial-1", "checkpoints/c"):
        assert (tmp_path / name).exists()


def test_files_beside_attempts_have_no_runner(tmp_path: Path) -> None:
    (tmp_path / "2.set_aside.jsonl").touch()
    assert AttemptDirectory(tmp_path / "2.set_aside.jsonl").runner_pid() is None


@pytest.mark.root
def test_attempts_on_another_disk_are_set_aside(
    tmp_path: Path, make_small_disk: Callable[..., Path]
) -> None:
    disk = make_small_disk(size="1m")
    home = tmp_path / "home"
    home.mkdir()
    (home / "attempts").symlink_to(disk)
    (disk / "1").mkdir()
    (disk / "1" / "attempt.json").write_text("{}")
    Home(home).prepare(set_aside=True)
    (aside,) = (home / "set_aside").iterdir()
    assert (aside / "attempts" / "1" / "attempt.json").read_text() == "{}"
    assert not any(disk.iterdir())
