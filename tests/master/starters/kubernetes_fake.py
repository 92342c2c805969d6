"""A small Kubernetes: an API server for what the starter asks, and pods that are processes here.

It checks a JobSet by the schema of its CRD (kubernetes-sigs/jobset at 08dfbdfd, descriptions left
out) and a pod template by the models of the client. Its Kueue admits the JobSets of every queue but
"closed".
"""

import json
import os
import re
import subprocess
import threading
import time
import uuid
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema_rs
import yaml

SCHEMA = json.loads(Path(__file__).with_name("jobset-v1alpha2.schema.json").read_text())
TOKEN = "a-token-for-the-api-server"
INDEX = "batch.kubernetes.io/job-completion-index"
_PATH = re.compile(
    r"/(?:api/v1|apis/jobset\.x-k8s\.io/v1alpha2)/namespaces/lab/(secrets|pods|jobsets)(?:/([^/]+))?"
)

Made = dict[str, Any]


def check_template(template: Made) -> None:
    """Check that the client's models know every field of a pod template."""
    from lightkube.models.core_v1 import PodTemplateSpec

    kept = PodTemplateSpec.from_dict(template).to_dict()
    assert kept == template, f"unknown or damaged fields: {kept} is not {template}"


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeKubernetes:
    """The objects of the namespace "lab", by kind and name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token = TOKEN
        self.objects: dict[str, dict[str, Made]] = {"secrets": {}, "pods": {}, "jobsets": {}}
        self.requests: list[str] = []
        self.lock = threading.RLock()
        # What the server shows: the objects as they were last published, and each change.
        self._shown: dict[str, dict[str, Made]] = {kind: {} for kind in self.objects}
        self._version = 100
        self._changes: list[tuple[int, str, str, Made]] = []
        self._published = threading.Condition(self.lock)
        # What goes wrong with the next change or request of a kind, such as "cut pods".
        self._faults: list[str] = []
        self.is_away = False
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = threading.Event()

    # ---- for tests -----------------------------------------------------------------------

    def delete_pod(self) -> None:
        """Delete a pod, as `kubectl delete pod` does."""
        with self.lock:
            self._end_pod(next(iter(self.objects["pods"].values())))
            self._publish()

    def suspend(self, is_suspended: bool) -> None:
        """Suspend all JobSets, or let them go on, as Kueue does."""
        with self.lock:
            for job_set in self.objects["jobsets"].values():
                job_set["spec"]["suspend"] = is_suspended
                job_set["preempted"] = is_suspended
            self._publish()

    def fail(self, *faults: str) -> None:
        """Have things go wrong, each once."""
        with self.lock:
            self._faults += faults
            self._published.notify_all()

    def leave(self) -> None:
        """Cut all streams and answer nothing until `is_away` is false."""
        with self.lock:
            self.is_away = True
            self._published.notify_all()

    def num(self, request: str) -> int:
        """Return how often a request came."""
        with self.lock:
            return self.requests.count(request)

    def close(self) -> None:
        """End all pods."""
        self._closing.set()
        with self.lock:
            self._published.notify_all()
        for process in self._processes.values():
            process.kill()
            process.wait()

    # ---- the API server ------------------------------------------------------------------

    def answer(self, method: str, kind: str, name: str | None, query: Made, body: Made) -> Made:
        """Carry out a request."""
        with self.lock:
            self.requests.append(f"{method} {kind}")
            if method == "GET":
                return self._list(kind, query)
            try:
                return self._change(method, kind, name, body)
            finally:
                self._publish()

    def _list(self, kind: str, query: Made) -> Made:
        since = query.get("resourceVersion") or "0"
        if int(since) > self._version:
            raise _Refused(504, "Too large resource version")
        if since != "0" and self._has_fault(f"gone list {kind}"):
            raise _Refused(410, "The resource version is too old.")
        wanted = query.get("labelSelector", "")
        items = [one for one in self._shown[kind].values() if _has_labels(one, wanted)]
        version = {"resourceVersion": str(self._version)}
        return {"kind": "List", "apiVersion": "v1", "metadata": version, "items": items}

    def _change(self, method: str, kind: str, name: str | None, body: Made) -> Made:
        objects = self.objects[kind]
        if method == "POST":
            return self._create(kind, body)
        if name not in objects:
            raise _Refused(404, f'{kind} "{name}" not found')
        if method == "PATCH":
            objects[name]["metadata"] |= body["metadata"]
            return objects[name]
        assert method == "DELETE"
        self._delete(kind, name)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    # ---- its watch streams ---------------------------------------------------------------

    def watch(self, kind: str, query: Made) -> Iterator[bytes]:
        """Return the lines of a stream.

        Raises:
            ConnectionError: The stream is cut. The lines raise it.
        """
        with self.lock:
            self.requests.append(f"WATCH {kind}")
            if self._has_fault(f"forbidden {kind}"):
                raise _Refused(403, f'{kind} is forbidden: cannot "watch"')
            if self._has_fault(f"gone {kind}"):
                raise _Refused(410, "The resource version is too old.")
        return self._stream(kind, query)

    def _stream(self, kind: str, query: Made) -> Iterator[bytes]:
        since, wanted = int(query["resourceVersion"]), query.get("labelSelector", "")
        deadline = time.monotonic() + int(query["timeoutSeconds"])
        if self._has_fault(f"silence {kind}"):
            self._closing.wait()
        while time.monotonic() < deadline:
            with self.lock:
                if self.is_away or self._closing.is_set():
                    raise ConnectionError
                is_gone = self._has_fault(f"gone event {kind}")
                new = [one for one in self._changes if one[0] > since]
                if not (new or is_gone):
                    self._published.wait(max(deadline - time.monotonic(), 0))
            if is_gone:
                gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
                yield json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n"
                return
            for version, changed_kind, type_, made in new:
                since = version
                if changed_kind == kind and _has_labels(made, wanted):
                    line = json.dumps({"type": type_, "object": made}).encode() + b"\n"
                    if self._has_fault(f"lose {kind}"):
                        continue
                    if self._has_fault(f"halve {kind}"):
                        yield line[: len(line) // 2]
                        return
                    if self._has_fault(f"cut {kind}"):
                        yield line[: len(line) // 2]
                        raise ConnectionError
                    yield line

    def _has_fault(self, name: str) -> bool:
        with self.lock:
            is_there = name in self._faults
            if is_there:
                self._faults.remove(name)
            return is_there

    def _publish(self) -> None:
        """Show what has changed, and tell the streams of it."""
        for kind, objects in self.objects.items():
            shown = self._shown[kind]
            for name in shown.keys() - objects.keys():
                self._tell(kind, "DELETED", shown.pop(name))
            for name, made in objects.items():
                now = json.loads(json.dumps(made))
                before = shown.get(name)
                if before is None or now != before | {"metadata": _without_version(before)}:
                    shown[name] = now
                    self._tell(kind, "ADDED" if before is None else "MODIFIED", now)
        self._published.notify_all()

    def _tell(self, kind: str, type_: str, made: Made) -> None:
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        self._changes.append((self._version, kind, type_, json.loads(json.dumps(made))))

    # ---- its objects ---------------------------------------------------------------------

    def _create(self, kind: str, body: Made) -> Made:
        name = body["metadata"]["name"]
        if not re.fullmatch("[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?", name):
            raise _Refused(422, f"{name!r} is no name")
        if name in self.objects[kind]:
            raise _Refused(409, f'{kind} "{name}" already exists')
        if kind == "jobsets":
            try:
                jsonschema_rs.validate(SCHEMA, body)
                template = _job(body)["template"]
                check_template(template)
            except (jsonschema_rs.ValidationError, AssertionError, ValueError) as error:
                raise _Refused(422, str(error)) from error
        else:
            texts = body.pop("stringData")
            body["data"] = {key: b64encode(t.encode()).decode() for key, t in texts.items()}
            body["texts"] = texts
        body["metadata"]["uid"] = str(uuid.uuid4())
        self.objects[kind][name] = body
        return {key: value for key, value in body.items() if key != "texts"}

    def _delete(self, kind: str, name: str) -> None:
        gone = self.objects[kind].pop(name)
        for pod in list(self.objects["pods"].values()):
            if kind == "jobsets" and pod["job_set"] == name:
                self._end_pod(pod)
        owned = self.objects["secrets"]
        for secret_name, secret in list(owned.items()):
            owners = secret["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                del owned[secret_name]

    # ---- its controllers -----------------------------------------------------------------

    def reconcile(self) -> None:
        """Make pods of JobSets and processes of pods, until `close`."""
        while not self._closing.wait(0.05):
            with self.lock:
                for name, job_set in list(self.objects["jobsets"].items()):
                    self._look_after(name, job_set)
                for pod in list(self.objects["pods"].values()):
                    self._look_after_pod(pod)
                self._publish()

    def _look_after(self, name: str, job_set: Made) -> None:
        spec, labels = job_set["spec"], job_set["metadata"]["labels"]
        queue = labels.get("kueue.x-k8s.io/queue-name")
        if queue not in (None, "closed") and not job_set.get("preempted"):
            spec["suspend"] = False
        pods = [pod for pod in self.objects["pods"].values() if pod["job_set"] == name]
        if spec.get("suspend"):
            job_set["made"] = False
            for pod in pods:
                self._end_pod(pod)
        elif not job_set.get("made"):
            for number in range(_job(job_set)["completions"]):
                self._make_pod(name, _job(job_set)["template"], number)
            job_set["made"] = True
        elif all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in pods):
            # A pod that was deleted counts as failed.
            has_failed = not pods or any(pod["status"]["phase"] == "Failed" for pod in pods)
            word = "Failed" if has_failed else "Completed"
            job_set["status"] = {"conditions": [{"type": word, "status": "True"}]}

    def _make_pod(self, job_set: str, template: Made, number: int) -> None:
        name = f"{job_set}-runner-0-{number}-{uuid.uuid4().hex[:5]}"
        notes = {**template["metadata"]["annotations"], INDEX: str(number)}
        self.objects["pods"][name] = {
            "metadata": {**template["metadata"], "name": name, "annotations": notes},
            "spec": template["spec"],
            "status": {"phase": "Pending"},
            "job_set": job_set,
        }

    def _look_after_pod(self, pod: Made) -> None:
        name = pod["metadata"]["name"]
        process = self._processes.get(name)
        if process is None and "deletionTimestamp" not in pod["metadata"]:
            self._start(pod)
        elif process is None or process.poll() is not None:
            if "deletionTimestamp" in pod["metadata"]:
                del self.objects["pods"][name]
            elif process is not None:
                code = process.returncode
                message = (self.root / f"{name}.log").read_text()[-2048:]
                ended = {"exitCode": code, "message": message if code else ""}
                pod["status"] = {
                    "phase": "Failed" if code else "Succeeded",
                    "containerStatuses": [_container_status({"terminated": ended})],
                }

    def _start(self, pod: Made) -> None:
        """Run the container of a pod, which finds its Secret elsewhere than in a cluster."""
        spec = pod["spec"]
        [container] = spec["containers"]
        paths = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        secrets = [one for one in spec["volumes"] if "secret" in one]
        command = container["command"]
        for volume in secrets:
            secret = self.objects["secrets"].get(volume["secret"]["secretName"])
            if secret is None:
                return
            place = self.root / pod["metadata"]["name"]
            place.mkdir()
            for key, text in secret["texts"].items():
                (place / key).write_text(text)
            command = [word.replace(paths[volume["name"]], str(place)) for word in command]
        variables = {
            "JOB_COMPLETION_INDEX": pod["metadata"]["annotations"][INDEX],
            "POD_IP": "127.0.0.1",
        }
        with (self.root / f"{pod['metadata']['name']}.log").open("wb") as log:
            self._processes[pod["metadata"]["name"]] = subprocess.Popen(
                command,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        pod["status"] = {
            "phase": "Running",
            "containerStatuses": [_container_status({"running": {}})],
        }

    def _end_pod(self, pod: Made) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            pod["metadata"]["deletionTimestamp"] = moment
            process = self._processes.get(pod["metadata"]["name"])
            if process is not None and process.poll() is None:
                process.terminate()


def _job(job_set: Made) -> Made:
    [replicated] = job_set["spec"]["replicatedJobs"]
    spec: Made = replicated["template"]["spec"]
    return spec


def _without_version(made: Made) -> Made:
    return {key: value for key, value in made["metadata"].items() if key != "resourceVersion"}


def _has_labels(made: Made, selector: str) -> bool:
    labels = made["metadata"].get("labels", {})
    pairs = [pair.split("=") for pair in selector.split(",") if pair]
    return all(labels.get(key) == value for key, value in pairs)


def _container_status(state: Made) -> Made:
    return {
        "name": "runner",
        "image": "image",
        "imageID": "",
        "ready": "running" in state,
        "restartCount": 0,
        "state": state,
    }


@contextmanager
def serve(root: Path) -> Iterator[FakeKubernetes]:
    """Run a fake with its API server, and write `root/kubeconfig` for it."""
    fake = FakeKubernetes(root)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or "{}")
            place = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(place.query).items()}
            match = _PATH.fullmatch(place.path)
            wanted = f"application/{'merge-patch+' if self.command == 'PATCH' else ''}json"
            if fake.is_away:
                self.close_connection = True
                return
            try:
                if self.headers.get("Authorization") != f"Bearer {fake.token}":
                    raise _Refused(401, "Unauthorized")
                if body and self.headers["Content-Type"] != wanted:
                    raise _Refused(415, "the body of the request was in an unknown format")
                if match is None:
                    raise _Refused(404, "the server could not find the requested resource")
                if query.get("watch"):
                    self.send_stream(fake.watch(match[1], query))
                    return
                reply = fake.answer(self.command, match[1], match[2], query, body)
                status = 201 if self.command == "POST" else 200
            except _Refused as error:
                status = error.status
                reply = {"kind": "Status", "message": str(error), "code": status}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def send_stream(self, lines: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.close_connection = True
            with suppress(OSError):
                for line in lines:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_PATCH = do_DELETE = handle_request

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threads = [
        threading.Thread(target=server.serve_forever),
        threading.Thread(target=fake.reconcile),
    ]
    for thread in threads:
        thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    (root / "kubeconfig").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "fake", "cluster": {"server": url}}],
                "users": [{"name": "me", "user": {"token": TOKEN}}],
                "contexts": [{"name": "here", "context": {"cluster": "fake", "user": "me"}}],
            }
        )
    )
    yield fake
    server.shutdown()
    server.server_close()
    fake.close()
    for thread in threads:
        thread.join()
