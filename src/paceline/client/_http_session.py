"""Requests to the master: location, errors, retries, paging."""

import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from paceline._base.exceptions import PicklableError
from paceline._base.files import DamagedSecretError, NotRegularFileError, read_regular, read_secret
from paceline._base.journal_records import check_seal
from paceline._base.process_and_network import LOOPBACK_HOSTS, await_listener
from paceline.client import _late_models as models

if TYPE_CHECKING:
    import ssl

    import httpx2


class ClientError(RuntimeError):
    """Base of all errors raised by the client on purpose."""


class ApiError(PicklableError, ClientError):
    """Raised when the master refused a request.

    Attributes:
        status: The HTTP status.
        code: The stable code of the error, for programs.
        detail: The explanation, for people.
    """

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail


class MasterUnreachableError(ClientError):
    """Raised when no master answers; the message contains the command to start a master."""


class ContextError(ClientError, ValueError):
    """Raised when a directory cannot be sent as an experiment's code."""


class DownloadError(ClientError):
    """Raised when a checkpoint cannot be copied to the wanted place."""


class NoCheckpointError(ClientError, LookupError):
    """Raised when an experiment or trial has no checkpoint yet."""


HOME_VARIABLE = "PACELINE_HOME"
MASTER_VARIABLE = "PACELINE_MASTER"
TOKEN_VARIABLE = "PACELINE_TOKEN"  # noqa: S105 - the name of a variable, no secret
TOKEN_FILE_VARIABLE = "PACELINE_TOKEN_FILE"  # noqa: S105 - the same
REPORT_PATIENCE_VARIABLE = "PACELINE_REPORT_PATIENCE_S"
START_COMMAND = "paceline up --detach"


class MasterFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `master.json`, kept in the home by a running master.

    `url` is for programs on its machine, `public_url` for those on others; `host` is the address
    that it listens on. `certificate` is its own (PEM), if it has one.
    """

    url: str
    pid: int
    port: int
    version: str
    host: str = ""
    certificate: str | None = None
    public_url: str = ""

    @property
    def shown_url(self) -> str:
        """The URL to show to people."""
        return self.public_url or self.url


class MasterAccess(msgspec.Struct, frozen=True):
    """URL and token of a master, and its certificate if known from its home."""

    url: str
    token: str
    certificate: str | None = None


def home_directory() -> Path:
    """Return the home named by the environment, by default `~/.paceline`."""
    return Path(os.environ.get(HOME_VARIABLE) or "~/.paceline").expanduser().absolute()


def read_master_file(home: Path) -> MasterFile | None:
    """Return the content of the home's master file; None without a valid file.

    The file outlives a master that was killed, so a file is no proof that one answers.
    """
    try:
        data = check_seal(read_regular(home / "master.json"))
        return msgspec.json.decode(data, type=MasterFile)
    except (FileNotFoundError, NotADirectoryError, NotRegularFileError, msgspec.DecodeError):
        return None


def read_token(home: Path) -> str:
    """Return the token of this home.

    Raises:
        MasterUnreachableError: It cannot be read, or is damaged.
    """
    path = home / "token"
    try:
        return read_secret(path)
    except OSError as error:
        raise MasterUnreachableError(
            f"The master's token must be readable at {str(path)!r}, but it is not"
            f" ({error.strerror}). Hint: set `{TOKEN_VARIABLE}`, or set `{HOME_VARIABLE}` to the"
            " master's home."
        ) from error
    except DamagedSecretError as error:
        raise MasterUnreachableError(
            f"{error} Hint: a master makes a new one when it starts (`paceline down`, then"
            f" `{START_COMMAND}`)."
        ) from error


def given_token() -> str | None:
    """Return the token from an environment variable or from a token file, None without any.

    Raises:
        MasterUnreachableError: The file cannot be read, or is damaged.
    """
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    path = os.environ.get(TOKEN_FILE_VARIABLE)
    if not path:
        return None
    try:
        return read_secret(Path(path).expanduser(), is_named=True)
    except (OSError, DamagedSecretError) as error:
        raise MasterUnreachableError(
            f"`{TOKEN_FILE_VARIABLE}` must name a file with a token, but {path!r} cannot be read"
            f" ({error})."
        ) from error


def _check_url(url: str) -> None:
    try:
        place = urlsplit(url)
        is_right = place.scheme in ("http", "https") and place.hostname and place.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise MasterUnreachableError(
            f"The URL of a master must be of the form http://HOST:PORT, but got {url!r}."
        )


def _token_for(url: str, home: Path) -> str:
    """Return the token of the home; without one, say first if no master answers at the URL."""
    try:
        return read_token(home)
    except MasterUnreachableError:
        place = urlsplit(url)
        port = place.port or (443 if place.scheme == "https" else 80)
        error = await_listener(place.hostname or "", port, 0.0)
        if error is None:
            raise
        raise MasterUnreachableError(_unanswered(url, error)) from error


def _unanswered(url: str, error: Exception) -> str:
    """Return the message about a URL at which no master answers."""
    why = (isinstance(error, OSError) and error.strerror) or re.sub(r"^\[[^]]*\] *", "", str(error))
    return (
        f"A master must answer at {url}, but none does ({why})."
        f" Hint: start one with `{START_COMMAND}`, or check the URL."
    )


def find_master(master: str | None = None, token: str | None = None) -> MasterAccess:
    """Return the master's address: the arguments, else the environment, else the home's files.

    Raises:
        MasterUnreachableError: No master runs in the home, or its token cannot be read.
    """
    home = home_directory()
    url = master or os.environ.get(MASTER_VARIABLE)
    file = read_master_file(home)
    if not url:
        if file is None:
            raise MasterUnreachableError(
                f"A master must run in {str(home)!r}, but none does."
                f" Hint: start one with `{START_COMMAND}`."
            )
        url = file.url
    if "://" not in url:
        url = f"http://{url}"
    url = url.rstrip("/")
    _check_url(url)
    return MasterAccess(
        url,
        token or given_token() or _token_for(url, home),
        file.certificate if file is not None and file.url == url else None,
    )


def checked_key(key: str | None) -> str:
    """Return the caller's key of a request that may be sent again; a random one for None.

    Raises:
        ClientError: It cannot be a key.
    """
    if key is None:
        return uuid.uuid4().hex
    if not (0 < len(key) <= _LONGEST_KEY and key.isascii() and key.isprintable()):
        raise ClientError(
            f"`key` must have 1 to {_LONGEST_KEY} printable ASCII characters, but got {key!r}."
        )
    return key


Model = TypeVar("Model")

_IDEMPOTENT = frozenset({"GET", "PUT", "DELETE"})
_UNAUTHORIZED = 401
_PASSING_STATUSES = frozenset({502, 503, 504})
_ATTEMPTS = 5
_BACKOFF_S = 0.5
_TIMEOUT_S = 60.0
_PAGE_SIZE = 200
_LONGEST_KEY = 100


class _Pool(NamedTuple):
    """HTTP connections to a master at a fixed address."""

    address: MasterAccess
    http: "httpx2.Client"


class HttpSession:
    """Connections to a master, for any number of threads.

    The address is looked up at the first request and again when nothing answers there, so that a
    master which came back on another port is found. Connections that other threads may still use
    stay open until `close`.
    """

    def __init__(
        self, master: str | None = None, token: str | None = None, ca_file: str | None = None
    ) -> None:
        self._master = master
        self._token = token
        self._ca_file = ca_file
        self._lock = threading.Lock()
        self._pool: _Pool | None = None
        self._left: list[httpx2.Client] = []

    def __enter__(self) -> "HttpSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        with self._lock:
            opened = self._left + ([] if self._pool is None else [self._pool.http])
            self._left, self._pool = [], None
        # Outside of the lock: closing may wait for the network.
        for http in opened:
            http.close()

    @property
    def url(self) -> str:
        """The master's URL.

        Raises:
            MasterUnreachableError: No master is known.
        """
        return self._opened().address.url

    def http(self) -> "httpx2.Client":
        """Return the connection pool; opened at the first call."""
        return self._opened().http

    def _opened(self) -> _Pool:
        with self._lock:
            if self._pool is None:
                self._pool = self._open(find_master(self._master, self._token))
            return self._pool

    def _open(self, address: MasterAccess) -> _Pool:
        import httpx2

        # A proxy that the environment names cannot reach this machine's loopback.
        is_local = urlsplit(address.url).hostname in LOOPBACK_HOSTS
        http = httpx2.Client(
            base_url=f"{address.url}/api/v1/",
            headers={"Authorization": f"Bearer {address.token}"},
            timeout=_TIMEOUT_S,
            # Each thread may have a stream and a request.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
            trust_env=not is_local,
            # Building the certificate store costs 20 ms that plain HTTP has no use for.
            verify=self._tls(address),
        )
        return _Pool(address, http)

    def _tls(self, address: MasterAccess) -> "ssl.SSLContext | bool":
        if not address.url.startswith("https:"):
            return False
        from paceline._base.certificates import client_tls

        try:
            return client_tls(address.certificate, self._ca_file)
        except ValueError as error:
            raise MasterUnreachableError(str(error)) from error

    def get(self, path: str, model: type[Model], **params: Any) -> Model:
        """Return the decoded answer to a GET; parameters with the value None are left out."""
        return self.call("GET", path, model, params=params)

    def call(
        self,
        method: str,
        path: str,
        model: type[Model],
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        key: str | None = None,
    ) -> Model:
        """Send a request and return its decoded answer; `body` is a message.

        By its `key` the master knows a request that is repeated, if the route takes one.

        Raises:
            ApiError: The master refused the request.
            MasterUnreachableError: No master answers.
        """
        from pydantic import TypeAdapter

        response = self.send(method, path, params=params, body=body, key=key)
        return TypeAdapter(model).validate_json(response.content)

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        content: "bytes | Path | IO[bytes] | None" = None,
        body: Any = None,
        key: str | None = None,
    ) -> "httpx2.Response":
        """Send a request and return the answer, always a success.

        A file as `content` is sent from its beginning. A `body` is a message, and the content.

        Requests that may be repeated are, when the connection breaks or the master is overloaded.
        """
        if body is not None:
            content = body.model_dump_json().encode()
        request = _SentRequest(method, path, params, content, key)
        for attempt in range(1, _ATTEMPTS + 1):
            is_last = attempt == _ATTEMPTS or not (method in _IDEMPOTENT or key)
            pool = self._opened()
            try:
                response = self._send_once(pool, request)
            except MasterUnreachableError as error:
                if is_last or not isinstance(error.__cause__, _broken_connection()):
                    raise
            else:
                if response.status_code == _UNAUTHORIZED and self._has_moved(pool):
                    # The home has another token, or another master another address.
                    response = self._send_once(self._opened(), request)
                if response.status_code not in _PASSING_STATUSES or is_last:
                    raise_for_problem(response)
                    return response
            time.sleep(_BACKOFF_S * attempt)
        raise AssertionError("the last attempt returns or raises")

    def stream_to_file(self, path: str, target: Path) -> int:
        """Write the answer of a GET to a file, piece by piece, and return the number of bytes.

        Raises:
            ApiError: The master refused the request.
            MasterUnreachableError: The connection broke.
        """
        import httpx2

        received = 0
        try:
            with self.http().stream("GET", path) as response, target.open("wb") as file:
                if not response.is_success:
                    # The problem is in the body, which a stream has not read yet.
                    response.read()
                    raise_for_problem(response)
                for chunk in response.iter_bytes(1024 * 1024):
                    received += file.write(chunk)
        except httpx2.TransportError as error:
            raise MasterUnreachableError(
                f"The master at {self.url} broke off the transfer of {path!r} ({error})."
                " Hint: try again; see `paceline status`."
            ) from error
        return received

    def pages(
        self, path: str, model: type[Model], *, limit: int | None = None, **params: Any
    ) -> Iterator[Model]:
        """Yield the items of a paged list, at most `limit`."""

        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = _PAGE_SIZE if left is None else min(left, _PAGE_SIZE)
            page = self.get(path, models.Page[model], limit=size, cursor=cursor, **params)  # type: ignore[valid-type]
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return
            left = None if left is None else left - len(page.items)

    def _send_once(self, pool: _Pool, request: "_SentRequest") -> "httpx2.Response":
        import httpx2

        url = pool.address.url
        try:
            return request.send(pool.http)
        except httpx2.ConnectError as error:
            if self._has_moved(pool):
                return self._send_once(self._opened(), request)
            if explained := _explain_tls(error, url):
                raise MasterUnreachableError(explained) from error
            raise MasterUnreachableError(_unanswered(url, error)) from error
        except httpx2.TransportError as error:
            self._has_moved(pool)
            if explained := _explain_tls(error, url):
                # Cause left out: with a broken connection as its cause, `send` would try again.
                raise MasterUnreachableError(explained) from None
            raise MasterUnreachableError(
                f"The master at {url} broke off its answer ({type(error).__name__}: {error})."
                " Hint: see `master.log` in its home, and `paceline status`."
            ) from error

    def _has_moved(self, old: _Pool) -> bool:
        """Return whether the master has a new address; later requests use the new address."""
        try:
            address = find_master(self._master, self._token)
        except MasterUnreachableError:
            return False
        if address == old.address:
            return False
        with self._lock:
            if self._pool is None or self._pool.address != address:
                if self._pool is not None:
                    self._left.append(self._pool.http)
                self._pool = self._open(address)
        return True


class _SentRequest(NamedTuple):
    """Request to send, the same in each repetition."""

    method: str
    path: str
    params: Mapping[str, Any] | None
    content: "bytes | Path | IO[bytes] | None"
    key: str | None

    def send(self, http: "httpx2.Client") -> "httpx2.Response":
        known = {key: value for key, value in (self.params or {}).items() if value is not None}
        headers = {} if self.key is None else {"Idempotency-Key": self.key}
        if isinstance(self.content, Path):
            with self.content.open("rb") as file:
                return http.request(self.method, self.path, params=known, content=file)
        if self.content is not None and not isinstance(self.content, bytes):
            self.content.seek(0)
        elif self.content is not None:
            headers["Content-Type"] = "application/json"
        return http.request(
            self.method, self.path, params=known, content=self.content, headers=headers
        )


def _explain_tls(error: "httpx2.TransportError", url: str) -> str | None:
    """Return the TLS problem behind a failed request, None if there is no TLS problem."""
    import httpx2

    from paceline._base.certificates import explain_missing_tls, explain_tls_error, tls_error_of

    if (found := tls_error_of(error)) is not None:
        return explain_tls_error(found, url)
    broke_off = isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError)
    if not broke_off or url.startswith("https:"):
        return None
    place = urlsplit(url)
    return explain_missing_tls(url, place.hostname, place.port)


def raise_for_problem(response: "httpx2.Response") -> None:
    """Raise the error described in an answer.

    Raises:
        ApiError: The answer is not a success.
    """
    if response.is_success:
        return
    from pydantic import ValidationError

    try:
        problem = models.Problem.model_validate_json(response.content)
    except ValidationError:
        raise ApiError(
            response.status_code,
            "unexpected_answer",
            f"The server at {response.url} must answer as a Paceline master does, but gave status"
            f" {response.status_code}: {response.text[:200]!r}."
            " Hint: check the master's URL.",
        ) from None
    raise ApiError(problem.status, problem.code, problem.detail or problem.title)


def _broken_connection() -> tuple[type[Exception], ...]:
    """Return the exceptions of an established connection breaking."""
    import httpx2

    return (httpx2.ReadError, httpx2.RemoteProtocolError, httpx2.WriteError)
