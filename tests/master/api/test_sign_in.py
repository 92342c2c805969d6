"""Signing in: by a link, by a password, and what a cookie opens."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from paceline._cluster.master.authentication import Throttle, sender_at

PASSWORD = "correct horse"


@pytest.fixture
def browse(master: Any) -> Iterator[Callable[[], httpx2.Client]]:
    """Return a function that opens a browser: a client with cookies and without the token."""
    opened: list[httpx2.Client] = []

    def browse() -> httpx2.Client:
        base = f"http://127.0.0.1:{master.port}/api/v1"
        opened.append(httpx2.Client(base_url=base, timeout=60, verify=False))
        return opened[-1]

    yield browse
    for client in opened:
        client.close()


def sign_in(master: Any, browser: httpx2.Client) -> httpx2.Response:
    link = master.http.post("/sign-in-links").json()["url"]
    return browser.get(link)


def test_a_link_signs_in_once(master: Any, browse: Callable[[], httpx2.Client]) -> None:
    link = master.http.post("/sign-in-links").json()["url"]
    assert urlsplit(link).port == master.port
    browser = browse()
    assert browser.get("/session").json() == {
        "user": None, "owner": None, "has_password": False, "scope": None, "is_shared": False,
        "oidc": None,
    }  # fmt: skip
    reply = browser.get(link)
    assert (reply.status_code, reply.headers["location"]) == (303, "/")
    cookie = reply.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert browser.get("/session").json()["user"] == "admin"
    assert browser.get("/experiments").status_code == 200
    other = browse()
    again = other.get(link)
    assert (again.status_code, again.json()["code"]) == (401, "link_used")
    page = other.get(link, headers={"accept": "text/html"})
    assert (page.status_code, page.headers["location"]) == (303, "/sign-in?problem=link")
    assert other.get("/experiments").status_code == 401


def test_signing_out_ends_this_sign_in_only(
    master: Any, browse: Callable[[], httpx2.Client]
) -> None:
    first, second = browse(), browse()
    sign_in(master, first)
    sign_in(master, second)
    kept = dict(first.cookies)
    assert first.post("/logout").status_code == 204
    assert dict(first.cookies) == {}
    assert first.get("/slots", headers={"cookie": cookie_of(kept)}).status_code == 401
    assert second.get("/slots").status_code == 200


def cookie_of(cookies: dict[str, str]) -> str:
    return "; ".join(f"{name}={value}" for name, value in cookies.items())


def test_a_password_signs_in_and_setting_it_signs_out(
    master: Any, browse: Callable[[], httpx2.Client]
) -> None:
    browser = browse()
    sign_in(master, browser)
    body = {"password": PASSWORD}
    refused = browser.put("/users/admin/password", json=body)
    assert (refused.status_code, refused.json()["code"]) == (403, "token_needed")
    assert master.http.put("/users/nobody/password", json=body).status_code == 404
    assert master.http.put("/users/admin/password", json={"password": "1234"}).status_code == 422
    assert master.http.put("/users/admin/password", json=body).status_code == 204
    assert browser.get("/session").json() == {
        "user": None, "owner": None, "has_password": True, "scope": None, "is_shared": False,
        "oidc": None,
    }  # fmt: skip
    wrong = browser.post("/login", json={"password": "correct house"})
    assert (wrong.status_code, wrong.json()["code"]) == (401, "wrong_password")
    assert browser.post("/login", json={"user": "root", **body}).status_code == 401
    assert browser.get("/slots").status_code == 401
    assert browser.post("/login", json=body).json() == {
        "user": "admin", "owner": "admin", "has_password": True, "scope": "admin",
        "is_shared": False, "oidc": None,
    }  # fmt: skip
    assert browser.get("/slots").status_code == 200


def test_many_wrong_passwords_are_refused_unchecked(
    master: Any, browse: Callable[[], httpx2.Client]
) -> None:
    browser = browse()
    codes = [browser.post("/login", json={"password": "x"}).json()["code"] for _ in range(11)]
    assert codes == ["wrong_password"] * 10 + ["too_many_attempts"]


def guess(master: Any, sender: int | None = None, **body: Any) -> str:
    """Send a password over a connection of its own, as a Unix user, and return the code."""
    with socket.socket() as end:
        if sender is not None:
            os.fchown(end.fileno(), sender, -1)
        end.connect(("127.0.0.1", master.port))
        content = json.dumps({"password": "wrong"} | body).encode()
        end.sendall(
            b"POST /api/v1/login HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 10.0.0.9\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content
        )
        reply = HTTPResponse(end)
        reply.begin()
        return str(json.loads(reply.read()).get("code", "signed in"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's connection")
def test_guesses_of_one_user_of_the_machine_keep_no_other_one_out(master: Any) -> None:
    stranger, other = 12345, 12346
    for _ in range(10):
        assert guess(master, stranger) == "wrong_password"
    assert guess(master, stranger) == "too_many_attempts"
    master.http.put("/users/admin/password", json={"password": PASSWORD})
    # Also not with the right one, and not by a header; another name has tries of its own.
    assert guess(master, stranger, password=PASSWORD) == "too_many_attempts"
    assert guess(master, stranger, user="root") == "wrong_password"
    assert guess(master, other, password=PASSWORD) == "signed in"
    assert guess(master, password=PASSWORD) == "signed in"


@pytest.mark.parametrize(
    ("peer", "sender"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (("::ffff:192.0.2.7", 1), "192.0.2.7"),
        (("fe80::1%eth0", 1), "fe80::/64"),
        (("127.0.0.1", 1), "127.0.0.1"),
        (None, ""),
    ],
)
def test_a_sender_is_named_by_its_address(peer: tuple[str, int] | None, sender: str) -> None:
    assert sender_at(peer, ("192.0.2.1", 8080)) == sender


def test_a_throttle_forgets_after_its_window_and_keeps_to_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("paceline._cluster.master.authentication.time", clock)
    throttle = Throttle(2, window_s=60.0)
    throttle.fail("a")
    throttle.fail("a")
    assert not throttle.allows("a")
    assert throttle.allows("b")
    now += 59.0
    assert not throttle.allows("a")
    now += 2.0
    assert throttle.allows("a")
    for number in range(10_050):
        throttle.fail(number)
    assert len(throttle) == 10_000


def test_wrong_tokens_are_throttled_and_right_ones_are_not(
    master: Any, browse: Callable[[], httpx2.Client]
) -> None:
    browser = browse()

    def code() -> str:
        reply = browser.get("/slots", headers={"authorization": "Bearer wrong"})
        return str(reply.json()["code"])

    assert {code() for _ in range(300)} == {"unauthorized"}
    assert code() == "too_many_attempts"
    assert master.http.get("/slots").status_code == 200
    assert browser.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("site", "status"),
    [("same-origin", 200), ("none", 200), ("same-site", 401), ("cross-site", 401)],
)
def test_a_cookie_opens_nothing_to_pages_of_other_origins(
    master: Any, browse: Callable[[], httpx2.Client], site: str, status: int
) -> None:
    browser = browse()
    sign_in(master, browser)
    assert browser.get("/slots", headers={"sec-fetch-site": site}).status_code == status
    evil = browser.post("/logout", headers={"origin": "http://127.0.0.1:1"})
    assert evil.json()["code"] == "wrong_origin"


@pytest.mark.parametrize(
    "cookie", ["", "=", "{name}=", "{name}=wrong", "{name}=\xe4", "a=b;;;{name}"]
)
def test_a_cookie_made_elsewhere_opens_nothing(
    master: Any, browse: Callable[[], httpx2.Client], cookie: str
) -> None:
    name = f"paceline_{master.home.cluster_id[:8]}"
    sent = cookie.format(name=name).encode("latin-1")
    assert browse().get("/slots", headers=[(b"cookie", sent)]).status_code == 401


@pytest.mark.parametrize(
    "other",
    [
        b'prefs={"theme":"dark"}',
        b"x=a b",
        "n=caf\u00e9".encode(),
        b"n=caf\xe9",
        b'open="a',
        b"=; ;;novalue",
        b"$Version=1; a[b]=c,d",
        b"a=%s" % (b'"' + rb"\"" * 20_000),
    ],
)
def test_cookies_of_other_programs_sign_nobody_out(
    master: Any, browse: Callable[[], httpx2.Client], other: bytes
) -> None:
    browser = browse()
    sign_in(master, browser)
    own = cookie_of(dict(browser.cookies)).encode()
    browser.cookies.clear()
    for sent in (other + b"; " + own, own + b"; " + other, other + b";" + own + b"; z=1"):
        assert browser.get("/slots", headers=[(b"cookie", sent)]).status_code == 200


def test_a_sign_in_outlives_the_master(
    make_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    first = make_master(name="kept")
    browser = browse()
    sign_in(first, browser)
    cookie = cookie_of(dict(browser.cookies))
    first.server._stop()
    first._thread.join()
    second = make_master(name="kept")
    reply = browse().get(f"{second.url}/slots", headers={"cookie": cookie})
    assert reply.status_code == 200
