"""Files of numbered samples, and a cache directory of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep indexes and pieces of files in a temporary directory."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _numbered(first: int, count: int) -> Any:
    """Return a table whose samples say which they are."""
    ids = np.arange(first, first + count)
    return pa.table(
        {
            "id": pa.array(ids),
            "x": pa.array(ids * 0.5, pa.float32()),
            "text": [f"sample {number}" for number in ids],
            "pair": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 2)), 2),
        }
    )


@pytest.fixture
def parquet(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes Parquet files of so many samples, and their directory."""

    def write(*counts: int, group: int = 10) -> Path:
        directory = tmp_path / "parquet"
        directory.mkdir(exist_ok=True)
        first = 0
        for index, count in enumerate(counts):
            path = directory / f"{index:03}.parquet"
            pq.write_table(_numbered(first, count), path, row_group_size=group)
            first += count
        return directory

    return write


@pytest.fixture
def table() -> Callable[[int, int], Any]:
    """Return a function that makes a table of samples that say which they are."""
    return _numbered
