"""Masters that take long to start: one that works is waited for, one that hangs is ended."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from paceline.cli import _master_process
from paceline.cli._errors import CommandError
from paceline.cli._master_process import end_process, start_detached
from paceline.client._http_session import read_master_file

# Runs before the master, as a busy machine may delay it: three seconds, with hardly any work.
SLOW = """
import time

for _ in range(60):
    time.sleep(0.05)
    sum(range(100_000))
"""
HUNG = "import time\ntime.sleep(600)\n"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], int]]:
    """Return a function that starts a master after a piece of code, and returns its process id."""
    home = tmp_path / "home"
    # Less than the code takes, and more than a busy machine lets a process wait for its turn.
    monkeypatch.setattr(_master_process, "_SILENCE_S", 2.0)
    monkeypatch.setattr(_master_process, "_SAY_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(code: str) -> int:
        (tmp_path / "sitecustomize.py").write_text(code)
        return start_detached(home, ["--port", "0", "--slots", "1"]).pid

    yield run
    if file := read_master_file(home):
        end_process(file.pid)


@pytest.mark.slow
def test_a_master_that_works_is_waited_for_and_the_wait_is_told(
    start: Callable[[str], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = start(SLOW)
    told = capsys.readouterr().err
    assert f"Waiting for the master (process {pid}) to answer; it has used " in told
    assert f"It writes to {tmp_path / 'home' / 'master.log'}." in told


def test_a_master_that_hangs_is_ended(start: Callable[[str], int], tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"but does not after .* the last of it \d+ s ago"):
        start(HUNG)
    with suppress(psutil.NoSuchProcess):
        left = [one for one in psutil.process_iter(["cmdline"])
                if str(tmp_path) in " ".join(one.info["cmdline"] or [])]  # fmt: skip
        assert left == []
