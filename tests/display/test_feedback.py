"""What a person reads of a run without a trainer: its beginning, its progress, its end."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from paceline._base.run_directory import RunDirectory, RunInfo
from paceline.core._train_context import RunFeedback

Run = Callable[..., "subprocess.CompletedProcess[str]"]

CORE = """
import sys, time
from paceline import core

mode = sys.argv[1] if sys.argv[1:] else ""
with core.init(resume="auto" if mode == "auto" else None) as context:
    first, length = 0, 1000 if mode == "slow" else 20
    if context.latest_checkpoint:
        length = 20
        with context.checkpoint.restore_path(context.latest_checkpoint) as path:
            first = int((path / "step").read_text())
    for step in range(first + 1, length + 1):
        if mode == "slow" and not first:
            time.sleep(0.05)
        context.train.report_training_metrics(step, {"loss": 1 / step})
        context.train.report_progress(step / length)
        if step % 10 == 0:
            context.train.report_validation_metrics(step, {"error": 2 / step})
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "step").write_text(str(step))
            if mode == "crash" and not first:
                raise ValueError("broken")
print("the script's own")
"""
RUN = r"run paceline_runs/(\d{8}-\d{6}-script)"
UUID = "[0-9a-f-]{36}"


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what would silence the display, here and in processes."""
    for name in ("CI", "PACELINE_PROGRESS", "PACELINE_RESUME"):
        monkeypatch.delenv(name, raising=False)


def in_shell(command: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command as it stands in a line, as somebody who copies it does."""
    return subprocess.run(
        command, shell=True, cwd=directory, capture_output=True, text=True, timeout=120, check=False
    )


def hint(lines: list[str], name: str) -> str:
    [command] = [line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: ")]
    return command


def test_a_script_says_where_it_is_how_far_and_how_to_look(run_python: Run, tmp_path: Path) -> None:
    result = run_python(CORE)
    assert result.stdout == "the script's own\n"
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", result.stderr)
    begin, first, *lines, end, run, checkpoint, look = result.stderr.splitlines()
    assert re.fullmatch(rf"script\.py  {RUN}", begin)
    assert re.fullmatch(r"batch 1  \d+s elapsed  loss=1", first)
    assert sum("validation: error=" in line for line in lines) >= 1
    assert re.match(r"batch 20 of 20  100%.*  completed in \d+s  loss=0\.05  error=0\.1$", end)
    assert re.fullmatch(RUN, run)
    assert re.fullmatch(f"checkpoint {UUID}", checkpoint)
    assert look.startswith("look: paceline runs show ")
    command = f"{sys.executable} -m paceline.cli {look.removeprefix('look: paceline ')}"
    shown = in_shell(command, tmp_path)
    assert (shown.returncode, "completed" in shown.stdout) == (0, True), shown


def test_a_script_without_reports_and_checkpoints_has_a_beginning_and_an_end(
    run_python: Run,
) -> None:
    begin, end, run, look = run_python(
        "from paceline import core\ncore.init().close()"
    ).stderr.splitlines()
    assert re.fullmatch(rf"script\.py  {RUN}", begin)
    assert re.fullmatch(r"completed in \d+s", end)
    assert re.fullmatch(RUN, run)
    assert look.startswith("look: ")


@pytest.mark.parametrize("environment", [{"PACELINE_PROGRESS": "0"}, {"CI": "true"}])
def test_a_quiet_script_says_nothing(run_python: Run, environment: dict[str, str]) -> None:
    assert run_python(CORE, **environment).stderr == ""


def test_a_crashed_script_resumes_by_the_line_that_it_leaves(
    run_python: Run, tmp_path: Path
) -> None:
    lines = run_python(CORE, "crash").stderr.splitlines()
    end = lines.index("Traceback (most recent call last):")
    assert "failed (ValueError) after" in lines[end - 5]
    assert lines[-1] == "ValueError: broken"
    resumed = in_shell(hint(lines, "resume"), tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    (
        begin,
        *_,
    ) = resumed.stderr.splitlines()
    assert re.fullmatch(rf"script\.py  {RUN}  resumes at step 10 from {UUID}", begin)
    assert "batch 20 of 20  100%" in resumed.stderr
    assert len([*(tmp_path / "paceline_runs").iterdir()]) == 1


@pytest.mark.parametrize("columns", [60, 100])
def test_ctrl_c_at_a_terminal_leaves_one_block_and_its_command_resumes(
    terminal: Any,
    start_script: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    script = start_script(CORE, "slow", columns=columns)
    script.await_text(r"batch 1\d of 1,000.*\r")
    terminal.type("\x03")
    lines, code = script.finish()
    assert code != 0
    # No colors, and nothing but a line that is replaced.
    assert {*re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]", terminal.raw)} == {"\x1b[K"}
    drawn = re.findall(r"\r([^\r\n]*)\x1b\[K", terminal.raw)
    assert drawn
    assert max(map(len, drawn)) < columns
    assert re.fullmatch(rf"script\.py  {RUN}", lines[0])
    assert re.fullmatch(r"batch 1\d of 1,000  1%.*  interrupted.*loss=0\.\d+.*", lines[1])
    assert re.fullmatch(RUN, lines[2])
    assert lines[-1] == "KeyboardInterrupt"
    # A terminal wraps the long command, and gives it back as one line.
    resumed = in_shell(hint(lines, "resume"), tmp_path)
    assert "resumes at step 10 from" in resumed.stderr
    assert "batch 20 of 20  100%" in resumed.stderr


def test_a_start_after_a_completed_run_says_that_it_begins_anew(run_python: Run) -> None:
    first, second = (run_python(CORE, "auto").stderr.splitlines() for _ in range(2))
    assert not [line for line in first if "starting a new one" in line]
    [line] = [line for line in second if "starting a new one" in line]
    assert re.search(r"'script' \(.*\) is completed", line)


def test_one_of_several_ranks_speaks(run_python: Run) -> None:
    code = """
import subprocess, sys
code = "from paceline import core\\nwith core.init() as context: context.alert('here')"
open("work.py", "w").write(code)
command = [sys.executable, "-m", "paceline.launch.torch_distributed", "--nproc-per-node=2"]
print(subprocess.run([*command, "work.py"], capture_output=True, text=True).stderr)
"""
    told = run_python(code).stdout
    assert told.count("work.py on 2 workers  run paceline_runs/") == 1, told
    assert told.count("completed in ") == 1


@pytest.fixture
def feedback_of(tmp_path: Path) -> Callable[..., RunFeedback]:
    def make(**facts: Any) -> RunFeedback:
        info = RunInfo(run_id="a", created=1.0, checkpoint_storage="", **facts)
        RunDirectory.create(tmp_path / "run", info)
        return RunFeedback(tmp_path / "run", info)

    return make


def test_a_trial_of_a_master_says_nothing(
    feedback_of: Callable[..., RunFeedback], capsys: pytest.CaptureFixture[str]
) -> None:
    feedback = feedback_of(name="x", cluster_id="c")
    feedback.begin()
    feedback.report("training", 1, {"loss": 1.0})
    feedback.end("completed")
    assert capsys.readouterr().err == ""


def test_a_later_run_of_a_process_finds_itself_again(
    feedback_of: Callable[..., RunFeedback], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "a b"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "train.py", "--lr", "a b"])
    # A script that only imports the machinery of notebooks is none.
    with suppress(ImportError):
        import_module("ipykernel.kernelapp")
    *_, resume = feedback_of(name="train-2").details("interrupted", "s3://b", "uuid")
    assert resume == "resume: PACELINE_RESUME=auto python -u train.py --lr 'a b'"


def test_only_an_unfinished_run_is_resumed(feedback_of: Callable[..., RunFeedback]) -> None:
    feedback = feedback_of(name="x")
    assert "resume" not in " ".join(feedback.details("completed (test mode)", "s3://b", "uuid"))
    assert "resume" not in " ".join(feedback.details("stopped", "s3://b", "uuid"))
    *_, last = feedback.details("failed (ValueError)", None, None)
    assert last == "no checkpoint: the next start begins anew"


def test_the_end_is_shown_without_a_working_directory(
    feedback_of: Callable[..., RunFeedback], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedback = feedback_of(name="x")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    look = f"look: paceline runs show {tmp_path / 'run'}"
    assert look in feedback.details("completed", None, None)


def test_the_end_is_shown_once_but_a_failure_after_it_too(
    feedback_of: Callable[..., RunFeedback], capsys: pytest.CaptureFixture[str]
) -> None:
    feedback = feedback_of(name="x")
    feedback.hand_over()
    feedback.details("completed", None, None)
    feedback.end("completed")
    assert capsys.readouterr().err == ""
    feedback.end("failed (ValueError)")
    feedback.end("failed (ValueError)")
    assert capsys.readouterr().err.count("failed (ValueError) after") == 1


SEARCH = """
import sys, time
from paceline import train

def function(config):
    for number in range(3):
        time.sleep(0.1 if number else 0.7)
        train.report(loss=config["x"] / (number + 1), epochs=number + 1)
        if config["x"] == float(sys.argv[1] if sys.argv[1:] else 0):
            raise ValueError("too large")

if __name__ == "__main__":
    space = {"x": {"type": "categorical", "vals": [3.0, 1.0, 2.0]}}
    train.search(
        function, space, {"name": "grid", "metric": "loss", "max_length": {"epochs": 3}},
        max_concurrent_trials=1,
    )
"""


@pytest.mark.long
def test_a_search_shows_its_trials_the_best_and_where_it_is(
    run_python: Run, tmp_path: Path
) -> None:
    lines = run_python(SEARCH).stderr.splitlines()
    assert re.fullmatch(r"search of 3 trial\(s\)  run paceline_runs/\S+-script-search", lines[0])
    *_, end, best, run, look = lines
    assert re.match(r"trial 3 of 3  100%  completed in .*  best_loss=0\.3333$", end)
    assert best == "best trial 2: x=1.0"
    assert run.startswith("run paceline_runs/")
    assert look.startswith("look: paceline runs list ")
    listed = subprocess.run(
        [sys.executable, "-m", "paceline.cli", *look.split()[2:], "--json"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert len(json.loads(listed.stdout)) == 3


@pytest.mark.long
def test_the_start_of_workers_is_no_measure_of_the_time_that_is_left(run_python: Run) -> None:
    method = '{"name": "adaptive_asha", "max_trials": 3'
    lines = run_python(SEARCH.replace('{"name": "grid"', method)).stderr.splitlines()
    assert re.match(r"trial \d of 3  [1-9]\d*%  \d running  best_loss=", lines[1]), f"{lines}"


@pytest.mark.long
def test_a_search_counts_the_trials_that_have_failed(run_python: Run) -> None:
    lines = run_python(SEARCH, "3.0").stderr.splitlines()
    assert any(re.search(r"running, 1 failed  best_loss=", line) for line in lines), f"{lines}"
    *_, best, failed, run, _look = lines
    assert best == "best trial 2: x=1.0"
    assert re.fullmatch(r"failed: 1 of 3 trials \(\d\)", failed)
    assert run.startswith("run paceline_runs/")


FUNCTION = """
import sys
from paceline import train

def function(config):
    for number in range(2):
        train.report(loss=1.0)

if __name__ == "__main__":
    callbacks = {
        "none": None, "print": [train.PrintCallback()], "own": [train.ProgressCallback(2)],
    }[sys.argv[1]]
    with train.Trainer(num_workers=0) as trainer:
        trainer.run(function, {}, callbacks)
"""


@pytest.mark.parametrize(
    ("callbacks", "reports", "printed"),
    [
        ("none", ["report 1", "report 2"], 0),
        ("print", [], 2),
        ("own", ["report 1 of 2", "report 2 of 2"], 0),
    ],
)
def test_a_train_function_has_one_display(
    run_python: Run, callbacks: str, reports: list[str], printed: int
) -> None:
    result = run_python(FUNCTION, callbacks)
    begin, *lines, end, run, look = result.stderr.splitlines()
    assert re.fullmatch(rf"script\.py  {RUN}", begin)
    assert [line.partition("  ")[0] for line in lines] == reports
    assert "completed in" in end
    # A display that has shown no report counts none.
    assert end.startswith("report 2" if reports else "completed")
    assert re.fullmatch(RUN, run)
    assert look.startswith("look: ")
    assert len(result.stdout.splitlines()) == printed


CREATORS = """
import torch
from paceline import creators

def data(config):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*torch.rand(2, 8, 1)))

if __name__ == "__main__":
    trainer = creators.PyTorchTrainer(
        model_creator=lambda config: torch.nn.Linear(1, 1),
        optimizer_creator=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        data_creator=data,
        loss_creator=torch.nn.MSELoss,
    )
    trainer.train()
    raise KeyboardInterrupt
"""


def test_ctrl_c_is_no_failure_of_a_trainer_of_creators(run_python: Run) -> None:
    """The run begins anew whatever the variable says, and tells so."""
    stderr = run_python(CREATORS, PACELINE_RESUME="auto").stderr
    assert re.match(rf"script\.py  {RUN}  begins anew: `load` resumes\n", stderr), stderr
    assert re.search("^batch 8  interrupted after ", stderr, re.MULTILINE), stderr
