"""Commands `paceline model`: a checkpoint gets a name, is kept, promoted and downloaded by it."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from paceline.client import ApiError, Client


@pytest.fixture(scope="module")
def stored(mastered: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, int, list[str]]:
    """Run the command line where an ended experiment has three checkpoints, the newest first."""
    code = tmp_path_factory.mktemp("code")
    (code / "train.py").write_text(TRAIN)
    config = {
        "name": "of a model",
        "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "loss"},
        "checkpoint_storage": {"save_trial_latest": 3},
    }
    (code / "config.yaml").write_text(json.dumps(config))
    made = mastered("e", "create", code / "config.yaml", code, "-f", "--json")
    number = json.loads(made.stdout)["id"]
    listed = json.loads(mastered("e", "list-checkpoints", number, "--json").stdout)
    return mastered, number, [one["uuid"] for one in listed]


TRAIN = """
import paceline

with paceline.core.init() as context:
    for step in (1, 2, 3):
        context.train.report_validation_metrics(step, {"loss": 1 / step})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "state.txt").write_text(f"state {step}")
"""


@pytest.mark.long
def test_a_checkpoint_is_registered_promoted_and_downloaded_by_name(
    stored: tuple[Any, int, list[str]], tmp_path: Path
) -> None:
    """An alias says which version is downloaded; without one it is the newest."""
    run, _, uuids = stored
    assert "`paceline model register" in run("model", "list").stdout
    told = run("model", "register", "detector", uuids[0][:8], "--alias", "champion").stdout
    assert told == f"Checkpoint {uuids[0]} is version 1 of detector.\n"
    run("model", "register", "detector", uuids[1], "--notes", "smaller")
    found = json.loads(run("model", "describe", "detector", "--json").stdout)
    assert (found["aliases"], found["newest_version"]) == ({"champion": 1}, 2)
    assert [(one["version"], one["source"], one["notes"]) for one in found["versions"]] == [
        (2, f"checkpoint:/{uuids[1]}", "smaller"),
        (1, f"checkpoint:/{uuids[0]}", ""),
    ]
    assert "champion = 1" in run("model", "list").stdout

    def downloaded(name: str, *options: Any) -> str:
        run("model", "download", "detector", "-o", tmp_path / name, *options)
        return (tmp_path / name / "state.txt").read_text()

    assert downloaded("newest") == "state 2"
    assert downloaded("champion", "--alias", "champion") == "state 3"
    assert run("model", "alias", "detector", "champion", 2).stdout == (
        "champion means version 2 of detector.\n"
    )
    assert downloaded("promoted", "--alias", "champion") == "state 2"
    assert downloaded("first", "--version", 1) == "state 3"
    gone = run("model", "download", "detector", "--alias", "loser", code=1)
    assert "alias loser not found" in gone.stderr
    assert "must be a new or empty" in run(
        "model", "download", "detector", "-o", tmp_path / "first", code=1
    ).stderr  # fmt: skip
    run("model", "alias", "detector", "champion", "--remove")
    assert json.loads(run("model", "describe", "detector", "--json").stdout)["aliases"] == {}
    assert "Either `N`" in run("model", "alias", "detector", "champion", code=1).stderr
    unknown = run("model", "register", "detector", "ffffffff", code=1)
    assert "There is no checkpoint" in unknown.stderr
    assert "not found" in run("model", "describe", "nothing", code=1).stderr
    run("model", "delete", "detector", "--yes")


def test_a_registered_checkpoint_is_not_deleted(stored: tuple[Any, int, list[str]]) -> None:
    """Neither by hand, nor with its experiment, nor by a query, until its version is gone."""
    run, number, uuids = stored
    run("model", "register", "kept", uuids[2])
    by_hand = run("c", "delete", uuids[2], "--yes", code=1).stderr
    assert "while the model kept (version 1) has it" in by_hand
    whole = run("e", "delete", number, "--yes", code=1).stderr
    assert "while the model kept (version 1) has one of its checkpoints" in whole
    query = ("--query", f"experiment = {number}", "--dry-run", "--json")
    clean = json.loads(run("c", "delete", *query).stdout)
    assert clean["uuids"] == uuids[:2]
    assert [one["reason"] for one in clean["refused"]] == ["a registered model has it"]
    [refused] = json.loads(run("e", "delete", *query).stdout)["refused"]
    assert refused["reason"] == "a registered model has one of its checkpoints"
    run("model", "delete", "kept", "--version", 1, "--yes")
    run("c", "delete", uuids[2], "--yes")
    deleted = run("model", "register", "kept", uuids[2], code=1).stderr
    assert "were deleted" in deleted


def test_a_refused_version_leaves_no_model_of_that_name(
    stored: tuple[Any, int, list[str]],
) -> None:
    """A viewer of the checkpoint's project is refused, and the name stays free."""
    run, _, uuids = stored
    run("project", "create", "elsewhere")
    run("user", "add", "viewer", "--role", "viewer")
    run("user", "role", "viewer", "editor", "--project", "elsewhere")
    with client_as(run, "viewer") as client:
        with pytest.raises(ApiError, match="must have the role 'editor'"):
            client.register_model("taken", uuids[2])
        assert "taken" not in [one.name for one in client.list_models()]


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: another Unix user needs root")
def test_another_unix_user_downloads_from_a_home_on_the_same_machine(
    stored: tuple[Any, int, list[str]], tmp_path: Path
) -> None:
    """Files in a directory that is closed to the user come from the master."""
    run, _, uuids = stored
    with client_as(run, "admin") as client, tempfile.TemporaryDirectory() as place:
        checkpoint = client.get_checkpoint(uuids[0])
        checkpoint.download(tmp_path / "first", mode="master")  # imports all
        os.chown(place, 65534, 65534)
        os.seteuid(65534)
        try:
            path = checkpoint.download(Path(place) / "copy")
        finally:
            os.seteuid(0)
        assert (path / "state.txt").read_text() == "state 3"


def client_as(run: Any, user: str) -> Client:
    """Return a client with a token of a user."""
    made = run("token", "create", f"of-{user}", "--scope", "submit", "--user", user, "--json")
    token = json.loads(made.stdout)["secret"]
    return Client(json.loads(run("status", "--json").stdout)["url"], token)
