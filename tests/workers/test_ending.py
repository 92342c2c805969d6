"""A worker of another launcher ends with the code that Python would have ended with."""

import subprocess
from collections.abc import Callable

import pytest

PROGRAM = """
import atexit, os, sys, threading, time
atexit.register(print, "registered before")
from paceline._training.workers.joined_pool import skip_interpreter_shutdown
skip_interpreter_shutdown()
skip_interpreter_shutdown()
atexit.register(print, "registered after")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
class Late:
    def __del__(self, write=os.write):
        write(1, b"shut down")
# Python clears this module at last, without looking for garbage.
sys.late = Late()
def main(how):
    if how == "caught":
        try:
            sys.exit(4)
        except SystemExit:
            return
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "raise":
        raise SystemExit(6)
    if how == "error":
        raise ValueError("boom")
    if how != "return":
        sys.exit({"code": 3, "text": "no data", "none": None, "large": 259}[how])
main(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("return", 0),
        ("caught", 0),
        ("none", 0),
        ("code", 3),
        ("large", 3),
        ("text", 1),
        ("error", 1),
        ("interrupt", 130),
        ("raise", 6),
    ],
)
def test_the_exit_code_is_that_of_plain_python(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"], how: str, code: int
) -> None:
    result = run_python(PROGRAM, how)
    assert result.returncode == code, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:3] == ["thread", "registered after", "registered before"]
    # Only a code that is not known is left to Python, which shuts down.
    assert ("shut down" in lines) == (how == "raise")
    expected = {"error": "ValueError: boom", "text": "no data"}
    if how in expected:
        assert result.stderr.splitlines()[-1] == expected[how]


@pytest.mark.long
def test_workers_of_our_own_end_by_themselves(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    code = """
import sys
from paceline._training.workers.run import call_in_workers
from paceline._training.workers.joined_pool import skip_interpreter_shutdown
def main():
    skip_interpreter_shutdown()
    return sys.exit.__name__
print(call_in_workers(main, 1))
"""
    result = run_python(code)
    assert result.stdout == "['exit']\n", result.stderr
