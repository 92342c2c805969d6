"""Speed of reading data beside other libraries: samples per second, and time to the first batch.

`make bench-data` installs the other libraries. BENCH_PEERS_PYTHON is a Python that has them.
Without it, Paceline is measured alone. All shuffle, read the same samples, and take turns. Sets are
so large that the start does not decide; the speed is that after the first batch. A library that
reads all files before it is fast by that, so the speed with the start is given beside it. An epoch
of a slow library ends after some seconds. litdata, MosaicML Streaming and WebDataset read copies of
the samples in forms of their own, which were made before.

"Cold": the files are not in the memory of the system, and nothing is kept of an earlier run.
"Warm": once more, in a new process. The server of objects is a process of the same machine.
"""

import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from data_readers import BATCH, WORKERS
from data_server import serving
from figures import Figure

_NUM_ROUNDS = 2
_SECONDS = 8
_SIZES = {"rows": 1_000_000, "images": 4_000, "tokens": 60_000}
_TOKENS = 1025
_PEERS = ["torch_loader", "hugging_face", "litdata", "mosaic", "webdataset", "ray"]
# What a library cannot read, or not from a bucket.
_LEFT_OUT = {("webdataset", "rows"), ("torch_loader", "bucket"), ("ray", "bucket")}
_BUCKET = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
    "AWS_DEFAULT_REGION": "us-east-1",
}
_READERS = Path(__file__).with_name("data_readers.py")


def _measure(shape: str, place: str) -> list[Figure]:
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / shape
        directory.mkdir()
        _write(shape, directory)
        readers = {"paceline": sys.executable}
        if python := os.environ.get("BENCH_PEERS_PYTHON"):
            readers |= {n: python for n in _PEERS if not {(n, shape), (n, place)} & _LEFT_OUT}
        if shape == "images" and place == "bucket" and "webdataset" not in readers:
            raise SystemExit("images are read from a bucket as tar files: set BENCH_PEERS_PYTHON")
        for name, python in list(readers.items()):
            if _run(python, name, shape, directory, "prepare") is None:
                del readers[name]
        found: dict[tuple[str, str], list[Any]] = {}
        with serving(directory) if place == "bucket" else nullcontext("") as server:
            for _ in range(_NUM_ROUNDS):
                for name, python in readers.items():
                    _forget(directory)
                    for state in ("cold", "warm"):
                        result = _run(python, name, shape, directory, server=server)
                        if result is not None:
                            found.setdefault((state, name), []).append(result)
    figures = []
    for state in ("cold", "warm"):
        of_state = {name: each for (its, name), each in found.items() if its == state}
        best = max(statistics.median(map(_speed, each)) for each in of_state.values())
        for name, each in of_state.items():
            figures += _figures(name, f"{shape}, {place}, {state}", each, best)
    return figures


def _forget(directory: Path) -> None:
    """Remove what earlier runs kept, and have the system drop the files from its memory."""
    for kept in ("cache", "kept"):
        shutil.rmtree(directory / kept, ignore_errors=True)
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _speed(result: Any) -> float:
    return float(result["later"] / (result["epoch_s"] - result["first_s"]))


def _figures(name: str, what: str, each: list[Any], best: float) -> list[Figure]:
    is_ours = name == "paceline"
    shape = what.partition(",")[0]
    processes = 0 if is_ours else WORKERS[shape]
    cpu = statistics.median(r["cpu_s"] / r["samples"] * 1e6 for r in each)
    whole = statistics.median(r["samples"] / r["epoch_s"] for r in each)
    return [
        Figure(what=f"{what}, {name}: batches of {BATCH[shape]}, {processes} processes",
               unit="samples/s", values=[_speed(r) for r in each],
               bar=0.9 * best if is_ours else None, is_smaller_better=False, raw=each,
               beside=f"{each[0]['samples']:,} samples, {cpu:.0f} us of processor time for each;"
               f" {whole:,.0f} samples/s with the start"),
        Figure(what=f"{what}, {name}: to the first batch", unit="s",
               values=[r["first_s"] for r in each], bar=None),
    ]  # fmt: skip


def _run(python: str, name: str, shape: str, directory: Path, *more: str, server: str = "") -> Any:
    try:
        done = subprocess.run(
            [python, str(_READERS), name, shape, str(directory), *more],
            cwd=directory, capture_output=True, text=True, timeout=180 if more else 60,
            env={**os.environ, **(_BUCKET if server else {}), "OMP_NUM_THREADS": "1",
                 "HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "cache/hf"),
                 "PACELINE_CACHE_DIR": str(directory / "cache"), "BENCH_BUCKET": server,
                 "BENCH_KEPT": str(directory / "kept"), "BENCH_SECONDS": str(_SECONDS),
                 **({"AWS_ENDPOINT_URL": server} if server else {})},
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


NAMED_CASES: dict[str, Callable[[], list[Figure]]] = {
    f"data-{shape}{'-s3' if place == 'bucket' else ''}": partial(_measure, shape, place)
    for shape in _SIZES
    for place in ("disk", "bucket")
}
