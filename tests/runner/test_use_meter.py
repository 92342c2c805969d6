"""Use of an attempt's slots, as its runner measures it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline._base import gpus
from paceline._cluster.runner import master_follower
from paceline._cluster.runner.master_follower import UseMeter

# Does what each line says, and answers when it is done.
WORKER = """
import sys, time
for line in sys.stdin:
    if line == "compute\\n":
        end = time.process_time() + 5
        while time.process_time() < end:
            pass
    elif line == "read\\n":
        # Quick: a hundredth of the processor time that would be use.
        with open("/dev/zero", "rb", buffering=0) as file:
            for _ in range(200):
                file.read(2**20)
    print("done", flush=True)
"""
MARK = f"test-use-meter-{os.getpid()}"


@pytest.fixture
def worker() -> Iterator["subprocess.Popen[str]"]:
    """Return a process with the mark, in the session of a child."""
    environment = {**os.environ, "PACELINE_WORKER_GROUP": MARK}
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER], env=environment, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def do(worker: "subprocess.Popen[str]", what: str) -> None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{what}\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == "done\n"


def quiet(meter: UseMeter) -> float:
    """Return what a meter says after an interval without anything, and one to forget before."""
    meter.unused_s()
    time.sleep(1.1)
    unused_s = meter.unused_s()
    assert unused_s is not None
    return unused_s


@pytest.mark.long
def test_processor_time_and_input_are_use_and_sleep_and_stops_are_not(
    worker: "subprocess.Popen[str]",
) -> None:
    """Loading data is use, also with an idle processor."""
    do(worker, "nothing")
    meter = UseMeter(MARK, [])
    assert quiet(meter) >= 1.1
    do(worker, "compute")
    time.sleep(1.1)
    assert meter.unused_s() < 0.5, "computing is use"
    assert quiet(meter) >= 1.1
    do(worker, "read")
    time.sleep(1.1)
    assert meter.unused_s() < 0.5, "reading is use"
    worker.send_signal(signal.SIGSTOP)
    assert quiet(meter) >= 1.1
    assert UseMeter(None, []).unused_s() is None


@pytest.mark.parametrize(("told", "is_used"), [("7.0", True), ("3.0", False), ("", True)])
def test_a_busy_or_unknown_gpu_is_use(
    worker: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch, told: str, is_used: bool
) -> None:
    """Each GPU of the attempt is asked by another process; without an answer it counts as used."""
    do(worker, "nothing")
    monkeypatch.setattr(master_follower, "_GPU_PROGRAM", f"print({told})")
    meter = UseMeter(MARK, ["0"])
    assert (quiet(meter) < 1.1) is is_used


def test_the_program_reads_the_gpus_of_the_attempt_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real program, with a module in the place of NVML's."""
    (tmp_path / "pynvml.py").write_text(
        "from types import SimpleNamespace\n"
        "class NVMLError(Exception): pass\n"
        "class NVMLError_LibraryNotFound(NVMLError): pass\n"
        "class NVMLError_DriverNotLoaded(NVMLError): pass\n"
        "nvmlInit = nvmlShutdown = lambda: None\n"
        "nvmlDeviceGetCount = lambda: 2\n"
        "nvmlDeviceGetHandleByIndex = lambda n: n\n"
        "nvmlDeviceGetUUID = lambda n: f'GPU-{n}'\n"
        "nvmlDeviceGetName = lambda n: 'One'\n"
        "nvmlDeviceGetMemoryInfo = lambda n: SimpleNamespace(used=0, total=1)\n"
        "nvmlDeviceGetUtilizationRates = lambda n: SimpleNamespace(gpu=40 * n)\n"
        "def nvmlDeviceGetMigMode(n): raise NVMLError\n"
    )
    (tmp_path / "driver").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    program = f"import paceline._base.gpus as g; g._DRIVER_FILES = ({str(tmp_path)!r},)\n"
    source = master_follower._GPU_PROGRAM.replace("from paceline", program + "from paceline", 1)
    for gpu, expected in (("0", 0.0), ("1", 40.0)):
        told = gpus.ask_gpu_program(
            [sys.executable, "-c", source, ":".join(sys.path)], None,
            environment={**os.environ, **master_follower.gpu_variables([gpu])},
        )  # fmt: skip
        assert float(told.split()[-1]) == expected, f"{gpu=} {told=}"
