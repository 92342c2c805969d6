"""Client of the Kubernetes API for one namespace, and a watch of its objects."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from paceline._cluster.master.starters.slurm_ssh_ray_starters import StarterError

if TYPE_CHECKING:
    import httpx2
    from lightkube.config.kubeconfig import SingleConfig

logger = logging.getLogger(__name__)


PODS, SECRETS = "api/v1/pods", "api/v1/secrets"


_FORBIDDEN = 403
_UNAUTHORIZED, _NOT_FOUND, _GONE, _TOO_MANY = 401, 404, 410, 429


_TIMEOUT_S = 30.0
# lightkube takes no later version of these programs' answers, in which a token has the same place.
_EXEC_VERSION = "client.authentication.k8s.io/v1beta1"


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

    A kind is named by its group, version and plural, such as `api/v1/pods`.

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
        self._http: httpx2.Client | None = None
        self._lock = threading.Lock()

    def call(
        self, method: str, kind: str, name: str = "", body: Any = None, **params: str
    ) -> dict[str, Any]:
        """Send a request and return the JSON of the answer; `params` are those of its URL.

        Deleting an already deleted object is no error.

        Raises:
            ApiError: The server cannot be reached, or refuses the request.
        """
        try:
            with self.stream(method, kind, params, name, body) as response:
                answer: dict[str, Any] = json.loads(response.read())
                return answer
        except ApiError as error:
            if error.status == _NOT_FOUND and method == "DELETE":
                return {}
            raise

    @contextmanager
    def stream(
        self,
        method: str,
        kind: str,
        params: dict[str, str],
        name: str = "",
        body: Any = None,
        timeout: "httpx2.Timeout | float" = _TIMEOUT_S,
    ) -> "Iterator[httpx2.Response]":
        """Send a request; gives the answer with its body unread.

        Raises:
            ApiError: The server cannot be reached, refuses the request, or breaks off its answer.
        """
        version, _, plural = kind.rpartition("/")
        path = f"{version}/namespaces/{self._namespace}/{plural}/{name}".rstrip("/")
        patch = "merge-patch+" if method == "PATCH" else ""
        try:
            with self._connected().stream(
                method,
                path,
                params=params,
                content=None if body is None else json.dumps(body),
                headers={"Content-Type": f"application/{patch}json"},
                timeout=timeout,
            ) as response:
                if not response.is_success:
                    self._raise_refusal(response)
                yield response
        except ApiError:
            raise
        except Exception as error:
            # The client lets errors of connections, of files and of its own checks through.
            raise ApiError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the connections; the next request makes others."""
        with self._lock:
            http, self._http = self._http, None
        if http is not None:
            http.close()

    def _raise_refusal(self, response: "httpx2.Response") -> None:
        status, text = response.status_code, response.read()
        if status == _UNAUTHORIZED:
            # Credentials read from the file may have expired: a new client reads them again.
            self.close()
        try:
            message = str(json.loads(text)["message"])
        except (TypeError, ValueError, KeyError):
            message = response.reason_phrase
        raise ApiError(message, status)

    def _connected(self) -> "httpx2.Client":
        with self._lock:
            if self._http is None:
                from lightkube.config.client_adapter import Client, ConnectionParams

                self._http = Client(self._config(), ConnectionParams())
            return self._http

    def _config(self) -> "SingleConfig":
        from lightkube.config.kubeconfig import DEFAULT_KUBECONFIG, KubeConfig
        from lightkube.config.models import NameValue, User

        if self._kubeconfig is None and self._context is None:
            found = KubeConfig.from_env()
        else:
            usual = os.environ.get("KUBECONFIG", DEFAULT_KUBECONFIG)
            found = KubeConfig.from_file(self._kubeconfig or usual)
        config = found.get(self._context)
        assert config is not None, "without a default there is an error instead"
        user = config.user or User()
        if user.exec is not None:
            wanted = {"kind": "ExecCredential", "apiVersion": user.exec.apiVersion}
            asked = json.dumps(wanted | {"spec": {"interactive": False}})
            user.exec.env = [*(user.exec.env or []), NameValue("KUBERNETES_EXEC_INFO", asked)]
            user.exec.apiVersion = _EXEC_VERSION
        return config._replace(user=user)


def _lines_of(response: "httpx2.Response") -> Iterator[bytes]:
    """Yield the complete lines of an answer as they come."""
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


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

    Whatever ends a stream, the objects are listed again: a change that a stream lacked is
    missed until then only. The list is at least as new as the last change in the stream.

    Args:
        api: How the cluster is reached.
        kind: Their kind, see `KubernetesApi`.
        params: The parameters of their list.
    """

    def __init__(self, api: KubernetesApi, kind: str, params: dict[str, str]) -> None:
        self._api = api
        self._kind = kind
        self._plural = kind.rpartition("/")[2]
        self._params = params
        self._objects: dict[str, dict[str, Any]] = {}
        # Version 0 means the server's cached list; without one it asks its database.
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
        self._response: httpx2.Response | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{self._plural}", daemon=True)

    def objects(self) -> list[dict[str, Any]]:
        """Return the objects as they are now. If a stream was cut, wait for the next list.

        Raises:
            StarterError: The server refuses the list, or did not send it in time.
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
                # A list that began before this call may be refused for a reason of that time.
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
            # Wakes the thread out of its read.
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
            # Streams that ended at once lead to a pause.
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
        found = self._api.call("GET", self._kind, resourceVersion=version, **self._params)
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
        import httpx2

        params = {
            "resourceVersion": self._version,
            "watch": "true",
            "timeoutSeconds": str(_WATCH_S),
            **self._params,
        }
        timeout = httpx2.Timeout(_SILENCE_S, read=_WATCH_S + _SILENCE_S)
        try:
            with self._api.stream("GET", self._kind, params, timeout=timeout) as response:
                with self._changed:
                    self._response = response
                    if self._is_closing:
                        _shut(response)
                for line in _lines_of(response):
                    self._take_line(line)
        except ApiError as error:
            if error.status != _FORBIDDEN:
                raise
            # A role without `watch` may still be able to list.
            self._may_watch = False
            logger.warning("%s are listed again and again. %s", self._plural, error)
        finally:
            self._response = None

    def _take_line(self, line: bytes) -> None:
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


def _shut(response: "httpx2.Response | None") -> None:
    """Wake a thread waiting for an answer by shutting the answer's socket."""
    if response is not None:
        with suppress(OSError):
            # Shutdown instead of close: closing would not wake a thread blocked in a read.
            taken = response.extensions["network_stream"].get_extra_info("socket")
            taken.shutdown(socket.SHUT_RDWR)
