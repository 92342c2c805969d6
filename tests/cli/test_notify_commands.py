"""Commands `paceline notify`, with a receiver that takes one message and refuses the next."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from json_answers import valid

STATUSES = [204, 204, 410]
SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.server.statuses.pop(0))  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[str]:
    """Return the address of a receiver."""
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    server.statuses = [*STATUSES]  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/TOKEN123"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.long
def test_channels_are_listed_and_tested(
    paceline: Any, master_server: Any, receiver: str, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    channels = {"team": {"webhook": receiver, "secret": SECRET}}
    (home / "notify.yaml").write_text(json.dumps({"channels": channels}))
    master_server.start_master(home, "--port", 0, "--slots", 1)
    try:
        listed = paceline("notify", "list").stdout
        assert listed.splitlines()[0].split() == [
            "Channel",
            "Kind",
            "Waiting",
            "Given",
            "up",
            "Failure",
        ]
        assert "team" in listed
        assert "TOKEN123" not in listed
        [row] = valid("notify list", paceline("notify", "list", "--json").stdout)
        assert row == {
            "name": "team", "kind": "webhook", "num_waiting": 0, "num_dropped": 0, "failure": None,
        }  # fmt: skip
        assert paceline("notify", "test", "team").stdout == "Sent a test message to team.\n"
        answer = paceline("notify", "test", "team", "--json").stdout
        assert valid("notify test", answer) == {"failure": None}
        refused = paceline("notify", "test", "team", code=1).stderr
        assert "could not be sent: the receiver answers HTTP 410." in refused
        assert "There is no channel 'nobody'" in paceline("notify", "test", "nobody", code=1).stderr
    finally:
        paceline("down", "--timeout", 1)


@pytest.mark.long
def test_master_with_a_wrong_file_does_not_start(paceline: Any, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    channels = {"team": {"webhook": "https://example.org/TOKEN123", "secret": "SECRET456"}}
    (home / "notify.yaml").write_text(json.dumps({"channels": channels}))
    refused = paceline("up", "--port", 0, code=1)
    assert "notify.yaml: channels.team.secret: String should match pattern" in refused.stderr
    for part in ("TOKEN123", "SECRET456"):
        assert part not in refused.stderr + refused.stdout
