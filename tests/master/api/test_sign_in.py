"""Signing in: by a link, by a password, and what a cookie opens."""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

PASSWORD = "correct horse"


@pytest.fixture
def browse(master: Any) -> Iterator[Callable[[], httpx.Client]]:
    """Return a function that opens a browser: a client with cookies and without the token."""
    opened: list[httpx.Client] = []

    def browse() -> httpx.Client:
        base = f"http://127.0.0.1:{master.port}/api/v1"
        opened.append(httpx.Client(base_url=base, timeout=60, verify=False))
        return opened[-1]

    yield browse
    for client in opened:
        client.close()


def sign_in(master: Any, browser: httpx.Client) -> httpx.Response:
    link = master.http.post("/sign-in-links").json()["url"]
    return browser.get(link)


def test_a_link_signs_in_once(master: Any, browse: Callable[[], httpx.Client]) -> None:
    link = master.http.post("/sign-in-links").json()["url"]
    assert urlsplit(link).port == master.port
    browser = browse()
    assert browser.get("/session").json() == {
        "user": None, "has_password": False, "scope": None,
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
    master: Any, browse: Callable[[], httpx.Client]
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
    master: Any, browse: Callable[[], httpx.Client]
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
        "user": None, "has_password": True, "scope": None,
    }  # fmt: skip
    wrong = browser.post("/login", json={"password": "correct house"})
    assert (wrong.status_code, wrong.json()["code"]) == (401, "wrong_password")
    assert browser.post("/login", json={"user": "root", **body}).status_code == 401
    assert browser.get("/slots").status_code == 401
    assert browser.post("/login", json=body).json() == {
        "user": "admin", "has_password": True, "scope": "admin",
    }  # fmt: skip
    assert browser.get("/slots").status_code == 200


def test_many_wrong_passwords_are_refused_unchecked(
    master: Any, browse: Callable[[], httpx.Client]
) -> None:
    browser = browse()
    codes = [browser.post("/login", json={"password": "x"}).json()["code"] for _ in range(11)]
    assert codes == ["wrong_password"] * 10 + ["too_many_attempts"]


@pytest.mark.parametrize(
    ("site", "status"),
    [("same-origin", 200), ("none", 200), ("same-site", 401), ("cross-site", 401)],
)
def test_a_cookie_opens_nothing_to_pages_of_other_origins(
    master: Any, browse: Callable[[], httpx.Client], site: str, status: int
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
    master: Any, browse: Callable[[], httpx.Client], cookie: str
) -> None:
    name = f"paceline_{master.home.cluster_id[:8]}"
    sent = cookie.format(name=name).encode("latin-1")
    assert browse().get("/slots", headers=[(b"cookie", sent)]).status_code == 401


def test_a_sign_in_outlives_the_master(
    make_master: Callable[..., Any], browse: Callable[[], httpx.Client]
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
