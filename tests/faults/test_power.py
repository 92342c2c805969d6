"""Power losses: a recorded search is stopped at many records, with what a disk may have then."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fault_lab.library import MKDIR, RENAME, WRITE, FaultLab, NoCompilerError, build_library
from fault_lab.power import History, Loss, restore
from fault_lab.power_round import Recording
from fault_lab.scripts import SEARCHES

from paceline._cluster.master.home_directory import check_for_lost_database
from paceline.core._read_runs import read_checkpoints
from paceline.core._run_storage import discard_unfinished
from paceline.journal import MetricsReported, RunDirectory
from paceline.storage import DirectoryStorage

NUM_LOSSES = 60


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    """Return a whole search with all changes of its files; the tests of this file share it."""
    try:
        build_library()
    except NoCompilerError as error:
        pytest.skip(str(error))
    made = Recording(tmp_path_factory.mktemp("power") / "round", SEARCHES["one"])
    yield made
    made.round.remove()


def tree(root: Path) -> dict[str, bytes | None]:
    """Return all files and directories, without what SQLite keeps in memory only."""
    left_out = ("master.sqlite-shm", "master.log")
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
        if path.name not in left_out
    }


@pytest.mark.long
def test_the_recording_of_a_master_gives_all_of_its_files(recording: Recording) -> None:
    root = recording.round.root
    before = tree(root)
    restore(History(root).follow(recording.records, recording.records[-1].order), None)
    assert tree(root) == before


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
def test_a_home_is_taken_up_after_a_power_loss_at_any_moment(
    recording: Recording, part: int
) -> None:
    """The database knows all that is there, is whole, and has what was acknowledged."""
    root, home = recording.round.root, recording.round.home
    last = recording.records[-1].order
    for number in range(part, NUM_LOSSES, 3):
        at = last * (number + 1) // NUM_LOSSES
        history = History(root).follow(recording.records, at)
        loss = Loss(number, history)
        restore(history, loss)
        told = f"loss {number} at {at}: {loss.kind}"
        if home.exists():
            try:
                check_for_lost_database(home, home / "master.sqlite")
            except Exception as error:
                raise AssertionError(told) from error
        if at >= recording.created_at:
            with closing(sqlite3.connect(home / "master.sqlite")) as database:
                assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)], told
                assert database.execute("SELECT count(*) FROM experiments").fetchone() == (1,), told


def test_the_database_knows_what_outlives_its_newest_commits(recording: Recording) -> None:
    """Names are on disk, what was written to files without a sync is not."""
    root, home = recording.round.root, recording.round.home
    made = [
        record.order
        for record in recording.records
        if (record.kind == RENAME and "/contexts/" in record.other)
        or (record.kind == MKDIR and Path(record.path).parent.name == "attempts")
    ]
    assert len(made) > SEARCHES["one"].num_trials
    for at in made:
        history = History(root).follow(recording.records, at)
        restore(history, Loss(0, history, "names only"))
        check_for_lost_database(home, home / "master.sqlite")


def test_a_checkpoint_outlives_a_power_loss_with_the_reports_that_led_to_it(
    recording: Recording,
) -> None:
    """Nothing but what was synced is there when the script hears of its checkpoint."""
    root, home = recording.round.root, recording.round.home
    heard = [
        (record.order, *json.loads(record.data)[1:])
        for record in recording.records
        if record.kind == WRITE and record.data.startswith(b'["stored"')
    ]
    assert len(heard) >= 3
    for number, (at, trial_id, step, uuid, _) in enumerate(heard):
        history = History(root).follow(recording.records, at)
        # The note that it has begun is still there, as if the system had written it by chance.
        kind = ("none", "names only")[number % 2]
        restore(history, Loss(0, history, kind))
        (run,) = [
            RunDirectory(path)
            for path in home.glob("attempts/*/run")
            if uuid in {stored.uuid for stored in read_checkpoints(RunDirectory(path))}
        ]
        steps = {
            record.steps_completed
            for key in run.journal_keys()
            for record in (entry.decode() for entry in run.reader(key))
            if isinstance(record, MetricsReported) and record.group == "validation"
        }
        assert set(range(max(1, step - 1), step + 1)) <= steps, (kind, trial_id, step)
        discard_unfinished(run)
        storage = DirectoryStorage(home / "checkpoints")
        assert storage.problems(storage.manifest(uuid)) == {}


def test_what_is_not_synced_can_be_lost(lab: FaultLab, tmp_path: Path) -> None:
    """The model itself: a file that was renamed without a sync may be empty or gone."""
    import os
    import subprocess
    import sys

    root = tmp_path / "root"
    root.mkdir()
    lab.set_rules(f"record root={root}")
    code = """
import os
def put(name, data, is_durable):
    with open(name + ".part", "wb", 0) as file:
        file.write(data)
        if is_durable:
            os.fsync(file)
    os.rename(name + ".part", name)
put("a", 1000 * b"a", False)
put("b", 1000 * b"b", True)
directory = os.open(".", os.O_RDONLY)
os.fsync(directory)
"""
    subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=os.environ | lab.environment, check=True
    )
    records = list(lab.records())
    seen = set()
    for seed in range(40):
        history = History(root).follow(records, records[-1].order)
        restore(history, Loss(seed, history))
        assert (root / "b").read_bytes() == 1000 * b"b"
        seen.add((root / "a").stat().st_size)
    assert {0, 1000} <= seen
    history = History(root).follow(records, records[-2].order)
    restore(history, Loss(next(s for s in range(40) if Loss(s, history).kind == "none"), history))
    assert list(root.iterdir()) == []
