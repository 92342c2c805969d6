"""Columns of Arrow as arrays, and windows that are read as one array."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from paceline import data
from paceline.data import _sample_columns
from paceline.data._file_source import FileSource

LISTS = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12)), 3)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2, 3], pa.int16()),
        pa.array([1.0, None, 3.0]),
        pa.array([None, None], pa.float32()),
        pa.array(np.array([1, 2], np.float16)),
        pa.array([True, False, True] * 7),
        pa.array([], pa.int64()),
        pa.array([], pa.bool_()),
        LISTS,
    ],
)
def test_columns_of_numbers_are_what_arrow_has(column: Any) -> None:
    for part in (column, column.slice(1), column.slice(1, 1)):
        expected = np.array(part.to_pylist()) if part.type == LISTS.type else part.to_numpy(False)
        found = _sample_columns._decode_column(part)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)
        assert found.dtype == expected.dtype


def test_vectors_of_several_lengths_and_with_gaps_are_arrays() -> None:
    column = pa.array([[1, 2], None, [3], [], [4, 5]])
    for part, expected in (
        (column, [[1, 2], None, [3], [], [4, 5]]),
        (column.slice(2), [[3], [], [4, 5]]),
        (pa.array([[True], [False, True]]), [[True], [False, True]]),
    ):
        found = [v if v is None else v.tolist() for v in _sample_columns._column_row_values(part)]
        assert found == expected
    (first,) = _sample_columns._column_row_values(pa.array([[1, None]]))
    assert np.isnan(first[1])


@pytest.mark.parametrize("memory_bytes", [None, 1])
def test_windows_of_many_pieces_are_read_once_and_give_the_same(
    parquet: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, memory_bytes: int | None
) -> None:
    directory = parquet(*[50] * 8, group=5)
    read: list[int] = []
    load = FileSource._load
    monkeypatch.setattr(
        FileSource,
        "_load",
        lambda self, number: read.append(number) or load(self, number),
    )
    files = data.read(directory, memory_bytes=memory_bytes).shuffle(window=64)
    loader = files.to_torch(batch_size=7)
    torch.manual_seed(3)
    for _ in range(2):
        batches = list(loader)
        ids = torch.cat([batch["id"] for batch in batches])
        assert sorted(ids.tolist()) == list(range(400))
        assert torch.cat([batch["x"] for batch in batches]).tolist() == (0.5 * ids).tolist()
        assert torch.cat([b["pair"] for b in batches]).tolist() == [[n, n] for n in ids.tolist()]
        texts = [text for batch in batches for text in batch["text"]]
        assert texts == [f"sample {n}" for n in ids.tolist()]
    if memory_bytes is None:
        # Pieces that two windows share, and batches that do, need not read anything again.
        assert len(read) <= 2 * 80 + 4
