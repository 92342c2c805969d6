"""Requests to the API server of Kubernetes, in one namespace."""

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

from paceline.master.starters._starter_base import StarterError

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
    """A client for one namespace, which several threads may use.

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
        """Send a request; what is to be deleted may be gone already.

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
        """Send a request and return the response of urllib3, whose body comes bit by bit.

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
            # It would leave them to the garbage collector.
            pools = client.rest_client.pool_manager.pools
            for key in pools.keys():  # noqa: SIM118 - it cannot be iterated over
                pools[key].close()
            client.close()

    def _forget_login(self, status: int) -> None:
        if status == _UNAUTHORIZED:
            # What it has read from the file may be too old.
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
