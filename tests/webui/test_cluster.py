"""The cluster page: nodes, slots, pools, and why each trial waits."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import paceline
from paceline._cluster.messages.runner_messages import PROTOCOL

expect = pytest.importorskip("playwright.sync_api", reason="NOT TESTED: no Playwright").expect

# Nobody listens there, so the pool `far` gets no runner.
UNREACHABLE = """
pools:
  far:
    starter: ssh
    options: {hosts: [127.0.0.1], ssh_options: [-p, "1"]}
"""

FACTS = {
    "name": "box", "key": "k", "version": paceline.__version__, "protocol": PROTOCOL,
    "python": "/p", "python_version": "3.11", "devices": ["0", "1"], "device_kind": "A100",
    "num_cores": 8, "memory_bytes": 2**36, "pool": "big",
    "labels": {"gpu": "a100", "room": "1"},
}  # fmt: skip


@pytest.fixture
def cluster(master_of: Callable[..., Any], tmp_path: Path) -> Iterator[Any]:
    """Return a master of two slots; a node of another machine falls silent at once."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "pools.yaml").write_text(UNREACHABLE)
    running = master_of(home, "--slots", 2, "--runner-timeout", 6)
    headers = {"Authorization": f"Bearer {(running.home / 'token').read_text().strip()}"}
    reply = httpx2.post(f"{running.url}/api/v1/nodes", json=FACTS, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    yield running
    running.stop()


@pytest.mark.long
def test_it_shows_who_runs_where_who_waits_and_what_is_lost_and_drained(
    cluster: Any, open_page: Callable[..., Any], code: Path
) -> None:
    client = cluster.client
    client.set_pool("default", policy="priority")
    client.drain_slot("local", 1)
    cluster.create(code, name="first", resources={"priority": 30})
    page = open_page(cluster, "/cluster")
    local = page.get_by_role("region", name="Node local")
    expect(local.get_by_role("listitem").filter(has_text="first")).to_be_visible()
    expect(local.get_by_role("listitem").filter(has_text="drained")).to_be_visible()
    box = page.get_by_role("region", name="Node box")
    expect(box.get_by_text("Lost", exact=True)).to_be_visible()
    expect(box.get_by_text("A100, pool big")).to_be_visible()
    expect(box.get_by_text("gpu=a100, room=1")).to_be_visible()
    expect(
        local.get_by_text(re.compile("^the master's machine, .+, pool default$"))
    ).to_be_visible()
    pools = page.get_by_role("table").filter(has_text="Who is next")
    expect(pools.get_by_role("row").filter(has_text="default")).to_contain_text("by priority")
    expect(pools.get_by_role("row").filter(has_text="default")).to_contain_text("1 of 1, 1 drained")

    # What comes later appears by itself, in its order.
    second = cluster.create(code, name="second", resources={"priority": 60})
    third = cluster.create(code, name="third", resources={"priority": 50})
    waiting = page.get_by_role("table").filter(has_text="Waits since")
    rows = waiting.get_by_role("row")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("third")
    expect(rows.nth(1)).to_contain_text("It waits until 1 of 1 slot is free.")
    expect(rows.nth(2)).to_contain_text("priority 60")
    expect(rows.nth(2)).to_contain_text(
        f"Trial {third.trials()[0].id} of experiment {third.id} comes before it"
    )
    waits = open_page(cluster, f"/trials/{third.trials()[0].id}").get_by_role("status")
    waits = waits.filter(has_text="It waits until")
    expect(waits).to_contain_text("It waits until 1 of 1 slot is free.")
    second.set_priority(40)
    expect(rows.nth(1)).to_contain_text("second")
    client.resume_slot("local", 1)
    expect(local.get_by_role("listitem").filter(has_text="second")).to_be_visible()


@pytest.mark.long
def test_it_shows_the_labels_and_the_memory_of_a_node_and_counts_no_drained_slots(
    cluster: Any, open_page: Callable[..., Any]
) -> None:
    facts = FACTS | {
        "name": "mig", "key": "other", "devices": ["MIG-1", "MIG-2"],
        "device_memory_bytes": [20 * 2**30, 0], "labels": {},
    }  # fmt: skip
    cluster.client._session.send("POST", "nodes", content=json.dumps(facts).encode())
    cluster.client.drain_node("mig")
    page = open_page(cluster, "/cluster")
    node = page.get_by_role("region", name="Node mig")
    expect(node.get_by_text("MIG-1, 20 GiB")).to_be_visible()
    expect(node.get_by_text("MIG-2", exact=True)).to_be_visible()
    pools = page.get_by_role("table").filter(has_text="Who is next")
    expect(pools.get_by_role("row").filter(has_text="big")).to_contain_text("2 drained")


@pytest.mark.long
def test_it_says_why_a_pool_has_no_runner(
    cluster: Any, open_page: Callable[..., Any], code: Path
) -> None:
    cluster.create(code, name="afar", resources={"pool": "far"})
    page = open_page(cluster, "/cluster")
    failure = page.get_by_role("alert").filter(has_text="Pool far")
    expect(failure).to_contain_text("No runner could be started for it: Host 127.0.0.1")
