"""Run directories go to a temporary place, and torch's loaders leave no signal handler."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a temporary directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Put back what torch and a train function in this process change of it."""
    handler = signal.getsignal(signal.SIGCHLD)
    mode = torch.get_deterministic_debug_mode()
    yield
    signal.signal(signal.SIGCHLD, handler)
    torch.set_deterministic_debug_mode(mode)
