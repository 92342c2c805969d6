"""Commands that change all experiments, or delete all checkpoints, of a query."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import paceline as package
from paceline.client import _client


@pytest.fixture
def many(mastered: Any, code: Path, request: pytest.FixtureRequest) -> tuple[Any, str, list[int]]:
    """Run the command line where three paused experiments have a label of this test alone."""
    label = re.sub(r"\W", "-", request.node.name)
    (code / "config.yaml").write_text(json.dumps({**CONFIG, "labels": [label]}))
    ids = []
    for _ in range(3):
        made = mastered("e", "create", code / "config.yaml", code, "--paused", "--json")
        ids.append(int(json.loads(made.stdout)["id"]))
    return mastered, f"tag:{label}", ids


CONFIG: dict[str, Any] = {
    "name": "small",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss"},
    "max_restarts": 0,
}


def states(run: Any, query: str) -> dict[int, str]:
    """Return the states of the experiments of a query, by their numbers."""
    listed = json.loads(run("e", "list", "--query", query, "--json").stdout)
    return {one["id"]: one["state"] for one in listed}


@pytest.mark.long
def test_a_query_is_previewed_and_then_killed_archived_and_deleted(
    many: tuple[Any, str, list[int]],
) -> None:
    """The way from running experiments to none, each step by one command."""
    run, query, ids = many
    dry = run("e", "kill", "--query", query, "--dry-run")
    assert "kill: 3 experiments, 3 trials." in dry.stdout
    assert f"small ({ids[2]}), small ({ids[1]}), small ({ids[0]})" in dry.stdout
    assert dry.stdout.endswith("Dry run: nothing was changed.\n")
    assert set(states(run, query).values()) == {"PAUSED"}
    refused = run("e", "kill", "--query", query, code=1)
    assert "`--yes` must be given" in refused.stderr
    early = run("e", "delete", "--query", query, "--yes")
    assert "Left out: 3, as it must have ended" in early.stdout
    killed = run("e", "kill", "--query", query, "--yes").stdout
    assert killed.endswith("kill: 3 experiments changed.\n")
    again = json.loads(run("e", "kill", "--query", query, "--yes", "--json").stdout)
    assert (again["experiment_ids"], again["num_unchanged"], again["failed"]) == ([], 3, [])
    assert set(states(run, query).values()) == {"CANCELED"}
    run("e", "archive", "--query", query, "--yes")
    assert states(run, query) == {}
    gone = json.loads(run("e", "delete", "--query", query, "--archived", "--yes", "--json").stdout)
    assert gone["experiment_ids"] == ids[::-1]
    assert run("e", "describe", ids[0], code=1).stderr.startswith("Error: ")


@pytest.mark.long
def test_a_query_is_moved_and_labelled(many: tuple[Any, str, list[int]]) -> None:
    """Labels are added and removed, and a project is chosen, for all at once or for one."""
    run, query, ids = many
    run("project", "create", "bulk")
    run("e", "label", "--query", query, "good", "new", "--yes")
    run("e", "label", "--query", query, "new", "--remove", "--yes")
    labels = json.loads(run("e", "describe", ids[1], "--json").stdout)["labels"]
    assert labels[1:] == ["good"], f"{labels} are left"
    moved = run("e", "move", ids[0], "--to", "bulk")
    assert moved.stdout == f"Experiment {ids[0]} is in the project bulk.\n"
    answer = json.loads(
        run("e", "move", "--query", query, "--to", "bulk", "--yes", "--json").stdout
    )
    assert (answer["experiment_ids"], answer["num_unchanged"]) == (ids[:0:-1], 1)
    wrong = run("e", "move", "--query", query, "--to", "nowhere", "--yes", code=1)
    assert "There is no project 'nowhere'." in wrong.stderr
    assert "must be given" in run("e", "label", "--query", query, "--yes", code=1).stderr
    for words in (["e", "kill"], ["e", "kill", ids[0], "--query", query]):
        assert "Either `ID` or `--query`" in run(*words, code=1).stderr
    assert "A query must" in run("e", "kill", "--query", "a and", "--yes", code=1).stderr


@pytest.mark.long
def test_a_cut_leaves_each_experiment_whole_and_the_same_command_goes_on(
    many: tuple[Any, str, list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cut after the first piece, as by a kill of the command."""
    run, query, ids = many
    run("e", "kill", "--query", query, "--yes")
    monkeypatch.setattr(_client, "_IDS_PER_REQUEST", 1)
    url = json.loads(run("status", "--json").stdout)["url"]
    token = json.loads(run("token", "create", "cutter", "--scope", "admin", "--json").stdout)
    with package.client.Client(url, token["secret"]) as client:
        found = client.preview_action("delete", query).experiment_ids
        results = client.act_on("delete", found)
        assert next(results).experiment_id == ids[2]
        results.close()
        left = {one.id: len(one.trials()) for one in client.list_experiments(query=query)}
    assert left == {ids[0]: 1, ids[1]: 1}
    run("e", "delete", "--query", query, "--yes")
    assert states(run, query) == {}


@pytest.mark.long
def test_checkpoints_of_a_query_are_deleted_but_for_the_best(mastered: Any, code: Path) -> None:
    """Clean-up tells the bytes first, and a second one finds nothing."""
    all_kept = ("--config", "checkpoint_storage.save_trial_latest=3")
    made = mastered("e", "create", code / "config.yaml", code, *all_kept, "-f", "--json")
    number = json.loads(made.stdout)["id"]
    query = f"experiment = {number}"
    dry = mastered("c", "delete", "--query", query, "--keep-latest", 1, "--dry-run")
    assert "delete: 2 checkpoints of 1 trial (10 B freed)." in dry.stdout
    assert "Kept: 1, the best or latest" in dry.stdout
    answer = json.loads(
        mastered("c", "delete", "--query", query, "--keep-latest", 1, "--yes", "--json").stdout
    )
    assert (len(answer["uuids"]), answer["num_bytes"], answer["failed"]) == (2, 10, [])
    again = mastered("c", "delete", "--query", query, "--keep-latest", 1, "--yes")
    assert again.stdout.endswith("Deleted 0 checkpoints.\n")
    [left] = json.loads(mastered("c", "list", number, "--json").stdout)
    assert left["steps_completed"] == 3
    told = mastered("c", "delete", left["uuid"], "--dry-run").stdout
    assert told == (
        f"Dry run: the files of {left['uuid']} (5 B) would be deleted. Nothing was deleted.\n"
    )
    for words in (["c", "delete"], ["c", "delete", "abcd", "--keep-best", "1"]):
        assert "must" in mastered(*words, code=1).stderr
