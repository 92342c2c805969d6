"""What the command line does for agents: its skill, its mode, and lineage of experiments."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline as package
from paceline.cli._experiment_description import result_fields
from paceline.config import validate_config
from paceline.search import parse_space

SKILL = Path(package.__file__).parent / ".agents" / "skills" / "paceline" / "SKILL.md"
SEARCH = {
    "searcher": {"name": "random", "metric": "loss", "max_trials": 4, "max_concurrent_trials": 1},
    "hyperparameters": {"lr": {"type": "double", "minval": 0.1, "maxval": 1.0}},
}


@pytest.fixture
def searched(code: Path) -> Path:
    """Return a directory with a search."""
    config = json.loads((code / "config.yaml").read_text())
    (code / "config.yaml").write_text(json.dumps(config | SEARCH))
    return code


def environment_of(home: Path, **variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    return {**kept, "PACELINE_HOME": str(home), "COLUMNS": "80", **variables}


def in_agent_mode(home: Path, *words: str, cwd: Path, **variables: str) -> Any:
    environment = environment_of(home, **{"PACELINE_AGENT": "1"} | variables)
    command = [sys.executable, "-m", "paceline.cli", *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )


# Commands whose exit code depends on what runs meanwhile.
FREE = {"t stop", "e pause", "e activate", "e cancel", "e continue"}


@pytest.mark.long
def test_every_command_of_the_skill_runs(
    searched: Path, tmp_path: Path, command_server: Any, paceline: Any
) -> None:
    """The numbers in it are those of a new home, and the commands are run in their order."""
    text = SKILL.read_text(encoding="utf-8")
    header = text.split("---")[1]
    assert re.search(r"^name: paceline$", header, re.MULTILINE)
    assert len(re.search(r"^description: (.*)$", header, re.MULTILINE)[1]) < 1024  # type: ignore[index]
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) > 25
    answers: dict[str, Any] = {}
    try:
        for name, *words in commands:
            assert name == "paceline"
            if words == ["up", "--detach"]:
                words += ["--port", "0", "--slots", "2"]
            if words[:2] == ["e", "fork"] and words[3] == ".":
                script = (searched / "train.py").read_text()
                script = script.replace('"loss": lr', '"loss": 0.5 * lr')
                (searched / "train.py").write_text(script)
            if words[:3] == ["e", "continue", "4"]:
                paceline("e", "wait", "4", code=None)
            if words[:2] == ["e", "fork"]:
                paceline("e", "wait", "1")
            code = None if " ".join(words[:2]) in FREE else 0
            found = paceline(*words, cwd=searched, code=code)
            assert "Traceback" not in found.stderr, (words, found.stderr)
            answers[" ".join(words[:3])] = found.stdout
        script, program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        home = Path(json.loads(paceline("status", "--json").stdout)["home"])
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment_of(home), capture_output=True,
            text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        trials = json.loads(paceline("e", "list-trials", "7", "--json").stdout)
        told = [paceline("t", "describe", str(one["id"]), "--json").stdout for one in trials]
        whys = [json.loads(one)["proposal"]["why"] for one in told]
        assert sorted(whys) == ["at random", *["near the best"] * 3], f"{whys}"
    finally:
        paceline("down", "--timeout", 1)
    plain = searched / "plain.py"
    plain.write_text(script)
    alone = subprocess.run(
        [sys.executable, plain.name], cwd=searched, capture_output=True, text=True, timeout=280,
        env=environment_of(tmp_path / "none", PACELINE_PROGRESS="1"),
    )  # fmt: skip
    assert "loss=0.0125" in alone.stdout + alone.stderr, f"{alone.stdout}{alone.stderr}"
    [config] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    space = validate_config(yaml.safe_load(config)).hyperparameters
    assert parse_space(space).parameters[1].low == 1e-4, f"{space}: bounds of `log` are exponents"
    assert "+        context.train" in answers["e diff 3"]
    described = json.loads(answers["e describe 1"])
    assert described["repeats"]["num_pairs"] == 3
    assert json.loads(answers["e propose 4"])[0]["hparams"] == {"lr": 0.3}
    assert "changed" in answers["e tree 1"]


@pytest.mark.long
def test_the_script_of_the_skill_trains_in_the_search_of_the_skill(
    mastered: Any, tmp_path: Path
) -> None:
    text = SKILL.read_text(encoding="utf-8")
    for name, kind in (("train.py", "python"), ("config.yaml", "yaml")):
        (tmp_path / name).write_text(re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1])  # type: ignore[index]
    more = ("--config", "searcher.max_trials=3")
    fields = ("--fields", "id,state,best_trial")
    create = ("e", "create", "config.yaml", ".", *more)
    refused = mastered(*create, "--fields", "id,nope", cwd=tmp_path, code=1)
    assert "'nope'" in refused.stderr
    dry = mastered(*create, "--dry-run", "--fields", "num_files", cwd=tmp_path)
    assert json.loads(dry.stdout) == {"num_files": 2}
    made = json.loads(mastered(*create, "-f", *fields, cwd=tmp_path).stdout)
    assert set(made) == {"id", "state", "best_trial"}
    assert (made["id"], made["state"]) == (1, "COMPLETED"), "what was refused has made nothing"
    whole = json.loads(mastered("e", "wait", "1", "--json").stdout)
    assert set(whole) == {*result_fields()}
    assert json.loads(mastered("e", "wait", "1", "--fields", "state").stdout) == {
        "state": "COMPLETED"
    }
    assert json.loads(mastered("e", "fork", "1", ".", "--fields", "id", cwd=tmp_path).stdout) == {
        "id": 2
    }
    best = made["best_trial"]
    assert best["steps_completed"] == 8
    # Without a length it has that of the search, which this trial has reached.
    again = mastered("t", "continue", best["id"], "-f", "--json", cwd=tmp_path, code=1)
    assert "must train further than trial" in again.stderr
    longer = ("--config", "searcher.max_length.epochs=10")
    found = mastered("t", "continue", best["id"], "-f", *longer, *fields, cwd=tmp_path).stdout
    further = json.loads(found)["best_trial"]
    assert further["steps_completed"] == 10
    told = mastered("t", "describe", further["id"]).stdout
    assert "checkpoint" in told.split("From")[1].split("End")[1]


@pytest.mark.long
def test_an_agent_sees_whole_tables_and_is_never_asked(
    mastered: Any, searched: Path, tmp_path: Path
) -> None:
    name = "n" * 300
    made = json.loads(
        mastered("e", "create", "config.yaml", "--paused", "--json", "--config", f"name={name}",
                 cwd=searched).stdout
    )  # fmt: skip
    home = Path(json.loads(mastered("status", "--json").stdout)["home"])
    listed = in_agent_mode(home, "e", "list", cwd=searched)
    assert name in listed.stdout
    assert name not in mastered("e", "list").stdout
    mastered("e", "kill", made["id"])
    for variable in ("PACELINE_AGENT", "AI_AGENT"):
        given = {"PACELINE_AGENT": "", variable: "yes"}
        refused = in_agent_mode(home, "e", "delete", str(made["id"]), cwd=searched, **given)
        assert refused.returncode == 1
        assert "`--yes` must be given to confirm by an agent" in refused.stderr
    hinted = in_agent_mode(home, "e", "create", "config.yaml", cwd=searched)
    assert "Hint: `paceline e wait" in hinted.stderr
    assert "Hint" not in hinted.stdout


def test_a_prompt_on_a_terminal_is_refused_for_an_agent(tmp_path: Path) -> None:
    master, slave = os.openpty()
    try:
        environment = environment_of(tmp_path, AI_AGENT="x")
        command = [sys.executable, "-m", "paceline.cli", "user", "set-password"]
        found = subprocess.run(
            command, stdin=slave, env=environment, capture_output=True, text=True, timeout=280
        )
    finally:
        os.close(master)
        os.close(slave)
    assert found.returncode == 1
    assert "`--password` must be given" in found.stderr


def test_a_trial_continues_with_changed_code(mastered: Any, code: Path) -> None:
    made = json.loads(mastered("e", "create", "config.yaml", "-f", "--json", cwd=code).stdout)
    trial = str(made["best_trial"]["id"])
    script = (code / "train.py").read_text().replace('print(f"step', 'print(f"changed')
    (code / "train.py").write_text(script)
    words = ("t", "continue", trial, ".", "--config", "data.steps=4", "-f", "--json")
    after = json.loads(mastered(*words, cwd=code).stdout)
    assert (after["state"], after["best_trial"]["steps_completed"]) == ("COMPLETED", 4)
    assert mastered("e", "logs", after["id"]).stdout == "changed 4\n"
    shown = mastered("e", "diff", after["id"]).stdout
    assert '-        print(f"step {step}", flush=True)' in shown.splitlines()
    tree = json.loads(mastered("e", "tree", made["id"], "--json").stdout)
    assert [(one["id"], one["parent"]) for one in tree] == [
        (made["id"], None),
        (after["id"], made["id"]),
    ]


@pytest.mark.long
def test_the_best_trial_of_an_experiment_continues(mastered: Any, code: Path) -> None:
    grid = {"searcher": {"name": "grid", "metric": "loss"}}
    grid |= {"hyperparameters": {"lr": {"type": "categorical", "vals": [3.0, 1.0, 2.0]}}}
    config = json.loads((code / "config.yaml").read_text()) | grid
    (code / "config.yaml").write_text(json.dumps(config))
    made = json.loads(mastered("e", "create", "config.yaml", "-f", "--json", cwd=code).stdout)
    best, number = made["best_trial"], made["id"]
    assert best["hparams"] == {"lr": 1.0}
    words = ("t", "continue", "--best", number, "--paused")
    after = json.loads(mastered(*words, "--json").stdout)
    assert after["parent_trial_id"] == best["id"]
    # Without a trial, the word before the options is the directory.
    (code / "more.txt").write_text("new")
    text = mastered("t", "continue", ".", *words[2:], cwd=code).stdout
    assert f"continues trial {best['id']}." in text
    other = json.loads(mastered("e", "list", "--limit", 1, "--json").stdout)[0]["id"]
    assert "more.txt" in mastered("e", "diff", other).stdout
    for wrong in ((), (number,), (".", ".")):
        refused = mastered("t", "continue", *wrong, *words[2:] * bool(wrong), code=2).stderr
        assert "must be the number of a trial or `--best EXPERIMENT`" in refused
    refused = mastered("t", "continue", "--best", other, code=1).stderr
    assert f"Experiment {other} must have a best trial" in refused
    for experiment in (after["id"], other):
        mastered("e", "kill", experiment)


def test_a_search_is_simulated_on_its_own_curves(mastered: Any, searched: Path) -> None:
    made = json.loads(mastered("e", "create", "config.yaml", "-f", "--json", cwd=searched).stdout)
    words = ("simulate-search", "config.yaml", "--curves", made["id"], "--slots", 2, "--seeds", 3)
    found = json.loads(mastered(*words, "--json", cwd=searched).stdout)
    assert (found["num_curves"], found["num_searches"]) == (4, 3)
    values = [trial["best_metric"] for trial in json.loads(
        mastered("e", "list-trials", made["id"], "--json").stdout
    )]  # fmt: skip
    assert min(values) <= found["best"][-1]["min"] <= found["best"][-1]["max"] <= max(values)
    assert found["trials"] == [{"length": None, "mean": 4.0, "min": 4.0, "max": 4.0}]
    text = mastered(*words, cwd=searched).stdout
    assert "3 simulated searches on 4 curves" in text
    other = ("--config", "hyperparameters={a: {type: int, minval: 1, maxval: 2}}")
    refused = mastered(*words, *other, cwd=searched, code=1)
    assert "must have a trial with hyperparameters" in refused.stderr
    (searched / "curves.json").write_text('[{"hparams": 1}]')
    wrong = ("simulate-search", "config.yaml", "--curves", "curves.json")
    assert "JSON list of curves" in mastered(*wrong, cwd=searched, code=1).stderr
