"""Data sets that are larger than memory: `python benchmarks/data_scale.py CASE DIRECTORY`.

Cases: "terabyte" (100,000 shards made by the server from their numbers), "memory" (2 GB of Parquet,
two workers) and "resume" (10 million samples). The cases `data-scale` of `run.py` are these.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data_server import SHARD_ROWS, make_shard, serving
from figures import Figure

_NUM_SHARDS = 100_000
_NUM_ROUNDS = 3


def measure_scale() -> list[Figure]:
    """Memory of two workers for 2 GB, and the start and resume of 1 TB and 10 million samples."""
    rounds = {
        case: [_run_child(case) for _ in range(_NUM_ROUNDS)] for case in ("terabyte", "resume")
    }
    memory = [_run_child("memory")]
    return [
        Figure(what="1 TB in 100,000 shards: `read` to the first batch", unit="s",
               values=[r["start"] for r in rounds["terabyte"]], bar=2, raw=rounds),
        Figure(what="1 TB: resume at any offset, to its first batch, worst of 5", unit="s",
               values=[r["resume"] for r in rounds["terabyte"]], bar=1),
        Figure(what="10 million samples: the same", unit="s",
               values=[r["resume"] for r in rounds["resume"]], bar=1),
        Figure(what="2 GB on an S3 server: memory per worker beyond its imports", unit="MB",
               values=[mb for r in memory for mb in r["memory"]], bar=256, raw=memory),
        Figure(what="2 GB on an S3 server: read by each of two workers at", unit="MB/s",
               values=[r["speed"] for r in memory], bar=None),
    ]  # fmt: skip


def _run_child(case: str) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), case, directory],
            cwd=directory, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _use_server(url: str, directory: Path) -> None:
    os.environ.update(
        AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="us-east-1", PACELINE_CACHE_DIR=str(directory / "cache"),
    )  # fmt: skip


def _first_batch_s(files: Any, start_batch: int, check: bool) -> float:
    from paceline.data._sharded_loader import ShardedData

    # The imports of torch and the engine come before.
    began = time.perf_counter()
    loader = files.shuffle().to_torch(batch_size=64)
    data = ShardedData(loader, num_shards=1, own_shards=range(1), seed=7)
    batch = next(data.iterate(3, start_batch))
    took = time.perf_counter() - began
    if check:
        assert (batch["tokens"][:, 0] == batch["id"]).all()
    return took


def _resume_s(files: Any, check: bool) -> list[float]:
    chosen = random.Random(1)
    return [_first_batch_s(files, chosen.randrange(len(files) // 64), check) for _ in range(5)]


def terabyte(directory: Path) -> dict[str, Any]:
    """Read samples of 1 TB that nobody has stored."""
    import xxhash

    from paceline import data
    from paceline.data import _file_index_and_format as _file_index
    from paceline.data._file_index_and_format import DataFile
    from paceline.data._file_locations import DirectoryLocation
    from paceline.data._table_formats import ParquetFormat

    shard = directory / "one" / "0.parquet"
    shard.parent.mkdir()
    shard.write_bytes(make_shard(0))
    place = DirectoryLocation(shard.parent)
    (found,) = place.find("*.parquet")
    (chunk,) = ParquetFormat().index_file(DataFile(place, found)).chunks
    names = [f"shard-{number:06}.parquet" for number in range(_NUM_SHARDS)]
    stored = _file_index._Stored(
        version=_file_index._VERSION, kind="parquet", pattern="*.parquet", schema="", names=names,
        marks=[f'"{found.size}"'] * _NUM_SHARDS,
        prints=[xxhash.xxh3_64_hexdigest(name.encode()) for name in names],
        sizes=np.full(_NUM_SHARDS, found.size).tobytes(),
        chunks_of_file=np.ones(_NUM_SHARDS, np.int64).tobytes(),
        chunks=np.tile(np.array(chunk), _NUM_SHARDS).tobytes(),
    )  # fmt: skip
    bucket = directory / "bucket" / "big"
    bucket.mkdir(parents=True)
    (bucket / _file_index.INDEX_NAME).write_bytes(_file_index.FileIndex(stored).encode())
    with serving(directory / "bucket") as url:
        _use_server(url, directory)
        _first_batch_s(data.read(place.url), 0, check=True)
        # A store has started before: the first shard that the server makes loads its libraries.
        urllib.request.urlopen(f"{url}/bucket/big/{names[-1]}").read()
        began = time.perf_counter()
        used = time.process_time()
        files = data.read("s3://bucket/big/*.parquet")
        _first_batch_s(files, 0, check=True)
        start, used = time.perf_counter() - began, time.process_time() - used
        assert len(files) == _NUM_SHARDS * SHARD_ROWS
        resumes = _resume_s(files, check=True)
    return {"start": start, "start_cpu": used, "resume": max(resumes), "resumes": resumes}


def resume(directory: Path) -> dict[str, Any]:
    """Go on anywhere in 10 million small samples."""
    from paceline import data

    for number in range(10):
        ids = np.arange(number * 1_000_000, (number + 1) * 1_000_000)
        table = pa.table({"id": ids, "x": ids.astype(np.float32)})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=50_000)
    files = data.read(directory / "*.parquet")
    _first_batch_s(files, 0, check=False)
    resumes = _resume_s(files, check=False)
    return {"resume": max(resumes), "resumes": resumes}


def read_all(config: dict[str, Any]) -> tuple[int, float, float]:
    """Read this worker's part of an epoch; return its bytes, the time, and the memory it took."""
    import torch  # noqa: F401

    from paceline import train

    loader = train.get_dataset().get_shard().to_torch(batch_size=256)
    read_one_sample()
    before, began, num_bytes = _peak_mb(), time.perf_counter(), 0
    for batch in loader:
        num_bytes += batch["x"].nbytes
    return num_bytes, time.perf_counter() - began, _peak_mb() - before


def read_one_sample() -> None:
    """Read something small, so that all is imported."""
    from paceline import data

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "one.parquet"
        pq.write_table(pa.table({"x": [1.0]}), path)
        next(iter(data.read(path).to_torch()))


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def memory(directory: Path) -> dict[str, Any]:
    """Read 2 GB of Parquet from a server by two workers."""
    from paceline import data, train

    bucket = directory / "bucket" / "big"
    bucket.mkdir(parents=True)
    values = np.random.default_rng(0).random((16_384, 256), dtype=np.float32)
    for number in range(128):
        x = pa.FixedSizeListArray.from_arrays(pa.array((values + number).reshape(-1)), 256)
        pq.write_table(pa.table({"x": x}), bucket / f"{number:03}.parquet", row_group_size=8_192)
    with serving(directory / "bucket") as url:
        _use_server(url, directory)
        files = data.read("s3://bucket/big/*.parquet").shuffle()
        with train.Trainer(num_workers=2) as trainer:
            results = list(trainer.run(read_all, dataset=files))
    assert sum(result[0] for result in results) == 128 * 16_384 * 1024
    return {
        "memory": [result[2] for result in results],
        "speed": min(result[0] / 1e6 / result[1] for result in results),
    }


if __name__ == "__main__":
    case = {"terabyte": terabyte, "resume": resume, "memory": memory}[sys.argv[1]]
    print(json.dumps(case(Path(sys.argv[2]))))
