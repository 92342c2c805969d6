"""Sign-in by OpenID Connect with a provider that lies, is slow, or is away."""

import datetime
import hmac
import json
import ssl
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from joserfc import jwk, jwt

from paceline._cluster.master import oidc_provider

DAY = datetime.timedelta(days=1)
SECRET = "the secret of the client"
KEY = jwk.RSAKey.generate_key(2048, {"kid": "right"})
OTHER = jwk.RSAKey.generate_key(2048, {"kid": "right"})
CURVE = jwk.ECKey.generate_key("P-256")
BAD_TOKEN = (403, "oidc_untrusted")
AWAY = (503, "oidc_unavailable")


class LyingProvider(ThreadingHTTPServer):
    """A provider that answers what a test wants.

    Attributes:
        documents: What a path answers, in place of what is right: a status with a body, or bytes.
        changed: Claims of the ID token; None takes one away.
        sign: Makes the ID token of claims.
        asked: Requests, as path and body.
        delay_s: Pause after each byte of each answer.
    """

    daemon_threads = True

    def __init__(self, port: int = 0, certificate: Path | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.issuer = f"http://127.0.0.1:{self.server_address[1]}"
        if certificate is not None:
            self.issuer = f"https://localhost:{self.server_address[1]}"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        self.documents: dict[str, Any] = {}
        self.metadata: dict[str, Any] = {}
        self.changed: dict[str, Any] = {}
        self.keys: list[Any] = [KEY]
        self.sign: Callable[[dict[str, Any]], str] = signed_by(KEY)
        self.nonce = ""
        self.asked: list[tuple[str, str]] = []
        self.delay_s = 0.0
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def document(self, path: str) -> Any:
        """Return the right answer, with the claims that the test wants."""
        if path == "/.well-known/openid-configuration":
            names = {"authorization_endpoint": "auth", "token_endpoint": "token",
                     "jwks_uri": "keys", "userinfo_endpoint": "me"}  # fmt: skip
            found = {name: f"{self.issuer}/{end}" for name, end in names.items()}
            return {"issuer": self.issuer} | found | self.metadata
        if path == "/keys":
            return {"keys": [{"kty": "oct", "k": "AAAA"}, {"kty": "EC", "crv": "odd"}, 7,
                             *(key.as_dict(private=False) for key in self.keys)]}  # fmt: skip
        if path == "/me":
            return {"sub": "1", "preferred_username": "from-userinfo"}
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": "paceline", "sub": "1", "exp": now + 60, "iat": now,
                  "nonce": self.nonce, "preferred_username": "ann"} | self.changed  # fmt: skip
        kept = {name: value for name, value in claims.items() if value is not None}
        return {"id_token": self.sign(kept), "access_token": "access", "token_type": "Bearer"}

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        provider: Any = self.server
        length = int(self.headers.get("content-length", 0))
        provider.asked.append((self.path, self.rfile.read(length).decode()))
        status, body = provider.documents.get(self.path, (200, None))
        headers = {}
        if isinstance(body, dict):
            headers, body = body, b""
        content = json.dumps(provider.document(self.path)).encode() if body is None else body
        self.send_response(status)
        for name, value in (headers | {"content-length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            step = 1 if provider.delay_s else max(1, len(content))
            for start in range(0, len(content), step):
                self.wfile.write(content[start : start + step])
                time.sleep(provider.delay_s)
        except OSError:
            pass  # the master has heard enough

    do_POST = do_GET


def signed_by(key: Any, alg: str = "RS256", **header: Any) -> Callable[[dict[str, Any]], str]:
    return lambda claims: jwt.encode({"alg": alg, "kid": "right"} | header, claims, key, [alg])


def by_hand(header: dict[str, Any], secret: bytes | None) -> Callable[[dict[str, Any]], str]:
    """Return a function that makes tokens which the library under test refuses to make."""

    def word(content: bytes) -> bytes:
        return urlsafe_b64encode(content).rstrip(b"=")

    def sign(claims: dict[str, Any]) -> str:
        text = b".".join(word(json.dumps(one).encode()) for one in (header, claims))
        seal = b"" if secret is None else hmac.digest(secret, text, "sha256")
        return b".".join((text, word(seal))).decode()

    return sign


@pytest.fixture
def provider() -> Iterator[LyingProvider]:
    provider = LyingProvider()
    yield provider
    provider.close()


@pytest.fixture
def master(tmp_path: Path, make_master: Callable[..., Any], provider: LyingProvider) -> Any:
    """Return a master that adds whoever signs in."""
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "oidc.yaml"
    settings = {"issuer": provider.issuer, "client_id": "paceline", "client_secret": SECRET}
    path.write_text(yaml.safe_dump(settings | {"create": True}))
    path.chmod(0o600)
    return make_master()


def sign_in(master: Any, provider: LyingProvider, **answer: str) -> httpx2.Response:
    """Begin, and come back with a code without asking anybody."""
    with httpx2.Client(timeout=60, verify=False) as browser:
        begun = browser.get(f"{master.url}/oidc/sign-in")
        if begun.status_code != 303:
            return begun
        query = parse_qs(urlsplit(begun.headers["location"]).query)
        provider.nonce = query["nonce"][0]
        answer = {"state": query["state"][0], "code": "the code"} | answer
        return browser.get(f"{master.url}/oidc/callback", params=answer)


def code_of(reply: httpx2.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["code"]


def users(master: Any) -> list[str]:
    return [one["name"] for one in master.http.get("/users").json()]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"aud": ["paceline"]},
        {"aud": ["paceline", "other"], "azp": "paceline"},
        # Clocks differ by less than a minute.
        {"exp": -30},
        {"iat": +30},
        {"nbf": +30},
    ],
    ids=str,
)
def test_right_tokens_are_taken(changed: dict[str, Any], master: Any, provider: Any) -> None:
    now = int(time.time())
    provider.changed = {k: v + now if isinstance(v, int) else v for k, v in changed.items()}
    assert sign_in(master, provider).status_code == 303
    assert users(master) == ["admin", "ann"]


@pytest.mark.parametrize(
    "changed",
    [
        {"iss": "https://other.example"},
        {"iss": None},
        {"aud": "other"},
        {"aud": ["other"]},
        {"aud": "other", "azp": "paceline"},
        {"aud": None},
        {"aud": ["paceline", "other"], "azp": "other"},
        {"azp": "other"},
        {"nonce": "other"},
        {"nonce": None},
        {"exp": -70},
        {"exp": None},
        {"exp": "soon"},
        {"iat": +70},
        {"iat": None},
        {"nbf": +70},
        {"at_hash": "AAAA"},
        {"sub": None},
        {"sub": 7.5},
        {"sub": "*"},
        {"sub": ""},
        {"sub": "a b\n"},
        {"sub": "x" * 256},
    ],
    ids=str,
)
def test_tokens_that_do_not_hold_are_refused(
    changed: dict[str, Any], master: Any, provider: Any
) -> None:
    now = int(time.time())
    provider.changed = {k: v + now if isinstance(v, int) else v for k, v in changed.items()}
    assert code_of(sign_in(master, provider)) == BAD_TOKEN
    assert users(master) == ["admin"]


@pytest.mark.parametrize(
    "sign",
    [
        signed_by(OTHER),
        # Whoever knows the public key, or the secret of the client, signs nothing by it.
        by_hand({"alg": "HS256"}, KEY.as_pem(private=False)),
        by_hand({"alg": "HS256"}, SECRET.encode()),
        # A key that comes along, or is to be had elsewhere, is not the provider's.
        signed_by(OTHER, jwk=OTHER.as_dict(private=False)),
        signed_by(OTHER, jku="http://127.0.0.1:1/keys"),
        by_hand({"alg": "none"}, None),
        by_hand({"alg": "RS256"}, b"x"),
        lambda claims: signed_by(KEY)(claims)[:-4] + "AAAA",
        lambda _: "a.b",
        lambda _: "a.b.c.d.e",
        lambda _: "",
        lambda _: 7,
        lambda _: None,
        lambda _: "é.é.é",
    ],
)
def test_forged_tokens_are_refused(sign: Any, master: Any, provider: Any) -> None:
    provider.sign = sign
    assert code_of(sign_in(master, provider)) == BAD_TOKEN
    assert users(master) == ["admin"]


def test_a_new_key_of_the_provider_is_found(
    master: Any, provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sign_in(master, provider).status_code == 303
    provider.keys, provider.sign = [KEY, CURVE], signed_by(CURVE, "ES256", kid="new")
    # Keys are not read at each forged token.
    assert code_of(sign_in(master, provider)) == BAD_TOKEN
    monkeypatch.setattr(oidc_provider, "_KEYS_S", 0.0)
    assert sign_in(master, provider).status_code == 303
    assert [path for path, _ in provider.asked].count("/keys") == 2
    # One that the provider took back counts for an hour at most.
    provider.keys = [KEY]
    monkeypatch.setattr(oidc_provider, "_METADATA_S", 0.0)
    assert code_of(sign_in(master, provider)) == BAD_TOKEN


def test_missing_claims_come_from_the_endpoint_for_them(master: Any, provider: Any) -> None:
    provider.changed = {"preferred_username": None}
    assert sign_in(master, provider).status_code == 303
    assert users(master) == ["admin", "from-userinfo"]
    provider.documents["/me"] = (200, b'{"sub": "2", "preferred_username": "eve"}')
    assert code_of(sign_in(master, provider)) == BAD_TOKEN
    provider.documents["/me"] = (200, b'{"sub": "9", "preferred_username": "eve"}')
    provider.changed |= {"sub": "9"}
    assert sign_in(master, provider).status_code == 303
    for name in ("", "a b", "a/b", "..", "x" * 65, "eve@example.org", 7, "e\u0301ve", "@x"):
        provider.documents["/me"] = (200, b"{}")
        provider.changed = {"preferred_username": name, "sub": "10"}
        assert code_of(sign_in(master, provider)) == (403, "oidc_unknown")
    assert users(master) == ["admin", "eve", "from-userinfo"]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        *(
            (path, answer)
            for path in ("/.well-known/openid-configuration", "/token", "/keys")
            for answer in (
                (500, b"{}"),
                (200, b"[]"),
                (200, b"\xff\xfe"),
                (200, b"[" * 100_000),
                (200, b'{"x": "' + b"x" * 300_000 + b'"}'),
                (302, {"location": "http://169.254.169.254/latest"}),
                (200, {"content-encoding": "gzip"}),
            )
        )
    ],
    ids=lambda value: str(value)[:40],
)
def test_answers_that_are_none_say_so(path: str, answer: Any, master: Any, provider: Any) -> None:
    provider.documents[path] = answer
    reply = sign_in(master, provider)
    assert code_of(reply) == AWAY
    assert provider.issuer in reply.text or "sends" in reply.text or "answered" in reply.text
    assert users(master) == ["admin"]
    assert [one for one, _ in provider.asked if "latest" in one] == []
    # The keys are read with the first token.
    provider.documents.clear()
    assert sign_in(master, provider).status_code == 303


ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint")


@pytest.mark.parametrize("name", ENDPOINTS)
def test_a_document_does_not_have_the_master_ask_elsewhere(
    name: str, master: Any, provider: Any
) -> None:
    with LyingElsewhere() as elsewhere:
        for url in (
            f"{elsewhere.issuer}/token",
            "http://169.254.169.254/latest/meta-data",
            "https://169.254.169.254/latest/meta-data",
            "https://accounts.example.org/token",
            f"http://user@127.0.0.1:{provider.server_address[1]}/token",
            f"{provider.issuer}.evil.example/token",
            f"{provider.issuer}/to\nken",
            "file:///etc/passwd",
            "javascript:alert(1)",
            "//evil.example/token",
            "",
            7,
            ["x"],
        ):
            provider.metadata = {name: url}
            reply = sign_in(master, provider)
            assert code_of(reply) == AWAY, url
            assert "is not at the issuer's address" in reply.json()["detail"]
        assert elsewhere.asked == []
    assert [path for path, _ in provider.asked if "well-known" not in path] == []
    # Of a known host, nothing more than its name counts.
    found = oidc_provider.OidcSettings(
        issuer="https://accounts.example.org", client_id="x", hosts=["api.example.org"]
    )
    asked = oidc_provider.OidcProvider(found, b"key")
    asked._check_endpoint(name, "https://api.example.org/token")
    asked._check_endpoint(name, "https://ACCOUNTS.example.org/token")
    for url in ("http://api.example.org/token", "https://api.example.org:8443/token"):
        with pytest.raises(oidc_provider.OidcError, match="is not at the issuer's address"):
            asked._check_endpoint(name, url)


class LyingElsewhere(LyingProvider):
    """Another server of this machine, which nobody must ask."""

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.mark.parametrize(
    ("claims", "name", "problem"),
    [
        ({"email": "ann@Lab.org", "email_verified": True}, "ann", None),
        ({"email": "ann@lab.org"}, "ann", "has not verified"),
        ({"email": "ann@lab.org", "email_verified": "true"}, "ann", "has not verified"),
        ({"email": "ann@gmail.com", "email_verified": True}, "ann", "is of no domain"),
        ({"email": "ann@lab.org@gmail.com", "email_verified": True}, "ann", "is of no domain"),
        ({"email": "ann@", "email_verified": True}, "ann", "is of no domain"),
        ({"email": ["ann@lab.org"], "email_verified": True}, "", "gives no text"),
        ({}, "", "gives no text"),
    ],
)
def test_addresses_are_names_in_known_domains_once_verified(
    claims: dict[str, Any], name: str, problem: str | None
) -> None:
    settings = oidc_provider.OidcSettings(
        issuer="https://accounts.google.com", client_id="x", name_claim="email", domains=["lab.org"]
    )
    person = settings.person(claims | {"sub": "1"})
    assert person.name == name
    assert (person.problem is None) == (problem is None)
    assert (problem or "") in (person.problem or "")


def test_another_issuer_is_refused(master: Any, provider: Any) -> None:
    provider.metadata = {"issuer": "https://other.example"}
    assert code_of(sign_in(master, provider)) == AWAY
    provider.metadata = {}
    assert code_of(sign_in(master, provider, iss="https://other.example")) == BAD_TOKEN
    denied = sign_in(master, provider, error="access_denied")
    assert code_of(denied) == (403, "oidc_refused")
    assert "access_denied" in denied.json()["detail"]
    provider.documents["/token"] = (400, b'{"error": "invalid_grant"}')
    refused = sign_in(master, provider)
    assert code_of(refused) == (403, "oidc_refused")
    assert "invalid_grant" in refused.json()["detail"]
    assert sign_in(master, provider, code="").json()["code"] in ("oidc_refused", "oidc_expired")
    assert users(master) == ["admin"]


def test_without_the_provider_passwords_go_on_and_it_is_told(
    master: Any, provider: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert sign_in(master, provider).status_code == 303
    port = provider.server_address[1]
    provider.close()
    # What was read of the provider still counts, for an hour.
    assert code_of(sign_in(master, provider)) == AWAY
    assert any("cannot be asked" in one for one in master.http.get("/status").json()["problems"])
    assert master.http.get("/status").json()["oidc_issuer"] == provider.issuer
    page = httpx2.get(f"{master.url}/oidc/callback", headers={"accept": "text/html"})
    assert page.headers["location"] == "/sign-in?problem=oidc_expired"
    master.http.put("/users/admin/password", json={"password": "correct horse"})
    body = {"user": "admin", "password": "correct horse"}
    assert httpx2.post(f"{master.url}/login", json=body).status_code == 200
    again = LyingProvider(port)
    try:
        assert sign_in(master, again).status_code == 303
    finally:
        again.close()
    assert master.http.get("/status").json()["problems"] == []
    assert SECRET not in caplog.text
    assert "the code" not in caplog.text
    assert master.http.get("/users").text.find(SECRET) == -1
    provider.__init__()


def test_a_slow_provider_occupies_nobody(
    master: Any, provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc_provider, "_TIMEOUT_S", 1.0)
    provider.delay_s = 0.1
    began = time.monotonic()
    with ThreadPoolExecutor(20) as threads:
        waiting = [
            threads.submit(httpx2.get, f"{master.url}/oidc/sign-in", timeout=60) for _ in range(20)
        ]
        time.sleep(0.3)
        other = time.monotonic()
        assert master.http.get("/users").status_code == 200
        assert time.monotonic() - other < 5
        assert {code_of(one.result()) for one in waiting} == {AWAY}
    assert time.monotonic() - began < 15
    assert len(provider.asked) <= 4
    provider.delay_s = 0.0
    # It is not asked again at once.
    assert code_of(sign_in(master, provider)) == AWAY
    assert len(provider.asked) <= 4
    monkeypatch.setattr(master.core.oidc, "_rests_until", 0.0)
    assert sign_in(master, provider).status_code == 303


def test_a_certificate_of_another_authority_is_refused(
    tmp_path: Path, make_master: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands between master and provider reads nothing, unless the lab trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now - DAY).not_valid_after(now + DAY)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    made = built.add_extension(names, critical=False).sign(key, hashes.SHA256())
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path = tmp_path / "lab.pem"
    secret = key.private_bytes(pem, form, serialization.NoEncryption())
    path.write_bytes(made.public_bytes(pem) + secret)
    provider = LyingProvider(certificate=path)
    try:
        (tmp_path / "home").mkdir()
        settings = tmp_path / "home" / "oidc.yaml"
        text = {"issuer": provider.issuer, "client_id": "paceline", "create": True}
        settings.write_text(yaml.safe_dump(text))
        settings.chmod(0o600)
        master = make_master()
        refused = sign_in(master, provider)
        assert code_of(refused) == AWAY
        assert "CERTIFICATE_VERIFY_FAILED" in refused.text
        assert provider.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        master.core.oidc._ssl = None
        assert sign_in(master, provider).status_code == 303
    finally:
        provider.close()
