"""Functions of a script run in worker processes, and what comes back."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline._base.process_and_network import num_cores

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]

PREAMBLE = """
import os, signal, sys, time
from paceline._training.workers.pickled_calls import NotSendableError
from paceline._training.workers.worker_failures import RemoteTraceback, WorkerFailedError
from paceline._training.workers.run import call_in_workers
RANK = int(os.environ.get("RANK", -1))
"""


@pytest.fixture
def drive(run_python: RunPython) -> RunPython:
    """Return a function that runs a driver's script to its end."""

    def run(code: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        result = run_python(PREAMBLE + code, *arguments, **environment)
        assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture
def start(tmp_path: Path, clean_environment: dict[str, str]) -> Iterator[Start]:
    """Return a function that starts a driver in a session of its own, as a terminal does."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str) -> "subprocess.Popen[str]":
        (tmp_path / "driver.py").write_text(PREAMBLE + code)
        process = subprocess.Popen(
            [sys.executable, "driver.py"],
            cwd=tmp_path,
            env=clean_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        with process:
            process.kill()


def read_lines(process: "subprocess.Popen[str]", number: int) -> list[str]:
    assert process.stdout is not None
    return sorted(process.stdout.readline().rstrip() for _ in range(number))


@pytest.mark.long
def test_values_of_the_scripts_own_classes_come_back_in_rank_order(drive: RunPython) -> None:
    code = """
import pickle
OFFSET = 10
LIMIT, Width = 7, int
class Point:
    def __init__(self, x): self.x = x
def helper(x): return Point(x + OFFSET)
def main(base, *, scale):
    rank = int(os.environ["RANK"])
    # Only its body names these two.
    class Local:
        limit = LIMIT
        def __init__(self, width: Width): self.width = width
    assert Local.limit == 7 and Local.__init__.__annotations__ == {"width": int}
    point = helper(base + scale * rank)
    # Plain pickle finds the script's names as well.
    assert type(pickle.loads(pickle.dumps(point))) is Point
    return point, sys.argv[1:]
for point, arguments in call_in_workers(main, 3, (1,), {"scale": 2}):
    print(type(point) is Point, point.x, arguments)
print(call_in_workers(lambda: os.environ["WORLD_SIZE"], 1))
"""
    result = drive(code, "--lr", "1")
    rows = [f"True {x} ['--lr', '1']" for x in (11, 13, 15)]
    assert result.stdout.splitlines() == [*rows, "['1']"]


@pytest.mark.long
def test_workers_find_modules_the_directory_and_the_cores_as_the_driver_does(
    drive: RunPython, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("def main(): import os; return os.getcwd()")
    code = """
import logging
logging.basicConfig(level=logging.INFO)
import beside
print(call_in_workers(beside.main, 1))
def threads(): logging.info("ready"); return os.environ["OMP_NUM_THREADS"]
print(call_in_workers(threads, 2))
"""
    result = drive(code)
    threads = str(max(1, num_cores() // 2))
    assert result.stdout.splitlines() == [str([str(tmp_path)]), str([threads, threads])]
    assert f"Starting 2 worker(s) with {threads} thread(s) each" in result.stderr
    # The driver's level of logging is the workers' as well.
    assert result.stderr.count("root: ready") == 2
    kept = drive("print(call_in_workers(lambda: os.environ['OMP_NUM_THREADS'], 1))",
                 OMP_NUM_THREADS="7")  # fmt: skip
    assert kept.stdout == "['7']\n"


@pytest.mark.long
def test_output_goes_to_the_drivers_present_streams_with_its_rank(drive: RunPython) -> None:
    code = """
import contextlib, io
def main():
    print("out")
    print("err", file=sys.stderr)
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    call_in_workers(main, 2)
print(sorted(out.getvalue().splitlines()), sorted(err.getvalue().splitlines()))
call_in_workers(main, 1)
"""
    lines = drive(code).stdout.splitlines()
    assert lines == ["['[rank=0] out', '[rank=1] out'] ['[rank=0] err', '[rank=1] err']", "out"]


ERRORS = """
import threading
class Odd(Exception):
    def __init__(self, code, *, where):
        super().__init__(f"{code} at {where}")
        self.code, self.lock = code, threading.Lock()
def fail(what):
    if os.environ["RANK"] != "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if what == "zero":
        1 / 0
    if what == "odd":
        raise Odd(3, where="step 7")
    if what == "value":
        return {"model": [time.sleep, threading.Lock()]}
    if what == "exit":
        sys.exit(5)
    os.kill(os.getpid(), signal.SIGKILL)
def attempt(what):
    try:
        call_in_workers(fail, 3, (what,), grace_s=0.2)
    except BaseException as error:
        return error
"""


def test_errors_keep_their_type_and_carry_the_traceback_of_the_rank(drive: RunPython) -> None:
    code = """
error = attempt("zero")
assert type(error) is ZeroDivisionError, error
text = str(error.__cause__)
assert type(error.__cause__) is RemoteTraceback
assert "Rank 1 raised, the first of 3 to fail:" in text
assert text.count("Traceback") == 1 and "in fail" in text and "1 / 0" in text, text
assert "_call.py" not in text, text

error = attempt("odd")
assert type(error) is Odd and error.code == 3 and str(error) == "3 at step 7", repr(error)

error = attempt("value")
assert type(error) is NotSendableError and isinstance(error, TypeError)
assert "What rank 1 returned" in str(error) and "`value['model'][1]`" in str(error), error

error = attempt("kill")
assert type(error) is WorkerFailedError and error.rank == 1
assert "Rank 1 was ended by SIGKILL, the first of 3 to fail" in str(error), error

error = attempt("exit")
assert type(error) is WorkerFailedError and "by `sys.exit(5)` with exit code 5" in str(error), error
"""
    drive(ERRORS + code)


@pytest.mark.long
def test_a_base_exception_of_a_rank_is_raised_and_disturbs_no_thread(drive: RunPython) -> None:
    code = """
class Odd(BaseException):
    pass
def fail(rank, kind):
    if int(os.environ["RANK"]) == rank:
        raise kind("boom")
    time.sleep(600)
for rank, kind in (0, KeyboardInterrupt), (2, KeyboardInterrupt), (2, Odd):
    try:
        call_in_workers(fail, 3, (rank, kind), grace_s=0.2)
    except kind as error:
        assert f"Rank {rank} raised, the first of 3 to fail" in str(error.__cause__)
"""
    assert "Exception in thread" not in drive(code).stderr


@pytest.mark.long
def test_a_worker_that_leaves_before_its_function_has_returned_is_an_error(
    drive: RunPython, tmp_path: Path
) -> None:
    code = """
def leave(how, rank):
    if int(os.environ["RANK"]) != rank:
        time.sleep(600)
    with open("starts", "a") as file:
        file.write(".")
    os._exit(0) if how == "process" else sys.exit({"text": "no data", "none": None}.get(how, how))

BY = {0: "sys.exit(0)", 3: "sys.exit(3)", "text": "sys.exit('no data')", "none": "sys.exit()"}
for rank, how, code in (
    (2, 0, 0), (2, 3, 3), (2, "text", 1), (2, "none", 0), (2, "process", 0), (0, 0, 0)
):
    try:
        call_in_workers(leave, 3, (how, rank), grace_s=0.2)
    except WorkerFailedError as error:
        assert (error.rank, error.exit_code) == (rank, code), vars(error)
        what = f"rank {rank} left by `{BY.get(how)}` with exit code {code}"
        if how == "process":
            what = f"the process of rank {rank} ended with exit code 0"
        assert f"{what}, the first of 3 to fail" in str(error), error
        assert how == "process" or "in leave\\n" in str(error.__cause__), error.__cause__
    else:
        raise AssertionError(how)
open("starts", "w").close()
for how in (0, "process"):
    try:
        call_in_workers(leave, 1, (how, 0), max_restarts=3)
    except WorkerFailedError as error:
        assert error.exit_code == 0 and "first of" not in str(error), error
"""
    drive(code)
    # An end that was meant is not repeated.
    assert (tmp_path / "starts").read_text() == ".."


def test_what_cannot_be_sent_is_named_before_any_worker_starts(drive: RunPython) -> None:
    code = """
import threading
class Config: pass
config = Config()
config.parts = {"lock": threading.Lock()}
def main(): return config
for function, args in ((main, ()), (print, ([threading.Lock()],))):
    try:
        call_in_workers(function, 2, args)
    except NotSendableError as error:
        print(error)
"""
    first, second = drive(code).stdout.splitlines()
    assert "`main -> config.parts['lock']` (_thread.lock)" in first
    assert "`args[0][0]` (_thread.lock)" in second


@pytest.mark.long
def test_the_failure_of_which_another_one_tells_comes_first(drive: RunPython) -> None:
    code = """
class PeerError(RuntimeError):
    is_consequence = True
def main():
    if os.environ["RANK"] == "0":
        open("raises", "w").close()
        raise PeerError("rank 1 has failed")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while not os.path.exists("raises"):
        time.sleep(0.01)
    time.sleep(0.3)
    raise ValueError("boom")
try:
    call_in_workers(main, 2)
except ValueError as error:
    print(error.__cause__)
"""
    lines = drive(code).stdout.splitlines()
    assert "Rank 1 raised, the first of 2 to fail:" in lines
    assert "PeerError: rank 1 has failed" in lines[-1]


def test_threads_may_call_as_well(drive: RunPython) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    print(*pool.map(lambda n: call_in_workers(lambda: n, 1), [1, 2]))
"""
    assert drive(code).stdout == "[1] [2]\n"


# ---- signals and death -----------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends workers with their parent")
def test_workers_end_when_the_driver_is_killed(
    start: Start, wait_until: Callable[[Callable[[], object]], None]
) -> None:
    code = """
def main():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    print(os.getpid())
    time.sleep(600)
call_in_workers(main, 2)
"""
    driver = start(code)
    pids = [int(line.split()[1]) for line in read_lines(driver, 2)]
    driver.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


SAVING = """
def main():
    noted = []
    def note(*_):
        signal.signal(number, signal.default_int_handler)
        # It may interrupt a print().
        os.write(1, b"noted\\n")
        noted.append(number)
    number = signal.SIGINT
    signal.signal(number, note)
    print("up")
    try:
        while not (noted and CAN_FINISH):
            time.sleep(0.05)
        time.sleep(0.3)
    finally:
        print("left")
    return RANK
RANK = os.environ.get("RANK")
print(call_in_workers(main, 2))
"""


def interrupt(process: "subprocess.Popen[str]") -> None:
    """Press Ctrl-C: the whole foreground group gets the signal."""
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.long
def test_a_first_ctrl_c_is_passed_on_and_the_workers_may_finish(start: Start) -> None:
    driver = start(SAVING.replace("CAN_FINISH", "True"))
    assert read_lines(driver, 2) == ["[rank=0] up", "[rank=1] up"]
    interrupt(driver)
    out, err = driver.communicate(timeout=240)
    assert driver.returncode == 0, err
    assert out.splitlines()[-1] == "[None, None]"
    assert out.count("noted") == out.count("left") == 2


@pytest.mark.long
def test_a_second_ctrl_c_makes_the_workers_leave(start: Start) -> None:
    driver = start(SAVING.replace("CAN_FINISH", "False"))
    read_lines(driver, 2)
    interrupt(driver)
    assert read_lines(driver, 2) == ["[rank=0] noted", "[rank=1] noted"]
    interrupt(driver)
    out, err = driver.communicate(timeout=240)
    # A shell shows this as 130.
    assert driver.returncode == -signal.SIGINT
    assert out.splitlines().count("[rank=0] left") == 1
    assert err.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.long
def test_a_second_ctrl_c_kills_workers_that_do_not_leave(
    start: Start, wait_until: Callable[[Callable[[], object]], None]
) -> None:
    code = """
def main():
    signal.signal(signal.SIGINT, lambda *_: os.write(1, b"noted\\n"))
    print(os.getpid())
    while True:
        time.sleep(0.05)
call_in_workers(main, 2)
"""
    driver = start(code)
    pids = [int(line.split()[1]) for line in read_lines(driver, 2)]
    interrupt(driver)
    # Two signals that come at once would count as one.
    assert read_lines(driver, 2) == ["[rank=0] noted", "[rank=1] noted"]
    interrupt(driver)
    _, err = driver.communicate(timeout=240)
    assert driver.returncode == -signal.SIGINT
    assert "ended by SIGKILL" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.long
def test_a_ctrl_c_in_plain_code_is_a_keyboard_interrupt(start: Start) -> None:
    code = """
def main():
    print("up")
    time.sleep(600)
try:
    call_in_workers(main, 2)
except KeyboardInterrupt as error:
    print("caught", "in main" in str(error.__cause__))
"""
    driver = start(code)
    read_lines(driver, 2)
    interrupt(driver)
    out, err = driver.communicate(timeout=240)
    assert (driver.returncode, out) == (0, "caught True\n"), err


@pytest.mark.long
def test_a_sigterm_reaches_the_workers_and_ends_the_driver_as_without_them(start: Start) -> None:
    driver = start("def main():\n    print('up')\n    time.sleep(600)\ncall_in_workers(main, 2)\n")
    read_lines(driver, 2)
    driver.terminate()
    assert driver.wait(timeout=240) == -signal.SIGTERM


@pytest.mark.long
def test_handlers_of_the_driver_stay_and_are_given_back(drive: RunPython) -> None:
    code = """
handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
signal.signal(signal.SIGUSR1, print)
call_in_workers(time.sleep, 1, (0,))
assert handlers == {n: signal.getsignal(n) for n in handlers}
assert signal.getsignal(signal.SIGUSR1) is print
"""
    drive(code)
