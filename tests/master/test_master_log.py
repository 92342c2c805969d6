import io
import logging
import sys
from pathlib import Path

import pytest

from paceline._cluster.master.server import logging_to_master_log


def fail(divisor: int) -> float:
    if divisor < 0:
        raise ZeroDivisionError("negative")
    return 1 / divisor


def test_the_traceback_of_an_error_that_comes_again_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    with logging_to_master_log(tmp_path / "master.log"):
        for divisor in (0, 0, -1, 0, -1):
            try:
                fail(divisor)
            except ZeroDivisionError:
                logging.getLogger("test").exception("Step %d failed.", divisor)
    text = written.getvalue()
    assert text.count("Traceback") == 2
    assert text.count("Step 0 failed.") == 3
    assert text.count("Step 0 failed. (ZeroDivisionError: division by zero; as before)") == 2
    assert text.count("Step -1 failed. (ZeroDivisionError: negative; as before)") == 1
