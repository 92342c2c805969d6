"""The plug-ins that the guide shows, each put to work."""

import sys
from pathlib import Path
from typing import Any

import pytest
from guides import Guide

from paceline import plugins

GUIDE = Guide("docs/plugins.md")


@pytest.fixture
def shown() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "guide"}
    GUIDE.run(GUIDE.blocks("python"), names)
    return names


def test_every_base_class_is_in_the_table() -> None:
    table = GUIDE.text.partition("|---|")[2].partition("\n\n")[0]
    for name in ("SearchMethod", "CheckpointStorage", "Tracker", "Executor", "Starter"):
        assert isinstance(getattr(plugins, name), type)
        assert f"`{name}`" in table


def test_the_storage_keeps_and_returns_a_checkpoint(shown: Any, tmp_path: Path) -> None:
    storage = shown["MemoryStorage"]()
    with storage.store_path("c1") as path:
        (path / "state.txt").write_text("all of it")
    storage.commit("c1", {"steps_completed": 3})
    with storage.restore_path("c1") as path:
        assert (path / "state.txt").read_text() == "all of it"
    storage.delete("c1")
    assert storage.objects("c1/") == []


def test_the_executor_wraps_the_command_of_a_runner(shown: Any, tmp_path: Path) -> None:
    """`system/test_plugins.py` has a master start runners with it."""
    executor = shown["NiceExecutor"](tmp_path / "attempts", tmp_path)
    assert executor.wrap_command(1, ["runner"]) == ["nice", "-n", "10", "runner"]
    assert executor.status(1) is plugins.AttemptStatus.NOT_STARTED


def test_the_starter_starts_a_runner_with_its_token(shown: Any, tmp_path: Path) -> None:
    starter = shown["OnThisMachine"]("pool", "cluster", str(tmp_path), plugins.Starter.Options())
    order = plugins.RunnerOrder(
        name="pool-1", url="http://127.0.0.1:1", token="secret",
        command=(sys.executable, "-c", "import sys; sys.argv[1:]"),
    )  # fmt: skip
    starter.start(order)
    process = starter.processes["pool-1"]
    assert process.wait(60) == 0
    token = tmp_path / "pool-1" / "token"
    assert token.read_text() == "secret"
    assert token.stat().st_mode & 0o077 == 0
    assert starter.runners() == {}
