"""Running an experiment's entrypoint here, and looking at runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def runs(run: Any, directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("runs", "list", "--json", cwd=directory).stdout)
    return found


def test_local_runs_the_first_trial_of_the_search(paceline: Any, code: Path) -> None:
    options = [
        *("--config", "searcher={name: random, metric: loss, max_trials: 4}"),
        *("--config", "hyperparameters.lr={type: double, minval: 1, maxval: 2}"),
        *("--config", "reproducibility.experiment_seed=5"),
    ]
    chosen = set()
    for _ in range(2):
        result = paceline("e", "create", "config.yaml", ".", "--local", *options, cwd=code)
        assert result.stdout == "step 1\nstep 2\nstep 3\n"
        assert "The run is completed (exit code 0)." in result.stderr
        chosen.update(line for line in result.stderr.splitlines() if "Hyperparameters" in line)
    assert len(chosen) == 1
    assert [run["state"] for run in runs(paceline, code)] == ["completed", "completed"]


def test_local_gives_the_script_arguments_hyperparameters_and_environment(
    paceline: Any, code: Path
) -> None:
    (code / "train.py").write_text(
        "import os, sys, paceline\n"
        "info = paceline.get_cluster_info()\n"
        "print(sys.argv[1:], info.trial.hparams, os.environ['COLOR'], info.slot_ids)\n"
        "print(sorted(v for v in os.environ if v.startswith('PACELINE_')))\n"
    )
    result = paceline(
        *("e", "create", "config.yaml", ".", "--local"),
        *("--config", "hyperparameters.lr=0.5"),
        *("--config", "entrypoint=python3 train.py --lr ${hparams.lr}"),
        *("--config", "environment.variables.COLOR=blue"),
        *("--config", "resources.slots_per_trial=2"),
        cwd=code,
    )
    assert result.stdout.splitlines() == [
        "['--lr', '0.5'] {'lr': 0.5} blue [0, 1]",
        "['PACELINE_RUN_DIR']",
    ]


def test_a_local_run_does_not_record_secrets_of_its_command(paceline: Any, code: Path) -> None:
    paceline(
        *("e", "create", "config.yaml", ".", "--local"),
        *("--config", "environment.secrets={WANDB: not-for-all}"),
        *("--config", "environment.variables.DB_PASSWORD=nor-this-one"),
        cwd=code,
    )
    [run] = runs(paceline, code)
    directory = code / run["path"]
    arguments = json.loads((directory / "run.json").read_text())["arguments"]
    assert "environment.secrets={WANDB: ***}" in arguments
    files = [path for path in directory.rglob("*") if path.is_file()]
    kept = b"".join(path.read_bytes() for path in files)
    assert b"not-for-all" not in kept
    assert b"nor-this-one" not in kept


@pytest.mark.parametrize(
    ("entrypoint", "expected"),
    [("exit 3", 3), ("['./missing']", 127), ("['./train.py']", 126), ("kill -9 $$", 137)],
)
def test_local_ends_with_the_exit_code_of_the_script(
    paceline: Any, code: Path, entrypoint: str, expected: int
) -> None:
    options = ["--config", f"entrypoint={entrypoint}"]
    paceline("e", "create", "config.yaml", ".", "--local", *options, cwd=code, code=expected)


@pytest.mark.long
def test_a_local_run_that_was_stopped_can_be_resumed(
    paceline: Any, code: Path, tmp_path: Path
) -> None:
    options = ["--local", "--config", "data={steps: 12, held_at: 2}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", "e", "create", "config.yaml", ".", *options],
        env={**os.environ, "PACELINE_HOME": str(tmp_path)},
        cwd=code,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line == "step 2\n":
            break
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=200)
    seen += output.splitlines(keepends=True)
    [run] = runs(paceline, code)
    assert run["state"] == "preempted"
    directory = Path(run["path"])
    assert f"\nlook: paceline runs show {directory}\n" in errors
    again = "paceline e create config.yaml . --local --config 'data={steps: 12, held_at: 2}'"
    assert f"\nresume: {again} --resume {directory}\n" in errors
    options += ["--resume", str(directory)]
    result = paceline("e", "create", "config.yaml", ".", *options, cwd=code)
    steps = "".join(seen) + result.stdout
    assert steps == "".join(f"step {step}\n" for step in range(1, 13))
    assert [r["state"] for r in runs(paceline, code)] == ["completed"]

    shown = json.loads(paceline("runs", "show", directory.name, "--json", cwd=code).stdout)
    validation = [m for m in shown["metrics"] if m["group"] == "validation"]
    assert [m["steps_completed"] for m in validation] == list(range(1, 13))
    text = paceline("runs", "show", directory, "-g", "validation", cwd=code).stdout
    assert "loss=0.08333 epochs=12" in text
    assert "train_loss" not in text


@pytest.mark.parametrize("option", [("--resume", "x"), ("--test",)])
def test_what_is_for_a_local_run_alone_is_refused_without_local(
    paceline: Any, code: Path, option: tuple[str, ...]
) -> None:
    result = paceline("e", "create", "config.yaml", ".", *option, cwd=code, code=1)
    assert f"`{option[0]}` must come with `--local`.\nHint: add it." in result.stderr


def test_a_test_cannot_go_on_in_a_run(paceline: Any, code: Path) -> None:
    options = ("--local", "--test", "--resume", "x")
    result = paceline("e", "create", "config.yaml", ".", *options, cwd=code, code=1)
    assert "`--test` must come without `--resume`" in result.stderr


@pytest.mark.parametrize(("options", "told"), [((), "None"), (("--test",), "'1'")])
def test_a_script_with_a_loop_of_its_own_is_told_of_a_test(
    paceline: Any, code: Path, options: tuple[str, ...], told: str
) -> None:
    script = "import os; print(repr(os.environ.get('PACELINE_TEST_MODE')))\n"
    (code / "train.py").write_text(script)
    result = paceline("e", "create", "config.yaml", ".", "--local", *options, cwd=code)
    assert result.stdout == f"{told}\n"
    assert ("Test mode: one training batch" in result.stderr) == bool(options)


@pytest.mark.parametrize("option", ["--json", "--paused", "--start-master"])
def test_local_refuses_what_needs_a_master(paceline: Any, code: Path, option: str) -> None:
    result = paceline("e", "create", code / "config.yaml", "--local", option, code=1)
    assert f"`{option}` must come without `--local`" in result.stderr


def test_a_script_that_reports_nothing_has_no_state(paceline: Any, code: Path) -> None:
    options = ["--local", "--config", "entrypoint=exit 3"]
    result = paceline("e", "create", "config.yaml", *options, cwd=code, code=3)
    assert "ended with exit code 3 and reported nothing" in result.stderr
    assert [run["state"] for run in runs(paceline, code)] == ["no_reports"]
    assert "no reports" in paceline("runs", "show", "last", cwd=code).stdout


def test_what_has_ended_a_run_is_shown(paceline: Any, code: Path) -> None:
    begin = "import os\nfrom paceline import core\nwith core.init() as context:\n    "
    report = "context.train.report_training_metrics(1, {'loss': 1.0})\n    "
    ends = {
        "raise ValueError('no good')": "ValueError: no good",
        "os.kill(os.getpid(), 9)": "none was told: the process was killed",
        "pass": None,
    }
    for end, told in ends.items():
        (code / "train.py").write_text(f"{begin}{report}{end}\n")
        subprocess.run([sys.executable, "train.py"], cwd=code, capture_output=True, check=False)
        shown = paceline("runs", "show", "last", cwd=code).stdout
        assert told in shown if told else "Error" not in shown


def test_a_run_is_found_by_a_part_of_its_name_that_fits_it_alone(paceline: Any, code: Path) -> None:
    for name in ("first", "second"):
        options = ["--local", "--config", f"name={name}"]
        paceline("e", "create", "config.yaml", *options, cwd=code)
    shown = json.loads(paceline("runs", "show", "second", "--json", cwd=code).stdout)
    assert shown["name"] == "second"
    assert {row["attempt"] for row in shown["metrics"]} == {1}
    assert "`RUN_DIR` must fit one run" in paceline("runs", "show", "2", cwd=code, code=1).stderr


def test_runs_of_a_place_that_is_not_there_is_an_error(paceline: Any, tmp_path: Path) -> None:
    result = paceline("runs", "list", tmp_path / "nowhere", code=1)
    assert "`DIR` must be a directory" in result.stderr


def test_runs_of_an_empty_place(paceline: Any, tmp_path: Path) -> None:
    assert paceline("runs", "list", cwd=tmp_path).stdout == "No runs in paceline_runs.\n"
    refused = paceline("runs", "show", "nothing", cwd=tmp_path, code=1).stderr
    assert "`RUN_DIR` must be a run directory, or a name or part of a name" in refused
    refused = paceline("runs", "show", tmp_path, cwd=tmp_path, code=1).stderr
    assert "must be a Paceline run directory" in refused
    assert "Errno" not in refused
