"""Attempts from start to end, run by a real master."""

import gzip
import hashlib
import io
import json
import os
import random
import signal
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.attempt_run import _why_process_ended
from paceline._training.workers.worker_failures import WorkerExit

PRINT_ENVIRONMENT = """
import json, os, shutil, sys
wanted = {name: value for name, value in os.environ.items()
          if name.startswith(("PACELINE", "OMP", "MINE", "CUDA", "HIP"))}
print(json.dumps([wanted, os.getcwd(), shutil.which("python3"), sorted(os.listdir("."))]))
"""

WAIT_FOR_PREEMPTION = """
import time
import paceline as det

with det.core.init() as context:
    attempt = len(context.info.latest_checkpoint or "")
    print("started", flush=True)
    if attempt:
        raise SystemExit
    steps = 0
    while not context.preempt.should_preempt():
        steps += 1
        if steps == 1:
            context.train.report_validation_metrics(1, {"loss": 0.5})
        time.sleep(0.02)
    with context.checkpoint.store_path({"steps_completed": steps}) as (path, _):
        (path / "steps").write_text(str(steps))
    print("saved", flush=True)
"""

# It ends after the first attempt, which leaves a grandchild in the background and sleeps.
SPAWN_AND_SLEEP = """
import os, subprocess, sys, time
import paceline as det

info = det.get_cluster_info()
if os.path.exists(os.environ["MARK"]):
    raise SystemExit
open(os.environ["MARK"], "w").close()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
print("sleeping", flush=True)
time.sleep(120)
"""


def environment_of(master: Any, **changed: Any) -> Any:
    """Return what a script sees: variables, directory, python3 and files."""
    trial = master.wait_for_end(master.create(PRINT_ENVIRONMENT, **changed))
    assert trial["state"] == "COMPLETED", trial["error"]
    return json.loads(master.output(trial)[-1])


def test_the_entrypoint_gets_its_run_directory_and_no_secret(shared_master: Any) -> None:
    """The master itself was started with a token and an address in its environment."""
    variables, directory, python, files = environment_of(
        shared_master, environment={"variables": {"MINE": "one two"}}
    )
    assert set(variables) - {"PACELINE_OMP_THREADS"} >= {"PACELINE_RUN_DIR", "MINE"}
    assert not {"PACELINE_TOKEN", "PACELINE_MASTER", "PACELINE_HOME"} & set(variables)
    assert "secret" not in json.dumps(variables)
    assert (shared_master.home / "token").read_text().strip() not in json.dumps(variables)
    assert variables["MINE"] == "one two"
    root = str(shared_master.home / "attempts")
    assert variables["PACELINE_RUN_DIR"].startswith(root)
    assert directory.startswith(root)
    assert Path(python) == Path(sys.executable).with_name("python3")
    assert files == ["train.py"]


TELL_SECRET = """
import hashlib, os, pathlib
print(hashlib.sha256(os.environ["MY_SECRET"].encode()).hexdigest())
print("it is", os.environ["MY_SECRET"])
"""


def test_a_secret_reaches_the_trial_and_neither_its_files_nor_its_log(shared_master: Any) -> None:
    secret = "squeamish ossifrage"
    environment = {"secrets": {"MY_SECRET": secret}}
    number = shared_master.create(TELL_SECRET, environment=environment, debug=True)
    trial = shared_master.wait_for_end(number)
    assert trial["state"] == "COMPLETED", trial["error"]
    digest = hashlib.sha256(secret.encode()).hexdigest()
    assert shared_master.output(trial) == [digest, "it is ***"]

    def holding() -> list[str]:
        files = [path for path in shared_master.home.rglob("*") if path.is_file()]
        return [path.name for path in files if secret.encode() in path.read_bytes()]

    assert undisturbed(holding) == ["secrets.json"]
    # What is the user's own keeps the modes that it was given; this test made the log.
    attempt = f"attempts/{trial['attempts'][0]['id']}/context"
    own = [shared_master.home / name for name in ("checkpoints", attempt, "master.log")]

    def readable() -> list[Path]:
        found = [path for path in shared_master.home.rglob("*") if path.stat().st_mode & 0o077]
        return [path for path in found if not any(part in own for part in (path, *path.parents))]

    assert undisturbed(readable) == []


def undisturbed(look: Callable[[], list[Any]]) -> list[Any]:
    """Return what is found in a home from which the master removes files meanwhile."""
    while True:
        with suppress(FileNotFoundError):
            return look()


@pytest.mark.parametrize("num_slots", [1, 8])
def test_threads_are_the_cores_by_share_of_slots(shared_master: Any, num_slots: int) -> None:
    variables, *_ = environment_of(shared_master, resources={"slots_per_trial": num_slots})
    num_cores = len(os.sched_getaffinity(0))
    assert variables["OMP_NUM_THREADS"] == str(max(1, num_cores * num_slots // 8))


@pytest.mark.long
def test_an_attempt_sees_the_device_of_its_slot_alone(master: Any) -> None:
    """A MIG device by its UUID, and ROCm, which would read its own variable first, sees no more."""
    master.start(CUDA_VISIBLE_DEVICES="MIG-a,MIG-b", HIP_VISIBLE_DEVICES="3,5")
    variables, *_ = environment_of(master)
    assert variables["CUDA_VISIBLE_DEVICES"] == variables["HIP_VISIBLE_DEVICES"] == "MIG-a"


def test_the_users_number_of_threads_stays(shared_master: Any) -> None:
    variables, *_ = environment_of(
        shared_master, environment={"variables": {"OMP_NUM_THREADS": "7"}}
    )
    assert variables["OMP_NUM_THREADS"] == "7"


def test_the_interpreter_that_is_named_comes_first_on_the_path(
    shared_master: Any, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nMINE_TOO=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    variables, _, found, _ = environment_of(
        shared_master, environment={"python": str(python), "variables": {"MINE": "1"}}
    )
    assert found == str(python)
    assert variables["MINE"] == "1"


def test_a_working_directory_is_used_in_place(shared_master: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRINT_ENVIRONMENT)
    (tmp_path / "data.txt").touch()
    _, directory, _, files = environment_of(
        shared_master, environment={"working_dir": str(tmp_path)}
    )
    assert directory == str(tmp_path)
    assert files == ["data.txt", "train.py"]


def test_a_list_is_run_without_a_shell(shared_master: Any) -> None:
    experiment_id = shared_master.create(
        "import sys; print(sys.argv[1:])", entrypoint=["python3", "train.py", "$HOME; echo", "*"]
    )
    trial = shared_master.wait_for_end(experiment_id)
    assert shared_master.output(trial) == ["['$HOME; echo', '*']"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"working_dir": "/nowhere/at/all"}, "`environment.working_dir` must be a directory"),
        ({"python": "/nowhere/python"}, "`environment.python` must be an interpreter"),
    ],
)
def test_what_cannot_start_ends_the_trial_with_the_reason(
    shared_master: Any, environment: dict[str, str], message: str
) -> None:
    experiment_id = shared_master.create("", environment=environment, max_restarts=5)
    trial = shared_master.wait_for_end(experiment_id)
    assert (trial["state"], len(trial["attempts"])) == ("ERROR", 1)
    assert trial["attempts"][0]["exit"]["reason"] == "start_failed"
    assert message in trial["error"]
    assert message in shared_master.read(f"/experiments/{experiment_id}")["error"]


def damaged_inside() -> bytes:
    """Return an archive that begins well and whose decompressor has an error of its own kind."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        member = tarfile.TarInfo("train.py")
        member.size = 400_000
        content = bytes(random.Random(0).choices(b"abcd", k=member.size))
        tar.addfile(member, io.BytesIO(content))
    data = bytearray(buffer.getvalue())
    middle = len(data) // 2
    data[middle : middle + 100] = b"\xff" * 100
    return bytes(data)


@pytest.mark.parametrize(
    "archive",
    [
        b"no archive",
        gzip.compress(b"no tar inside" * 100, mtime=0),
        gzip.compress(bytes(range(256)) * 2000, mtime=0)[:500],
        gzip.compress(b"", mtime=0)[:-4],
        b"\x1f\x8b" + b"\xff" * 200,
        damaged_inside(),
    ],
)
def test_a_damaged_context_ends_the_trial(shared_master: Any, archive: bytes) -> None:
    trial = shared_master.wait_for_end(shared_master.create(archive))
    assert (trial["state"], len(trial["attempts"])) == ("ERROR", 1)
    assert trial["attempts"][0]["exit"]["reason"] == "start_failed"
    assert "must be an archive that can be unpacked" in trial["error"]


def test_a_missing_program_is_the_shells_error_and_a_failure(shared_master: Any) -> None:
    trial = shared_master.wait_for_end(shared_master.create("", entrypoint="no-such-program -x"))
    assert trial["state"] == "ERROR"
    assert "exit code 127" in trial["error"]
    assert any("no-such-program" in line for line in shared_master.output(trial))


@pytest.mark.parametrize("rank", [0, 2])
def test_the_rank_that_failed_is_named_where_it_reported_nothing(
    shared_master: Any, rank: int
) -> None:
    script = (
        f"import os, time\nif os.environ['RANK'] == '{rank}': raise OSError('x')\ntime.sleep(60)"
    )
    command = "python3 -m paceline.launch.torch_distributed --nproc-per-node 3 --grace-s 0 train.py"
    trial = shared_master.wait_for_end(shared_master.create(script, entrypoint=command))
    assert trial["error"] == (
        f"The attempt failed (exit code 1: Rank {rank} exited with code 1 (OSError: x), the first"
        " of 3 to fail.) and max_restarts is 0."
    )


def test_a_killed_runner_takes_its_processes_along_and_the_trial_goes_on(
    shared_master: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    master = shared_master
    variables = {"MARK": str(tmp_path / "mark")}
    experiment_id = master.create(SPAWN_AND_SLEEP, environment={"variables": variables})
    wait_until(lambda: master.output(master.trial(experiment_id)) == ["sleeping"])
    attempt_id = master.trial(experiment_id)["attempts"][0]["id"]
    runner = master.runner(attempt_id)
    family = runner.children(recursive=True)
    assert len(family) >= 2
    runner.kill()
    wait_until(lambda: not any(is_running(process) for process in family))
    trial = master.wait_for_end(experiment_id)
    assert trial["state"] == "COMPLETED"
    first, second = trial["attempts"]
    assert (first["exit"]["reason"], second["exit"]["code"]) == ("runner_lost", 0)
    assert trial["restarts"] == 0


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("has_news", [False, True])
def test_a_runner_that_is_told_to_end_lets_its_attempt_save_and_the_trial_goes_on(
    shared_master: Any, has_news: bool, wait_until: Callable[..., None]
) -> None:
    """News from the master in between must not take the request back."""
    master = shared_master
    experiment_id = master.create(WAIT_FOR_PREEMPTION)
    wait_until(lambda: master.trial(experiment_id)["best_metric"] == 0.5)
    trial = master.trial(experiment_id)
    attempt_id = trial["attempts"][0]["id"]
    runner = master.runner(attempt_id)
    directory = AttemptDirectory(master.home / "attempts" / str(attempt_id))
    [worker] = runner.children()
    if has_news:
        os.killpg(worker.pid, signal.SIGSTOP)
    runner.send_signal(signal.SIGTERM)
    if has_news:
        wait_until(lambda: directory.run.read_control().should_preempt)
        report_better(master, attempt_id)
        wait_until(lambda: directory.run.read_control().best_validation == 0.25)
        assert directory.run.read_control().should_preempt
        os.killpg(worker.pid, signal.SIGCONT)
    trial = master.wait_for_end(experiment_id)
    assert trial["state"] == "COMPLETED"
    first, second = trial["attempts"]
    assert first["exit"]["outcome"] == "preempted"
    assert second["resumed_from"] is not None
    assert trial["restarts"] == 0
    assert "saved" in master.output(trial)


def report_better(master: Any, attempt_id: int) -> None:
    """Let another rank's journal report a better value."""
    record = {
        "type": "metrics", "time": 0.0, "group": "validation", "steps_completed": 2,
        "metrics": {"loss": 0.25},
    }  # fmt: skip
    batch = {"generation": 7, "rank": 7, "records": [[0, record]]}
    master.post(f"/attempts/{attempt_id}/records", batches=[batch])


@pytest.mark.long
def test_an_attempt_that_ends_while_the_master_is_away_is_shipped_by_the_next_one(
    master: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """The runner waits some seconds for a master and leaves."""
    script = f"""
import os, time
import paceline as det
with det.core.init() as context:
    context.train.report_training_metrics(1, {{"x": 1.0}})
    print("one", flush=True)
    while not os.path.exists({str(tmp_path / "go")!r}):
        time.sleep(0.02)
    context.train.report_training_metrics(2, {{"x": 2.0}})
    print("two", flush=True)
"""
    master.start()
    experiment_id = master.create(script)
    wait_until(lambda: master.output(master.trial(experiment_id)) == ["one"])
    runner = master.runner(1)
    master.kill()
    (tmp_path / "go").touch()
    directory = AttemptDirectory(master.home / "attempts" / "1")
    wait_until(lambda: directory.read_end() is not None)
    wait_until(lambda: not is_running(runner))
    assert directory.runner_pid() is None
    master.start()
    trial = master.wait_for_end(experiment_id)
    assert (trial["state"], len(trial["attempts"])) == ("COMPLETED", 1)
    assert trial["summary"]["training"]["x"]["count"] == 2
    assert master.output(trial) == ["one", "two"]
    wait_until(lambda: not directory.path.exists())


@pytest.mark.long
def test_a_runner_that_outlives_its_master_is_found_again(
    master: Any, wait_until: Callable[..., None]
) -> None:
    master.start()
    experiment_id = master.create(WAIT_FOR_PREEMPTION)
    wait_until(lambda: master.trial(experiment_id)["best_metric"] == 0.5)
    runner = master.runner(1)
    master.kill()
    master.start()
    assert runner.is_running()
    assert [slot["attempt_id"] for slot in master.read("/slots")] == [1, None]
    master.post(f"/experiments/{experiment_id}/cancel")
    trial = master.wait_for_end(experiment_id)
    assert (trial["state"], len(trial["attempts"])) == ("CANCELED", 1)
    assert trial["latest_checkpoint"] is not None


def test_a_journal_of_another_version_fails_the_attempt_and_says_so(
    shared_master: Any,
) -> None:
    script = """
import os
from paceline._base.journal_reading_and_writing import frame_line, segment_name
path = os.path.join(os.environ["PACELINE_RUN_DIR"], "journal", "a1.g0.r0")
os.makedirs(path)
with open(os.path.join(path, segment_name(0)), "wb") as file:
    file.write(frame_line(-1, b'{"journal_version": 999}'))
"""
    trial = shared_master.wait_for_end(shared_master.create(script))
    assert (trial["state"], len(trial["attempts"])) == ("ERROR", 1)
    assert "must have format version 1, but has 999" in trial["error"]


@pytest.mark.parametrize(
    ("pause", "code", "state"), [(0.0, 0, "COMPLETED"), (1.0, 0, "COMPLETED"), (0.0, 1, "ERROR")]
)
def test_records_that_the_master_refuses_are_named_and_the_rest_arrives(
    shared_master: Any, pause: float, code: int, state: str
) -> None:
    """Without the pause the entrypoint has ended before the first record is sent."""
    script = f"""
import os, time
from pathlib import Path
from paceline._base.journal_reading_and_writing import JournalWriter
from paceline.journal import MetricsReported
path = Path(os.environ["PACELINE_RUN_DIR"]) / "journal" / "a1.g0.r0"
journal = JournalWriter(path)
for step in (1, 2, 2**63, 3, 2**64, 4):
    journal.append(MetricsReported(time=0.0, group="training", steps_completed=step,
                                   metrics={{"x": 1}}))
time.sleep({pause})
print("done")
raise SystemExit({code})
"""
    trial = shared_master.wait_for_end(shared_master.create(script))
    assert (trial["state"], len(trial["attempts"])) == (state, 1)
    assert trial["summary"]["training"]["x"]["count"] == 4
    assert shared_master.output(trial) == ["done"]
    notes = shared_master.read(f"/trials/{trial['id']}/logs", stream="master")["items"]
    told = [note["text"] for note in notes if note["text"].startswith("Record")]
    assert [line.split(" of rank 0")[0] for line in told] == ["Record 2", "Record 4"]
    assert trial["num_records_lost"] == 2
    assert f'"steps_completed":{2**63}' in told[0]
    assert "refuses" in told[0]
    kept = shared_master.home / "attempts" / f"{trial['attempts'][0]['id']}.set_aside.jsonl"
    assert str(kept) in told[0]
    assert len(kept.read_text().splitlines()) == 2
    if code:
        assert told[0].removesuffix(".") in trial["error"]
        assert "1 more" in trial["error"]


@pytest.mark.parametrize(
    ("exit_", "text"),
    [
        (WorkerExit(rank=0, code=1, error="ValueError: no"), "ValueError: no"),
        (
            WorkerExit(rank=0, code=137, silence="is stopped (SIGSTOP)"),
            "The entrypoint is stopped (SIGSTOP)",
        ),
        (WorkerExit(rank=0, code=1), None),
    ],
)
def test_why_an_entrypoint_ended_is_a_sentence(exit_: WorkerExit, text: str | None) -> None:
    assert _why_process_ended(exit_) == text
