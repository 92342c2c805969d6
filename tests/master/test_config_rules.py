"""Templates and policies for configs: who sets them, and all ways to configs that meet them."""

import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paceline._cluster.master.upkeep.backup import Backup
from paceline._cluster.master.upkeep.restore import restore
from paceline.client import Client
from paceline.config import ConfigError

SEARCHER = {"name": "single", "metric": "loss"}
CONFIG = {"name": "own", "entrypoint": "python3 t.py", "searcher": SEARCHER}
POLICY = {
    "required": ["labels"],
    "limits": {"resources.max_slots": {"max": 4}, "resources.priority": {"min": 40}},
}
MEETS: dict[str, Any] = {**CONFIG, "labels": ["team-a"], "resources": {"max_slots": 2}}


def put(client: Any, kind: str, name: str, content: Any, project: str = "", **more: Any) -> Any:
    params = {"project": project} if project else {}
    return client.put(
        f"/config-rules/{kind}/{name}", params=params, json={"content": content, **more}
    )


def create(client: Any, config: Any, **more: Any) -> Any:
    return client.post("/experiments", json={"config": config, **more})


def created(client: Any, config: Any, **more: Any) -> int:
    reply = create(client, config, **more)
    assert reply.status_code == 201, reply.text
    return int(reply.json()["id"])


def refused(reply: Any, *texts: str) -> None:
    assert reply.status_code == 422, reply.text
    assert reply.json()["code"] == "invalid_config"
    for text in texts:
        assert text in reply.json()["detail"]


@pytest.fixture
def lab(master: Any) -> Any:
    """Return a master with the project `lab` and its policy."""
    assert master.http.post("/projects", json={"name": "lab"}).status_code == 201
    assert put(master.http, "policy", "cost", POLICY, "lab").status_code == 204
    return master


def stored(master: Any, number: int) -> dict[str, Any]:
    found: dict[str, Any] = master.http.get(f"/experiments/{number}/config").json()["resolved"]
    return found


def test_open_fields_come_from_templates_and_the_stored_config_is_whole(master: Any) -> None:
    master.http.post("/projects", json={"name": "lab"})
    everywhere = {"max_restarts": 1, "debug": True, "environment": {"variables": {"A": "1"}}}
    assert put(master.http, "template", "default", everywhere).status_code == 204
    of_lab = {"max_restarts": 2, "preemption_timeout": 9, "labels": ["lab"]}
    assert put(master.http, "template", "default", of_lab, "lab").status_code == 204
    gpu = {"preemption_timeout": 30, "searcher": SEARCHER, "entrypoint": "python3 gpu.py"}
    assert put(master.http, "template", "gpu", gpu, "lab").status_code == 204
    own = {"name": "x", "environment": {"variables": {"B": "2"}}, "labels": ["mine"]}
    number = created(master.http, own, project="lab", template="gpu")
    found = stored(master, number)
    assert (found["max_restarts"], found["debug"], found["preemption_timeout"]) == (2, True, 30)
    assert found["environment"]["variables"] == {"A": "1", "B": "2"}
    assert found["labels"] == ["lab", "mine"]
    assert found["entrypoint"] == "python3 gpu.py"
    # What the config gives counts, also if it is the default of the field.
    again = created(master.http, {**CONFIG, "max_restarts": 5, "debug": False}, project="lab")
    assert (stored(master, again)["max_restarts"], stored(master, again)["debug"]) == (5, False)
    other = stored(master, created(master.http, CONFIG))
    assert (other["max_restarts"], other["preemption_timeout"], other["debug"]) == (1, 600, True)
    refused(create(master.http, CONFIG, template="gpu"), "must be a template", "default")
    # A change of the template changes no experiment; a fork of a submitted text starts from it.
    assert put(master.http, "template", "default", {}, "lab", revision=1).status_code == 204
    assert stored(master, number)["max_restarts"] == 2
    body = {"config": CONFIG, "replaces_config": True}
    fork = master.http.post(f"/experiments/{number}/fork", json=body).json()["id"]
    assert stored(master, fork)["max_restarts"] == 1


def test_a_policy_is_met_on_each_way_to_a_config(lab: Any) -> None:
    http = lab.http
    reply = create(http, CONFIG, project="lab")
    refused(reply, "`labels` must be given by the policy 'cost' of the project lab, got nothing.")
    refused(reply, "`resources.max_slots` must be at most 4", "paceline policy show cost")
    number = created(http, MEETS, project="lab")
    path = f"/experiments/{number}"
    for change in (
        {"priority": 39}, {"max_slots": 5}, {"max_slots": 0}, {"labels": []}, {"labels": [" "]},
    ):  # fmt: skip
        refused(http.patch(path, json=change), "the policy 'cost'")
    assert http.patch(path, json={"priority": 41, "max_slots": 4}).status_code == 200
    bulk = {"action": "label", "experiment_ids": [number], "remove_labels": ["team-a"]}
    assert "`labels` must be given" in http.post("/bulk-actions", json=bulk).json()[0]["error"]
    # Into the project, while it is not over, one by one and many at once.
    outside = created(http, CONFIG, activate=False)
    refused(http.patch(f"/experiments/{outside}", json={"project": "lab"}), "`labels`")
    bulk = {"action": "move", "experiment_ids": [outside], "to": "lab"}
    assert "`labels` must be given" in http.post("/bulk-actions", json=bulk).json()[0]["error"]
    assert http.get(f"/experiments/{outside}").json()["project"] == "Default"
    # One that has ended moves, but goes on only if it meets the policy.
    http.post(f"/experiments/{outside}/kill")
    lab.schedule()
    assert http.patch(f"/experiments/{outside}", json={"project": "lab"}).status_code == 200
    refused(http.post(f"/experiments/{outside}/continue", json={}), "`labels` must be given")
    changed = {"config": {"resources": {"max_slots": 9}}}
    refused(http.post(f"/experiments/{outside}/continue", json=changed), "at most 4")
    # The fields that are edited in place of the config's count.
    assert http.patch(f"/experiments/{outside}", json={"labels": ["a"]}).status_code == 200
    changed = {"config": {"resources": {"max_slots": 3}}}
    assert http.post(f"/experiments/{outside}/continue", json=changed).status_code == 200


def test_copies_meet_the_policy_of_the_project_they_come_into(lab: Any, add: Any) -> None:
    ada = add("ada", role=None)
    lab.http.put("/projects/lab/members/ada", json={"role": "editor"})
    number = created(ada, MEETS)
    assert lab.http.get(f"/experiments/{number}").json()["project"] == "lab"
    fork = f"/experiments/{number}/fork"
    refused(ada.post(fork, json={"config": {"resources": {"max_slots": 8}}}), "at most 4")
    whole = {"config": {**MEETS, "labels": []}, "replaces_config": True}
    refused(ada.post(fork, json=whole), "`labels`")
    assert ada.post(fork, json={"config": {}}).status_code == 201
    # Whoever may change the project copies within it, also an administrator with others.
    refused(lab.http.post(fork, json={"config": {"resources": {"max_slots": 8}}}), "at most 4")
    copied = lab.http.post(fork, json={"config": {}}).json()
    assert (copied["project"], copied["owner"]) == ("lab", "admin")
    # A viewer's copy is in a project of the viewer's, under its policies.
    bob = add("bob", role="editor")
    lab.http.put("/projects/lab/members/bob", json={"role": "viewer"})
    taken = bob.post(fork, json={"config": {"resources": {"max_slots": 8}}}).json()
    assert (taken["project"], taken["owner"]) == ("Default", "bob")
    trial = lab.http.get(f"/experiments/{number}/trials").json()["items"][0]["id"]
    body = {"config": {"resources": {"priority": 1, "max_slots": 2}}}
    refused(ada.post(f"/trials/{trial}/continue", json=body), "`resources.priority`")


def test_limits_of_a_search_meet_the_policy_when_they_change(master: Any) -> None:
    policy = {"limits": {"searcher.limits.max_trials": {"max": 4}}}
    assert put(master.http, "policy", "small", policy).status_code == 204
    random = {"name": "random", "metric": "loss", "max_trials": 3}
    refused(create(master.http, {**CONFIG, "searcher": random}), "at most 4")
    limited = {**random, "limits": {"max_trials": 3}}
    number = created(master.http, {**CONFIG, "searcher": limited})
    path = f"/experiments/{number}"
    for limit in (5, None):
        refused(master.http.patch(path, json={"limits": {"max_trials": limit}}), "at most 4")
    assert master.http.patch(path, json={"limits": {"max_trials": 4}}).status_code == 200
    master.http.post(f"{path}/kill")
    master.schedule()
    refused(master.http.post(f"{path}/continue", json={"limits": {"max_trials": 9}}), "at most 4")
    assert master.http.get(path).json()["state"] == "CANCELED"


def test_a_search_that_goes_on_for_more_trials_meets_the_limit_on_its_plan(master: Any) -> None:
    policy = {"limits": {"searcher.max_trials": {"max": 4}}, "required": ["description"]}
    assert put(master.http, "policy", "small", policy).status_code == 204
    random = {"name": "random", "metric": "loss", "max_trials": 3}
    config = {**CONFIG, "searcher": random, "description": "three trials"}
    refused(create(master.http, {**config, "description": " "}), "`description` must be given")
    number = created(master.http, config)
    path = f"/experiments/{number}"
    refused(master.http.patch(path, json={"limits": {"max_trials": 5}}), "at most 4", "got 5")
    master.http.post(f"{path}/kill")
    master.schedule()
    more = {"limits": {"max_trials": 5}}
    refused(master.http.post(f"{path}/continue", json=more), "`searcher.max_trials`")
    more = {"limits": {"max_trials": 4}}
    assert master.http.post(f"{path}/continue", json=more).status_code == 200


def test_what_was_there_before_a_policy_goes_on_and_changes_elsewhere(master: Any) -> None:
    number = created(master.http, CONFIG, activate=False)
    assert put(master.http, "policy", "cost", POLICY, "Default").status_code == 204
    path = f"/experiments/{number}"
    assert master.http.patch(path, json={"description": "kept"}).status_code == 200
    assert master.http.post(f"{path}/activate").status_code == 200
    assert master.http.patch(path, json={"priority": 50}).status_code == 200
    refused(master.http.patch(path, json={"priority": 1}), "at least 40")
    # From one wrong value to another one.
    refused(master.http.patch(path, json={"max_slots": 9}), "got 9")


def test_what_is_fixed_is_filled_in_and_nothing_else_is_taken(master: Any) -> None:
    fixed = {"max_restarts": 0, "checkpoint_storage": {"type": "directory", "path": "/data/lab"}}
    allowed = {"resources.pool": ["default", "gpu-*"], "labels": ["team-*"]}
    policy = {"fixed": fixed, "allowed": allowed}
    assert put(master.http, "policy", "house", policy).status_code == 204
    found = stored(master, created(master.http, CONFIG))
    assert (found["max_restarts"], found["checkpoint_storage"]["path"]) == (0, "/data/lab")
    refused(create(master.http, {**CONFIG, "max_restarts": 3}), "`max_restarts` must be 0", "got 3")
    elsewhere = {**CONFIG, "checkpoint_storage": {"type": "s3", "bucket": "own"}}
    refused(create(master.http, elsewhere), '`checkpoint_storage.type` must be "directory"')
    refused(create(master.http, {**CONFIG, "labels": ["team-a", "x"]}), "`labels` must be", '"x"')
    refused(create(master.http, {**CONFIG, "resources": {"pool": "gpu"}}), "default, gpu-*")


@pytest.mark.parametrize(
    ("storage", "is_allowed"),
    [
        ("/data/lab/a", True), ("/data/lab/../own", False), ("/data/labs", False), (None, False),
        ({"type": "shared_fs", "host_path": "/data", "storage_path": "lab/x"}, True),
        ({"type": "s3", "bucket": "lab", "prefix": "a"}, True), ("s3://lab/a", True),
        ("s3://lab/%2e%2e/own", False), ("s3://other/a", False),
    ],
)  # fmt: skip
def test_storages_are_allowed_by_what_they_begin_with(
    master: Any, storage: Any, is_allowed: bool
) -> None:
    policy = {"allowed": {"checkpoint_storage": ["/data/lab/*", "s3://lab/*"]}}
    assert put(master.http, "policy", "place", policy).status_code == 204
    reply = create(master.http, {**CONFIG, "checkpoint_storage": storage})
    assert reply.status_code == (201 if is_allowed else 422), reply.text


@pytest.mark.parametrize(
    ("kind", "content", "text"),
    [
        ("template", {"max_restart": 1}, "did you mean `max_restarts`"),
        ("template", {"max_restarts": "many"}, "an integer"),
        ("template", {"environment": {"secrets": {"KEY": "hush"}}}, "`environment.secrets`"),
        ("template", {"searcher": {"max_trial": 2}}, "is not a known field"),
        ("policy", {"require": ["labels"]}, "required, limits, allowed, fixed"),
        ("policy", {"required": ["label"]}, "must name fields of experiment configs"),
        ("policy", {"limits": {"labels": {"max": 1}}}, "with a number"),
        ("policy", {"limits": {"max_restarts": {}}}, "must have `min` or `max`"),
        ("policy", {"limits": {"hyperparameters.lr": {"max": 1}}}, "with a number"),
        ("policy", {"fixed": {"max_restarts": -1}}, "an integer >= 0"),
    ],
)
def test_a_rule_that_would_have_no_effect_is_refused(
    master: Any, kind: str, content: Any, text: str
) -> None:
    reply = put(master.http, kind, "x", content)
    refused(reply, text)
    assert "hush" not in reply.text
    assert master.http.get("/config-rules").json() == []


@pytest.mark.long
def test_two_who_change_one_rule_do_not_overwrite_each_other(lab: Any) -> None:
    replies: list[int] = []

    def change(most: int) -> None:
        policy = {"limits": {"max_restarts": {"max": most}}}
        replies.append(put(lab.http, "policy", "cost", policy, "lab", revision=1).status_code)

    threads = [threading.Thread(target=change, args=[n]) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(replies) == [204, 409]
    [found] = lab.http.get("/config-rules").json()
    assert (found["revision"], found["changed_by"], found["project"]) == (2, "admin", "lab")
    late = lab.http.delete("/config-rules/policy/cost?project=lab&revision=1")
    assert (late.status_code, late.json()["code"]) == (409, "rule_changed")
    assert lab.http.delete("/config-rules/policy/cost?project=lab&revision=2").status_code == 204
    assert created(lab.http, CONFIG, project="lab")


def test_rules_are_set_by_administrators_of_the_project_and_seen_by_its_members(
    lab: Any, add: Any
) -> None:
    people = {role: add(role, role="editor") for role in ("admin2", "editor", "stranger")}
    lab.http.put("/projects/lab/members/admin2", json={"role": "admin"})
    lab.http.put("/projects/lab/members/editor", json={"role": "editor"})
    template = {"max_restarts": 1}
    for name, project, status in (
        ("admin2", "lab", 204), ("admin2", "Default", 403), ("admin2", "", 403),
        ("editor", "lab", 403), ("stranger", "lab", 404), ("stranger", "nowhere", 404),
    ):  # fmt: skip
        reply = put(people[name], "template", "t", template, project)
        assert reply.status_code == status, (name, project, reply.text)
    seen = {name: len(client.get("/config-rules").json()) for name, client in people.items()}
    assert seen == {"admin2": 2, "editor": 2, "stranger": 0}
    assert create(people["stranger"], CONFIG, project="lab").status_code == 404
    audited = [one for one in lab.http.get("/audit?user=admin2").json() if one["status"] == 204]
    assert [one["objects"] for one in audited] == [["template t"]]
    read = add("reader", scope="read", role="viewer")
    assert put(read, "template", "t", template, "lab").status_code == 403


def test_a_client_and_a_check_tell_what_a_config_becomes(lab: Any) -> None:
    put(lab.http, "template", "default", {"searcher": SEARCHER, "max_restarts": 1}, "lab")
    text = "entrypoint: python3 t.py\nlabels: [a]\nresources: {max_slots: 5}\n"
    body = {"text": text, "project": "lab"}
    found = lab.http.post("/check-config", json=body).json()
    assert [(one["path"], one["line"]) for one in found["problems"]] == [("resources.max_slots", 3)]
    body["text"] = text.replace("5", "4")
    found = lab.http.post("/check-config", json=body).json()
    told = "the template 'default' of the project lab"
    filled = {"searcher.name": told, "searcher.metric": told, "max_restarts": told}
    assert (found["problems"], found["filled"]) == ([], filled)
    assert found["resolved"]["max_restarts"] == 1
    url = f"http://127.0.0.1:{lab.port}"
    with Client(url, lab.home.token) as client:
        own = {"entrypoint": "python3 t.py", "labels": ["a"], "resources": {"max_slots": 5}}
        with pytest.raises(ConfigError, match="at most 4 by the policy 'cost'"):
            client.create_experiment(own, project="lab")
        own["resources"] = {"max_slots": 4}
        made = client.create_experiment(own, project="lab")
        assert stored(lab, made.id)["max_restarts"] == 1
        # A config object counts with the fields that it was given.
        given = client.resolve_config({**CONFIG, "max_restarts": 7})
        again = client.create_experiment(
            given, project="lab", overrides=["labels=[b]", "resources.max_slots=1"]
        )
        assert stored(lab, again.id)["max_restarts"] == 7


def test_a_backup_that_is_restored_elsewhere_keeps_who_may_do_what(
    lab: Any, add: Any, make_master: Any, tmp_path: Path
) -> None:
    """Users, groups, roles, quotas, projects and rules; of tokens only those of runners' nodes."""
    ada = add("ada", role=None)
    put_lab = lab.http.put
    assert lab.http.patch("/users/ada", json={"group": "team"}).status_code == 204
    assert put_lab("/projects/lab/members/@team", json={"role": "editor"}).status_code == 204
    assert put_lab("/quotas/group/team", json={"max_slots": 3}).status_code == 204
    assert put_lab("/quotas/project/lab", json={"media_bytes": 5}).status_code == 204
    assert put(lab.http, "template", "default", {"max_restarts": 7}).status_code == 204
    number = created(ada, MEETS)
    seen = {
        path: lab.http.get(path).json()
        for path in ("/config-rules", "/projects", "/projects/lab/members", "/quotas")
    }
    backup = Backup(lab.home.path, tmp_path / "backup")
    with backup.hold():
        backup.make()
    restore(tmp_path / "backup", tmp_path / "elsewhere")
    other = make_master(name="elsewhere")
    assert {path: other.http.get(path).json() for path in seen} == seen
    users = [(one["name"], one["group"]) for one in other.http.get("/users").json()]
    assert users == [("ada", "team"), ("admin", None)]
    assert other.http.get(f"/experiments/{number}").json()["owner"] == "ada"
    # The token of before opens nothing there, and a new one acts as its user within the rules.
    url = f"http://127.0.0.1:{other.port}/api/v1/experiments"
    known = httpx2.get(url, headers=dict(ada.headers), verify=False)
    assert known.status_code == 401
    body = {"name": "again", "scope": "admin", "user": "ada"}
    secret = other.http.post("/tokens", json=body).json()["secret"]
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx2.Client(base_url=other.url, headers=headers, verify=False, timeout=60) as again:
        refused(create(again, CONFIG), "`labels` must be given by the policy 'cost'")
        assert stored(other, created(again, MEETS))["max_restarts"] == 7


def test_a_project_is_deleted_when_it_is_empty(lab: Any, add: Any) -> None:
    ada = add("ada", role=None)
    lab.http.put("/projects/lab/members/ada", json={"role": "editor"})
    lab.http.put("/quotas/project/lab", json={"max_slots": 3})
    number = created(ada, MEETS)
    lab.schedule()
    assert lab.attempt(1, "records", batches=[]).status_code == 200
    reply = lab.http.delete("/projects/lab")
    assert (reply.status_code, reply.json()["code"]) == (409, "project_in_use")
    assert "has 1 experiment. Hint: `paceline e move" in reply.json()["detail"]
    # Its trial runs on, also while it moves.
    assert lab.http.get(f"/experiments/{number}").json()["shown_state"] == "RUNNING"
    assert lab.http.delete("/projects/Default").status_code == 409
    assert ada.delete("/projects/lab").status_code == 403
    moved = lab.http.patch(f"/experiments/{number}", json={"project": "Default"})
    assert moved.status_code == 200
    lab.http.put("/pools/default", json={"open_to": ["project:lab"]})
    assert "has the pool 'default' open to it" in lab.http.delete("/projects/lab").json()["detail"]
    lab.http.put("/pools/default", json={})
    assert lab.http.delete("/projects/lab").status_code == 204
    assert lab.http.get(f"/experiments/{number}").json()["shown_state"] == "RUNNING"
    assert lab.http.get("/config-rules").json() == lab.http.get("/quotas").json() == []
    assert create(ada, MEETS).status_code == 403
    assert create(lab.http, MEETS, project="lab").status_code == 404
    # Another one of the name is another one.
    assert lab.http.post("/projects", json={"name": "lab"}).json()["id"] == 3
    assert lab.http.get("/projects/lab/members").json() == []
