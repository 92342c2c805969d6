"""How large the body of a request may be, and what is answered beyond that."""

import gzip
import hashlib
import io
import json
import socket
import tarfile
from collections.abc import Callable
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts

from paceline._cluster.master.api.request_limits import LARGE_BODIES

KIB = 1024
MIB = 1024 * KIB
DIGEST = "0" * 64


@pytest.fixture(scope="module")
def master(serve_master: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return one master for all."""
    served = serve_master(tmp_path_factory.mktemp("bodies") / "home")
    yield served
    served.close()


class Upload:
    """A request whose body is sent piece by piece."""

    def __init__(
        self, master: Any, method: str, path: str, *, length: int | None, has_token: bool
    ) -> None:
        self._end = socket.create_connection(("127.0.0.1", master.port), timeout=60)
        framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        lines = [
            f"{method} /api/v1{path} HTTP/1.1",
            f"Host: 127.0.0.1:{master.port}",
            "Content-Type: application/json",
            framing,
        ]
        if has_token:
            lines.append(f"Authorization: Bearer {master.home.token}")
        self._is_chunked = length is None
        self._end.sendall("\r\n".join([*lines, "", ""]).encode())

    def __enter__(self) -> "Upload":
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def send(self, piece: bytes) -> None:
        """Send a piece of the body."""
        if self._is_chunked:
            piece = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
        self._end.sendall(piece)

    def finish(self) -> None:
        """Say that the body is complete."""
        if self._is_chunked:
            self._end.sendall(b"0\r\n\r\n")

    def answer(self) -> tuple[int, str]:
        """Wait for the answer and return its status and code."""
        response = HTTPResponse(self._end)
        response.begin()
        assert response.headers["content-type"] == "application/problem+json"
        problem = json.loads(response.read())
        assert problem["status"] == response.status
        assert problem["detail"]
        return response.status, problem["code"]


@pytest.mark.parametrize("has_token", [False, True])
@pytest.mark.parametrize("path", ["/login", "/check-config", "/attempts/1/records"])
def test_a_body_declared_beyond_the_limit_is_refused_before_it_is_sent(
    master: Any, path: str, has_token: bool
) -> None:
    with Upload(master, "POST", path, length=400 * MIB, has_token=has_token) as upload:
        upload.send(b"x" * KIB)
        is_known = has_token or path == "/login"
        expected = (413, "body_too_large") if is_known else (401, "unauthorized")
        assert upload.answer() == expected


@pytest.mark.parametrize(
    ("path", "has_token", "limit"),
    [("/login", False, 16 * KIB), ("/login", True, MIB), ("/bulk-actions", True, MIB)],
)
def test_a_body_in_chunks_is_refused_at_the_limit_before_it_ends(
    master: Any, path: str, has_token: bool, limit: int
) -> None:
    with Upload(master, "POST", path, length=None, has_token=has_token) as upload:
        for _ in range(limit // (4 * KIB)):
            upload.send(b" " * 4 * KIB)
        upload.send(b" ")
        assert upload.answer() == (413, "body_too_large")
        # The rest is not kept, and the next request on the connection is answered.
        upload.send(b" " * MIB)
        upload.finish()


@pytest.mark.parametrize("length", [None, 16 * KIB])
def test_a_body_at_the_limit_is_read(master: Any, length: int | None) -> None:
    body = json.dumps({"user": "admin", "password": "wrong"}).encode().ljust(16 * KIB)
    with Upload(master, "POST", "/login", length=length, has_token=False) as upload:
        upload.send(body)
        upload.finish()
        assert upload.answer() == (401, "wrong_password")


def test_a_stranger_may_not_send_to_a_route_that_takes_much(master: Any) -> None:
    with Upload(master, "PUT", f"/contexts/{DIGEST}", length=None, has_token=False) as upload:
        assert upload.answer() == (401, "unauthorized")
    assert list(master.home.contexts_path.iterdir()) == []


def test_a_client_that_closes_gets_the_answer_after_all_that_it_sent(master: Any) -> None:
    """A client that sends all of its body first would otherwise find the connection broken."""
    with socket.create_connection(("127.0.0.1", master.port), timeout=60) as end:
        size = 64 * MIB
        end.sendall(
            f"POST /api/v1/login HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode()
        )
        for _ in range(size // MIB):
            end.sendall(b"x" * MIB)
        response = HTTPResponse(end)
        response.begin()
        assert response.status == 413


def test_records_larger_than_the_default_are_stored(master: Any) -> None:
    experiment_id = master.create()
    master.schedule()
    attempt_id = master.http.get("/trials/1").json()["attempts"][0]["id"]
    assert experiment_id == 1
    entries = [[n, 1.0, 0, "stdout", None, "x" * 100_000] for n in range(40)]
    reply = master.attempt(attempt_id, "logs", entries=entries)
    assert reply.json() == {"last_sequence": 39}


def test_configs_and_notes_larger_than_the_default_are_taken(master: Any) -> None:
    config = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}
    body = {"config": config, "submitted_config": "# " + "x" * (2 * MIB)}
    reply = master.http.post("/experiments", json=body)
    assert reply.status_code == 201
    # The longest notes that may be, each character escaped.
    notes = json.dumps({"notes": "\u00fc" * 1_000_000})
    path = f"/experiments/{reply.json()['id']}"
    headers = {"content-type": "application/json"}
    assert master.http.patch(path, content=notes, headers=headers).status_code == 200


def test_each_larger_limit_is_that_of_a_route(master: Any) -> None:
    routes = {
        (method, str(route.path))
        for route in iter_route_contexts(master.app.routes)
        for method in route.methods or ()
    }
    named = {(method, f"/api/v1{path}") for method, path in LARGE_BODIES}
    assert named <= routes


def test_code_that_unpacks_to_too_much_is_refused_and_leaves_nothing(master: Any) -> None:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        member = tarfile.TarInfo("large")
        member.size = 2100 * MIB
        file.write(member.tobuf())
    digest = hashlib.sha256(packed.getvalue()).hexdigest()
    before = list(master.home.contexts_path.iterdir())
    reply = master.http.put(f"/contexts/{digest}", content=packed.getvalue())
    assert (reply.status_code, reply.json()["code"]) == (413, "context_too_large")
    assert master.http.put(f"/contexts/{DIGEST}", content=b"other").status_code == 422
    assert list(master.home.contexts_path.iterdir()) == before


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "/experiments/{}", {"labels": ["\ud800"]}),
        ("POST", "/bulk-actions", {"action": "label", "add_labels": ["\ud800"]}),
    ],
)
def test_half_a_surrogate_pair_is_refused_and_spoils_no_list(
    master: Any, method: str, path: str, body: dict[str, Any]
) -> None:
    """A column of JSON would keep it, and all lists with it could then not be sent."""
    experiment_id = master.create()
    if path == "/bulk-actions":
        body = body | {"experiment_ids": [experiment_id]}
    headers = {"Content-Type": "application/json"}
    reply = master.http.request(
        method, path.format(experiment_id), content=json.dumps(body), headers=headers
    )
    assert reply.status_code == 422, f"{method} {path} answers {reply.text}"
    for read in ("/experiments", f"/experiments/{experiment_id}"):
        assert master.http.get(read).status_code == 200, f"GET {read} fails after {method} {path}"
