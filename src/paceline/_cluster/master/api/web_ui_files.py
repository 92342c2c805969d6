"""Files of the web UI and of the documentation, with their security policies."""

import asyncio
import base64
import gzip
import hashlib
import mimetypes
import re
from functools import lru_cache
from pathlib import Path

from fastapi import Response
from fastapi.responses import RedirectResponse
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from paceline._cluster.master.api.requests_and_answers import problem

ASSETS_PATH = Path(__file__).resolve().parents[1] / "webui"
DOCUMENTATION_PATH = Path(__file__).resolve().parents[1] / "docs"
_HASHED_FOLDER = "assets/"
# Names that the build of the documentation gives to files by their content.
_HASHED_NAME = re.compile(r"assets/.*\.[0-9a-f]{8}\.min\.(?:js|css)")
_DOCUMENTATION = "docs"
_LONGEST_NAME = 200
_SMALLEST_TO_COMPRESS = 1024
_COMPRESSED_TYPES = ("text/", "application/javascript", "application/json", "image/svg+xml")
_MISSING_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Paceline</title>
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"></head>
<body style="font-family: system-ui; max-width: 40rem; margin: 4rem auto; padding: 0 1rem">
<h1>There is no {name}</h1>
<p>It was not built when Paceline was installed. Build it in Paceline's source directory, install
again unless the installation is editable, and load this page again:</p>
<pre>make {target}
pip install --force-reinstall --no-deps .</pre>
<p>The command line and the REST API work without it.</p>
</body></html>
"""
_POLICY = "Content-Security-Policy"
_MISSING_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
# Policy for files other than pages: a worker takes its policy from its script's response.
_FILE_POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'"


# Page that draws figures of runs, which are strangers'.
_FRAME_NAME = "figure.html"


def has_web_ui(root: Path = ASSETS_PATH) -> bool:
    """Return whether the web UI is built."""
    return (root / "index.html").is_file()


class WebUi:
    """ASGI application: files below `root`, else the UI's page with client-side routing.

    Below `/docs/` are the files of the documentation. Only files of a build are served, so no
    request here needs a sign-in.
    """

    def __init__(self, root: Path = ASSETS_PATH, documentation: Path = DOCUMENTATION_PATH) -> None:
        self._root = root
        self._documentation = documentation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with a file or the UI's page."""
        if scope["method"] not in ("GET", "HEAD"):
            reply = problem(405, "method_not_allowed", "The web UI answers GET and HEAD only.")
        else:
            reply = await asyncio.to_thread(self._answer, scope["path"], Headers(scope=scope))
        await reply(scope, receive, send)

    def _answer(self, path: str, headers: Headers) -> Response:
        name = path.lstrip("/")
        folder, slash, page_name = name.partition("/")
        if folder == _DOCUMENTATION:
            # Links of its pages are relative to the folder.
            return self._answer_docs(page_name, headers) if slash else RedirectResponse("/docs/")
        file = _file(self._root, name)
        if file is not None:
            return _file_response(file, headers, is_hashed=name.startswith(_HASHED_FOLDER))
        accepts_page = "text/html" in headers.get("accept", "")
        if name and (not accepts_page or name.startswith(_HASHED_FOLDER)):
            return _no_file(path)
        page = _file(self._root, "index.html")
        return _missing("web UI", "ui") if page is None else _file_response(page, headers)

    def _answer_docs(self, name: str, headers: Headers) -> Response:
        file = _file(self._documentation, name if name.rpartition("/")[2] else f"{name}index.html")
        if file is not None:
            is_hashed = _HASHED_NAME.fullmatch(name) is not None
            return _file_response(file, headers, is_hashed=is_hashed)
        if _file(self._documentation, "index.html") is None:
            return _missing("documentation", "docs")
        return _no_file(f"/{_DOCUMENTATION}/{name}")


def _file(root: Path, name: str) -> Path | None:
    # No file of a build has such a name, and the system would refuse to look for some.
    if not name or "\0" in name or len(name) > _LONGEST_NAME:
        return None
    path = (root / name).resolve()
    return path if path.is_relative_to(root) and path.is_file() else None


def _no_file(path: str) -> Response:
    return problem(404, "not_found", f"There is no file {path[:_LONGEST_NAME]!r}.")


def _missing(name: str, target: str) -> Response:
    page = _MISSING_PAGE.format(name=name, target=target)
    return Response(page, 503, {_POLICY: _MISSING_POLICY}, media_type="text/html")


def _file_response(path: Path, headers: Headers, *, is_hashed: bool = False) -> Response:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    body, packed, etag = _load_web_file(path, path.stat().st_mtime_ns)
    sent = {"ETag": etag, "Vary": "Accept-Encoding", _POLICY: _FILE_POLICY}
    # The names of hashed files change with their content; all else is asked for every time.
    sent["Cache-Control"] = "public, max-age=31536000, immutable" if is_hashed else "no-cache"
    if path.name == _FRAME_NAME:
        # Older browsers know no `frame-ancestors`.
        sent |= {_POLICY: _frame_policy(body), "X-Frame-Options": "SAMEORIGIN"}
    elif path.suffix == ".html":
        sent[_POLICY] = _content_security_policy(body)
    if headers.get("if-none-match") == etag:
        return Response(None, 304, sent)
    if len(packed) < len(body) and "gzip" in headers.get("accept-encoding", ""):
        sent["Content-Encoding"] = "gzip"
        body = packed
    return Response(body, 200, sent, media_type=kind)


@lru_cache(maxsize=256)
def _load_web_file(path: Path, _modified: int) -> tuple[bytes, bytes, str]:
    """Return a file's content, plain and compressed, and its tag."""
    body = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or ""
    is_worth_it = kind.startswith(_COMPRESSED_TYPES) and len(body) >= _SMALLEST_TO_COMPRESS
    packed = gzip.compress(body, mtime=0) if is_worth_it else body
    return body, packed, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _content_security_policy(page: bytes) -> str:
    """Return the page's content security policy: this origin only, and the page's own scripts."""
    return (
        f"default-src 'self'; script-src 'self' {_hashes(page)}; style-src 'self' 'unsafe-inline';"
        " img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:;"
        " object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def _frame_policy(page: bytes) -> str:
    """Return the policy of a page for strangers' content: no origin, and nothing to load from."""
    return (
        f"sandbox allow-scripts; default-src 'none'; script-src {_hashes(page)} blob:;"
        " style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'self'"
    )


def _hashes(page: bytes) -> str:
    """Return the hashes of a page's own scripts as a policy names them."""
    inline = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in inline]
    return " ".join(f"'sha256-{found}'" for found in hashes)
