"""TensorBoard log directories below `--runs`: shown as runs, live, and safe against strangers."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline._cluster.master.experiments import tensorboard_watcher
from paceline._cluster.master.experiments.tensorboard_watcher import TensorboardWatcher
from paceline._cluster.master.store.metric_rows import read_rows
from paceline._cluster.master.store.run_files import list_files, media_names

tensorboard = pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    path = tmp_path / "logs"
    path.mkdir()
    return path


@pytest.fixture
def new_watcher(master: Any, logs: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a watcher, as each start of a master does."""
    monkeypatch.setattr(tensorboard_watcher, "_SEARCH_S", 0.0)
    core = master.core
    return lambda: TensorboardWatcher(logs, core.database, core.unmanaged, core.files)


@pytest.fixture
def watcher(new_watcher: Callable[[], TensorboardWatcher]) -> TensorboardWatcher:
    return new_watcher()


@pytest.fixture
def writer_of() -> Iterator[Any]:
    """Return a function that makes a writer; each has a thread."""
    made: list[Any] = []

    def make(path: Path, suffix: str = "") -> Any:
        made.append(tensorboard.SummaryWriter(str(path), filename_suffix=suffix))
        return made[-1]

    yield make
    for writer in made:
        writer.close()


def write(writer: Any, *steps: int, name: str = "loss") -> None:
    for step in steps:
        writer.add_scalar(name, 1.0 / (step + 1), step)
    writer.flush()


def runs(master: Any) -> dict[str, str]:
    items = master.http.get("/experiments").json()["items"]
    return {each["name"]: each["state"] for each in items}


def points(master: Any, name: str = "loss", trial: int = 1) -> list[tuple[int, float]]:
    with master.core.database.read() as connection:
        rows = read_rows(connection, trial, "training")
    return [(row.step, row.metrics[name]) for row in rows if name in row.metrics]


def expected(*steps: int) -> list[tuple[int, float]]:
    return [(step, pytest.approx(1.0 / (step + 1))) for step in steps]


def test_a_log_directory_is_a_run_whose_points_come_live(
    master: Any, watcher: TensorboardWatcher, logs: Path, writer_of: Any
) -> None:
    watcher.scan()
    assert runs(master) == {}
    writer = writer_of(logs / "first" / "lr=0.1")
    write(writer, 0, 1)
    watcher.scan()
    assert runs(master) == {"first/lr=0.1": "ACTIVE"}
    assert points(master) == expected(0, 1)
    write(writer, 2)
    watcher.scan()
    watcher.scan()
    assert points(master) == expected(0, 1, 2)
    write(writer_of(logs / "second"), 5)
    watcher.scan()
    assert runs(master) == {"first/lr=0.1": "ACTIVE", "second": "ACTIVE"}
    assert points(master, trial=2) == expected(5)


def test_a_restarted_master_stores_nothing_twice_however_the_file_was_read(
    master: Any, new_watcher: Callable[[], TensorboardWatcher], logs: Path, writer_of: Any
) -> None:
    writer = writer_of(logs)
    write(writer, 0)
    # Read within a step: the row of step 0 has another metric later.
    new_watcher().scan()
    write(writer, 0, name="accuracy")
    write(writer, 1)
    for _ in range(3):
        new_watcher().scan()
    assert points(master) == expected(0, 1)
    assert points(master, "accuracy") == expected(0)
    assert list(runs(master)) == ["logs"]


def test_two_writers_and_a_later_file_of_one_directory_are_one_run(
    master: Any, watcher: TensorboardWatcher, logs: Path, writer_of: Any
) -> None:
    one, other = writer_of(logs, ".one"), writer_of(logs, ".other")
    write(one, 0, 1)
    write(other, 0, 1, name="speed")
    watcher.scan()
    write(one, 2)
    write(other, 2, name="speed")
    watcher.scan()
    write(writer_of(logs, ".later"), 3, 4)
    watcher.scan()
    assert points(master) == expected(0, 1, 2, 3, 4)
    assert points(master, "speed") == expected(0, 1, 2)
    assert len(runs(master)) == 1


def test_a_silent_log_and_a_removed_one_are_completed_and_go_on_if_written_again(
    master: Any, watcher: TensorboardWatcher, logs: Path, writer_of: Any
) -> None:
    quiet, gone = writer_of(logs / "quiet"), writer_of(logs / "gone")
    write(quiet, 0)
    write(gone, 0)
    (path,) = (logs / "quiet").iterdir()
    os.utime(path, (1e9, 1e9))
    watcher.scan()
    (file,) = (logs / "gone").iterdir()
    file.unlink()
    watcher.scan()
    assert runs(master) == {"quiet": "COMPLETED", "gone": "COMPLETED"}
    write(quiet, 1)
    watcher.scan()
    items = master.http.get("/experiments").json()["items"]
    (trial,) = (each["id"] for each in items if each["name"] == "quiet")
    assert points(master, trial=trial) == expected(0, 1)


def test_a_truncated_or_damaged_file_is_named_and_the_others_are_shown(
    master: Any,
    watcher: TensorboardWatcher,
    logs: Path,
    writer_of: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(writer_of(logs / "cut"), 0, 1)
    watcher.scan()
    (path,) = (logs / "cut").iterdir()
    os.truncate(path, 60)
    (logs / "junk").mkdir()
    (logs / "junk" / "events.out.tfevents.1.host").write_bytes(os.urandom(4096))
    write(writer_of(logs / "whole"), 7)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watcher.scan()
    assert points(master, trial=2) == expected(7)
    texts = [each.getMessage() for each in caplog.records]
    assert sum("was cut off from" in text for text in texts) == 1
    assert sum("is damaged from byte 0 on" in text for text in texts) == 1
    assert set(runs(master)) == {"cut", "whole"}


def test_links_runs_and_what_is_too_deep_are_left_out(
    master: Any, watcher: TensorboardWatcher, logs: Path, writer_of: Any, tmp_path: Path
) -> None:
    write(writer_of(tmp_path / "elsewhere"), 0)
    (logs / "link").symlink_to(tmp_path / "elsewhere")
    (logs / "folder").mkdir()
    (file,) = (tmp_path / "elsewhere").iterdir()
    (logs / "folder" / "a.tfevents.1").symlink_to(file)
    os.mkfifo(logs / "folder" / "b.tfevents.2")
    write(writer_of(logs / "run" / "tensorboard" / "rank_0"), 0)
    (logs / "run" / "run.json").write_text("{}")
    write(writer_of(logs.joinpath(*"abcdefghi")), 0)
    watcher.scan()
    assert runs(master) == {}


def test_images_and_histograms_come_along(
    master: Any, watcher: TensorboardWatcher, logs: Path, writer_of: Any
) -> None:
    writer = writer_of(logs)
    writer.add_image("sample", np.zeros((3, 4, 5), dtype=np.uint8), 7)
    writer.add_histogram("weights", np.arange(10.0), 7)
    writer.flush()
    watcher.scan()
    with master.core.database.read() as connection:
        assert {kind for _, _, kind in media_names(connection, 1)} == {"image", "histogram"}
        (file,) = list_files(connection, 1)
    with master.core.files.open(file.digest) as content:
        assert content.read().startswith(b"\x89PNG")
