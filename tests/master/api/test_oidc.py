"""Sign-in by OpenID Connect with a certified provider: who gets in, as whom, and how often."""

import hashlib
import re
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx2
import pytest
import yaml

from paceline._cluster.master.oidc_provider import read_oidc_file

SECRET = "a secret: 100 %+"
CALLBACK = "/api/v1/oidc/callback"


@pytest.fixture
def make_oidc_master(
    tmp_path: Path, make_master: Callable[..., Any], oidc_issuer: str
) -> Callable[..., Any]:
    """Return a function that serves a master with settings of sign-in."""

    def make(**changed: Any) -> Any:
        home = tmp_path / "home"
        home.mkdir()
        settings = {"issuer": oidc_issuer, "client_id": "paceline", "client_secret": SECRET}
        path = home / "oidc.yaml"
        path.write_text(yaml.safe_dump(settings | {"name": "The lab"} | changed, sort_keys=False))
        path.chmod(0o600)
        return make_master()

    return make


@pytest.fixture
def browse() -> Iterator[Callable[[], httpx2.Client]]:
    """Return a function that opens a browser: a client with cookies and without the token."""
    opened: list[httpx2.Client] = []

    def browse() -> httpx2.Client:
        opened.append(httpx2.Client(timeout=60, verify=False))
        return opened[-1]

    yield browse
    for client in opened:
        client.close()


def begin(master: Any, browser: httpx2.Client, **query: str) -> str:
    """Begin to sign in, and return the provider's address."""
    reply = browser.get(f"{master.url}/oidc/sign-in", params=query)
    assert reply.status_code == 303, reply.text
    return str(reply.headers["location"])


def at_provider(browser: httpx2.Client, url: str, person: str) -> str:
    """Sign in at the provider, agree, and return the address to which it sends the browser."""
    while urlsplit(url).path.endswith(CALLBACK) is False:
        reply = browser.get(url)
        if reply.status_code == 200:
            form = re.search(r'<form [^>]*action="([^"]+)"', reply.text)
            assert form is not None, reply.text
            fields = re.findall(r'name="(prompt)" value="(\w+)"', reply.text)
            reply = browser.post(form[1], data=dict(fields) | {"login": person, "password": "any"})
        assert reply.status_code in (302, 303), reply.text
        url = urljoin(url, reply.headers["location"])
    return url


def sign_in(master: Any, browser: httpx2.Client, person: str, **query: str) -> httpx2.Response:
    """Sign in, and return the master's answer."""
    return browser.get(at_provider(browser, begin(master, browser, **query), person))


def user_of(master: Any, browser: httpx2.Client) -> str | None:
    return browser.get(f"{master.url}/session").json()["owner"]


def code_of(reply: httpx2.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["code"]


def test_a_known_user_signs_in_and_comes_to_the_wanted_page(
    make_oidc_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    master = make_oidc_master()
    assert master.http.post("/users", json={"name": "ann"}).json()["oidc"] == "awaited"
    for rights in ({"is_admin": True}, {"is_service": True}):
        added = master.http.post("/users", json={"name": "other", **rights})
        assert added.json()["oidc"] is None
        assert master.http.delete("/users/other").status_code == 204
    browser = browse()
    assert browser.get(f"{master.url}/session").json()["oidc"] == "The lab"
    reply = sign_in(master, browser, "1+ann", next="/experiments?q=a%20b&sort=id")
    assert reply.status_code == 303, reply.text
    wanted = f"http://127.0.0.1:{master.port}/experiments?q=a%20b&sort=id"
    assert reply.headers["location"] == wanted
    cookies = [one.lower() for one in reply.headers.get_list("set-cookie")]
    [session] = [one for one in cookies if "_oidc_" not in one]
    assert "httponly" in session
    assert "samesite=strict" in session
    assert user_of(master, browser) == "ann"
    assert browser.get(f"{master.url}/experiments").status_code == 200
    assert browser.get(f"{master.url}/audit").status_code == 403
    entry = master.http.get("/audit").json()[0]
    assert (entry["user"], entry["objects"]) == ("ann", ["link of user ann"])
    users = {one["name"]: one["oidc"] for one in master.http.get("/users").json()}
    assert users == {"admin": None, "ann": "linked", "other": None}
    # The cookies of a sign-in that is over are gone.
    assert [one for one in browser.cookies if "_oidc_" in one] == []


def test_strangers_and_names_of_others_stay_out(
    make_oidc_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    """A name at the provider never opens an account that an administrator did not mean."""
    master = make_oidc_master()
    for name in ("ann", "bob", "eve"):
        master.http.post("/users", json={"name": name})
    assert code_of(sign_in(master, browse(), "9+nobody")) == (403, "oidc_unknown")
    # The first administrator has no password, and yet is not whoever is called so elsewhere.
    assert code_of(sign_in(master, browse(), "9+admin")) == (403, "oidc_name_taken")
    master.http.put("/users/bob/password", json={"password": "correct horse"})
    assert code_of(sign_in(master, browse(), "9+bob")) == (403, "oidc_name_taken")
    assert sign_in(master, browse(), "1+ann").status_code == 303
    # Another person got the name, in other capitals; and the person got another name.
    taken = sign_in(master, browse(), "2+Ann")
    assert code_of(taken) == (403, "oidc_name_taken")
    assert "paceline user link ann 2+Ann" in taken.json()["detail"]
    renamed = browse()
    assert sign_in(master, renamed, "1+ann").status_code == 303
    entry = master.http.get("/audit", params={"user": "(sign-in)"}).json()[0]
    assert entry["action"] == "refused: oidc_name_taken"
    assert entry["objects"] == ["user Ann", "subject 2+Ann"]
    page = browse()
    page.headers["accept"] = "text/html"
    shown = sign_in(master, page, "9+admin")
    assert urlsplit(shown.headers["location"]).query == "problem=oidc_name_taken"
    assert user_of(master, page) is None


def test_a_person_stays_the_user_under_another_name(
    make_oidc_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    master = make_oidc_master()
    for name in ("ann", "sam"):
        master.http.post("/users", json={"name": name})
    change = {"oidc_subject": "1+other"}
    assert master.http.patch("/users/ann", json=change).status_code == 204
    assert code_of(master.http.patch("/users/sam", json=change)) == (409, "subject_taken")
    browser = browse()
    assert sign_in(master, browser, "1+other").status_code == 303
    assert user_of(master, browser) == "ann"
    # Without the link, sign-ins by it end, too.
    assert master.http.patch("/users/ann", json={"oidc_subject": ""}).status_code == 204
    assert user_of(master, browser) is None
    assert code_of(sign_in(master, browse(), "1+other")) == (403, "oidc_unknown")
    assert code_of(sign_in(master, browse(), "1+ann")) == (403, "oidc_name_taken")
    # An administrator who has a password is linked by one command.
    master.http.put("/users/admin/password", json={"password": "correct horse"})
    assert master.http.patch("/users/admin", json={"oidc_subject": "*"}).status_code == 204
    browser = browse()
    assert sign_in(master, browser, "5+admin").status_code == 303
    assert browser.get(f"{master.url}/audit").status_code == 200


def test_people_are_added_with_role_group_and_rights_that_follow_the_provider(
    make_oidc_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    master = make_oidc_master(
        create=True, role="viewer", project="vision", name_claim="email", domains=["EXAMPLE.org"],
        groups={"claim": "groups", "names": {"cv": "vision-lab", "all": "everybody"}},
        admins={"claim": "groups", "value": "root"}, session_hours=2,
    )  # fmt: skip
    early = sign_in(master, browse(), "1+ann+all+cv")
    assert code_of(early) == (403, "oidc_unknown")
    assert "no project 'vision'" in early.json()["detail"]
    assert [one["name"] for one in master.http.get("/users").json()] == ["admin"]
    master.http.post("/projects", json={"name": "vision"})
    browser = browse()
    reply = sign_in(master, browser, "1+ann+all+cv")
    session = next(one for one in reply.headers.get_list("set-cookie") if "_oidc_" not in one)
    assert "max-age=7200" in session.lower()
    members = master.http.get("/projects/vision/members").json()
    assert members == [{"user": "ann", "role": "viewer"}]
    ann = master.http.get("/users").json()[1]
    assert (ann["group"], ann["is_admin"]) == ("vision-lab", False)
    assert master.http.patch("/users/ann", json={"oidc_subject": "2+ann+root"}).status_code == 204
    assert user_of(master, browser) is None
    assert sign_in(master, browser := browse(), "2+ann+root").status_code == 303
    ann = master.http.get("/users").json()[1]
    assert (ann["group"], ann["is_admin"]) == (None, True)
    assert browser.get(f"{master.url}/audit").status_code == 200
    # From the next request on.
    master.http.patch("/users/ann", json={"is_admin": False})
    assert browser.get(f"{master.url}/audit").status_code == 403
    master.http.put("/projects/vision/members/ann", json={"role": None})
    assert browser.get(f"{master.url}/projects").json() == []


def test_the_last_administrator_keeps_the_right(
    make_oidc_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    master = make_oidc_master(admins={"claim": "groups", "value": "root"})
    master.http.patch("/users/admin", json={"oidc_subject": "1+admin+none"})
    browser = browse()
    assert sign_in(master, browser, "1+admin+none").status_code == 303
    assert browser.get(f"{master.url}/audit").status_code == 200


@pytest.mark.parametrize("create", [False, True])
def test_a_removed_user_does_not_come_back(
    create: bool, make_oidc_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    master = make_oidc_master(create=create)
    for name in ("ann", "bob"):
        master.http.post("/users", json={"name": name})
    browser = browse()
    assert sign_in(master, browser, "1+ann").status_code == 303
    made = browser.post(f"{master.url}/experiments", json={"config": {
        "name": "runs", "entrypoint": "true", "searcher": {"name": "single", "metric": "loss"},
    }})  # fmt: skip
    master.schedule()
    assert made.status_code == 201, made.text
    for name in ("ann", "bob"):
        assert master.http.delete(f"/users/{name}").status_code == 204
    assert browser.get(f"{master.url}/experiments").status_code == 401
    assert code_of(sign_in(master, browser, "1+ann")) == (403, "oidc_removed")
    # One who never signed in, and another person of the name.
    assert code_of(sign_in(master, browse(), "2+bob")) == (403, "oidc_removed")
    assert code_of(sign_in(master, browse(), "3+ann")) == (403, "oidc_name_taken")
    assert user_of(master, browser) is None
    # One that was on its way while the user was removed.
    late = master.core.sign_ins.open("ann")
    trial = master.http.get("/trials/1").json()
    assert (trial["state"], trial["experiment_id"]) == ("ACTIVE", made.json()["id"])
    # An administrator brings her back: the same person, without the old sign-in.
    assert master.http.post("/users", json={"name": "ann"}).json()["name"] == "ann"
    assert master.core.sign_ins.user_of(late) is None
    assert user_of(master, browser) is None
    assert code_of(sign_in(master, browse(), "3+ann")) == (403, "oidc_name_taken")
    assert sign_in(master, browser, "1+ann").status_code == 303


def test_an_answer_counts_once_and_in_the_browser_that_began(
    make_oidc_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    master = make_oidc_master(create=True)
    browser, victim = browse(), browse()
    url = at_provider(browser, begin(master, browser), "1+ann")
    cookies = {one.name: one.value or "" for one in browser.cookies.jar}
    # A page makes another browser sign in as the attacker: without cookie, and with its own one.
    assert code_of(victim.get(url)) == (401, "oidc_expired")
    begin(master, victim)
    assert code_of(victim.get(url)) == (401, "oidc_expired")
    assert user_of(master, victim) is None
    # A cookie that was changed, or sent for another state.
    [name] = [one for one in cookies if "_oidc_" in one]
    for changed in (cookies[name][:-1] + "x", "x" + cookies[name], "", ".", "é.é"):
        header = {"cookie": f"{name}={changed}".encode()}
        assert code_of(httpx2.get(url, headers=header)) == (401, "oidc_expired")
    state = parse_qs(urlsplit(url).query)["state"][0]
    swapped = {"cookie": f"{name}={cookies[name]}"}
    foreign = state[:-4] + "AAAA"
    # The name of a cookie follows the state.
    own, its = (hashlib.sha256(one.encode()).hexdigest()[:12] for one in (state, foreign))
    renamed = {"cookie": f"{name.replace(own, its)}={cookies[name]}"}
    other = url.replace(state, foreign)
    for header in (swapped, renamed):
        assert code_of(httpx2.get(other, headers=header)) == (401, "oidc_expired")
    assert browser.get(url).status_code == 303
    again = httpx2.get(url, headers=swapped)
    assert code_of(again) == (401, "oidc_expired")
    # The provider takes a code once, also in another flow.
    code = parse_qs(urlsplit(url).query)["code"][0]
    fresh = browse()
    new = parse_qs(urlsplit(begin(master, fresh)).query)["state"][0]
    callback = f"{master.url}/oidc/callback"
    assert code_of(fresh.get(callback, params={"state": new, "code": code})) == (
        403,
        "oidc_refused",
    )


def test_a_sign_in_ends_within_ten_minutes(
    make_oidc_master: Callable[..., Any],
    browse: Callable[[], httpx2.Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master = make_oidc_master(create=True)
    browser = browse()
    url = at_provider(browser, begin(master, browser), "1+ann")
    [(name, value)] = [(c.name, c.value) for c in browser.cookies.jar if "_oidc_" in c.name]
    now = time.time
    # The browser's clock would make it forget the cookie.
    headers = {"cookie": f"{name}={value}"}
    for shift in (601, -601):
        monkeypatch.setattr(time, "time", lambda shift=shift: now() + shift)
        assert code_of(httpx2.get(url, headers=headers)) == (401, "oidc_expired")
    monkeypatch.setattr(time, "time", now)
    assert httpx2.get(url, headers=headers).status_code == 303


def test_two_tabs_sign_in_at_once_and_many_that_never_end_take_no_memory(
    make_oidc_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    master = make_oidc_master(create=True)
    browser = browse()
    tabs = [begin(master, browser, next=f"/experiments/{number}") for number in (1, 2)]
    ends = [at_provider(browser, tab, "1+ann") for tab in tabs]
    pages = [browser.get(end).headers["location"] for end in reversed(ends)]
    assert [page[-2:] for page in pages] == ["/2", "/1"]
    assert user_of(master, browser) == "ann"
    provider = master.core.oidc
    kept = len(provider._used), len(provider.codes._expiry)
    for _ in range(100):
        begin(master, browser)
    assert (len(provider._used), len(provider.codes._expiry)) == kept == (2, 0)
    # Nor do their cookies pile up.
    assert len([one for one in browser.cookies.jar if "_oidc_" in one.name]) <= 8
    assert user_of(master, browser) == "ann"
    assert sign_in(master, browser, "1+ann").status_code == 303


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ("/trials/7?tab=logs", "/trials/7?tab=logs"),
        ("/a%2F%2Fb", "/a%2F%2Fb"),
        *((one, "/") for one in ("//evil.example", "/\\evil.example", "https://evil.example")),
        *((one, "/") for one in ("/\t/evil.example", "evil.example", "javascript:alert(1)", "")),
        *((one, "/") for one in ("/x\r\nset-cookie: a=b", "/\u00e9", "/" + "x" * 2000)),
    ],
)
def test_one_comes_to_no_other_host(
    wanted: str,
    path: str,
    make_oidc_master: Callable[..., Any],
    browse: Callable[[], httpx2.Client],
) -> None:
    master = make_oidc_master(create=True)
    browser = browse()
    reply = browser.get(f"{master.url}/oidc/sign-in", params={"next": wanted})
    if len(wanted) > 2000:
        assert reply.status_code == 422
        return
    answer = browser.get(at_provider(browser, reply.headers["location"], "1+ann"))
    assert answer.headers["location"] == f"http://127.0.0.1:{master.port}{path}"


def test_the_command_line_gets_a_token_by_a_code(
    make_oidc_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    master = make_oidc_master(create=True)
    verifier = "v" * 43
    digest = hashlib.sha256(verifier.encode()).digest()
    challenge = urlsafe_b64encode(digest).decode().rstrip("=")
    assert browse().get(f"{master.url}/oidc/sign-in?challenge=short").status_code == 422

    def shown() -> str:
        browser = browse()
        reply = sign_in(master, browser, "1+ann", challenge=challenge)
        # No browser is signed in by a link that somebody else may have sent.
        assert user_of(master, browser) is None
        text = reply.headers.get("location") or reply.text.strip()
        return re.split(r"[=\s]", text)[-1]

    def redeem(code: str, verifier: str) -> httpx2.Response:
        body = {"code": code, "verifier": verifier, "name": "of-ann"}
        return browse().post(f"{master.url}/oidc/token", json=body)

    code = shown()
    assert code_of(redeem(code, "w" * 43)) == (401, "code_used")
    assert code_of(redeem(code, verifier)) == (401, "code_used")
    assert browse().get(f"{master.url}/sign-in?token={shown()}").status_code == 401
    code = shown()
    made = redeem(code, verifier)
    assert (made.status_code, made.json()["user"], made.json()["scope"]) == (201, "ann", "admin")
    assert code_of(redeem(code, verifier)) == (401, "code_used")
    headers = {"authorization": f"Bearer {made.json()['secret']}"}
    session = httpx2.get(f"{master.url}/session", headers=headers).json()
    assert (session["owner"], session["scope"]) == ("ann", "user")
    code = shown()
    master.http.delete("/users/ann")
    assert code_of(redeem(code, verifier)) == (401, "code_used")


def test_behind_a_reverse_proxy_addresses_and_cookies_are_those_of_the_proxy(
    make_oidc_master: Callable[..., Any], browse: Callable[[], httpx2.Client]
) -> None:
    """This test is the proxy: it ends TLS, takes the path away, and keeps or changes the host."""
    url = "https://lab.example.org/lab/"
    master = make_oidc_master(create=True, url=url, client_id="behind-proxy", client_secret="other")
    # The provider has its cookies for itself: this one keeps them apart from the master's.
    browser, provider = browse(), browse()
    host = {"host": "lab.example.org"}
    begun = browser.get(f"{master.url}/oidc/sign-in?next=/users", headers=host)
    assert "secure" in begun.headers["set-cookie"].lower()
    end = at_provider(provider, begun.headers["location"], "1+ann")
    assert end.startswith(f"{url}api/v1/oidc/callback?")
    cookie = begun.headers["set-cookie"].partition(";")[0]
    way = f"{master.url}/oidc/callback?{urlsplit(end).query}"
    reply = browser.get(way, headers=host | {"cookie": cookie})
    assert (reply.status_code, reply.headers["location"]) == (303, f"{url}users")
    session = next(one for one in reply.headers.get_list("set-cookie") if "_oidc_" not in one)
    assert "secure" in session.lower()
    headers = {"cookie": session.partition(";")[0], "origin": "https://lab.example.org"}
    for sent in (host, {}):
        reply = browser.post(f"{master.url}/check-config", headers=headers | sent, json={})
        assert reply.status_code == 422
    evil = {"origin": "https://evil.example"}
    refused = browser.post(f"{master.url}/check-config", headers=headers | host | evil, json={})
    assert code_of(refused) == (403, "wrong_origin")
    wrong = browser.get(f"{master.url}/session", headers={"host": "evil.example"})
    assert code_of(wrong) == (403, "wrong_host")
    master.http.put("/users/ann/password", json={"password": "correct horse"})
    body = {"user": "ann", "password": "correct horse"}
    signed_in = browser.post(f"{master.url}/login", json=body, headers=headers | host)
    assert "secure" in signed_in.headers["set-cookie"].lower()


def test_a_master_without_a_provider_says_so(master: Any) -> None:
    for path in ("sign-in", "callback"):
        assert code_of(httpx2.get(f"{master.url}/oidc/{path}")) == (404, "no_oidc")
    body = {"code": "x", "verifier": "v" * 43, "name": "x"}
    assert code_of(httpx2.post(f"{master.url}/oidc/token", json=body)) == (404, "no_oidc")
    assert master.http.get("/session").json()["oidc"] is None
    assert master.http.post("/users", json={"name": "ann"}).json()["oidc"] is None
    refused = master.http.patch("/users/ann", json={"oidc_subject": "1"})
    assert code_of(refused) == (409, "no_oidc")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"issuer": "http://id.example.org"}, "issuer: .*must be an https:// address"),
        ({"issuer": "https://user:word@id.example.org"}, "issuer: .*must be an https:// address"),
        ({"issuer": "https://id.example.org:x"}, "issuer: .*must be an https:// address"),
        ({"url": "ftp://x"}, "url: .*must be an https:// address"),
        ({"scopes": "profile"}, "scopes: "),
        ({"client_secret": 12}, "client_secret: "),
        ({"role": "owner"}, "role: "),
        ({"groups": {"claim": "groups", "names": {"a": "@b"}}}, "groups.names.a: "),
        ({"surprise": 1}, "surprise: "),
    ],
)
def test_settings_that_do_not_hold_are_refused_without_their_values(
    changed: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "oidc.yaml"
    settings = {"issuer": "https://id.example.org", "client_id": "x", "client_secret": SECRET}
    path.write_text(yaml.safe_dump(settings | changed))
    path.chmod(0o640)
    with pytest.raises(ValueError, match="has mode 0640"):
        read_oidc_file(path)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=told) as raised:
        read_oidc_file(path)
    assert SECRET not in str(raised.value)
    path.write_text(yaml.safe_dump(settings))
    found = read_oidc_file(path)
    assert found is not None
    assert SECRET not in repr(found)
    assert read_oidc_file(tmp_path / "other") is None
