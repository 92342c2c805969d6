import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline import faults

LOOP = """
import signal, sys
from paceline import faults
faults.register("test.point", "test.other")
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
for number in range(5):
    faults.reach("test.other")
    print(number, flush=True)
    faults.reach("test.point")
"""


@pytest.mark.parametrize(
    ("fault", "count"),
    [("test.point", 1), ("test.point:3", 3), ("test.point:2,signal=KILL,rank=0,after=0.01", 2)],
)
def test_process_is_killed_when_it_reaches_the_point(
    run_python: Callable[..., Any], fault: str, count: int
) -> None:
    result = run_python(LOOP, PACELINE_FAULT=fault)
    assert result.returncode == -signal.SIGKILL
    assert len(result.stdout.split()) == count


@pytest.mark.parametrize("fault", ["test.nowhere", "test.point:9", "test.point,rank=1"])
def test_process_goes_on_when_it_never_reaches_the_point(
    run_python: Callable[..., Any], fault: str
) -> None:
    result = run_python(LOOP, PACELINE_FAULT=fault)
    assert result.returncode == 0
    assert len(result.stdout.split()) == 5


def test_rank_comes_from_the_launcher(run_python: Callable[..., Any]) -> None:
    result = run_python(LOOP, PACELINE_FAULT="test.point:2,signal=TERM,rank=1", RANK="1")
    assert (result.returncode, result.stdout.split()) == (0, ["0", "1", "told", "2", "3", "4"])


def test_stopped_process_goes_on_when_it_is_continued(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP],
        env={**clean_environment, "PACELINE_FAULT": "test.point:2,signal=STOP"},
        stdout=subprocess.PIPE,
        text=True,
    )
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=200)
    assert (process.returncode, output.split()) == (0, ["0", "1", "2", "3", "4"])


def test_a_thread_that_is_stopped_does_not_go_on_for_a_moment(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    """Another thread may be the first that a signal to the process reaches."""
    code = f"""
import threading, time
from paceline import faults
faults.register("test.point")
def wait():
    while True:
        time.sleep(1e-4)
for _ in range(8):
    threading.Thread(target=wait, daemon=True).start()
def work():
    faults.reach("test.point")
    open({str(tmp_path / "went-on")!r}, "w").close()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    variables = {**clean_environment, "PACELINE_FAULT": "test.point,signal=STOP"}
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", code], env=variables)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        process.kill()
        process.wait()
    assert not (tmp_path / "went-on").exists()


def test_log_tells_the_points_and_the_fault(run_python: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    fault = {"PACELINE_FAULT": "test.point:3,signal=TERM", "PACELINE_FAULT_LOG": str(log)}
    run_python(LOOP, RANK="2", OMP_NUM_THREADS="3", **fault)
    notes = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(n["event"], n["point"], n["signal"], n["rank"], n["threads"]) for n in notes] == [
        ("reached", "test.other", None, 2, 3),
        ("reached", "test.point", None, 2, 3),
        ("fault", "test.point", "TERM", 2, 3),
    ]
    assert notes[-1]["counts"] == {"test.other": 3, "test.point": 3}


def test_unset_variable_costs_nothing_and_checks_nothing() -> None:
    assert not faults.is_active()
    faults.reach("test.never_registered")


@pytest.mark.parametrize("variable", ["PACELINE_FAULT", "PACELINE_FAULT_LOG"])
def test_faults_are_active_when_asked_for(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "test.some")
    assert faults.is_active()


def test_unregistered_point_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_FAULT", "test.some")
    with pytest.raises(ValueError, match="must be registered, but got 'test.unknown'"):
        faults.reach("test.unknown")


@pytest.mark.parametrize(
    "wish", [":0", ":x", ":-1", ":", ",signal=HUP", ",rank=-1", ",after=soon", ",often=2", ",rank"]
)
def test_unknown_wish_is_refused(monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    faults.register("test.count")
    monkeypatch.setenv("PACELINE_FAULT", f"test.count{wish}")
    with pytest.raises(ValueError, match=r"`:N` with N >= 1, .*, but got 'test.count"):
        faults.reach("test.count")
