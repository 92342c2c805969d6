"""`paceline run`: which program starts, with what, and which code it ends with."""

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys

import paceline

with paceline.core.init() as context:
    first = 1
    if context.latest_checkpoint:
        first = context.checkpoint.get_metadata(context.latest_checkpoint)["steps_completed"] + 1
    info = paceline.get_cluster_info()
    lr = info.trial.hparams["lr"] if info else 1.0
    print("rank", context.distributed.rank, "from", first, "lr", lr, sys.argv[1:], flush=True)
    for step in range(first, 5):
        context.train.report_validation_metrics(step, {"loss": lr / step})
        if context.distributed.rank == 0:
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "state.txt").write_text(f"{step}")
        if "--die" in sys.argv and step == 2:
            sys.exit(7)
"""
CONFIG = {
    "name": "small",
    "entrypoint": "python3 train.py",
    "hyperparameters": {"lr": 0.5},
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 4}},
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a directory with a script and the config of an experiment."""
    path = tmp_path / "project"
    path.mkdir()
    (path / "train.py").write_text(SCRIPT)
    (path / "config.yaml").write_text(json.dumps(CONFIG))
    return path


def states(paceline: Any, project: Path) -> list[tuple[str, int, int]]:
    """Return state, attempts and last step of the runs, the newest first."""
    found = json.loads(paceline("runs", "list", "--json", cwd=project).stdout)
    return [(run["state"], run["num_attempts"], run["steps_completed"]) for run in found]


def test_a_script_gets_its_arguments_and_gives_its_exit_code_and_is_resumed(
    paceline: Any, project: Path
) -> None:
    died = paceline("run", "train.py", "--die", "-x", "3", cwd=project, code=7)
    assert died.stdout == "rank 0 from 1 lr 1.0 ['--die', '-x', '3']\n"
    resumed = paceline("run", "train.py", "--resume", "auto", cwd=project)
    assert resumed.stdout == "rank 0 from 3 lr 1.0 []\n"
    assert states(paceline, project) == [("completed", 2, 4)]
    # After `--`, also options that the command itself has are the script's.
    other = paceline("run", "train.py", "--resume", "last", "--", "--watch", cwd=project)
    assert other.stdout == "rank 0 from 5 lr 1.0 ['--watch']\n"
    assert states(paceline, project) == [("completed", 3, 4)]


def test_an_error_of_the_command_is_json_and_the_script_prints_what_it_likes(
    paceline: Any, project: Path
) -> None:
    refused = paceline("run", "none.py", "--json", cwd=project, code=2)
    assert "'none.py' is not there" in json.loads(refused.stderr)["message"]
    told = paceline("run", "train.py", "--json", "--", "--json", cwd=project)
    assert told.stdout == "rank 0 from 1 lr 1.0 ['--json']\n"


@pytest.mark.long
def test_workers_start_through_the_launcher(paceline: Any, project: Path) -> None:
    result = paceline("run", "-n", 2, "train.py", "--", "a", cwd=project)
    assert sorted(result.stdout.splitlines()) == [
        f"[rank={rank}] rank {rank} from 1 lr 1.0 ['a']" for rank in (0, 1)
    ]
    died = paceline("run", "-n", 1, "--max-restarts", 1, "train.py", "--die", cwd=project)
    # The second start resumes behind the step that ended the first one.
    assert [line.split(" lr")[0] for line in died.stdout.splitlines()] == [
        "rank 0 from 1",
        "rank 0 from 3",
    ]


@pytest.mark.long
def test_the_first_trial_of_an_experiment_runs_with_changed_fields(
    paceline: Any, project: Path
) -> None:
    place = project.parent
    change = ("--set", "hyperparameters.lr=0.25")
    result = paceline("run", "project/config.yaml", *change, cwd=place)
    assert result.stdout == "rank 0 from 1 lr 0.25 []\n"
    died = ("--set", "entrypoint=python3 train.py --die", "--set", "name=dies")
    failed = paceline("run", "project/config.yaml", *died, cwd=place, code=7)
    _, *ending = failed.stderr.splitlines()[-3:]
    [run] = [path.name for path in (place / "paceline_runs").glob("*-dies")]
    again = "paceline run project/config.yaml --set 'entrypoint=python3 train.py --die' --set name="
    assert ending == [
        f"look: paceline runs show paceline_runs/{run}",
        f"resume: {again}dies --resume paceline_runs/{run}",
    ]
    resumed = ("--resume", "auto", "--set", "name=dies")
    assert paceline("run", "project/config.yaml", *resumed, cwd=place).stdout.startswith(
        "rank 0 from 3"
    )
    assert states(paceline, place) == [("completed", 1, 4), ("completed", 1, 4)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none.py"], 2, "`SCRIPT` must be a file, but 'none.py' is not there"),
        (["."], 2, "`SCRIPT` must be a file, but '.' is a directory."),
        (["broken.py"], 2, "broken.py:2 is not ('(' was never closed): def f("),
        (["binary.py"], 2, "`SCRIPT` must be"),
        (["train.py", "--set", "lr=1"], 2, "`--set` must come with a YAML file"),
        (["train.py", "-n", "two"], 2, "`--workers` must be a number from 1 on"),
        (["train.py", "--resume", "no"], 1, "must be a run directory"),
        (["config.yaml", "--set", "sercher.metric=x"], 1, "Did you mean `searcher`?"),
        (["config.yaml", "--set", "hyperparameters"], 1, "`--set` must name a field and its value"),
        (["config.yaml", "--set", "lr=["], 1, "`--set lr:1` must be valid YAML"),
        (["config.yaml", "word"], 2, "must come without arguments, but got 'word'"),
        (["config.yaml", "--max-restarts", "1"], 2, "`--max-restarts` must come without"),
        (["config.yaml", "-n", "auto"], 2, "`--workers` must be a number for an experiment"),
        (["other.yaml"], 2, "has neither. Its fields: 'a'."),
        (["broken.yaml"], 2, "must be valid YAML"),
        (["run.yaml", "--set", "num_epoch=1"], 1, "did you mean `num_epochs`?"),
    ],
)
def test_what_cannot_be_started_is_refused_in_a_sentence(
    paceline: Any, project: Path, arguments: list[str], code: int, message: str
) -> None:
    (project / "broken.py").write_text("x = 1\ndef f(\n")
    (project / "binary.py").write_bytes(b"\x00\xff\xfe")
    (project / "other.yaml").write_text("a: 1\n")
    (project / "broken.yaml").write_text("a: [1\n")
    (project / "run.yaml").write_text("model_class: torch.nn.Linear\n")
    result = paceline("run", *arguments, cwd=project, code=code)
    assert message.casefold() in " ".join(result.stderr.split()).casefold()
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not (project / "paceline_runs").exists()


@pytest.mark.long
def test_a_watched_run_shows_its_progress_where_it_is_off(
    paceline: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")
    assert "loss" not in paceline("run", "train.py", cwd=project).stderr
    watched = paceline("run", "train.py", "--watch", cwd=project)
    assert "loss" in watched.stderr
    assert "look: paceline runs show" in watched.stderr
    trial = paceline("run", "--watch", "config.yaml", cwd=project)
    assert "batch 4" in trial.stderr
