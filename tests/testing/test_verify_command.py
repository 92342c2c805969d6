"""Commands that do not know Paceline: what the check finds, and what it refuses."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.testing import CommandVerdict, verify_command

SCRIPT = """
import json, os, random, sys, time
WRONG = os.environ.get("WRONG")
random.seed(3)
total, first, path = 0.0, 1, None
os.makedirs("out", exist_ok=True)
saved = sorted(os.listdir("out"), key=lambda name: int(name[5:-5]))
if len(sys.argv) > 2:
    saved = [os.path.basename(sys.argv[2])]
if saved and WRONG != "anew":
    if WRONG == "refuses":
        raise NotImplementedError("streams cannot be resumed")
    if WRONG == "crash":
        raise SystemError("no way back")
    with open("out/" + saved[-1]) as file:
        state = json.load(file)
    total, first = state["model"], state["step"] + 1
    version, internal, gauss = state["rng_state"]
    if WRONG != "random":
        random.setstate((version, tuple(internal), gauss))
if WRONG == "clock":
    total = float(os.getpid())
for step in range(first, 17):
    total += random.random()
    print(f"step {step} loss {total!r}", flush=True)
    time.sleep(0.08)
    if step % 4 == 0 and WRONG != "stateless":
        state = {"model": total, "rng_state": random.getstate(), "step": step}
        with open("new", "w") as file:
            json.dump(state, file)
        os.replace("new", f"out/step-{step}.json")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "train.py").write_text(SCRIPT)
    return path


@pytest.fixture
def verify(source: Path, tmp_path: Path) -> Any:
    return partial(
        verify_command,
        [sys.executable, "train.py"],
        checkpoints="out/*.json",
        directory=tmp_path / "runs",
        source=source,
        timeout_s=200,
    )


@pytest.mark.long
def test_command_that_saves_all_its_state_is_exact(verify: Any, source: Path) -> None:
    verdict: CommandVerdict = verify()
    assert verdict.result == "exact", verdict
    assert verdict.levels == {"strict": True, "standard": True, "relaxed": True}
    assert verdict.resumed_from in (4, 8, 12)
    assert verdict.resumed_checkpoint == f"out/step-{verdict.resumed_from}.json"
    assert (verdict.num_checkpoints, verdict.differences, verdict.diverged_at) == (4, (), None)
    # No run leaves anything where the script lies.
    assert [path.name for path in source.iterdir()] == ["train.py"]


@pytest.mark.long
def test_lost_random_state_is_named_at_the_first_step_after_the_resume(verify: Any) -> None:
    verdict = verify(environment={"WRONG": "random"})
    assert verdict.result == "different"
    assert verdict.diverged_at is None
    first = verdict.first_difference
    assert (first.kind, first.place, first.path) == ("loss", "logs", "output:loss")
    assert first.step == verdict.resumed_from + 1
    shown = {(one.kind, one.step) for one in verdict.differences}
    assert {("random state", 16), ("weights", 16)} <= shown
    report = json.loads(json.dumps(verdict.as_json()))
    assert report["ranks"]["0"]["first_difference"] == report["first_difference"]
    assert verify(environment={"WRONG": "random"}, level="relaxed", tolerance=10.0).is_exact


def test_command_that_begins_anew_is_not_supported_though_its_bits_are_equal(verify: Any) -> None:
    verdict = verify(environment={"WRONG": "anew"})
    assert verdict.result == "not supported"
    assert "began anew: it read none of its checkpoints" in verdict.reason
    assert "Hint: let it load " in verdict.reason
    assert "failed" not in str(verdict)


@pytest.mark.long
def test_script_that_uses_paceline_and_begins_anew_is_told_its_own_way(
    verify: Any, source: Path
) -> None:
    (source / "train.py").write_text(f"# not of paceline's trainers\n{SCRIPT}")
    verdict = verify(environment={"WRONG": "anew"})
    assert verdict.result == "not supported"
    assert "is verified by `paceline.testing.verify_resume`" in verdict.reason


def test_command_that_refuses_to_resume_is_not_supported(verify: Any) -> None:
    verdict = verify(environment={"WRONG": "refuses"})
    assert verdict.result == "not supported"
    assert verdict.reason.endswith("NotImplementedError: streams cannot be resumed")
    assert verdict.adapter == "pattern"


def test_crash_of_the_resumed_start_is_a_difference_at_each_level(verify: Any) -> None:
    verdict = verify(environment={"WRONG": "crash"}, level="relaxed")
    assert verdict.result == "different"
    assert verdict.first_difference.kind == "resume"
    assert "SystemError: no way back" in verdict.reason


def test_command_that_differs_by_itself_is_said_to(verify: Any) -> None:
    verdict = verify(environment={"WRONG": "clock"})
    assert (verdict.result, verdict.diverged_at) == ("different", 1)
    assert "differs from run to run by itself, at step 1" in verdict.reason


def test_nothing_resumable_is_told_apart(verify: Any, source: Path) -> None:
    stateless = verify(environment={"WRONG": "stateless"})
    assert stateless.result == "nothing resumable"
    assert "looked for: out/*.json" in stateless.reason
    # Its only checkpoint is the one at its end.
    script = "import os\nos.makedirs('out')\nopen('out/step-1.json', 'w').write('{}')\n"
    (source / "train.py").write_text(script)
    at_end = verify()
    assert at_end.result == "nothing resumable"
    assert "well before its end" in at_end.reason


def test_kill_after_the_last_checkpoint_shows_nothing(verify: Any, source: Path) -> None:
    """A resume there trains no step, so that its equal bits are no proof."""
    script = """
import os, time
os.makedirs("out", exist_ok=True)
for step in range(len(os.listdir("out")) + 1, 4):
    open(f"out/step-{step}.json", "w").write(str(step))
for name in os.listdir("out"):
    open("out/" + name).read()
time.sleep(1.0)
"""
    (source / "train.py").write_text(script)
    verdict = verify()
    assert verdict.result == "nothing resumable"
    assert "at its end before a kill" in verdict.reason


def test_command_that_cannot_run_is_told_apart(verify: Any, source: Path) -> None:
    absent = verify_command(["./absent"], directory=source.parent / "absent", source=source)
    assert absent.result == "could not run"
    assert "'./absent' cannot: No such file or directory" in absent.reason
    (source / "train.py").write_text("raise KeyError('wrong by itself')")
    failing = verify()
    assert failing.result == "could not run"
    assert failing.reason.endswith("KeyError: 'wrong by itself'")
    (source / "train.py").write_text("while True:\n    pass")
    endless = verify(timeout_s=1.0)
    assert endless.result == "could not run"
    assert "it took more than 1 s" in endless.reason


def test_checkpoints_of_earlier_runs_stay_unseen_and_unchanged(verify: Any, source: Path) -> None:
    (source / "out").mkdir()
    earlier = source / "out" / "step-16.json"
    earlier.write_text('{"model": 0, "step": 16}')
    # Small files are copies: a log that is appended to leaves the original as it was.
    (source / "kept.jsonl").write_text("")
    with (source / "train.py").open("a") as file:
        file.write("open('kept.jsonl', 'a').write('more')\n")
    verdict = verify()
    assert verdict.is_exact, verdict
    assert "do not see the checkpoints of earlier runs: out/step-16.json" in verdict.notes[0]
    assert earlier.read_text() == '{"model": 0, "step": 16}'
    assert (source / "kept.jsonl").read_text() == ""


@pytest.mark.parametrize(("ending", "kind"), [("bytes", "other state"), ("json", "damaged files")])
def test_a_difference_in_files_without_known_content_is_named(
    verify: Any, source: Path, ending: str, kind: str
) -> None:
    script = """
import os, time
os.makedirs("out", exist_ok=True)
for step in range(len(os.listdir("out")) + 1, 7):
    open(f"out/step-{step}.json", "wb").write(os.urandom(9))
    time.sleep(0.2)
for name in os.listdir("out"):
    open("out/" + name, "rb").read()
"""
    (source / "train.py").write_text(script.replace(".json", f".{ending}"))
    verdict = verify(checkpoints=f"out/*.{ending}")
    assert "differs from run to run by itself, at step 1 " in verdict.reason, f"{verdict}"
    assert f"The first difference is in the {kind} at step 1: " in verdict.reason, f"{verdict}"


@pytest.mark.long
def test_resume_command_gets_the_path_of_the_checkpoint(verify: Any) -> None:
    command = [sys.executable, "train.py", "--from", "{checkpoint}"]
    verdict = verify(resume_command=command)
    assert verdict.is_exact, verdict
    absent = [sys.executable, "train.py", "--from", "absent.json"]
    assert verify(resume_command=absent).first_difference.kind == "resume"


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoints": "/tmp/*.pt"},
        {"checkpoints": "../*.pt"},
        {"adapter": "keras"},
        {"level": "exact"},
        {"command": []},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be"):
        verify_command(**{"command": ["true"], "directory": tmp_path, **options})


USER_TEST = """
import sys
import pytest

@pytest.mark.verify_resume(sys.executable, "train.py", checkpoints="out/*.json", timeout_s=200)
def test_resume(resume_verdict):
    assert resume_verdict.is_exact, resume_verdict
"""


@pytest.mark.long
def test_plugin_verifies_with_its_option_only(source: Path) -> None:
    (source / "test_user.py").write_text(USER_TEST)
    plugin = [
        "-p",
        "no:paceline",
        "-p",
        "paceline.testing._pytest_plugin",
        "-p",
        "no:cacheprovider",
    ]

    def run(*options: str, wrong: str = "") -> tuple[int, str]:
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-rs", *plugin, *options, "test_user.py"],
            cwd=source, env={**os.environ, "WRONG": wrong}, capture_output=True, text=True,
        )  # fmt: skip
        return result.returncode, result.stdout

    code, output = run()
    assert code == 0, output
    assert "needs --verify-resume" in output
    code, output = run("--verify-resume")
    assert "1 passed" in output, output
    code, output = run("--verify-resume", wrong="random")
    assert code == 1
    assert "The first difference is in the loss at step" in output
    # What is not supported is skipped, not failed.
    code, output = run("--verify-resume", wrong="anew")
    assert code == 0
    assert "not supported: The command began anew" in output
