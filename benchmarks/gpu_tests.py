"""Part of `gpu.py`: the tests in `tests/gpu`, and those elsewhere that need a GPU."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from gpu_machine import part_arguments
from gpu_record import Row, Status, emit

_ROOT = Path(__file__).resolve().parents[1]
_TESTS = _ROOT / "tests"
_ELSEWHERE = tuple(
    f"{_TESTS}/engine/test_saver.py::{name}"
    for name in (
        "test_copy_from_a_device_is_of_the_moment",
        "test_copies_of_many_small_tensors_of_a_device_are_of_the_moment",
    )
)
_MOST_AT_ONCE = 6


class Reporter:
    """Tell the outcome of each test as soon as it is known."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take in a phase of a test."""
        is_over = report.when == "call" or (report.when == "setup" and not report.passed)
        if is_over or report.failed:
            emit(row_of(report))


def row_of(report: Any) -> Row:
    """Return the row of a test's outcome."""
    status = Status.MET if report.passed else Status.NOT_MET
    why = ""
    if report.skipped:
        status, why = Status.NOT_RUN, str(report.longrepr[2])
        why = why.removeprefix("Skipped: ").removeprefix("NOT RUN: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = str(report.longrepr)[-300:] if crash is None else f"{crash.message[:300]}"
    name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
    raw = str(report.longrepr) if report.failed else None
    return Row(what=name, status=status, result=f"{report.duration:.1f} s", why=why, raw=raw)


def main() -> int:
    """Run the tests; what fails is told with its whole error."""
    parser = part_arguments(__doc__)
    parser.add_argument("-k", dest="chosen", default="", help="which tests, as for pytest")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        # The configuration of the project asks for what need not be installed here.
        config = Path(directory, "pytest.ini")
        config.write_text("[pytest]\nmarkers =\n    timeout: ignored\n")
        arguments = ["-q", "-c", str(config), "--rootdir", str(_ROOT)]
        arguments += ["--confcutdir", str(_TESTS / "gpu"), "--import-mode=importlib"]
        arguments += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
        arguments += ["--basetemp", str(Path(directory, "tests"))]
        arguments += ["-k", given.chosen] if given.chosen else []
        num_cores = len(os.sched_getaffinity(0))
        if importlib.util.find_spec("xdist") and not given.chosen:
            arguments += ["-n", str(min(_MOST_AT_ONCE, num_cores)), "--dist", "worksteal"]
        if importlib.util.find_spec("pytest_timeout"):
            arguments += ["--timeout", str(given.seconds)]
        elsewhere = _ELSEWHERE if given.device == "cuda" else ()
        code = pytest.main([*arguments, str(_TESTS / "gpu"), *elsewhere], plugins=[Reporter()])
    # A test that failed is a row of its own.
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(code)


if __name__ == "__main__":
    sys.exit(main())
