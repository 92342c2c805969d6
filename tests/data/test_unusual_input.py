"""Unusual paths, files, options and samples: read as they are meant, or refused with a hint."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from paceline import data
from paceline.data._file_locations import location_of


def write(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns or {"x": [1, 2, 3]}), path)
    return path


# ---- where files lie -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ün ï", "data[1]", "what?", "a*", "50%"])
def test_directories_may_have_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / name / "日本[0] *.parquet")
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (path, path.parent, path.parent / "*.parquet", path.as_uri(), f"~/{name}"):
        assert len(data.read(url)) == 3, url


def test_suffixes_may_be_in_capitals_and_what_a_glob_finds_may_be_a_directory(
    tmp_path: Path,
) -> None:
    write(tmp_path / "files" / "A.PARQUET")
    (tmp_path / "files" / "b.PARQUET").mkdir()
    for url in ("files", "files/A.PARQUET", "files/*.PARQUET"):
        assert len(data.read(tmp_path / url)) == 3


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", r"must be like s3://bucket/data/\*\.parquet, but got 's3://'"),
        ("s3://b/x.parquet?versionId=1", r"no query, but got .*versionId=1'\. Hint: credentials"),
        ("https://h/x.parquet", r"az:// or gs://, but got 'https.*Hint: download"),
        ("x.tgz", r"must not be compressed as a whole.* got 'x.tgz'"),
    ],
)
def test_urls_that_cannot_be_read_say_what_to_do(url: str, message: str) -> None:
    with pytest.raises((ValueError, data.DataError), match=message):
        data.read(url)


def test_a_bucket_may_have_a_dot_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for url, parts in (
        ("s3://my.data", ("s3://my.data", "")),
        ("s3://my.data/a.parquet", ("s3://my.data", "a.parquet")),
    ):
        place, pattern = location_of(url)
        assert (place.url, pattern) == parts


def test_a_directory_of_compressed_files_and_an_index_of_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match=r"must not be compressed .*/\*\*/\*\.gz'"):
        data.read(tmp_path)
    with pytest.raises(data.DataNotFoundError, match=r"parquet' matches none"):
        data.write_index(tmp_path / "*.parquet")
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl.gz"]


# ---- contents --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x,x\n1,2\n", "several columns have the name 'x'"),
        (b"x\r1\r2\r", r"lines end in .r alone"),
        (gzip.compress(b"x\n1\n", mtime=0), "compressed, of another encoding than UTF-8"),
        (b"y\n1\n", r"it has no column \['x'\], only \['y'\]"),
        (b"x\n" + b"1\n" * 40 + b"1.5\n", r"'1\.5'\. Hint: the first 4 MiB .* such as 1\.0"),
    ],
)
def test_bad_csv_files_say_what_to_do(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.data import _table_formats as _text_blocks

    monkeypatch.setattr(_text_blocks, "BLOCK_BYTES", 20)
    (tmp_path / "a.csv").write_bytes(content)
    columns = ["x"] if b"y" in content else None
    with pytest.raises(data.DataFormatError, match=rf"a\.csv' .*{message}"):
        list(data.read(tmp_path / "a.csv", columns=columns))


def test_lines_that_python_writes_are_json(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": NaN}\n{"x": -Infinity}\n')
    nan, infinite = (row["x"] for row in data.read(tmp_path))
    assert np.isnan(nan)
    assert infinite == -np.inf
    (tmp_path / "b.json").write_text("[\n1,\n2\n]\n")
    with pytest.raises(data.DataFormatError, match="each line must be a JSON value by itself"):
        data.read(tmp_path / "b.json")


def test_vectors_with_gaps_in_some_row_groups_are_one_batch(tmp_path: Path) -> None:
    pairs = pa.array([[1, 2], [3, None], [5, 6]], pa.list_(pa.int64(), 2))
    pq.write_table(pa.table({"x": pairs}), tmp_path / "a.parquet", row_group_size=1)
    samples = [row["x"].tolist() for row in data.read(tmp_path)]
    assert samples[::2] == [[1, 2], [5, 6]]
    assert samples[1][0] == 3
    (batch,) = data.read(tmp_path).to_torch(3)
    assert batch["x"].nan_to_num(-1).tolist() == [[1, 2], [3, -1], [5, 6]]


# ---- options and functions -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda files: files.shuffle(-1), "`window` must be an integer of at least 1, but got -1"),
        (lambda files: files.shuffle(2.5), "`window` must be an integer of at least 1"),
        (lambda files: files.to_torch(None), "`batch_size` must be an integer of at least 1"),
        (lambda files: files.to_torch(2, sampler=[0]), "`sampler` must not be given"),
        (lambda files: files.get_shard("0", 2), "`rank` must be from 0 to 1, but got '0'"),
        (lambda files: files.get_shard(1), r"must be from 0 to 0, but got 1\. Hint: `num_shards`"),
        (lambda files: files.get_shard(0, 0), "`num_shards` must be an integer of at least 1"),
        (lambda files: files[0:2], "named by an integer, but got slice.*Hint: `split`"),
        (lambda files: files.split("2"), r"such as \(0\.8, 0\.2\), but got '2'"),
        (lambda files: files.split(0.5), "but got 0.5"),
        (lambda files: files.map_batches(lambda c: 5)[0], "a dictionary of arrays.*returned int"),
        (lambda files: files.map_batches(lambda c: {"y": 1})[0], "for each column, but 'y' is 1"),
        (
            lambda files: files.map_batches(lambda c: {**c, "y": c["x"][:1]}).fetch([0, 1]),
            "got 2 and returned 1 in 'y'",
        ),
        (lambda files: data.Dataset([1]).map_batches(lambda c: 5)[0], "a list of samples, but r"),
    ],
)
def test_options_and_functions_are_checked(
    call: Callable[[data.Dataset], Any], message: str, tmp_path: Path
) -> None:
    files = data.read(write(tmp_path / "a.parquet"))
    with pytest.raises((TypeError, ValueError), match=message):
        call(files)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": "x"}, "`columns` must be a list of names, but got 'x'"),
        ({"columns": []}, r"`columns` must be a list of names, but got \[\]"),
        ({"memory_bytes": -1}, "`memory_bytes` must be an integer of at least 0"),
        ({"disk_bytes": "1G"}, "`disk_bytes` must be an integer of at least 0, but got '1G'"),
    ],
)
def test_options_of_reading_are_checked(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        data.read(write(tmp_path / "a.parquet"), **options)


def test_functions_of_batches_may_return_lists_and_tensors(tmp_path: Path) -> None:
    files = data.read(write(tmp_path / "a.parquet")).map_batches(
        lambda c: {
            "list": [2 * int(x) for x in c["x"]],
            "tensor": torch.tensor(c["x"]) + 1,
            "text": [str(x) for x in c["x"]],
            "ragged": [[1] * int(x) for x in c["x"]],
        }
    )
    (batch,) = files.to_torch(3)
    assert batch["list"].tolist() == [2, 4, 6]
    assert batch["tensor"].tolist() == [2, 3, 4]
    assert batch["text"] == ["1", "2", "3"]
    assert batch["ragged"] == [[1], [1, 1], [1, 1, 1]]
    assert [row["list"] for row in files] == [2, 4, 6]


def test_sizes_of_parts_may_be_numbers_of_numpy() -> None:
    numbers = data.Dataset(range(10))
    assert [len(part) for part in numbers.split(np.array([3, 4]))] == [3, 4]
    assert [len(part) for part in numbers.split(np.int64(2))] == [5, 5]


def test_nothing_is_no_batch_shuffled_or_not(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    for nothing in (
        data.Dataset([]),
        data.read(write(tmp_path / "a.parquet", x=pa.array([], pa.int64()))),
        data.read(tmp_path / "a.jsonl"),
        data.Dataset([1]).filter(lambda n: False),
    ):
        assert list(nothing.to_torch(2)) == list(nothing.shuffle().to_torch(2)) == []
        with pytest.raises(ValueError, match="number of samples, which is 0"):
            nothing.to_cv(2)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"x": [1]}), r"got a table, Table\. Hint: `table\.to_pylist\(\)`"),
        (np.array(5), "data with a length, but got ndarray"),
        (list, "data with a length, but got type"),
    ],
)
def test_data_that_are_no_samples_are_refused(table: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        data.Dataset(table)
