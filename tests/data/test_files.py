"""Data sets of local files of every format, good and bad."""

import json
import pickle
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch

from paceline import data
from paceline.data import _file_index_and_format as _file_index
from paceline.data import _table_formats as _text_blocks
from paceline.data._file_index_and_format import FileRows
from paceline.data._file_source import ChunkCache

Table = Callable[[int, int], Any]


def write_parquet(path: Path, table: Any) -> None:
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=10)


def write_arrow_file(path: Path, table: Any) -> None:
    with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)


def write_arrow_stream(path: Path, table: Any) -> None:
    with pa.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)


def write_csv(path: Path, table: Any) -> None:
    pa_csv.write_csv(table.drop_columns(["pair"]), path.with_suffix(".csv"))


def write_json_lines(path: Path, table: Any) -> None:
    lines = [json.dumps(row) for row in table.to_pylist()]
    path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n\n")


@pytest.mark.parametrize(
    "write", [write_parquet, write_arrow_file, write_arrow_stream, write_csv, write_json_lines]
)
def test_every_format_gives_every_sample(
    write: Callable[[Path, Any], None], table: Table, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(_text_blocks, "BLOCK_BYTES", 300)
    directory = tmp_path / "files"
    directory.mkdir()
    for index in range(3):
        write(directory / f"{index}", table(25 * index, 25))
    files = data.read(directory)
    assert (len(files), files[-1]["id"], files[30]["text"]) == (75, 74, "sample 30")
    assert len(data.Dataset(directory)) == len(data.Dataset(str(directory))) == 75
    # From the index that was kept, and in another process.
    again = pickle.loads(pickle.dumps(data.read(directory)))
    assert [row["id"] for row in again] == list(range(75))
    assert again.source.chunk_sizes().tolist() == files.source.chunk_sizes().tolist()
    assert len(files.source.chunk_sizes()) > 3
    batches = list(again.shuffle(window=20).to_torch(batch_size=16))
    ids = torch.cat([batch["id"] for batch in batches])
    assert ids.dtype == torch.int64
    assert sorted(ids.tolist()) == list(range(75))
    # Each sample keeps its own values.
    assert torch.equal(torch.cat([batch["x"] for batch in batches]), ids * 0.5)
    assert sum([batch["text"] for batch in batches], []) == [f"sample {n}" for n in ids.tolist()]


def test_columns_become_tensors_as_rows_would(parquet: Callable[..., Path]) -> None:
    directory = parquet(25, 25)
    files = data.read(directory)
    row = files[12]
    assert row["pair"].tolist() == [12, 12]
    batch = next(iter(files.to_torch(batch_size=30)))
    rows = next(iter(files.map(dict).to_torch(batch_size=30)))
    assert batch.keys() == rows.keys()
    assert all(
        torch.equal(batch[key], rows[key]) and batch[key].dtype == rows[key].dtype
        for key in ("id", "x", "pair")
    )
    assert batch["text"] == rows["text"]
    doubled = files.map_batches(lambda columns: {"y": columns["x"] * 2, "n": columns["text"]})
    assert doubled[3] == {"y": 3.0, "n": "sample 3"}
    assert data.read(directory, columns=["id"])[3] == {"id": 3}
    kept = files.filter(lambda row: row["id"] % 10 == 3)
    assert [row["id"] for row in kept] == [3, 13, 23, 33, 43]
    assert kept.source.chunk_sizes().sum() == 5
    parts = files.split((0.5, 0.2, 0.3))
    assert sorted(row["id"] for part in parts for row in part) == list(range(50))
    for train, validation in files.to_cv(4):
        assert sorted(row["id"] for part in (train, validation) for row in part) == list(range(50))
    with pytest.raises(IndexError, match="from 0 to 49, but got 50"):
        files[50]


def test_gaps_texts_and_vectors(tmp_path: Path) -> None:
    table = pa.table(
        {
            "n": pa.array([1, None, 3]),
            "f": pa.array([1.0, None, 3.0]),
            "b": pa.array([True, False, True]),
            "v": pa.array([[1, 2], [3, 4], [5, 6]]),
            "c": pa.array(["a", "b", "a"]).dictionary_encode(),
            "raw": pa.array([b"x", b"y", b"z"]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    (batch,) = data.read(tmp_path / "a.parquet").to_torch(batch_size=3)
    assert batch["n"] == [1, None, 3]
    assert torch.isnan(batch["f"]).tolist() == [False, True, False]
    assert batch["b"].dtype == torch.bool
    assert batch["v"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert (batch["c"], batch["raw"]) == (["a", "b", "a"], [b"x", b"y", b"z"])


def test_quoted_lines_of_csv_stay_whole(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(_text_blocks, "BLOCK_BYTES", 16)
    text = "id,text\n" + "".join(f'{n},"a ""line""\nand {n}"\r\n' for n in range(9)) + "\n9,last"
    (tmp_path / "a.csv").write_text(text)
    files = data.read(tmp_path / "a.csv")
    assert [row["id"] for row in files] == list(range(10))
    assert files[4]["text"] == 'a "line"\nand 4'
    assert files[9]["text"] == "last"


def test_more_workers_than_files_and_empty_files(
    parquet: Callable[..., Path], table: Table
) -> None:
    directory = parquet(5, 0, 4)
    # A file without samples may have columns without types.
    pq.write_table(pa.table({"id": pa.array([], pa.null())}), directory / "empty.parquet")
    files = data.read(directory)
    shards = [[row["id"] for row in files.get_shard(rank, 8)] for rank in range(8)]
    assert sum(shards, []) == list(range(9))
    assert max(map(len, shards)) == 2
    assert len(data.read(directory / "001.parquet")) == 0


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def test_bad_files_are_refused_by_name(
    parquet: Callable[..., Path], table: Table, tmp_path: Path
) -> None:
    directory = parquet(20, 20, 20)
    with pytest.raises(data.DataNotFoundError, match=r"nothing/\*.parquet' matches none"):
        data.read(tmp_path / "nothing" / "*.parquet")
    with pytest.raises(data.DataNotFoundError, match="it has none that end in"):
        data.read(tmp_path / "nothing")
    other = table(60, 5).append_column("more", pa.array([1] * 5))
    pq.write_table(other, directory / "003.parquet")
    with pytest.raises(
        data.DataFormatError,
        match=r"000.parquet', but '.*003.parquet' lacks \[\] and has \['more: ",
    ):
        data.read(directory)
    assert len(data.read(directory, columns=["id", "x"])) == 65
    (directory / "003.parquet").unlink()
    files = data.read(directory)
    cut(directory / "001.parquet", 0.6)
    with pytest.raises(data.DataChangedError, match=r"001.parquet' must stay as it is"):
        files[25]
    with pytest.raises(
        data.DataFormatError, match=r"001.parquet' \(\d+ bytes\) .*not end as a Parq"
    ):
        data.read(directory)
    (directory / "001.parquet").unlink()
    with pytest.raises(data.DataNotFoundError, match=r"001.parquet' must be there"):
        files[25]
    # Damage that the footer does not show is found where it is read.
    content = bytearray((directory / "002.parquet").read_bytes())
    content[4:200] = bytes(196)
    (directory / "002.parquet").write_bytes(content)
    with pytest.raises(data.DataFormatError, match=r"002.parquet' \(\d+ bytes\) cannot be read"):
        list(data.read(directory))
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id": \n')
    with pytest.raises(data.DataFormatError, match=r"a.jsonl.*in the line b'\{\"id\": '"):
        list(data.read(tmp_path / "a.jsonl"))
    (tmp_path / "a.csv").write_text("id\n1\nx\n")
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(data.DataFormatError, match=r"b.csv.*no line with the names"):
        data.read(tmp_path / "*.csv")
    with pytest.raises(ValueError, match="`format` must be given for 'a.xyz'"):
        data.read(tmp_path / "a.xyz")
    with pytest.raises(ValueError, match="`format` must be one of"):
        data.read(tmp_path / "a.csv", format="xyz")
    with pytest.raises(data.DataError, match="files of one suffix"):
        data.read(tmp_path)


def test_index_beside_the_files_is_taken_as_it_is(parquet: Callable[..., Path]) -> None:
    directory = parquet(20, 20)
    written = data.write_index(directory)
    parquet(20, 20, 20)
    assert len(written) == len(data.read(directory)) == 40
    assert (directory / _file_index.INDEX_NAME).is_file()
    # The files were written again, and whoever reads one is told.
    with pytest.raises(data.DataChangedError, match="000.parquet.*must be written again"):
        data.read(directory)[0]
    assert len(data.write_index(directory)) == 60
    assert np.array_equal(data.read(directory)[59]["pair"], [59, 59])


def test_memory_is_bounded_and_reading_ahead_fails_quietly(
    parquet: Callable[..., Path], monkeypatch: Any
) -> None:
    files = data.read(parquet(*[100] * 20, group=100), memory_bytes=20_000)
    list(files.shuffle(window=200).to_torch(batch_size=50))
    cache = files.source._cache
    # Two windows in use are kept even if they are more.
    assert 0 < cache._num_bytes <= max(20_000, cache._least_bytes)
    assert cache._least_bytes < 40_000
    assert cache._num_bytes == sum(each.num_bytes for each in cache._kept.values())
    cache.expect([7])
    cache.close()
    assert not cache._threads
    load = cache._load
    failed: list[int] = []

    def fail_once(chunk: int) -> Any:
        if not failed:
            failed.append(chunk)
            raise OSError("not now")
        return load(chunk)

    monkeypatch.setattr(cache, "_load", fail_once)
    cache._is_closed = False
    absent = next(chunk for chunk in range(20) if chunk not in cache._kept)
    cache.expect([absent])
    for thread in list(cache._threads):
        thread.join()
    assert failed == [absent]
    assert cache.get(absent).arrays["id"][0] == 100 * absent


def test_a_file_without_a_suffix_is_read_by_its_format(tmp_path: Path) -> None:
    (tmp_path / "noext").write_text("x\n1\n")
    assert list(data.read(tmp_path / "noext", format="csv")) == [{"x": 1}]
    with pytest.raises(ValueError, match="`format` must be given"):
        data.read(tmp_path / "noext")
    with pytest.raises(data.DataNotFoundError, match=r"Hint: .*/\*' *, and `format`"):
        data.read(tmp_path, format="csv")


def test_wrong_names_and_types_of_files_have_hints(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").write_text("x\n1.5\n")
    with pytest.raises(data.DataFormatError, match=r"Hint: write their values alike .* 1\.0"):
        data.read(tmp_path)
    with pytest.raises(TypeError, match=r"but got list\. Hint: a glob"):
        data.read(["a.csv", "b.csv"])  # type: ignore[arg-type]


def test_a_start_reads_nothing_ahead_before_what_its_first_batch_needs() -> None:
    gates = {chunk: threading.Event() for chunk in range(4)}
    begun: queue.Queue[int] = queue.Queue()

    def load(chunk: int) -> FileRows:
        begun.put(chunk)
        assert gates[chunk].wait(60)
        return FileRows([chunk], 1)

    cache = ChunkCache(load, limit_bytes=10, num_threads=2)
    try:
        cache.expect([3], [0])
        # Another part of the first batch, before the first one is there.
        cache.expect([3, 1], [0, 2])
        assert {begun.get(timeout=60), begun.get(timeout=60)} == {3, 1}
        gates[3].set()
        assert cache.get(3).take([0]) == [3]
        assert begun.empty()
        gates[1].set()
        assert {begun.get(timeout=60), begun.get(timeout=60)} == {0, 2}
    finally:
        for gate in gates.values():
            gate.set()
        cache.close()


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ";"), (".tsv", None), (".txt", "|")])
def test_csv_files_have_the_delimiter_that_is_given(
    tmp_path: Path, suffix: str, delimiter: str | None
) -> None:
    path, sign = tmp_path / f"a{suffix}", delimiter or "\t"
    path.write_text(f'x{sign}text\n1{sign}"a{sign},b"\n2{sign}c\n')
    options: Any = {"delimiter": delimiter, "format": "csv" if suffix == ".txt" else None}
    samples = [{"x": 1, "text": f"a{sign},b"}, {"x": 2, "text": "c"}]
    # What was kept of the file under another delimiter is not taken.
    assert set(data.read(path, format="csv", delimiter="#")[0]) == {f"x{sign}text"}
    assert list(data.read(path, **options)) == samples
    assert list(pickle.loads(pickle.dumps(data.read(path, **options)))) == samples
    data.write_index(path, **options)
    assert list(data.read(path, **options)) == samples


def test_options_that_files_do_not_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    with pytest.raises(ValueError, match=r"`delimiter` must be one character.* but got '::'"):
        data.read(tmp_path / "a.csv", delimiter="::")
    with pytest.raises(ValueError, match=r"`delimiter` is for CSV files only, but got parquet"):
        data.read(tmp_path / "*.parquet", delimiter=";")
    with pytest.raises(ValueError, match=r"must not be compressed .* got 'a.csv.gz'\. Hint: deco"):
        data.read(tmp_path / "a.csv.gz", format="csv")
