"""What `runner list` shows."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from paceline.cli import _connection
from paceline.cli._runner_commands import app


def test_the_trials_of_a_node_are_named_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        SimpleNamespace(
            name=name, state="ready", pool="default", num_slots_used=3, devices=["cpu"] * 4,
            device_kind="CPU", memory_bytes=1, address="10.0.0.1", attempts=[91, 92], seen_at=None,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    slots = [SimpleNamespace(node="a", trial_id=trial_id) for trial_id in (12, 7, 7, None)]
    client = SimpleNamespace(nodes=lambda: nodes, slots=lambda: slots)
    monkeypatch.setattr(_connection, "connect", lambda: nullcontext(client))
    lines = CliRunner().invoke(app, ["list"]).stdout.splitlines()
    assert "Trials" in lines[0]
    assert "Attempts" not in lines[0]
    assert re.search(r"10\.0\.0\.1 +7, 12 ", lines[2])
    assert not re.search(r"\b9[12]\b|, 12", lines[3])
