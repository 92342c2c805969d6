"""The SDK behind connections that break: threads, and requests whose answer is lost."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline.client import Client, MasterUnreachableError

NUM_THREADS = 16
CONFIG = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}


class LossyProxy(ThreadingHTTPServer):
    """Passes requests on to a master, and may keep back the answers to some."""

    daemon_threads = False

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.master_port = port
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.is_lost: Callable[[str], bool] = lambda _request: False
        self.num_lost = 0
        self._thread = threading.Thread(target=self.serve_forever, name="proxy")
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LossyProxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        master = HTTPConnection("127.0.0.1", self.server.master_port, timeout=60)
        with closing(master):
            master.request(self.command, self.path, body, dict(self.headers))
            reply = master.getresponse()
            content = reply.read()
        if self.server.is_lost(f"{self.command} {self.path}"):
            self.server.num_lost += 1
            self.close_connection = True
            return
        self.send_response(reply.status)
        self.send_header("content-type", reply.headers["content-type"])
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _pass_on

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def proxy(master: Any) -> Iterator[LossyProxy]:
    proxy = LossyProxy(master.port)
    yield proxy
    proxy.close()


@pytest.fixture
def client(master: Any, proxy: LossyProxy) -> Iterator[Client]:
    with Client(proxy.url, master.home.token) as client:
        yield client


def lose_first(proxy: LossyProxy, request: str) -> None:
    """Lose the answer to the first such request."""
    proxy.num_lost = 0
    proxy.is_lost = lambda sent: sent == request and proxy.num_lost == 0


def test_a_request_that_is_sent_again_creates_no_second_experiment(
    master: Any, proxy: LossyProxy, client: Client
) -> None:
    lose_first(proxy, "POST /api/v1/experiments")
    first = client.create_experiment(CONFIG, activate=False)
    assert proxy.num_lost == 1
    lose_first(proxy, "POST /api/v1/experiments/1/fork")
    forked = first.fork(activate=False)
    assert proxy.num_lost == 1
    stored = [one["id"] for one in master.http.get("/experiments").json()["items"]]
    assert sorted(stored) == [first.id, forked.id]
    # What was asked for twice on purpose is made twice.
    assert first.fork(activate=False).id == forked.id + 1


def test_an_ended_experiment_is_reopened_once(
    master: Any, proxy: LossyProxy, client: Client
) -> None:
    experiment = client.create_experiment(CONFIG, activate=False)
    experiment.kill()
    master.schedule()
    lose_first(proxy, "POST /api/v1/experiments/1/continue")
    assert experiment.continue_().data.state.value == "ACTIVE"
    assert proxy.num_lost == 1


def test_a_key_holds_for_its_route_and_after_a_refusal(master: Any) -> None:
    def create(path: str, key: str, **body: Any) -> Any:
        return master.http.post(path, json=body, headers={"Idempotency-Key": key})

    refused = create("/experiments", "a", config=CONFIG | {"resources": {"slots_per_trial": 99}})
    assert refused.status_code >= 400
    ids = [create("/experiments", "a", config=CONFIG).json()["id"] for _ in range(3)]
    assert ids == [1, 1, 1]
    assert create("/experiments/1/fork", "a").json()["id"] == 2
    assert create("/experiments", "b", config=CONFIG).json()["id"] == 3
    assert create("/experiments", "b" * 101, config=CONFIG).status_code == 422


def test_a_key_outlives_the_master(make_master: Callable[..., Any]) -> None:
    body = {"config": CONFIG}
    first = make_master(name="kept")
    assert first.http.post("/experiments", json=body, headers={"Idempotency-Key": "a"}).is_success
    first.server._stop()
    first._thread.join()
    second = make_master(name="kept")
    again = second.http.post("/experiments", json=body, headers={"Idempotency-Key": "a"})
    assert again.json()["id"] == 1
    assert len(second.http.get("/experiments").json()["items"]) == 1


@pytest.mark.long
def test_threads_share_a_client_whose_connections_break(proxy: LossyProxy, client: Client) -> None:
    lock, count = threading.Lock(), 0

    def loses_each_seventh(_request: str) -> bool:
        nonlocal count
        with lock:
            count += 1
            return count % 7 == 0

    proxy.is_lost = loses_each_seventh
    seen: list[str] = []

    def ask(_number: int) -> None:
        try:
            client.slots()
        except MasterUnreachableError as error:
            seen.append(str(error))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        # Anything but an answer or an unreachable master is raised here.
        list(threads.map(ask, range(300)))
    assert len(seen) < 30
    assert all("broke off its answer" in text for text in seen)
