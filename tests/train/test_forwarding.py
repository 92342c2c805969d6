"""Runs whose directory the workers' nodes do not see: all reaches it through the driver."""

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from paceline import train
from paceline._base.files import temporary_directory
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import RunInfo, TrialInfo
from paceline._training.workers.channels import BlockingChannel, DriverLink, FrameKind
from paceline._training.workers.ray import forwarded_storage as _storage_requests
from paceline._training.workers.ray.forwarded_storage import (
    ForwardedRun,
    ForwardedStorage,
    StorageRequests,
)
from paceline._training.workers.ray.host_process import Forwarder
from paceline._training.workers.ray.hosts import RequestServer
from paceline.core._background_checkpoints import commit_checkpoint
from paceline.journal import JournalReader, ProgressReported, RunDirectory
from paceline.storage import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DirectoryStorage,
    storage_from,
)
from paceline.storage._checkpoint_files import origin_of

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LARGE = bytes(range(256)) * 40_000


@pytest.fixture(autouse=True)
def no_leaked_signal_handlers() -> None:
    """Leave SIGTERM to Ray's nodes, which set it in this process."""


class Way:
    """The whole way from a worker to its driver, with both ends in this process."""

    def __init__(self) -> None:
        worker, host_to_worker = socket.socketpair()
        host_to_driver, driver = socket.socketpair()
        self.worker = BlockingChannel(worker)
        self.host = BlockingChannel(host_to_driver)
        self.driver = BlockingChannel(driver)
        self.link = DriverLink(self.worker)
        self.forwarder = Forwarder(host_to_worker, self.host)
        self.request_server = RequestServer(StorageRequests, self.driver)
        self.threads = [
            threading.Thread(target=self._serve),
            threading.Thread(target=self._return_answers),
        ]
        self.forwarder.start()
        for thread in self.threads:
            thread.start()

    def _serve(self) -> None:
        while (frame := self.driver.receive()) is not None:
            self.request_server.take(frame)
        self.request_server.close()

    def _return_answers(self) -> None:
        while (frame := self.host.receive()) is not None:
            assert frame.kind is FrameKind.ANSWER
            self.forwarder.answer(frame)

    def lose_worker(self) -> None:
        """Do what a host does when its worker has ended."""
        self.worker.close()
        self.forwarder.finish()

    def close(self) -> None:
        self.lose_worker()
        self.host.close()
        for thread in self.threads:
            thread.join(60)
        self.driver.close()


@pytest.fixture
def way() -> Iterator[Way]:
    way = Way()
    yield way
    way.close()


@pytest.fixture
def theirs(tmp_path: Path) -> DirectoryStorage:
    return DirectoryStorage(tmp_path / "driver" / "checkpoints")


@pytest.fixture
def storage(way: Way, theirs: DirectoryStorage) -> ForwardedStorage:
    return ForwardedStorage(theirs.url, way.link)


def test_checkpoints_arrive_whole_and_come_back(
    storage: ForwardedStorage, theirs: DirectoryStorage, tmp_path: Path
) -> None:
    assert storage.missing_shards("one", 2) == [0, 1]
    for rank in range(2):
        with storage.store_shard("one", rank) as path:
            assert tmp_path not in path.parents
            (path / f"large_{rank}").write_bytes(LARGE)
            # Other processes remove what killed ones have left, and nothing else.
            with temporary_directory():
                assert path.exists()
            (path / "files").mkdir()
            (path / "files" / f"empty_{rank}").touch()
        assert storage.missing_shards("one", 2) == [1][rank:]
        assert not theirs.exists("one")
    manifest = storage.commit("one", {"step": 3}, num_shards=2)
    assert theirs.verify("one") == manifest == storage.manifest("one")
    assert storage.list() == ["one"]
    with storage.restore_path("one") as path:
        assert theirs.root not in path.parents
        assert (path / "large_1").read_bytes() == LARGE
        assert (path / "files" / "empty_0").read_bytes() == b""
    assert not path.exists()
    storage.delete("one")
    assert theirs.list() == []


def test_a_checkpoint_that_is_being_written_is_noted_with_the_driver(
    way: Way, tmp_path: Path
) -> None:
    theirs, mine = RunDirectory(tmp_path), ForwardedRun(tmp_path, way.link)
    mine.note_checkpoint("one", "file:///elsewhere")
    assert theirs.begun_checkpoints() == {"one": "file:///elsewhere"}
    mine.forget_checkpoint("one")
    assert theirs.begun_checkpoints() == {}


def test_a_checkpoint_of_a_forwarded_run_names_the_attempt_of_its_master(
    way: Way,
    storage: ForwardedStorage,
    theirs: DirectoryStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = TrialInfo(trial_id=7, experiment_id=1, trial_seed=0, hparams={}, config={})
    info = RunInfo(
        run_id="r", name="n", created=0.0, checkpoint_storage=theirs.url, cluster_id="cluster",
        trial=trial, attempt=2,
    )  # fmt: skip
    seen_by_driver = RunDirectory.create(tmp_path / "run", info)
    monkeypatch.setattr(_storage_requests, "RunDirectory", {Path("/run"): seen_by_driver}.get)
    run = ForwardedRun(Path("/run"), way.link)
    with storage.store_shard("one", 0) as path:
        (path / "file").touch()
    with closing(JournalWriter(tmp_path / "node" / "journal")) as journal:
        commit_checkpoint(run, storage, journal, "one", {"steps_completed": 1}, num_shards=1)
    assert theirs.manifest("one").origin == origin_of("cluster", 7, 2)


def test_single_files_are_fetched_and_deleted(
    storage: ForwardedStorage, theirs: DirectoryStorage, tmp_path: Path
) -> None:
    with storage.store_path("one") as path:
        for name in ("model", "optimizer"):
            (path / name).write_text(name)
    storage.commit("one", {"steps_completed": 1})
    (theirs.root / "one" / "optimizer").unlink()
    storage.download("one", tmp_path / "copy", selects=lambda name: name == "model")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["model"]
    with storage.restore_path("one", selects=lambda name: False) as path:
        assert list(path.iterdir()) == []
    assert storage.delete_files("one", lambda name: name == "optimizer").deleted == ["optimizer"]
    assert list(theirs.verify("one").files) == ["model"]


def test_an_error_of_the_drivers_storage_keeps_its_type(
    storage: ForwardedStorage, theirs: DirectoryStorage
) -> None:
    with pytest.raises(CheckpointNotFoundError, match="none must be committed in"):
        storage.manifest("none")
    with storage.store_path("one") as path:
        (path / "state").write_bytes(b"right")
    storage.commit("one", {})
    (theirs.root / "one" / "state").chmod(0o600)
    (theirs.root / "one" / "state").write_bytes(b"wrong")
    with (
        pytest.raises(CheckpointCorruptError, match="must arrive whole .* 'state' was altered"),
        storage.restore_path("one"),
    ):
        pass


def test_a_worker_that_ends_while_it_sends_leaves_no_part(
    way: Way, storage: ForwardedStorage, theirs: DirectoryStorage
) -> None:
    way.link.ask("begin", theirs.url, "one", 1, False)
    way.link.ask("write", "one", "state", b"half")
    assert theirs.missing_shards("one", 2) == [0, 1]
    way.close()
    assert list((theirs.root / "one").iterdir()) == []
    with pytest.raises((ConnectionError, OSError), match="."):
        storage.list()


def test_a_full_disk_of_the_driver_is_told_to_the_worker(
    way: Way, small_disk: Path, fill_disk: Callable[..., None]
) -> None:
    storage = ForwardedStorage(str(small_disk / "checkpoints"), way.link)
    with (
        pytest.raises(CheckpointWriteError, match="what was written of it is removed"),
        storage.store_shard("one", 0) as path,
    ):
        (path / "state").write_bytes(LARGE)
    with storage.store_shard("two", 0) as path:
        (path / "state").write_bytes(b"small")
    assert storage.commit("two", {}).resources == {"state": 5}


def progress_in(directory: Path) -> list[float]:
    records = [entry.decode() for entry in JournalReader(directory)]
    return [record.progress for record in records if isinstance(record, ProgressReported)]


def test_records_arrive_before_the_next_answer_and_after_the_workers_death(
    way: Way, tmp_path: Path
) -> None:
    root, target = tmp_path / "node", tmp_path / "driver" / "journal"
    journal = JournalWriter(root / "journal", segment_bytes=1000)
    way.link.forward(root, root / "journal", target)
    for number in range(100):
        journal.append(ProgressReported(time=0.0, progress=number / 100))
    way.link.ask("sync")
    assert progress_in(target) == [number / 100 for number in range(100)]
    assert len(list(target.iterdir())) > 1
    journal.append(ProgressReported(time=0.0, progress=1.0))
    way.lose_worker()
    way.close()
    assert progress_in(target)[-1] == 1.0
    assert not root.exists()
    journal.close()


# ---- nodes with disks of their own -----------------------------------------------------------


def fit(config: dict[str, Any]) -> Any:
    """Train on numbers that differ by rank and step; rank 1 kills itself once."""
    torch.manual_seed(0)
    model = train.prepare_model(torch.nn.Linear(3, 1))
    optimizer = train.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = train.load_checkpoint(files_to="restored")
    first = 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        assert Path("restored/note.txt").read_text() == str(first)
    for step in range(first, 6):
        optimizer.zero_grad()
        value = torch.full((2, 3), (train.world_rank() + 1) * (step + 1) / 7)
        loss = model(value).square().mean()
        train.backward(loss)
        optimizer.step()
        train.report(loss=loss.item(), step=step)
        if step == 4 and config.get("dies") and state is None and train.world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        Path("note.txt").write_text(str(step + 1))
        train.save_checkpoint(model=model, optimizer=optimizer, step=step + 1, files="note.txt")
    assert "run_dir" not in config or not Path(config["run_dir"]).exists()
    return model.weight.tolist(), train.node_rank()


class Heard(train.TrainingCallback):
    """Keeps which reports came."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int, int]] = []

    def handle_result(self, report: train.Report) -> None:
        self.reports.append((report.generation, report.rank, report["step"]))


def left_on_nodes() -> set[Path]:
    """Return what is there of the directories from which nodes forward."""
    return set(Path(tempfile.gettempdir()).glob("paceline-run-*"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_need_not_see_the_run_directory(
    ray_cluster: Any, nodes_with_own_disks: Callable[[int], Path]
) -> None:
    run_dir = nodes_with_own_disks(2) / "run"
    config = {"run_dir": str(run_dir)}
    strategy = train.CheckpointStrategy(num_to_keep=2)
    before = left_on_nodes()
    heard = Heard()
    with train.Trainer(
        num_workers=2, resources_per_worker={"elsewhere": 1}, run_dir=run_dir
    ) as trainer:
        undisturbed = trainer.run(fit, config, checkpoint_strategy=strategy)
        disturbed = trainer.run(
            fit, {**config, "dies": True}, callbacks=[heard], checkpoint_strategy=strategy
        )
    assert [node for _, node in undisturbed] == [0, 1]
    assert (undisturbed.num_restarts, disturbed.num_restarts) == (0, 1)
    assert list(disturbed) == list(undisturbed)
    for results in (undisturbed, disturbed):
        assert [report["step"] for report in results.metrics_of(1)] == list(range(6))
        checkpoints = DirectoryStorage(results.run_dir / "checkpoints")
        assert sorted(checkpoints.list()) == sorted(c.uuid for c in results.checkpoints)
        assert len(results.checkpoints) == 2
        assert results.checkpoints[-1].load()["step"] == 6
    # What it reported last before it killed itself.
    assert (0, 1, 4) in heard.reports
    assert left_on_nodes() <= before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_send_checkpoints_to_a_bucket_themselves(
    ray_cluster: Any,
    nodes_with_own_disks: Callable[[int], Path],
    s3: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(*_: Any) -> None:
        raise AssertionError("A part came through the driver.")

    monkeypatch.setattr(StorageRequests, "begin", forward)
    run_dir = nodes_with_own_disks(2) / "run"
    config = {"run_dir": str(run_dir), "dies": True}
    strategy = train.CheckpointStrategy(num_to_keep=2)
    with train.Trainer(
        num_workers=2,
        resources_per_worker={"elsewhere": 1},
        run_dir=run_dir,
        checkpoint_storage=s3,
    ) as trainer:
        results = trainer.run(fit, config, checkpoint_strategy=strategy)
    assert results.num_restarts == 1
    assert results.checkpoints[-1].load()["step"] == 6
    storage = storage_from(s3)
    assert storage.list() == sorted(c.uuid for c in results.checkpoints)
    assert storage.sweep(older_than_s=0) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [[0, 1], [2]])
def test_a_node_that_sees_only_the_run_directory_sends_its_parts_of_checkpoints(
    ray_cluster: Any,
    nodes_with_own_disks: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    ranks: list[int],
) -> None:
    # The ranks of the node with the most workers come first.
    storage = nodes_with_own_disks(1, len(ranks)) / "checkpoints"
    num_others = 3 - len(ranks)
    seeing = ray_cluster.add_node(num_cpus=num_others, resources={"elsewhere": num_others})
    before = left_on_nodes()
    try:
        with train.Trainer(
            3,
            resources_per_worker={"elsewhere": 1},
            run_dir=tmp_path / "run",
            checkpoint_storage=storage,
        ) as trainer:
            results = trainer.run(
                fit, {"dies": True}, checkpoint_strategy=train.CheckpointStrategy(num_to_keep=2)
            )
            there = trainer.execute(lambda: sorted(map(str, storage.rglob("*"))))
    finally:
        ray_cluster.remove_node(seeing, allow_graceful=False)
    assert results.num_restarts == 1
    assert [report["step"] for report in results.metrics_of(2)] == list(range(6))
    assert results.checkpoints[-1].load()["step"] == 6
    kept = sorted(checkpoint.uuid for checkpoint in results.checkpoints)
    assert sorted(path.name for path in storage.iterdir()) == kept
    assert DirectoryStorage(storage).list() == kept
    # Nothing is on a disk that nobody reads.
    assert [rank for rank, files in enumerate(there) if not files] == ranks
    told = capfd.readouterr().err
    for rank in range(3):
        is_told = f"(rank {rank}) sees the run directory, but not the checkpoint storage" in told
        assert is_told == (rank in ranks)
    assert left_on_nodes() <= before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_that_see_only_the_storage_write_their_parts_there(
    ray_cluster: Any,
    nodes_with_own_disks: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(*_: Any) -> None:
        raise AssertionError("A part came through the driver.")

    monkeypatch.setattr(StorageRequests, "begin", forward)
    run_dir = nodes_with_own_disks(2) / "run"
    storage = DirectoryStorage(tmp_path / "checkpoints")
    with train.Trainer(
        2,
        resources_per_worker={"elsewhere": 1},
        run_dir=run_dir,
        checkpoint_storage=storage.root,
    ) as trainer:
        config = {"run_dir": str(run_dir), "dies": True}
        results = trainer.run(
            fit, config, checkpoint_strategy=train.CheckpointStrategy(num_to_keep=2)
        )
    assert results.num_restarts == 1
    assert results.checkpoints[-1].load()["step"] == 6
    kept = sorted(checkpoint.uuid for checkpoint in results.checkpoints)
    assert sorted(path.name for path in storage.root.iterdir()) == kept
    assert storage.list() == kept
