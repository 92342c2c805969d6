"""Headers of every answer, whoever makes it, and the page that documents the API."""

import re
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paceline._cluster.master.api.route_scopes import PREFIX


@pytest.fixture(scope="module")
def master(serve_master: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return one master for all: nothing here changes it."""
    served = serve_master(tmp_path_factory.mktemp("headers") / "home")
    yield served
    served.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", f"{PREFIX}/slots", 200),
        ("GET", f"{PREFIX}/events", 200),
        ("GET", f"{PREFIX}/docs", 200),
        ("GET", f"{PREFIX}/openapi.json", 200),
        ("HEAD", f"{PREFIX}/openapi.json", 200),
        ("GET", f"{PREFIX}/nothing", 404),
        ("PUT", f"{PREFIX}/slots", 405),
        ("POST", f"{PREFIX}/check-config", 422),
        ("GET", f"{PREFIX}/sign-in?token=x", 401),
        ("GET", "/", None),
        ("GET", "/icon.svg", None),
        ("GET", "/docs", 307),
        ("GET", "/docs/", None),
        ("GET", "/docs/none.html", None),
        ("GET", "/assets/none.js", 404),
        ("POST", "/", 405),
    ],
)
def test_every_answer_has_the_headers(
    master: Any, method: str, path: str, status: int | None
) -> None:
    url = f"http://127.0.0.1:{master.port}{path}"
    with master.http.stream(method, url) as reply:
        assert reply.status_code == status or status is None
        check(reply)


def check(reply: httpx2.Response) -> None:
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers.get_list("content-security-policy")[1:] == []
    assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert reply.headers["referrer-policy"] == "no-referrer"


def test_answers_to_those_without_a_token_to_errors_and_to_no_http_have_them_too(
    master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(httpx2.get(f"{master.url}/slots", verify=False, timeout=60))
    check(
        httpx2.get(
            f"{master.url}/slots", headers={"host": "evil.example"}, verify=False, timeout=60
        )
    )
    large = httpx2.post(f"{master.url}/login", content=b" " * 100_000, verify=False, timeout=60)
    assert large.status_code == 413
    check(large)
    monkeypatch.setattr(master.core, "machine", None)
    failed = master.http.get("/slots")
    assert failed.status_code == 500
    check(failed)
    with socket.create_connection(("127.0.0.1", master.port), timeout=60) as end:
        end.sendall(b"no request\r\n\r\n")
        answer = end.recv(1000).lower()
    assert answer.startswith(b"http/1.1 400")
    assert b"x-content-type-options: nosniff" in answer
    assert b"content-security-policy: default-src 'none'" in answer


def test_the_documentation_of_the_api_runs_nothing_and_loads_nothing(master: Any) -> None:
    reply = master.http.get("/docs")
    page = reply.text
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="(.+?)"', page) == [f"{PREFIX}/openapi.json"]
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    for path, methods in master.http.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert f'{method.upper()}</span><code>{path}</code><span class="scope">' in page


def test_headers_that_are_slow_to_read_hold_nobody_up(master: Any) -> None:
    """The standard library needs seconds for each such cookie, as its parser is quadratic."""
    cookie = b'Cookie: a="' + rb"\"" * 30_000
    ask = b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % cookie
    with ExitStack() as stack:
        ends = [
            stack.enter_context(socket.create_connection(("127.0.0.1", master.port), timeout=60))
            for _ in range(15)
        ]
        for end in ends:
            end.sendall(ask)
        assert all(end.recv(100).startswith(b"HTTP/1.1 200 OK") for end in ends)


@pytest.mark.parametrize(
    "headers",
    [{"x": "a" * 66_000}, {f"x-{number}": "a" for number in range(101)}],
    ids=["long", "many"],
)
@pytest.mark.parametrize("path", ["/", f"{PREFIX}/health", f"{PREFIX}/slots"])
def test_headers_have_a_limit(master: Any, path: str, headers: dict[str, str]) -> None:
    reply = master.http.get(f"http://127.0.0.1:{master.port}{path}", headers=headers)
    # What is incomplete at the limit is not read to its end.
    assert reply.status_code in (400, 431)
    check(reply)
    assert master.http.get("/health").status_code == 200


LOGIN = b"POST /api/v1/login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "request_head",
    [
        LOGIN + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        LOGIN + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        LOGIN + b"Content-Length: 5\r\nContent-Length: 0\r\n",
        LOGIN + b"Content-Length: 5, 0\r\n",
        LOGIN + b"Content-Length: +5\r\n",
        LOGIN + b"Transfer-Encoding: xchunked\r\n",
        LOGIN + b"Transfer-Encoding: chunked, identity\r\n",
        LOGIN + b"Transfer-Encoding : chunked\r\n",
        LOGIN + b"Transfer-Encoding:\r\n chunked\r\n",
        LOGIN + b"Transfer-Encoding:\n\tchunked\r\n",
        LOGIN + b"Transfer-Encoding: \x0bchunked\r\n",
        LOGIN.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n",
        LOGIN + b"Host: evil.example\r\nContent-Length: 5\r\n",
        LOGIN + b"X: a\rContent-Length: 5\r\n",
        LOGIN.replace(b"/api", b"http://evil.example/api"),
        LOGIN.replace(b"Host: localhost\r\n", b""),
    ],
)
def test_a_request_of_unclear_length_hides_no_other_one(master: Any, request_head: bytes) -> None:
    hidden = b"GET /api/v1/session HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", master.port), timeout=60) as end:
        end.sendall(request_head + b"\r\n0\r\n\r\n" + hidden)
        answers = b"".join(iter(lambda: end.recv(65536), b""))
    assert answers.startswith(b"HTTP/1.1 4")
    assert answers.count(b"HTTP/1.1 ") == 1
    assert b"has_password" not in answers


@pytest.mark.parametrize(
    "start",
    [b"GET /", LOGIN + b"X: ", LOGIN + b"X", LOGIN + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: "],
    ids=["path", "value", "name", "behind the body"],
)
def test_what_a_request_does_not_end_is_not_read_without_end(master: Any, start: bytes) -> None:
    with socket.create_connection(("127.0.0.1", master.port), timeout=60) as end:
        end.sendall(start)
        with pytest.raises(ConnectionError):
            end.sendall(b"a" * 2**24)


def test_fields_behind_a_body_are_no_headers(master: Any) -> None:
    token = f"Authorization: Bearer {master.home.token}\r\n".encode()
    path = b"/api/v1/experiments/1/pause"
    head = LOGIN.replace(b"/api/v1/login", path) + b"Transfer-Encoding: chunked\r\n"
    with socket.create_connection(("127.0.0.1", master.port), timeout=60) as end:
        end.sendall(head + b"\r\n0\r\n" + token + b"\r\n")
        assert end.recv(1000).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(("number", "most"), [(10, 10), (2000, 100)])
def test_only_some_requests_may_come_before_their_answers(
    master: Any, number: int, most: int
) -> None:
    ask = b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = ask.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with socket.create_connection(("127.0.0.1", master.port), timeout=60) as end:
        end.sendall(ask * (number - 1) + last)
        num_answers = 0
        with suppress(ConnectionError):
            num_answers = b"".join(iter(lambda: end.recv(65536), b"")).count(b"HTTP/1.1 200")
    assert num_answers <= most
    assert number > most or num_answers == number


def test_a_request_for_another_protocol_is_answered_and_is_the_last(master: Any) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    ask = b"GET /api/v1/health HTTP/1.1\r\nHost: localhost\r\n"
    with socket.create_connection(("127.0.0.1", master.port), timeout=60) as end:
        end.sendall(ask + upgrade + b"\r\n" + ask + b"\r\n")
        answers = b"".join(iter(lambda: end.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 200") == 1
    assert b"\r\nconnection: close\r\n" in answers
