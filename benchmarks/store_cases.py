"""The benchmark of object stores: a checkpoint in S3, beside what its client reaches alone."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from figures import Figure

_SIZE = 100_000_000
_NUM_ROUNDS = 15
_SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


def measure_stores() -> list[Figure]:
    """A checkpoint of 100 MB to S3 and back, beside obstore's own `put` and `get`."""
    with s3_server() as url, tempfile.TemporaryDirectory() as name:
        ways = _Ways(url, Path(name))
        for way in (ways.store, ways.put, ways.download, ways.get):
            way()
        pairs: dict[str, list[tuple[float, float]]] = {"to S3": [], "from S3": []}
        for number in range(_NUM_ROUNDS):
            for what, ours, theirs in (
                ("to S3", ways.store, ways.put),
                ("from S3", ways.download, ways.get),
            ):
                # Each goes first as often.
                first, second = (ours, theirs) if number % 2 else (theirs, ours)
                seconds = {first: _seconds(first), second: _seconds(second)}
                pairs[what].append((seconds[ours], seconds[theirs]))
            # The server has the same to keep in each round.
            ways.delete_earlier()
    return [
        Figure(
            what=f"throughput of a checkpoint of 100 MB {what}, of obstore's alone",
            unit="times",
            values=[theirs / ours for ours, theirs in measured],
            bar=0.9,
            is_smaller_better=False,
            beside=f"obstore alone: {_SIZE / 1e6 / median(t for _, t in measured):.0f} MB/s",
            raw={"seconds": measured},
        )
        for what, measured in pairs.items()
    ]


class _Ways:
    """The same bytes by Paceline and by its client."""

    def __init__(self, url: str, directory: Path) -> None:
        import obstore
        from obstore.store import S3Store

        from paceline.storage import storage_from

        self._obstore = obstore
        self._storage = storage_from("s3://checkpoints/ours")
        self._client = S3Store(
            "checkpoints", config={"endpoint": url}, client_options={"allow_http": True}
        )
        self._source = directory / "source"
        self._source.mkdir()
        (self._source / "model").write_bytes(os.urandom(_SIZE))
        self._target = directory / "target"
        self._uuid = self._earlier = ""

    def delete_earlier(self) -> None:
        """Delete the checkpoint before the present one."""
        self._storage.delete(self._earlier)

    def store(self) -> None:
        """Store a checkpoint."""
        self._earlier, self._uuid = self._uuid, str(uuid4())
        self._storage.copy_in(self._uuid, self._source)
        self._storage.commit(self._uuid, {"steps_completed": 1})

    def put(self) -> None:
        """Put the file, in parts of the same size."""
        source = self._source / "model"
        self._obstore.put(self._client, "theirs", source, chunk_size=8 << 20, max_concurrency=8)

    def download(self) -> None:
        """Download the checkpoint, which verifies it."""
        shutil.rmtree(self._target, ignore_errors=True)
        self._storage.download(self._uuid, self._target)

    def get(self) -> None:
        """Get the file."""
        shutil.rmtree(self._target, ignore_errors=True)
        self._target.mkdir()
        with (self._target / "model").open("wb") as file:
            for chunk in self._obstore.get(self._client, "theirs").stream(min_chunk_size=8 << 20):
                file.write(chunk)


def _seconds(way: Callable[[], None]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the URL of moto's server, to which the environment leads."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/checkpoints", method="PUT")).close()
    variables = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    before: dict[str, Any] = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield url
    finally:
        process.communicate()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


CASES: dict[str, Callable[[], list[Figure]]] = {"stores": measure_stores}
