"""Output for programs: one JSON document of a published form, whole lists, errors with codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import json_answers
import jsonschema_rs
import pytest
from json_answers import valid
from test_surface import COMMANDS

from paceline.client import Checkpoint, Experiment, Trial

ALL = {
    " ".join([group, *below])
    for group, names in COMMANDS.items()
    for below in ([[name] for name in names] or [[]])
}
# Of these, the commands below need no master.
OFFLINE = {
    "backup", "checkpoint export", "doctor", "down", "examples copy", "examples list", "export",
    "home check", "import", "init", "mcp", "preview-search", "restore", "run", "runs compare",
    "runs delete", "runs download", "runs files", "runs list", "runs prune", "runs show",
    "runs time", "simulate-search", "verify-resume", "version",
}  # fmt: skip


def test_the_published_schemas_are_those_of_all_commands() -> None:
    assert json_answers.COMMANDS.keys() == ALL
    assert json_answers.PUBLISHED.read_text(encoding="utf-8") == json_answers.published_text()


def test_the_tables_of_the_guide_are_made_from_these() -> None:
    assert json_answers.GUIDE.read_text(encoding="utf-8") == json_answers.guide_text()


@pytest.mark.parametrize("thing", json_answers.WORDS)
def test_a_thing_has_the_same_word_everywhere(thing: str) -> None:
    kind = {"experiment": Experiment, "trial": Trial, "checkpoint": Checkpoint}[thing]
    model = json_answers.SCHEMAS["$defs"][thing.capitalize()]["properties"]
    page = {
        "experiment": "pages/Experiments.tsx",
        "trial": "pages/experiment/TrialTable.tsx",
        "checkpoint": "components/CheckpointTable.tsx",
    }[thing]
    titles = (Path(__file__).parents[2] / "webui" / "src" / page).read_text(encoding="utf-8")
    for _, key, attribute, title in json_answers.WORDS[thing]:
        assert key in model, key
        name = attribute.removeprefix("data.")
        assert name in model if attribute != name else hasattr(kind, name), attribute
        assert title == "-" or f'title: "{title}"' in titles, title


def test_a_changed_key_is_no_valid_answer() -> None:
    valid("version", '{"version": "1"}')
    for wrong in ('{"versions": "1"}', '{"version": "1", "more": 1}', "{}"):
        with pytest.raises(jsonschema_rs.ValidationError):
            valid("version", wrong)


@pytest.mark.long
def test_every_command_of_a_master_prints_its_json(
    mastered: Any, code: Path, tmp_path: Path
) -> None:
    seen = {"runner forget"}

    def run(name: str, *arguments: object, exit_code: int = 0) -> Any:
        seen.add(name)
        words = name.split()
        return valid(name, mastered(*words, *arguments, "--json", code=exit_code, cwd=code).stdout)

    made = run("experiment create", "config.yaml", "-f", "--config", "hyperparameters.lr=0.5")
    one, best = made["id"], made["best_trial"]
    assert (made["state"], best["hparams"], best["best_metric"]) == (
        *("COMPLETED", {"lr": 0.5}),
        pytest.approx(0.5 / 3),
    )
    trial = best["id"]
    planned = run("experiment create", "config.yaml", "--dry-run")
    assert (planned["num_trials"], planned["num_files"]) == (1, 2)
    assert [each["id"] for each in run("experiment list")] == [one]
    assert run("experiment describe", one)["best_trial"]["id"] == trial
    assert run("experiment wait", one)["state"] == "COMPLETED"
    assert run("experiment list-trials", one)[0]["state"] == "COMPLETED"
    assert [each["id"] for each in run("trial list", "--query", "lr = 0.5")] == [trial]
    assert run("experiment logs", one)["text"] == "step 1"
    assert run("trial describe", trial)["id"] == trial
    assert run("trial describe", trial, "--environment")[0]["number"] == 1
    assert run("trial metrics", trial)["metrics"] == {"train_loss": 0.5}
    of_trial = run("experiment metrics", one, "-g", "training")
    assert (of_trial["trial_id"], of_trial["metrics"]) == (trial, {"train_loss": 0.5})
    refused = mastered("e", "metrics", one, "-g", "trainig", code=1).stderr
    assert "must be one that experiment" in refused
    assert "reported (training, validation), but got 'trainig'" in refused
    run("trial time", trial)
    assert run("trial files", trial) == []
    assert run("trial download-files", trial, "-o", tmp_path / "e")["files"] == []
    run("trial logs", trial)
    run("experiment list-checkpoints", one)
    uuid = run("checkpoint list", one)[0]["uuid"]
    assert run("checkpoint describe", uuid)["uuid"] == uuid
    assert Path(run("checkpoint download", uuid, "-o", tmp_path / "a")["path"]).is_dir()
    assert run("trial download", trial, "-o", tmp_path / "b")["uuid"] == uuid
    three = run("trial continue", trial, "--paused")["id"]
    continued = run("experiment list-trials", three)[0]["id"]
    assert [one["id"] for one in run("trial kill", continued)] == [continued]
    assert [one["id"] for one in run("trial stop", continued, trial)] == [continued, trial]
    mastered("e", "kill", three)
    mastered("e", "wait", three, code=None)
    [left] = run("checkpoint delete", uuid, "--glob", "more.txt", "--yes")
    assert (list(left["resources"]), left["state"]) == (["state.txt"], "PARTIALLY_DELETED")
    assert run("experiment download", one, tmp_path / "c")["num_files"] == 2

    two = run("experiment fork", one, "--paused", "--config", "name=two")["id"]
    assert run("experiment diff", two)["files"] == []
    assert [each["parent"] for each in run("experiment tree", two)] == [None, one, one]
    assert run("experiment propose", one) == []
    [repeats] = run("experiment repeat", one, "--seeds", 2, "--paused")
    assert run("experiment describe", one)["repeats"]["experiments"] == [repeats["id"]]
    mastered("e", "kill", repeats["id"])
    assert run("experiment fork", one, "--dry-run")["config"]["name"] == "small (fork)"
    assert run("experiment set-max-slots", two, 1)["id"] == two
    assert run("experiment set-priority", two, 7)["id"] == two
    assert run("experiment set-weight", two, 2)["id"] == two
    assert run("experiment set", two, "--weight", 3)["id"] == two
    assert run("experiment label", two, "mine")["labels"] == ["mine"]
    assert run("experiment move", two, "--to", "Default")["project"] == "Default"
    assert run("experiment move", two, "--to", "Default", "--dry-run")["num_unchanged"] == 1
    assert run("experiment rename", two, "other")["name"] == "other"
    assert run("experiment note", two, "some")["notes"] == "some"
    assert [each["best_trial"] for each in run("experiment compare", one, one)] == [trial, trial]
    # Its trial could end before the pause comes.
    for slot in (0, 1):
        mastered("s", "drain", "local", slot)
    assert run("experiment activate", two)["state"] in ("QUEUED", "RUNNING")
    assert run("experiment pause", two)["state"] in ("PAUSED", "STOPPING")
    for slot in (0, 1):
        mastered("s", "resume", "local", slot)
    assert run("experiment cancel", two)["state"] in ("STOPPING", "CANCELED")
    run("experiment kill", two)
    mastered("e", "wait", two, code=None)
    assert run("experiment archive", two)["is_archived"]
    assert not run("experiment unarchive", two)["is_archived"]
    assert run("experiment continue", one, "-f")["state"] == "COMPLETED"
    uuid = run("experiment list-checkpoints", one)[0]["uuid"]
    assert run("model register", "net", uuid)["version"] == 1
    assert run("model alias", "net", "best", 1)["aliases"] == {"best": 1}
    assert run("model describe", "net")["versions"][0]["aliases"] == ["best"]
    assert [model["name"] for model in run("model list")] == ["net"]
    assert run("model download", "net", "-o", code / "net")["path"] == str(code / "net")
    assert run("model delete", "net", "--yes")["name"] == "net"
    for options, is_deleted in ((["--dry-run"], False), (["--yes"], True)):
        assert run("experiment delete", two, *options)["is_deleted"] is is_deleted

    assert run("slot drain", "local", 1)["is_drained"]
    assert not run("slot resume", "local", 1)["is_drained"]
    assert len(run("slot list")) == 2
    mastered("e", "create", "config.yaml", "--config", "resources.slots_per_trial=2", cwd=code)
    run("job list")
    assert run("pool set", "default", "--policy", "priority")["policy"] == "priority"
    assert run("pool list")[0]["name"] == "default"
    assert run("pool reset", "default")["policy"] == "fifo"
    assert run("runner list")[0]["name"] == "local"
    four = json.loads(
        mastered("e", "create", "config.yaml", "--paused", "--json", cwd=code).stdout
    )["id"]
    run("job move", four, "--front")
    assert run("token create", "ci")["secret"]
    assert [token["name"] for token in run("token list")] == ["ci"]
    assert run("token revoke", "ci")["name"] == "ci"
    run("token renew-home")
    assert run("user set-password", "--password", "long enough")["user"] == "admin"
    assert run("user add", "ada", "--role", "none")["sign_in_url"].startswith("http")
    assert run("project create", "vision")["role"] == "admin"
    assert run("user role", "ada", "viewer", "--project", "vision")["role"] == "viewer"
    assert run("project members", "vision") == [{"user": "ada", "role": "viewer"}]
    assert [one["name"] for one in run("project list")] == ["Default", "vision"]
    rule = code / "rule.yaml"
    rule.write_text("max_restarts: 1\n")
    for kind in ("template", "policy"):
        assert run(f"{kind} set", "one", rule, "--project", "vision")["revision"] == 1
        assert [one["name"] for one in run(f"{kind} list")] == ["one"]
        assert run(f"{kind} show", "one", "--project", "vision")["kind"] == kind
        assert run(f"{kind} delete", "one", "--project", "vision")["name"] == "one"
        rule.write_text("required: [labels]\n")
    assert run("project delete", "vision") == {"project": "vision"}
    assert [one["num_failed_writes"] for one in run("storage list")] == [0]
    assert run("user group", "ada", "lab") == {"user": "ada", "group": "lab"}
    assert run("user link", "ada", "none") == {"user": "ada", "subject": None}
    assert run("quota set", "--group", "lab", "--weight", 3)["group"] == "lab"
    assert run("quota delete", "--group", "lab")["group"] == "lab"
    assert run("quota set", "--user", "ada", "--slots", 3)["revision"] == 1
    assert run("quota set", "--user", "ada", "--weight", 2)["max_slots"] == 3
    assert [(one["user"], one["weight"]) for one in run("quota list")] == [("ada", 2)]
    assert run("quota delete", "--user", "ada")["user"] == "ada"
    until = ("--until", "2099-01-01", "--from", "2098-01-01T12:00")
    number = run("runner reserve", "local", "--for", "ada", *until)["id"]
    assert run("runner list")[0]["reservations"][0]["user"] == "ada"
    assert run("runner release", "local", number)["id"] == number
    assert run("user remove", "ada")["user"] == "ada"
    assert [one["is_active"] for one in run("user list")] == [False, True]
    assert run("audit")[0]["action"] == "DELETE /users/ada"
    [used] = run("usage", "--by", "user")
    assert (used["user"], used["month"], used["num_trials"] >= 1) == ("admin", None, True)
    assert run("login")["sign_in_url"].startswith("http")
    assert run("status")["num_slots"] == 2
    assert not run("up", "--detach")["is_new"]
    assert run("notify list") == []
    for kind in ("notebook", "shell"):
        assert run(kind, "--detach")["kind"] == kind
    assert run("tensorboard", one, "--slots", 1, "--detach")["url"] is None
    # Their tests have a receiver, and a task that runs.
    seen |= {"notify test", "open", "runner drain", "runner resume", "sync"}
    assert seen == ALL - OFFLINE
    for words, thing in (
        (("e", "list"), "experiment"),
        (("e", "lt", one), "trial"),
        (("c", "list", one), "checkpoint"),
    ):
        titles = mastered(*words, "--format", "tsv").stdout.splitlines()[0]
        assert titles.split("\t") == [row[0] for row in json_answers.WORDS[thing]]
        whole = json.loads(mastered(*words, "--json").stdout)
        fields = [row[1] for row in json_answers.WORDS[thing]]
        some = json.loads(mastered(*words, "--fields", ",".join(fields)).stdout)
        assert some == [{name: one[name] for name in fields} for one in whole] != []
    told = json.loads(mastered("e", "list", "--fields", "id,nope", code=1).stderr)
    assert "must name fields that there are (best_metric, " in told["message"]
    assert "but got 'nope'." in told["message"]
    # All lists take them.
    assert json.loads(mastered("user", "list", "--fields", "name").stdout)[-1] == {"name": "admin"}


@pytest.mark.long
def test_commands_without_a_master_print_their_json(
    paceline: Any, code: Path, tmp_path: Path
) -> None:
    # The answer of `run` is that of its script.
    seen = {"checkpoint export", "mcp", "run", "verify-resume"}

    def run(name: str, *arguments: object, exit_code: int = 0) -> Any:
        seen.add(name)
        words = name.split()
        output = paceline(*words, *arguments, "--json", code=exit_code, cwd=tmp_path).stdout
        return valid(name, output)

    assert run("version")["version"]
    assert {"name": "core_api_digits"} in run("examples list")
    assert run("examples copy", "core_api_digits")["path"] == "core_api_digits"
    run("preview-search", "core_api_digits/adaptive.yaml")
    assert run("simulate-search", "core_api_digits/adaptive.yaml")["num_searches"] == 10
    paceline("e", "create", code / "config.yaml", "--local", cwd=tmp_path)
    [listed] = run("runs list")
    assert (listed["state"], listed["steps_completed"]) == ("completed", 3)
    assert len(run("runs show", "last")["metrics"]) == 6
    run("runs time", "last")
    assert run("runs files", "last") == []
    assert run("runs download", "last")["files"] == []
    assert run("export", "last", "-o", "exported")["num_values"] == 9
    assert run("import", "exported", "--into", "imported")["runs"][0]["state"] == "new"
    assert [each["state"] for each in run("runs compare", "last", "last")] == ["completed"] * 2
    assert run("runs prune", "--keep", 1) == []
    assert not run("runs prune", "--keep", 0, "--dry-run")[0]["is_deleted"]
    assert run("init", "project")["door"] == "core"
    assert run("doctor")[0]["level"] == "ok"
    assert not run("down")["was_running"]
    started = run("up", "--detach", "--port", 0, "--slots", 1)
    assert started["is_new"]
    try:
        [synced] = valid("sync", paceline("sync", "last", "--json", cwd=tmp_path).stdout)
        assert synced["name"] == listed["name"]
        assert run("backup", tmp_path / "copies")["num_files"] > 0
    finally:
        assert run("down")["was_running"]
    assert run("home check")["findings"] == []
    assert run("runs delete", "last", "--yes")["checkpoints_left_in"] is None
    run("restore", tmp_path / "copies", "--home", tmp_path / "other", "--keep-passwords")
    assert seen - {"up"} == OFFLINE


@pytest.mark.long
def test_a_master_in_the_foreground_prints_its_json_when_it_listens(tmp_path: Path) -> None:
    words = ["up", "--json", "--port", "0", "--slots", "1", "--home", str(tmp_path / "home")]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        text = ""
        for line in process.stdout:
            text += line
            if not line.startswith(("{", " ")):
                break
        started = valid("up", text)
        assert (started["pid"], started["is_new"]) == (process.pid, True)
        process.terminate()
        rest, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (rest, process.returncode) == ("", 0)
