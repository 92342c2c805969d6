"""Shared fixtures of the client's tests."""

import socket
from pathlib import Path

import pytest


@pytest.fixture
def unused_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty home that the environment names."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("PACELINE_HOME", str(path))
    monkeypatch.delenv("PACELINE_MASTER", raising=False)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    return path
