"""Requests to the master: authorisation, errors, retries and paging."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from paceline._network_interfaces import LOOPBACK_HOSTS
from paceline.client._errors import ApiError, MasterUnreachableError
from paceline.client._master_location import START_COMMAND, MasterAccess, find_master

if TYPE_CHECKING:
    import ssl

    import httpx

Model = TypeVar("Model")

_IDEMPOTENT = frozenset({"GET", "PUT", "DELETE"})
_UNAUTHORIZED = 401
_PASSING_STATUSES = frozenset({502, 503, 504})
_ATTEMPTS = 5
_BACKOFF_S = 0.5
_TIMEOUT_S = 60.0
_PAGE_SIZE = 200


class HttpSession:
    """One connection pool to one master.

    The address is looked up at the first request and again when nothing answers there, so that a
    master which came back on another port is found.
    """

    def __init__(
        self, master: str | None = None, token: str | None = None, ca_file: str | None = None
    ) -> None:
        self._master = master
        self._token = token
        self._ca_file = ca_file
        self._address: MasterAccess | None = None
        self._http: httpx.Client | None = None

    def __enter__(self) -> "HttpSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        if self._http is not None:
            self._http.close()
        self._http = self._address = None

    @property
    def url(self) -> str:
        """The master's URL.

        Raises:
            MasterUnreachableError: No master is known.
        """
        if self._address is None:
            self._address = find_master(self._master, self._token)
        return self._address.url

    def http(self) -> "httpx.Client":
        """Return the connection pool; opened at the first call."""
        if self._http is None:
            import httpx

            url = self.url
            assert self._address is not None
            # A proxy that the environment names cannot reach this machine's loopback.
            is_local = urlsplit(url).hostname in LOOPBACK_HOSTS
            self._http = httpx.Client(
                base_url=f"{url}/api/v1/",
                headers={"Authorization": f"Bearer {self._address.token}"},
                timeout=_TIMEOUT_S,
                trust_env=not is_local,
                # Building the certificate store costs 20 ms that plain HTTP has no use for.
                verify=self._tls(url),
            )
        return self._http

    def _tls(self, url: str) -> "ssl.SSLContext | bool":
        if not url.startswith("https:"):
            return False
        from paceline._certificates import client_tls

        assert self._address is not None
        try:
            return client_tls(self._address.certificate, self._ca_file)
        except ValueError as error:
            raise MasterUnreachableError(str(error)) from error

    def get(self, path: str, model: type[Model], **params: Any) -> Model:
        """Return the decoded answer to a GET; parameters that are None are left out."""
        return self.call("GET", path, model, params=params)

    def call(
        self,
        method: str,
        path: str,
        model: type[Model],
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
    ) -> Model:
        """Send a request and return its decoded answer; `body` is a message.

        Raises:
            ApiError: The master refused the request.
            MasterUnreachableError: No master answers.
        """
        from pydantic import TypeAdapter

        content = None if body is None else body.model_dump_json().encode()
        response = self.send(method, path, params=params, content=content)
        return TypeAdapter(model).validate_json(response.content)

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        content: "bytes | Path | None" = None,
    ) -> "httpx.Response":
        """Send a request and return the answer, which is a success.

        Requests that may be repeated are, when the connection breaks or the master is overloaded.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            is_last = attempt == _ATTEMPTS or method not in _IDEMPOTENT
            try:
                response = self._send_once(method, path, params, content)
            except MasterUnreachableError as error:
                if is_last or not isinstance(error.__cause__, _broken_connection()):
                    raise
            else:
                if response.status_code == _UNAUTHORIZED and self._has_moved(self._address):
                    # The home has another token, or another master another address.
                    self._reconnect()
                    response = self._send_once(method, path, params, content)
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
        import httpx

        received = 0
        try:
            with self.http().stream("GET", path) as response, target.open("wb") as file:
                if not response.is_success:
                    response.read()
                    raise_for_problem(response)
                for chunk in response.iter_bytes(1024 * 1024):
                    received += file.write(chunk)
        except httpx.TransportError as error:
            raise MasterUnreachableError(
                f"The master at {self.url} broke off the transfer of {path!r} ({error})."
                " Hint: try again; see `paceline status`."
            ) from error
        return received

    def pages(
        self, path: str, model: type[Model], *, limit: int | None = None, **params: Any
    ) -> Iterator[Model]:
        """Yield the items of a paged list, at most `limit`."""
        from paceline.messages.base import Page

        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = _PAGE_SIZE if left is None else min(left, _PAGE_SIZE)
            page = self.get(path, Page[model], limit=size, cursor=cursor, **params)  # type: ignore[valid-type]
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return
            left = None if left is None else left - len(page.items)

    def _send_once(
        self,
        method: str,
        path: str,
        params: Mapping[str, Any] | None,
        content: "bytes | Path | None",
    ) -> "httpx.Response":
        import httpx

        known = {key: value for key, value in (params or {}).items() if value is not None}
        headers = {"Content-Type": "application/json"} if isinstance(content, bytes) else {}
        try:
            if isinstance(content, Path):
                with content.open("rb") as file:
                    return self.http().request(method, path, params=known, content=file)
            return self.http().request(method, path, params=known, content=content, headers=headers)
        except httpx.ConnectError as error:
            url, self_was = self.url, self._address
            self.close()
            if self._has_moved(self_was):
                return self._send_once(method, path, params, content)
            if explained := _explain_tls(error, url):
                raise MasterUnreachableError(explained) from error
            raise MasterUnreachableError(
                f"A master must answer at {url}, but none does ({error})."
                f" Hint: start one with `{START_COMMAND}`."
            ) from error
        except httpx.TransportError as error:
            url = self.url
            self.close()
            if explained := _explain_tls(error, url):
                raise MasterUnreachableError(explained) from None
            raise MasterUnreachableError(
                f"The master at {url} broke off its answer ({type(error).__name__}: {error})."
                " Hint: see `master.log` in its home, and `paceline status`."
            ) from error

    def _reconnect(self) -> None:
        """Open new connections, to the address that was found last."""
        if self._http is not None:
            self._http.close()
        self._http = None

    def _has_moved(self, old: MasterAccess | None) -> bool:
        try:
            self._address = find_master(self._master, self._token)
        except MasterUnreachableError:
            return False
        return self._address != old


def _explain_tls(error: "httpx.TransportError", url: str) -> str | None:
    """Return what is wrong with TLS, if that is why a request failed."""
    import httpx

    from paceline._certificates import explain_missing_tls, explain_tls_error, tls_error_of

    if (found := tls_error_of(error)) is not None:
        return explain_tls_error(found, url)
    broke_off = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
    if not broke_off or url.startswith("https:"):
        return None
    place = urlsplit(url)
    return explain_missing_tls(url, place.hostname, place.port)


def raise_for_problem(response: "httpx.Response") -> None:
    """Raise the error that an answer holds.

    Raises:
        ApiError: The answer is not a success.
    """
    if response.is_success:
        return
    from pydantic import ValidationError

    from paceline.messages.base import Problem

    try:
        problem = Problem.model_validate_json(response.content)
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
    """Return what a connection that was there and broke raises."""
    import httpx

    return (httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError)
