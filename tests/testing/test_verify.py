"""The kit on scripts of the core API: what it finds, what it refuses."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.testing import (
    Fault,
    FaultMissedError,
    NotResumableError,
    ScriptFailedError,
    Verdict,
    VerificationError,
    verify_resume,
)


@pytest.fixture
def verify(script: Path, tmp_path: Path) -> Any:
    """Return `verify_resume` of the script; what goes wrong at a resume spares the straight run."""
    return partial(
        verify_resume,
        [str(script)],
        directory=tmp_path,
        straight=script.with_name("straight"),
        deterministic=False,
        timeout_s=200,
    )


@pytest.mark.long
def test_script_that_saves_all_its_state_is_exact_whatever_interrupts_it(verify: Any) -> None:
    faults = [
        Fault("kill"),
        Fault("kill", point="storage.before_manifest", count=3),
        Fault("preempt", step=7),
        Fault("pause", step=9),
    ]
    verdict: Verdict = verify(faults=faults)
    assert verdict.is_exact
    assert verdict.differences == verdict.notes == verdict.operations == ()
    assert (verdict.steps_completed, verdict.checkpoint_steps) == (20, (5, 10, 15, 20))
    # A step of choice is near 60 % and three steps after a checkpoint, and two reports are one
    # step; what is told to leave stores a checkpoint where it is.
    assert [(o.hit_step, o.resumed_from, o.replayed_steps) for o in verdict.outcomes] == [
        (13, 10, 3),
        (15, 10, 5),
        (7, 7, 0),
        (9, 9, 0),
    ]


def test_lost_random_state_is_found_where_it_shows(verify: Any) -> None:
    verdict = verify(environment={"WRONG": "random"})
    assert not verdict.is_exact
    shown = {(one.place, one.path) for one in verdict.differences}
    assert shown == {
        ("metadata", "total"),
        ("metrics.training", "total"),
        ("state.json", "random[1]"),
        ("state.json", "total"),
        ("total.txt", ""),
    }
    [metrics] = [str(one) for one in verdict.differences if one.place == "metrics.training"]
    assert "10 of 20 rows differ, the first at step 11: " in metrics


def test_differences_can_be_left_out(verify: Any) -> None:
    ignore = ["metadata:total", "metrics.*", "state.json:*", "total.txt:"]
    assert verify(environment={"WRONG": "random"}, ignore=ignore).is_exact


def test_script_that_differs_by_itself_is_told_apart_from_a_wrong_resume(verify: Any) -> None:
    verdict = verify(environment={"WRONG": "seed"})
    assert not verdict.is_exact
    [outcome] = verdict.outcomes
    assert outcome.diverged_at == 1
    assert "differed at step 1, before the fault came" in verdict.notes[0]


def test_resume_that_fails_is_a_difference_with_the_scripts_own_words(verify: Any) -> None:
    [difference] = verify(environment={"WRONG": "resume"}).differences
    assert difference.place == "run"
    assert "ended with exit code 1" in difference.detail
    assert "SystemError: no way back" in difference.detail


@pytest.mark.parametrize(("every", "fault"), [("5", Fault("kill", step=11)), ("1", Fault("kill"))])
def test_kill_right_after_a_checkpoint_is_told(
    verify: Any, tmp_path: Path, every: str, fault: Fault
) -> None:
    straight = tmp_path / "straight"
    verdict = verify(faults=[fault], environment={"EVERY": every}, straight=straight)
    assert verdict.is_exact
    assert "The kill came 1 step after a checkpoint" in verdict.notes[0]


def test_straight_run_serves_several_checks(verify: Any, script: Path, tmp_path: Path) -> None:
    straight = script.with_name("straight")
    first, second = (verify(faults=[Fault("kill", step=8)]) for _ in range(2))
    assert first.directory == second.directory == straight
    assert len(list(straight.glob("paceline_runs/*"))) == 1
    assert [o.directory.name for v in (first, second) for o in v.outcomes] == [
        "kill-at-step-8",
        "kill-at-step-8-2",
    ]
    with pytest.raises(ValueError, match=r"must be a run of .* with 2 workers, but is one of"):
        verify(straight=first.directory, num_workers=2)
    with pytest.raises(ValueError, match="must be the directory of a straight run"):
        verify(straight=tmp_path)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("kill", step=20), "step 20 is not below its 20 steps"),
        (Fault("kill", point="engine.batch"), r"\(kill at engine.batch\), but it never came"),
        (Fault("kill", point="core.report", count=99), "it ended with exit code 0"),
        (Fault("preempt", step=19, rank=1), "never came"),
    ],
)
def test_fault_that_never_comes_is_an_error(verify: Any, fault: Fault, message: str) -> None:
    with pytest.raises(FaultMissedError, match=message):
        verify(faults=[fault])


def test_script_that_does_not_leave_when_told_to_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(
        """
import signal
from paceline import core
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with core.init() as context:
    for step in range(1, 6):
        context.train.report_training_metrics(step, {"x": step})
        with context.checkpoint.store_path({"steps_completed": step}):
            pass
"""
    )
    with pytest.raises(FaultMissedError, match=r"ended as completed.*should_preempt"):
        verify_resume(
            [str(script)],
            faults=[Fault("preempt", step=2)],
            directory=tmp_path,
            deterministic=False,
        )


def test_kill_before_the_first_checkpoint_is_an_error(verify: Any) -> None:
    with pytest.raises(NotResumableError, match="must be stored before the fault.* at step 4"):
        verify(faults=[Fault("kill", step=4)])


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("print('no Paceline')", NotResumableError, "must use Paceline"),
        ("raise ValueError('by itself')", ScriptFailedError, r"(?s)exit code 1.*by itself"),
        (
            "from paceline import core\nwith core.init(): pass",
            NotResumableError,
            "must store checkpoints",
        ),
        ("from paceline import core\ncore.init()", ScriptFailedError, "ended as if it were killed"),
        (
            "from paceline import core\nfor _ in 'ab':\n  with core.init(): pass",
            NotResumableError,
            "must make one run, but made 2",
        ),
    ],
)
def test_script_that_cannot_be_verified_is_refused(
    tmp_path: Path, code: str, error: type[VerificationError], message: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(code)
    with pytest.raises(error, match=message):
        verify_resume([str(script)], directory=tmp_path, deterministic=False)


def test_script_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(600)")
    with pytest.raises(ScriptFailedError, match="took more than 0.5 s"):
        verify_resume([str(script)], directory=tmp_path, deterministic=False, timeout_s=0.5)
    running = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert [words for words in running if words and str(script) in words] == []


def test_operation_without_a_deterministic_implementation_is_named(
    script: Path, tmp_path: Path
) -> None:
    """What torch says in fact is tested with the switches themselves."""
    said = "UserWarning: put_ does not have a deterministic implementation, but you set"
    warning = tmp_path / "warning.py"
    warning.write_text(f"print({said!r})\n{script.read_text()}")
    verdict = verify_resume(
        [str(warning)], faults=[Fault("kill", step=8)], directory=tmp_path, deterministic=False
    )
    assert verdict.operations == ("put_",)
    assert "No deterministic implementation: put_." in verdict.notes[-1]


@pytest.mark.long
def test_every_run_has_a_directory_and_the_same_environment(tmp_path: Path) -> None:
    """The script writes what it sees; relative paths lead to the linked directory."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "input.txt").write_text("1.5")
    script = source / "script.py"
    script.write_text(
        """
import os
from pathlib import Path
from paceline import core
names = ("OMP_NUM_THREADS", "MINE", "RANK", "PACELINE_RUN_DIR")
with core.init() as context:
    for step in range(1, 6):
        context.train.report_training_metrics(step, {"x": float(Path("input.txt").read_text())})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "seen.txt").write_text(str([os.environ.get(name) for name in names]))
"""
    )
    verdict = verify_resume(
        [str(script)],
        faults=[Fault("kill", step=4)],
        environment={"MINE": "a", "OMP_NUM_THREADS": "3"},
        directory=tmp_path / "runs",
        links=source,
        deterministic=False,
    )
    assert verdict.is_exact
    assert verdict.threads == verdict.outcomes[0].threads == {0: 3}
    [seen] = {path.read_text() for path in (tmp_path / "runs").glob("**/seen.txt")}
    assert seen == "['3', 'a', None, None]"
    assert not (source / "paceline_runs").exists()
    assert "PACELINE_FAULT" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stop",), "`kind` must be one of kill, preempt, pause, but got 'stop'"),
        (("kill", 3, "engine.batch"), "at a step or at a point"),
        (("kill", -1), "`step` must be at least 0"),
        (("kill", None, "engine.batch", 0), "`count` must be at least 1"),
        (("pause", 3, None, 1, 2), "must be the chief's"),
    ],
)
def test_impossible_faults_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fault(*arguments)


def test_command_and_workers_are_checked() -> None:
    with pytest.raises(ValueError, match="`command` must be a script"):
        verify_resume([])
    with pytest.raises(ValueError, match="`num_workers` at least 1, but got .* and 0"):
        verify_resume(["train.py"], num_workers=0)
