"""Files of numbered samples, a store of them, and a cache directory of their own."""

import importlib.util
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

_SPEC = importlib.util.spec_from_file_location(
    "object_server", Path(__file__).with_name("object_server.py")
)
assert _SPEC is not None
object_server: Any = importlib.util.module_from_spec(_SPEC)
assert _SPEC.loader is not None
_SPEC.loader.exec_module(object_server)


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


@pytest.fixture
def server(parquet: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a server of objects, with three files of 25 samples."""
    server = object_server.ObjectServer(parquet(25, 25, 25))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()
