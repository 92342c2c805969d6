"""Media that a script reports: files below the run directory, and records that name them."""

import errno
import hashlib
import io
import os
import subprocess
import wave
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image

from paceline import core
from paceline._base.journal_records import MediaReported, RecordLost
from paceline._base.run_directory import RunDirectory


def media_of(path: Path) -> list[MediaReported]:
    """Return all media reports of a run, checked against their files."""
    reports = [row.report for row in core.read_media(RunDirectory(path))]
    for report in reports:
        for file in report.files:
            data = (path / "files" / file.path).read_bytes()
            assert (file.size, file.digest) == (len(data), hashlib.sha256(data).hexdigest())
            assert file.path.startswith(f"media/{report.name}/{report.steps_completed}-")
            assert file.digest[:12] in file.path
    return reports


def content(path: Path, report: MediaReported, index: int = 0) -> bytes:
    return (path / "files" / report.files[index].path).read_bytes()


def pixels(path: Path, report: MediaReported, index: int = 0) -> Any:
    return np.asarray(Image.open(io.BytesIO(content(path, report, index))))


RED = np.array([[[255, 0, 0], [0, 0, 255]]], np.uint8)


@pytest.mark.parametrize(
    "image",
    [
        RED,
        RED / 255.0,
        RED.astype(np.int64),
        np.moveaxis(RED, -1, 0),
        torch.from_numpy(RED).permute(2, 0, 1),
        (torch.from_numpy(RED).permute(2, 0, 1) / 255).to(torch.bfloat16),
        Image.fromarray(RED),
    ],
    ids=["bytes", "floats", "integers", "channels first", "tensor", "bfloat16", "Pillow"],
)
def test_an_image_keeps_its_colours(image: Any) -> None:
    with core.init() as context:
        context.train.report_image(3, "val/samples", image, captions="red, blue")
    [report] = media_of(context.run_dir)
    assert (report.kind, report.group, report.steps_completed) == ("image", "training", 3)
    assert pixels(context.run_dir, report).tolist() == RED.tolist()
    [file] = report.files
    assert (file.media_type, file.caption) == ("image/png", "red, blue")
    assert file.facts == {"width": 2, "height": 1}


def test_several_images_of_one_call_are_one_report(tmp_path: Path) -> None:
    Image.fromarray(RED).save(tmp_path / "given.jpg")
    given = [RED, torch.zeros(2, 3, 4, 4), tmp_path / "given.jpg", np.eye(3, dtype=bool)]
    with core.init() as context:
        context.train.report_image(1, "many", given, captions=list("abcde"))
        with pytest.raises(ValueError, match="or one for each of 5 files, but has 2"):
            context.train.report_image(1, "many", given, captions=["a", "b"])
        with pytest.raises(ValueError, match="must have 1 to 100 files, but has 101"):
            context.train.report_image(1, "many", [RED] * 101)
    [report] = media_of(context.run_dir)
    assert [file.caption for file in report.files] == list("abcde")
    assert content(context.run_dir, report, 3) == (tmp_path / "given.jpg").read_bytes()
    assert report.files[3].media_type == "image/jpeg"
    assert pixels(context.run_dir, report, 4).tolist() == (np.eye(3) * 255).tolist()


def test_values_that_are_no_colours_are_shown_and_counted() -> None:
    with core.init() as context:
        context.train.report_image(1, "odd", np.array([[nan, -3.0, 0.5], [inf, 1.0, -inf]]))
    [report] = media_of(context.run_dir)
    assert pixels(context.run_dir, report).tolist() == [[0, 0, 128], [255, 255, 0]]
    assert report.files[0].facts["num_out_of_range"] == 4


@pytest.mark.parametrize(
    ("image", "error", "match"),
    [
        (np.zeros((0, 3)), ValueError, "must have 1 to 67,108,864 pixels, but is 3 x 0"),
        (np.zeros((5, 6, 2)), ValueError, r"channels, but has \(5, 6, 2\)"),
        (np.zeros(5), ValueError, r"with 1, 3 or 4 channels, but has \(5,\)"),
        (np.zeros((4, 5), complex), TypeError, "must be an array of numbers, but got ndarray"),
        (np.full((2, 2), 256), ValueError, "values from 0 to 255, but has some from 256"),
        (object(), TypeError, r"must be an array of numbers, but got object \(object\)"),
        (np.broadcast_to(np.uint8(0), (20_000, 20_000)), ValueError, "but is 20000 x 20000"),
        ([], ValueError, "must have 1 to 100 files, but has 0"),
    ],
    ids=["empty", "channels", "line", "complex", "too bright", "object", "huge", "none"],
)
def test_what_is_no_image_is_refused(image: Any, error: type[Exception], match: str) -> None:
    with core.init() as context, pytest.raises(error, match=match):
        context.train.report_image(1, "wrong", image)
    assert media_of(context.run_dir) == []


def test_a_long_image_is_taken() -> None:
    with core.init() as context:
        context.train.report_image(1, "long", np.zeros((3, 20_000), np.uint8))
    assert media_of(context.run_dir)[0].files[0].facts == {"width": 20_000, "height": 3}


@pytest.mark.parametrize("name", ["", "/a", "a/../b", "a//b", ".", "a\\b", "a\0b", "x" * 201, "\n"])
def test_a_name_that_is_no_path_is_refused(name: str) -> None:
    with core.init() as context, pytest.raises(ValueError, match="must be|must have"):
        context.train.report_text(1, name, "text")
    assert media_of(context.run_dir) == []


def test_sound_is_kept_as_wav(tmp_path: Path) -> None:
    samples = np.array([[0.0, 1.0], [-1.0, 2.0]], np.float32)
    with core.init() as context:
        report = context.train.report_audio
        report(1, "sound", samples, sample_rate=8000)
        report(2, "sound", np.array([1, -2], np.int16), sample_rate=2)
        report(3, "sound", context.run_dir / "files" / media_of(context.run_dir)[0].files[0].path)
        with pytest.raises(ValueError, match="`sample_rate` must be samples per second, but got N"):
            report(4, "sound", samples)
        with pytest.raises(TypeError, match="floats or 16-bit integers, but has int64"):
            report(4, "sound", [1, 2], sample_rate=8000)
        with pytest.raises(ValueError, match=r"shape \(samples,\) or .*, but has \(1, 1, 1\)"):
            report(4, "sound", np.zeros((1, 1, 1)), sample_rate=8000)
    first, second, third = media_of(context.run_dir)
    with wave.open(io.BytesIO(content(context.run_dir, first))) as file:
        assert (file.getframerate(), file.getnchannels()) == (8000, 2)
        assert np.frombuffer(file.readframes(2), "<i2").tolist() == [0, 32767, -32767, 32767]
    assert second.files[0].facts == {"sample_rate": 2, "seconds": 1.0}
    assert content(context.run_dir, third) == content(context.run_dir, first)


def test_frames_become_an_animated_image() -> None:
    frames = np.zeros((3, 4, 5, 3), np.uint8)
    frames[1:, ..., 1] = [[[100]], [[200]]]
    with core.init() as context:
        context.train.report_video(1, "film", frames, frames_per_second=4)
        with pytest.raises(ValueError, match=r"A video must have the shape .*, but has \(4, 5, 3"):
            context.train.report_video(1, "film", frames[0])
    [report] = media_of(context.run_dir)
    film: Any = Image.open(io.BytesIO(content(context.run_dir, report)))
    assert (film.n_frames, film.size) == (3, (5, 4))
    shown = []
    for number in range(3):
        film.seek(number)
        shown.append(film.convert("RGB").getpixel((0, 0))[1])
    assert shown == [0, 100, 200]
    assert report.files[0].facts == {"width": 5, "height": 4, "frames": 3, "fps": 4}


ROWS = [{"name": "a", "loss": 0.5}, {"name": "b", "loss": None}]


@pytest.mark.parametrize(
    "table",
    [
        ROWS,
        {"name": ["a", "b"], "loss": [0.5, nan]},
        pd.DataFrame({"name": ["a", "b"], "loss": [0.5, nan]}),
        pa.Table.from_pylist(ROWS),
    ],
    ids=["rows", "columns", "pandas", "Arrow"],
)
def test_a_table_of_any_kind_has_columns_and_rows(table: Any) -> None:
    with core.init() as context:
        context.train.report_table(1, "errors", table)
    [report] = media_of(context.run_dir)
    assert msgspec.json.decode(content(context.run_dir, report)) == {
        "columns": ["name", "loss"],
        "rows": [["a", 0.5], ["b", None]],
    }
    assert report.files[0].facts == {"columns": 2, "rows": 2}


def test_cells_are_what_json_has() -> None:
    cells = [2**70, np.int32(3), torch.tensor(1.5), inf, True, [1, None], b"x", "\ud800", "ä"]
    with core.init() as context:
        context.train.report_table(1, "cells", {"x": cells})
    [report] = media_of(context.run_dir)
    rows = msgspec.json.decode(content(context.run_dir, report))["rows"]
    expected = [str(2**70), 3, 1.5, None, True, [1, None], "b'x'", "?", "ä"]
    assert [row[0] for row in rows] == expected


@pytest.mark.parametrize(
    ("table", "error", "match"),
    [
        ({"a": [1], "b": [1, 2]}, ValueError, "columns of a table must be equally long"),
        ([1, 2], TypeError, "A table must be a data frame .* but got list"),
        ({"a": range(100_001)}, ValueError, "at most 100,000 rows, but has 100,001"),
    ],
)
def test_what_is_no_table_is_refused(table: Any, error: type[Exception], match: str) -> None:
    with core.init() as context, pytest.raises(error, match=match):
        context.train.report_table(1, "wrong", table)


def test_a_histogram_counts_what_is_finite() -> None:
    with core.init() as context:
        context.train.report_histogram(1, "w", torch.tensor([0.0, 1.0, 1.0, nan]), num_bins=2)
        context.train.report_histogram(2, "w", [0, 1, 3], counts=[4, 5])
        context.train.report_histogram(3, "w", [nan], num_bins=1)
        with pytest.raises(ValueError, match="A histogram must have values, but got none"):
            context.train.report_histogram(4, "w", [])
        with pytest.raises(ValueError, match=r"one more than counts .* are \(2,\) and \(2,\)"):
            context.train.report_histogram(4, "w", [0, 1], counts=[4, 5])
        with pytest.raises(ValueError, match="`num_bins` must be from 1 to 1000, but got 0"):
            context.train.report_histogram(4, "w", [1.0], num_bins=0)
    first, second, third = [report.value for report in media_of(context.run_dir)]
    assert first == {"bins": [0.0, 0.5, 1.0], "counts": [1, 2], "num_left_out": 1}
    assert second == {"bins": [0.0, 1.0, 3.0], "counts": [4, 5]}
    assert (third["counts"], third["num_left_out"]) == ([0], 1)


def test_texts_pages_figures_and_files(tmp_path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    class Plotly:
        def to_plotly_json(self) -> dict[str, Any]:
            return {"data": []}

        def to_json(self) -> str:
            return '{"data":[]}'

    page = tmp_path / "page.html"
    page.write_text("<p>file</p>")
    (tmp_path / "data.npz").write_bytes(b"123")
    figure, axes = pyplot.subplots()
    with core.init() as context:
        train = context.train
        train.report_text(1, "answer", "short \ud800")
        train.report_text(2, "answer", "x" * 20_000)
        train.report_html(1, "page", "<p>text</p>")
        train.report_html(2, "page", page)
        train.report_figure(1, "plot", axes)
        train.report_figure(2, "plot", Plotly())
        train.report_file(1, "file", tmp_path / "data.npz", captions="all")
        with pytest.raises(TypeError, match="one of Matplotlib or Plotly, but got dict"):
            train.report_figure(1, "plot", {})
        with pytest.raises(TypeError, match="`text` must be a string, but got 3"):
            train.report_text(1, "answer", 3)  # type: ignore[arg-type]
        with pytest.raises(FileNotFoundError):
            train.report_file(1, "file", tmp_path / "missing")
        with pytest.raises(ValueError, match="must be a regular one of at most 268,435,456 bytes"):
            train.report_file(1, "file", tmp_path)
    pyplot.close(figure)
    reports = media_of(context.run_dir)
    assert reports[0].value == "short ?"
    assert [report.kind for report in reports] == [*2 * ["text"], *2 * ["html"], *2 * ["figure"],
                                                   "file"]  # fmt: skip
    assert [content(context.run_dir, report)[:11] for report in reports[1:4]] == [
        b"x" * 11, b"<p>text</p>", b"<p>file</p>",
    ]  # fmt: skip
    assert pixels(context.run_dir, reports[4]).shape == (480, 640, 4)
    assert reports[5].files[0].path.endswith(".plotly.json")
    assert reports[5].files[0].media_type == "application/json"
    assert reports[6].files[0].facts == {"name": "data.npz"}


def test_what_a_resumed_run_repeats_is_superseded() -> None:
    with core.init(name="again") as context:
        for step in (1, 2, 3):
            context.train.report_text(step, "said", f"first {step}")
            if step == 2:
                with context.checkpoint.store_path({"steps_completed": 2}) as (path, _):
                    (path / "state").write_text("")
    with core.init(name="again", resume=context.run_dir) as context:
        context.train.report_text(3, "said", "second 3")
    rows = list(core.read_media(RunDirectory(context.run_dir), "said"))
    assert [(row.report.value, row.attempt, row.is_superseded) for row in rows] == [
        ("first 1", 0, False), ("first 2", 0, False), ("first 3", 0, True), ("second 3", 1, False),
    ]  # fmt: skip
    assert list(core.read_media(RunDirectory(context.run_dir), "other")) == []


KILLED = """
from paceline import core
with core.init(name="killed") as context:
    context.train.report_text(1, "said", "kept")
    context.train.report_html(2, "page", "<p>lost</p>")
"""


def test_a_kill_between_file_and_record_leaves_what_was_reported(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    result = run_python(KILLED, PACELINE_FAULT="core.media_written:2")
    assert result.returncode == -9, result.stderr
    [path] = (tmp_path / "paceline_runs").iterdir()
    assert [report.value for report in media_of(path)] == ["kept"]
    [orphan] = (path / "files/media/page").iterdir()
    assert orphan.read_text() == "<p>lost</p>"


def test_a_full_disk_costs_media_and_no_training(
    work_directory: Path, caplog: pytest.LogCaptureFixture, records_of: Callable[..., list[Any]]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a full disk needs root, to mount a small one")
    with core.init() as context:
        files = context.run_dir / "files"
        files.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(files)]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("NOT TESTED: a full disk needs the right to mount one")
        try:
            noise = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
            for step in (1, 2):
                context.train.report_image(step, "noise", noise)
            context.train.report_image(3, "small", RED)
            assert [report.name for report in media_of(context.run_dir)] == ["small"]
        finally:
            subprocess.run(["umount", str(files)], check=True)
    lost = [record.reason for record in records_of(context.run_dir, RecordLost)]
    why = os.strerror(errno.ENOSPC)
    assert lost == [f"image 'noise' at step {step}: {why}" for step in (1, 2)]
    assert [r.message for r in caplog.records if "noise" in r.message] == [
        f"The image 'noise' at step 1 is lost ({why}). Training goes on; further lost media are"
        f" counted only. Hint: make room on the disk of {context.run_dir}."
    ]
