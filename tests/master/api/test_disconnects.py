"""Clients that go away in the middle: the master's log says nothing of it."""

import logging
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline._cluster.master.api.route_scopes import PREFIX, ROUTES


@pytest.fixture(scope="module")
def master(serve_master: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return one master for all."""
    served = serve_master(tmp_path_factory.mktemp("disconnects") / "home")
    yield served
    served.close()


def leave(master: Any, method: str, path: str, *, reads: int = 0) -> None:
    """Send the beginning of a request, read some of the answer, and go away."""
    with socket.create_connection(("127.0.0.1", master.port), timeout=60) as end:
        body = "Content-Type: application/json\r\nContent-Length: 5000\r\n" * (method != "GET")
        end.sendall(
            f"{method} {PREFIX}{path} HTTP/1.1\r\nHost: localhost\r\n{body}"
            f"Authorization: Bearer {master.home.token}\r\n\r\n".encode()
        )
        if method != "GET":
            end.sendall(b'{"batches": [')
        if reads:
            end.recv(reads)


def test_a_client_that_goes_away_leaves_nothing_in_the_log(
    master: Any, caplog: pytest.LogCaptureFixture
) -> None:
    master.create()
    master.schedule()
    lines = [[n, 1.0, 0, "stdout", None, "x" * 100_000] for n in range(50)]
    master.attempt(1, "logs", entries=lines)
    large = master.home.contexts_path / f"{'0' * 64}.tar.gz"
    large.write_bytes(bytes(20_000_000))
    with caplog.at_level(logging.WARNING):
        for routes in ROUTES.values():
            for method, _, path in (route.partition(" ") for route in routes):
                if method in ("POST", "PUT", "PATCH") and path != "/home-token":
                    given = path.replace("{digest}", "1" * 64).replace("{action}", "pause")
                    leave(master, method, re.sub(r"{.+?}", "1", given))
        for path in (f"/contexts/{'0' * 64}", "/trials/1/logs?limit=1000", "/events"):
            leave(master, "GET", path, reads=10)
            leave(master, "GET", path)
        time.sleep(0.5)
        assert master.http.get("/slots").status_code == 200
    # A busy machine may answer slowly, which is told.
    slow = "paceline._cluster.master.api.request_limits"
    assert [record.getMessage() for record in caplog.records if record.name != slow] == []
    assert [path.name for path in master.home.contexts_path.iterdir()] == [large.name]
