import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import core
from paceline._base.run_directory import Control, JournalKey, RunInfo
from paceline.core import _run_opening
from paceline.core._read_runs import newest_run_named
from paceline.journal import (
    AttemptFinished,
    AttemptStarted,
    EarlyExitReported,
    NotARunDirectoryError,
    RunDirectory,
    RunVersionError,
)
from paceline.storage import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    DirectoryStorage,
    storage_from,
)


def store(context: core.Context, steps: int) -> str:
    with context.checkpoint.store_path({"steps_completed": steps}) as (path, uuid):
        (path / "model").write_text(str(steps))
    return uuid


def crash(name: str, steps: int, *, last_report: int | None = None, **options: Any) -> core.Context:
    """Run an attempt that stores a checkpoint at `steps` and ends by an error."""

    def train() -> None:
        with core.init(name=name, **options) as context:
            contexts.append(context)
            for step in range(1, (last_report or steps) + 1):
                context.train.report_training_metrics(step, {"attempt": len(name), "step": step})
            store(context, steps)
            raise ValueError("boom")

    contexts: list[core.Context] = []
    with pytest.raises(ValueError, match="boom"):
        train()
    return contexts[0]


def test_run_directory_is_private_and_named_by_time_and_script(work_directory: Path) -> None:
    with core.init() as context:
        assert context.run_dir.parent == work_directory / "paceline_runs"
        assert re.fullmatch(r"\d{8}-\d{6}-train", context.run_dir.name)
        assert context.run_dir.stat().st_mode & 0o777 == 0o700
        assert context.info is None
        assert context.latest_checkpoint is None
        assert RunDirectory(context.run_dir).is_alive()
    assert not RunDirectory(context.run_dir).is_alive()


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("/a/b/train.py", "train"),
        ("my script!.py", "my-script"),
        ("/a/package/__main__.py", "package"),
        ("-c", "python"),
        ("", "python"),
        ("/x/ünder.py", "nder"),
    ],
)
def test_name_is_the_stem_of_the_script(
    monkeypatch: pytest.MonkeyPatch, script: str, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    with core.init() as context:
        assert RunDirectory(context.run_dir).read_info().name == name


@pytest.mark.parametrize("name", ["", "a/b", "..", "-a", "a b", 3])
def test_unusable_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="`name` must consist of"):
        core.init(name=name)


def test_runs_that_start_in_the_same_second_get_directories_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_run_opening.time, "strftime", lambda form: "20260102-030405")
    with core.init() as first, core.init() as second, core.init() as third:
        names = [context.run_dir.name for context in (first, second, third)]
    assert names == [f"20260102-030405-train{suffix}" for suffix in ("", "-2", "-3")]
    with core.init(resume="auto") as context:
        assert context.run_dir.name == "20260102-030405-train-4"


def test_a_name_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"`name` must have 230 characters .*'aaa.* has 231. Hint"):
        core.init(name="a" * 231)
    monkeypatch.setattr(sys, "argv", ["a" * 250 + ".py"])
    for name in ("a" * 230, None):
        for _ in range(2):
            with core.init(name=name) as context:
                assert context.run_dir.name[16:246] == "a" * 230


def test_attempt_is_recorded_from_start_to_end(records_of: Callable[..., Any]) -> None:
    with core.init() as context:
        pass
    started, finished = records_of(context.run_dir)
    assert isinstance(started, AttemptStarted)
    assert (started.attempt, started.generation, started.rank, started.world_size) == (0, 0, 0, 1)
    assert (started.resumed_from, started.steps_completed) == (None, 0)
    assert finished == AttemptFinished(time=finished.time, outcome="completed")


@pytest.mark.parametrize(
    ("error", "outcome", "text"),
    [
        (ValueError("bad"), "error", "ValueError: bad"),
        (SystemExit(3), "error", "SystemExit: 3"),
        (SystemExit(0), "completed", None),
        (SystemExit(), "completed", None),
        (KeyboardInterrupt(), "preempted", None),
        (ValueError("x" * 9000), "error", "ValueError: " + "x" * 1988),
    ],
)
def test_outcome_tells_how_the_context_was_left(
    records_of: Callable[..., Any], error: BaseException, outcome: str, text: str | None
) -> None:
    with pytest.raises(type(error)), core.init() as context:
        raise error
    (finished,) = records_of(context.run_dir, AttemptFinished)
    assert (finished.outcome, finished.error) == (outcome, text)


def test_invalid_hyperparameters_end_the_process_with_code_zero(
    records_of: Callable[..., Any],
) -> None:
    with pytest.raises(SystemExit) as caught, core.init() as context:
        raise paceline.InvalidHP("too small")
    assert caught.value.code == 0
    (reported,) = records_of(context.run_dir, EarlyExitReported)
    (finished,) = records_of(context.run_dir, AttemptFinished)
    assert reported.reason == "invalid_hp"
    assert (finished.outcome, finished.error) == ("invalid_hp", "InvalidHP: too small")


def test_close_is_enough_and_may_be_repeated(records_of: Callable[..., Any]) -> None:
    context = core.init()
    context.close()
    context.close()
    assert len(records_of(context.run_dir, AttemptFinished)) == 1


@pytest.mark.parametrize("resume", ["auto", "path", "variable auto", "variable path"])
def test_resumed_run_goes_on_in_its_directory(
    monkeypatch: pytest.MonkeyPatch, records_of: Callable[..., Any], resume: str
) -> None:
    crashed = crash("demo", 4)
    value = "auto" if "auto" in resume else str(crashed.run_dir)
    if "variable" in resume:
        monkeypatch.setenv("PACELINE_RESUME", value)
    with core.init(name="demo", resume=None if "variable" in resume else value) as context:
        assert context.run_dir == crashed.run_dir
        assert context.latest_checkpoint == crashed.latest_checkpoint
        assert context.latest_checkpoint is not None
        with context.checkpoint.restore_path(context.latest_checkpoint) as path:
            assert (path / "model").read_text() == "4"
    started = records_of(context.run_dir, AttemptStarted)
    assert [(r.attempt, r.resumed_from, r.steps_completed) for r in started] == [
        (0, None, 0),
        (1, crashed.latest_checkpoint, 4),
    ]


def test_seed_and_hyperparameters_of_a_run_are_recorded_and_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hparams = {"lr": np.float32(0.5), "sizes": (1, 2), "dtype": float, "nan": float("nan")}
    with core.init(hparams=hparams) as first:
        assert 0 <= first.seed < 2**31
    info = RunDirectory(first.run_dir).read_info()
    assert info.seed == first.seed
    recorded = {"lr": 0.5, "sizes": [1, 2], "dtype": "<class 'float'>", "nan": "nan"}
    assert info.hparams == recorded
    # There is no checkpoint that could tell the seed.
    with core.init(resume=first.run_dir, hparams=hparams) as second:
        assert second.seed == first.seed
    assert "other hyperparameters" not in caplog.text
    with core.init(resume=first.run_dir, seed=4, hparams={**hparams, "lr": 1}) as third:
        assert third.seed == 4
    assert "lr was 0.5 and is 1" in caplog.text
    assert RunDirectory(first.run_dir).read_info() == info


def test_seeds_are_drawn_or_given() -> None:
    with core.init(name="a") as first, core.init(name="b") as second, core.init(seed=9) as third:
        assert first.seed != second.seed
        assert third.seed == 9


def test_automatic_resume_looks_at_the_newest_run_of_the_name_only() -> None:
    crash("demo", 1)
    with core.init(name="demo") as completed:
        pass
    with core.init(name="demo", resume="auto") as context:
        assert context.run_dir not in (completed.run_dir,)
        assert context.latest_checkpoint is None
    with core.init(name="other", resume="auto") as context:
        assert context.latest_checkpoint is None


def test_automatic_resume_finds_the_newest_run_though_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # By an hour, as on computers with a wrong clock, or that of the wall at the end of summer time.
    crash("demo", 1)
    now, text = time.time, time.strftime
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    monkeypatch.setattr(time, "strftime", lambda form: text(form, time.localtime(time.time())))
    newer = crash("demo", 2)
    with core.init(name="demo", resume="auto") as context:
        assert context.run_dir == newer.run_dir


@pytest.mark.parametrize(
    ("runs", "newest"),
    [
        ([("a", 1, None), ("b", 2, "a")], "b"),
        # Set back between the first two.
        ([("a", 5, None), ("b", 3, "a"), ("c", 4, "b")], "c"),
        # Of runs with other directories.
        ([("a", 6, None), ("b", 5, None)], "a"),
        # Copied from another machine, and a copy of one.
        ([("a", 1, None), ("b", 3, "a"), ("x", 2, "w")], "b"),
        ([("a", 1, None), ("a", 1, None)], "a"),
        # Begun at once.
        ([("a", 1, None), ("b", 2, "a"), ("c", 2.5, "a")], "c"),
    ],
)
def test_the_newest_run_is_known_by_times_and_by_what_came_before(
    tmp_path: Path, runs: list[tuple[str, float, str | None]], newest: str
) -> None:
    for number, (run_id, created, previous) in enumerate(runs):
        info = RunInfo(
            run_id=run_id, name="demo", created=created, previous=previous, checkpoint_storage=""
        )
        RunDirectory.create(tmp_path / f"20261025-02000{number}-demo", info)
    found = newest_run_named(tmp_path, "demo")
    assert found is not None
    assert found.read_info().run_id == newest


def test_name_that_begins_like_another_is_another_run() -> None:
    crashed = crash("demo-2", 1)
    with core.init(name="demo", resume="auto") as context:
        assert context.run_dir != crashed.run_dir


def test_crashed_run_of_the_same_name_is_told(caplog: pytest.LogCaptureFixture) -> None:
    crashed = crash("demo", 3, last_report=5)
    with core.init(name="demo") as context:
        assert context.run_dir != crashed.run_dir
    (message,) = caplog.messages
    for part in ("crashed at step 5", f"{crashed.latest_checkpoint} at step 3", 'resume="auto"'):
        assert part in message
    assert f"PACELINE_RESUME={crashed.run_dir}" in message


def test_crash_is_told_on_standard_error_without_any_set_up(
    run_python: Callable[..., Any],
) -> None:
    code = "import os, paceline\npaceline.core.init()\nos._exit(1)"
    assert "new run" not in run_python(code).stderr
    assert "it has no checkpoint. This start begins a new run" in run_python(code).stderr


CRASHES = """
import os
from paceline import train
with train.Trainer(0) as trainer:
    trainer.run(lambda config: os._exit(1) if config["crashes"] else None, {"crashes": CRASHES})
"""


@pytest.mark.long
def test_a_trainer_tells_of_a_crashed_run_what_can_be_written_there(
    run_python: Callable[..., Any],
) -> None:
    run_python(f"CRASHES = True{CRASHES}")
    told = run_python(f"CRASHES = False{CRASHES}").stderr
    assert "crashed at step 0" in told
    assert ", or pass its directory as run_dir= of the trainer." in told
    assert "init()" not in told


def test_completed_run_of_the_same_name_is_not_worth_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        with core.init():
            pass
    assert caplog.messages == []


def test_running_run_is_not_resumed() -> None:
    with (
        core.init() as context,
        pytest.raises(RuntimeError, match="must not be resumed while it is running"),
    ):
        core.init(resume=context.run_dir)


def test_resume_of_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotARunDirectoryError, match="must be a Paceline run directory"):
        core.init(resume=tmp_path)


def test_resume_of_another_version_is_refused() -> None:
    with core.init() as context:
        pass
    run_file = context.run_dir / "run.json"
    run_file.write_text(run_file.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(RunVersionError, match="version 1, but has 9"):
        core.init(resume=context.run_dir)


def test_resumed_run_forgets_what_the_runner_said_before() -> None:
    crashed = crash("demo", 1)
    RunDirectory(crashed.run_dir).write_control(Control(should_preempt=True))
    with core.init(resume=crashed.run_dir) as context:
        assert not context.preempt.should_preempt()


def test_checkpoint_that_was_removed_is_not_the_latest() -> None:
    crashed = crash("demo", 1)
    assert crashed.latest_checkpoint is not None
    with core.init(resume=crashed.run_dir) as context:
        newer = store(context, 2)
    DirectoryStorage(crashed.run_dir / "checkpoints").delete(newer)
    with core.init(resume=crashed.run_dir) as context:
        assert context.latest_checkpoint == crashed.latest_checkpoint


def test_damaged_checkpoint_is_passed_over_for_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = crash("damaged", 3)
    with core.init(name="damaged", resume="auto") as context:
        newest = store(context, 7)
    damaged = first.run_dir / "checkpoints" / newest / "model"
    damaged.write_text("cut")
    with core.init(resume=first.run_dir) as context:
        latest = context.latest_checkpoint
        assert latest is not None
        assert context.checkpoint.get_metadata(latest)["steps_completed"] == 3
    assert f"Checkpoint {newest} must be whole to be used, but 'model' was altered" in caplog.text


def test_run_whose_checkpoints_are_all_damaged_is_not_begun_anew() -> None:
    run_dir = crash("ruined", 3).run_dir
    [path] = (run_dir / "checkpoints").glob("*/model")
    path.unlink()
    with pytest.raises(CheckpointCorruptError, match="'model' is missing"):
        core.init(resume=run_dir)


def test_run_directory_may_be_moved_before_it_is_resumed(tmp_path: Path) -> None:
    crashed = crash("demo", 1)
    moved = crashed.run_dir.rename(tmp_path / "moved")
    with core.init(resume=moved) as context:
        assert context.latest_checkpoint == crashed.latest_checkpoint
        store(context, 2)
    assert len(DirectoryStorage(moved / "checkpoints").list()) == 2


def test_rows_beyond_the_checkpoint_are_superseded_and_earlier_ones_count() -> None:
    crash("demo", 3, last_report=5)
    with core.init(name="demo", resume="auto") as context:
        report = context.train.report_training_metrics
        report(4, {"attempt": 4, "step": -1})
        report(3, {"attempt": 4, "step": 3})
        with pytest.raises(ValueError, match="`steps_completed`=3 was 3 and is now 7"):
            report(3, {"step": 7})
        with pytest.raises(ValueError, match="`steps_completed`=4 was -1 and is now 4"):
            report(4, {"step": 4})
    rows = list(core.read_metrics(RunDirectory(context.run_dir), "training"))
    assert [(row.attempt, row.steps_completed, row.is_superseded) for row in rows] == [
        (0, 1, False),
        (0, 2, False),
        (0, 3, False),
        (0, 4, True),
        (0, 5, True),
        (1, 4, False),
    ]
    (summary,) = core.list_runs(Path("paceline_runs"))
    assert (summary.num_attempts, summary.last_step) == (2, 4)


def test_attempt_without_checkpoint_supersedes_everything() -> None:
    for number in range(3):
        with core.init(name="demo", resume="auto") as context:
            context.train.report_training_metrics(1, {"loss": number})
            context.train.report_training_metrics(2, {"loss": number})
            os_kill_like_end(context)
    rows = list(core.read_metrics(RunDirectory(context.run_dir), "training"))
    assert [(row.metrics["loss"], row.is_superseded) for row in rows] == [
        (0, True),
        (0, True),
        (1, True),
        (1, True),
        (2, False),
        (2, False),
    ]


def os_kill_like_end(context: core.Context) -> None:
    """End the attempt as unfinished for the next one."""
    context.preempt._is_preempted = True
    context.preempt.acknowledge_preemption_signal()


def test_killed_process_leaves_a_crashed_run_that_can_be_resumed(
    run_python: Callable[..., Any],
) -> None:
    code = """
import os, signal, paceline
with paceline.core.init() as context:
    start = 0
    if context.latest_checkpoint:
        with context.checkpoint.restore_path(context.latest_checkpoint) as path:
            start = int((path / "step").read_text())
    for step in range(start + 1, 11):
        context.train.report_training_metrics(step, {"loss": 1 / step})
        if step % 4 == 0:
            with context.checkpoint.store_path({"steps_completed": step}) as (path, uuid):
                (path / "step").write_text(str(step))
        if start == 0 and step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code).returncode == -signal.SIGKILL
    (summary,) = core.list_runs(Path("paceline_runs"))
    assert (summary.state, summary.last_step) == (core.RunState.CRASHED, 6)
    assert run_python(code, PACELINE_RESUME="auto").returncode == 0
    (summary,) = core.list_runs(Path("paceline_runs"))
    assert (summary.state, summary.num_attempts) == (core.RunState.COMPLETED, 2)
    standing = [
        row.steps_completed
        for row in core.read_metrics(RunDirectory(summary.path), "training")
        if not row.is_superseded
    ]
    assert standing == list(range(1, 11))


def test_several_ranks_whose_place_is_half_told_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"RANK must be a number when WORLD_SIZE is above 1"):
        core.init()
    assert not Path("paceline_runs").exists()


def test_mode_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="`preempt_mode` must be a PreemptMode, but got 'x'"):
        core.init(preempt_mode="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='`resume` must be "auto" or a run directory, but got True'):
        core.init(resume=True)  # type: ignore[arg-type]


def test_shard_must_be_a_truth_value(tmp_path: Path) -> None:
    with core.init() as context:
        checkpoint = context.checkpoint
        with pytest.raises(TypeError, match="`shard` must be True or False, but got 'yes'"):
            checkpoint.upload(tmp_path, {}, shard="yes")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="`shard` must be True or False, but got 1"):
            checkpoint.store_path({}, shard=1).__enter__()  # type: ignore[arg-type]


def test_failed_init_leaves_no_lock_behind(tmp_path: Path) -> None:
    crashed = crash("demo", 1)
    with pytest.raises(ValueError, match="nope://"):
        core.init(resume=crashed.run_dir, checkpoint_storage="nope://bucket")
    assert not RunDirectory(crashed.run_dir).is_alive()


def test_on_a_cluster_the_runners_facts_count(
    cluster_run: Callable[..., RunDirectory], records_of: Callable[..., Any], tmp_path: Path
) -> None:
    run = cluster_run(latest_checkpoint="u1", steps_completed=9)
    with core.init(name="ignored", resume="auto") as context:
        assert context.run_dir == run.path
        assert context.latest_checkpoint == "u1"
        uuid = store(context, 12)
        assert run.is_alive()
    assert run.journal_keys() == [JournalKey(2, 0, 0)]
    (started,) = records_of(run.path, AttemptStarted)
    assert (started.attempt, started.resumed_from, started.steps_completed) == (2, "u1", 9)
    assert DirectoryStorage(tmp_path / "storage").list() == [uuid]
    assert not Path("paceline_runs").exists()


def test_seed_on_a_cluster_is_the_trials(cluster_run: Callable[..., RunDirectory]) -> None:
    cluster_run()
    with core.init(seed=5) as context:
        assert context.seed == 11


def test_generation_may_come_from_the_environment(
    cluster_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster_run(generation=1)
    monkeypatch.setenv("PACELINE_GENERATION", "4")
    with core.init():
        pass
    assert run.journal_keys() == [JournalKey(2, 4, 0)]
    monkeypatch.setenv("PACELINE_GENERATION", "x")
    with pytest.raises(ValueError, match="PACELINE_GENERATION must be a number"):
        core.init()


def test_second_start_within_an_attempt_is_the_next_generation(
    cluster_run: Callable[..., RunDirectory], records_of: Callable[..., Any]
) -> None:
    run = cluster_run(latest_checkpoint="u1", steps_completed=9)
    with core.init() as context:
        uuid = store(context, 12)
    with core.init() as context:
        assert context.latest_checkpoint == uuid
    assert run.journal_keys() == [JournalKey(2, 0, 0), JournalKey(2, 1, 0)]
    assert [r.steps_completed for r in records_of(run.path, AttemptStarted)] == [9, 12]


def test_cluster_info_has_the_trials_facts(cluster_run: Callable[..., RunDirectory]) -> None:
    assert paceline.get_cluster_info() is None
    cluster_run(latest_checkpoint="u1")
    info = paceline.get_cluster_info()
    assert info is not None
    assert (info.trial.trial_id, info.trial.experiment_id, info.trial.trial_seed) == (7, 3, 11)
    assert info.trial.hparams == {"lr": 0.1}
    assert info.trial.config["data"] == info.user_data == {"path": "/d"}
    assert (info.cluster_id, info.agent_id, info.slot_ids) == ("c1", "node1", [0, 1])
    assert (info.task_id, info.allocation_id, info.task_type) == ("run7", "run7.2", "TRIAL")
    assert (info.container_addrs, info.container_slot_counts) == (["10.0.0.1"], [2])
    assert (info.container_rank, info.latest_checkpoint) == (0, "u1")
    with core.init() as context:
        assert context.info == info
    with pytest.raises(AttributeError):
        info.session_token  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"Hint: `get_cluster_info\(\).trial.hparams`"):
        info.hparams  # type: ignore[attr-defined]  # noqa: B018


def test_gpu_uuids_are_those_of_the_attempts_slots(
    cluster_run: Callable[..., RunDirectory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_run(slot_ids=[1])
    info = paceline.get_cluster_info()
    assert info is not None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert info.gpu_uuids == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-a'\necho '1, GPU-b'\n")
    program.chmod(0o755)
    assert info.gpu_uuids == ["GPU-b"]
    # A master that was given the second GPU alone calls it slot 0, and a trial holds what it sees.
    program.write_text("#!/bin/sh\necho '0, GPU-a1'\necho '1, GPU-b2'\necho '2, GPU-c3'\n")
    for visible, expected in (
        ("2", ["GPU-c3"]),
        ("2, 0", ["GPU-c3", "GPU-a1"]),
        ("GPU-b", ["GPU-b2"]),
        ("", []),
        ("-1", []),
        ("MIG-7, GPU-c", ["MIG-7", "GPU-c3"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert info.gpu_uuids == expected


@pytest.mark.root
def test_full_disk_does_not_stop_training(
    small_disk: Path, fill_disk: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small_disk)
    with core.init() as context:
        fill_disk(small_disk)
        for step in range(200):
            context.train.report_training_metrics(step, {"text": "x" * 100})
        (small_disk / "filler").unlink()
    rows = list(core.read_metrics(RunDirectory(context.run_dir), "training"))
    assert [row.steps_completed for row in rows] == list(range(200))


def test_lists_and_summaries_tell_how_runs_stand(tmp_path: Path) -> None:
    assert core.list_runs(tmp_path / "none") == []
    crashed = crash("one", 2)
    with pytest.raises(SystemExit), core.init(name="two"):
        raise core.InvalidHP
    time.sleep(0.001)
    with core.init(name="three") as running:
        (Path("paceline_runs") / "notes").mkdir()
        summaries = core.list_runs(Path("paceline_runs"))
        assert [(s.name, s.state.value, s.last_step) for s in summaries] == [
            ("one", "crashed", 2),
            ("two", "invalid_hp", None),
            ("three", "running", None),
        ]
    assert summaries[0].error == "ValueError: boom"
    assert summaries[0].latest_checkpoint == crashed.latest_checkpoint
    assert core.summarize_run(running.run_dir).state is core.RunState.COMPLETED
    with pytest.raises(NotARunDirectoryError):
        core.summarize_run(tmp_path)


@pytest.mark.parametrize(
    "storage",
    [
        "ckpts",
        "./ckpts",
        Path("ckpts"),
        {"type": "directory", "container_path": "ckpts"},
        {"type": "shared_fs", "host_path": "ckpts", "storage_path": "x"},
    ],
)
def test_a_relative_storage_is_refused_under_a_master_alone(
    cluster_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch, storage: Any
) -> None:
    cluster_run()
    with pytest.raises(ValueError, match=r"`checkpoint_storage` must be an absolute path.*ckpts"):
        core.init(checkpoint_storage=storage)
    monkeypatch.delenv("PACELINE_RUN_DIR")
    with core.init(checkpoint_storage=storage) as context:
        assert context.checkpoint.storage.url.startswith(str(Path.cwd() / "ckpts"))


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("file", r"/file' is a file. Hint: remove it, or name another path\."),
        ("file/below", r"/file' is a file\."),
        ("link", r"/link' is a link to 'nowhere', where no directory is. Hint: make the dir"),
        ("link/below", r"/link' is a link to 'nowhere'"),
    ],
)
def test_a_storage_where_no_directory_can_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("link").symlink_to("nowhere")
    for spec in (storage, DirectoryStorage(tmp_path / storage)):
        with pytest.raises(ValueError, match=message):
            core.init(checkpoint_storage=spec)
    assert not Path("paceline_runs").exists()
    Path("nowhere").mkdir()
    with core.init(checkpoint_storage="link/below") as context:
        context.checkpoint.upload(Path("nowhere"), {"steps_completed": 1})


def test_an_absolute_storage_is_used_under_a_master(
    cluster_run: Callable[..., RunDirectory], tmp_path: Path
) -> None:
    cluster_run()
    for storage in (tmp_path / "a", str(tmp_path / "a"), (tmp_path / "a").as_uri()):
        with core.init(checkpoint_storage=storage) as context:
            assert context.checkpoint.storage.url == str(tmp_path / "a")


def test_run_keeps_checkpoints_in_the_bucket_that_the_environment_names(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_RUNS", f"{s3}/")
    context = crash("demo", 3)
    first = context.latest_checkpoint
    url = f"{s3}/{context.run_dir.name}"
    assert context.checkpoint.storage.url == url
    assert context.run_dir.parent == tmp_path / "paceline_runs"
    assert not (context.run_dir / "checkpoints").exists()
    # The same run goes on there on this machine, whatever the variable says by then.
    monkeypatch.setenv("PACELINE_RESUME", "auto")
    monkeypatch.setenv("PACELINE_RUNS", "s3://other")
    with core.init(name="demo") as again:
        assert again.run_dir == context.run_dir
        assert again.latest_checkpoint == first
        last = store(again, 4)
    assert storage_from(url).list() == sorted([first, last])
    # An argument of the script goes before the variable.
    monkeypatch.delenv("PACELINE_RESUME")
    with core.init(name="demo", checkpoint_storage=tmp_path / "here") as other:
        assert other.checkpoint.storage.local_root == tmp_path / "here"


def test_run_of_another_machine_goes_on_by_the_url_of_its_checkpoint(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PACELINE_RUNS", s3)
    with core.init(name="demo") as context:
        uuid = store(context, 3)
    url = f"{context.checkpoint.storage.url}/{uuid}"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with caplog.at_level("INFO"), core.init(name="demo", resume="auto") as new:
        assert new.latest_checkpoint is None
    assert "set PACELINE_RESUME to the URL of its checkpoint" in caplog.text
    monkeypatch.setenv("PACELINE_RESUME", url)
    with core.init(name="demo") as resumed:
        assert resumed.latest_checkpoint == uuid
        with resumed.checkpoint.restore_path(uuid) as path:
            assert (path / "model").read_text() == "3"
        store(resumed, 4)
    assert resumed.run_dir.parent == tmp_path / "elsewhere" / "paceline_runs"
    assert len(storage_from(context.checkpoint.storage.url).list()) == 2
    with pytest.raises(ValueError, match="must be in the `checkpoint_storage`"):
        core.init(name="demo", checkpoint_storage=tmp_path)
    monkeypatch.setenv("PACELINE_RESUME", f"{url[:-1]}_")
    with pytest.raises(CheckpointNotFoundError, match="must be committed in 's3://"):
        core.init(name="demo")


def test_bucket_that_is_not_there_is_told_at_the_beginning(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_RUNS", "s3://nothere/runs")
    for storage in (None, "s3://nothere"):
        with pytest.raises(CheckpointError, match="no such bucket .* Hint: make the bucket"):
            core.init(name="demo", checkpoint_storage=storage)
    assert not (tmp_path / "paceline_runs").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("runs", "`PACELINE_RUNS` must be the URL of an object store"),
        ("nope://bucket", "^`PACELINE_RUNS` must be a path, a URL .*offers nope://"),
        ("s3://", r"^`PACELINE_RUNS` must be like s3://bucket/prefix, but got 's3://'"),
        ("s3:///", r"^`PACELINE_RUNS` must be like s3://bucket/prefix, but got 's3:"),
    ],
)
def test_runs_that_are_no_object_store_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, message: str
) -> None:
    monkeypatch.setenv("PACELINE_RUNS", value)
    with pytest.raises(ValueError, match=message):
        core.init(name="demo")
    assert not (tmp_path / "paceline_runs").exists()


def test_ctrl_c_is_no_crash(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), core.init(name="demo") as context:
        raise KeyboardInterrupt
    assert core.summarize_run(context.run_dir).state is core.RunState.PREEMPTED
