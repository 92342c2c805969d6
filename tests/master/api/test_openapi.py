"""The description of the API, and whatever it allows sent to a real server."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import xxhash
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from paceline import __version__
from paceline._cluster.master.api.application import describe
from paceline._cluster.messages.runner_messages import PROTOCOL
from paceline.storage import DirectoryStorage

WEBUI = Path(__file__).parents[3] / "webui"
# One stops the server, the other answers for as long as the client listens.
# An answer needs an ask that is open, of an id that was drawn.
ANSWER = "POST /experiments/{experiment_id}/asks/{ask_id}"
# Without a provider they say that there is none; `test_oidc.py` has one.
OIDC = {"GET /oidc/callback", "GET /oidc/sign-in", "POST /oidc/token"}
LEFT_OUT = {"POST /master/shutdown", "GET /events", ANSWER, *OIDC}
PREFIX = "/api/v1"
TIME_LIMIT_S = 30.0
# What one operation makes another one finds: reading comes first, and deleting last.
ORDER = ("GET", "PUT", "POST", "PATCH", "DELETE")
PASSWORD = "correct horse"
TEST_CHANNEL = "POST /notify-channels/{name}/test"
# To hash a password takes long, on purpose; and to send a message, a process of its own.
SLOW = {"POST /login", "POST /login-token", "PUT /users/{name}/password", TEST_CHANNEL}
CONFIG = {"entrypoint": "x", "searcher": {"name": "single", "metric": "loss"}}
RUN = {"run_id": "r1", "name": "run", "created": 1.0, "checkpoint_storage": "/c", "version": 1}
SERIES = {"trial_id": 1, "group": "validation", "name": "loss"}
# In a pool of its own, as what were placed on it would not run.
NODE = {
    "name": "box", "key": "k", "version": __version__, "protocol": PROTOCOL, "python": "python3",
    "python_version": "3.11.7", "devices": ["cpu"], "device_kind": "CPU", "num_cores": 1,
    "memory_bytes": 1, "pool": "other",
}  # fmt: skip
POLL = {"key": "k", "session": 1, "number": 1, "attempts": [], "alive": [], "wait_s": 0.0}


def archive() -> bytes:
    """Return code with one file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as files:
        files.addfile(tarfile.TarInfo("f"))
    return gzip.compress(packed.getvalue(), mtime=0)


ARCHIVE = archive()
DIGEST = hashlib.sha256(ARCHIVE).hexdigest()
# What generated requests are given so that they mean something that is there. Experiment 1 and its
# trials go on, 2 was killed, and each deletion finds one of its own.
PARAMETERS: dict[str, Any] = {
    "experiment_id": 1, "trial_id": 1, "attempt_id": 1, "uuid": "u", "path": "f", "name": "admin",
    "digest": DIGEST, "token_id": 1, "run_id": "r1",
    "node_id": 1, "view_id": 1, "project": "Default", "stream": "ab" * 16,
}  # fmt: skip
# The only search that has trials still to come.
PROPOSED = 6
OTHERS: dict[str, dict[str, Any]] = {
    "POST /experiments/{experiment_id}/continue": {"experiment_id": 2},
    "POST /experiments/{experiment_id}/proposals": {"experiment_id": PROPOSED},
    "POST /experiments/{experiment_id}/{action}": {"action": "pause"},
    "POST /attempts/{attempt_id}/end": {"attempt_id": 2},
    "POST /trials/{trial_id}/kill": {"trial_id": 2},
    "DELETE /experiments/{experiment_id}": {"experiment_id": 3},
    "POST /nodes/{name}/drain": {"name": "box"},
    "POST /nodes/{name}/resume": {"name": "box"},
    "DELETE /nodes/{name}": {"name": "drained"},
    "POST /nodes/{name}/slots/{slot}/drain": {"name": "local", "slot": 0},
    "POST /nodes/{name}/slots/{slot}/resume": {"name": "local", "slot": 0},
    "PUT /pools/{name}": {"name": "big"},
    "DELETE /pools/{name}": {"name": "small"},
    "POST /nodes/{name}/reservations": {"name": "local"},
    "DELETE /nodes/{name}/reservations/{reservation_id}": {"name": "local", "reservation_id": 1},
    "PUT /config-rules/{kind}/{name}": {"kind": "template", "name": "new"},
    "DELETE /config-rules/{kind}/{name}": {"kind": "template", "name": "old"},
    "DELETE /projects/{project}": {"project": "empty"},
    "PUT /quotas/{kind}/{name}": {"kind": "user", "name": "admin"},
    "DELETE /quotas/{kind}/{name}": {"kind": "project", "name": "Default"},
    # Its trial has ended by then.
    "DELETE /checkpoints/{uuid}": {"uuid": "v"},
    # One that is being sent.
    "DELETE /attempts/{attempt_id}/checkpoints/{uuid}": {"uuid": "w"},
    "PUT /attempts/{attempt_id}/checkpoints/{uuid}/pieces": {"uuid": "w"},
    "DELETE /views/{view_id}": {"view_id": 2},
}
# A shell that runs.
TASK, TASK_ATTEMPT = 5, 3
TASK_STREAM = "/experiments/{experiment_id}/streams/{stream}"
STREAM_AT_TASK = "/attempts/{attempt_id}/streams/{stream}"
OTHERS |= {
    "POST /experiments/{experiment_id}/link": {"experiment_id": TASK},
    **{f"{method} {TASK_STREAM}": {"experiment_id": TASK} for method in ("GET", "PUT", "DELETE")},
    **{f"{m} {STREAM_AT_TASK}": {"attempt_id": TASK_ATTEMPT} for m in ("GET", "PUT", "DELETE")},
}
PIECES = "/attempts/{attempt_id}/checkpoints/{uuid}/pieces"
FILE = {"digest": hashlib.sha256(b"x").hexdigest(), "media_type": "text/plain", "is_known": False}
QUERIES: dict[str, dict[str, Any]] = {
    "DELETE /config-rules/{kind}/{name}": {"revision": 1},
    "DELETE /quotas/{kind}/{name}": {"revision": 1},
    "DELETE /views/{view_id}": {"version": 1},
    "GET /runs": {"link": "experiments/1/runs/r1"},
    "PUT /attempts/{attempt_id}/files/{path}": FILE,
    "PUT /runs/{run_id}/files/{path}": FILE,
    f"GET {PIECES}": {"name": "f", "offset": 0},
    f"PUT {PIECES}": {"name": "f", "offset": 0},
    "POST /attempts/{attempt_id}/checkpoints/{uuid}/shards": {"member": 1},
    "GET /metric-series.csv": {"series": "1/validation/loss"},
    "GET /experiments/{experiment_id}/diff": {"since": 2},
    **{
        f"{method} {path}": {"offset": 0}
        for method in ("GET", "PUT")
        for path in (TASK_STREAM, STREAM_AT_TASK)
    },
    "GET /experiments/{experiment_id}/hyperparameters": {"metric": "validation/loss"},
}
HEADERS = {f"PUT {PIECES}": {"x-paceline-digest": xxhash.xxh3_128_hexdigest(b"x")}}
RECORD = {
    "type": "checkpoint", "time": 0.0, "uuid": "u", "steps_completed": 1, "metadata": {},
    "resources": {}, "storage": "",
}  # fmt: skip
BODIES: dict[str, Any] = {
    "POST /attempts/{attempt_id}/checkpoints/{uuid}": {
        "files": {"manifest": ""},
        "record": RECORD,
    },
    "POST /attempts/{attempt_id}/checkpoints/{uuid}/shards": {"shards": {}},
    f"PUT {PIECES}": b"x",
    "PUT /attempts/{attempt_id}/files/{path}": b"x",
    "PUT /runs/{run_id}/files/{path}": b"x",
    "POST /attempts/{attempt_id}/records": {"batches": []},
    "POST /attempts/{attempt_id}/logs": {"entries": []},
    f"PUT {STREAM_AT_TASK}": b"x",
    f"PUT {TASK_STREAM}": b"x",
    "POST /attempts/{attempt_id}/end": {"reason": "exited", "code": 0, "signal": None, "time": 1.0},
    "POST /login": {"user": "admin", "password": PASSWORD},
    "POST /login-token": {"user": "admin", "password": PASSWORD, "name": "laptop"},
    "PUT /projects/{project}/members/{name}": {"role": "viewer"},
    "PUT /users/{name}/password": {"password": PASSWORD},
    "PUT /contexts/{digest}": ARCHIVE,
    "POST /experiments": {"config": CONFIG, "context_digest": None},
    "POST /experiments/{experiment_id}/fork": {"config": {}, "replaces_config": False},
    "POST /experiments/{experiment_id}/continue": {"config": {}},
    "POST /experiments/{experiment_id}/proposals": {"hparams": {"lr": 0.5}},
    "POST /trials/{trial_id}/continue": {"config": {}},
    "POST /preview-search": {"config": CONFIG},
    "POST /bulk-actions": {"action": "archive", "experiment_ids": [2]},
    "POST /metric-groups": {
        "metrics": [{"group": "validation", "name": "loss"}],
        "groups": [[1], [2, 3]],
    },
    "POST /metric-names": {"trial_ids": [1, 2]},
    "POST /metric-series": {"series": [SERIES]},
    "POST /runs/{run_id}/records": {"batches": [], "is_alive": True},
    "PUT /runs/{run_id}": {"info": RUN, "path": "/p"},
    "POST /nodes": NODE | {"name": "new"},
    "POST /nodes/{node_id}/poll": POLL,
    "POST /nodes/{name}/drain": {"finish": False},
    "POST /nodes/{name}/slots/{slot}/drain": {"finish": False},
    "PUT /pools/{name}": {"policy": "priority", "max_slots": 4, "labels": {"gpu": "a100"}},
    "POST /nodes/{name}/reservations": {"user": "admin", "begins_at": 1, "ends_at": 2**33},
    "PUT /config-rules/{kind}/{name}": {"content": {"max_restarts": 1}, "revision": 0},
    "PUT /quotas/{kind}/{name}": {"max_slots": 4, "revision": 0},
    "POST /queue/move": {"experiment_id": 1, "to": "front"},
    "POST /views": {"name": "mine", "search": "x=time"},
    "PUT /views/{view_id}": {"name": "ours", "search": "x=time", "version": 1},
}


@pytest.fixture(scope="module")
def master(
    serve_master: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Return a master that has something of each kind."""
    home = tmp_path_factory.mktemp("openapi") / "home"
    home.mkdir()
    # Nobody listens there, which is an answer too.
    channel = {"webhook": "http://127.0.0.1:9", "secret": "whsec_" + "a" * 32}
    (home / "notify.yaml").write_text(json.dumps({"channels": {"admin": channel}}))
    served = serve_master(home, 3)
    put = served.http.put(f"/contexts/{DIGEST}", content=ARCHIVE)
    assert put.status_code == 204, put.text
    body = {"config": CONFIG | {"searcher": {"name": "random", "metric": "loss", "max_trials": 2}}}
    created = served.http.post("/experiments", json=body | {"context_digest": DIGEST})
    assert created.status_code == 201, created.text
    served.schedule()
    for _ in range(2):
        served.http.post(f"/experiments/{served.create()}/kill")
    served.report(1, 0, ("validation", 1, {"loss": 0.5}), ("training", 1, {"x": "text"}))
    storage = DirectoryStorage(served.home.path / "checkpoints")
    for attempt_id, uuid in ((1, "u"), (2, "v")):
        with storage.store_path(uuid) as path:
            (path / "f").write_text("x")
        manifest = storage.commit(uuid, {}, origin=served.origin(attempt_id))
        checkpoint = {
            "type": "checkpoint", "time": 0.0, "uuid": uuid, "steps_completed": 1, "metadata": {},
            "resources": manifest.resources, "storage": storage.url,
        }  # fmt: skip
        batch = {"generation": 0, "rank": 1, "records": [[0, checkpoint]]}
        assert served.attempt(attempt_id, "records", batches=[batch]).status_code == 200
    apart = DirectoryStorage(served.home.path.parent / "apart")
    with apart.store_path("w") as path:
        (path / "f").write_text("x")
    apart.commit("w", {})
    files = {"manifest": (apart.root / "w" / "manifest.json").read_text()}
    offered = served.attempt(1, "checkpoints/w", files=files, record=RECORD | {"uuid": "w"})
    assert offered.json() == {"is_stored": False, "missing": {"f": 0}, "is_alone": True}, (
        offered.text
    )
    assert served.http.put("/runs/r1", json={"info": RUN, "path": "/p"}).status_code == 200
    sent = served.http.put("/attempts/1/files/f", params=FILE, content=b"x")
    assert sent.status_code == 204, sent.text
    served.attempt(1, "logs", entries=[[0, 0.0, 0, "stdout", None, "line"]])
    served.http.post("/tokens", json={"name": "one"})
    for name in ("first", "second"):
        served.http.post("/views", json={"name": name, "search": ""})
    session = served.http.post("/nodes", json=NODE).json()
    assert (session["node_id"], session["session"]) == (1, 1)
    served.http.post("/nodes", json=NODE | {"name": "drained"})
    assert served.http.put("/pools/small", json={}).status_code == 204
    assert served.http.put("/quotas/project/Default", json={}).status_code == 204
    rule = served.http.put("/config-rules/template/old", json={"content": {}})
    assert rule.status_code == 204, rule.text
    assert served.http.post("/projects", json={"name": "empty"}).status_code == 201
    shell = {"interactive": {"kind": "shell"}, "max_restarts": 0}
    assert served.create(searcher=CONFIG["searcher"], **shell) == TASK
    served.schedule()
    opened = served.http.get(f"/experiments/{TASK}/streams/{'ab' * 16}", params={"offset": 0})
    assert opened.status_code == 200, opened.text
    seen = served.http.get(f"/attempts/{TASK_ATTEMPT}/streams/{'ab' * 16}", params={"offset": 0})
    assert seen.status_code == 200, seen.text
    # Reservations end with their user, and `admin` may be removed before they are.
    assert served.http.post("/users", json={"name": "reserver"}).status_code == 201
    body = {"user": "reserver", "begins_at": 1, "ends_at": 2**33}
    assert served.http.post("/nodes/local/reservations", json=body).json()["id"] == 1
    drained = served.http.post("/nodes/drained/drain", json={})
    assert drained.status_code == 204, drained.text
    goes_on = {"name": "random", "metric": "loss", "max_trials": 9, "max_concurrent_trials": 1}
    assert served.create(searcher=goes_on) == PROPOSED
    yield served
    served.close()


@pytest.fixture(scope="module")
def schema(master: Any) -> Any:
    """Return the API's description, checked while it is read."""
    loaded = schemathesis.openapi.from_url(f"{master.url}/openapi.json", headers=master.headers)
    loaded.validate()
    return loaded


@pytest.mark.long
def test_the_description_is_valid_and_names_every_operation_once(schema: Any) -> None:
    operations = [result.ok() for result in schema.get_all_operations()]
    ids = [operation.definition.raw["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) >= 28
    for operation in operations:
        assert operation.definition.raw["description"]
        assert "4XX" in operation.definition.raw["responses"]


@pytest.mark.long
def test_the_types_of_the_web_ui_are_those_of_the_description(tmp_path: Path) -> None:
    """`npm run api` makes them, here without writing."""
    if not (WEBUI / "node_modules").is_dir():
        pytest.skip("NOT TESTED: the packages of the web UI are not installed. Hint: make test-ui")
    description = tmp_path / "openapi.json"
    description.write_text(json.dumps(describe()))
    command = json.loads((WEBUI / "package.json").read_text())["scripts"]["api"].split()
    command[command.index("openapi.json")] = str(description)
    npm = ["sh", str(WEBUI / "scripts" / "npm.sh"), sys.executable, "exec", "--offline", "--"]
    checked = subprocess.run(
        [*npm, *command, "--check"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, (
        f"{checked.stderr}Hint: python -m paceline._cluster.master.openapi webui/openapi.json, and"
        " `npm run api` in webui/, renew them."
    )


@pytest.mark.long
def test_no_request_that_the_description_allows_makes_the_server_fail(
    schema: Any, master: Any
) -> None:
    """Each operation is also met with what is there, and has to answer that it went well."""
    deadline = time.monotonic() + TIME_LIMIT_S
    answers: dict[str, Counter[int]] = defaultdict(Counter)

    def check(case: Any) -> None:
        name = name_of(case.operation)
        found = answers[name]
        if found.total() % 2 == 0:
            aim(case, name)
        for waits in ("timeout_s", "wait", "wait_s"):
            if isinstance((case.query or {}).get(waits), int | float):
                case.query[waits] = 0
        # One operation puts another token in the place of this one.
        headers = {"Authorization": f"Bearer {master.home.token}"}
        if name == "GET /sign-in" and found.total() == 0:
            link = master.http.post("/sign-in-links", headers=headers).json()["url"]
            case.query = {"token": link.partition("token=")[2]}
        sent = {"data": case.body} if isinstance(case.body, bytes) else {}
        reply = case.call(headers=headers, timeout=60, allow_redirects=False, **sent)
        found[reply.status_code] += 1
        assert reply.status_code < 500, (case.as_curl_command(), reply.text)
        if reply.status_code >= 400:
            assert reply.headers["content-type"] == ["application/problem+json"]
            assert reply.json()["status"] == reply.status_code
            assert reply.json()["code"]

    operations = [result.ok() for result in schema.get_all_operations()]
    for operation in sorted(operations, key=lambda one: ORDER.index(one.method.upper())):
        if name_of(operation) in LEFT_OUT:
            continue
        for mode in schemathesis.GenerationMode:
            if time.monotonic() > deadline and mode is schemathesis.GenerationMode.NEGATIVE:
                continue
            with suppress(Unsatisfiable):  # an operation without parameters cannot be misused
                limits = slow_limit if name_of(operation) in SLOW else limit
                limits(generated(operation, mode, check))()
    assert sum(found.total() for found in answers.values()) > 200
    never = {
        name: dict(found)
        for name, found in answers.items()
        if not any(status < 400 for status in found)
    }
    assert never == {}, "Hint: say in this file what is there for these operations"
    refused = {name: found for name, found in answers.items() if found[401] + found[429] > 12}
    # These are about passwords and links that are not right.
    assert set(refused) <= {"POST /login", "POST /login-token", "GET /sign-in"}


def name_of(operation: Any) -> str:
    return f"{operation.method.upper()} {operation.path.removeprefix(PREFIX)}"


def aim(case: Any, name: str) -> None:
    """Point a request at what is there, which chance would hardly find."""
    there = PARAMETERS | OTHERS.get(name, {})
    for parameter in case.path_parameters or {}:
        if parameter in there:
            case.path_parameters[parameter] = there[parameter]
    if name in QUERIES:
        case.query = (case.query or {}) | QUERIES[name]
    if name in HEADERS:
        case.headers = {**(case.headers or {}), **HEADERS[name]}
    body = BODIES.get(name)
    if isinstance(body, dict) and isinstance(case.body, dict):
        case.body = case.body | body
    elif body is not None:
        case.body = body


limit = settings(
    max_examples=8 if "PACELINE_TEST_FULL" in os.environ else 4,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


slow_limit = settings(limit, max_examples=3)


def generated(operation: Any, mode: Any, check: Callable[[Any], None]) -> Any:
    """Return a test of one operation with generated requests."""

    @given(operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        check(case)

    return run
