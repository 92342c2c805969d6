"""A store of objects for benchmarks: files of a directory, or shards made when they are asked for.

It speaks as much of S3's protocol as is needed to list and to read.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SHARD_ROWS, ROW_BYTES = 2_500, 4_000


@lru_cache(maxsize=4)
def make_shard(number: int) -> bytes:
    """Return a shard of about 10 MB whose samples know their numbers; all have one layout."""
    ids = np.arange(number * SHARD_ROWS, (number + 1) * SHARD_ROWS)
    words = np.repeat(ids.astype(np.int32), ROW_BYTES // 4)
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(words), ROW_BYTES // 4)
    file = io.BytesIO()
    # Without compression, dictionaries and statistics, sizes do not depend on the values.
    pq.write_table(
        pa.table({"id": pa.array(ids), "tokens": tokens}), file, row_group_size=SHARD_ROWS,
        compression="none", use_dictionary=False, write_statistics=False,
    )  # fmt: skip
    return file.getvalue()


class Server(ThreadingHTTPServer):
    """Objects of one bucket; what the directory lacks is made if its name is `shard-NUMBER`."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are no error."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        """Write no log."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        key = unquote(urlsplit(self.path).path).split("/", 2)[2]
        path = self.server.directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(200, b"", {"ETag": '"x"'})

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix("/bucket").lstrip("/")
        if not key:
            self._answer(200, self._listing(parse_qs(url.query).get("prefix", [""])[0]))
            return
        path = self.server.directory / key
        made = re.search(r"shard-(\d+)", key)
        data = make_shard(int(made[1])) if made and not path.is_file() else None
        if data is None and not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        size = path.stat().st_size if data is None else len(data)
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(found[1]) if found else 0
        last = min(int(found[2]), size - 1) if found and found[2] else size - 1
        if data is None:
            with path.open("rb") as file:
                file.seek(first)
                content = file.read(last - first + 1)
        else:
            content = data[first : last + 1]
        headers = {"ETag": f'"{size}"', "Last-Modified": "Tue, 01 Jan 2030 00:00:00 GMT"}
        if found:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._answer(206 if found else 200, content, headers)

    def _listing(self, prefix: str) -> bytes:
        text = "".join(
            f"<Contents><Key>{path.relative_to(self.server.directory).as_posix()}</Key>"
            f"<Size>{path.stat().st_size}</Size><ETag>&quot;{path.stat().st_size}&quot;</ETag>"
            "<LastModified>2030-01-01T00:00:00.000Z</LastModified></Contents>"
            for path in sorted(self.server.directory.rglob("*"))
            if path.is_file()
            and path.relative_to(self.server.directory).as_posix().startswith(prefix)
        )
        return f"<ListBucketResult>{text}</ListBucketResult>".encode()

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Serve a directory as a bucket from a process of its own, and yield the URL."""
    import subprocess
    import sys

    process = subprocess.Popen(
        [sys.executable, __file__, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    import sys

    server = Server(Path(sys.argv[1]))
    Thread(target=server.serve_forever, daemon=True).start()
    print(server.url, flush=True)
    sys.stdin.read()
