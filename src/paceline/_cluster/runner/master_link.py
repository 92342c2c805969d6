"""HTTP connection to the master, and the base of loops sending again and again."""

import http.client
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec

from paceline._base.certificates import (
    client_tls,
    explain_missing_tls,
    explain_tls_error,
    tls_error_of,
)
from paceline._base.files import read_regular, read_secret
from paceline._base.journal_records import check_seal
from paceline._cluster.messages.runner_messages import AttemptSpec, MasterAddress

logger = logging.getLogger(__name__)


_TIMEOUT_S = 30.0
_FAILED_STATUS = 500
_UNAUTHORIZED = 401
_PARTIAL = 206
_BEYOND_THE_END = 416
_JSON = {"Content-Type": "application/json"}
# Malformed, too large, not to be processed.
_CONTENT_STATUSES = (400, 413, 422)
_OVER = (409, "attempt_over")
# No answer, or no address to ask.
_UNREACHABLE = (
    OSError, http.client.HTTPException, ValueError, KeyError, TypeError, msgspec.DecodeError,
)  # fmt: skip
_POLL_S = 0.05


class UnreachableError(Exception):
    """Raised when the master cannot be reached or cannot answer now."""


class UntrustedMasterError(UnreachableError):
    """Raised when TLS cannot be agreed on with the master, mostly for its certificate."""


class TokenRefusedError(UnreachableError):
    """Raised when the master rejects the token; a valid token may replace the token soon."""


class MasterFailedError(UnreachableError):
    """Raised when the master fails internally, possibly because of the request's content."""


class RefusedByMasterError(Exception):
    """Raised when the master refuses a request as wrong; repeating the request is futile.

    Args:
        status: The HTTP status of the answer.
        text: The status and the answer's text.
        code: The code of the problem in the answer, None if it has none.
    """

    def __init__(self, status: int, text: str, code: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code

    @property
    def is_over(self) -> bool:
        """Whether the master has ended the attempt, so this runner has lost the attempt."""
        return (self.status, self.code) == _OVER

    @property
    def is_about_content(self) -> bool:
        """Whether the request's content is to blame, not its destination."""
        return self.status in _CONTENT_STATUSES


class _Problem(msgspec.Struct):
    """Fields of a problem answer needed to explain a refusal."""

    code: str | None = None
    detail: str | None = None


class MasterLink:
    """HTTP connection to the master, for a single thread.

    Address and token are read again after each failure, so that a master that comes back on another
    port is found.

    Args:
        read_address: Returns where the master is now.
    """

    def __init__(self, read_address: Callable[[], MasterAddress]) -> None:
        self._read_address = read_address
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""
        self._prefix = ""
        self._url = ""
        # HTTP status of the last answer.
        self._status = 0
        # TLS was not spoken to an address that broke off, and it does not want it.
        self._is_plain = False

    def another(self) -> "MasterLink":
        """Return a connection of its own to the same master, for another thread."""
        return MasterLink(self._read_address)

    @classmethod
    def of_home(cls, home: Path) -> "MasterLink":
        """Return the link to whichever master serves a home."""
        return cls(lambda: _address_in(home))

    @classmethod
    def of_attempt(cls, spec: AttemptSpec) -> "MasterLink":
        """Return the link to the attempt's master."""
        token = spec.token
        if spec.home is not None:
            home = Path(spec.home)
            return cls(lambda: _address_in(home, token))
        if spec.master is None:
            raise ValueError("An attempt must have `home` or `master`, but got neither.")
        path = Path(spec.master)
        return cls(lambda: _address_of(path, token))

    def post(self, path: str, body: bytes, timeout_s: float = _TIMEOUT_S) -> bytes:
        """Send JSON and return the answer's body.

        Raises:
            UnreachableError: There is no master, or it failed; worth trying again later.
            RefusedByMasterError: The master refused the request.
        """
        return self._request("POST", path, body, timeout_s)

    def get(self, path: str, timeout_s: float = _TIMEOUT_S) -> bytes:
        """Return the body of a resource; raises like `post`."""
        return self._request("GET", path, None, timeout_s, {})

    def get_piece(self, path: str, offset: int, size: int) -> bytes:
        """Return a piece of a resource, shorter at its end; raises like `post`."""
        wanted = {"Range": f"bytes={offset}-{offset + size - 1}"}
        try:
            content = self._request("GET", path, None, _TIMEOUT_S, wanted)
        except RefusedByMasterError as error:
            if error.status != _BEYOND_THE_END:
                raise
            return b""
        # A proxy that knows no ranges has sent the whole file.
        return content if self._status == _PARTIAL else content[offset : offset + size]

    def put(self, path: str, body: bytes | IO[bytes], headers: Mapping[str, str]) -> bytes:
        """Send bytes, or a file, and return the answer's body; raises like `post`.

        A file needs its Content-Length among the headers.
        """
        octets = {"Content-Type": "application/octet-stream"}
        return self._request("PUT", path, body, _TIMEOUT_S, octets | dict(headers))

    def delete(self, path: str) -> None:
        """Delete a resource; raises like `post`."""
        self._request("DELETE", path, None, _TIMEOUT_S)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | IO[bytes] | None,
        timeout_s: float,
        headers: Mapping[str, str] = _JSON,
    ) -> bytes:
        try:
            connection = self._connect(timeout_s)
            sent = {"Authorization": f"Bearer {self._token}"}
            if body is not None or method == "GET":
                sent.update(headers)
            connection.request(method, f"{self._prefix}/api/v1{path}", body, sent)
            response = connection.getresponse()
            content = response.read()
            self._status = response.status
        except _UNREACHABLE as error:
            opened = self._connection
            address = None if opened is None else (opened.host, opened.port)
            self.close()
            if (explained := self._explain(error, address)) is not None:
                raise UntrustedMasterError(explained) from error
            raise UnreachableError(str(error)) from error
        text = f"HTTP {response.status}: {_problem_text(content)}"
        if response.status == _FAILED_STATUS:
            # The server has closed it.
            self.close()
            raise MasterFailedError(text)
        if response.status == _UNAUTHORIZED:
            self.close()
            raise TokenRefusedError(text)
        if response.status >= 500 or response.status in (408, 429):
            self.close()
            raise UnreachableError(text)
        if response.status >= 400:
            raise RefusedByMasterError(response.status, text, _code_of(content))
        return content

    def _explain(self, error: BaseException, address: tuple[str, int] | None) -> str | None:
        """Return an explanation of a TLS problem, None if TLS is not the cause."""
        if (found := tls_error_of(error)) is not None:
            return explain_tls_error(found, self._url)
        broke_off = isinstance(error, http.client.RemoteDisconnected | ConnectionResetError)
        if not broke_off or address is None or self._is_plain or self._url.startswith("https:"):
            return None
        explained = explain_missing_tls(self._url, *address)
        self._is_plain = explained is None
        return explained

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._connection is None:
            address = self._read_address()
            self._token = address.token
            url = urlsplit(address.url)
            self._prefix = url.path.rstrip("/")
            self._url = address.url
            self._connection = _open(url.scheme, url.netloc, address.certificate)
        self._connection.timeout = timeout_s
        # `timeout` counts for new sockets only.
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        return self._connection


def _problem_text(content: bytes) -> str:
    """Return the words of a problem, or the beginning of any other answer."""
    try:
        detail = msgspec.json.decode(content, type=_Problem).detail
    except msgspec.DecodeError:
        detail = None
    return detail or content.decode(errors="replace")[:500]


def _code_of(content: bytes) -> str | None:
    try:
        return msgspec.json.decode(content, type=_Problem).code
    except msgspec.DecodeError:
        return None


def _open(scheme: str, place: str, certificate: str | None) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(place, context=client_tls(certificate))
    return http.client.HTTPConnection(place)


def _address_in(home: Path, token: str | None = None) -> MasterAddress:
    address: dict[str, Any] = json.loads(check_seal(read_regular(home / "master.json")))
    return MasterAddress(
        url=address["url"],
        token=token or read_secret(home / "token"),
        certificate=address.get("certificate"),
    )


def _address_of(file: Path, token: str | None) -> MasterAddress:
    address = msgspec.json.decode(check_seal(read_regular(file)), type=MasterAddress)
    return msgspec.structs.replace(address, token=token or address.token)


class MasterBackoff:
    """Growing pauses between attempts to reach the master."""

    def __init__(self, first_s: float = 0.1, longest_s: float = 2.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def reset(self) -> None:
        """Start again with the shortest pause."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        pause = self._next_s
        self._next_s = min(self._next_s * 1.6, self._longest_s)
        return pause


def encode(message: Any) -> bytes:
    """Return a message as JSON."""
    return msgspec.json.encode(message)


class ShippingLoop(ABC):
    """Loop shipping a single kind of data in its own thread, independent of other kinds.

    Args:
        name: The name of the request, for the runner's log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopping = threading.Event()
        self._has_doubts = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def ship_once(self) -> bool:
        """Send the pending data, at most a single request; return False if nothing is pending.

        Raises:
            UnreachableError: The master did not answer, or failed.
            RefusedByMasterError: The master refused the request.
        """

    @abstractmethod
    def forget_positions(self) -> None:
        """Forget the master's positions: after a failure the amount received is unknown."""

    def doubt_positions(self) -> None:
        """Make the thread query the master's positions again; callable from any thread."""
        self._has_doubts.set()

    def ship_rest(self) -> None:
        """Send everything pending; raises like `ship_once`."""
        while self.ship_once():
            pass

    def start(self) -> None:
        """Begin to send; an unreachable master and other trouble only delay."""
        self._thread = threading.Thread(target=self._run, name=f"ship-{self._name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the thread to end; a request in flight is completed first."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        backoff = MasterBackoff()
        trouble = ""
        while not self._stopping.is_set():
            try:
                if self._has_doubts.is_set():
                    self._has_doubts.clear()
                    self.forget_positions()
                has_shipped = self.ship_once()
                backoff.reset()
            except Exception as error:
                if isinstance(error, RefusedByMasterError) and error.is_over:
                    # `MasterFollower` hears it, too, and ends the attempt's processes.
                    logger.error("The %s are not wanted any more: %s", self._name, error)
                    return
                if isinstance(error, UnreachableError):
                    logger.debug("The master is away: %s", error)
                elif str(error) != trouble:
                    logger.exception("The %s cannot be sent now.", self._name)
                    trouble = str(error)
                self.forget_positions()
                self._stopping.wait(backoff.next_s())
                continue
            if not has_shipped:
                self._stopping.wait(_POLL_S)
