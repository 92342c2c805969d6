"""Each route for each role: who sees, who changes, and for whom an object is not there."""

import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import insert, update

from paceline._cluster.master.api.route_scopes import PREFIX, TRACKER_PATHS
from paceline._cluster.master.store import tables, user_tables

SECRET = "hush"
UUID, DIGEST, RUN = "deadbeef-1", "ab" * 32, "run-of-lab"
ROLES = ("admin", "manager", "editor", "viewer", "stranger", "removed")
SEE, CHANGE, MANAGE = ROLES[:4], ROLES[:3], ROLES[:2]
# The bodies and queries name objects of the project, besides those of the paths.
QUERIES = {
    "DELETE /config-rules/{kind}/{name}": "revision=1",
    "GET /bulk-preview": "action=archive",
    "GET /checkpoint-preview": "query=created > -1d",
    "GET /checkpoints": f"prefix={UUID}",
    "GET /experiments/{experiment_id}/diff": "since=1",
    "GET /metric-series.csv": "series=1/training/loss",
    "GET /queue": "trial_id=3",
    "GET /runs": f"link=experiments/1/runs/{RUN}",
    "GET /trials": "trial=1&experiment=1",
    "GET /trials/{trial_id}/media": "name=picture",
}
BODIES: dict[str, Any] = {
    "PATCH /experiments/{experiment_id}": {"description": "changed"},
    "PATCH /users/{name}": {"is_admin": False},
    "POST /nodes/{name}/reservations": {"user": "admin", "begins_at": 1, "ends_at": 2},
    "POST /bulk-actions": {"action": "unarchive", "experiment_ids": [1]},
    "POST /check-config": {"text": "a: 1"},
    "POST /login": {"user": "nobody", "password": "wrong"},
    "POST /login-token": {"user": "nobody", "password": "wrong", "name": "n"},
    "POST /metric-groups": {"groups": [[1]], "metrics": [{"group": "training", "name": "loss"}]},
    "POST /metric-names": {"trial_ids": [1]},
    "POST /metric-series": {"series": [{"trial_id": 1, "group": "training", "name": "loss"}]},
    "POST /projects": {"name": "lab"},
    "POST /queue/move": {"experiment_id": 1, "to": "front"},
    "PUT /projects/{project}/members/{name}": {"role": "viewer"},
    "PUT /config-rules/{kind}/{name}": {"content": {}},
    "PUT /quotas/{kind}/{name}": {"max_slots": 1},
}
# For whom each route answers with what it was asked for. What strangers get of a list is empty.
ALL = (*SEE, "stranger")
NOT_FOUND, FORBIDDEN = 404, 403
ANYONE = [
    "GET /bulk-preview", "GET /checkpoint-preview",
    "GET /checkpoints", "GET /config-rules", "GET /config-schema", "GET /docs",
    "GET /experiment-columns",
    "GET /experiments", "GET /master", "GET /metrics", "GET /nodes", "GET /notify-channels",
    "GET /openapi.json", "GET /pools", "GET /projects", "GET /query-completions",
    "GET /queue", "GET /quotas", "GET /slots", "GET /status", "GET /storages",
    "GET /tokens", "GET /trials", "GET /usage", "GET /users", "GET /views", "HEAD /openapi.json",
    "POST /check-config",
    "POST /metric-groups", "POST /metric-names", "POST /metric-series", "POST /preview-search",
    "POST /sign-in-links", "POST /tokens", "POST /views", "PUT /contexts/{digest}",
    # Creates in a project of the sender's.
    "POST /experiments", "POST /bulk-actions",
]  # fmt: skip
PUBLIC = [
    "GET /health", "GET /oidc/callback", "GET /oidc/sign-in", "GET /session", "GET /sign-in",
    "POST /login", "POST /login-token", "POST /oidc/token",
]  # fmt: skip
SEEN = [
    "GET /checkpoints/{uuid}", "GET /checkpoints/{uuid}/files/{path:path}",
    "GET /contexts/{digest}", "GET /experiments/{experiment_id}",
    "GET /experiments/{experiment_id}/asks",
    "GET /experiments/{experiment_id}/checkpoints", "GET /experiments/{experiment_id}/config",
    "GET /experiments/{experiment_id}/diff", "GET /experiments/{experiment_id}/files",
    "GET /experiments/{experiment_id}/files/{path:path}",
    "GET /experiments/{experiment_id}/notes-history",
    "GET /experiments/{experiment_id}/proposals", "GET /experiments/{experiment_id}/tree",
    "GET /experiments/{experiment_id}/hyperparameters", "GET /experiments/{experiment_id}/logs",
    "GET /experiments/{experiment_id}/loss", "GET /experiments/{experiment_id}/metric-names",
    "GET /experiments/{experiment_id}/search", "GET /experiments/{experiment_id}/trials",
    "GET /metric-series.csv", "GET /projects/{project}/members", "GET /runs",
    "GET /trials/{trial_id}", "GET /trials/{trial_id}/checkpoints",
    "GET /trials/{trial_id}/decisions", "GET /trials/{trial_id}/environments",
    "GET /trials/{trial_id}/files", "GET /trials/{trial_id}/files/{path:path}",
    "GET /trials/{trial_id}/logs", "GET /trials/{trial_id}/media",
    "GET /trials/{trial_id}/media-names", "GET /trials/{trial_id}/media-steps",
    "GET /trials/{trial_id}/metrics", "GET /trials/{trial_id}/time",
]  # fmt: skip
CHANGED = [
    "PATCH /experiments/{experiment_id}", "POST /experiments/{experiment_id}/{action}",
    "POST /experiments/{experiment_id}/proposals",
    "POST /experiments/{experiment_id}/asks/{ask_id}",
    "POST /experiments/{experiment_id}/continue", "POST /queue/move",
    "POST /trials/{trial_id}/kill", "POST /trials/{trial_id}/stop", "PUT /runs/{run_id}",
    "PUT /runs/{run_id}/files/{path:path}", "POST /runs/{run_id}/records",
    "DELETE /checkpoints/{uuid}", "DELETE /experiments/{experiment_id}",
    # Beyond this role, only the owner opens a task.
    "POST /experiments/{experiment_id}/link",
    "DELETE /experiments/{experiment_id}/streams/{stream}",
    "GET /experiments/{experiment_id}/streams/{stream}",
    "PUT /experiments/{experiment_id}/streams/{stream}",
]  # fmt: skip
# A viewer may, but has no project for the copy.
COPIED = ["POST /experiments/{experiment_id}/fork", "POST /trials/{trial_id}/continue"]
MANAGED = ["PUT /projects/{project}/members/{name}"]
ADMINS = [
    "DELETE /nodes/{name}", "DELETE /pools/{name}", "DELETE /users/{name}", "GET /audit",
    "PATCH /users/{name}", "POST /nodes/{name}/drain", "POST /nodes/{name}/resume",
    "POST /nodes/{name}/slots/{slot}/drain", "POST /nodes/{name}/slots/{slot}/resume",
    "POST /notify-channels/{name}/test", "POST /projects", "POST /users", "PUT /pools/{name}",
    "PUT /home-token", "POST /master/shutdown",
    "DELETE /nodes/{name}/reservations/{reservation_id}", "POST /nodes/{name}/reservations",
    "DELETE /quotas/{kind}/{name}", "PUT /quotas/{kind}/{name}",
    # Those of all projects; a project's own are for its administrators.
    "DELETE /config-rules/{kind}/{name}", "PUT /config-rules/{kind}/{name}",
    "DELETE /projects/{project}",
    "POST /nodes", "POST /nodes/{node_id}/poll",
    "DELETE /attempts/{attempt_id}/checkpoints/{uuid}",
    "GET /attempts/{attempt_id}/checkpoints/{uuid}",
    "GET /attempts/{attempt_id}/checkpoints/{uuid}/pieces",
    "GET /attempts/{attempt_id}/control", "POST /attempts/{attempt_id}/checkpoints/{uuid}",
    "POST /attempts/{attempt_id}/checkpoints/{uuid}/shards", "POST /attempts/{attempt_id}/end",
    "POST /attempts/{attempt_id}/logs", "POST /attempts/{attempt_id}/records",
    "PUT /attempts/{attempt_id}/checkpoints/{uuid}/pieces",
    "PUT /attempts/{attempt_id}/files/{path:path}",
    "DELETE /attempts/{attempt_id}/streams/{stream}", "GET /attempts/{attempt_id}/streams/{stream}",
    "POST /attempts/{attempt_id}/streams", "PUT /attempts/{attempt_id}/streams/{stream}",
]  # fmt: skip
# Of other users: only administrators.
OTHERS = ["DELETE /tokens/{token_id}", "PUT /users/{name}/password"]
# Would end what the test stands on; each has a test of its own below, or needs administrators.
LEFT_OUT = ["DELETE /views/{view_id}", "GET /events", "POST /logout", "PUT /views/{view_id}"]
NOT_SENT_AS_ADMIN = ("PUT /home-token", "POST /master/shutdown", "DELETE /users/{name}")


@pytest.fixture(scope="module")
def lab(serve_master: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a master with the project `lab`, a user for each role in it, and its objects."""
    served = serve_master(tmp_path_factory.mktemp("roles") / "home")
    served.clients = {"admin": served.http}
    try:
        fill(served)
        yield served
    finally:
        for client in served.clients.values():
            client.close()
        served.close()


def fill(served: Any) -> None:
    post = served.http.post
    assert post("/tokens", json={"name": "first", "scope": "read"}).json()["id"] == 1
    assert post("/projects", json={"name": "lab"}).status_code == 201
    for role in ROLES[1:]:
        # Strangers are editors elsewhere.
        body = {"name": role, "role": "editor" if role in ("stranger", "removed") else None}
        assert post("/users", json=body).status_code == 201
        if role in ("manager", "editor", "viewer"):
            given = {"role": "admin" if role == "manager" else role}
            put = served.http.put(f"/projects/lab/members/{role}", json=given)
            assert put.status_code == 204, put.text
        made = post("/tokens", json={"name": f"of-{role}", "scope": "admin", "user": role}).json()
        headers = {"Authorization": f"Bearer {made['secret']}"}
        served.clients[role] = httpx2.Client(
            base_url=served.url, headers=headers, timeout=60, verify=False
        )
    config = {
        "name": SECRET,
        "entrypoint": "python3 train.py",
        "labels": [SECRET],
        "hyperparameters": {SECRET: {"type": "double", "minval": 0.0, "maxval": 1.0}},
        "searcher": {"name": "random", "metric": "loss", "max_trials": 3},
    }
    created = served.clients["editor"].post("/experiments", json={"config": config})
    assert created.status_code == 201, created.text
    assert (created.json()["owner"], created.json()["project"]) == ("editor", "lab")
    served.schedule()
    served.report(1, 0, ("training", 1, {"loss": 1.0, SECRET: 2.0}))
    (served.home.contexts_path / f"{DIGEST}.tar.gz").write_bytes(b"code")
    query = f"digest={hashlib.sha256(b'seen').hexdigest()}&media_type=text/plain"
    put = served.http.put(f"/attempts/1/files/f?{query}", content=b"seen")
    assert put.status_code == 204, put.text
    registered = served.clients["editor"].put(f"/runs/{RUN}", json=run_body())
    assert registered.status_code == 200, registered.text

    def job(transaction: Any) -> None:
        run = update(tables.experiments).where(tables.experiments.c.id == 1)
        transaction.connection.execute(run.values(context_digest=DIGEST))
        transaction.connection.execute(
            insert(tables.checkpoints).values(
                uuid=UUID, trial_id=1, experiment_id=1, attempt=1, steps_completed=1,
                state="COMPLETED", metadata={}, resources={"f": 1}, size=1, created_at=1.0,
                storage=str(served.home.path),
            )
        )  # fmt: skip
        media = {"group": "training", "name": "picture", "kind": "image", "attempt": 1}
        transaction.connection.execute(
            insert(tables.media).values(
                trial_id=1, experiment_id=1, steps_completed=1, time=1.0, files=[], **media
            )
        )

    served.core.database.write(job).result()
    assert served.http.delete("/users/removed").status_code == 204


def run_body() -> dict[str, Any]:
    info = {
        "run_id": RUN, "name": SECRET, "created": 1.0, "checkpoint_storage": "",
    }  # fmt: skip
    return {"info": info, "path": ""}


def sent(lab: Any, role: str, route: str, **more: Any) -> httpx2.Response:
    method, _, path = route.partition(" ")
    given = {
        "experiment_id": "1", "trial_id": "1", "uuid": UUID, "digest": DIGEST, "run_id": RUN,
        "path:path": "f", "action": "pause", "token_id": "1", "project": "lab", "name": "admin",
        "slot": "0", "node_id": "1", "attempt_id": "1", "kind": "user", "reservation_id": "1",
        "ask_id": "none", "stream": "ab" * 16,
    }  # fmt: skip
    if path.startswith("/config-rules/"):
        given["kind"] = "template"
    if path == "/projects/{project}/members/{name}":
        given["name"] = "viewer"
    filled = re.sub(r"{(.+?)}", lambda match: given[match[1]], path)
    query = QUERIES.get(route)
    url = filled if query is None else f"{filled}?{query}"
    if route in BODIES:
        more.setdefault("json", BODIES[route])
    elif method not in ("GET", "HEAD"):
        more.setdefault("json", {})
    reply: httpx2.Response = lab.clients[role].request(method, url, **more)
    return reply


def check(reply: httpx2.Response, role: str, route: str, allowed: tuple[str, ...], no: int) -> None:
    told = (role, route, reply.status_code, reply.text[:500])
    if role == "removed":
        assert reply.status_code == 401, told
    elif role in allowed:
        if reply.status_code == 404:
            # What is asked for is not there for anybody, or lies in no file.
            assert "no file" in reply.text or "no node" in reply.text or "no " in reply.text, told
        assert reply.status_code not in (401, 403), told
        assert reply.status_code < 500, told
    else:
        assert reply.status_code == no, told
    if role == "stranger":
        assert SECRET not in reply.text, told


def test_every_route_is_in_one_of_the_lists(lab: Any) -> None:
    there = {
        f"{method} {str(route.path).removeprefix(PREFIX)}"
        for route in iter_route_contexts(lab.app.routes)
        for method in route.methods or ()
        if not str(route.path).startswith(TRACKER_PATHS)
    }
    listed = [
        *ANYONE, *PUBLIC, *SEEN, *CHANGED, *COPIED, *MANAGED, *ADMINS, *OTHERS, *LEFT_OUT,
    ]  # fmt: skip
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize("role", ROLES)
def test_routes_that_read_show_what_the_role_allows(lab: Any, role: str) -> None:
    for route in ANYONE:
        check(sent(lab, role, route), role, route, ALL, 0)
    for route in SEEN:
        check(sent(lab, role, route), role, route, SEE, NOT_FOUND)
    for route in PUBLIC:
        assert SECRET not in sent(lab, role, route).text


def test_what_a_stranger_lists_is_empty_and_what_a_viewer_lists_is_not(lab: Any) -> None:
    for route in ("GET /checkpoints", "GET /trials", "GET /experiments", "GET /queue"):
        assert SECRET in sent(lab, "viewer", route).text or UUID in sent(lab, "viewer", route).text
        found = sent(lab, "stranger", route).json()
        assert not (found["items"] if isinstance(found, dict) else found), route
    names = {role: sent(lab, role, "POST /metric-names").json() for role in ("viewer", "stranger")}
    assert (len(names["viewer"]), names["stranger"]) == (2, [])
    status = {role: sent(lab, role, "GET /status").json() for role in ("viewer", "stranger")}
    assert status["viewer"]["trials"] == {"ACTIVE": 4}
    assert status["stranger"]["trials"] == {}
    assert status["stranger"]["num_slots_used"] == status["viewer"]["num_slots_used"] == 2
    slots = sent(lab, "stranger", "GET /slots").json()
    assert [(one["is_used"], one["trial_id"]) for one in slots] == [(True, None)] * 2
    names = [one["name"] for one in sent(lab, "stranger", "GET /projects").json()]
    assert names == ["Default"]


@pytest.mark.parametrize("role", ["removed", "stranger", "viewer"])
def test_routes_that_change_are_refused_to_who_may_not(lab: Any, role: str) -> None:
    for route in CHANGED:
        more: dict[str, Any] = {}
        if route == "PUT /runs/{run_id}":
            more = {"json": run_body()}
        if route.endswith("/records"):
            more = {"json": {"batches": []}}
        no = FORBIDDEN if role == "viewer" else NOT_FOUND
        check(sent(lab, role, route, **more), role, route, (), no)
    for route in COPIED:
        no = FORBIDDEN if role == "viewer" else NOT_FOUND
        check(sent(lab, role, route), role, route, (), no)
    for route in MANAGED:
        check(sent(lab, role, route), role, route, (), FORBIDDEN if role == "viewer" else NOT_FOUND)
    if role != "removed":
        [done] = sent(lab, role, "POST /bulk-actions").json()
        assert done["error"].startswith("The user must" if role == "viewer" else "There is no")
    rows = lab.http.get("/experiments/1").json()
    assert (rows["state"], rows["description"]) == ("ACTIVE", "")


@pytest.mark.parametrize("role", ROLES)
def test_only_administrators_administer(lab: Any, role: str) -> None:
    for route in ADMINS:
        if role == "admin" and route in NOT_SENT_AS_ADMIN:
            continue
        check(sent(lab, role, route), role, route, ("admin",), FORBIDDEN)
    for route in OTHERS:
        no = NOT_FOUND if route.startswith("DELETE") else FORBIDDEN
        if role != "admin":
            body = {"password": "long enough"}
            check(sent(lab, role, route, json=body), role, route, (), no)


def test_a_manager_chooses_members_and_an_editor_does_not(lab: Any) -> None:
    [route] = MANAGED
    check(sent(lab, "editor", route), "editor", route, (), FORBIDDEN)
    check(sent(lab, "manager", route), "manager", route, ("manager",), 0)


@pytest.mark.parametrize("role", ["manager", "editor"])
def test_routes_that_change_are_open_to_editors(lab: Any, role: str) -> None:
    for route in (*COPIED, *CHANGED):
        check(sent(lab, role, route), role, route, CHANGE, 0)


def test_a_view_is_seen_by_all_and_changed_by_its_owner_and_administrators(lab: Any) -> None:
    clients, body = lab.clients, {"name": "mine", "search": "trials=1", "is_default": True}
    made = clients["editor"].post("/views", json=body).json()
    path = f"/views/{made['id']}"
    for role in ("manager", "viewer", "stranger"):
        [seen] = clients[role].get("/views").json()
        assert (seen["name"], seen["is_default"]) == ("mine", False)
        assert clients[role].put(path, json=body | {"version": 1}).status_code == 403
        assert clients[role].delete(f"{path}?version=1").status_code == 403
    assert clients["viewer"].post("/views", json=body | {"name": "other"}).json()["is_default"]
    [one] = [one for one in clients["editor"].get("/views").json() if one["name"] == "mine"]
    assert (one["version"], one["is_default"]) == (1, True)
    assert clients["editor"].put(path, json=body | {"version": 1}).json()["version"] == 2
    assert clients["admin"].delete(f"{path}?version=2").status_code == 204


def test_a_preview_of_an_action_tells_what_the_role_forbids(lab: Any) -> None:
    """Strangers see nothing of it, a viewer the reason, an editor what would be done."""
    found = {
        (role, path): lab.clients[role].get(path).json()
        for role in ("editor", "viewer", "stranger")
        for path in (
            "/bulk-preview?action=label&add_label=new",
            "/checkpoint-preview?query=trial>0",
        )
    }
    for (role, path), one in found.items():
        ids = one.get("experiment_ids", one.get("uuids"))
        reasons = [refused["reason"] for refused in one["refused"]]
        needed = "the role `editor` in the project lab is needed"
        if role == "stranger":
            assert (one["num_matching"], reasons) == (0, []), f"{path} tells a stranger {one}"
        elif role == "viewer":
            assert (ids, reasons) == ([], [needed]), f"{path} tells a viewer {one}"
        else:
            assert needed not in reasons, f"{path} tells an editor {one}"
            assert one["num_matching"] > 0


def test_a_checkpoint_becomes_a_model_only_for_editors_of_its_project(lab: Any) -> None:
    """A model keeps it from deletion. By the routes of MLflow's clients, which the registry has."""
    base = f"http://127.0.0.1:{lab.port}/api/2.0/mlflow"
    mine = "/projects/Default/members/viewer"
    assert lab.http.put(mine, json={"role": "editor"}).status_code == 204
    for role, status in (("stranger", (403, 404)), ("viewer", (403,)), ("editor", (200,))):
        made = {"name": f"model of {role}", "source": f"checkpoint:/{UUID}"}
        client = lab.clients[role]
        reply = client.post(f"{base}/registered-models/create", json=made)
        assert reply.status_code == 200, reply.text
        reply = client.post(f"{base}/model-versions/create", json=made)
        assert reply.status_code in status, f"{role} gets {reply.text}"
    # The owner is the user, not the token.
    assert reply.json()["model_version"]["user_id"] == "editor"
    # A copy of the version would keep it too.
    copy = {"name": "model of viewer", "source": "models:/model of editor/1"}
    reply = lab.clients["viewer"].post(f"{base}/model-versions/create", json=copy)
    assert reply.status_code == 403, reply.text
    for role in ("stranger", "viewer", "editor"):
        gone = {"name": f"model of {role}"}
        lab.clients[role].request("DELETE", f"{base}/registered-models/delete", json=gone)
    assert lab.http.put(mine, json={"role": None}).status_code == 204


def test_the_audit_log_says_who_did_what_to_which_object(lab: Any) -> None:
    body = {"action": "archive", "experiment_ids": [1, 77]}
    lab.clients["editor"].post("/bulk-actions", json=body)
    lab.core.database.write(lambda _: None).result()
    newest = lab.http.get("/audit?user=editor").json()[0]
    assert (newest["token"], newest["action"], newest["status"]) == (
        "of-editor", "POST /bulk-actions", 200,
    )  # fmt: skip
    assert newest["objects"] == ["experiment 1", "experiment 77"]
    # What a body names is there, too: above all, for whom access was made.
    for path, made, told in (
        ("/users", {"name": "late"}, "user late"),
        ("/projects", {"name": "late"}, "project late"),
        ("/sign-in-links?user=late", None, "link for user late"),
        ("/tokens", {"name": "t", "scope": "read", "user": "late"}, "token t of user late"),
    ):
        assert lab.http.post(path, json=made).status_code == 201
        # The log is written after the answer, on a busy machine a while after it.
        until = time.monotonic() + 60
        while lab.http.get("/audit?user=admin").json()[0]["objects"] != [told]:
            assert time.monotonic() < until, told
            time.sleep(0.02)
    lab.http.delete("/users/late")
    with pytest.raises(Exception, match="only added to"):
        lab.core.database.write(
            lambda transaction: transaction.connection.execute(user_tables.audit.delete())
        ).result()


def test_a_refusal_names_only_what_would_help(lab: Any) -> None:
    """No token lets in who is no administrator; a browser's scope is that of an admin's token."""
    body = {"name": "low", "scope": "submit", "user": "editor"}
    secret = lab.http.post("/tokens", json=body).json()["secret"]
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx2.Client(base_url=lab.url, headers=headers, verify=False) as low:
        for path, wanted in (
            ("/audit", "must be an administrator of the master"),
            ("/attempts/1/control", "must be an administrator of the master"),
            ("/tokens", "paceline token create NAME --scope admin`"),
        ):
            refused = low.get(path)
            assert refused.status_code == 403
            assert wanted in refused.text, refused.text
