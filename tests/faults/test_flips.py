"""A flipped bit in a file is repaired or reported, never read as another value.

`tests/master/upkeep/test_check.py` flips bits of the database, its records and uploaded code.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline._base.files import DamagedSecretError, make_secret, read_secret
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.journal_records import seal
from paceline._base.run_directory import Control, RunInfo
from paceline._cluster.master.home_directory import Home, SecretStore
from paceline._cluster.master.store.database import Database, settle_cluster_id
from paceline._cluster.master.store.recovery_rows import RecordedRow
from paceline._cluster.master.store.trial_logs import LogStore
from paceline._cluster.master.store.upgrades import find_log_damage
from paceline._cluster.master.upkeep.recovery_records import append_recovery_rows, read_record
from paceline._cluster.messages.runner_messages import AttemptEnd, AttemptSpec, LogEntry
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.attempt_directory import (
    AttemptDirectory,
    SecretFileError,
    read_secret_file,
)
from paceline._cluster.runner.node_facts import find_facts
from paceline._cluster.runner.output_spool import OutputSpool, SpoolReader
from paceline._training.workers.processes.worker_output import OutputLine
from paceline.client import MasterUnreachableError
from paceline.client._http_session import read_master_file, read_token
from paceline.core._preemption_and_search import ControlFile
from paceline.journal import (
    JournalReader,
    MetricsReported,
    NotARunDirectoryError,
    RunDirectory,
    RunVersionError,
    SearchInputTaken,
)
from paceline.storage import CheckpointError, CheckpointVersionError, DirectoryStorage
from paceline.storage._checkpoint_storage import raise_if_damaged

NUM_FLIPS = 60
# A file, a function that reads what people or processes are shown of it, and one that tells of
# what was left out.
Case = tuple[Path, Callable[[], Any], Callable[[], int]]


def nothing() -> int:
    """Tell that nothing is left out."""
    return 0


def checkpoint_file(tmp_path: Path, name: str) -> Case:
    storage = DirectoryStorage(tmp_path)
    with storage.store_path("one") as path:
        (path / "tensor").write_bytes(bytes(range(256)) * 40)
    storage.commit("one", {"steps_completed": 3, "lr": 0.125}, num_shards=1)

    def read() -> Any:
        manifest = storage.manifest("one")
        raise_if_damaged("one", storage.problems(manifest))
        tensor = (tmp_path / "one" / "tensor").read_bytes()
        return manifest.metadata, manifest.files, manifest.created, tensor

    return tmp_path / "one" / name, read, nothing


def manifest(tmp_path: Path) -> Case:
    return checkpoint_file(tmp_path, "manifest.json")


def tensor(tmp_path: Path) -> Case:
    return checkpoint_file(tmp_path, "tensor")


def run_info(tmp_path: Path) -> Case:
    info = RunInfo(
        run_id="one", name="run", created=1.5, steps_completed=64, checkpoint_storage="/s"
    )
    run = RunDirectory.create(tmp_path / "run", info)
    return run.path / "run.json", run.read_info, nothing


def attempt(tmp_path: Path) -> Case:
    spec = AttemptSpec(
        attempt_id=3, trial_id=2, number=1, entrypoint="python3 train.py", python="python3",
        variables={"A": "b"}, working_dir=None, context_digest=None, slot_ids=[0], num_threads=1,
        gpu_ids=[], keep_directory=False,
    )  # fmt: skip
    directory = AttemptDirectory.create(tmp_path / "3", spec)
    return directory.path / "attempt.json", directory.read_spec, nothing


def attempt_end(tmp_path: Path) -> Case:
    directory = AttemptDirectory(tmp_path)
    directory.write_end(AttemptEnd(reason=ExitReason.EXITED, code=3, signal=None, time=2.5))
    return tmp_path / "exit.json", directory.read_end, nothing


def secrets(tmp_path: Path) -> Case:
    store = SecretStore(tmp_path / "secrets.json")
    store._set(1, {"KEY": "a value that nobody may change"})
    return tmp_path / "secrets.json", lambda: read_secret_file(tmp_path / "secrets.json"), nothing


def log(tmp_path: Path) -> Case:
    store = LogStore(tmp_path)
    lines = [
        LogEntry(
            sequence=n, time=n / 7, rank=n % 3, stream="stdout", level="INFO", text=f"line {n} äöü"
        )
        for n in range(300)
    ]
    store.append(1, 1, lines)

    def fresh() -> tuple[list[Any], int]:
        again = LogStore(tmp_path)
        return list(again.read(1)), again.num_damaged(1)

    return tmp_path / "trial-1" / "attempt-1.jsonl", lambda: fresh()[0], lambda: fresh()[1]


def log_index(tmp_path: Path) -> Case:
    path, _, _ = log(tmp_path)
    search = "line 17"

    def read() -> list[str]:
        lines = LogStore(tmp_path).read(1)
        return [line.text for line in lines if search in line.text]

    return path.with_suffix(".index"), read, nothing


def journal_with(tmp_path: Path, records: list[Any]) -> Case:
    writer = JournalWriter(tmp_path / "journal")
    for record in records:
        writer.append(record)
    writer.close()

    def read() -> list[tuple[int, bytes]]:
        reader = JournalReader(tmp_path / "journal")
        return [(entry.sequence, entry.payload) for entry in reader]

    def num_lost() -> int:
        reader = JournalReader(tmp_path / "journal")
        numbers = [entry.sequence for entry in reader]
        gaps = len(set(range(max(numbers, default=-1) + 1)) - set(numbers))
        return gaps + len(reader.finish(is_complete=True))

    return tmp_path / "journal" / "000000000000.journal", read, num_lost


def journal(tmp_path: Path) -> Case:
    return journal_with(
        tmp_path,
        [
            MetricsReported(time=n, group="validation", steps_completed=n, metrics={"loss": 1 / n})
            for n in range(1, 8)
        ],
    )


def search_journal(tmp_path: Path) -> Case:
    return journal_with(
        tmp_path,
        [
            SearchInputTaken(time=n, input={"type": "reported", "time": n, "metric": 1 / n})
            for n in range(1, 8)
        ],
    )


def record(tmp_path: Path) -> Case:
    path = tmp_path / "records" / "experiment-1.jsonl"
    rows = [RecordedRow("trials", {"id": n, "hparams": json.dumps({"lr": n})}) for n in range(9)]
    append_recovery_rows(path, 1, rows, anew=True)

    def read() -> list[RecordedRow]:
        return [row for _, row in read_record(path) if row is not None]

    def num_damaged() -> int:
        # A last line without its end counts as one that is being written.
        found = list(read_record(path))
        return sum(row is None for _, row in found) + (not path.read_bytes().endswith(b"\n"))

    return path, read, num_damaged


def token(tmp_path: Path) -> Case:
    Home(tmp_path).renew_token()
    return tmp_path / "token", lambda: read_token(tmp_path), nothing


def created_token(tmp_path: Path) -> Case:
    path = tmp_path / "token"
    path.write_text(make_secret("paceline_") + "\n")
    return path, lambda: read_secret(path), nothing


def address(tmp_path: Path) -> Case:
    Home(tmp_path).write_address("http://127.0.0.1:8080", 8080, "1.0")
    return tmp_path / "master.json", lambda: read_master_file(tmp_path), nothing


def node_key(tmp_path: Path) -> Case:
    def read() -> str:
        return find_facts(tmp_path, name="node", num_slots=1).key

    read()
    return tmp_path / "node_key", read, nothing


def process(tmp_path: Path) -> Case:
    directory = AttemptDirectory(tmp_path)
    directory.write_process(12345, 678.25)
    return tmp_path / "process.json", directory.read_process, nothing


def handed_secrets(tmp_path: Path) -> Case:
    directory = AttemptDirectory(tmp_path)
    given = {"KEY": "a value that nobody may change"}
    directory.write_secrets(given)
    path = tmp_path / "secrets.json"

    def read() -> dict[str, str]:
        data = path.read_bytes()
        taken = directory.read_secrets()
        path.write_bytes(data)
        return {name: taken[name] for name in given}

    return path, read, nothing


def control(tmp_path: Path) -> Case:
    run = RunDirectory(tmp_path)
    run.write_control(Control(should_preempt=True, operation_length=12, judged=(0, 345)))
    return run.control_path, run.read_control, nothing


def output(tmp_path: Path) -> Case:
    spool = OutputSpool(tmp_path / "output.jsonl")
    for n in range(200):
        spool.add(OutputLine(time=n / 7, rank=n % 3, stream="stdout", level="INFO", text=f"{n} ä"))
    spool.close()

    def read() -> list[Any]:
        return SpoolReader(tmp_path / "output.jsonl").read(1000)

    def whole() -> list[Any]:
        return [entry for entry in read() if entry.rank is not None]

    def num_told() -> int:
        # A last line without its end counts as one that is being written.
        is_open = not (tmp_path / "output.jsonl").read_bytes().endswith(b"\n")
        return len(read()) - len(whole()) + is_open

    return tmp_path / "output.jsonl", whole, num_told


def database_log(tmp_path: Path) -> Case:
    database = Database(tmp_path / "open.sqlite")
    settle_cluster_id(database, "2f2b3bd6-0e7c-4f9c-9d7b-9f6d4f1f0a11")
    for name in ("", "-wal"):
        (tmp_path / f"left.sqlite{name}").write_bytes(
            (tmp_path / f"open.sqlite{name}").read_bytes()
        )
    database.close()

    def read() -> None:
        if damage := find_log_damage(tmp_path / "left.sqlite"):
            raise DatabaseLogDamagedError(damage)

    return tmp_path / "left.sqlite-wal", read, nothing


class DatabaseLogDamagedError(Exception):
    """Raised for damage in a database's log."""


CASES = (
    manifest, tensor, run_info, attempt, attempt_end, secrets, log, log_index, journal,
    search_journal, record, token, created_token, address, node_key, process, handed_secrets,
    control, output, database_log,
)  # fmt: skip
REPORTED = (
    CheckpointError, CheckpointVersionError, NotARunDirectoryError, RunVersionError,
    SecretFileError, DamagedSecretError, MasterUnreachableError, DatabaseLogDamagedError,
    msgspec.DecodeError,
)  # fmt: skip


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_flipped_bit_is_reported_or_changes_nothing(
    make: Callable[[Path], Case], tmp_path: Path
) -> None:
    path, read, num_left_out = make(tmp_path)
    path.chmod(0o600)
    before, data, chosen = read(), path.read_bytes(), random.Random(make.__name__)
    assert num_left_out() == 0
    num_reported = 0
    for position in chosen.choices(range(8 * len(data)), k=NUM_FLIPS):
        flip(path, data, position)
        try:
            found = read()
        except REPORTED:
            num_reported += 1
            continue
        if found == before:
            continue
        if found is None:
            num_reported += 1
            continue
        assert isinstance(found, list), position
        assert num_left_out() > 0, position
        assert all(one in before for one in found), position
        num_reported += 1
    assert num_reported > 0 or make is log_index


def flip(path: Path, data: bytes, position: int) -> None:
    """Write a file with one bit changed."""
    changed = bytearray(data)
    changed[position // 8] ^= 1 << position % 8
    path.write_bytes(changed)


@pytest.mark.long
@pytest.mark.parametrize("name", ["token", "attempt_key", "cluster_id"])
def test_a_start_mends_what_identifies_a_home_and_says_so(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(tmp_path)
    home.prepare()
    database = Database(home.database_path)
    path = tmp_path / name
    home.keep_id(settle_cluster_id(database, home.cluster_id))
    data, before = path.read_bytes(), (home.token, home.attempt_key, home.cluster_id)
    for position in random.Random(name).choices(range(8 * len(data)), k=NUM_FLIPS):
        flip(path, data, position)
        caplog.clear()
        home.prepare()
        home.keep_id(settle_cluster_id(database, home.cluster_id))
        after = (home.token, home.attempt_key, home.cluster_id)
        assert after == before or str(path) in caplog.text, position
        assert after[2] == before[2]
        assert len(path.read_bytes()) == len(data)
        path.write_bytes(data)
    database.close()


def test_a_damaged_control_file_says_nothing_until_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDirectory(tmp_path)
    first, second = Control(operation_length=8), Control(operation_length=8, should_preempt=True)
    run.write_control(second)
    data = run.control_path.read_bytes()
    # Behind it is the checksum, where a change can leave a file without one.
    end = data.index(b',"checksum"')
    for position in random.Random(3).choices(range(8 * end), k=NUM_FLIPS):
        file = ControlFile(run)
        run.write_control(first)
        assert file.read() == first
        flip(run.control_path, data, position)
        assert file.read() == first
        run.control_path.write_bytes(data)
        assert file.read() == second
    assert "control.json is damaged" in caplog.text


def test_a_control_file_that_looks_like_the_one_before_is_read(tmp_path: Path) -> None:
    """Two that are written in one tick of the clock can have the same time and number."""
    run = RunDirectory(tmp_path)
    file = ControlFile(run)
    run.write_control(Control())
    assert not file.read().should_preempt
    status = run.control_path.stat()
    data = seal(msgspec.json.encode(Control(should_preempt=True)))
    run.control_path.write_bytes(data)
    os.utime(run.control_path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.read().should_preempt
