"""Renaming, archiving, forking and deleting experiments."""

import hashlib
from typing import Any

import pytest
from sqlalchemy import func, select

from paceline._cluster.master.api import checkpoint_routes as _checkpoint_routes
from paceline._cluster.master.store import tables, user_tables
from paceline.storage import DirectoryStorage

MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture
def ended(master: Any) -> Any:
    """Return a master with an ended experiment that has a metric, a log line and a checkpoint."""
    root = master.home.path / "checkpoints"
    master.create(checkpoint_storage={"type": "directory", "path": str(root)})
    master.schedule()
    master.report(1, 0, ("validation", 1, {"loss": 0.5}))
    storage = DirectoryStorage(root)
    with storage.store_path("one") as path:
        (path / "state").write_bytes(b"12345")
    storage.commit("one", {}, origin=master.origin(1))
    checkpoint = {
        "type": "checkpoint", "time": 0.0, "uuid": "one", "steps_completed": 1, "metadata": {},
        "resources": {"state": 5}, "storage": str(root),
    }  # fmt: skip
    batch = {"generation": 0, "rank": 1, "records": [[0, checkpoint]]}
    assert master.attempt(1, "records", batches=[batch]).status_code == 200
    master.attempt(1, "logs", entries=[[0, 0.0, 0, "stdout", None, "hello"]])
    end(master)
    return master


def end(master: Any) -> None:
    master.http.post("/experiments/1/kill")
    for attempt_id in (1, 2):
        reply = master.attempt(
            attempt_id, "end", reason="killed", code=None, signal=9, time=1.0, detail=None
        )
        assert reply.status_code == 204, reply.text
    assert master.http.get("/experiments/1").json()["state"] == "CANCELED"


def test_what_people_write_is_kept_and_shown_as_written(master: Any) -> None:
    master.create(labels=["a"])
    body = {"name": MARKUP, "notes": "# Notes\n" + MARKUP, "labels": ["b", "b", " ", MARKUP]}
    changed = master.http.patch("/experiments/1", json=body).json()
    assert (changed["name"], changed["notes"]) == (MARKUP, "# Notes\n" + MARKUP)
    assert changed["labels"] == ["b", MARKUP]
    assert changed["config"]["name"] == "served"
    assert master.http.get("/experiments").json()["items"][0]["notes"] == ""
    assert master.http.patch("/experiments/1", json={}).json() == changed
    assert master.http.patch("/experiments/1", json={"name": ""}).status_code == 422


def test_notes_that_someone_else_has_changed_are_not_replaced(master: Any) -> None:
    master.create()
    version = master.http.get("/experiments/1").json()["notes_version"]
    theirs = {"notes": "theirs", "notes_version": version}
    changed = master.http.patch("/experiments/1", json=theirs).json()
    assert (changed["notes"], changed["notes_version"] != version) == ("theirs", True)
    mine = {"notes": "mine", "notes_version": version}
    reply = master.http.patch("/experiments/1", json=mine)
    assert (reply.status_code, reply.json()["code"]) == (409, "notes_changed")
    assert master.http.get("/experiments/1").json()["notes"] == "theirs"
    mine["notes_version"] = changed["notes_version"]
    assert master.http.patch("/experiments/1", json=mine).json()["notes"] == "mine"
    assert master.http.patch("/experiments/1", json={"notes": "forced"}).status_code == 200


def test_an_ended_experiment_goes_into_the_archive_and_back(ended: Any) -> None:
    ended.create()
    running = ended.http.post("/experiments/2/archive")
    assert (running.status_code, running.json()["code"]) == (409, "not_ended")
    assert ended.http.post("/experiments/1/archive").json()["is_archived"] is True
    listed = {
        archived: [
            one["id"] for one in ended.http.get(f"/experiments?archived={archived}").json()["items"]
        ]
        for archived in ("no", "only", "all")
    }
    assert listed == {"no": [2], "only": [1], "all": [2, 1]}
    assert ended.http.post("/experiments/1/unarchive").json()["is_archived"] is False


def test_a_fork_has_the_code_and_the_changed_configuration(master: Any) -> None:
    code = b"packed"
    digest = hashlib.sha256(code).hexdigest()
    master.http.put(f"/contexts/{digest}", content=code)
    config = {"name": "first", "entrypoint": "python3 a.py", "hyperparameters": {"lr": 1},
              "searcher": {"name": "single", "metric": "loss"}}  # fmt: skip
    body = {"config": config, "context_digest": digest, "activate": False}
    assert master.http.post("/experiments", json=body).status_code == 201
    changes = {"config": {"hyperparameters": {"lr": 2}}, "activate": False}
    fork = master.http.post("/experiments/1/fork", json=changes).json()
    assert (fork["name"], fork["forked_from"], fork["has_code"]) == ("first (fork)", 1, True)
    assert (fork["config"]["hyperparameters"]["lr"], fork["state"]) == (2, "PAUSED")
    whole = {"config": {**config, "name": "new"}, "replaces_config": True, "activate": False}
    assert master.http.post("/experiments/1/fork", json=whole).json()["name"] == "new"
    wrong = {"config": {"searcher": {"name": "guess"}}}
    assert master.http.post("/experiments/1/fork", json=wrong).json()["code"] == "invalid_config"


def test_deleting_tells_the_loss_takes_everything_and_gives_no_id_again(ended: Any) -> None:
    loss = ended.http.get("/experiments/1/loss").json()
    assert loss == {
        "num_trials": 2, "num_checkpoints": 1, "checkpoint_bytes": 5, "num_metric_points": 1,
        "obstacle": None,
    }  # fmt: skip
    (ended.home.attempts_path / "1.output.jsonl").write_text("kept")
    used = ended.http.get("/usage?by=user").json()
    assert [row["num_trials"] for row in used] == [2]
    reply = ended.http.delete("/experiments/1")
    assert (reply.status_code, reply.json()) == (200, {"left_behind": []})
    assert ended.http.get("/usage?by=user").json() == used
    for path in ("/experiments/1", "/trials/1", "/checkpoints/one", "/trials/1/logs"):
        assert ended.http.get(path).status_code == 404
    assert ended.http.delete("/experiments/1").status_code == 404
    assert not list((ended.home.path / "checkpoints").glob("one*"))
    assert list(ended.home.logs_path.iterdir()) == []
    assert list(ended.home.attempts_path.iterdir()) == []
    with ended.core.database.read() as connection:
        for table in user_tables.metadata.sorted_tables:
            if table is user_tables.audit:
                continue
            if table is tables.unrecorded:
                continue  # that it was deleted is still to be recorded beside the database
            rows = select(func.count()).select_from(table)
            if table is tables.counts:
                rows = rows.where(tables.counts.c.number != 0)
            num_rows = connection.execute(rows).scalar_one()
            assert num_rows == {
                "events": 1,
                "meta": 5,
                "projects": 1,
                "slot_use": 1,
                "usage": 1,
                "users": 1,
            }.get(table.name, 0), table.name
    assert ended.create() == 2
    assert ended.http.get("/experiments/2/trials").json()["items"][0]["id"] == 3


def test_an_experiment_in_use_is_not_deleted(ended: Any) -> None:
    user = {"name": "single", "metric": "loss", "source_checkpoint_uuid": "one"}
    assert ended.create(searcher=user) == 2
    for experiment_id, message in ((1, "trial 3 starts from"), (2, "must have ended")):
        assert message in ended.http.get(f"/experiments/{experiment_id}/loss").json()["obstacle"]
        reply = ended.http.delete(f"/experiments/{experiment_id}")
        assert (reply.status_code, reply.json()["code"]) == (409, "not_deletable")
        assert message in reply.json()["detail"]
    assert ended.http.get("/checkpoints/one").json()["state"] == "COMPLETED"


@pytest.mark.parametrize("query", ["", "?glob=state"])
def test_no_trial_starts_from_a_checkpoint_whose_files_are_being_deleted(
    ended: Any, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    user = {"name": "single", "metric": "loss", "source_checkpoint_uuid": "one"}
    config = {"name": "b", "entrypoint": "python3 a.py", "searcher": user}
    row = ended.http.get("/checkpoints/one").json()
    replies = []

    def create_meanwhile(delete: Any) -> Any:
        def run(*arguments: Any) -> Any:
            body = {"config": config, "activate": False}
            replies.append(ended.http.post("/experiments", json=body))
            replies.append(ended.http.post(f"/trials/{row['trial_id']}/continue", json={}))
            return delete(*arguments)

        return run

    for name in ("delete_files", "delete_matching_files"):
        monkeypatch.setattr(
            _checkpoint_routes, name, create_meanwhile(getattr(_checkpoint_routes, name))
        )
    assert ended.http.delete(f"/checkpoints/one{query}").json()["state"] == "DELETED"
    told = [(reply.status_code, reply.json()["code"]) for reply in replies]
    assert told == [(409, "no_checkpoint")] * 2
    assert "is being deleted" in replies[0].json()["detail"]
    again = ended.http.post("/experiments", json={"config": config, "activate": False})
    assert "was deleted" in again.json()["detail"]


def test_a_checkpoint_that_could_not_be_deleted_can_be_started_from(
    ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_checkpoint_routes, "delete_files", lambda *_: False)
    assert ended.http.delete("/checkpoints/one").status_code == 503
    user = {"name": "single", "metric": "loss", "source_checkpoint_uuid": "one"}
    assert ended.create(searcher=user) == 2


def test_an_action_on_many_tells_how_each_went(ended: Any) -> None:
    ended.create()
    body = {"action": "archive", "experiment_ids": [1, 2, 7, 1]}
    results = ended.http.post("/bulk-actions", json=body).json()
    assert [one["experiment_id"] for one in results] == [1, 2, 7]
    errors = [one["error"] for one in results]
    assert errors[0] is None
    assert "must have ended" in errors[1]
    assert errors[2] == "There is no experiment 7."
    body = {"action": "delete", "experiment_ids": [1]}
    assert ended.http.post("/bulk-actions", json=body).json()[0]["error"] is None
    assert ended.http.get("/experiments/1").status_code == 404
