"""A store of objects that fails when a test wants it to; it speaks as much of S3 as is read."""

import hashlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"


class ObjectServer(ThreadingHTTPServer):
    """The files of a directory as objects.

    Attributes:
        reads: The keys and ranges that were asked for, in order.
        fails_until: Until when each request is answered by 503, by `time.monotonic`; two are in
            any case.
        hangs_on: The key whose requests are never answered.
        hangs_first_on: The key whose first request is answered after the second one only.
        waited_in_vain: Whether there was no second one for half a minute.
        delay_s: How long each piece of an object takes, in seconds.
    """

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.reads: list[tuple[str, str]] = []
        self.fails_until = 0.0
        self.hangs_on = ""
        self.hangs_first_on = ""
        self.second_came = threading.Event()
        self.waited_in_vain = False
        self.delay_s = 0.0
        self.is_forbidden = False
        self.num_failed = 0
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that give up are no error."""


class _Handler(BaseHTTPRequestHandler):
    server: ObjectServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        # Clients ask a machine's metadata this way; an answer 501 would be asked for again.
        self._answer(403, b"")

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        if url.path.split("/")[1] != BUCKET:
            return self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        if self.server.is_forbidden:
            return self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        until = self.server.fails_until
        if until and (time.monotonic() < until or self.server.num_failed < 2):
            self.server.num_failed += 1
            return self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
        if not key:
            return self._answer(200, self._listing(parse_qs(url.query).get("prefix", [""])[0]))
        wanted = self.headers.get("Range", "")
        self.server.reads.append((key, wanted))
        if self.server.hangs_on == key:
            self.server.closing.wait()
            return None
        if self.server.hangs_first_on == key:
            self.server.hangs_first_on = f"{key} again"
            self.server.waited_in_vain = not self.server.second_came.wait(30)
        elif self.server.hangs_first_on == f"{key} again":
            self.server.second_came.set()
        if wanted:
            time.sleep(self.server.delay_s)
        return self._object(key, wanted)

    def _object(self, key: str, wanted: str) -> None:
        path = self.server.directory / key
        if not path.is_file():
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        data = path.read_bytes()
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if self.headers.get("If-Match", tag) != tag:
            return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        headers = {"ETag": tag, "Last-Modified": "Tue, 01 Jan 2030 00:00:00 GMT"}
        if found is None:
            return self._answer(200, data, headers)
        first, last = int(found[1]), min(int(found[2]), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._answer(206, data[first : last + 1], headers)

    def _listing(self, prefix: str) -> bytes:
        text = ""
        for path in sorted(self.server.directory.rglob("*")):
            key = path.relative_to(self.server.directory).as_posix()
            if path.is_file() and key.startswith(prefix):
                data = path.read_bytes()
                text += (
                    f"<Contents><Key>{key}</Key><Size>{len(data)}</Size>"
                    "<LastModified>2030-01-01T00:00:00.000Z</LastModified>"
                    f'<ETag>"{hashlib.md5(data).hexdigest()}"</ETag></Contents>'
                )
        return f"<ListBucketResult>{text}</ListBucketResult>".encode()

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        # A connection that stays open keeps a thread of the server.
        self.send_header("Connection", "close")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
