import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def master(serve_master: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return one master for all: nothing here changes it."""
    served = serve_master(tmp_path_factory.mktemp("connections") / "home")
    yield served
    served.close()


def test_answers_leave_at_once(master: Any) -> None:
    """A connection without TCP_NODELAY holds the last piece of an answer back for 40 ms."""
    assert master.http.get("/health").status_code == 200
    accepted = [
        protocol.transport.get_extra_info("socket")
        for protocol in master.server.server_state.connections
    ]
    assert accepted
    assert all(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in accepted)
