"""Users over time: removal, changed roles, passwords, trackers, upgrades, back-ups."""

import json
import tarfile
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from paceline._cluster.master.api.list_routes import Filters, list_experiments
from paceline._cluster.master.api.readers import _answer, _Records
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.database import Database, DatabaseReader
from paceline._cluster.master.store.reach import Reach, acting
from paceline._cluster.master.upkeep.backup import Backup
from paceline._cluster.master.upkeep.restore import restore
from paceline._cluster.master.users import Users

STORED = Path(__file__).parents[1] / "stored"


def config(**fields: Any) -> dict[str, Any]:
    searcher = {"name": "single", "metric": "loss"}
    return {"config": {"name": "own", "entrypoint": "python3 t.py", "searcher": searcher, **fields}}


def test_a_removed_users_trials_run_on_and_the_tokens_die(master: Any, add: Any) -> None:
    ada = add("ada")
    link = master.http.post("/sign-in-links?user=ada").json()["url"]
    cookies = httpx2.get(link, verify=False).cookies
    browser = {"cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
    session = f"{master.url}/session"
    assert httpx2.get(session, headers=browser, verify=False).json()["owner"] == "ada"
    number = ada.post("/experiments", json=config()).json()["id"]
    master.schedule()
    with httpx2.stream(
        "GET", f"{master.url}/events", headers=dict(ada.headers), timeout=60, verify=False
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("event: connected")
        assert master.http.delete("/users/ada").status_code == 204
        # The stream ends with the rights of its user.
        assert [line for line in lines if line.startswith("data")] == []
    refused = ada.get("/experiments")
    assert (refused.status_code, refused.json()["code"]) == (401, "token_revoked")
    assert httpx2.get(session, headers=browser, verify=False).json()["user"] is None
    assert master.attempt(1, "records", batches=[]).status_code == 200
    found = master.http.get(f"/experiments/{number}").json()
    assert (found["owner"], found["shown_state"]) == ("ada", "RUNNING")
    # Back again, without the old access.
    assert master.http.post("/users", json={"name": "ada"}).status_code == 201
    assert ada.get("/experiments").status_code == 401


def test_a_role_counts_from_the_moment_it_is_changed(master: Any, add: Any) -> None:
    ada = add("ada")
    number = ada.post("/experiments", json=config()).json()["id"]
    put = master.http.put
    assert put("/projects/Default/members/ada", json={"role": "viewer"}).status_code == 204
    refused = ada.post(f"/experiments/{number}/pause")
    assert (refused.status_code, refused.json()["code"]) == (403, "role_too_low")
    assert "must have the role 'editor'" in refused.json()["detail"]
    assert ada.get(f"/experiments/{number}").status_code == 200
    assert ada.post("/experiments", json=config()).status_code == 403
    assert put("/projects/Default/members/ada", json={"role": None}).status_code == 204
    assert ada.get(f"/experiments/{number}").status_code == 404
    assert ada.get("/experiments").json() == {"items": [], "next_cursor": None, "total": 0}


def test_status_says_who_asks_and_a_refusal_who_could_help(master: Any, add: Any) -> None:
    reader = add("ada", "admin")

    def told(client: Any) -> tuple[int, str, bool]:
        found = client.get("/status").json()
        return found["num_users"], found["user"], found["is_admin"]

    assert told(master.http) == (2, "admin", True)
    assert told(reader) == (2, "ada", False)
    refused = reader.get("/audit")
    assert refused.status_code == 403
    # A token of another scope would not help.
    assert "--scope" not in refused.text
    assert "paceline user role ada --admin" in refused.json()["detail"]
    master.http.delete("/users/ada")
    assert told(master.http) == (1, "admin", True)


def test_the_last_administrator_stays(master: Any, add: Any) -> None:
    for send in (
        lambda: master.http.delete("/users/admin"),
        lambda: master.http.patch("/users/admin", json={"is_admin": False}),
    ):
        assert (send().status_code, send().json()["code"]) == (409, "last_admin")
    add("bea", is_admin=True)
    assert master.http.patch("/users/admin", json={"is_admin": False}).status_code == 204
    assert master.http.delete("/users/bea").json()["code"] == "last_admin"
    # The home's token acts as the owner of the master all the same.
    assert master.http.get("/audit").status_code == 200


def test_a_link_ends_with_the_access_that_it_was_made_for(master: Any, add: Any) -> None:
    links = []
    for end in ("password", "removal"):
        if end == "password":
            client = add("ada")
        links.append(client.post("/sign-in-links").json()["url"])
        kept = master.http.post("/sign-in-links").json()["url"]
        if end == "password":
            body = {"password": "long enough"}
            assert client.put("/users/ada/password", json=body).status_code == 204
        else:
            assert master.http.delete("/users/ada").status_code == 204
            assert master.http.post("/users", json={"name": "ada"}).status_code == 201
        assert [httpx2.get(link, verify=False).status_code for link in links] == [401] * len(links)
        assert httpx2.get(kept, verify=False).status_code == 303


def test_passwords_and_tokens_are_ones_own(master: Any, add: Any) -> None:
    ada, scripted = add("ada"), add("eve", scope="submit")
    body = {"password": "a long secret"}
    assert ada.put("/users/admin/password", json=body).json()["code"] == "not_yours"
    # A token that only submits opens no way to more.
    assert scripted.put("/users/eve/password", json=body).json()["code"] == "scope_too_low"
    assert ada.put("/users/ada/password", json=body).status_code == 204
    login = {"user": "ada", **body}
    assert httpx2.post(f"{master.url}/login", json=login, verify=False).json()["scope"] == "user"
    made = httpx2.post(f"{master.url}/login-token", json={**login, "name": "x"}, verify=False)
    assert (made.status_code, made.json()["user"]) == (201, "ada")
    wrong = {**login, "password": "another one", "name": "y"}
    assert httpx2.post(f"{master.url}/login-token", json=wrong, verify=False).status_code == 401
    token = {"name": "mine", "scope": "read"}
    assert ada.post("/tokens", json={**token, "user": "admin"}).status_code == 403
    assert ada.post("/tokens", json={**token, "scope": "runner"}).status_code == 403
    assert ada.post("/tokens", json=token).json()["user"] == "ada"
    assert {one["user"] for one in ada.get("/tokens").json()} == {"ada"}
    assert ada.post("/sign-in-links?user=admin").status_code == 403


@pytest.mark.parametrize(
    ("name", "status"),
    [("ad\u0430", 422), ("a\u200bda", 422), ("a\nb", 422), ("", 422), ("x" * 65, 422),
     ("ada\n", 422), (".", 422), ("..", 422), ("Admin", 409), ("admin", 409)],
)  # fmt: skip
def test_names_that_look_like_another_are_refused(master: Any, name: str, status: int) -> None:
    assert master.http.post("/users", json={"name": name}).status_code == status


def test_bodies_name_no_objects_of_other_projects(master: Any, add: Any) -> None:
    """A configuration may start from any trial or checkpoint that its sender sees."""
    ada = add("ada", role=None)
    master.http.post("/projects", json={"name": "own"})
    master.http.put("/projects/own/members/ada", json={"role": "editor"})
    master.create()
    source = config(searcher={"name": "single", "metric": "loss", "source_trial_id": 1})
    refused = ada.post("/experiments", json=source)
    assert (refused.status_code, refused.json()["detail"]) == (404, "There is no trial 1.")
    assert ada.post("/experiments", json={**config(), "project": "Default"}).status_code == 404
    mine = ada.post("/experiments", json=config()).json()
    assert mine["project"] == "own"
    moved = ada.patch(f"/experiments/{mine['id']}", json={"project": "Default"})
    assert moved.status_code == 404
    moved = master.http.patch(f"/experiments/{mine['id']}", json={"project": "Default"})
    assert moved.json()["project"] == "Default"
    assert ada.get(f"/experiments/{mine['id']}").status_code == 404


@pytest.mark.parametrize("written", ["1%C2%A0", "%E2%80%831", "%2B1", "1.0", "01"])
def test_an_id_written_otherwise_is_the_same_object(master: Any, add: Any, written: str) -> None:
    """What an id in a path means to the check of roles, it means to the route."""
    ada, viewer = add("ada", role=None), add("vic", role="viewer")
    master.http.post("/projects", json={"name": "own"})
    for name in ("ada", "vic"):
        master.http.put(f"/projects/own/members/{name}", json={"role": "editor"})
    secret = {"environment": {"secrets": {"KEY": "hush-hush"}}}
    assert master.http.post("/experiments", json=config(**secret)).status_code == 201
    master.schedule()
    for path in (f"/experiments/{written}/fork", f"/trials/{written}/continue"):
        refused = ada.post(path, json={})
        assert (refused.status_code, refused.json()["code"]) == (404, "not_found"), refused.text
    assert viewer.post(f"/experiments/{written}/cancel").status_code == 403
    assert ada.get("/experiments").json()["items"] == []
    assert viewer.post(f"/experiments/{written}/fork", json={}).json()["project"] == "own"


UPSERT = """mutation($name: String, $project: String) {
  upsertBucket(input: {name: $name, modelName: $project}) { bucket { name } inserted } }"""

ARTIFACT = """mutation { createArtifact(input: {projectName: "hush", runName: "r1",
  artifactCollectionName: "net", artifactTypeName: "model", digest: "d"}) { artifact { id } } }"""


def test_a_run_belongs_to_the_project_of_what_its_client_logs_it_in(master: Any, add: Any) -> None:
    root = master.url.removesuffix("/api/v1")
    ada, eve, vic = add("ada"), add("eve", role=None), add("vic", role="viewer")
    master.http.post("/projects", json={"name": "own"})
    for name, role in (("eve", "editor"), ("ada", "editor")):
        master.http.put(f"/projects/own/members/{name}", json={"role": role})
    calls = f"{root}/api/2.0/mlflow/"
    place = eve.post(calls + "experiments/create", json={"name": "e"}).json()
    eve.post(f"{root}/graphql", json={"query": UPSERT, "variables": {"name": "a", "project": "p"}})
    assert ada.post(calls + "runs/create", json=place).is_success
    variables = {"name": "b", "project": "p"}
    told = ada.post(f"{root}/graphql", json={"query": UPSERT, "variables": variables}).json()
    assert told["data"]["upsertBucket"]["inserted"]
    projects = [one["project"] for one in master.http.get("/experiments").json()["items"]]
    assert projects == ["own"] * 3
    assert vic.get("/experiments").json()["items"] == []
    # Who only sees it adds nothing to it.
    master.http.put("/projects/own/members/ada", json={"role": "viewer"})
    assert ada.post(calls + "runs/create", json=place).status_code == 403
    assert len(master.http.get("/experiments").json()["items"]) == 3


def test_clients_of_trackers_see_and_change_their_users_projects(master: Any, add: Any) -> None:
    root = master.url.removesuffix("/api/v1")
    ada, stranger = add("ada"), add("eve", role=None)
    viewer = add("vic", role="viewer")
    master.http.post("/projects", json={"name": "own"})
    master.http.put("/projects/own/members/eve", json={"role": "editor"})

    def ml(client: httpx2.Client, method: str, path: str, **body: Any) -> httpx2.Response:
        given = {"params": body} if method == "GET" else {"json": body}
        return client.request(method, f"{root}/api/2.0/mlflow/{path}", **given)

    created = ml(ada, "POST", "experiments/create", name="secret").json()["experiment_id"]
    run = ml(ada, "POST", "runs/create", experiment_id=created).json()["run"]["info"]["run_id"]
    assert ml(ada, "POST", "registered-models/create", name="net").status_code == 200
    metric = {"run_id": run, "key": "loss", "value": 1.0, "timestamp": 1, "step": 1}
    calls: list[tuple[str, str, dict[str, Any], bool]] = [
        ("GET", "experiments/get", {"experiment_id": created}, False),
        ("GET", "experiments/get-by-name", {"experiment_name": "secret"}, False),
        ("GET", "runs/get", {"run_id": run}, False),
        ("GET", "registered-models/get", {"name": "net"}, False),
        ("POST", "runs/log-metric", metric, True),
        ("POST", "runs/log-parameter", {"run_id": run, "key": "k", "value": "v"}, True),
        ("POST", "runs/set-tag", {"run_id": run, "key": "k", "value": "v"}, True),
        ("POST", "runs/update", {"run_id": run, "status": "FINISHED"}, True),
        ("POST", "runs/delete", {"run_id": run}, True),
        ("POST", "experiments/update", {"experiment_id": created, "new_name": "x"}, True),
        ("POST", "experiments/delete", {"experiment_id": created}, True),
        ("POST", "registered-models/rename", {"name": "net", "new_name": "x"}, True),
        ("DELETE", "registered-models/delete", {"name": "net"}, True),
        ("POST", "runs/create", {"experiment_id": created}, False),
    ]
    for method, path, body, is_change in calls:
        reply = ml(stranger, method, path, **body)
        assert reply.status_code == 404, (path, reply.text)
        if is_change:
            assert ml(viewer, method, path, **body).status_code == 403, path
    # What was logged is not told to whom the run is hidden, as little as that it is there.
    assert ml(ada, "POST", "runs/log-parameter", run_id=run, key="lr", value="0.25").is_success
    told = ml(stranger, "POST", "runs/log-parameter", run_id=run, key="lr", value="1")
    assert (told.status_code, "0.25" in told.text) == (404, False), told.text
    # A version belongs to the project of its model, whoever registers it.
    own = {"name": "weights", "source": "mlflow-artifacts:/0/r/artifacts/m"}
    assert ml(stranger, "POST", "registered-models/create", name="weights").is_success
    master.http.put("/projects/own/members/ada", json={"role": "editor"})
    assert ml(ada, "POST", "model-versions/create", **own).is_success
    for client, number in ((stranger, 1), (ada, 1), (viewer, 0)):
        versions = ml(client, "GET", "model-versions/search")
        assert len(versions.json().get("model_versions", "?")) == number, versions.text
    for path in ("experiments/search", "runs/search"):
        body = {"max_results": 9, "experiment_ids": [created]}
        assert run not in (found := ml(stranger, "POST", path, **body).text), path
        assert "secret" not in found
    assert "net" not in ml(stranger, "GET", "registered-models/search").text
    assert ml(stranger, "POST", "experiments/create", name="mine").status_code == 200
    assert ml(ada, "GET", "runs/get", run_id=run).json()["run"]["info"]["status"] == "RUNNING"

    def ask(client: httpx2.Client, query: str, **variables: Any) -> dict[str, Any]:
        body = {"query": query, "variables": variables}
        found: dict[str, Any] = client.post(f"{root}/graphql", json=body).json()
        return found

    assert ask(ada, UPSERT, name="r1", project="hush")["data"]["upsertBucket"]["inserted"]
    artifact = ask(ada, ARTIFACT)["data"]["createArtifact"]["artifact"]
    number = artifact["id"]
    for client in (stranger, viewer):
        assert ask(client, UPSERT, name="r1", project="hush")["errors"], client
        content = {
            "wandb-history.jsonl": '{"a": 1}',
            "output.log": "2026-01-01T00:00:00 by a viewer",
        }
        lines = {
            "files": {name: {"offset": 0, "content": [text]} for name, text in content.items()}
        }
        stream = client.post(f"{root}/files/paceline/hush/r1/file_stream", json=lines)
        assert stream.status_code == (403 if client is viewer else 404), stream.text
    for client in (stranger, viewer):
        shown = [line["text"] for line in ada.get("/trials/2/logs").json()["items"]]
        assert "by a viewer" not in "".join(shown), shown
        # By the URL of a file, anybody writes to the run.
        for change in (
            'createRunFiles(input: {projectName: "hush", runName: "r1", files: ["f"]}) {'
            " files { uploadUrl } }",
            f'createArtifactManifest(input: {{artifactID: "{number}"}}) {{'
            " artifactManifest { file { uploadUrl } } }",
            f'createArtifactFiles(input: {{artifactFiles: [{{artifactID: "{number}", name: "f",'
            ' md5: "x"}]}) { files { edges { node { uploadUrl } } } }',
        ):
            told = ask(client, f"mutation {{ {change} }}")
            assert ("errors" in told, "wandb-files" in json.dumps(told)) == (True, False), told
            told = ask(ada, f"mutation {{ {change} }}")
            assert ("errors" in told, "wandb-files" in json.dumps(told)) == (False, True), told
    # Ada is an editor in the stranger's project, whose run uses her artifact.
    master.http.put("/projects/Default/members/eve", json={"role": "viewer"})
    assert ask(stranger, UPSERT, name="hidden", project="used")["data"]["upsertBucket"]["inserted"]
    used = f'artifactID: "{number}", projectName: "used", runName: "hidden"'
    users = "{ artifact { usedBy { edges { node { name } } } } }"
    assert "hidden" in json.dumps(
        ask(stranger, f"mutation {{ useArtifact(input: {{{used}}}) {users} }}")
    )
    master.http.put("/projects/Default/members/eve", json={"role": None})
    master.http.put("/projects/own/members/ada", json={"role": None})
    tagged = f'updateArtifact(input: {{artifactID: "{number}"}})'
    told = ask(ada, f"mutation {{ {tagged} {users} }}")
    assert told["data"]["updateArtifact"]["artifact"]["usedBy"]["edges"] == [], told
    shown = 'query { project(name: "hush") { name } }'
    assert ask(stranger, shown)["data"]["project"] is None
    assert ask(viewer, shown)["data"]["project"]["name"] == "hush"
    assert ask(stranger, UPSERT, name="r2", project="mine")["data"]["upsertBucket"]["inserted"]


def test_who_may_not_change_a_project_makes_no_sweeps_and_takes_no_runs(
    master: Any, add: Any
) -> None:
    """A viewer sees a sweep, a stranger does not; neither is given one of its runs."""
    root = master.url.removesuffix("/api/v1")
    ada, viewer, stranger = add("ada"), add("vic", role="viewer"), add("eve", role=None)
    master.http.post("/projects", json={"name": "own"})
    master.http.put("/projects/own/members/eve", json={"role": "editor"})

    def ask(client: httpx2.Client, query: str) -> dict[str, Any]:
        found: dict[str, Any] = client.post(f"{root}/graphql", json={"query": query}).json()
        return found

    config = json.dumps(json.dumps({"method": "grid", "parameters": {"x": {"values": [1, 2]}}}))
    given = f'projectName: "hush", config: {config}'
    make = f"mutation {{ upsertSweep(input: {{{given}}}) {{ sweep {{ id name }} }} }}"
    sweep = ask(ada, make)["data"]["upsertSweep"]["sweep"]
    join = f'input: {{host: "h", projectName: "hush", sweep: "{sweep["name"]}"}}'
    join = f"mutation {{ createAgent({join}) {{ agent {{ id }} }} }}"
    agent = ask(ada, join)["data"]["createAgent"]["agent"]["id"]
    stop = f'input: {{id: "{sweep["id"]}", state: "FINISHED"}}'
    stop = f"mutation {{ upsertSweep({stop}) {{ sweep {{ id }} }} }}"
    beat = f'mutation {{ agentHeartbeat(input: {{id: "{agent}"}}) {{ commands }} }}'
    for client in (viewer, stranger):
        for query in (make, join, stop, beat):
            told = ask(client, query)
            assert ("errors" in told, "run_id" in json.dumps(told)) == (True, False), told
    shown = f'{{ project(name: "hush") {{ sweep(sweepName: "{sweep["name"]}") {{ runCount }} }} }}'
    assert ask(stranger, shown)["data"]["project"] is None
    assert ask(viewer, shown)["data"]["project"]["sweep"] == {"runCount": 0}
    [command] = json.loads(ask(ada, beat)["data"]["agentHeartbeat"]["commands"])
    assert command["args"] == {"x": {"value": 1}}
    # A sweep is where the client's project is, not in the project of what its maker creates else.
    ask(stranger, 'mutation { upsertModel(input: {name: "mine"}) { inserted } }')
    master.http.put("/projects/own/members/ada", json={"role": "editor"})
    assert ask(ada, make.replace("hush", "mine"))["data"], make
    shown = '{ project(name: "mine") { totalSweeps } }'
    assert ask(stranger, shown)["data"]["project"]["totalSweeps"] == 1


def test_a_restricted_read_leaves_no_trace_for_others(master: Any) -> None:
    master.create()
    count = select(tables.experiments.c.id)
    for sees, expected in (((), 0), ((1,), 1), ((2,), 0), ((1, 2), 1)):
        with acting(Reach("x", frozenset(sees), frozenset())):
            with master.core.database.read() as connection:
                assert len(connection.execute(count).all()) == expected
            with master.core.database.read(everything=True) as connection:
                assert len(connection.execute(count).all()) == 1
    with master.core.database.read() as connection:
        assert len(connection.execute(count).all()) == 1


def test_the_second_process_reads_within_the_reach(master: Any) -> None:
    master.create()
    records = _Records(DatabaseReader(master.core.database.path))
    try:
        for sees, total in ((frozenset(), 0), (frozenset({1}), 1), (None, 1)):
            answer = _answer(
                records, list_experiments, {"filters": Filters()}, Reach("x", sees, sees)
            )
            assert answer is not None
            assert json.loads(answer.body)["total"] == total
    finally:
        records.database.close()


def test_an_older_home_belongs_to_the_first_administrator(tmp_path: Path) -> None:
    with tarfile.open(STORED / "home_13.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    [stored] = tmp_path.rglob("master.sqlite")
    database = Database(stored)
    try:
        users = Users(database, lambda: None)
        assert users.reach("admin") == Reach("admin")
        assert not users.is_shared
        with database.read() as connection:
            rows = connection.execute(select(tables.experiments)).all()
            tokens = connection.execute(select(user_tables.tokens)).all()
        assert {(row.owner, row.project_id) for row in rows} == {("admin", 1)}
        assert {row.user for row in tokens} <= {"admin"}
    finally:
        database.close()


def test_a_backup_keeps_users_projects_and_roles(master: Any, add: Any, tmp_path: Path) -> None:
    add("ada", role="viewer")
    master.http.put("/users/ada/password", json={"password": "long enough"})
    master.http.post("/projects", json={"name": "own"})
    place = tmp_path / "backup"
    backup = Backup(master.home.path, place)
    with backup.hold():
        backup.make()
    restored = tmp_path / "restored"
    assert restore(place, restored).access.voided_passwords == ["ada"]
    database = Database(restored / "master.sqlite")
    try:
        users = Users(database, lambda: None)
        [ada, _] = users.all()
        assert (ada.name, ada.is_active, ada.has_password) == ("ada", True, False)
        assert json.loads(users.members("Default")[0].model_dump_json()) == {
            "user": "ada", "role": "viewer",
        }  # fmt: skip
        assert users.project_id("own") == 2
    finally:
        database.close()


def put_group(master: Any, user: str, group: str) -> None:
    assert master.http.patch(f"/users/{user}", json={"group": group}).status_code == 204


def test_a_group_gives_its_members_a_role_until_they_leave_it(master: Any, add: Any) -> None:
    """The higher one of both roles counts; the last member takes roles and quota along."""
    ada, bob = add("ada", role=None), add("bob", role="viewer")
    assert ada.get("/projects").json() == []
    missing = master.http.put("/projects/Default/members/@lab", json={"role": "editor"})
    assert (missing.status_code, "paceline user group" in missing.text) == (404, True)
    for user in ("ada", "bob"):
        put_group(master, user, "lab")
    put = master.http.put
    assert put("/projects/Default/members/@lab", json={"role": "editor"}).status_code == 204
    assert {"user": "@lab", "role": "editor"} in master.http.get("/projects/Default/members").json()
    for client in (ada, bob):
        assert client.get("/projects").json()[0]["role"] == "editor"
        assert client.post("/experiments", json=config()).status_code == 201
    assert put("/quotas/group/lab", json={"max_slots": 2}).status_code == 204
    assert put("/quotas/group/none-such", json={"max_slots": 2}).status_code == 404
    put_group(master, "ada", "")
    assert ada.get("/experiments").json()["total"] == 0
    assert [one["group"] for one in bob.get("/quotas").json()] == ["lab"]
    assert [one["group"] for one in ada.get("/quotas").json()] == []
    assert [one["group"] for one in master.http.get("/users").json()] == [None, None, "lab"]
    assert master.http.delete("/users/bob").status_code == 204
    assert master.http.get("/quotas").json() == []
    assert master.http.get("/projects/Default/members").json() == []
    # A group of the same name begins anew.
    put_group(master, "ada", "lab")
    assert ada.get("/projects").json() == []


@pytest.mark.parametrize("group", ["@lab", "a b", "..", "x" * 64, None])
def test_names_of_groups_are_like_those_of_users(master: Any, add: Any, group: Any) -> None:
    """Others are refused; no change without a field is one."""
    add("ada")
    status = master.http.patch("/users/ada", json={"group": group}).status_code
    assert status == (422 if group else 204)
    assert [one["group"] for one in master.http.get("/users").json()] == [None, None]


def test_a_user_changes_no_group(master: Any, add: Any) -> None:
    """Groups are for administrators of the master."""
    ada = add("ada")
    assert ada.patch("/users/ada", json={"group": "lab"}).status_code == 403


def test_runners_of_the_cluster_need_no_first_user(master: Any, add: Any) -> None:
    """Another administrator makes their tokens when that one has left."""
    boss = add("boss", is_admin=True)
    assert boss.delete("/users/admin").status_code == 204
    body = {"name": "box", "scope": "runner"}
    assert boss.post("/tokens", json=body).status_code == 201
    assert boss.post("/tokens", json={**body, "name": "b", "user": "nobody"}).status_code == 404
