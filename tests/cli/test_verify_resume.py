"""`paceline verify-resume` on scripts of the core API: what it prints and how it ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_answers import valid

Paceline = Callable[..., Any]

SCRIPT = """
import json, random, sys
from paceline import core

wrong = sys.argv[1:2] == ["--wrong"]
random.seed(1)
with core.init() as context:
    total, first = [0.0] * 12, 1
    if context.latest_checkpoint:
        with context.checkpoint.restore_path(context.latest_checkpoint) as path:
            first, total, (version, internal, gauss) = json.loads((path / "state").read_text())
        if not wrong:
            random.setstate((version, tuple(internal), gauss))
    for step in range(first, 16):
        total = [value + random.random() for value in total]
        context.train.report_training_metrics(step, {"total": sum(total)})
        should_leave = context.preempt.should_preempt()
        if step % 5 == 0 or should_leave:
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "state").write_text(json.dumps([step + 1, total, random.getstate()]))
                (path / "total.json").write_text(json.dumps(dict(enumerate(total))))
        if should_leave:
            break
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_exact_script_gets_a_table_and_leaves_nothing(paceline: Paceline, script: Path) -> None:
    result = paceline(
        "verify-resume", "train.py", "--preempt-at", 7, "--kill-at", 8, "--no-deterministic",
        cwd=script.parent,
    )  # fmt: skip
    rows = [line.split() for line in result.stdout.splitlines()[2:]]
    assert rows == [
        ["kill", "8", "5", "3", "the", "same", "bits"],
        ["preempt", "7", "7", "0", "the", "same", "bits"],
    ]
    assert "Resuming it at step 5 ..." in result.stderr
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


@pytest.mark.long
def test_script_that_differs_gets_its_differences(
    paceline: Paceline, script: Path, tmp_path: Path
) -> None:
    """Options that the command does not know are the script's."""
    runs = tmp_path / "runs"
    words = ["verify-resume", script, "--wrong", "--no-deterministic", "--directory", runs]
    result = paceline(*words, code=1)
    assert "14 differences" in result.stdout
    assert "\nkill at step 13:\n  state: " in result.stdout
    assert "\n  total.json: 0: " in result.stdout
    assert result.stdout.rstrip().endswith("and 4 more")
    assert f"are in {runs}." in result.stderr
    assert (runs / "straight").is_dir()
    ignored = paceline(*words, "--json", "--ignore", "total.json:*", "--ignore", "state:", code=1)
    answer = valid("verify-resume", ignored.stdout)
    assert answer["is_exact"] is False
    [fault] = answer["faults"]
    assert (fault["hit_step"], fault["resumed_from"]) == (13, 10)
    assert [one["place"] for one in fault["differences"]] == ["metrics.training"]


@pytest.mark.long
def test_script_of_paceline_that_cannot_be_verified(paceline: Paceline, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import paceline\nraise KeyError('wrong by itself')")
    result = paceline("verify-resume", script, "--no-deterministic", code=2)
    assert "without an error, but it ended with exit code 1.\nThe end of " in result.stderr
    assert "\nKeyError: 'wrong by itself'\n" in result.stderr
    script.write_text("import paceline\nwith paceline.core.init():\n    pass")
    result = paceline("verify-resume", script, "--no-deterministic", code=4)
    assert "must store checkpoints" in result.stderr
    assert "Hint: " in result.stderr
    absent = paceline("verify-resume", "absent.py", code=2)
    assert "there is no file 'absent.py'" in absent.stderr


FOREIGN = """
import json, os, sys, time
os.makedirs("out", exist_ok=True)
done = len(os.listdir("out")) if "resumes" in sys.argv else 0
if done:
    json.load(open(f"out/step-{done}.json"))
for step in range(done + 1, 7):
    time.sleep(0.2)
    model = step + (done if "wrong" in sys.argv else 0)
    with open("new", "w") as file:
        json.dump({"model": model}, file)
    os.replace("new", f"out/step-{step}.json")
"""


@pytest.mark.long
def test_script_of_another_library_gets_a_verdict_and_a_report(
    paceline: Paceline, tmp_path: Path
) -> None:
    place = tmp_path / "code"
    place.mkdir()
    (place / "train.py").write_text(FOREIGN)
    report = tmp_path / "report.json"
    words = ["verify-resume", "--checkpoints", "out/*.json", "--report", report, "train.py"]
    result = paceline(*words, "resumes", cwd=place)
    assert result.stdout.startswith("exact: The resumed run is equal to the straight run")
    assert "Levels: strict: equal, standard: equal, relaxed: not judged" in result.stdout
    assert json.loads(report.read_text())["result"] == "exact"
    result = paceline(*words, "resumes", "wrong", cwd=place, code=1)
    assert result.stdout.startswith("different: The first difference is in the weights at step ")
    answer = json.loads(report.read_text())
    assert answer["first_difference"]["step"] == answer["resumed_from"] + 1
    assert answer["ranks"]["0"]["first_difference"]["kind"] == "weights"


@pytest.mark.long
def test_script_of_another_library_that_cannot_be_judged_has_not_failed(
    paceline: Paceline, tmp_path: Path
) -> None:
    place = tmp_path / "code"
    place.mkdir()
    (place / "train.py").write_text(FOREIGN)
    words = ["verify-resume", "--checkpoints", "out/*.json", "train.py"]
    anew = paceline(*words, cwd=place, code=3)
    assert anew.stdout.startswith("not supported: The command began anew")
    assert "failed" not in (anew.stdout + anew.stderr).lower()
    resumes = [*words[:-1], "--level", "relaxed", "train.py", "resumes"]
    no_losses = paceline(*resumes, cwd=place, code=3)
    assert "no losses were found" in no_losses.stdout
    (place / "train.py").write_text("pass")
    nothing = paceline("verify-resume", "--json", "train.py", cwd=place, code=4)
    assert valid("verify-resume", nothing.stdout)["result"] == "nothing resumable"
    absent = paceline("verify-resume", "--", "absent-program", "--lr", "1", cwd=place, code=2)
    assert absent.stdout.startswith("could not run: ")
    wrong = paceline("verify-resume", "--checkpoints", "/tmp/*", "train.py", cwd=place, code=2)
    assert "relative to the working directory" in wrong.stderr
