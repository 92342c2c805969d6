"""Secrets of experiments: one file has them, no route shows them, and copies keep them."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from paceline._cluster.master.api.route_scopes import ROUTES
from paceline._cluster.master.experiments.attempts import build_launch
from paceline._cluster.master.home_directory import SecretStore
from paceline._cluster.runner.attempt_directory import SecretFileError

SECRET, TOKEN = "hunter2-secret", "hunter2-token"
SUBMITTED = f"""\
environment:
  secrets: {{WANDB_API_KEY: {SECRET}}}  # and {SECRET} again
  variables: {{HF_TOKEN: {TOKEN}, SEEN: yes}}
"""


def create(master: Any, **changed: Any) -> int:
    environment = {"secrets": {"WANDB_API_KEY": SECRET}, "variables": {"HF_TOKEN": TOKEN}}
    config = {
        "entrypoint": "true",
        "searcher": {"name": "single", "metric": "loss"},
        "environment": environment,
    }
    body = {"config": config, "submitted_config": SUBMITTED, "activate": False} | changed
    reply = master.http.post("/experiments", json=body)
    assert reply.status_code == 201, reply.text
    return int(reply.json()["id"])


def values_of(master: Any, experiment_id: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a trial of an experiment would get: variables and secrets."""
    master.http.post(f"/experiments/{experiment_id}/activate")
    master.schedule()
    trial = master.http.get(f"/experiments/{experiment_id}/trials").json()["items"][0]
    attempt = master.http.get(f"/trials/{trial['id']}").json()["attempts"][-1]
    with master.core.database.read() as connection:
        launch = build_launch(connection, master.core.reconciler._sources, attempt["id"])
    assert SECRET not in json.dumps(launch.info.trial.config)
    assert launch.spec.secret_names == sorted(launch.secrets)
    return launch.spec.variables, launch.secrets


@pytest.mark.long
def test_a_secret_is_in_its_file_only_and_in_no_route(make_master: Callable[..., Any]) -> None:
    master = make_master(num_slots=8)
    first = create(master)
    assert values_of(master, first) == ({"HF_TOKEN": TOKEN}, {"WANDB_API_KEY": SECRET})
    shown = master.http.get(f"/experiments/{first}/config").json()
    assert shown["resolved"]["environment"]["secrets"] == {"WANDB_API_KEY": "***"}
    assert shown["resolved"]["environment"]["variables"] == {"HF_TOKEN": "***"}
    assert shown["submitted"] == SUBMITTED.replace(f": {SECRET}", ': "***"').replace(
        f": {TOKEN}", ': "***"'
    ).replace(SECRET, "***")
    for route in (route for routes in ROUTES.values() for route in routes):
        method, _, path = route.partition(" ")
        if method == "GET" and path not in ("/events", "/sign-in"):
            reply = master.http.get(re.sub(r"{(.+?)}", "1", path))
            assert SECRET not in reply.text, route
            assert TOKEN not in reply.text, route

    fork = {"config": {"name": "again"}, "replaces_config": False, "activate": False}
    forked = master.http.post(f"/experiments/{first}/fork", json=fork).json()["id"]
    # As the web UI does it: the whole configuration, as it is shown.
    whole = fork | {"config": shown["resolved"], "replaces_config": True}
    edited = master.http.post(f"/experiments/{first}/fork", json=whole).json()["id"]
    for copy in (forked, edited):
        assert values_of(master, copy) == ({"HF_TOKEN": TOKEN}, {"WANDB_API_KEY": SECRET})
    other = fork | {"config": {"environment": {"secrets": {"WANDB_API_KEY": "other-one"}}}}
    changed = master.http.post(f"/experiments/{first}/fork", json=other).json()["id"]
    assert values_of(master, changed)[1] == {"WANDB_API_KEY": "other-one"}

    files = [path for path in master.home.path.rglob("*") if path.is_file()]
    assert [p.name for p in files if SECRET.encode() in p.read_bytes()] == ["secrets.json"]
    assert (master.home.path / "secrets.json").stat().st_mode & 0o777 == 0o600

    refused = master.http.post("/experiments", json={"config": shown["resolved"]})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_config")
    assert "must have its value" in refused.json()["detail"]


def test_continuing_keeps_and_overrides_secrets_and_deleting_removes_them(
    make_master: Callable[..., Any],
) -> None:
    master = make_master(num_slots=2, name="kept")
    first = create(master)
    second = create(master)
    path = f"/experiments/{first}"
    assert master.http.post(f"{path}/kill").status_code == 200
    # A refusal after the secret was changed takes the change back.
    override: Any = {"environment": {"secrets": {"WANDB_API_KEY": "second-one", "NEW": "x"}}}
    too_many = {"config": override | {"resources": {"slots_per_trial": 99}}}
    assert master.http.post(f"{path}/continue", json=too_many).status_code == 409
    assert master.core.secrets.of(first) == {"WANDB_API_KEY": SECRET}
    reply = master.http.post(f"{path}/continue", json={"config": override})
    assert reply.status_code == 200, reply.text
    assert reply.json()["config"]["environment"]["secrets"] == {
        "WANDB_API_KEY": "***",
        "NEW": "***",
    }
    assert values_of(master, first)[1] == {"WANDB_API_KEY": "second-one", "NEW": "x"}
    master.server._stop()
    master._thread.join()
    again = make_master(num_slots=2, name="kept")
    assert again.core.secrets.of(first) == {"WANDB_API_KEY": "second-one", "NEW": "x"}
    assert again.http.post(f"/experiments/{second}/kill").status_code == 200
    assert again.http.delete(f"/experiments/{second}").json() == {"left_behind": []}
    assert set(SecretStore(again.home.path / "secrets.json")._secrets) == {first}


def test_a_damaged_file_of_secrets_is_named(tmp_path: Any) -> None:
    (tmp_path / "secrets.json").write_text("{")
    with pytest.raises(SecretFileError, match=r"secrets.json' must be readable.*Hint: move"):
        SecretStore(tmp_path / "secrets.json")
