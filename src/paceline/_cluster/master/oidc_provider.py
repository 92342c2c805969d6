"""Sign-in by OpenID Connect: the file `oidc.yaml`, and questions to the provider that it names.

Nothing is kept of a sign-in that has begun: its browser keeps it, sealed, in a cookie.
"""

import asyncio
import hashlib
import hmac
import json
import re
import secrets
import stat
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote_plus, urlsplit

import anyio
from pydantic import Field, SecretStr, ValidationError, field_validator

from paceline._base.process_and_network import LOOPBACK_HOSTS
from paceline._cluster.master.authentication import SignInLinks
from paceline._cluster.messages.master_models import NewUser, Role, UserChange
from paceline.config._fields_and_problems import Section, Text
from paceline.config._read_yaml import read_yaml_file

if TYPE_CHECKING:
    import httpx2

OIDC_FILE = "oidc.yaml"
FLOW_S = 600.0
_CODE_S = 300.0
# For all requests of one step; a provider that is slow must not occupy the master.
_TIMEOUT_S = 10.0
_MAX_BYTES = 256 * 1024
_MAX_AT_ONCE = 4
# After one that was too slow: looking up its name may occupy a thread for longer.
_REST_S = 15.0
_METADATA_S = 3600.0
_MAX_USED = 10_000
_MAX_KEYS = 50
# Between two readings of keys because a token names none that is known.
_KEYS_S = 5.0
_LEEWAY_S = 60
# Without those of a shared secret: the public key of a provider is known to all.
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512",
               "Ed25519", "EdDSA")  # fmt: skip
_NAME = re.compile(str(NewUser.model_fields["name"].metadata[0].pattern), re.ASCII)
# `*` stands for whoever comes first, see `Users.link`.
_SUBJECT = re.compile(r"(?!\*$)[!-~]{1,255}")
_GROUP = str(UserChange.model_fields["group"].metadata[0].pattern)


class OidcError(Exception):
    """Raised when nobody can be signed in; `code` is for programs and the web UI."""

    def __init__(self, code: str, text: str, status: int = 403) -> None:
        super().__init__(text)
        self.code = code
        self.status = status


@dataclass(frozen=True, kw_only=True, slots=True)
class OidcPerson:
    """Person as the provider knows them; None is what the settings do not ask for.

    `problem` says why `name` cannot be a user's name here.
    """

    issuer: str
    subject: str
    name: str
    problem: str | None = None
    group: str | None = None
    is_admin: bool | None = None


class Admins(Section):
    """Claim and value of administrators of the master."""

    claim: Text
    value: Text


class Groups(Section):
    """Claim with groups of the provider, and the names of those that count here."""

    claim: Text
    names: Annotated[dict[Text, Annotated[str, Field(pattern=_GROUP, min_length=1)]],
                     Field(min_length=1)]  # fmt: skip


class OidcSettings(Section):
    """The content of the file; docs/lab.md explains the fields."""

    issuer: Text
    client_id: Text
    client_secret: SecretStr | None = None
    name: Annotated[Text, Field(max_length=40)] = "OpenID Connect"
    url: Text | None = None
    scopes: list[Text] = ["profile", "email"]
    name_claim: Text = "preferred_username"
    domains: list[Text] = []
    hosts: list[Text] = []
    create: bool = False
    role: Annotated[Role | None, Field(strict=False)] = Role.EDITOR
    project: Text = "Default"
    admins: Admins | None = None
    groups: Groups | None = None
    session_hours: Annotated[float, Field(strict=False, gt=0, le=24 * 30)] = 24 * 30

    @field_validator("issuer", "url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and not _is_safe(value):
            raise ValueError("must be an https:// address, or http:// of this machine")
        return value

    def origin_of_url(self) -> str | None:
        """Return scheme and host of `url`."""
        return None if self.url is None else _origin(self.url)

    def person(self, claims: Mapping[str, Any]) -> OidcPerson:
        """Return the person that checked claims describe."""
        name, problem = self._name(claims)
        group = is_admin = None
        if self.groups is not None:
            has = _texts(claims.get(self.groups.claim))
            # In the order of the file: a user has one group.
            group = next((ours for theirs, ours in self.groups.names.items() if theirs in has), "")
        if self.admins is not None:
            is_admin = self.admins.value in _texts(claims.get(self.admins.claim))
        return OidcPerson(
            issuer=self.issuer, subject=claims["sub"], name=name, problem=problem, group=group,
            is_admin=is_admin,
        )  # fmt: skip

    def asked_claims(self) -> set[str]:
        """Return the names of the claims that are needed."""
        more = (self.admins, self.groups)
        return {self.name_claim, *(one.claim for one in more if one is not None)}

    def _name(self, claims: Mapping[str, Any]) -> tuple[str, str | None]:
        found = claims.get(self.name_claim)
        if not isinstance(found, str):
            return "", f"the provider gives no text as the claim {self.name_claim!r}"
        name, _, domain = found.partition("@")
        if "@" in found and domain.lower() not in (one.lower() for one in self.domains):
            return name, f"{found[:200]!r} is of no domain that `domains` lists"
        # Anybody could have told the provider this address.
        if self.name_claim == "email" and claims.get("email_verified") is not True:
            return name, f"the provider has not verified the address {found[:200]!r}"
        if _NAME.fullmatch(name) is None:
            return name, f"{name[:200]!r} is no name for a user here"
        return name, None


def read_oidc_file(path: Path) -> OidcSettings | None:
    """Return the content of the file; None without a file.

    Raises:
        ValueError: The file is not valid, or others may read it. The text has no values.
    """
    if not path.exists():
        return None
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(
            f"{path}: Only its owner must be able to read it, but it has mode {mode:04o}. Hint:"
            f" chmod 600 {path}"
        )
    if find_spec("authlib") is None:
        raise ValueError(
            f"{path}: Sign-in by OpenID Connect needs the package `authlib`, which is not"
            " installed. Hint: pip install 'paceline[oidc]'"
        )
    try:
        return OidcSettings.model_validate(read_yaml_file(path))
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        ]
        raise ValueError("\n".join(lines)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """A sign-in that a browser has begun.

    Attributes:
        next: Where the browser goes then, a path of the web UI.
        challenge: Digest of a secret of the command line that asks for a token, if one does.
        redirect_uri: Where the provider sends the browser back to.
    """

    state: str
    nonce: str
    verifier: str
    next: str
    challenge: str | None
    redirect_uri: str
    began_at: float


class OidcProvider:
    """A provider, asked within limits of time and size; for one event loop.

    Args:
        settings: The file.
        key: A secret of the home.
    """

    def __init__(self, settings: OidcSettings, key: bytes) -> None:
        self.settings = settings
        self.codes = SignInLinks(_CODE_S)
        self.problem: str | None = None
        self._key = hmac.digest(key, b"flows of OIDC", "sha256")
        self._used: OrderedDict[str, float] = OrderedDict()
        self._num_asking = 0
        self._rests_until = 0.0
        self._ssl: Any = None
        self._metadata: tuple[float, dict[str, Any]] = (-_METADATA_S, {})
        self._keys: tuple[float, list[Any]] = (-_METADATA_S, [])

    async def begin(
        self, redirect_uri: str, next_path: str, challenge: str | None
    ) -> tuple[str, Flow, str]:
        """Return where to send a browser, and the flow, plain and sealed for its cookie.

        Raises:
            OidcError: The provider does not answer as it must.
        """
        from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
        from authlib.oauth2.rfc7636 import create_s256_code_challenge

        endpoint = (await self._ask(self._discover))["authorization_endpoint"]
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        flow = Flow(
            state=state, nonce=nonce, verifier=verifier, next=next_path, challenge=challenge,
            redirect_uri=redirect_uri, began_at=time.time(),
        )  # fmt: skip
        scopes, digest = ["openid", *self.settings.scopes], create_s256_code_challenge(verifier)
        url = prepare_grant_uri(
            endpoint, self.settings.client_id, "code", redirect_uri, scopes, state, nonce=nonce,
            code_challenge=digest, code_challenge_method="S256",
        )  # fmt: skip
        # Quotes would come around a cookie with `=`.
        text = urlsafe_b64encode(json.dumps(asdict(flow)).encode()).rstrip(b"=")
        return url, flow, f"{text.decode()}.{self._seal(text)}"

    def take_flow(self, state: str, sealed: str) -> Flow:
        """Return the flow of a cookie, once.

        Raises:
            OidcError: It is not of this state, too old, or was used.
        """
        text, _, seal = sealed.partition(".")
        content = text.encode("utf-8", "surrogateescape")
        if hmac.compare_digest(
            seal.encode("utf-8", "surrogateescape"), self._seal(content).encode()
        ):
            flow, now = Flow(**json.loads(urlsafe_b64decode(content + b"=="))), time.time()
            is_right = hmac.compare_digest(flow.state.encode(), state.encode("utf-8", "replace"))
            is_new = abs(now - flow.began_at) < FLOW_S and flow.state not in self._used
            if is_right and is_new:
                self._used[flow.state] = now
                while now - next(iter(self._used.values())) > FLOW_S or len(self._used) > _MAX_USED:
                    self._used.popitem(last=False)
                return flow
        raise OidcError(
            "oidc_expired",
            "A sign-in must end within 10 minutes, once, and in the browser and at the address"
            " where it began, but this one did not. Hint: sign in again.",
            401,
        )

    async def finish(self, flow: Flow, answer: Mapping[str, str | None]) -> OidcPerson:
        """Return who has signed in, by the provider's answer to a flow.

        Raises:
            OidcError: The provider refused, does not answer, or its answer does not hold.
        """
        if answer.get("error"):
            raise OidcError(
                "oidc_refused", f"The provider refused the sign-in: {answer['error']!r:.200}."
            )
        if answer.get("iss") not in (None, self.settings.issuer):
            raise _untrusted("is of another issuer")
        code = answer.get("code") or ""
        claims = await self._ask(lambda: self._redeem(flow, code))
        return self.settings.person(claims)

    async def _redeem(self, flow: Flow, code: str) -> dict[str, Any]:
        metadata = await self._discover()
        found = await self._fetch("POST", metadata["token_endpoint"], form=(flow, code))
        token, access = found.get("id_token"), found.get("access_token")
        if not isinstance(token, str):
            raise _untrusted("has no ID token")
        access = access if isinstance(access, str) else None
        claims = await self._checked_claims(token, flow.nonce, access)
        endpoint = metadata.get("userinfo_endpoint")
        if endpoint and access and not self.settings.asked_claims() <= claims.keys():
            more = await self._fetch("GET", endpoint, access)
            if more.get("sub") != claims["sub"]:
                raise _untrusted("has facts of somebody else")
            claims = more | claims
        return claims

    async def _checked_claims(
        self, token: str, nonce: str, access_token: str | None
    ) -> dict[str, Any]:
        from authlib.oidc.core import CodeIDToken
        from joserfc.errors import JoseError

        decoded = await self._decoded(token)
        client = self.settings.client_id
        options = {"iss": {"value": self.settings.issuer}, "aud": {"value": client}}
        given = {"nonce": nonce, "client_id": client, "access_token": access_token}
        claims = CodeIDToken(decoded.claims, decoded.header, options, given)
        try:
            claims.validate(leeway=_LEEWAY_S)
        except (JoseError, TypeError, ValueError) as error:
            raise _untrusted(f"does not hold ({error})") from error
        subject = claims["sub"]
        if not isinstance(subject, str) or _SUBJECT.fullmatch(subject) is None:
            raise _untrusted("has a subject that is no plain text")
        return dict(claims)

    async def _decoded(self, token: str) -> Any:
        from joserfc import jwt
        from joserfc.errors import JoseError

        read_at, keys = self._keys
        if time.monotonic() - read_at >= _METADATA_S:
            keys = []  # the provider may have taken some back
        problem: Exception | None = None
        for _ in range(2):
            for key in keys:
                try:
                    return jwt.decode(token, key, algorithms=_ALGORITHMS)
                except (JoseError, TypeError, ValueError, RecursionError) as error:
                    problem = error
            if time.monotonic() - read_at < _KEYS_S:
                break
            # A provider may have begun to use another key.
            read_at, keys = await self._read_keys()
        raise _untrusted(f"is signed by none of the provider's keys ({problem})")

    async def _read_keys(self) -> tuple[float, list[Any]]:
        from joserfc.errors import JoseError
        from joserfc.jwk import import_key

        found = (await self._fetch("GET", (await self._discover())["jwks_uri"])).get("keys")
        keys = []
        for one in found[:_MAX_KEYS] if isinstance(found, list) else ():
            if not isinstance(one, dict) or one.get("kty") not in ("RSA", "EC", "OKP"):
                continue
            try:
                keys.append(import_key(one))
            except (JoseError, TypeError, ValueError):
                continue  # of a kind that is not known here
        self._keys = time.monotonic(), keys
        return self._keys

    async def _discover(self) -> dict[str, Any]:
        from authlib.oidc.discovery import get_well_known_url

        read_at, known = self._metadata
        if time.monotonic() - read_at < _METADATA_S:
            return known
        issuer = self.settings.issuer
        found = await self._fetch("GET", get_well_known_url(issuer, external=True))
        if found.get("issuer") != issuer:
            raise _unavailable(f"names another issuer, {found.get('issuer')!r:.200}")
        needed = ("authorization_endpoint", "token_endpoint", "jwks_uri")
        for name in (*needed, "userinfo_endpoint"):
            if name in needed or found.get(name) is not None:
                self._check_endpoint(name, found.get(name))
        self._metadata = time.monotonic(), found
        return found

    def _check_endpoint(self, name: str, url: Any) -> None:
        """Refuse addresses elsewhere: a document must not have the master ask just anybody."""
        is_text = isinstance(url, str) and url.isascii() and url.isprintable()
        if is_text and _is_safe(url):
            parts = urlsplit(url)
            is_listed = parts.scheme == "https" and parts.netloc in self.settings.hosts
            if is_listed or _origin(url) == _origin(self.settings.issuer):
                return
        raise _unavailable(
            f"has a {name} that is not at the issuer's address ({url!r:.200}). Hint: `hosts` in"
            f" {OIDC_FILE} lists other hosts that may be asked"
        )

    async def _ask(self, step: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        if self._num_asking >= _MAX_AT_ONCE or time.monotonic() < self._rests_until:
            raise _unavailable("is slow, and others wait for it")
        self._num_asking += 1
        try:
            with anyio.fail_after(_TIMEOUT_S):
                found = await step()
        except TimeoutError as error:
            self._rests_until = time.monotonic() + _REST_S
            slow = _unavailable(f"did not answer within {_TIMEOUT_S:g} s")
            self.problem = str(slow)
            raise slow from error
        except OidcError as error:
            if error.code == "oidc_unavailable":
                self.problem = str(error)
            raise
        finally:
            self._num_asking -= 1
        self.problem = None
        return found

    async def _fetch(
        self, method: str, url: str, access: str | None = None,
        form: tuple[Flow, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        import httpx2

        if self._ssl is None:
            self._ssl = await asyncio.to_thread(httpx2.create_ssl_context)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        body = ""
        if access is not None:
            headers["Authorization"] = f"Bearer {access}"
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            url, headers, body = self._form(url, headers, *form)
        # This machine is asked without a proxy.
        is_far = urlsplit(url).hostname not in LOOPBACK_HOSTS
        options: Any = {"verify": self._ssl, "timeout": _TIMEOUT_S, "trust_env": is_far}
        try:
            async with (
                httpx2.AsyncClient(**options) as client,
                client.stream(method, url, headers=headers, content=body or None) as reply,
            ):
                content = await _read(reply)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise _unavailable(f"cannot be asked ({type(error).__name__}: {error})") from error
        if form is not None and reply.status_code in (400, 401):
            raise OidcError(
                "oidc_refused",
                f"The provider refused the code of the sign-in: {content.get('error')!r:.200}.",
            )
        if reply.status_code != 200:
            raise _unavailable(f"answered {urlsplit(url).path[:100]} with {reply.status_code}")
        return content

    def _form(
        self, url: str, headers: dict[str, str], flow: Flow, code: str
    ) -> tuple[str, dict[str, str], str]:
        from authlib.oauth2.auth import ClientAuth
        from authlib.oauth2.rfc6749.parameters import prepare_token_request

        supported = self._metadata[1].get("token_endpoint_auth_methods_supported")
        body = prepare_token_request(
            "authorization_code", code=code, redirect_uri=flow.redirect_uri,
            code_verifier=flow.verifier,
        )  # fmt: skip
        client, secret = self.settings.client_id, self.settings.client_secret
        if secret is None:
            auth = ClientAuth(client, None, "none")
        elif supported is None or "client_secret_basic" in supported:
            # RFC 6749, section 2.3.1; Authlib leaves both as they are.
            words = quote_plus(client), quote_plus(secret.get_secret_value())
            auth = ClientAuth(*words, "client_secret_basic")
        else:
            auth = ClientAuth(client, secret.get_secret_value(), "client_secret_post")
        found: tuple[str, dict[str, str], str] = auth.prepare("POST", url, headers, body)
        return found

    def _seal(self, text: bytes) -> str:
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()


async def _read(reply: "httpx2.Response") -> dict[str, Any]:
    content = bytearray()
    async for part in reply.aiter_raw():
        content += part
        if len(content) > _MAX_BYTES:
            raise _unavailable(f"sends more than {_MAX_BYTES // 1024} KiB")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    if reply.status_code == 200:
        raise _unavailable(f"sends no JSON object from {str(reply.url)[:200]}")
    return {}


def _texts(claim: Any) -> list[str]:
    found = claim if isinstance(claim, list) else [claim]
    return [one for one in found if isinstance(one, str)]


def _is_safe(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_own = parts.scheme == "http" and parts.hostname in LOOPBACK_HOSTS
        has_host = bool(parts.hostname) and "@" not in parts.netloc
        return has_host and parts.port != 0 and (is_own or parts.scheme == "https")
    except ValueError:
        return False


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.lower()}"


def _unavailable(what: str) -> OidcError:
    return OidcError("oidc_unavailable", f"The provider of the sign-in {what}.", 503)


def _untrusted(what: str) -> OidcError:
    return OidcError("oidc_untrusted", f"The provider's answer {what}.")
