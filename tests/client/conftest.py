"""Shared fixtures of the client's tests."""

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty home that the environment names."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("PACELINE_HOME", str(path))
    monkeypatch.delenv("PACELINE_MASTER", raising=False)
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    return path
