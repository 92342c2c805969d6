"""Helps that end with examples, plain errors, and answers to programs without a terminal."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from json_answers import error_of
from test_surface import ALIASES, COMMANDS, commands_below
from typer.main import get_command
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli._command_groups import command_examples, help_ending

ALL = {
    " ".join([group, *below])
    for group, names in COMMANDS.items()
    for below in ([[name] for name in names] or [[]])
}
ROOT: Any = get_command(app)


def test_each_command_has_two_examples_that_call_it() -> None:
    assert command_examples().keys() == ALL | {"runner"}
    for name, examples in command_examples().items():
        assert len(examples) == 2, name
        for example in examples:
            path = []
            command = ROOT
            words = shlex.split(example)
            while words and words[0] in getattr(command, "commands", {}):
                word = words.pop(0)
                path.append(
                    {**ALIASES, "lt": "list-trials", "lc": "list-checkpoints"}.get(word, word)
                )
                command = command.commands[word]
            assert " ".join(path) == name, example
            # Wrong words or options raise here.
            command.make_context(name, words, resilient_parsing=False).close()


@pytest.fixture
def one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls share the tree of commands, which takes far longer to make than a help."""
    monkeypatch.setattr("typer.testing._get_command", lambda _app: ROOT)


@pytest.mark.usefixtures("one_tree")
def test_each_help_ends_with_examples_and_exit_codes() -> None:
    num_helps = 0
    for name, command in commands_below("paceline", ROOT):
        answer = CliRunner().invoke(app, [*name.split()[1:], "--help"])
        assert answer.exit_code == 0
        assert answer.output.endswith(help_ending(name)), name
        assert help_ending(name).count("  paceline ") == 2, name
        assert "\n  2    wrong usage\n" in answer.output or name.endswith("verify-resume")
        num_helps += command is not None
    assert num_helps > len(ALL)


@pytest.mark.usefixtures("one_tree")
def test_a_narrow_terminal_cuts_no_summary() -> None:
    groups = [name for name, one in commands_below("paceline", ROOT) if hasattr(one, "commands")]
    for name in groups:
        told = CliRunner().invoke(app, [*name.split()[1:], "--help"], env={"COLUMNS": "60"})
        assert "..." not in told.output.replace("[ARGS]...", ""), name


def test_the_help_begins_with_what_a_newcomer_runs() -> None:
    told = CliRunner().invoke(app, ["--help"]).output
    places = [told.index(f"\n  {name} ") for name in ("init", "run", "up", "runs", "experiment")]
    assert places == sorted(places)
    assert "  paceline init my-project\n" in told


LISTS = {
    "list", "lt", "lc", "list-trials", "list-checkpoints", "compare", "doctor", "files", "audit",
    "usage",
    "tree", "members",
}  # fmt: skip


def test_every_command_has_json_and_lists_have_tsv() -> None:
    for name, command in commands_below("paceline", ROOT):
        if hasattr(command, "commands"):
            continue
        options = {option: one for one in command.params for option in one.opts}
        assert "--json" in options, name
        is_list = name.split()[-1] in LISTS
        has_tsv = "tsv" in str(getattr(options.get("--format"), "type_descriptor", ""))
        assert has_tsv == is_list, name
        of_one = ("create", "fork", "describe", "wait", "continue")
        words = name.removeprefix("paceline ").split()
        is_long = words[0] in ("e", "experiment", "t", "trial") and words[-1] in of_one
        assert ("--fields" in options) == (is_list or is_long), name


WRONG = [
    (["e", "describe", "abc"], 2, "usage", "must be a whole number, but got 'abc'."),
    (["e", "list", "--state", "nope"], 2, "usage", "'nope' is not one of 'queued', 'running'"),
    (["e", "list", "--format", "xml"], 2, "usage", "'xml' is not one of 'table', 'json', 'tsv'"),
    (["e", "list", "--fields", "id", "--format", "tsv"], 2, "usage", "without `--format tsv`"),
    (["e", "wait", "1", "--timeout", "-1"], 2, "usage", "must be at least 0, but got '-1'."),
    (["e", "wait", "1", "--interval", "x"], 2, "usage", "must be a number, but got 'x'."),
    (["e", "set-weight", "1", "nan"], 1, "command", "must be a number above 0, but got nan."),
    (["up", "--port", "70000"], 2, "usage", "must be at most 65535, but got '70000'."),
    (["frobnicate"], 2, "usage", "No such command 'frobnicate'"),
    (["runs", "show", "nope"], 1, "command", "`RUN_DIR` must be a run directory"),
    (["--master", "http://127.0.0.1:9", "e", "list"], 1, "master_unreachable",
     "A master must answer at http://127.0.0.1:9, but none does (Connection refused)."),
    (["--master", "ftp://x", "e", "list"], 1, "master_unreachable",
     "must be of the form http://HOST:PORT, but got 'ftp://x'."),
    (["--master", "127.0.0.1:port", "e", "list"], 1, "master_unreachable", "of the form http"),
    (["e", "create", "no.yaml"], 1, "config", "`no.yaml` must be a file that can be read"),
    (["user", "set-password"], 1, "command", "`--password` must be given without a terminal"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "exit_code", "error_code", "message"), WRONG)
def test_a_wrong_call_is_told_in_own_words_and_as_json(
    paceline: Any, words: list[str], exit_code: int, error_code: str, message: str
) -> None:
    told = paceline(*words, code=exit_code)
    as_json = paceline(*words, "--json", code=exit_code)
    assert told.stdout == as_json.stdout == ""
    assert message in told.stderr
    for raw in ("Errno 2", "Traceback", "Input should", "pydantic", "token must"):
        assert raw not in told.stderr
    [line] = as_json.stderr.splitlines()
    error = error_of(line)
    assert error["code"] == error_code
    assert message in error["message"]
    assert "Hint:" not in error["message"]


MASTER_WRONG = [
    (["e", "describe", "0"], "invalid_request", "`experiment_id` must be at least 1, but got '0'."),
    (["e", "describe", "99"], "not_found", "There is no experiment 99."),
    (["pool", "set", "a b"], "invalid_request", "`name` must match"),
    (["backup", "/proc/nowhere"], "backup", "must be writable, but cannot be made"),
    (["runner", "drain", "nowhere"], "not_found", "There is no node 'nowhere'."),
]


@pytest.mark.parametrize(("words", "error_code", "message"), MASTER_WRONG)
def test_what_a_master_refuses_has_its_code(
    mastered: Any, words: list[str], error_code: str, message: str
) -> None:
    error = error_of(mastered(*words, "--json", code=1).stderr)
    assert (error["code"], message in error["message"]) == (error_code, True), error


def test_a_master_that_answers_without_a_token_is_not_called_absent(
    mastered: Any, paceline: Any
) -> None:
    url = json.loads(mastered("status", "--json").stdout)["url"]
    told = paceline("--master", url, "e", "list", code=1).stderr
    assert "The master's token must be readable" in told


def test_nothing_is_asked_without_a_terminal(mastered: Any, code: Path) -> None:
    made = json.loads(mastered("e", "create", code / "config.yaml", "-f", "--json").stdout)
    refused = mastered("e", "delete", made["id"], code=1)
    assert "`--yes` must be given to confirm without a terminal" in refused.stderr
    uuid = made["best_trial"]["latest_checkpoint"]
    assert "Hint: add `--yes`." in mastered("c", "delete", uuid, code=1).stderr
    assert mastered("e", "describe", made["id"]).stdout


def test_an_end_that_does_not_come_has_its_own_exit_code(mastered: Any, code: Path) -> None:
    options = ("--config", "data={steps: 999, pause_s: 0.2}", "--json")
    made = json.loads(mastered("e", "create", code / "config.yaml", *options).stdout)
    waited = mastered("e", "wait", made["id"], "--timeout", 0, "--json", code=124)
    assert json.loads(waited.stdout)["state"] in ("QUEUED", "RUNNING")
    paused = json.loads(mastered("e", "pause", made["id"], "--json").stdout)
    assert paused["state"] in ("STOPPING", "PAUSED")
    mastered("e", "kill", made["id"])
    mastered("e", "wait", made["id"], "--timeout", 60, code=1)


@pytest.mark.long
def test_a_key_makes_one_experiment_and_belongs_to_one_request(mastered: Any, code: Path) -> None:
    def create(*options: object, exit_code: int = 0) -> Any:
        words = ("e", "create", code / "config.yaml", code, "--paused", "--key", "job-7", *options)
        return mastered(*words, "--json", code=exit_code)

    first, again = (json.loads(create().stdout)["id"] for _ in range(2))
    assert first == again
    assert "Nothing was created" in create().stderr
    words = ("e", "create", code / "config.yaml", code, "--paused", "--key")
    assert mastered(*words, "job-7").stdout.startswith("Nothing was created: an earlier request")
    assert mastered(*words, "job-8").stdout.startswith(f"Created experiment {first + 1} ")
    refused = error_of(create("--config", "name=other", exit_code=1).stderr)
    assert refused["code"] == "key_reused"
    assert f"about experiment {first}" in refused["message"]
    forks = {
        json.loads(mastered("e", "fork", first, "--paused", "--key", "f", "--json").stdout)["id"]
        for _ in range(2)
    }
    assert len(forks) == 1
    for wrong in ("é", "", "x" * 101):
        told = mastered("e", "fork", first, "--key", wrong, code=1).stderr
        assert "`key` must have 1 to 100 printable ASCII characters" in told
    mastered("e", "kill", first)
    mastered("e", "kill", *forks)


@pytest.mark.long
def test_dry_runs_change_nothing(mastered: Any, code: Path) -> None:
    def ids() -> list[int]:
        return [one["id"] for one in json.loads(mastered("e", "list", "--json").stdout)]

    made = json.loads(mastered("e", "create", code / "config.yaml", "-f", "--json").stdout)["id"]
    before = ids()
    told = mastered("e", "create", code / "config.yaml", "--dry-run").stdout
    assert "would have 1 trial (single), and 2 files" in told
    assert "Nothing was created." in mastered("e", "fork", made, "--dry-run").stdout
    wrong = ("--dry-run", "--config", "nonsense=1")
    assert "`nonsense` is not a known field" in mastered("e", "fork", made, *wrong, code=1).stderr
    assert "Dry run: nothing was deleted." in mastered("e", "delete", made, "--dry-run").stdout
    assert ids() == before


def test_tsv_has_whole_values_in_one_cell_each(mastered: Any, code: Path) -> None:
    name = "long\tname\\of " + "many words " * 20
    (code / "config.yaml").write_text(
        json.dumps(json.loads((code / "config.yaml").read_text()) | {"name": name})
    )
    made = mastered("e", "create", code / "config.yaml", "-f", "--json", code=None)
    made = json.loads(made.stdout)
    titles, row = mastered("e", "list", "--limit", 1, "--format", "tsv").stdout.splitlines()
    cells = dict(zip(titles.split("\t"), row.split("\t"), strict=True))
    assert cells["Name"] == made["name"].replace("\\", "\\\\").replace("\t", "\\t")
    assert float(cells["Best metric"]) == made["best_metric"]
    assert float(cells["Created"]) == made["created_at"]
    assert cells["State"] == "COMPLETED"


@pytest.mark.parametrize("words", [["examples", "list"], ["version", "--json"], ["--help"]])
def test_a_closed_pipe_ends_quietly(words: list[str]) -> None:
    command = [sys.executable, "-m", "paceline.cli", *words]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=200, check=False
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def suggestions(home: Path, *words: str) -> list[str]:
    """Return what a shell is given to complete the last word."""
    environment = {
        **os.environ, "PACELINE_HOME": str(home), "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["paceline", *words]), "COMP_CWORD": str(len(words)),
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "paceline.cli"],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ended.stderr == ""
    return [line.split(",")[-1] for line in ended.stdout.split()]


@pytest.mark.long
def test_ids_and_names_are_completed_from_the_running_master(
    mastered: Any, code: Path, tmp_path: Path
) -> None:
    home = Path(json.loads(mastered("status", "--json").stdout)["home"])
    made = json.loads(mastered("e", "create", code / "config.yaml", "-f", "--json").stdout)
    trial = made["best_trial"]
    assert str(made["id"]) in suggestions(home, "e", "describe", "")
    assert suggestions(home, "t", "logs", str(trial["id"]))[0] == str(trial["id"])
    assert trial["latest_checkpoint"] in suggestions(home, "c", "describe", "")
    assert suggestions(home, "runner", "drain", "lo") == ["local"]
    assert suggestions(home, "e", "describe", "x") == []
    assert suggestions(tmp_path / "nowhere", "e", "describe", "") == []
