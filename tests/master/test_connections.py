"""Connections of strangers and of those who are known: deadlines, limits, and what is logged."""

import json
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from paceline._cluster.master.api.request_limits import ConnectionLimits

NUM_FILES = 256
NUM_STRANGERS = 400
HALF = b"POST /api/v1/login HTTP/1.1\r\nHost: localhost\r\nX-Half: "
HALF_BODY = (
    b"POST /api/v1/login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 10000\r\nExpect: 100-continue\r\n\r\n"
)
PATIENCE_S = 60
SERVE = """
import sys
from pathlib import Path
from paceline._cluster.master.server import serve
serve(Path(sys.argv[1]), port=0, num_slots=1)
"""
# Keeps more connections than a master has places for strangers: for one that is closed, a new one.
FLOOD = """
import selectors, socket, sys
port, sent = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
selector = selectors.DefaultSelector()

def connect():
    end = socket.create_connection(("127.0.0.1", port))
    try:
        end.sendall(sent)
    except OSError:
        pass
    selector.register(end, selectors.EVENT_READ)

def is_closed(end):
    try:
        return end.recv(4096) == b""
    except OSError:
        return True

for _ in range(500):
    connect()
while True:
    for key, _ in selector.select():
        if is_closed(key.fileobj):
            selector.unregister(key.fileobj)
            key.fileobj.close()
            connect()
"""


class MasterWithFewFiles:
    """A master's process that may open few files, and whose log is in its home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, num_files: int = NUM_FILES) -> "MasterWithFewFiles":
        """Start the process and wait until it listens."""
        self.home.mkdir(exist_ok=True)
        limits = (num_files, num_files)
        with (self.home / "master.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(self.home)],
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
            )
        address = self.home / "master.json"
        await_that(lambda: address.exists() or self.process.poll() is not None)
        assert address.exists(), self.log()
        return self

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(json.loads((self.home / "master.json").read_text())["port"])

    @property
    def headers(self) -> dict[str, str]:
        """The header with the token."""
        return {"Authorization": f"Bearer {(self.home / 'token').read_text().strip()}"}

    def client(self) -> httpx2.Client:
        """Return a client that has the token."""
        url = f"http://127.0.0.1:{self.port}/api/v1"
        return httpx2.Client(base_url=url, headers=self.headers, timeout=PATIENCE_S, verify=False)

    def ask(self, connection: HTTPConnection, method: str, path: str, body: Any = None) -> int:
        """Send a request over a connection and return the status of its answer."""
        headers = {**self.headers, "Content-Type": "application/json"}
        connection.request(method, f"/api/v1{path}", body and json.dumps(body), headers)
        reply = connection.getresponse()
        reply.read()
        return reply.status

    def log(self) -> str:
        """Return what it printed."""
        return (self.home / "master.log").read_text()

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE_S)


@pytest.fixture
def few_files(tmp_path: Path) -> Iterator[MasterWithFewFiles]:
    """Return a master that may open few files, not started yet."""
    master = MasterWithFewFiles(tmp_path / "home")
    yield master
    if master.process is not None:
        master.process.kill()
        master.process.wait()


def connect(port: int, sent: bytes) -> socket.socket:
    """Connect as a stranger and send something."""
    end = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    end.sendall(sent)
    return end


def is_closed(end: socket.socket) -> bool:
    """Tell whether the other side has closed a connection on which it says nothing."""
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def await_that(condition: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_answers_leave_at_once(master: Any) -> None:
    """A connection without TCP_NODELAY holds the last piece of an answer back for 40 ms."""
    assert master.http.get("/health").status_code == 200
    accepted = [
        protocol.transport.get_extra_info("socket")
        for protocol in master.server.server_state.connections
    ]
    assert accepted
    assert all(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in accepted)


@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize("num_bytes", [60_000, 100_000])
def test_a_head_has_a_limit_also_in_one_piece(master: Any, num_bytes: int, has_end: bool) -> None:
    head = b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Long: "
    with socket.create_connection(("127.0.0.1", master.port), timeout=PATIENCE_S) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        end.sendall(head + b"a" * num_bytes + (b"\r\n\r\n" if has_end else b""))
        if num_bytes < 65_536 and not has_end:
            end.sendall(b"\r\n\r\n")
        answer = end.recv(100)
    assert answer.startswith(b"HTTP/1.1 200" if num_bytes < 65_536 else b"HTTP/1.1 400")


@pytest.mark.long
def test_half_sent_requests_keep_nobody_out(few_files: MasterWithFewFiles) -> None:
    master = few_files.start()
    with ExitStack() as stack:
        # It does not connect again by itself, so that it tells when its connection is closed.
        kept = HTTPConnection("127.0.0.1", master.port, timeout=PATIENCE_S)
        stack.callback(kept.close)
        assert master.ask(kept, "GET", "/slots") == 200
        kept.auto_open = 0
        follower = stack.enter_context(master.client())
        events = stack.enter_context(follower.stream("GET", "/events")).iter_lines()
        assert next(events) == "event: connected"

        pieces = [b"", HALF, HALF_BODY]
        strangers = [
            stack.enter_context(connect(master.port, pieces[n % 3])) for n in range(NUM_STRANGERS)
        ]
        # Somebody without a token, somebody new with one, and those who were there before.
        url = f"http://127.0.0.1:{master.port}/api/v1/health"
        assert httpx2.get(url, timeout=PATIENCE_S, verify=False).status_code == 200
        new = stack.enter_context(master.client())
        assert new.get("/slots").status_code == 200
        config = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}
        body = {"config": config, "activate": False}
        assert master.ask(kept, "POST", "/experiments", body) == 201
        assert "experiment" in next(line for line in events if line.startswith("data:"))

        num_closed = NUM_STRANGERS - NUM_FILES // 8
        await_that(lambda: sum(map(is_closed, strangers)) >= num_closed)
        assert master.process is not None
        assert psutil.Process(master.process.pid).num_fds() < NUM_FILES
    assert len(master.log()) < 10_000, master.log()[:10_000]


@pytest.mark.long
@pytest.mark.parametrize("sent", [HALF, HALF_BODY], ids=["headers", "body"])
def test_a_flood_of_half_sent_requests_keeps_nobody_out(
    few_files: MasterWithFewFiles, sent: bytes
) -> None:
    master = few_files.start(num_files=4096)
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, str(master.port), sent.hex()])
    try:
        # It goes on for as long as the others ask.
        for _ in range(20):
            connection = HTTPConnection("127.0.0.1", master.port, timeout=PATIENCE_S)
            connection.request("GET", "/api/v1/health")
            assert connection.getresponse().status == 200
            connection.close()
        with master.client() as client:
            assert client.get("/slots").status_code == 200
        assert flood.poll() is None
    finally:
        flood.kill()
        flood.wait()


@pytest.mark.long
def test_the_log_begins_anew_when_it_is_large_and_repeats_little(
    few_files: MasterWithFewFiles,
) -> None:
    few_files.home.mkdir()
    log = few_files.home / "master.log"
    log.write_bytes(b"an old line\n" * 2_000_000)
    master = few_files.start()
    for _ in range(50):
        with connect(master.port, b"no request\r\n\r\n") as end:
            assert b"400" in end.recv(100)
    master.stop()
    text = master.log()
    assert "an old line" not in text
    assert text.count("Invalid HTTP request received") == 20
    assert "30 more messages like those from" in text
    old = (few_files.home / "master.log.1").read_bytes()
    assert len(old) == 10 * 1024 * 1024
    assert old.endswith(b"an old line\n")


@pytest.mark.long
def test_a_strangers_connection_ends_at_its_deadline_whatever_trickles_in(
    make_master: Callable[..., Any],
) -> None:
    limits = ConnectionLimits(
        num_strangers=20,
        num_known=20,
        num_accepts_per_turn=5,
        stranger_idle_s=2,
        stranger_request_s=2,
        known_idle_s=PATIENCE_S,
    )
    master = make_master(limits=limits)

    token = f"Authorization: Bearer {master.home.token}\r\nHost: localhost\r\n".encode()
    body = json.dumps({"text": "entrypoint: a\n"}).encode()
    with ExitStack() as stack:
        silent = stack.enter_context(connect(master.port, b""))
        half = stack.enter_context(connect(master.port, HALF))
        half_body = stack.enter_context(connect(master.port, HALF_BODY))
        whole = b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        again = stack.enter_context(connect(master.port, whole))
        assert b"200 OK" in again.recv(1000)
        again.sendall(HALF)
        known = stack.enter_context(
            connect(
                master.port,
                b"POST /api/v1/check-config HTTP/1.1\r\nContent-Type: application/json\r\n"
                + token
                + f"Content-Length: {len(body)}\r\n\r\n".encode(),
            )
        )
        stream = stack.enter_context(master.http.stream("GET", "/events"))
        lines = stream.iter_lines()
        assert next(lines) == "event: connected"
        strangers = [silent, half, half_body, again]

        def are_closed_while_more_comes() -> bool:
            for end in strangers[1:]:
                with suppress(OSError):
                    end.send(b"x")
            return all(map(is_closed, strangers))

        await_that(are_closed_while_more_comes)
        # Those who are known take their time.
        known.sendall(body)
        assert b"200 OK" in known.recv(1000)
        master.create()
        assert "experiment" in next(line for line in lines if line.startswith("data:"))


def test_what_is_idle_makes_room_for_who_is_known_and_streams_do_not(
    make_master: Callable[..., Any],
) -> None:
    limits = ConnectionLimits(num_strangers=20, num_known=3, num_accepts_per_turn=5)
    master = make_master(limits=limits)
    with ExitStack() as stack:

        def client() -> httpx2.Client:
            return stack.enter_context(
                httpx2.Client(
                    base_url=master.url, headers=master.headers, timeout=PATIENCE_S, verify=False
                )
            )

        def follow() -> tuple[int, Iterator[str]]:
            reply = stack.enter_context(client().stream("GET", "/events"))
            return reply.status_code, reply.iter_lines()

        assert master.http.get("/slots").status_code == 200
        streams = [follow() for _ in range(3)]
        assert [status for status, _ in streams] == [200] * 3
        refused = client().get("/slots")
        assert (refused.status_code, refused.json()["code"]) == (503, "too_many_connections")
        assert client().get("/health").status_code == 200
    assert master.http.get("/slots").status_code == 200


def test_half_sent_bodies_do_not_crowd_out_those_who_wait(make_master: Callable[..., Any]) -> None:
    limits = ConnectionLimits(num_strangers=4, num_known=3, num_accepts_per_turn=1)
    master = make_master(limits=limits)
    with ExitStack() as stack:
        ends = []
        for _ in range(8):
            ends.append(stack.enter_context(connect(master.port, HALF_BODY)))
            # The master waits for the body.
            assert ends[-1].recv(100).startswith(b"HTTP/1.1 100")
        url = f"{master.url}/health"
        assert httpx2.get(url, timeout=PATIENCE_S, verify=False).status_code == 200
        await_that(lambda: all(map(is_closed, ends[:4])))
        # In turn, half of the places stay with them.
        for _ in range(8):
            stack.enter_context(connect(master.port, HALF))
        assert httpx2.get(url, timeout=PATIENCE_S, verify=False).status_code == 200
        assert not any(map(is_closed, ends[-2:]))


def test_one_address_gets_only_its_share(make_master: Callable[..., Any]) -> None:
    limits = ConnectionLimits(
        num_strangers=50, num_known=20, num_accepts_per_turn=5, num_per_address=4
    )
    master = make_master(limits=limits)
    with ExitStack() as stack:

        def ends(source: str, number: int) -> list[socket.socket]:
            made = []
            for _ in range(number):
                address = ("127.0.0.1", master.port)
                end = socket.create_connection(address, PATIENCE_S, source_address=(source, 0))
                made.append(stack.enter_context(end))
                end.sendall(HALF)
            return made

        other, shared, many = ends("127.0.0.3", 3), ends("127.0.0.1", 10), ends("127.0.0.2", 9)
        await_that(lambda: all(map(is_closed, many[:5])))
        assert not any(map(is_closed, [*other, *shared, *many[5:]]))
        many[-1].close()
        assert not is_closed(ends("127.0.0.2", 1)[0])
        assert master.http.get("/slots").status_code == 200


def client_at(master: Any, address: str) -> httpx2.Client:
    """Return a client of a master that connects from an address of this machine."""
    return httpx2.Client(
        base_url=master.url,
        headers=master.headers,
        timeout=PATIENCE_S,
        transport=httpx2.HTTPTransport(verify=False, local_address=address),
    )


def test_those_who_are_known_are_as_many_as_they_like_at_one_address(
    make_master: Callable[..., Any],
) -> None:
    limits = ConnectionLimits(
        num_strangers=50, num_known=40, num_accepts_per_turn=5, num_per_address=4
    )
    master = make_master(limits=limits)
    with ExitStack() as stack:

        def client() -> httpx2.Client:
            return stack.enter_context(client_at(master, "127.0.0.2"))

        # Their connections stay open, idle.
        clients = [client() for _ in range(12)]
        assert [one.get("/slots").status_code for one in clients] == [200] * 12
        assert sum(one.is_known for one in list(master.server.server_state.connections)) >= 12
        # Nor do they keep strangers out, which may be known in a moment.
        assert client().get("/health").status_code == 200


def test_those_of_one_address_leave_half_of_the_places_to_others(
    make_master: Callable[..., Any],
) -> None:
    master = make_master(
        limits=ConnectionLimits(num_strangers=9, num_known=6, num_accepts_per_turn=5)
    )
    with ExitStack() as stack:

        def client(address: str) -> httpx2.Client:
            return stack.enter_context(client_at(master, address))

        def follow(address: str) -> int:
            return stack.enter_context(client(address).stream("GET", "/events")).status_code

        idle = client("127.0.0.2")
        assert idle.get("/slots").status_code == 200
        # For the third one, the idle one goes.
        assert [follow("127.0.0.2") for _ in range(4)] == [200, 200, 200, 503]
        assert [follow("127.0.0.3") for _ in range(3)] == [200, 200, 200]


@pytest.mark.long
def test_a_master_with_very_few_files_keeps_enough_of_them_for_itself(
    few_files: MasterWithFewFiles,
) -> None:
    """Those who follow it have as many connections as there may be of those who are known."""
    few_files.start(40)
    with ExitStack() as stack:

        def follow() -> int:
            client = stack.enter_context(few_files.client())
            return stack.enter_context(client.stream("GET", "/events", timeout=20)).status_code

        answers = [follow() for _ in range(25)]
        assert answers == sorted(answers)
        assert set(answers) == {200, 503}
    assert "Too many open files" not in few_files.log()


@pytest.mark.parametrize("num_files", [32, 64, 256, 1024, 4096, 16_384, 1_048_576])
def test_limits_leave_files_for_the_rest_of_the_master(num_files: int) -> None:
    limits = ConnectionLimits.for_files(num_files)
    # Connections that were accepted, but have not entered yet.
    num_overhead = 4 * limits.num_accepts_per_turn
    assert limits.num_strangers + limits.num_known + num_overhead <= num_files * 5 // 8
    assert limits.num_strangers + limits.num_known + limits.num_dropped <= num_files * 2 // 3
    assert limits.num_dropped <= 1024
    assert min(limits.num_strangers, limits.num_known, limits.num_accepts_per_turn) >= 1


def test_a_dropped_connection_is_held_for_a_while_and_answers_nobody(
    make_master: Callable[..., Any],
) -> None:
    limits = ConnectionLimits(
        num_strangers=4, num_known=20, num_accepts_per_turn=5, num_dropped=6, dropped_s=2.0
    )
    master = make_master(limits=limits)
    with ExitStack() as stack:

        def end() -> socket.socket:
            made = socket.create_connection(("127.0.0.1", master.port), PATIENCE_S)
            return stack.enter_context(made)

        ends = [end() for _ in range(4 + 6 + 3)]
        # The oldest of those that are held go first, at once.
        await_that(lambda: all(map(is_closed, ends[:3])))
        with suppress(OSError):
            ends[4].sendall(b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await_that(lambda: is_closed(ends[8]))
        assert all(map(is_closed, ends[:9]))
        assert not is_closed(ends[-1])
        assert master.http.get("/slots").status_code == 200
