"""The web UI's files, served without a sign-in."""

import asyncio
import gzip
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paceline._cluster.master.api.web_ui_files import WebUi

PAGE = b"<!doctype html><script>let a=1</script><script src=/assets/app-1a.js></script>"
SCRIPT = b"console.log('paceline');" * 100


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """Return a directory with what a build makes, and a secret beside it."""
    root = tmp_path / "webui"
    (root / "assets").mkdir(parents=True)
    (root / "index.html").write_bytes(PAGE)
    (root / "assets" / "app-1a.js").write_bytes(SCRIPT)
    (root / "favicon.svg").write_bytes(b"<svg/>")
    (tmp_path / "token").write_text("secret")
    docs = tmp_path / "docs"
    (docs / "assets").mkdir(parents=True)
    (docs / "start").mkdir()
    (docs / "index.html").write_bytes(PAGE)
    (docs / "start" / "index.html").write_bytes(PAGE + b"start")
    (docs / "train.html").write_bytes(PAGE + b"train")
    (docs / "search.json").write_text('{"items": []}')
    (docs / "assets" / "bundle.77dd0ce9.min.js").write_bytes(SCRIPT)
    return root


def get(root: Path, path: str, method: str = "GET", **headers: str) -> httpx2.Response:
    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=WebUi(root, root.parent / "docs"))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


def test_a_hashed_file_is_kept_for_ever_and_the_page_is_asked_for_every_time(built: Path) -> None:
    script = get(built, "/assets/app-1a.js", **{"accept-encoding": "identity"})
    assert script.content == SCRIPT
    assert script.headers["content-type"].partition(";")[0].endswith("javascript")
    assert "immutable" in script.headers["cache-control"]
    page = get(built, "/")
    assert page.content == PAGE
    assert page.headers["cache-control"] == "no-cache"
    again = get(built, "/", **{"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_text_is_sent_compressed(built: Path) -> None:
    reply = get(built, "/assets/app-1a.js", **{"accept-encoding": "gzip, br"})
    assert reply.headers["content-encoding"] == "gzip"
    assert reply.content == SCRIPT
    assert len(gzip.compress(SCRIPT)) < len(SCRIPT) / 10


def test_the_page_allows_its_own_scripts_only(built: Path) -> None:
    policy = get(built, "/").headers["content-security-policy"]
    assert "script-src 'self' 'sha256-" in policy
    assert policy.count("sha256") == 1
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("path", ["/experiments/7", "/experiments/7/code?file=model.py", "/apis"])
def test_a_route_of_the_ui_is_its_page(built: Path, path: str) -> None:
    reply = get(built, path, accept="text/html,*/*")
    assert (reply.status_code, reply.content) == (200, PAGE)


@pytest.mark.parametrize(
    ("path", "accept"),
    [
        ("/assets/app-2b.js", "*/*"),
        ("/assets/app-2b.js", "text/html"),
        ("/missing.svg", "image/*"),
        ("/../token", "*/*"),
        ("/..%2ftoken", "*/*"),
        ("/assets/%2e%2e/%2e%2e/token", "*/*"),
        ("/%00", "*/*"),
        # The system refuses to look for such names.
        ("/" + "a" * 5000, "*/*"),
        ("/assets/" + "a/" * 3000, "text/html"),
        ("/assets", "*/*"),
    ],
)
def test_a_file_that_was_not_built_is_not_there(built: Path, path: str, accept: str) -> None:
    reply = get(built, path, accept=accept)
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/", "/docs/", "/docs/train.html"])
def test_only_reading_is_allowed(built: Path, path: str) -> None:
    assert get(built, path, method="POST").status_code == 405


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/docs/", PAGE),
        ("/docs/index.html", PAGE),
        ("/docs/start/", PAGE + b"start"),
        ("/docs/train.html", PAGE + b"train"),
        ("/docs/search.json", b'{"items": []}'),
    ],
)
def test_a_page_of_the_documentation_is_asked_for_every_time(
    built: Path, path: str, content: bytes
) -> None:
    reply = get(built, path, accept="text/html")
    assert (reply.status_code, reply.content) == (200, content)
    assert reply.headers["cache-control"] == "no-cache"
    has_page = content.startswith(PAGE)
    assert reply.headers["content-security-policy"].count("'sha256-") == has_page
    asked = {"if-none-match": reply.headers["etag"]}
    assert get(built, path, **asked).status_code == 304
    head = get(built, path, method="HEAD")
    assert (head.status_code, head.headers["etag"]) == (200, reply.headers["etag"])


def test_a_hashed_file_of_the_documentation_is_kept_for_ever(built: Path) -> None:
    script = get(built, "/docs/assets/bundle.77dd0ce9.min.js")
    assert script.content == SCRIPT
    assert "immutable" in script.headers["cache-control"]


def test_the_documentation_has_a_folder_of_its_own(built: Path) -> None:
    reply = get(built, "/docs", accept="text/html")
    assert (reply.status_code, reply.headers["location"]) == (307, "/docs/")


@pytest.mark.parametrize(
    "path",
    [
        "/docs/none.html",
        "/docs/start",
        "/docs/none/",
        "/docs//index.html",
        "/docs/..%2ftoken",
        "/docs/%2e%2e/webui/index.html",
        "/docs/assets/%2e%2e/%2e%2e/token",
        "/docs/%00",
        "/docs/" + "a" * 5000,
    ],
)
def test_a_page_that_was_not_built_is_not_the_uis(built: Path, path: str) -> None:
    reply = get(built, path, accept="text/html")
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


def test_documentation_that_is_not_built_says_how(built: Path) -> None:
    shutil.rmtree(built.parent / "docs")
    reply = get(built, "/docs/train.html", accept="text/html")
    assert reply.status_code == 503
    assert "make docs" in reply.text
    assert get(built, "/").content == PAGE


def test_a_ui_that_is_not_built_says_how(tmp_path: Path) -> None:
    reply = get(tmp_path / "none", "/experiments", accept="text/html")
    assert reply.status_code == 503
    assert "make ui" in reply.text


def test_no_file_of_the_ui_needs_a_token_and_every_path_of_the_api_does(master: Any) -> None:
    base = f"http://127.0.0.1:{master.port}"
    with httpx2.Client(base_url=base, verify=False, timeout=60) as http:
        assert http.get("/", headers={"accept": "text/html"}).status_code in (200, 503)
        assert http.get("/docs/").status_code in (200, 503)
        for path in ("/", "/docs/"):
            assert http.get(path, headers={"host": "evil.example"}).status_code == 403
        for path in ("/api", "/api/", "/API/v1/experiments"):
            assert http.get(path, headers={"accept": "text/html"}).status_code == 401


@pytest.mark.long
def test_the_description_is_printed_without_a_master(tmp_path: Path) -> None:
    target = tmp_path / "openapi.json"
    command = [sys.executable, "-m", "paceline._cluster.master.openapi", str(target)]
    subprocess.run(command, check=True)
    assert '"/api/v1/experiments"' in target.read_text()
