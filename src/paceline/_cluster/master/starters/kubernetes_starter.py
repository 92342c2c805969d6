"""Starter of runners as pods of a Kubernetes cluster, by JobSets, and a watch of its objects."""

import json
import logging
import os
import re
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from paceline._cluster.master.starters.slurm_ssh_ray_starters import (
    RunnerOrder,
    Starter,
    StarterError,
)
from paceline.config._fields_and_problems import Section

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


_JOB_SET_VERSION = "jobset.x-k8s.io/v1alpha2"
_JOB_SETS = f"apis/{_JOB_SET_VERSION}/jobsets"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
_CLUSTER_LABEL = "paceline/cluster"
_POOL_ANNOTATION = "paceline/pool"
_RUNNERS_ANNOTATION = "paceline/runners"
# Mount path of the runners' tokens in the pods.
_SECRET_PATH = "/etc/paceline-runner"  # noqa: S105 - a path
# How long a JobSet that is over can be looked at.
_KEPT_S = 600
# Exit codes from here on mean an end by a signal.
_SIGNAL_CODES = 128

_Word = Annotated[str, Field(min_length=1, pattern=r"^\S+$")]
_Amount = Annotated[str | int, Field(union_mode="left_to_right")]


class KubernetesOptions(Section):
    """Fields of `options`.

    Attributes:
        image: The image of the pods, which has Paceline.
        queue: The local queue of Kueue; None starts without Kueue.
        namespace: The namespace of all objects.
        kubeconfig: The file that says how the cluster is reached; by default the usual one, or
            else the pod's own, if the master runs in a pod.
        context: A context of that file.
        service_account: The service account of the pods.
        resources: The requests and limits of each pod, such as `{nvidia.com/gpu: 4}`.
        node_selector: Labels that a node must have.
        tolerations: Taints of nodes that do not matter, as Kubernetes takes them.
        grace_period: Seconds between SIGTERM and SIGKILL, in which trials store checkpoints.
    """

    image: _Word
    queue: _Word | None = None
    namespace: _Word = "default"
    kubeconfig: str | None = None
    context: _Word | None = None
    service_account: _Word | None = None
    resources: dict[_Word, _Amount] = {}
    node_selector: dict[_Word, str] = {}
    tolerations: list[dict[str, Any]] = []
    grace_period: Annotated[int, Field(ge=1, le=86_400)] = 120


class KubernetesStarter(Starter):
    """Kubernetes starter: a pod for each runner, a JobSet for runners starting together.

    A JobSet has one job, whose pods are numbered. The tokens are in a Secret of the same name,
    which belongs to the JobSet, so that both are deleted together.
    """

    Options = KubernetesOptions
    module = "lightkube"
    options: KubernetesOptions

    def __init__(self, pool: str, cluster_id: str, directory: str, options: Section) -> None:
        super().__init__(pool, cluster_id, directory, options)
        assert isinstance(options, KubernetesOptions)
        self._api = KubernetesApi(options.namespace, options.kubeconfig, options.context)
        self._ours = {"labelSelector": f"{_CLUSTER_LABEL}={cluster_id}"}
        self._pods = WatchedObjects(self._api, PODS, self._ours)
        self._job_sets = WatchedObjects(self._api, _JOB_SETS, self._ours)
        self._told: set[tuple[str, str]] = set()

    def start(self, order: RunnerOrder) -> None:
        """Create a JobSet with a single pod."""
        self.start_group([order])

    def start_group(self, orders: Sequence[RunnerOrder]) -> None:
        """Create the Secret of the tokens, and a JobSet with a pod for each."""
        job_set = self.job_set(orders)
        name = job_set["metadata"]["name"]
        self._api.call("POST", SECRETS, body=self.secret(name, orders))
        try:
            made = self._api.call("POST", _JOB_SETS, body=job_set)
        except StarterError:
            with suppress(StarterError):
                self._api.call("DELETE", SECRETS, name)
            raise
        # Kubernetes removes the Secret together with its owner.
        owner = {
            "apiVersion": job_set["apiVersion"],
            "kind": job_set["kind"],
            "name": name,
            "uid": made["metadata"]["uid"],
        }
        self._api.call("PATCH", SECRETS, name, {"metadata": {"ownerReferences": [owner]}})

    def log_of(self, name: str) -> str:
        """Return the command showing the output of the pods."""
        label = self._ours["labelSelector"]
        return f"`kubectl -n {self.options.namespace} logs --prefix -l {label}`"

    def runners(self) -> dict[str, bool]:
        """Return this pool's runners with pods not yet ended.

        A pod may end after its JobSet, as it gets time to let its attempts leave.
        """
        running, over, failed = set(), set(), {}
        for pod in self._known(self._pods):
            number = int(pod["metadata"]["annotations"].get(_INDEX_ANNOTATION, 0))
            name, phase = _runners_of(pod)[number], pod["status"].get("phase")
            if phase in ("Succeeded", "Failed"):
                over.add(name)
                failed[name] = _pod_failure(pod)
            elif phase != "Pending":
                running.add(name)
            self._tell_why_it_waits(name, pod)
        self._raise_new_failures(failed)
        found = dict.fromkeys(running, True)
        for job_set in self._known(self._job_sets):
            if not (_is_over(job_set) or "deletionTimestamp" in job_set["metadata"]):
                names = _runners_of(job_set)
                found.update(dict.fromkeys(set(names) - over, not running.isdisjoint(names)))
        return found

    def cancel(self, name: str) -> None:
        """Delete the JobSet of a waiting runner."""
        for job_set in self._known(self._job_sets):
            if name in _runners_of(job_set):
                # Fresh list of pods: the watch may not have reported a running pod yet.
                pods = self._api.call("GET", PODS, **self._ours)["items"]
                ours = [pod for pod in pods if _runners_of(pod) == _runners_of(job_set)]
                if any(pod["status"].get("phase") == "Running" for pod in ours):
                    return
                made = job_set["metadata"]["name"]
                self._api.call("DELETE", _JOB_SETS, made, propagationPolicy="Background")
                self._api.call("DELETE", SECRETS, made)

    def close(self) -> None:
        """Stop watching, and close the connections."""
        for watched in (self._pods, self._job_sets):
            watched.close()
        self._api.close()

    # ---- objects -------------------------------------------------------------------------

    def job_set(self, orders: Sequence[RunnerOrder]) -> dict[str, Any]:
        """Return the JobSet of some runners, without tokens."""
        options, names = self.options, [order.name for order in orders]
        labels = {"app.kubernetes.io/managed-by": "paceline", _CLUSTER_LABEL: self.cluster_id}
        notes = {_POOL_ANNOTATION: self.pool, _RUNNERS_ANNOTATION: " ".join(names)}
        pod = {
            "metadata": {"labels": labels, "annotations": notes},
            "spec": self._pod(orders[0], names),
        }
        spec: dict[str, Any] = {
            "replicatedJobs": [
                {
                    "name": "runner",
                    "replicas": 1,
                    "template": {
                        "metadata": {"labels": labels},
                        "spec": _indexed_job(len(names), pod),
                    },
                }
            ],
            "network": {"enableDNSHostnames": False},
            "ttlSecondsAfterFinished": _KEPT_S,
        }
        if options.queue is not None:
            # Kueue starts it, and suspends it again to preempt.
            spec["suspend"] = True
            labels = {**labels, _QUEUE_LABEL: options.queue}
        metadata = {
            "name": _object_name(names[0]),
            "namespace": options.namespace,
            "labels": labels,
            "annotations": notes,
        }
        return {
            "apiVersion": _JOB_SET_VERSION,
            "kind": "JobSet",
            "metadata": metadata,
            "spec": spec,
        }

    def secret(self, name: str, orders: Sequence[RunnerOrder]) -> dict[str, Any]:
        """Return the Secret with the tokens and the keys of some runners."""
        texts = {f"{order.name}.token": order.token for order in orders}
        # Kueue ends a pod and starts it again, with another directory.
        texts |= {f"{order.name}.key": order.node_key for order in orders}
        if orders[0].certificate is not None:
            texts["master.pem"] = orders[0].certificate
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": name,
                "namespace": self.options.namespace,
                "labels": {_CLUSTER_LABEL: self.cluster_id},
            },
            "type": "Opaque",
            "stringData": texts,
        }

    def _pod(self, order: RunnerOrder, names: Sequence[str]) -> dict[str, Any]:
        options = self.options
        # The home directory in an image may not be there, or not be writable.
        place = re.sub("^~/*", "/", self.directory).rstrip("/")
        amounts = {name: str(amount) for name, amount in options.resources.items()}
        container = {
            "name": "runner",
            "image": options.image,
            "command": ["sh", "-c", _pod_script(order, place), "runner", *names],
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            ],
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {"requests": amounts, "limits": amounts} if amounts else {},
            "volumeMounts": [
                {"name": "tokens", "mountPath": _SECRET_PATH, "readOnly": True},
                {"name": "files", "mountPath": place},
                {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - of the pod
            ],
        }
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": options.grace_period,
            # Shared process namespace: the pod's first process adopts orphaned processes.
            "shareProcessNamespace": True,
            "serviceAccountName": options.service_account,
            # Jobs get no access to the cluster that nobody has asked for.
            "automountServiceAccountToken": options.service_account is not None,
            "nodeSelector": options.node_selector,
            "tolerations": options.tolerations,
            "containers": [container],
            "volumes": [
                {"name": "tokens", "secret": {"secretName": _object_name(names[0])}},
                {"name": "files", "emptyDir": {}},
                # The default of 64 MB is too little for the workers of data loaders.
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            ],
        }
        return {name: value for name, value in pod.items() if value not in (None, {}, [])}

    def _known(self, watched: WatchedObjects) -> list[dict[str, Any]]:
        """Return the objects of this pool."""
        return [
            one
            for one in watched.objects()
            if one["metadata"]["annotations"].get(_POOL_ANNOTATION) == self.pool
        ]

    def _tell_why_it_waits(self, name: str, pod: dict[str, Any]) -> None:
        """Log once why a pod cannot start, for example because of an unavailable image."""
        for container in pod["status"].get("containerStatuses") or []:
            waiting = container["state"].get("waiting") or {}
            reason = waiting.get("reason")
            if reason not in (None, "ContainerCreating") and (name, reason) not in self._told:
                self._told.add((name, reason))
                logger.warning(
                    "Pool %s: the pod of the runner %s waits (%s). %s",
                    self.pool, name, reason, waiting.get("message") or "",
                )  # fmt: skip

    def _raise_new_failures(self, failed: dict[str, str | None]) -> None:
        new = [
            f"The runner {name} failed. {why}"
            for name, why in failed.items()
            if why is not None and (name, why) not in self._told
        ]
        self._told.update((name, why) for name, why in failed.items() if why is not None)
        if new:
            raise StarterError(" ".join(new))


def _indexed_job(num_pods: int, pod: dict[str, Any]) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        # The master asks for other pods, with other tokens; the pods of the group continue.
        "backoffLimitPerIndex": 0,
        "template": pod,
    }


def _pod_script(order: RunnerOrder, place: str) -> str:
    """Return a pod's shell script, giving its runner a directory below a place."""
    script = (
        'shift "$JOB_COMPLETION_INDEX"; n=$1;'
        f' umask 077; d={shlex.quote(place)}/$n; mkdir -p "$d"'
        f' && cp {_SECRET_PATH}/"$n.token" "$d/token"'
        f' && cp {_SECRET_PATH}/"$n.key" "$d/node_key"'
    )
    if order.certificate is not None:
        script += f' && cp {_SECRET_PATH}/master.pem "$d/master.pem"'
    runner = order.shell('"$n"', '"$d"', '"$d/token"')
    return f'{script} && exec {runner} --address "$POD_IP"'


def _runners_of(made: dict[str, Any]) -> list[str]:
    names: str = made["metadata"]["annotations"][_RUNNERS_ANNOTATION]
    return names.split()


def _is_over(job_set: dict[str, Any]) -> bool:
    conditions = (job_set.get("status") or {}).get("conditions") or []
    return any(
        one["type"] in ("Completed", "Failed") and one["status"] == "True" for one in conditions
    )


def _pod_failure(pod: dict[str, Any]) -> str | None:
    """Return the failure of a pod's runner; None without failure or after a signal."""
    for container in pod["status"].get("containerStatuses") or []:
        ended = container["state"].get("terminated") or {}
        code = ended.get("exitCode", 0)
        if 0 < code < _SIGNAL_CODES:
            lines = (ended.get("message") or "it printed nothing").strip().splitlines()
            return f"It ended with exit code {code}: {lines[-1]}"
    return None


def _object_name(runner: str) -> str:
    """Return the name of a JobSet; the names of its pods may have 63 characters."""
    return "paceline-" + re.sub("[^a-z0-9]+", "-", runner.lower())[-30:].strip("-")
