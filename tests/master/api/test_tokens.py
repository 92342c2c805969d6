"""Tokens: what each opens, and that one which is wrong, expired or revoked opens nothing."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import update

from paceline._cluster.master.api.route_scopes import (
    PREFIX,
    ROUTES,
    TRACKER_PATHS,
    RouteScope,
    Scopes,
)
from paceline._cluster.master.store import tables
from paceline._cluster.messages.master_models import make_new_token

# What each kind of sender may use, besides the public routes.
MAY_USE = {
    "nobody": set(),
    "wrong": set(),
    "expired": set(),
    "revoked": set(),
    "read": {RouteScope.READ},
    "submit": {RouteScope.READ, RouteScope.SUBMIT, RouteScope.REPORT},
    "admin": set(RouteScope) - {RouteScope.PUBLIC},
    "runner": {RouteScope.RUNNER},
    "report": {RouteScope.REPORT},
    "attempt": {RouteScope.ATTEMPT},
    "other attempt": set(),
    "forged attempt": set(),
}
REFUSED_401 = {"nobody", "wrong", "expired", "revoked", "forged attempt"}
# Would end the master or take its token away, or answers for as long as somebody listens.
NOT_SENT = {"POST /master/shutdown", "PUT /home-token", "GET /events"}


@pytest.fixture(scope="module")
def master(serve_master: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a master with two attempts, for all tests that do not need their own."""
    served = serve_master(tmp_path_factory.mktemp("tokens") / "home")
    served.create()
    served.schedule()
    yield served
    served.close()


@pytest.fixture(scope="module")
def secrets(master: Any) -> dict[str, str | None]:
    """Return a token of each kind."""

    def make(name: str, scope: str, **more: Any) -> str:
        reply = master.http.post("/tokens", json={"name": name, "scope": scope, **more})
        assert reply.status_code == 201, reply.text
        return str(reply.json()["secret"])

    made: dict[str, str | None] = {"nobody": None, "wrong": "paceline_wrong"}
    made |= {scope: make(scope, scope) for scope in ("read", "submit", "admin", "runner", "report")}
    made["expired"] = make("expired", "admin", expires_in_s=0.001)
    made["revoked"] = make("revoked", "admin")
    [row] = [token for token in master.http.get("/tokens").json() if token["name"] == "revoked"]
    assert master.http.delete(f"/tokens/{row['id']}").status_code == 204
    made["attempt"] = master.core.attempt_tokens.token_of(1)
    made["other attempt"] = master.core.attempt_tokens.token_of(2)
    made["forged attempt"] = made["attempt"].replace("attempt_1_", "attempt_2_")
    return made


@pytest.fixture(scope="module")
def bare(master: Any) -> Iterator[httpx2.Client]:
    """Return a client without a token."""
    base = f"http://127.0.0.1:{master.port}"
    with httpx2.Client(base_url=base, timeout=60, verify=False) as http:
        yield http


def routes() -> Iterator[tuple[RouteScope, str, str]]:
    for scope, listed in ROUTES.items():
        for route in listed:
            method, _, path = route.partition(" ")
            yield scope, method, path


def bearer(secret: str | None) -> dict[str, str]:
    return {} if secret is None else {"authorization": f"Bearer {secret}"}


def filled(path: str) -> str:
    given = {"digest": "0" * 64, "action": "pause", "uuid": "u", "path:path": "f", "token_id": "9"}
    return PREFIX + re.sub(r"{(.+?)}", lambda match: given.get(match[1], "1"), path)


def test_every_route_declares_its_scope_in_the_one_list(master: Any) -> None:
    there = {
        f"{method} {str(route.path).removeprefix(PREFIX)}"
        for route in iter_route_contexts(master.app.routes)
        for method in route.methods or ()
        if not str(route.path).startswith(TRACKER_PATHS)
    }
    listed = [f"{method} {path}" for _, method, path in routes()]
    assert set(listed) == there, "Hint: name the route in `master/api/_scopes.py`"
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("sender", MAY_USE)
def test_each_sender_passes_where_its_scope_says_and_nowhere_else(
    bare: httpx2.Client, secrets: dict[str, str | None], sender: str
) -> None:
    for scope, method, path in routes():
        may_pass = scope is RouteScope.PUBLIC or scope in MAY_USE[sender]
        if may_pass and f"{method} {path}" in NOT_SENT:
            continue
        # An empty body keeps those who pass from changing anything.
        reply = bare.request(method, filled(path), headers=bearer(secrets[sender]))
        told = (sender, method, path, reply.status_code, reply.text)
        if method != "HEAD" and reply.status_code >= 400:
            assert reply.json()["status"] == reply.status_code, told
        assert reply.status_code < 500, told
        if may_pass:
            assert reply.status_code not in (401, 403) or path in ("/sign-in",), told
        elif sender in REFUSED_401:
            assert reply.status_code == 401, told
        else:
            assert reply.status_code == 403, told
            assert method == "HEAD" or reply.json()["code"] == "scope_too_low"


def test_a_path_without_a_route_is_refused_to_who_may_not_administer(
    bare: httpx2.Client, secrets: dict[str, str | None]
) -> None:
    """The router takes a line's end for the end of a path."""
    for method, path in (
        ("POST", "/api/v1/master/shutdown%0A"),
        ("GET", "/api/v1/tokens%0A"),
        ("POST", "/api/v1/master/shutdown/"),
        ("DELETE", "/api/v1/nothing"),
    ):
        for sender in ("read", "submit", "attempt", "runner", "report"):
            assert bare.request(method, path, headers=bearer(secrets[sender])).status_code == 403
    assert Scopes().access("GET", "/api/v1/attempts/01/control").admits(RouteScope.ATTEMPT, 1) is (
        False
    )


def test_what_is_wrong_with_a_known_token_is_said(
    bare: httpx2.Client, secrets: dict[str, str | None]
) -> None:
    def code(sender: str) -> str:
        reply = bare.get("/api/v1/slots", headers=bearer(secrets[sender]))
        return str(reply.json()["code"])

    assert [code(sender) for sender in ("wrong", "expired", "revoked")] == [
        "unauthorized", "token_expired", "token_revoked",
    ]  # fmt: skip
    wrong = bare.get("/api/v1/slots", headers=bearer(secrets["wrong"])).json()
    assert "The token of a request must be known to the master" in str(wrong)


def test_only_the_digest_of_a_token_is_kept(master: Any, secrets: dict[str, str | None]) -> None:
    files = [path for path in master.home.path.rglob("*") if path.is_file()]
    for sender in ("read", "expired", "revoked"):
        secret = str(secrets[sender]).encode()
        assert all(secret not in path.read_bytes() for path in files)
    listed = master.http.get("/tokens")
    assert "secret" not in listed.json()[0]
    assert str(secrets["read"]) not in listed.text


def test_a_session_tells_the_scope(bare: httpx2.Client, secrets: dict[str, str | None]) -> None:
    told = bare.get("/api/v1/session", headers=bearer(secrets["submit"])).json()
    assert (told["user"], told["scope"]) == ("submit", "submit")
    assert bare.get("/api/v1/session").json()["scope"] is None


def test_a_browser_cannot_make_tokens(master: Any, bare: httpx2.Client) -> None:
    """Whoever gets hold of a sign-in must not keep access by it."""
    link = master.http.post("/sign-in-links").json()["url"]
    cookies = dict(bare.get(link).cookies)
    bare.cookies.clear()
    for method, path in (("POST", "/tokens"), ("PUT", "/home-token")):
        cookie = "; ".join(f"{name}={value}" for name, value in cookies.items())
        body = {"name": "mine"}
        reply = bare.request(method, PREFIX + path, json=body, headers={"cookie": cookie})
        assert (reply.status_code, reply.json()["code"]) == (403, "token_needed")


def test_an_attempt_reads_its_own_code_only(
    master: Any, bare: httpx2.Client, secrets: dict[str, str | None]
) -> None:
    own = "ab" * 32
    (master.home.contexts_path / f"{own}.tar.gz").write_bytes(b"code")
    (master.home.contexts_path / f"{'cd' * 32}.tar.gz").write_bytes(b"another's")

    def give(transaction: Any) -> None:
        transaction.connection.execute(update(tables.experiments).values(context_digest=own))

    master.core.database.write(give).result()
    headers = bearer(secrets["attempt"])
    assert bare.get(f"/api/v1/contexts/{own}", headers=headers).content == b"code"
    assert bare.get(f"/api/v1/contexts/{'cd' * 32}", headers=headers).status_code == 403


def test_the_token_of_an_attempt_expires_a_day_after_its_end(
    master: Any, bare: httpx2.Client
) -> None:
    tokens = master.core.attempt_tokens

    def ask(attempt_id: int) -> int:
        tokens._looked_at.clear()
        headers = bearer(tokens.token_of(attempt_id))
        path = f"/api/v1/attempts/{attempt_id}/control"
        return bare.get(path, headers=headers).status_code

    def end(ended_at: float | None) -> None:
        def job(transaction: Any) -> None:
            attempts = tables.attempts
            changed = update(attempts).where(attempts.c.id == 2).values(ended_at=ended_at)
            transaction.connection.execute(changed)

        master.core.database.write(job).result()

    assert ask(2) == 200
    end(time.time() - 60)
    assert ask(2) == 200
    end(time.time() - 2 * 86400)
    assert ask(2) == 401
    end(None)
    # There is no such attempt.
    assert ask(3) == 401


def test_a_name_is_given_again_only_after_its_token_was_revoked(master: Any) -> None:
    def make(**body: Any) -> httpx2.Response:
        reply: httpx2.Response = master.http.post("/tokens", json={"name": "ci", **body})
        return reply

    first = make(expires_in_s=None).json()
    assert (first["scope"], first["expires_at"]) == ("read", None)
    taken = make()
    assert (taken.status_code, taken.json()["code"]) == (409, "name_taken")
    assert master.http.delete(f"/tokens/{first['id']}").status_code == 204
    assert master.http.delete("/tokens/4711").status_code == 404
    second = make().json()
    assert second["id"] > first["id"]
    for wrong in ({"name": "a b"}, {"scope": "attempt"}, {"expires_in_s": 0}):
        assert make(**wrong).status_code == 422


def test_tokens_outlive_the_master_and_the_homes_token_can_be_changed(
    make_master: Callable[..., Any],
) -> None:
    first = make_master(name="kept")
    secret = first.http.post("/tokens", json={"name": "kept", "scope": "read"}).json()["secret"]
    gone = first.http.post("/tokens", json={"name": "gone", "scope": "read"}).json()
    first.http.delete(f"/tokens/{gone['id']}")
    first.create()
    first.schedule()
    attempt = first.core.attempt_tokens.token_of(1)
    old = first.home.token
    new = first.http.put("/home-token").json()["secret"]
    assert first.home.token == new != old
    assert (first.home.path / "token").stat().st_mode & 0o777 == 0o600
    assert first.http.get("/slots").status_code == 401
    first.server._stop()
    first._thread.join()
    second = make_master(name="kept")
    with httpx2.Client(base_url=second.url, timeout=60, verify=False) as http:

        def ask(token: str, path: str = "/slots") -> int:
            return http.get(path, headers=bearer(token)).status_code

        assert [ask(old), ask(new), ask(secret), ask(gone["secret"])] == [401, 200, 200, 401]
        assert ask(attempt, "/attempts/1/control") == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"scope": "read", "node": "box"}, "of the scope `runner`, but `scope` is 'read'"),
        ({"scope": "admin", "pool": "gpu"}, "of the scope `runner`, but `scope` is 'admin'"),
        ({"scope": "runner", "node": "a b"}, "`node` must be up to 63 letters"),
        ({"scope": "runner", "pool": ""}, "`pool` must be up to 63 letters"),
        ({"scope": "runner", "node": "local"}, "another machine than the master's own"),
    ],
)
def test_a_token_that_cannot_be_for_a_node_or_pool_is_refused(
    master: Any, body: dict[str, Any], message: str
) -> None:
    reply = master.http.post("/tokens", json={"name": "wrong"} | body)
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")
    assert message in reply.json()["detail"]


def test_a_wrong_name_of_a_token_is_told_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="^`name` must be up to 64 letters, .* but got 'a b'.$"):
        make_new_token(name="a b")


@pytest.mark.parametrize("end", ["revoke", "expire", "renew", "log out"])
def test_a_stream_of_events_ends_with_what_opened_it(
    make_master: Callable[..., Any], end: str
) -> None:
    served = make_master()
    headers = dict(served.headers)
    if end in ("revoke", "expire"):
        body = {"name": "t", "scope": "read"} | ({"expires_in_s": 1.0} if end == "expire" else {})
        made = served.http.post("/tokens", json=body).json()
        headers["Authorization"] = f"Bearer {made['secret']}"
    elif end == "log out":
        link = served.http.post("/sign-in-links").json()["url"]
        cookies = httpx2.get(link, verify=False).cookies
        headers = {"cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
    with httpx2.stream("GET", f"{served.url}/events", headers=headers, timeout=10) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("event: connected")
        if end == "revoke":
            assert served.http.delete(f"/tokens/{made['id']}").status_code == 204
        elif end == "renew":
            renewed = served.http.put("/home-token").json()["secret"]
            served.http.headers["Authorization"] = f"Bearer {renewed}"
        elif end == "log out":
            reply_out = httpx2.post(f"{served.url}/logout", headers=headers, verify=False)
            assert reply_out.status_code == 204
        # The time between two signs of life is longer than the timeout.
        assert list(lines) == [""]
    served.create()
    opened = httpx2.get(f"{served.url}/experiments", headers=headers, verify=False)
    assert opened.status_code == 401
