"""Data sets of files in a store of objects: good and bad days of the store."""

import itertools
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from paceline import data, train
from paceline.data._file_locations import DiskCache, HedgedCalls
from paceline.storage import storage_from

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def ids(files: Any) -> list[int]:
    return sorted(int(row["id"]) for row in files)


def test_files_of_a_bucket_are_read_by_row_group(
    s3: str, parquet: Callable[..., Path], tmp_path: Path
) -> None:
    directory = parquet(25, 0, 31)
    storage: Any = storage_from(s3)
    for path in directory.iterdir():
        storage.put_file(f"deep/{path.name}", path)
    files = data.read(f"{s3}/**/*.parquet", disk_bytes=1 << 20)
    local = data.read(directory)
    assert ids(files) == ids(pickle.loads(pickle.dumps(files))) == ids(local) == list(range(56))
    assert files.identity()["digest"] != local.identity()["digest"]  # type: ignore[index]
    assert ids(data.read(f"{s3}/deep")) == list(range(56))
    assert data.read(f"{s3}/deep/002.parquet")[0]["id"] == 25
    written = data.write_index(f"{s3}/deep")
    assert len(data.read(f"{s3}/deep")) == len(written) == 56
    with pytest.raises(data.DataNotFoundError, match="nothing.*matches none"):
        data.read(f"{s3}/nothing/*.parquet")
    # An object that is put again is another one.
    storage.put_file("deep/000.parquet", directory / "002.parquet")
    with pytest.raises(data.DataChangedError, match="000.parquet' must stay as it is"):
        data.read(f"{s3}/deep")[3]
    storage.remove(["deep/000.parquet"])
    with pytest.raises(data.DataNotFoundError, match="000.parquet' must be there"):
        data.read(f"{s3}/deep")[3]


def test_only_what_is_needed_is_read_and_pieces_stay_on_the_disk(server: Any, cache: Path) -> None:
    files = data.read("s3://bucket/*.parquet", disk_bytes=100_000)
    server.reads.clear()
    assert files[27]["id"] == 27
    (wanted,) = {key for key, _ in server.reads}
    assert wanted == "001.parquet"
    assert ids(files) == list(range(75))
    assert ids(pickle.loads(pickle.dumps(files))) == list(range(75))
    server.reads.clear()
    # Another process finds the pieces on the disk.
    assert ids(pickle.loads(pickle.dumps(files))) == list(range(75))
    assert server.reads == []
    # Pieces of a wrong size are read again, once.
    short, long, *_ = (cache / "pieces").iterdir()
    os.truncate(short, 3)
    long.write_bytes(long.read_bytes() + b"more")
    assert ids(pickle.loads(pickle.dumps(files))) == list(range(75))
    assert len(server.reads) == 2
    assert ids(pickle.loads(pickle.dumps(files))) == list(range(75))
    assert len(server.reads) == 2
    kept = sum(path.stat().st_size for path in (cache / "pieces").iterdir())
    small = data.read("s3://bucket/*.parquet", disk_bytes=kept // 2)
    assert ids(small) == list(range(75))
    assert ids(data.read("s3://bucket/*.parquet", disk_bytes=kept // 2 + 1)) == list(range(75))


def test_disk_cache_stays_within_its_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:

    cache = DiskCache(tmp_path / "pieces", 1000)
    for number in range(30):
        cache.put(bytes(100), "file", number)
        assert sum(path.stat().st_size for path in (tmp_path / "pieces").iterdir()) <= 1000
    assert cache.get("file", 29) == bytes(100)
    assert cache.get("file", 0) is None
    cache.put(bytes(2000), "large")
    assert cache.get("large") is None
    (tmp_path / "file").touch()
    DiskCache(tmp_path / "file", 1000).put(b"x", "key")
    assert "Pieces of files are not kept in" in caplog.text


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_disk_cache_neither_follows_a_link_nor_waits(tmp_path: Path, kind: str) -> None:
    cache = DiskCache(tmp_path / "pieces", 1000)
    cache.put(b"piece", "file", 0)
    assert cache.get("file", 0) == b"piece"
    (piece,) = (tmp_path / "pieces").iterdir()
    if kind == "link":
        piece.rename(tmp_path / "private")
        piece.symlink_to(tmp_path / "private")
    else:
        piece.unlink()
        os.mkfifo(piece)
    assert cache.get("file", 0) is None
    cache.put(b"again", "file", 0)
    assert cache.get("file", 0) == b"again"
    if kind == "link":
        assert (tmp_path / "private").read_bytes() == b"piece"


@pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_a_store_that_fails_for_a_while_is_waited_for(
    server: Any, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    # The client, which takes it when it is made, gives up before the store is back.
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", str(seconds / 10))
    # Names say nothing about why the store fails.
    for path in list(server.directory.iterdir()):
        path.rename(path.with_name(f"403-credentials-{path.name}"))
    # Nothing is kept or read ahead.
    files = data.read("s3://bucket/*.parquet", memory_bytes=1).shuffle(window=30)
    batches: list[list[int]] = []
    for batch in files.to_torch(batch_size=10):
        if len(batches) == 2:
            server.fails_until = time.monotonic() + seconds
        batches.append(batch["id"].tolist())
    assert server.num_failed > 1
    assert sorted(sum(batches, [])) == list(range(75))


def test_a_store_that_hangs_is_given_up_by_name(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client takes it when it is made; a slow answer is waited for until the second one is set.
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", "0.2")
    files = data.read("s3://bucket/*.parquet")
    server.hangs_on = "001.parquet"
    assert files[3]["id"] == 3
    monkeypatch.setenv("PACELINE_DATA_TIMEOUT_S", "0.5")
    with pytest.raises(
        data.DataError,
        match=r"'s3://bucket/001.parquet' could not be read within 0.5 s.*no answer came in time",
    ):
        files[30]


def test_a_read_that_hangs_is_sent_once_more(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data._file_locations._FIRST_DELAY_S", 0.2)
    files = data.read("s3://bucket/*.parquet")
    server.reads.clear()
    server.hangs_first_on = "001.parquet"
    assert files[30]["id"] == 30
    assert not server.waited_in_vain
    twice = [read for read in server.reads if server.reads.count(read) == 2]
    assert {key for key, _ in twice} == {"001.parquet"}


def test_a_read_that_fails_beside_others_is_not_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.data._file_locations._FIRST_DELAY_S", 0.05)
    numbers = itertools.count()
    third_came = threading.Event()

    def ask() -> str:
        number = next(numbers)
        if number == 0:
            third_came.wait(60)
            raise ValueError("slow")
        if number == 1:
            raise ValueError("quick")
        third_came.set()
        return "answer"

    assert HedgedCalls().call(ask) == "answer"

    def fail() -> str:
        next(numbers)
        raise ValueError("refused")

    numbers = itertools.count()
    with pytest.raises(ValueError, match="refused"):
        HedgedCalls().call(fail)
    assert next(numbers) == 1


def test_a_url_without_credentials_says_so(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.is_forbidden = True
    # It is told at once, not when the time is over.
    monkeypatch.setenv("PACELINE_DATA_TIMEOUT_S", "60")
    with pytest.raises(data.DataError, match=r"cannot be read\. .*AccessDenied.*credentials must"):
        data.read("s3://bucket/*.parquet")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url)
    with pytest.raises(data.DataError, match=r"cannot be read.*Hint: no credentials were found"):
        data.read("s3://bucket/*.parquet")
    with pytest.raises(
        data.DataError, match="begin with s3://, az:// or gs://, but got 'ftp://bucket/x'"
    ):
        data.read("ftp://bucket/x")


def test_a_bucket_that_is_not_there_is_told_at_once(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DATA_TIMEOUT_S", "60")
    with pytest.raises(data.DataError, match=r"cannot be read\. .*no such bucket \(NoSuchBucket\)"):
        data.read("s3://bucke/*.parquet")


def read_epoch(config: dict[str, Any]) -> list[list[int]]:
    """Read an epoch; the rank that is told so dies while it reads ahead for its first batch."""
    from paceline.data import _file_source as _chunk_cache

    train.enable_reproducibility(3)
    loader = train.get_dataset().get_shard().to_torch(batch_size=5, shuffle=True)
    batches = (train.load_checkpoint() or {"batches": []})["batches"]
    mark = Path(config["mark"])
    for batch in loader:
        if train.world_rank() == config["victim"] and not mark.exists():
            deadline = time.monotonic() + 60
            while not any(cache._under_way for cache in _chunk_cache._open_caches):
                assert time.monotonic() < deadline, "it reads nothing ahead"
                time.sleep(0.001)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train.report(samples=batch["id"].tolist())
        batches.append(batch["id"].tolist())
        train.save_checkpoint(batches=batches)
    return batches


@pytest.mark.long
def test_a_worker_that_is_killed_while_it_reads_ahead_loses_no_sample(
    server: Any, cache: Path, tmp_path: Path
) -> None:
    server.delay_s = 0.05
    bucket = "s3://bucket/*.parquet"
    found = {}
    with train.Trainer(num_workers=2, max_retries=1) as trainer:
        for victim in (None, 0, 1):
            # What an earlier run kept on the disk needs no reading.
            shutil.rmtree(cache / "pieces", ignore_errors=True)
            files = data.read(bucket, disk_bytes=1 << 20).shuffle(window=10)
            config = {"victim": victim, "mark": str(tmp_path / f"dead-{victim}")}
            results = trainer.run(read_epoch, config, dataset=files.pipeline(length=2))
            found[victim] = list(results)
    assert sorted(path.name for path in tmp_path.glob("dead-*")) == ["dead-0", "dead-1"]
    assert found[0] == found[1] == found[None]
    assert sorted(sum(sum(found[None], []), [])) == list(range(75))
