"""Starting runners on this machine."""

import sys
import time
from pathlib import Path

import pytest

from paceline._cluster.runner.attempt_directory import AttemptDirectory
from paceline._cluster.runner.attempt_processes import RunnerHost


@pytest.mark.parametrize("can_fork", [True, False])
def test_what_starts_runners_and_they_themselves_get_no_token_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_fork: bool
) -> None:
    environments = tmp_path / "environments"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nenv >> {environments}\necho end >> {environments}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("PACELINE_TOKEN", "secret-of-the-user")
    monkeypatch.setenv("GATE", "kept")
    (tmp_path / "1").mkdir()
    host = RunnerHost(tmp_path)
    host._can_fork = can_fork
    try:
        # What ends before it forks is started again, and a runner of its own at last.
        runner = host.start(AttemptDirectory(tmp_path / "1"), is_shipping=False)
        deadline = time.monotonic() + 200
        while runner.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        host.close()
    text = environments.read_text()
    assert text.splitlines().count("end") == (3 if can_fork else 1)
    assert text.count("GATE=kept") == text.splitlines().count("end")
    assert "secret-of-the-user" not in text
