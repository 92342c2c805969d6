"""Homes whose database was deleted, emptied or robbed of its newest part: nothing starts there."""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.master.home_directory import Home, LostDatabaseError
from paceline._cluster.master.upkeep.check import check, fix
from paceline.client import ApiError

SCRIPT = """
import time
import paceline as det

with det.core.init() as context:
    print("hello", flush=True)
    with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
        (path / "state").write_text("1")
    time.sleep(120)
"""
REPORTS = """
import time
import paceline

with paceline.core.init() as context:
    for step in range(1, NUM + 1):
        context.train.report_validation_metrics(step, {"loss": 1.0 / step})
        time.sleep(SLEEP)
"""
CONFIG = {
    "name": "left", "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss"},
}  # fmt: skip
FOUND = {
    "contexts": "1 context in 'contexts'",
    "attempts": "attempt 1 in 'attempts'",
    "logs": "the log of trial 1 in 'logs'",
    "checkpoints": "1 checkpoint in 'checkpoints'",
    "records": "experiment 1 in 'records'",
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, master_class: Any) -> Path:
    """Return a home of a master that was killed, with an attempt, a log line and a checkpoint."""
    root = tmp_path_factory.mktemp("left")
    (root / "code").mkdir()
    (root / "code" / "train.py").write_text(SCRIPT)
    master = master_class(root / "home", 1).start()
    client = master.client()
    experiment = client.create_experiment(CONFIG, root / "code")
    deadline = time.monotonic() + 60
    try:
        while not (
            (trials := experiment.trials())
            and trials[0].checkpoints()
            and any(line.text == "hello" for line in trials[0].iter_logs())
        ):
            assert time.monotonic() < deadline, master.log()
            time.sleep(0.05)
    finally:
        master.close()
    return master.home


@pytest.fixture
def copy(left: Path, tmp_path: Path) -> Path:
    """Return a copy of that home."""
    return Path(shutil.copytree(left, tmp_path / "home"))


def delete(database: Path) -> None:
    """Delete the database and all that belongs to it."""
    for name in ("", "-wal", "-shm"):
        database.with_name(database.name + name).unlink(missing_ok=True)


def delete_file(database: Path) -> None:
    """Delete the database file alone."""
    database.unlink()


def empty(database: Path) -> None:
    """Leave the database file without a byte."""
    database.write_bytes(b"")


def delete_log(database: Path) -> None:
    """Delete what was written since the database was made."""
    for name in ("-wal", "-shm"):
        database.with_name(database.name + name).unlink()


LOSSES = {
    delete: "is missing", delete_file: "is missing", empty: "is empty",
    delete_log: "does not know them",
}  # fmt: skip


def content(home: Path) -> dict[str, bytes]:
    """Return the files of a home, without what any look at a database makes."""
    return {
        str(path.relative_to(home)): path.read_bytes()
        for path in home.rglob("*")
        if path.is_file() and not path.name.endswith("-shm")
    }


@pytest.mark.parametrize("kind", [*FOUND, "all"])
@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_a_home_without_its_database_is_refused_and_left_as_it_is(
    copy: Path, lose: Callable[[Path], None], kind: str
) -> None:
    for other in FOUND:
        if kind not in (other, "all"):
            shutil.rmtree(copy / other)
    lose(copy / "master.sqlite")
    before = content(copy)
    with pytest.raises(LostDatabaseError) as caught:
        Home(copy).prepare()
    text = str(caught.value)
    assert LOSSES[lose] in text
    for other, found in FOUND.items():
        assert (found in text) == (kind in (other, "all")), text
    assert "Hint: restore the database" in text
    after = content(copy)
    after.pop("master.sqlite-wal", None)
    before.pop("master.sqlite-wal" if lose is delete_log else "", None)
    assert {name: after.get(name) for name in before if name in after} == {
        name: data for name, data in before.items() if name in after
    }
    assert before.keys() - after.keys() <= {"master.sqlite-wal"}
    # What the message offers: without the folders, the home is one to begin with.
    for folder in FOUND:
        if (copy / folder).exists():
            (copy / folder).rename(copy.parent / folder)
    if lose in (delete_file, empty):
        (copy / "master.sqlite-wal").unlink()
    Home(copy).prepare()


def test_the_log_of_a_deleted_database_is_kept(copy: Path) -> None:
    """It may be all that there is of the newest changes."""
    (copy / "master.sqlite").unlink()
    log = (copy / "master.sqlite-wal").read_bytes()
    for folder in FOUND:
        shutil.rmtree(copy / folder)
    with pytest.raises(LostDatabaseError, match="the database's log 'master.sqlite-wal'"):
        Home(copy).prepare()
    assert (copy / "master.sqlite-wal").read_bytes() == log


def test_a_master_refuses_to_start_and_says_why(
    copy: Path, make_master: Callable[..., Any]
) -> None:
    (copy / "master.sqlite").write_bytes(b"")
    (copy / "master.version-2.sqlite").write_bytes(b"a copy")
    (copy / "master.log").unlink()
    master = make_master()
    assert master.home == copy
    master.start()
    assert master.wait(60) == 1
    told = " ".join(master.log().split())
    assert "Traceback" not in told
    assert "attempt 1 in 'attempts'" in told
    assert "master.version-2.sqlite" in told
    assert (copy / "attempts" / "1" / "attempt.json").exists()


def test_a_home_with_its_whole_database_goes_on(copy: Path) -> None:
    Home(copy).prepare()


def test_an_attempt_that_left_nothing_but_its_number_is_missed(copy: Path) -> None:
    """It printed nothing and stored nothing, and its directory was removed when it had ended."""
    delete_log(copy / "master.sqlite")
    for folder in ("contexts", "logs", "checkpoints"):
        shutil.rmtree(copy / folder)
    shutil.rmtree(copy / "attempts" / "1")
    with pytest.raises(LostDatabaseError, match="attempt 1 in 'attempts'"):
        Home(copy).prepare()


def overwrite(database: Path) -> None:
    """Leave something else in the place of the database."""
    delete(database)
    database.write_bytes(b"no database at all " * 500)


def damage_pages(database: Path) -> None:
    """Damage all pages but the first, which alone says that the file is a database."""
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    with database.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(database.stat().st_size - 4096))


def up(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Start a master in the background by the command line, and return when it is there."""
    command = [sys.executable, "-m", "paceline.cli", "up", "--detach", "--port", "0"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return subprocess.run(
        [*command, "--slots", "1", "--home", str(home), *options],
        capture_output=True,
        text=True,
        env=environment,
    )


def down(home: Path) -> str:
    """Stop such a master, and return what was told."""
    command = [sys.executable, "-m", "paceline.cli", "down", "--timeout", "0", "--home", str(home)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return ended.stdout + ended.stderr


def below(root: Path) -> dict[str, bytes]:
    """Return the files in the folders of a home, or in a directory with the same layout."""
    names = content(root).items()
    return {name: data for name, data in names if name.split("/")[0] in FOUND and "/" in name}


@pytest.mark.long
@pytest.mark.parametrize("damage", [overwrite, damage_pages])
def test_a_damaged_database_is_refused_and_named(
    copy: Path, damage: Callable[[Path], None]
) -> None:
    damage(copy / "master.sqlite")
    before = content(copy)
    refused = up(copy)
    assert refused.returncode == 1
    told = " ".join(refused.stderr.split())
    assert f"Error: '{copy / 'master.sqlite'}' must be a Paceline database" in told
    assert "restore it from a backup" in told
    assert "Traceback" not in (copy / "master.log").read_text()
    after = content(copy)
    for files in (before, after):
        files.pop("master.log")
        files.pop("master.sqlite-wal", None)
    assert {name for name in before if before[name] != after.get(name)} <= {"master.lock"}


@pytest.mark.parametrize("lose", [*LOSSES, overwrite, damage_pages], ids=lambda f: f.__name__)
def test_what_the_database_does_not_know_is_set_aside_when_told_so(
    copy: Path, lose: Callable[[Path], None]
) -> None:
    lose(copy / "master.sqlite")
    before = below(copy)
    assert before
    for _ in range(2):
        Home(copy).prepare(set_aside=True)
        (aside,) = (copy / "set_aside").iterdir()
        # A database that is there knows its users.
        kept = below(copy)
        assert set(kept) == ({"records/accounts.jsonl"} if lose is delete_log else set())
        assert below(aside) | kept == before
    Home(copy).prepare()


@pytest.mark.long
def test_a_master_starts_afresh_beside_what_it_set_aside(copy: Path, master_class: Any) -> None:
    damage_pages(copy / "master.sqlite")
    before = below(copy)
    started = up(copy, "--set-aside")
    assert started.returncode == 0, started.stderr
    try:
        client = master_class(copy, 1).client()
        assert client.list_experiments() == []
        experiment = client.create_experiment(CONFIG | {"entrypoint": "echo anew"})
        experiment.wait(interval=0.1)
        trial = experiment.trials()[0]
        assert trial.id == 1
        assert [line.text for line in trial.iter_logs() if line.stream == "stdout"] == ["anew"]
        client.close()
    finally:
        down(copy)
    (aside,) = (copy / "set_aside").iterdir()
    assert below(aside) == before
    assert (aside / "master.sqlite").exists()
    assert f"Moved what the database does not know to {aside}" in (copy / "master.log").read_text()


@pytest.mark.long
def test_a_running_attempt_is_not_set_aside(
    make_master: Callable[..., Any], write_context: Callable[..., Path], wait_until: Any
) -> None:
    master = make_master(1).start()
    experiment = master.client().create_experiment(CONFIG, write_context(SCRIPT))
    wait_until(lambda: [t for t in experiment.trials() if t.checkpoints()])
    master.kill()
    delete(master.home / "master.sqlite")
    refused = up(master.home, "--set-aside")
    assert refused.returncode == 1
    assert "attempt 1 in" in refused.stderr
    assert "still runs (process " in refused.stderr
    assert (master.home / "attempts" / "1" / "attempt.json").exists()
    assert not (master.home / "set_aside").exists()


@pytest.mark.long
def test_a_master_whose_database_is_deleted_says_so_and_loses_nothing(
    make_master: Callable[..., Any],
    write_context: Callable[..., Path],
    wait_until: Any,
    tmp_path: Path,
) -> None:
    """Also what an attempt had reported that ended a moment before, and what one reports after."""
    master = make_master(2).start()
    client = master.client()
    script = REPORTS.replace("NUM", "3").replace("SLEEP", "0")
    ended = client.create_experiment(CONFIG, write_context(script, "ended"))
    assert ended.wait(interval=0.05).value == "COMPLETED"
    # It stands at step 40 until the master is down.
    script = "import os\n" + REPORTS.replace("NUM", "60").replace(
        "time.sleep(SLEEP)",
        f"""
        until = time.monotonic() + 600
        while step == 40 and not os.path.exists({str(tmp_path / "is_down")!r}):
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.05)""",
    )
    running = client.create_experiment(CONFIG, write_context(script, "running"))
    wait_until(lambda: any(list(t.iter_metrics("validation")) for t in running.trials()))
    delete(master.home / "master.sqlite")
    with pytest.raises(ApiError, match="was deleted or replaced while the master runs"):
        client.create_experiment(CONFIG, write_context(script, "refused"))
    assert not (master.home / "master.sqlite").exists()
    status = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "status", "--json"], capture_output=True, text=True,
        check=True, env=os.environ | {"PACELINE_HOME": str(master.home)},
    )  # fmt: skip
    assert any("was deleted or replaced" in one for one in json.loads(status.stdout)["problems"])
    told = down(master.home)
    # No trial is asked for a checkpoint.
    assert "Stopping" not in told
    assert "1 trial goes on without a master" in told
    (tmp_path / "is_down").touch()
    # It was told once, and nothing was tried in vain.
    assert "Traceback" not in (master.home / "master.log").read_text()
    (found,) = fix(master.home).findings
    assert found.fix is not None
    client = master.start().client()
    experiments = {experiment.id: experiment for experiment in client.list_experiments()}
    assert set(experiments) == {ended.id, running.id}
    assert experiments[running.id].wait(interval=0.1).value == "COMPLETED"
    for id_, count in ((ended.id, 3), (running.id, 60)):
        (trial,) = experiments[id_].trials()
        steps = [row.steps_completed for row in trial.iter_metrics("validation")]
        assert steps == list(range(1, count + 1))
    assert check(master.home).findings == []


def test_a_master_killed_at_any_moment_starts_again(
    make_master: Callable[..., Any], write_context: Callable[..., Path], tmp_path: Path
) -> None:
    """Uploads, attempts and deletions go on while it is killed: each leaves some files behind."""
    master = make_master(2)
    context = write_context("print('hello')")
    chance = random.Random(5)
    for round_number in range(4):
        master.start()
        assert master.is_alive, master.log()
        client = master.client()
        deadline = time.monotonic() + chance.uniform(0.2, 2.5)
        while time.monotonic() < deadline:
            (context / "round").write_text(f"{round_number} {time.time()}")
            client.create_experiment(CONFIG, context)
            for experiment in client.list_experiments():
                if experiment.state.is_terminal:
                    experiment.delete()
        master.kill()
    master.start()
    assert master.is_alive, master.log()
    assert "does not know" not in master.log()
