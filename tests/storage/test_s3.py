"""Checkpoints in a bucket: with a real server, and with troubles on the way to it."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3  # type: ignore[import-untyped]
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline import pytorch, train
from paceline.core import _run_storage as _unfinished_checkpoints
from paceline.core._run_storage import discard_unfinished
from paceline.journal import RunDirectory
from paceline.storage import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointStorage,
    CheckpointWriteError,
    ObjectStorage,
    storage_from,
)
from paceline.storage._s3_azure_gcs_storage import BucketStorage

LARGE = os.urandom(20_000_000)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests fail soon."""
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", "1")


def store(
    storage: CheckpointStorage,
    uuid: str,
    content: bytes = b"weights",
    *,
    is_from_memory: bool = False,
) -> None:
    with storage.store_path(uuid, rank=0) as path:
        if is_from_memory:
            send = storage.file_sender(path)
            assert send is not None
            half = len(content) // 2
            view = memoryview(content)
            send("model", len(content), [view[:half], view[half:]])
        else:
            (path / "model").write_bytes(content)
    storage.commit(uuid, {"steps_completed": 3})


FROM = pytest.mark.parametrize("is_from_memory", [False, True], ids=["file", "memory"])


@FROM
def test_a_large_file_goes_in_parts_and_comes_back(
    s3: str, tmp_path: Path, is_from_memory: bool
) -> None:
    storage = storage_from(s3)
    store(storage, "one", LARGE, is_from_memory=is_from_memory)
    assert storage.verify("one").resources == {"model": len(LARGE)}
    storage.download("one", tmp_path)
    assert (tmp_path / "model").read_bytes() == LARGE
    assert storage.url == s3
    assert storage.local_root is None


def test_storages_of_one_bucket_do_not_see_each_other(s3: str) -> None:
    first, second = storage_from(f"{s3}/a"), storage_from(f"{s3}/ab")
    store(first, "one")
    assert second.list() == []
    assert second.sweep(older_than_s=0) == []
    assert first.list() == ["one"]
    # A storage above others holds none of theirs.
    assert "one" not in storage_from(s3).list()


@pytest.mark.parametrize(
    ("status", "code"), [("500 Oops", "InternalError"), ("503 Busy", "SlowDown")]
)
@FROM
def test_a_server_that_fails_some_times_is_asked_again(
    s3: str, faulty: Any, status: str, code: str, is_from_memory: bool
) -> None:
    storage = storage_from(s3)
    faulty.answer(status, code, when="PUT", times=3)
    store(storage, "one", LARGE, is_from_memory=is_from_memory)
    assert faulty.num_faults == 3
    storage.verify("one")


ERRORS: list[tuple[Callable[[Any], None], str]] = [
    (lambda server: server.answer("500 Oops", "InternalError", when="/model"), "InternalError"),
    (
        lambda server: server.answer("403 No", "ExpiredToken", when="/model"),
        r"ExpiredToken.* Hint: renew the credentials \(AWS_ACCESS_KEY_ID",
    ),
    (
        lambda server: server.answer("404 No", "NoSuchBucket", when="/model"),
        "there is no such bucket .* Hint: make the bucket",
    ),
    (
        lambda server: server.hang(),
        "part 1 of 1: no answer came in time: .* Hint: PACELINE_STORE_PART_TIMEOUT_S allows",
    ),
    (
        # What a machine without credentials gets where a cloud would have some for it.
        lambda server: server.answer("403 No", "at http://169.254.169.254/latest", when="/model"),
        "there are no credentials in the environment, .* Hint: set AWS_ACCESS_KEY_ID and AWS_SEC",
    ),
    (lambda server: server.cut(), "HTTP error"),
]
LARGE_ERRORS = [
    (fault, reason.replace("part 1 of 1", "before part 1 of 3")) for fault, reason in ERRORS
] + [(lambda server: server.stall(), "Hint: PACELINE_STORE_PART_TIMEOUT_S allows")]


def test_what_a_server_says_is_told(s3: str, faulty: Any) -> None:
    faulty.answer("403 No", "Slow", when="GET")
    with pytest.raises(CheckpointError, match=r"Forbidden: Slow: Slow here\.$") as caught:
        storage_from(s3).list()
    assert "<" not in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        'No access to "arn:aws:s3:::b" &amp; more',
        # Azure says more lines.
        'No access to "arn:aws:s3:::b" &amp; more.\nRequestId:1\nTime:2026',
    ],
)
def test_what_a_server_says_is_told_once(s3: str, faulty: Any, said: str) -> None:
    faulty.answer("403 No", "Slow", said=said, when="GET")
    with pytest.raises(CheckpointError, match=r': Slow: No access to "arn:aws:s3:::b" & more\.$'):
        storage_from(s3).list()


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "fault", "reason"),
    [(7, *error) for error in ERRORS]
    + [pytest.param(len(LARGE), *error, marks=pytest.mark.slow) for error in LARGE_ERRORS[:3]]
    + [(len(LARGE), *error) for error in LARGE_ERRORS[3:]],
)
@FROM
def test_what_cannot_be_sent_is_an_error_that_names_it_and_earlier_checkpoints_stay(
    s3: str,
    faulty: Any,
    fault: Callable[[Any], None],
    reason: str,
    size: int,
    is_from_memory: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = storage_from(s3)
    store(storage, "one")
    fault(faulty)
    # A busy machine may be late with what works.
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", "5")
    with pytest.raises(CheckpointWriteError) as told:
        store(storage_from(s3), "two", LARGE[:size], is_from_memory=is_from_memory)
    assert faulty.num_faults
    text = str(told.value)
    assert "Rank 0 could not store 'model' of checkpoint two" in text
    assert f"In {s3}, 'two/model' ({size} bytes) must be stored, but" in text
    # A busy machine may be late with another part of a large file.
    assert re.search(reason if size < 100 else f"{reason}|no answer came in time", text), text
    faulty.pass_on()
    assert storage.list() == ["one"]
    storage.verify("one")
    # The name is free again.
    store(storage, "two")


def test_a_store_that_is_away_at_the_beginning_is_an_error_of_writing(s3: str, faulty: Any) -> None:
    """Training goes on after those."""
    storage = storage_from(s3)
    faulty.answer("403 No", "AccessDenied", when="GET")
    part = storage.store_shard("one", 2)
    with pytest.raises(
        CheckpointWriteError, match="Rank 2 could not store the beginning of checkpoint one"
    ):
        part.__enter__()


@pytest.mark.long
@pytest.mark.parametrize("stuck", [0, 2])
@FROM
def test_a_stuck_upload_of_one_rank_is_its_error_alone(
    s3: str, faulty: Any, stuck: int, is_from_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(storage_from(s3), "before")
    # Long enough for what is not stuck.
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", "7")
    storage = storage_from(s3)
    faulty.hang(f"of_{stuck}?partNumber=2")
    errors: dict[int, BaseException] = {}

    def store_part(rank: int) -> None:
        try:
            with storage.store_shard("one", rank) as path:
                content = LARGE[: 9_000_000 * (rank == stuck) + 5]
                send = storage.file_sender(path)
                if is_from_memory and send is not None:
                    send(f"of_{rank}", len(content), [memoryview(content)])
                else:
                    (path / f"of_{rank}").write_bytes(content)
        except CheckpointError as error:
            errors[rank] = error

    ranks = [threading.Thread(target=store_part, args=[rank]) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert errors.keys() == {stuck}
    assert re.search(
        rf"Rank {stuck} could not store 'of_{stuck}' of checkpoint one, .* part \d of 2: no answer"
        " came in time: .* Hint: PACELINE_STORE_PART_TIMEOUT_S",
        str(errors[stuck]),
    )
    assert storage.missing_shards("one", 3) == [stuck]
    with pytest.raises(CheckpointError, match=f"of rank {stuck} is missing"):
        storage.commit("one", {}, num_shards=3)
    assert storage.list() == ["before"]


@pytest.mark.long
@FROM
def test_a_file_and_a_checkpoint_have_a_time_limit_too(
    s3: str, faulty: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_from_memory: bool
) -> None:
    """Each request is answered in time, but there are many."""
    monkeypatch.setattr("paceline.storage._s3_azure_gcs_storage._PARTS_AT_ONCE", 1)
    storage = storage_from(s3)
    # Makes the client, whose requests have 60 s each.
    store(storage, "one")
    faulty.delay(1.2)
    monkeypatch.setenv("PACELINE_STORE_FILE_TIMEOUT_S", "2")
    with pytest.raises(
        CheckpointWriteError,
        match=r"could not store 'model' of checkpoint two.* after 2 s only . of its 3 parts were"
        " read to be sent. Hint: PACELINE_STORE_FILE_TIMEOUT_S allows more time",
    ):
        store(storage, "two", LARGE, is_from_memory=is_from_memory)
    monkeypatch.delenv("PACELINE_STORE_FILE_TIMEOUT_S")
    monkeypatch.setenv("PACELINE_STORE_CHECKPOINT_TIMEOUT_S", "2")
    # Four are sent at once.
    for number in range(12):
        (tmp_path / f"model_{number}").touch()
    with pytest.raises(
        CheckpointWriteError, match="After 2 s only [1-8] of the rank's 12 files were stored in s3:"
    ):
        storage.copy_in("three", tmp_path)
    faulty.pass_on()
    assert storage.list() == ["one"]
    monkeypatch.setenv("PACELINE_STORE_CHECKPOINT_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="`PACELINE_STORE_CHECKPOINT_TIMEOUT_S` must be a number"):
        store(storage, "two")


def test_what_is_sent_from_memory_needs_no_room_for_temporary_files(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage = storage_from(s3)
    sizes = []

    def pieces() -> Any:
        for begin in range(0, len(LARGE), 1_000_000):
            sizes.append(sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()))
            yield memoryview(LARGE)[begin : begin + 1_000_000]

    with storage.store_shard("one", 0) as path:
        (path / "facts").write_text("{}")
        send = storage.file_sender(path)
        assert send is not None
        send("model", len(LARGE), pieces())
        assert [each.name for each in path.iterdir()] == ["facts"]
    assert max(sizes) == 2
    assert storage.commit("one", {}).resources == {"facts": 2, "model": len(LARGE)}


def test_a_file_that_was_sent_is_there_once_and_named_like_others(s3: str) -> None:
    storage = storage_from(s3)

    def store_twice() -> None:
        with storage.store_shard("one", 2) as path:
            send = storage.file_sender(path)
            assert send is not None
            with pytest.raises(ValueError, match="named like those of the commit protocol"):
                send("manifest.json", 1, [memoryview(b"a")])
            send("model", 1, [memoryview(b"a")])
            (path / "model").write_bytes(b"b")

    with pytest.raises(ValueError, match="must have each file once, but 'model' is there"):
        store_twice()


@pytest.mark.parametrize("rank", [0, 2])
def test_what_was_sent_is_removed_if_the_block_fails(s3: str, rank: int) -> None:
    storage = storage_from(s3)
    assert isinstance(storage, ObjectStorage)
    with storage.store_shard("one", 1) as path:
        (path / "other").write_bytes(b"a")

    def break_off() -> None:
        with storage.store_shard("one", rank) as path:
            send = storage.file_sender(path)
            assert send is not None
            send("model", 1, [memoryview(b"a")])
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        break_off()
    assert [each.key for each in storage.objects("one/")] == ["one/other", "one/rank-1.done"]


def test_the_files_of_another_writer_stay(s3: str) -> None:
    """The late one has sent files of the same names, and another one."""
    storage = storage_from(s3)

    def be_late(fail: type[Exception] | None) -> None:
        with storage.store_shard(uuid, 2) as path:
            send = storage.file_sender(path)
            assert send is not None
            send("model", 5, [memoryview(b"state")])
            send("more", 1, [memoryview(b"a")])
            with storage.store_shard(uuid, 2) as other:
                (other / "model").write_bytes(b"state")
            if fail is not None:
                raise fail

    for uuid, fail in (("one", None), ("two", KeyError)):
        with pytest.raises(fail or FileExistsError):
            be_late(fail)
        with storage.store_shard(uuid, 0), storage.store_shard(uuid, 1):
            pass
        storage.commit(uuid, {}, num_shards=3)
        assert storage.verify(uuid).resources == {"model": 5}


def test_a_full_temporary_directory_leaves_nothing_in_the_bucket(s3: str) -> None:
    storage = storage_from(s3)
    assert isinstance(storage, ObjectStorage)

    def fill() -> None:
        with storage.store_shard("one", 0) as path:
            send = storage.file_sender(path)
            assert send is not None
            send("model", 1, [memoryview(b"a")])
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointWriteError, match="what was written of it is removed"):
        fill()
    assert storage.objects("one/") == []


@pytest.mark.parametrize("num_threads", [0, 1])
def test_small_files_are_sent_without_more_threads(
    s3: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def start_few(thread: threading.Thread) -> None:
        if len(started) == num_threads:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    storage = storage_from(s3)
    with storage.store_shard("one", 0) as path:
        for number in range(10):
            (path / f"file_{number}").write_text(str(number))
        monkeypatch.setattr(threading.Thread, "start", start_few)
    monkeypatch.undo()
    assert len(started) == num_threads
    storage.commit("one", {})
    assert storage.verify("one").resources == {f"file_{number}": 1 for number in range(10)}


def test_pieces_of_another_size_than_said_are_refused(s3: str) -> None:
    storage = storage_from(s3)
    assert isinstance(storage, ObjectStorage)

    def send(size: int, piece: Any) -> None:
        with storage.store_shard("one", 0) as path:
            sender = storage.file_sender(path)
            assert sender is not None
            sender("model", size, [memoryview(piece)])

    for size, piece in ((12, b"a"), (20_000_000, b"a"), (1, LARGE)):
        with pytest.raises(ValueError, match=f"must have {size} bytes together"):
            send(size, piece)
        assert storage.objects("one/") == []
    # Of three numbers, each has four bytes.
    send(12, array("f", [1.0, 2.0, 3.0]))
    storage.commit("one", {})
    assert storage.verify("one").resources == {"model": 12}
    with pytest.raises(ValueError, match="must be called within the block"):
        storage.file_sender(Path("elsewhere"))


def test_two_writers_of_one_checkpoint_are_kept_apart(s3: str, faulty: Any) -> None:
    storage = storage_from(s3)
    first = storage.store_shard("one", 0)
    with first as path:
        (path / "model").write_bytes(b"first")
        # Another process that was taken for dead begins and ends meanwhile.
        with storage.store_shard("one", 0) as other:
            (other / "other").write_bytes(b"second")
        with pytest.raises(FileExistsError, match="one has a shard of rank 0 already"):
            first.__exit__(None, None, None)
    whole = storage.commit("one", {})
    assert whole.resources == {"other": 6}
    with pytest.raises(FileExistsError, match="another process has committed one in 's3://"):
        storage.commit("one", {})
    assert storage.verify("one") == whole


def test_an_answer_that_is_lost_is_no_other_writer(s3: str, faulty: Any) -> None:
    """The request is repeated by the client, and finds what it has put itself."""
    storage = storage_from(s3)
    faulty.lose_answers()
    store(storage, "one")
    # The marker, the file, the list of the rank's files and the manifest.
    assert faulty.num_faults == 4
    storage.verify("one")


def test_a_bucket_that_vanishes_is_told_at_every_use(
    s3_server: str, s3: str, tmp_path: Path
) -> None:
    bucket = f"b{uuid4()}"
    client = boto3.client("s3", endpoint_url=s3_server)
    client.create_bucket(Bucket=bucket)
    storage = storage_from(f"s3://{bucket}/a")
    assert isinstance(storage, ObjectStorage)
    store(storage, "one")
    storage.remove([each.key.removeprefix("a/") for each in storage.objects("")])
    client.delete_bucket(Bucket=bucket)
    for use in (
        lambda: store(storage, "two"),
        lambda: storage.manifest("one"),
        lambda: storage.download("one", tmp_path),
        lambda: storage.list(),
        lambda: storage.delete("one"),
        lambda: storage.sweep(older_than_s=0),
    ):
        with pytest.raises(
            CheckpointError, match=rf"In s3://{bucket}/a, .* no such bucket .* Hint: make the"
        ):
            use()


@pytest.mark.long
@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(("fault", "reason"), ERRORS[:3])
def test_what_cannot_be_read_is_no_missing_checkpoint(
    s3: str, faulty: Any, fault: Callable[[Any], None], reason: str, tmp_path: Path
) -> None:
    storage = storage_from(s3)
    store(storage, "one")
    fault(faulty)
    at_model = faulty.fault
    faulty.fault = lambda line, client: at_model("/model", client)
    for use in (
        lambda: storage.manifest("one"),
        lambda: storage.download("one", tmp_path),
        lambda: storage.list(),
        lambda: storage.sweep(older_than_s=0),
        lambda: storage.exists("one"),
    ):
        with pytest.raises(CheckpointError, match=reason) as told:
            use()
        assert not isinstance(told.value, CheckpointNotFoundError)


def test_without_credentials_or_with_wrong_ones_it_is_told(
    s3: str, monkeypatch: pytest.MonkeyPatch, short_limits: None
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        CheckpointError,
        match=r"In s3://.* must be .* but the server is not reached: .* Hint: AWS_E",
    ):
        storage_from(s3).list()


@pytest.mark.parametrize(
    ("variable", "url"),
    [("AWS_ENDPOINT_URL", "s3://bucket"), ("AZURE_STORAGE_ENDPOINT", "az://container")],
)
def test_a_server_without_a_scheme_is_told(
    variable: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "127.0.0.1:9")
    with pytest.raises(CheckpointError, match=f"{variable} must begin with http"):
        storage_from(url).exists("b6f70c1c-0b6b-4b0e-8a35-40a1b35a1ef5")


class Buffered(pytorch.PyTorchTrial):
    """A model with a buffer that is uploaded in three parts."""

    def __init__(
        self, context: pytorch.PyTorchTrialContext, callback: pytorch.PyTorchCallback
    ) -> None:
        self.context = context
        self.callback = callback
        module = nn.Linear(1, 1)
        module.register_buffer("large", torch.rand(5_000_000))
        self.model = context.wrap_model(module)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.model(batch).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Any:
        return {"loss": 0.0}

    def build_training_data_loader(self) -> Any:
        return pytorch.DataLoader(torch.ones(100, 1), batch_size=2)

    build_validation_data_loader = build_training_data_loader

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {"switch": self.callback}


@pytest.mark.long
def test_an_upload_that_is_stuck_is_told_of_while_training_goes_on(
    s3: str,
    faulty: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Long enough for what is not stuck.
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", "8")

    class Switch(pytorch.PyTorchCallback):
        num_stored = 0

        def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
            if self.num_stored == 1 and "Training goes on" not in caplog.text:
                faulty.hang("partNumber=2")
            else:
                faulty.fault = lambda _line, _client: True

        def on_checkpoint_upload_end(self, uuid: str) -> None:
            self.num_stored += 1

    with pytorch.init({"global_batch_size": 2}, seed=1, checkpoint_storage=s3) as context:
        trial = Buffered(context, Switch())
        result = pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(8),
            checkpoint_period=pytorch.Batch(2),
            checkpoint_policy="all",
        )
    assert result.steps_completed == 8
    storage = storage_from(s3)
    steps = [storage.verify(uuid).metadata["steps_completed"] for uuid in result.checkpoints]
    assert steps == [2, 6, 8]
    # What was sent of the lost one is gone.
    assert sorted(storage.list()) == sorted(result.checkpoints)
    assert storage.sweep(older_than_s=0) == []
    assert re.search(
        r"Training goes on.* Rank 0 could not store '.*\.safetensors' .* but part 2 of 3: ",
        caplog.text,
    )


@pytest.mark.parametrize("hook", ["on_checkpoint_write_end", "on_checkpoint_end", None])
def test_a_hook_finds_the_tensors_that_are_stored(
    hook: str | None, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []

    class Export(pytorch.PyTorchCallback):
        pass

    def export(self: Any, checkpoint_dir: str) -> None:
        large = load_file(Path(checkpoint_dir) / "model_0.safetensors")["large"]
        found.append(large.sum().item())
        Path(checkpoint_dir, "sum").write_text(str(found[-1]))

    if hook is not None:
        setattr(Export, hook, export)
    sent = []
    send = BucketStorage.file_sender
    monkeypatch.setattr(
        BucketStorage, "file_sender", lambda self, path: (sent.append(path), send(self, path))[1]
    )
    with pytorch.init({"global_batch_size": 2}, seed=1, checkpoint_storage=s3) as context:
        trial = Buffered(context, Export())
        result = pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(2))
    files = storage_from(s3).verify(result.checkpoints[-1]).resources
    assert files["model_0.safetensors"] > 20_000_000
    assert ("sum" in files, len(found), len(sent)) == (
        (False, 0, 1) if hook is None else (True, 1, 0)
    )


def save_often() -> None:
    """Save a state of two parts five times."""
    state = torch.arange(2_500_000, dtype=torch.float32)
    for step in range(1, 6):
        train.report(step=step)
        train.save_checkpoint(weights=state, step=step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "file", "what"),
    [
        (0, "state.safetensors?partNumber=2", r"'state.safetensors' .* part 2 of 2"),
        (2, "rank_2.json", r"'rank_2.json' .* part 1 of 1"),
    ],
)
def test_workers_train_on_while_the_upload_of_one_is_stuck(
    s3: str,
    faulty: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    file: str,
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_STORE_PART_TIMEOUT_S", "8")
    seen: list[str] = []
    faulty.hang()
    hang = faulty.fault

    def hang_in_second(line: str, client: Any) -> bool:
        checkpoint = line.split("/")[3] if f"/{file}" in line else None
        if checkpoint is not None and checkpoint not in seen:
            seen.append(checkpoint)
        is_second = checkpoint is not None and seen[1:2] == [checkpoint]
        return bool(hang("/model" if is_second else "", client))

    faulty.fault = hang_in_second
    with train.Trainer(num_workers=3, checkpoint_storage=s3) as trainer:
        results = trainer.run(save_often)
    assert faulty.num_faults
    assert [checkpoint.number for checkpoint in results.checkpoints] == [1, 3, 4, 5]
    storage = storage_from(s3)
    for checkpoint in results.checkpoints:
        storage.verify(checkpoint.uuid)
    assert storage.list() == sorted(checkpoint.uuid for checkpoint in results.checkpoints)
    assert storage.sweep(older_than_s=0) == []
    logs = "".join(path.read_text() for path in (results.run_dir / "logs").iterdir())
    assert re.search(
        rf"Training goes on; .* Rank {rank} could not store {what}: no answer came in time", logs
    )


WRITER = """
import sys, time
from paceline.storage import storage_from

storage = storage_from(sys.argv[1])
for number in range(1000):
    with storage.store_path(f"n{number}") as path:
        for name in "abcd":
            (path / name).write_bytes(name.encode() * 6_000_000)
    storage.commit(f"n{number}", {})
    print(number, flush=True)
"""


@pytest.mark.long
def test_a_writer_that_is_killed_leaves_no_checkpoint_that_is_not_whole(s3: str) -> None:
    storage = storage_from(s3)
    for delay_s in (0.02, 0.1, 0.25):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, s3], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        found = storage.list()
        assert "n0" in found
        for uuid in found:
            storage.verify(uuid)
        left = storage.sweep(older_than_s=0)
        assert not set(left) & set(found)
        assert storage.list() == found
        for uuid in found:
            storage.delete(uuid)


def test_a_package_that_is_missing_is_named(run_python: Any) -> None:
    code = """
import sys
sys.modules["obstore"] = None
from paceline.storage import storage_from
storage_from("s3://bucket")
"""
    done = run_python(code)
    assert "Hint: pip install 'paceline[s3]'." in done.stderr


KILLED = """
import os, signal, sys
from paceline import core

with core.init(name="killed", resume="auto", checkpoint_storage=sys.argv[1]) as context:
    if context.latest_checkpoint is None:
        with context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
            (path / "model").write_bytes(b"whole")
        storage = context.checkpoint.storage
        send = storage._send
        def killed(key, file, timeout_s):
            send(key, file, timeout_s)
            if key.endswith("model"):
                os.kill(os.getpid(), signal.SIGKILL)
        storage._send = killed
        with context.checkpoint.store_path({"steps_completed": 2}) as (path, _):
            (path / "model").write_bytes(b"never whole")
"""


@pytest.mark.long
def test_a_run_that_goes_on_removes_what_it_had_begun_to_store(s3: str, run_python: Any) -> None:
    storage = storage_from(s3)
    assert isinstance(storage, ObjectStorage)
    assert run_python(KILLED, s3).returncode == -signal.SIGKILL
    [whole] = storage.list()
    assert len({each.key.split("/")[-2] for each in storage.objects("")} - {".open"}) == 2
    done = run_python(KILLED, s3)
    assert done.returncode == 0, done.stderr
    assert {each.key.split("/")[0] for each in storage.objects("")} == {whole}


BEGUN = """
import sys
from paceline import core

distributed = core.DistributedContext.from_torch_distributed()
with core.init(distributed=distributed, checkpoint_storage=sys.argv[1]) as context:
    with context.checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, _):
        (path / f"model{context.distributed.rank}").write_bytes(b"never whole")
"""


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
def test_what_killed_processes_had_sent_is_removed_although_it_lands_later(
    rank: int,
    s3: str,
    s3_server: str,
    faulty: Any,
    clean_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The server is at work on a file while what is left of the checkpoint is removed."""
    (tmp_path / "begun.py").write_text(BEGUN)
    program = [sys.executable, "-m", "paceline.launch.torch_distributed", "--nproc-per-node", "3"]
    launch = subprocess.Popen([*program, "begun.py", s3], cwd=tmp_path, env=clean_environment)
    is_killed, may_land = threading.Event(), threading.Event()
    landed: list[str] = []

    def kill(line: str, _client: Any) -> bool:
        if f"/model{rank}" in line:
            # All at once, as when a machine ends: they remove nothing.
            processes = [psutil.Process(launch.pid)]
            processes += processes[0].children(recursive=True)
            for action in (psutil.Process.suspend, psutil.Process.kill):
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        action(process)
            launch.wait()
            is_killed.set()
            assert may_land.wait(60)
        return True

    def wait_for_server(_seconds: float) -> None:
        may_land.set()
        faulty.settle()
        landed.extend(each.key.rpartition("/")[2] for each in storage.objects(""))

    faulty.fault = kill
    assert is_killed.wait(120)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    storage = storage_from(s3)
    assert isinstance(storage, ObjectStorage)
    monkeypatch.setattr(_unfinished_checkpoints.time, "sleep", wait_for_server)
    [run] = (tmp_path / "paceline_runs").iterdir()
    discard_unfinished(RunDirectory.open(run))
    assert f"model{rank}" in landed
    assert storage.objects("") == []
    assert RunDirectory.open(run).begun_checkpoints() == {}
