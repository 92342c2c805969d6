"""Speed of reading data beside other libraries: samples per second and time to the first batch.

The others live in environments of their own: BENCH_PEERS_PYTHON has litdata, webdataset, datasets,
ray and torchvision, and BENCH_MOSAIC_PYTHON has mosaicml-streaming. Without one, its libraries are
left out. All shuffle, read the same samples, and take turns.
"""

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bench_cases import Figure
from data_readers import BATCH, WORKERS

_NUM_ROUNDS = 3
_SIZES = {"rows": 100_000, "images": 1_500, "tokens": 20_000}
_TOKENS = 1025
_PEERS = ["torch_loader", "hugging_face", "litdata", "webdataset", "ray"]
_READERS = Path(__file__).with_name("data_readers.py")


def measure_rows() -> list[Figure]:
    """Rows of eight numbers."""
    return _measure("rows")


def measure_images() -> list[Figure]:
    """Images of 256 pixels."""
    return _measure("images")


def measure_tokens() -> list[Figure]:
    """Blocks of 1,025 tokens."""
    return _measure("tokens")


def _measure(shape: str) -> list[Figure]:
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / shape
        directory.mkdir()
        _write(shape, directory)
        readers = {"paceline": sys.executable}
        for name in _PEERS:
            if (python := os.environ.get("BENCH_PEERS_PYTHON")) and (name, shape) != (
                "webdataset", "rows",
            ):  # fmt: skip
                readers[name] = python
        if python := os.environ.get("BENCH_MOSAIC_PYTHON"):
            readers["mosaic"] = python
        for name, python in list(readers.items()):
            if _run(python, name, shape, directory, "prepare") is None:
                del readers[name]
        found: dict[str, list[Any]] = {name: [] for name in readers}
        for _ in range(_NUM_ROUNDS):
            for name, python in readers.items():
                result = _run(python, name, shape, directory)
                if result is not None:
                    found[name].append(result)
    speeds = {n: statistics.median(map(_speed, results)) for n, results in found.items() if results}
    best = max(speeds.values())
    return [figure for name in speeds for figure in _figures(name, shape, found[name], best)]


def _speed(result: Any) -> float:
    return float(result["samples"] / result["epoch_s"])


def _figures(name: str, shape: str, each: list[Any], best: float) -> list[Figure]:
    is_ours = name == "paceline"
    processes = WORKERS[shape] or "no"
    return [
        Figure(what=f"{shape}, {name}: batches of {BATCH[shape]}, {processes} further processes",
               unit="samples/s", values=[_speed(r) for r in each],
               bar=0.9 * best if is_ours else None, is_smaller_better=False, raw=each,
               beside=f"{each[0]['samples']:,} samples"),
        Figure(what=f"{shape}, {name}: to the first batch", unit="s",
               values=[r["first_s"] for r in each], bar=None),
    ]  # fmt: skip


def _run(python: str, name: str, shape: str, directory: Path, *more: str) -> Any:
    try:
        done = subprocess.run(
            [python, str(_READERS), name, shape, str(directory), *more],
            cwd=directory, capture_output=True, text=True, timeout=180,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                 "HF_HOME": str(directory / "hf"), "PACELINE_CACHE_DIR": str(directory / "cache")},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"{name} took too long for {shape}", file=sys.stderr)
        return None
    if done.returncode:
        print(f"{name} failed for {shape}: {done.stderr[-600:]}", file=sys.stderr)
        return None
    return {} if more else json.loads(done.stdout.splitlines()[-1])


def _write(shape: str, directory: Path) -> None:
    random = np.random.default_rng(0)
    if shape == "images":
        _write_images(random, directory / "folders")
        return
    (directory / "parquet").mkdir()
    num_files = 16
    size = _SIZES[shape] // num_files
    for number in range(num_files):
        if shape == "rows":
            ids = np.arange(number * size, (number + 1) * size)
            columns: dict[str, Any] = {
                f"x{n}": random.random(size, dtype=np.float32) for n in range(6)
            }
            columns |= {"id": ids, "label": (ids % 10).astype(np.int32)}
            group = 2_500
        else:
            tokens = random.integers(0, 50_000, size * _TOKENS, dtype=np.int32)
            columns = {"tokens": pa.FixedSizeListArray.from_arrays(pa.array(tokens), _TOKENS)}
            group = 625
        path = directory / "parquet" / f"{number:03}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=group)
    (directory / "arrays").mkdir()
    table = pq.read_table(directory / "parquet")
    for name in table.schema.names:
        column = table.column(name).combine_chunks()
        is_vector = pa.types.is_fixed_size_list(column.type)
        values = column.flatten().to_numpy() if is_vector else column.to_numpy()
        np.save(
            directory / "arrays" / name, values.reshape(len(column), -1) if is_vector else values
        )


def _write_images(random: Any, directory: Path) -> None:
    from PIL import Image

    for number in range(_SIZES["images"]):
        small = Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        content = io.BytesIO()
        small.resize((256, 256), Image.Resampling.BICUBIC).save(content, "JPEG", quality=90)
        path = directory / str(number % 10) / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.getvalue())


NAMED_CASES = {
    "data-rows": measure_rows,
    "data-images": measure_images,
    "data-tokens": measure_tokens,
}
