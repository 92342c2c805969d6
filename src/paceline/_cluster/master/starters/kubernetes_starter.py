"""Starter of runners as pods of a Kubernetes cluster, by JobSets."""

import logging
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from paceline._cluster.master.starters.slurm_ssh_ray_starters import (
    RunnerOrder,
    Starter,
    StarterError,
)
from paceline.config._fields_and_problems import Section

if TYPE_CHECKING:
    pass
from paceline._cluster.master.starters.kubernetes_api import (
    PODS,
    SECRETS,
    KubernetesApi,
    WatchedObjects,
)

logger = logging.getLogger(__name__)


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
