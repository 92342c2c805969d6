"""What `runner list` shows, and what `runner forget` says; the words for slots."""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

import paceline as package
from paceline._cluster.messages.master_models import Node
from paceline._cluster.messages.runner_messages import PROTOCOL
from paceline.cli._commands import runner_and_pool_commands as _commands
from paceline.cli._commands.runner_and_pool_commands import runner_app as app
from paceline.cli._commands.slot_queue_and_quota_commands import memory_text, slots_text

FACTS = {
    "key": "k", "version": package.__version__, "protocol": PROTOCOL, "python": "/p",
    "python_version": "3.11", "device_kind": "NVIDIA H100 80GB HBM3", "num_cores": 8,
    "memory_bytes": 2**36,
}  # fmt: skip


@pytest.fixture
def with_client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets what the commands have for a client."""

    def use(**answers: Any) -> None:
        client = SimpleNamespace(**answers)
        monkeypatch.setattr(_commands, "connect", lambda: nullcontext(client))

    return use


def node(name: str, **changed: Any) -> Node:
    told = {
        "id": 1, "state": "ready", "pool": "default", "labels": {}, "devices": ["cpu"] * 4,
        "num_slots_used": 3, "registered_at": 1.0,
        **{key: FACTS[key] for key in ("device_kind", "num_cores", "memory_bytes", "version")},
        "python_version": "3.11", "address": "10.0.0.1", "attempts": [91, 92],
    }  # fmt: skip
    return Node(name=name, **told | changed)


def test_the_trials_of_a_node_are_named_and_not_counted(with_client: Callable[..., None]) -> None:
    slots = [SimpleNamespace(node="a", trial_id=trial_id) for trial_id in (12, 7, 7, None)]
    with_client(nodes=lambda include_local: [node("a"), node("b")], slots=lambda: slots)
    lines = CliRunner().invoke(app, ["list"]).stdout.splitlines()
    assert "Trials" in lines[0]
    assert "Attempts" not in lines[0]
    assert re.search(r"10\.0\.0\.1 +7, 12 ", lines[2])
    assert not re.search(r"\b9[12]\b|, 12", lines[3])


@pytest.fixture
def clustered(paceline: Any) -> Iterator[Any]:
    """Return the command line, with a master of two slots and a node of three GPUs."""
    paceline("up", "--detach", "--port", 0, "--slots", 2)
    try:
        yield paceline
    finally:
        paceline("down", "--timeout", 1)


def join(run: Any, home: Path, name: str, **facts: Any) -> None:
    """Register a node, whose runner says nothing more."""
    token = (home / "token").read_text().strip()
    url = next(line.split()[1] for line in run("status").stdout.splitlines() if "Master" in line)
    reply = httpx2.post(
        f"{url}/api/v1/nodes",
        json=FACTS | {"name": name} | facts,
        headers={"Authorization": f"Bearer {token}"},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text


def rows(run: Any, *words: str) -> list[list[str]]:
    """Return the cells of a table, its titles first."""
    lines = run(*words).stdout.splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines if set(line) - set("─ ")]


@pytest.mark.long
def test_the_whole_cluster_is_in_one_table(clustered: Any, tmp_path: Path) -> None:
    sizes = [80 * 2**30, 80 * 2**30, 0]
    join(clustered, tmp_path / "home", "box", devices=["0", "1", "2"], device_memory_bytes=sizes,
         labels={"gpu": "h100", "room": "1"})  # fmt: skip
    clustered("slot", "drain", "local", 1)
    clustered("slot", "drain", "box", 0)
    titles, local, box = rows(clustered, "runner", "list")
    assert titles[:7] == ["Node", "State", "Pool", "Labels", "Slots", "Device", "GPU memory"]
    assert local[:3] == ["local", "ready", "default"]
    assert "0 of 1, 1 drained" in local
    assert box[:4] == ["box", "away", "default", "gpu=h100, room=1"]
    assert box[4:7] == ["0 of 2, 1 drained", "NVIDIA H100 80GB HBM3", "2 x 80.0 GiB, unknown"]

    [_, *slots] = rows(clustered, "slot", "list")
    assert [slot[:4] for slot in slots if slot[0] == "box"] == [
        ["box", "0", "0", "80.0 GiB"], ["box", "1", "1", "80.0 GiB"], ["box", "2", "2", "-"],
    ]  # fmt: skip
    [_, pool] = rows(clustered, "pool", "list")
    assert pool[:4] == ["default", "fifo", "2", "0 of 3, 2 drained"]
    assert "0 of 3 in use, 2 drained" in clustered("status").stdout


@pytest.mark.long
def test_forget_says_that_a_runner_that_runs_registers_again(
    clustered: Any, tmp_path: Path
) -> None:
    join(clustered, tmp_path / "home", "box", devices=["0"])
    told = clustered("runner", "forget", "box", code=1).stderr
    assert "must be lost, have left or be drained to be forgotten.\nHint: stop its runner" in told
    clustered("runner", "drain", "box")
    told = clustered("runner", "forget", "box").stdout
    assert "is forgotten. If its runner still runs, it registers again by itself" in told
    assert "Hint: stop the runner on that machine" in told


def test_a_node_that_has_left_is_forgotten_without_a_warning(
    with_client: Callable[..., None],
) -> None:
    with_client(nodes=lambda: [node("box", state="left")], forget_node=lambda name: None)
    assert CliRunner().invoke(app, ["forget", "box"]).stdout == "The node box is forgotten.\n"


@pytest.mark.parametrize(
    ("used", "drained", "draining", "expected"),
    [
        (1, 0, 0, "1 of 4"),
        (1, 1, 0, "1 of 3, 1 drained"),
        (4, 1, 1, "3 of 3, 1 drained (1 still in use)"),
        (1, 4, 1, "0 of 0, 4 drained (1 still in use)"),
    ],
)
def test_slots_are_counted_without_drained_ones(
    used: int, drained: int, draining: int, expected: str
) -> None:
    counts = node(
        "box", num_slots_used=used, num_slots_drained=drained, num_slots_draining=draining
    )
    assert slots_text(counts, 4) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], None),
        ([0, 0], None),
        ([2**34], "16.0 GiB"),
        ([2**34, 2**34, 2**33, 0], "2 x 16.0 GiB, 8.0 GiB, unknown"),
    ],
)
def test_memory_is_told_if_any_is_known(sizes: list[int], expected: str | None) -> None:
    assert memory_text(sizes) == expected


@pytest.mark.long
def test_rules_of_a_pool_are_set_and_listed(clustered: Any) -> None:
    """Times have units; whom nobody knows cannot open a pool."""
    clustered("pool", "set", "ruled", "--silent-after", "90min", "--best-priority", "30")
    listed = clustered("pool", "list").stdout
    assert "best priority 30; silent after 5400 s" in listed, f"{listed=}"
    told = clustered("pool", "set", "ruled", "--unused-after", "soon", code=1).stderr
    assert "`--unused-after` must be" in told, f"{told=}"
    told = clustered("pool", "set", "ruled", "--open-to", "nobody", code=1).stderr
    assert "There is no user or group 'nobody'." in told, f"{told=}"
