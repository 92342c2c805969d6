"""Start runners as pods of a Kubernetes cluster, by JobSets that Kueue may admit."""

import json
import logging
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field

from paceline.config import Section
from paceline.master.starters._starter_base import RunnerOrder, Starter, StarterError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_JOB_SETS = ("jobset.x-k8s.io", "v1alpha2")
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
_CLUSTER_LABEL = "paceline/cluster"
_POOL_ANNOTATION = "paceline/pool"
_RUNNERS_ANNOTATION = "paceline/runners"
# Where the pods find their tokens.
_SECRET_PATH = "/etc/paceline-runner"  # noqa: S105 - a path
_UNAUTHORIZED, _NOT_FOUND = 401, 404
# How long a JobSet that is over can be looked at.
_KEPT_S = 600
# From this exit code on, a signal ended the process.
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
            else that of the pod that the master runs in.
        context: A context of that file.
        service_account: The service account of the pods.
        resources: What each pod requests and is limited to, such as `{nvidia.com/gpu: 4}`.
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
    """One pod for each runner, in one JobSet for those that start together.

    A JobSet has one job, whose pods are numbered. The tokens are in a Secret of the same name,
    which belongs to the JobSet, so that both are deleted together.
    """

    Options = KubernetesOptions
    module = "kubernetes"
    options: KubernetesOptions

    def __init__(self, pool: str, cluster_id: str, directory: str, options: Section) -> None:
        super().__init__(pool, cluster_id, directory, options)
        self._client: Any = None
        self._told: set[tuple[str, str]] = set()

    def start(self, order: RunnerOrder) -> None:
        """Create a JobSet of one pod."""
        self.start_group([order])

    def start_group(self, orders: Sequence[RunnerOrder]) -> None:
        """Create the Secret of the tokens, and a JobSet with a pod for each."""
        job_set = self.job_set(orders)
        name = job_set["metadata"]["name"]
        self._call("CoreV1Api", "create_namespaced_secret", self.secret(name, orders))
        try:
            made = self._call_job_sets("create", job_set)
        except StarterError:
            with suppress(StarterError):
                self._call("CoreV1Api", "delete_namespaced_secret", name=name)
            raise
        owner = {
            "apiVersion": job_set["apiVersion"],
            "kind": job_set["kind"],
            "name": name,
            "uid": made["metadata"]["uid"],
        }
        self._call(
            "CoreV1Api",
            "patch_namespaced_secret",
            {"metadata": {"ownerReferences": [owner]}},
            name=name,
        )

    def runners(self) -> dict[str, bool]:
        """Return the runners of this pool whose pods have not ended.

        A pod may end after its JobSet, as it gets time to let its attempts leave.
        """
        running, over, failed = set(), set(), {}
        for pod in self._list("", "v1", "pods"):
            number = int(pod["metadata"]["annotations"].get(_INDEX_ANNOTATION, 0))
            name, phase = _runners_of(pod)[number], pod["status"].get("phase")
            if phase in ("Succeeded", "Failed"):
                over.add(name)
                failed[name] = _failure(pod)
            elif phase != "Pending":
                running.add(name)
            self._tell_why_it_waits(name, pod)
        self._raise_new_failures(failed)
        found = dict.fromkeys(running, True)
        for job_set in self._list(*_JOB_SETS, "jobsets"):
            if not (_is_over(job_set) or "deletionTimestamp" in job_set["metadata"]):
                names = _runners_of(job_set)
                found.update(dict.fromkeys(set(names) - over, not running.isdisjoint(names)))
        return found

    def cancel(self, name: str) -> None:
        """Delete the JobSet of a runner that waits."""
        for job_set in self._list(*_JOB_SETS, "jobsets"):
            if name in _runners_of(job_set):
                made = job_set["metadata"]["name"]
                self._call_job_sets("delete", name=made, propagation_policy="Background")
                self._call("CoreV1Api", "delete_namespaced_secret", name=made)

    def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # ---- objects -------------------------------------------------------------------------

    def job_set(self, orders: Sequence[RunnerOrder]) -> dict[str, Any]:
        """Return the JobSet of some runners; it has no token."""
        options, names = self.options, [order.name for order in orders]
        labels = {"app.kubernetes.io/managed-by": "paceline", _CLUSTER_LABEL: self.cluster_id}
        notes = {_POOL_ANNOTATION: self.pool, _RUNNERS_ANNOTATION: " ".join(names)}
        job = {
            "completionMode": "Indexed",
            "completions": len(names),
            "parallelism": len(names),
            # The master asks for other pods, with other tokens; those of the group go on.
            "backoffLimitPerIndex": 0,
            "template": {
                "metadata": {"labels": labels, "annotations": notes},
                "spec": self._pod(orders[0], names),
            },
        }
        spec: dict[str, Any] = {
            "replicatedJobs": [
                {
                    "name": "runner",
                    "replicas": 1,
                    "template": {"metadata": {"labels": labels}, "spec": job},
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
        group, version = _JOB_SETS
        return {
            "apiVersion": f"{group}/{version}",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": spec,
        }

    def secret(self, name: str, orders: Sequence[RunnerOrder]) -> dict[str, Any]:
        """Return the Secret with the tokens of some runners."""
        texts = {f"{order.name}.token": order.token for order in orders}
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
        script = (
            'shift "$JOB_COMPLETION_INDEX"; n=$1;'
            f' umask 077; d={shlex.quote(place)}/$n; mkdir -p "$d"'
            f' && cp {_SECRET_PATH}/"$n.token" "$d/token"'
        )
        if order.certificate is not None:
            script += f' && cp {_SECRET_PATH}/master.pem "$d/master.pem"'
        runner = order.shell('"$n"', '"$d"', '"$d/token"')
        script += f' && exec {runner} --address "$POD_IP"'
        container = {
            "name": "runner",
            "image": options.image,
            "command": ["sh", "-c", script, "runner", *names],
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
            # Its first process then takes in the processes that lose their parents.
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

    # ---- requests ------------------------------------------------------------------------

    def _list(self, group: str, version: str, plural: str) -> list[dict[str, Any]]:
        """Return the objects of this pool."""
        what: dict[str, Any] = {"label_selector": f"{_CLUSTER_LABEL}={self.cluster_id}"}
        # Version 0 is what the server has at hand.
        what["resource_version"] = "0"
        if group:
            what |= {"group": group, "version": version, "plural": plural}
            items = self._call("CustomObjectsApi", "list_namespaced_custom_object", **what)["items"]
        else:
            pods = self._call("CoreV1Api", "list_namespaced_pod", **what)
            items = self._connected().sanitize_for_serialization(pods)["items"]
        return [
            one
            for one in items
            if one["metadata"]["annotations"].get(_POOL_ANNOTATION) == self.pool
        ]

    def _call_job_sets(self, verb: str, body: Any = None, **arguments: Any) -> Any:
        group, version = _JOB_SETS
        return self._call(
            "CustomObjectsApi",
            f"{verb}_namespaced_custom_object",
            body,
            group=group,
            version=version,
            plural="jobsets",
            **arguments,
        )

    def _call(self, api: str, method: str, body: Any = None, **arguments: Any) -> Any:
        """Send a request; what is to be deleted may be gone already."""
        from kubernetes import client

        if body is not None:
            arguments["body"] = body
        try:
            call = getattr(getattr(client, api)(self._connected()), method)
            return call(namespace=self.options.namespace, _request_timeout=_TIMEOUT_S, **arguments)
        except client.ApiException as error:
            if error.status == _NOT_FOUND and method.startswith("delete"):
                return None
            if error.status == _UNAUTHORIZED:
                # What it has read from the file may be too old.
                self.close()
            raise StarterError(f"Kubernetes: {_told(error)}") from error
        except Exception as error:
            # The client lets errors of urllib3, of files and of its own checks through.
            raise StarterError(f"Kubernetes: {type(error).__name__}: {error}") from error

    def _connected(self) -> Any:
        if self._client is None:
            from kubernetes import client, config

            settings = client.Configuration()
            options = self.options
            if options.kubeconfig is None and options.context is None and _is_in_pod():
                config.load_incluster_config(client_configuration=settings)
            else:
                config.load_kube_config(
                    config_file=options.kubeconfig,
                    context=options.context,
                    client_configuration=settings,
                )
            self._client = client.ApiClient(settings)
        return self._client

    def _tell_why_it_waits(self, name: str, pod: dict[str, Any]) -> None:
        """Log once why a pod cannot start, such as an image that cannot be had."""
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


def _runners_of(made: dict[str, Any]) -> list[str]:
    names: str = made["metadata"]["annotations"][_RUNNERS_ANNOTATION]
    return names.split()


def _is_over(job_set: dict[str, Any]) -> bool:
    conditions = (job_set.get("status") or {}).get("conditions") or []
    return any(
        one["type"] in ("Completed", "Failed") and one["status"] == "True" for one in conditions
    )


def _failure(pod: dict[str, Any]) -> str | None:
    """Return why the runner of a pod failed; None if it did not, or was killed."""
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


def _is_in_pod() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _told(error: Any) -> str:
    try:
        text = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        text = error.reason
    return f"{text} ({error.status})"
