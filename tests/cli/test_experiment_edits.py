"""Commands that change, compare, find and export experiments, trials and checkpoints."""

import json
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def pair(mastered: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, int, int]:
    """Run the command line where two experiments have ended that differ in their learning rate."""
    code = tmp_path_factory.mktemp("code")
    (code / "train.py").write_text(TRAIN)
    ids = []
    for name, lr in (("first one", 0.5), ("second", 0.25)):
        config = {
            "name": name,
            "entrypoint": "python3 train.py",
            "hyperparameters": {"lr": lr, "note": "=cmd"},
            "searcher": {"name": "single", "metric": "loss"},
        }
        (code / "config.yaml").write_text(json.dumps(config))
        made = mastered("e", "create", code / "config.yaml", code, "-f", "--json")
        ids.append(int(json.loads(made.stdout)["id"]))
    return mastered, ids[0], ids[1]


TRAIN = """
import paceline

with paceline.core.init() as context:
    lr = paceline.get_cluster_info().trial.hparams["lr"]
    for step in (1, 2):
        loss = lr / step if step == 2 or lr < 0.5 else float("nan")
        context.train.report_validation_metrics(step, {"loss": loss, "=name": "@text"})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "state.txt").write_text("state")
"""


def read(run: Any, experiment: int) -> dict[str, Any]:
    """Return an experiment as the master has it."""
    found: dict[str, Any] = json.loads(run("e", "describe", experiment, "--json").stdout)
    return found


@pytest.mark.long
def test_labels_name_and_notes_are_changed_and_shown(pair: tuple[Any, int, int]) -> None:
    run, first, _ = pair
    assert run("e", "label", first).stdout == f"Experiment {first} has no labels.\n"
    told = run("e", "label", first, "a b", "c").stdout
    assert told == f"Experiment {first} has the labels a b, c.\n"
    run("e", "label", first, "c", "d")
    refused = run("e", "label", first, "c", "none", "--remove", code=1)
    assert "labels (a b, c, d), but got 'none'" in refused.stderr
    run("e", "label", first, "c", "--remove")
    changed = json.loads(run("e", "rename", first, "renamed", "--json").stdout)
    assert (changed["name"], changed["labels"]) == ("renamed", ["a b", "d"])
    run("e", "note", first, "one")
    run("e", "note", first, "two", "--append")
    assert run("e", "note", first).stdout == "one\ntwo\n"
    run("e", "note", first, "three")
    found = read(run, first)
    assert (found["name"], found["notes"], found["labels"]) == ("renamed", "three", ["a b", "d"])
    assert run("e", "rename", first, "", code=1).stderr.startswith("Error: ")


@pytest.mark.long
def test_a_list_is_limited_by_name_label_and_time(pair: tuple[Any, int, int]) -> None:
    run, first, second = pair
    run("e", "label", second, "mine", "100%")

    def ids(*options: object) -> list[int]:
        return [one["id"] for one in json.loads(run("e", "list", "--json", *options).stdout)]

    assert ids("--name", "SECON") == [second]
    assert ids("--label", "mine", "--label", "100%", "--since", "1h") == [second]
    assert ids("--label", "min") == ids("--name", "%") == ids("--since", "0m") == []
    assert ids("--since", "2020-01-01", "--state", "completed") == [second, first]
    assert ids("--since", "2020-01-01", "--state", "running") == []
    assert run("e", "list", "--name", "no such").stdout == "No experiment fits.\n"
    refused = run("e", "list", "--since", "yesterday", code=1)
    assert "`--since` must be an age such as 2d" in refused.stderr


def test_a_comparison_has_what_differs_and_the_metrics(pair: tuple[Any, int, int]) -> None:
    run, first, second = pair
    lines = run("e", "compare", first, second).stdout.splitlines()
    rows = {line.split("  ")[0]: line for line in lines}
    assert rows["hyperparameters.lr"].split()[1:] == ["0.5", "0.25"]
    assert rows["validation/loss"].split()[1:] == ["0.25", "0.125", "(0.125", "to", "0.25)"]
    assert not any("entrypoint" in name for name in rows)
    found = json.loads(run("e", "compare", first, second, "--json").stdout)
    loss = found[1]["metrics"]["validation/loss"]
    assert {kind: loss[kind] for kind in loss} == {"last": 0.125, "min": 0.125, "max": 0.25}
    assert "at least twice, but got 1" in run("e", "compare", first, code=1).stderr


@pytest.mark.long
def test_checkpoints_are_found_by_the_beginning_of_their_uuids(
    pair: tuple[Any, int, int], tmp_path: Path
) -> None:
    run, first, _ = pair
    stored = json.loads(run("c", "list", first, "--json").stdout)
    uuid = stored[0]["uuid"]
    assert json.loads(run("c", "describe", uuid[:8], "--json").stdout)["uuid"] == uuid
    assert run("c", "download", uuid[:8], "-o", tmp_path / "out").stdout.endswith("/out\n")
    for text in (uuid[:3], "zzzzzzzz", "%%%%", f"{uuid}0"):
        assert repr(text) in run("c", "describe", text, code=1).stderr.replace("\n", " ")
    tried = run("c", "delete", uuid[:8], "--dry-run").stdout
    size = f"{stored[0]['size']} B"
    told = f"Dry run: the files of {uuid} ({size}) would be deleted. Nothing was deleted.\n"
    assert tried == told
    told = run("c", "delete", uuid[:8], uuid, "--yes").stdout
    assert told == f"Deleted {uuid}.\n"


@pytest.mark.long
def test_the_numbers_of_scheduling_are_set_together(mastered: Any, code: Path) -> None:
    ids = []
    for _ in range(2):
        changes = ("data.held_at=1", "resources.slots_per_trial=2")
        given = [word for change in changes for word in ("--config", change)]
        made = mastered("e", "create", code / "config.yaml", code, "--json", *given)
        ids.append(json.loads(made.stdout)["id"])
    holder, queued = ids
    told = mastered("e", "set", queued, "--priority", 60, "--weight", 0.5, "--max-slots", 2).stdout
    assert told == f"Experiment {queued} has priority 60, weight 0.5, max slots 2.\n"

    def waiting() -> dict[str, Any]:
        (entry,) = json.loads(mastered("job", "list", "--json").stdout)
        return dict(entry)

    try:
        mastered("pool", "set", "default", "--policy", "priority")
        assert waiting()["priority"] == 60
        mastered("pool", "set", "default", "--policy", "fair_share")
        assert waiting()["weight"] == 0.5
        # Each number alone leaves the others.
        mastered("e", "set", queued, "--max-slots", 0)
        assert waiting()["weight"] == 0.5
        # All of them together are set, or none.
        both = ("--weight", 2, "--max-slots", 1)
        assert "must be at least 2" in mastered("e", "set", queued, *both, code=1).stderr
        assert waiting()["weight"] == 0.5
        assert "must be given" in mastered("e", "set", queued, code=1).stderr
        assert "weight" in mastered("e", "set", queued, "--weight", -1, code=1).stderr
    finally:
        mastered("pool", "reset", "default")
        mastered("e", "kill", queued)
        mastered("e", "kill", holder)


@pytest.mark.long
def test_a_stopped_trial_stores_a_checkpoint_and_ends(mastered: Any, code: Path) -> None:
    held = ("--config", "data.held_at=2", "--config", "data.steps=9")
    mastered("e", "create", code / "config.yaml", code, *held)
    newest = json.loads(mastered("e", "list", "--json", "--limit", 1).stdout)[0]["id"]
    trial = json.loads(mastered("e", "list-trials", newest, "--json").stdout)[0]["id"]

    def describe() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(mastered("t", "describe", trial, "--json").stdout)
        return found

    deadline = time.monotonic() + 200
    while describe()["steps_completed"] < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    # An unknown trial leaves the others as they are.
    for command in ("stop", "kill"):
        assert "999999" in mastered("t", command, trial, 999999, code=1).stderr
    assert describe()["state"] == "RUNNING"
    assert mastered("t", "stop", trial).stdout.startswith(f"Trial {trial} is STOPPING.")
    mastered("e", "wait", newest, code=None)
    found = describe()
    assert (found["state"], found["stop_reason"]) == ("CANCELED", "stopped by the user")
    # A kill would have ended it by a signal, in the middle of its wait.
    assert found["attempts"][-1]["exit"]["outcome"] == "preempted"
    assert "preempted: stopped by the user" in mastered("t", "describe", trial).stdout
    assert found["latest_checkpoint"] is not None
    # Stopped once, it stays so.
    assert mastered("t", "stop", trial).stdout == f"Trial {trial} is CANCELED.\n"
