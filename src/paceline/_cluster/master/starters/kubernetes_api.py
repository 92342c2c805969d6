"""Objects of a kind in a Kubernetes cluster, kept up to date by a watch stream."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from paceline._cluster.master.starters.starter_base import StarterError

FORBIDDEN = 403
_UNAUTHORIZED, _NOT_FOUND, _GONE, _TOO_MANY = 401, 404, 410, 429
_TIMEOUT_S = 30.0


class ApiError(StarterError):
    """Raised when a request fails; the status is None if there was no answer."""

    def __init__(self, text: str, status: int | None = None) -> None:
        told = text if status is None else f"{text} ({status})"
        super().__init__(f"Kubernetes: {told}")
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether the server will give the same answer until somebody changes something."""
        return 400 <= (self.status or 0) < 500 and self.status not in (_GONE, _TOO_MANY)


class KubernetesApi:
    """Client for a single namespace, usable by several threads.

    Args:
        namespace: The namespace of all requests.
        kubeconfig: The file that says how the cluster is reached; None is the usual one, or the
            service account of the pod that this process runs in.
        context: A context of that file.
    """

    def __init__(self, namespace: str, kubeconfig: str | None, context: str | None) -> None:
        self._namespace = namespace
        self._kubeconfig = kubeconfig
        self._context = context
        self._client: Any = None
        self._lock = threading.Lock()

    def call(self, api: str, method: str, body: Any = None, **arguments: Any) -> Any:
        """Send a request; deleting an already deleted object is no error.

        Raises:
            ApiError: The server cannot be reached, or refuses the request.
        """
        from kubernetes import client

        if body is not None:
            arguments["body"] = body
        arguments.setdefault("_request_timeout", _TIMEOUT_S)
        try:
            call = getattr(getattr(client, api)(self._connected()), method)
            return call(namespace=self._namespace, **arguments)
        except client.ApiException as error:
            if error.status == _NOT_FOUND and method.startswith("delete"):
                return None
            self._forget_login(error.status)
            raise ApiError(_message(error.body) or error.reason, error.status) from error
        except Exception as error:
            # The client lets errors of urllib3, of files and of its own checks through.
            raise ApiError(f"{type(error).__name__}: {error}") from error

    def stream(self, api: str, method: str, **arguments: Any) -> Any:
        """Send a request and return the urllib3 response with its body unread, for streaming.

        Raises:
            ApiError: The server cannot be reached, or refuses the request.
        """
        response = self.call(api, method, _preload_content=False, **arguments)
        if response.status != 200:
            body = response.data
            response.release_conn()
            self._forget_login(response.status)
            raise ApiError(_message(body) or response.reason, response.status)
        return response

    def read(self, api: str, method: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the JSON of the answer, not the classes of the client.

        Raises:
            ApiError: The server cannot be reached, or refuses the request.
        """
        response = self.stream(api, method, **arguments)
        try:
            answer: dict[str, Any] = json.loads(response.data)
        except Exception as error:
            raise ApiError(f"{type(error).__name__}: {error}") from error
        finally:
            response.release_conn()
        return answer

    def close(self) -> None:
        """Close the connections; the next request makes others."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            # Pools closed here: the client would leave them to the garbage collector.
            pools = client.rest_client.pool_manager.pools
            for key in pools.keys():  # noqa: SIM118 - it cannot be iterated over
                pools[key].close()
            client.close()

    def _forget_login(self, status: int) -> None:
        if status == _UNAUTHORIZED:
            # Credentials read from the file may have expired: a new client reads them again.
            self.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                from kubernetes import client, config

                settings = client.Configuration()
                if self._kubeconfig is None and self._context is None and _is_in_pod():
                    config.load_incluster_config(client_configuration=settings)
                else:
                    config.load_kube_config(
                        config_file=self._kubeconfig,
                        context=self._context,
                        client_configuration=settings,
                    )
                self._client = client.ApiClient(settings)
            return self._client


def lines_of_kubernetes(response: Any) -> Iterator[bytes]:
    """Yield the lines of a response as they come.

    Raises:
        ApiError: The response was cut.
    """
    rest = b""
    try:
        for part in response.stream(amt=None, decode_content=False):
            *lines, rest = (rest + part).split(b"\n")
            yield from lines
    except Exception as error:
        raise ApiError(f"{type(error).__name__}: {error}") from error
    if rest:
        raise ApiError("The answer ended in the middle of a line.")


def _is_in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _message(body: Any) -> str | None:
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return None


logger = logging.getLogger(__name__)

# A stream is ended after this time, and the objects are listed anew.
_WATCH_S = 60
# How much longer a stream may be silent before its connection counts as lost.
_SILENCE_S = 15.0
# After rounds that were short: no pause after the first, then from the one time to the other.
_SHORT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# How long a reader waits for objects that are up to date.
_WAIT_S = 10.0
_CLOSE_S = 10.0


class WatchedObjects:
    """Thread listing objects, then following their changes in a stream, again and again.

    Whatever ends a stream, the objects are listed again: a change that a stream did not tell is
    missed until then only. The list is at least as new as the last change that was told.

    Args:
        api: How the cluster is reached.
        plural: The name of the kind, for messages.
        interface: The class of the client for these objects.
        method: Its method that lists them.
        arguments: What this method gets.
    """

    def __init__(
        self,
        api: KubernetesApi,
        plural: str,
        interface: str,
        method: str,
        arguments: Mapping[str, Any],
    ) -> None:
        self._api = api
        self._plural = plural
        self._interface = interface
        self._method = method
        self._arguments = dict(arguments)
        self._objects: dict[str, dict[str, Any]] = {}
        # Version 0 is what the server has at hand; without one it asks its database.
        self._version = "0"
        self._may_watch = True
        self._changed = threading.Condition()
        self._num_lists = 0
        self._is_current = False
        self._is_wanted = False
        self._is_closing = False
        self._error: ApiError | None = None
        # The latest error since the objects were listed.
        self._trouble: ApiError | None = None
        self._response: Any = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{plural}", daemon=True)

    def objects(self) -> list[dict[str, Any]]:
        """Return the objects as they are now. If a stream was cut, wait for the next list.

        Raises:
            StarterError: The server refuses to tell them, or did not tell them in time.
        """
        with self._changed:
            if self._thread.ident is None:
                self._thread.start()
            if not self._is_current:
                # New attempt for each call: a refused list may be allowed by now.
                self._is_wanted, self._error = True, None
                self._changed.notify_all()
            num_lists = self._num_lists

            def is_known() -> bool:
                return self._is_current or self._num_lists > num_lists

            def is_refused() -> bool:
                # A list that began before this call may be refused for what was true then.
                is_refusal = self._error is not None and self._error.is_refusal
                return is_refusal and not self._is_wanted

            self._changed.wait_for(lambda: is_known() or is_refused() or self._is_closing, _WAIT_S)
            if is_known():
                return list(self._objects.values())
            why = self._error or self._trouble or f"Kubernetes: no list of {self._plural} in time"
            raise StarterError(str(why))

    def close(self) -> None:
        """Stop."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            _shut(self._response)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        num_short = 0
        while not self._is_closing:
            began = time.monotonic()
            try:
                self._list()
                self._watch()
                error = None
            except ApiError as raised:
                error = raised
                logger.debug("Watching %s: %s", self._plural, error)
            except Exception as raised:
                error = ApiError(repr(raised))
                logger.exception("Watching %s failed.", self._plural)
            with self._changed:
                self._is_current, self._error = False, error
                self._trouble = error or self._trouble
                self._changed.notify_all()
            num_short = 0 if time.monotonic() - began > _SHORT_S else num_short + 1
            if num_short > 1:
                self._pause(min(_FIRST_PAUSE_S * 2 ** min(num_short - 2, 10), _LONGEST_PAUSE_S))

    def _pause(self, pause_s: float) -> None:
        """Wait, but not while somebody waits for the objects."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_wanted or self._is_closing, pause_s)

    def _list(self) -> None:
        # Empty version after a failure: the next list then comes from the server's database.
        version, self._version = self._version, ""
        with self._changed:
            self._is_wanted, self._error = False, None
        found = self._api.read(
            self._interface, self._method, resource_version=version, **self._arguments
        )
        self._version = found["metadata"]["resourceVersion"]
        with self._changed:
            self._objects = {one["metadata"]["name"]: one for one in found["items"]}
            self._num_lists += 1
            self._is_current, self._error, self._trouble = True, None, None
            self._changed.notify_all()

    def _watch(self) -> None:
        """Take changes until the stream ends."""
        if not self._may_watch:
            return
        try:
            response = self._api.stream(
                self._interface,
                self._method,
                resource_version=self._version,
                watch=True,
                timeout_seconds=_WATCH_S,
                _request_timeout=(_SILENCE_S, _WATCH_S + _SILENCE_S),
                **self._arguments,
            )
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            self._may_watch = False
            logger.warning("%s are listed again and again. %s", self._plural, error)
            return
        with self._changed:
            self._response = response
            if self._is_closing:
                _shut(response)
        try:
            for line in lines_of_kubernetes(response):
                self._take(line)
        finally:
            self._response = None
            response.close()
            response.release_conn()

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            kind, changed = event["type"], event["object"]
            if kind == "ERROR":
                raise ApiError(changed.get("message") or "The stream failed.", changed.get("code"))
            name, version = changed["metadata"]["name"], changed["metadata"]["resourceVersion"]
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError(f"A change cannot be read: {error!r}") from error
        with self._changed:
            self._version = version
            if kind == "DELETED":
                self._objects.pop(name, None)
            else:
                self._objects[name] = changed


def _shut(response: Any) -> None:
    """Wake a thread waiting for a response by shutting the response's socket."""
    taken = getattr(getattr(response, "connection", None), "sock", None)
    if taken is not None:
        with suppress(OSError):
            # Shutdown instead of close: closing would not wake a thread blocked in a read.
            taken.shutdown(socket.SHUT_RDWR)
