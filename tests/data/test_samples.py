"""Images, WebDataset shards and Hugging Face's data sets."""

import io
import json
import signal
import tarfile
import threading
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from paceline import data
from paceline.data import _file_index_and_format as _webdataset
from paceline.data._sharded_loader import ShardedData


def image(number: int, kind: str = "png") -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), number, np.uint8)).save(content, kind)
    return content.getvalue()


def test_folders_of_images_are_classes(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / "images" / ("cats", "dogs")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(number))
    images = data.read_images(tmp_path / "images")
    assert (len(images), images.source.classes) == (6, ["cats", "dogs"])
    batch = next(iter(images.to_torch(batch_size=6)))
    assert batch["image"].shape == (6, 4, 5, 3)
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 2, 4, 1, 3, 5]
    assert batch["label"].tolist() == [0, 0, 0, 1, 1, 1]
    parts = images.split(2)
    assert sorted(int(row["image"][0, 0, 0]) for part in parts for row in part) == list(range(6))
    (tmp_path / "images" / "dogs" / "1.png").write_bytes(image(1)[:40])
    with pytest.raises(data.DataFormatError, match=r"dogs/1.png' \(40 bytes\) cannot be read"):
        list(data.read_images(tmp_path / "images"))
    with pytest.raises(data.DataNotFoundError, match="such as cats/1.jpg, but there are none that"):
        data.read_images(tmp_path / "images" / "cats")


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_shards_of_webdataset_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: int
) -> None:
    monkeypatch.setattr(_webdataset, "_PIECE_BYTES", 6000)
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w", format=form) as tar:
            for number in range(10 * shard, 10 * shard + 10):
                # Long names and others than ASCII have headers of their own.
                key = f"deep/{'ü' if form != tarfile.USTAR_FORMAT else 'u'}{'x' * 60}{number:06}"
                add(tar, f"{key}.png", image(number))
                add(tar, f"{key}.cls", str(number).encode())
                add(tar, f"{key}.meta.json", json.dumps({"n": number}).encode())
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    shards = data.read(tmp_path / "*.tar")
    assert len(shards.source.chunk_sizes()) > 4
    assert [row["cls"] for row in shards] == list(range(20))
    row = shards[13]
    assert row.keys() == {"__key__", "png", "cls", "meta.json"}
    assert (row["meta.json"], row["png"][0, 0].tolist()) == ({"n": 13}, [13] * 3)
    loader = shards.shuffle(window=8).to_torch(batch_size=5)
    assert sorted(torch.cat([batch["cls"] for batch in loader]).tolist()) == list(range(20))
    content = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(content[:5000])
    with pytest.raises(data.DataFormatError, match=r"1.tar' \(5000 bytes\) cannot be read"):
        data.read(tmp_path / "*.tar")
    assert len(data.read(tmp_path / "empty.tar")) == 0


def hugging_face(path: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    stream = datasets.Dataset.from_dict({"id": list(range(60))}).to_iterable_dataset(num_shards=4)
    return stream.shuffle(seed=1, buffer_size=10).map(lambda row: {"id": row["id"], "n": 1})


@pytest.mark.long
def test_hugging_faces_streams_resume_as_often_as_one_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def read(config: dict[str, Any]) -> list[Any]:
        stream = data.Dataset(hugging_face(tmp_path)).filter(lambda row: row["id"] % 5)
        loader: Any = stream.read_by(config["reader"]).to_torch(batch_size=4)
        first = config.get("stored", {"epoch": 0, "batch": 0})
        sharded = ShardedData(loader, num_shards=1, own_shards=range(1), seed=3)
        sharded.load_stream_state(first.get("stream"))
        batches = sharded.iterate_stream(first["epoch"], first["batch"])
        seen = [batch[0]["id"].tolist() for batch in islice(batches, config["count"])]
        return [seen, sharded.stream_state()]

    class Reader:
        rank, world_size = 0, 1

        def prepare(self, loader: Any, *, is_moved: bool) -> Any:
            return loader

    def at(batch: int, count: int, stream: Any = None, epoch: int = 0) -> list[Any]:
        stored = {"epoch": epoch, "batch": batch, "stream": stream}
        return read({"reader": Reader(), "count": count, "stored": stored})

    whole, _ = at(0, 100)
    assert sorted(sum(whole, [])) == [n for n in range(60) if n % 5]
    first, state = at(0, 3)
    second, state = at(3, 2, state)
    third, _ = at(5, 100, state)
    assert first + second + third == whole
    assert at(0, 100, epoch=1)[0] != whole


def test_hugging_faces_data_sets_with_numbers_are_data_sets() -> None:
    import datasets

    rows = data.Dataset(datasets.Dataset.from_dict({"id": list(range(7))}))
    assert (len(rows), rows[-1]) == (7, {"id": 6})
    assert [b["id"].tolist() for b in rows.to_torch(batch_size=4)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [row["id"] for row in rows.split((2, 3), seed=None)[1]] == [2, 3, 4]


def write_images(directory: Path, sizes: Sequence[tuple[int, int]]) -> Path:
    random = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        path = directory / str(number % 3) / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (*size, 3), np.uint8)).save(path)
    return directory


@pytest.mark.parametrize("num_workers", [0, 2])
def test_images_that_are_decoded_ahead_are_the_batches_of_torch(
    tmp_path: Path, num_workers: int, request: pytest.FixtureRequest
) -> None:
    # Torch handles SIGCHLD from a loader's first process on.
    handler = signal.getsignal(signal.SIGCHLD)
    request.addfinalizer(lambda: signal.signal(signal.SIGCHLD, handler))
    images = data.read_images(write_images(tmp_path / "images", [(8, 6)] * 23))
    drawn: list[float] = []

    def augment(sample: dict[str, Any]) -> dict[str, Any]:
        drawn.append(torch.rand(()).item())
        return {**sample, "image": sample["image"] + 1}

    for files in (images, images.map(augment), images.split(2)[0], images.get_shard(1, 2)):
        for collate in (None, lambda samples: len(samples)):
            torch.manual_seed(3)
            loader = files.shuffle().to_torch(5, num_workers=num_workers, collate=collate)
            got, after, drawn_ahead = list(loader), torch.rand(()), drawn[:]
            torch.manual_seed(3)
            plain = DataLoader(loader.dataset, 5, shuffle=True, collate_fn=collate)
            drawn.clear()
            expected = list(plain)
            assert len(got) == len(expected)
            for one, other in zip(got, expected, strict=True):
                if collate is not None:
                    assert one == other
                    continue
                assert torch.equal(one["image"], other["image"])
                assert torch.equal(one["label"], other["label"])
            if not num_workers:
                # The stages draw in the order of the batches, and nothing else draws.
                assert (after, drawn_ahead) == (torch.rand(()), drawn)
            drawn.clear()


def test_decoding_ahead_fails_at_the_batch_of_the_image_and_leaves_no_thread(
    tmp_path: Path,
) -> None:
    directory = write_images(tmp_path / "images", [(8, 6)] * 20 + [(8, 7)])
    batches = iter(data.read_images(directory).to_torch(7))
    assert [len(next(batches)["label"]), len(next(batches)["label"])] == [7, 7]
    with pytest.raises(ValueError, match=r"`image` has the shapes \[8, 6, 3\] and \[8, 7, 3\]\. H"):
        next(batches)
    (directory / "1" / "10.jpg").write_bytes(b"no image")
    batches = iter(data.read_images(directory).to_torch(7, shuffle=False))
    next(batches)
    with pytest.raises(data.DataFormatError, match=r"1/10.jpg' \(8 bytes\) cannot be read"):
        next(batches)
    abandoned = iter(data.read_images(directory).to_torch(1))
    next(abandoned)
    del abandoned, batches
    deadline = time.monotonic() + 60
    while any(each.name.startswith("paceline-decode") for each in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


VARIED: dict[str, tuple[Any, str]] = {
    "shapes": ([{"x": np.zeros(2)}, {"x": np.zeros(3)}], r"`x` has the shapes \[2\] and \[3\]"),
    "lengths": ([([1, 2], 0), ([1], 0)], r"a sample\[0\] has the lengths 2 and 1"),
    "none": ([{"n": 1, "x": 1.5}, {"n": 2, "x": None}], "`x` is float or None"),
    "keys": ([{"x": 1, "y": 2}, {"x": 1}], r"a sample has the keys \['x', 'y'\] and \['x'\]"),
    "nested": ([{"a": {"x": 1}}, {"a": {"x": "1"}}], r"`a`\['x'\] is int or str"),
    "objects": ([{"x": object()}, {"x": object()}], "`x` is object"),
}


@pytest.mark.parametrize("case", VARIED)
def test_samples_that_are_not_alike_are_refused_with_a_hint(case: str) -> None:
    samples, reason = VARIED[case]
    message = rf"must be alike, but {reason}\. Hint: `map` makes .* `collate` of `to_torch`"
    mapped = data.Dataset(range(2)).map(samples.__getitem__)
    for files in (data.Dataset(samples), data.Dataset(iter(samples)), mapped):
        with pytest.raises((ValueError, TypeError), match=message):
            next(iter(files.to_torch(2)))


def test_columns_whose_vectors_have_several_lengths_are_refused_with_a_hint(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[1, 2], [3]]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"`x` has the shapes \[2\] and \[1\]\. Hint: "):
        next(iter(data.read(tmp_path).to_torch(2)))
