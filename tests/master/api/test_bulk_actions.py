"""Actions on the experiments of a query: previews, pieces, and cuts in the middle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import insert, select

from paceline._cluster.master.experiments import deletions
from paceline._cluster.master.store import tables
from paceline.storage import DirectoryStorage


@pytest.fixture
def ended(master: Any) -> Any:
    """Return a master with an ended experiment that has a checkpoint, and three paused ones."""
    root = master.home.path / "checkpoints"
    master.create(name="old", labels=["a"], checkpoint_storage=storage_of(root))
    master.schedule()
    for uuid, steps in (("one", 1), ("two", 2), ("three", 3)):
        store(master, root, uuid, steps)
    master.http.post("/experiments/1/kill")
    for attempt_id in (1, 2):
        reply = master.attempt(
            attempt_id, "end", reason="killed", code=None, signal=9, time=1.0, detail=None
        )
        assert reply.status_code == 204, reply.text
    for name in ("b", "c", "d"):
        master.http.post(f"/experiments/{master.create(name=name)}/pause")
    return master


def storage_of(root: Path) -> dict[str, str]:
    return {"type": "directory", "path": str(root)}


def store(master: Any, root: Path, uuid: str, steps: int) -> None:
    """Store a checkpoint of the first attempt, with the loss 1 / steps."""
    storage = DirectoryStorage(root)
    with storage.store_path(uuid) as path:
        (path / "state").write_bytes(b"12345")
    storage.commit(uuid, {}, origin=master.origin(1))
    metrics = {
        "type": "metrics", "time": float(steps), "group": "validation", "steps_completed": steps,
        "metrics": {"loss": 1 / steps},
    }  # fmt: skip
    checkpoint = {
        "type": "checkpoint", "time": float(steps), "uuid": uuid, "steps_completed": steps,
        "metadata": {}, "resources": {"state": 5}, "storage": str(root),
    }  # fmt: skip
    records = [[2 * steps, metrics], [2 * steps + 1, checkpoint]]
    batch = {"generation": 0, "rank": 0, "records": records}
    assert master.attempt(1, "records", batches=[batch]).status_code == 200


def preview(master: Any, **asked: Any) -> Any:
    reply = master.http.get("/bulk-preview", params=asked)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_preview_tells_what_an_action_changes_frees_and_leaves(ended: Any) -> None:
    row = {"trial_id": 1, "path": "f", "experiment_id": 1, "digest": "d", "size": 70,
           "media_type": "text/plain", "created_at": 1.0}  # fmt: skip
    stored = insert(tables.run_files).values(**row)
    ended.core.database.write(lambda job: job.connection.execute(stored)).result()
    found = preview(ended, action="delete", query="created > -1d")
    assert found == {
        "num_matching": 4, "experiment_ids": [1], "names": ["old"], "num_trials": 2,
        "num_checkpoints": 3, "checkpoint_bytes": 15, "num_unchanged": 0, "file_bytes": 70,
        "refused": [{"reason": "it must have ended", "number": 3, "experiment_ids": [4, 3, 2]}],
    }  # fmt: skip
    assert preview(ended, action="kill", query="name:o or name:b")["experiment_ids"] == [2]
    assert preview(ended, action="kill")["num_unchanged"] == 1
    paused = preview(ended, action="activate", query="state:PAUSED")
    assert (paused["experiment_ids"], paused["refused"]) == ([4, 3, 2], [])
    [reason] = preview(ended, action="activate")["refused"]
    assert (reason["reason"], reason["experiment_ids"]) == ("it has ended, or is about to", [1])
    labels = preview(ended, action="label", add_label=["a"])
    assert (labels["experiment_ids"], labels["num_unchanged"]) == ([4, 3, 2], 1)
    moved = preview(ended, action="move", to="Default")
    assert (moved["experiment_ids"], moved["num_unchanged"]) == ([], 4)


def test_a_preview_has_the_filters_of_the_list(ended: Any) -> None:
    ended.http.post("/experiments/1/archive")
    for filters in (
        {"state": "PAUSED"}, {"archived": "only"}, {"archived": "all", "search": "old"},
        {"where": '["name", "contains", "c"]'}, {"owner": "nobody"}, {"label": "a"},
        {"project": "Default"}, {"query": "name:b"},
    ):  # fmt: skip
        listed = ended.http.get("/experiments", params=filters).json()
        shown = preview(ended, action="label", add_label="new", **filters)
        ids = [one["id"] for one in listed["items"]]
        assert shown["experiment_ids"] == ids, f"{filters} list {ids}"


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [
        ({"action": "kill", "query": "nothing = 1"}, 400, "nothing"),
        ({"action": "kill", "query": "(" * 10_000}, 400, "2000 characters"),
        ({"action": "kill", "where": '["nothing", "=", 1]'}, 422, "A column must be one of"),
        ({"action": "move"}, 422, "`to` must name a project"),
        ({"action": "kill", "to": "Default"}, 422, "`to` must name a project"),
        ({"action": "label"}, 422, "Labels must be given"),
        ({"action": "kill", "add_label": "a"}, 422, "Labels must be given"),
        ({"action": "move", "to": "nowhere"}, 404, "nowhere"),
        ({"action": "guess"}, 422, "`action`"),
    ],
)
def test_a_wrong_preview_is_refused(ended: Any, asked: Any, status: int, text: str) -> None:
    reply = ended.http.get("/bulk-preview", params=asked)
    assert (reply.status_code, text in reply.json()["detail"]) == (status, True), reply.text


def test_experiments_are_moved_and_labelled_one_by_one(ended: Any) -> None:
    ended.http.post("/projects", json={"name": "lab"})
    body = {"action": "move", "experiment_ids": [1, 2, 9], "to": "lab"}
    errors = [one["error"] for one in ended.http.post("/bulk-actions", json=body).json()]
    assert errors == [None, None, "There is no experiment 9."]
    listed = ended.http.get("/experiments?project=lab").json()["items"]
    assert [one["id"] for one in listed] == [2, 1]
    body = {"action": "label", "experiment_ids": [1, 2], "add_labels": ["x", " "]}
    body["remove_labels"] = ["a"]
    ended.http.post("/bulk-actions", json=body)
    found = [ended.http.get(f"/experiments/{number}").json()["labels"] for number in (1, 2)]
    assert found == [["x"], ["x"]]
    many = {"action": "label", "experiment_ids": [1], "add_labels": [str(n) for n in range(100)]}
    [result] = ended.http.post("/bulk-actions", json=many).json()
    assert "at most 100 labels" in result["error"]


def test_checkpoints_of_a_query_are_found_but_for_those_that_stay(ended: Any) -> None:
    def found(**asked: Any) -> Any:
        return ended.http.get("/checkpoint-preview", params={"query": "name:old", **asked}).json()

    assert found()["uuids"] == ["three", "two", "one"]
    assert (found()["num_bytes"], found()["num_trials"], found()["num_kept"]) == (15, 1, 0)
    assert found(keep_latest=1)["uuids"] == ["two", "one"]
    assert found(keep_best=2)["uuids"] == ["one"]
    assert (found(keep_latest=1, keep_best=1)["num_kept"]) == 1
    source = {"name": "single", "metric": "loss", "source_checkpoint_uuid": "two"}
    ended.create(searcher=source)
    [refused] = found()["refused"]
    assert (refused["reason"], refused["number"]) == ("a trial starts from it", 1)
    assert found()["uuids"] == ["three", "one"]
    wrong = ended.http.get("/checkpoint-preview", params={"query": "nothing = 1"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_query")


def test_checkpoints_of_a_trial_that_goes_on_stay(master: Any) -> None:
    root = master.home.path / "checkpoints"
    master.create(checkpoint_storage=storage_of(root))
    master.schedule()
    store(master, root, "one", 1)
    found = master.http.get("/checkpoint-preview", params={"query": "experiment = 1"}).json()
    [refused] = found["refused"]
    assert (found["uuids"], refused["reason"]) == ([], "its trial has not ended")


def test_files_of_a_deletion_that_was_cut_go_at_the_next_start(
    ended: Any, make_master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut between the rows and the files, as by a kill of the master."""

    def cut(*_: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(deletions.FileRemoval, "remove", cut)
        body = {"action": "delete", "experiment_ids": [1]}
        assert ended.http.post("/bulk-actions", json=body).status_code == 500
    storage = DirectoryStorage(ended.home.path / "checkpoints")
    assert ended.http.get("/experiments/1").status_code == 404
    assert storage.exists("one")
    ended.core.file_removal.finish()
    assert not any(storage.exists(uuid) for uuid in ("one", "two", "three"))
    with ended.core.database.read() as connection:
        left = select(tables.documents.c.name).where(tables.documents.c.kind == "deletion")
        assert connection.execute(left).all() == []
    ended.core.file_removal.finish()


def test_what_a_hidden_model_keeps_is_refused_without_its_name(
    ended: Any, add_to: Callable[..., httpx2.Client]
) -> None:
    """A model may be of another project than the checkpoint of its version."""
    registry = f"http://127.0.0.1:{ended.port}/api/2.0/mlflow"
    made = {"name": "hush", "source": "checkpoint:/one"}
    for path in ("registered-models/create", "model-versions/create"):
        assert ended.http.post(f"{registry}/{path}", json=made).status_code == 200
    ada = add_to(ended, "ada", role=None)
    assert ended.http.post("/projects", json={"name": "vision"}).status_code == 201
    role = ended.http.put("/projects/vision/members/ada", json={"role": "editor"})
    assert role.status_code == 204, role.text
    assert ended.http.patch("/experiments/1", json={"project": "vision"}).status_code == 200
    for path in ("/checkpoints/one", "/experiments/1"):
        for client, is_named in ((ada, False), (ended.http, True)):
            reply = client.delete(path)
            assert reply.status_code == 409, f"DELETE {path} answers {reply.text}"
            assert ("hush" in reply.text) == is_named, f"DELETE {path} answers {reply.text}"


def test_a_preview_of_a_move_knows_the_role_in_the_other_project(
    ended: Any, add_to: Callable[..., httpx2.Client]
) -> None:
    """As the move itself: a viewer there may not move anything there."""
    ada = add_to(ended, "ada", role="editor")
    assert ended.http.post("/projects", json={"name": "vision"}).status_code == 201
    role = ended.http.put("/projects/vision/members/ada", json={"role": "viewer"})
    assert role.status_code == 204, role.text
    asked = {"action": "move", "to": "vision", "query": "name = old"}
    found = ada.get("/bulk-preview", params=asked).json()
    assert found["experiment_ids"] == [], f"{found=}"
    [refusal] = found["refused"]
    assert refusal["reason"] == "the role `editor` in the project to move to is needed"
    body = {"action": "move", "to": "vision", "experiment_ids": [1]}
    [result] = ada.post("/bulk-actions", json=body).json()
    assert result["error"] is not None


def test_retention_keeps_the_checkpoints_of_registered_models(master: Any) -> None:
    """The oldest one, which the policy would delete, is the source of a version."""
    root = master.home.path / "checkpoints"
    kept = {"save_trial_latest": 1, "save_trial_best": 0, "save_experiment_best": 0}
    master.create(checkpoint_storage=storage_of(root) | kept)
    master.schedule()
    for uuid, steps in (("one", 1), ("two", 2), ("three", 3)):
        store(master, root, uuid, steps)
    registry = f"http://127.0.0.1:{master.port}/api/2.0/mlflow"
    made = {"name": "net", "source": "checkpoint:/one"}
    for path in ("registered-models/create", "model-versions/create"):
        assert master.http.post(f"{registry}/{path}", json=made).status_code == 200
    master.http.post("/experiments/1/kill")
    for attempt_id in (1, 2):
        master.attempt(
            attempt_id, "end", reason="killed", code=None, signal=9, time=1.0, detail=None
        )
    master.core.retention.make_pass()
    listed = master.http.get("/experiments/1/checkpoints").json()["items"]
    states = {one["uuid"]: one["state"] for one in listed}
    assert states == {"one": "COMPLETED", "two": "DELETED", "three": "COMPLETED"}
