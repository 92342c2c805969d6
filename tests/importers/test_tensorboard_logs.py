"""TensorBoard's event files, written by its own writer, as records."""

import math
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from paceline._base.journal_records import MediaReported, MetricsReported, decode_value
from paceline.importers._run_writer import RunFiles
from paceline.importers._tensorboard_logs import LogDirectoryReader, log_directories

tensorboard = pytest.importorskip("torch.utils.tensorboard")


def event_file(directory: Path) -> Path:
    (path,) = directory.glob("*tfevents*")
    return path


def write_losses(directory: Path, values: list[float]) -> None:
    writer = tensorboard.SummaryWriter(str(directory))
    for step, value in enumerate(values):
        writer.add_scalar("loss", value, step)
        writer.add_scalar("accuracy", value / 2, step)
    writer.close()


def points(reader: LogDirectoryReader) -> list[tuple[int, dict[str, float]]]:
    return [
        (record.steps_completed, decode_value(record.metrics))
        for record in reader.read()
        if isinstance(record, MetricsReported)
    ]


def test_scalars_of_a_step_become_one_row(tmp_path: Path) -> None:
    write_losses(tmp_path, [1.0, math.inf])
    reader = LogDirectoryReader(tmp_path, RunFiles(None))
    assert points(reader) == [
        (0, {"loss": 1.0, "accuracy": 0.5}),
        (1, {"loss": math.inf, "accuracy": math.inf}),
    ]
    reader.finish()
    assert reader.problems == []


def test_images_histograms_texts_and_hparams_come_along(tmp_path: Path) -> None:
    writer = tensorboard.SummaryWriter(str(tmp_path / "logs"))
    writer.add_image("sample/first", np.zeros((3, 4, 5), dtype=np.uint8), 7)
    writer.add_histogram("weights", np.arange(10.0), 7)
    writer.add_text("note", "hello", 7)
    writer.add_hparams({"lr": 0.5}, {"final": 1.0}, run_name="hp")
    writer.close()
    assert log_directories(tmp_path) == [tmp_path / "logs", tmp_path / "logs" / "hp"]
    reader = LogDirectoryReader(tmp_path / "logs", RunFiles(tmp_path / "files"))
    media = {r.kind: r for r in reader.read() if isinstance(r, MediaReported)}
    (image,) = media["image"].files
    assert image.facts == {"width": 5, "height": 4}
    assert (tmp_path / "files" / image.path).read_bytes().startswith(b"\x89PNG")
    assert sum(media["histogram"].value["counts"]) == 10
    assert len(media["histogram"].value["bins"]) == len(media["histogram"].value["counts"]) + 1
    assert media["text"].value == "hello"
    hparams = LogDirectoryReader(tmp_path / "logs" / "hp", RunFiles(None))
    assert points(hparams) == [(0, {"final": 1.0})]
    assert hparams.hparams == {"lr": 0.5}


def test_event_that_is_written_meanwhile_comes_with_the_next_call(tmp_path: Path) -> None:
    write_losses(tmp_path / "whole", [3.0, 2.0, 1.0])
    data = event_file(tmp_path / "whole").read_bytes()
    (tmp_path / "live").mkdir()
    live = tmp_path / "live" / "events.out.tfevents.1.host"
    reader = LogDirectoryReader(tmp_path / "live", RunFiles(None))
    seen: dict[int, dict[str, float]] = {}
    for end in range(0, len(data) + 1):
        live.write_bytes(data[:end])
        for step, metrics in points(reader):
            seen.setdefault(step, {}).update(metrics)
    assert [metrics["loss"] for metrics in seen.values()] == [3.0, 2.0, 1.0]
    assert reader.problems == []


def frames(data: bytes) -> list[tuple[int, int]]:
    """Return where the contents of the events begin and end in a file."""
    found, place = [], 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        found.append((place + 12, place + 12 + length))
        place += 12 + length + 4
    return found


def test_damage_is_named_and_what_can_be_read_comes(tmp_path: Path) -> None:
    write_losses(tmp_path, [4.0, 3.0, 2.0, 1.0])
    path = event_file(tmp_path)
    data = bytearray(path.read_bytes())
    # The first event is the file's version; then each step has two.
    _, end = frames(bytes(data))[3]
    data[end - 1] ^= 0xFF
    path.write_bytes(bytes(data[:-3]))
    reader = LogDirectoryReader(tmp_path, RunFiles(None))
    found = points(reader)
    reader.finish()
    assert found == [
        (0, {"loss": 4.0, "accuracy": 2.0}),
        (1, {"accuracy": 1.5}),
        (2, {"loss": 2.0, "accuracy": 1.0}),
        (3, {"loss": 1.0}),
    ]
    damaged, cut_off = reader.problems
    assert f"the event that ends at byte {end + 4} is damaged" in damaged
    assert "ends within the event at byte" in cut_off


def test_nothing_after_a_damaged_length_is_guessed(tmp_path: Path) -> None:
    write_losses(tmp_path, [4.0, 3.0])
    path = event_file(tmp_path)
    data = bytearray(path.read_bytes())
    begin, _ = frames(bytes(data))[3]
    data[begin - 12] ^= 0x80
    path.write_bytes(bytes(data))
    reader = LogDirectoryReader(tmp_path, RunFiles(None))
    assert points(reader) == [(0, {"loss": 4.0, "accuracy": 2.0})]
    assert reader.problems == [f"{path} is damaged from byte {begin - 12} on"]


def test_links_and_pipes_are_no_event_files(tmp_path: Path) -> None:
    write_losses(tmp_path / "elsewhere", [1.0])
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.tfevents.1").symlink_to(event_file(tmp_path / "elsewhere"))
    os.mkfifo(logs / "b.tfevents.2")
    (logs / "below").symlink_to(tmp_path / "elsewhere")
    assert log_directories(logs) == [logs]
    reader = LogDirectoryReader(logs, RunFiles(None))
    assert points(reader) == []
    assert len(reader.problems) == 2
