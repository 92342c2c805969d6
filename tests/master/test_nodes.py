"""Nodes: registration, polls, placement, losses; runners are played by the tests."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from sqlalchemy import insert, select, update

import paceline
from paceline._cluster.master.experiments import storage_calls as _storage_calls
from paceline._cluster.master.nodes.node_registry import Nodes
from paceline._cluster.master.nodes.node_work import work_for
from paceline._cluster.master.nodes.registration_checks import NodeRefusedError
from paceline._cluster.master.store import tables
from paceline._cluster.master.waiting import Wakeups
from paceline._cluster.messages.runner_messages import PROTOCOL, NodeFacts, NodePoll

LEASE_S = 60.0


class FakeRunner:
    """What a node runner sends, one request a call."""

    def __init__(self, master: Any, name: str, num_slots: int = 1, **facts: Any) -> None:
        self.master = master
        self.headers: dict[str, str] = {}
        self.attempts: list[int] = []
        self.number = 0
        self.facts: dict[str, Any] = {
            "name": name, "key": f"key of {name}", "version": paceline.__version__,
            "protocol": PROTOCOL, "python": "/opt/python", "python_version": "3.11.7",
            "devices": ["cpu"] * num_slots, "device_kind": "some CPU", "num_cores": 8,
            "memory_bytes": 2**34, "labels": {"room": "1"},
        } | facts  # fmt: skip
        self.session: dict[str, Any] = {}

    def register(self, **changed: Any) -> httpx2.Response:
        self.facts |= changed
        reply = self.master.http.post("/nodes", json=self.facts, headers=self.headers)
        if reply.status_code == 200:
            self.session = reply.json()
        return reply

    def ask(self, **changed: Any) -> httpx2.Response:
        self.number += 1
        body = {
            "key": self.facts["key"], "session": self.session["session"], "number": self.number,
            "attempts": self.attempts, "alive": self.attempts,
        }  # fmt: skip
        path = f"/nodes/{self.session['node_id']}/poll"
        return self.master.http.post(path, json=body | changed, headers=self.headers)

    def work(self, **changed: Any) -> Any:
        reply = self.ask(**changed)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def take(self) -> list[int]:
        """Poll, and have what is launched from then on; return it."""
        launched = [launch["spec"]["attempt_id"] for launch in self.work()["launches"]]
        self.attempts += launched
        return launched


@pytest.fixture
def master(make_master: Callable[..., Any]) -> Any:
    """Return a master without slots of its own."""
    return make_master(num_slots=0)


@pytest.fixture
def join(master: Any) -> Callable[..., FakeRunner]:
    """Return a function that registers a node and polls once."""

    def make(name: str, num_slots: int = 1, **facts: Any) -> FakeRunner:
        runner = FakeRunner(master, name, num_slots, **facts)
        assert runner.register().status_code == 200
        runner.work()
        return runner

    return make


def run(master: Any) -> None:
    """Let the reconciler place attempts and look after them once."""
    master.schedule()
    master.core.reconciler._watch_attempts()


def attempts(master: Any) -> list[Any]:
    with master.core.database.read() as connection:
        query = select(tables.attempts).order_by(tables.attempts.c.id)
        return list(connection.execute(query))


def nodes(master: Any) -> dict[str, Any]:
    return {node["name"]: node for node in master.http.get("/nodes").json()}


def refused(reply: httpx2.Response, status: int, code: str) -> str:
    assert (reply.status_code, reply.json().get("code")) == (status, code), reply.text
    return str(reply.json())


def test_a_node_is_listed_with_what_it_said(master: Any, join: Callable[..., FakeRunner]) -> None:
    join("box", 2, pool="big")
    [node] = master.http.get("/nodes").json()
    assert (node["name"], node["state"], node["pool"]) == ("box", "ready", "big")
    assert (node["devices"], node["labels"]) == (["cpu", "cpu"], {"room": "1"})
    assert (node["device_kind"], node["memory_bytes"]) == ("some CPU", 2**34)
    assert [slot["node"] for slot in master.http.get("/slots").json()] == ["box", "box"]
    assert master.http.get("/master").json()["num_slots"] == 2


def test_the_memory_of_devices_is_listed_where_it_is_known(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    join("old", 2)
    join("box", 3, device_memory_bytes=[80 * 2**30, 0, 2**30])
    assert nodes(master)["old"]["device_memory_bytes"] == []
    assert nodes(master)["box"]["device_memory_bytes"] == [80 * 2**30, 0, 2**30]
    memory = [(slot["node"], slot["memory_bytes"]) for slot in master.http.get("/slots").json()]
    assert memory == [
        ("old", None), ("old", None), ("box", 80 * 2**30), ("box", None), ("box", 2**30),
    ]  # fmt: skip


def test_the_machine_of_the_master_is_listed_if_it_is_asked_for(
    make_master: Callable[..., Any],
) -> None:
    master = make_master(num_slots=2)
    FakeRunner(master, "box").register()

    def local() -> Any:
        [first, second] = master.http.get("/nodes?include_local=true").json()
        assert (first["name"], second["name"]) == ("local", "box")
        return first

    # Programs that read the list of nodes find no other ones in it than before.
    assert list(nodes(master)) == ["box"]
    assert (local()["state"], local()["pool"], local()["devices"]) == (
        "ready", "default", ["cpu", "cpu"],
    )  # fmt: skip
    assert local()["version"] == paceline.__version__
    assert local()["device_kind"]
    assert min(local()["num_cores"], local()["memory_bytes"], local()["seen_at"]) > 0
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    master.schedule()
    assert (local()["num_slots_used"], local()["attempts"]) == (1, [1])
    assert master.http.post("/nodes/local/slots/0/drain", json={}).status_code == 204
    found = local()
    counts = (found["state"], found["num_slots_drained"], found["num_slots_draining"])
    assert counts == ("ready", 1, 1)
    assert master.http.post("/nodes/local/drain", json={}).status_code == 204
    assert local()["state"] == "draining"
    end = {"reason": "exited", "code": 0, "signal": None, "time": 1.0}
    assert master.attempt(1, "end", **end).status_code == 204
    assert local()["state"] == "drained"


def test_a_master_without_slots_is_no_node(master: Any) -> None:
    assert master.http.get("/nodes?include_local=true").json() == []


@pytest.mark.parametrize(
    ("mine", "wrong", "told"),
    [
        ("2.5.1", {"version": "2.3.9"}, "at most one minor version behind the master, 2.5.1"),
        ("2.5.1", {"version": "2.6.0"}, "newer than the master, 2.5.1. Hint: upgrade the master"),
        ("2.0.0", {"version": "1.9.0"}, "at most one minor version behind"),
        ("2.5.1", {"version": "somewhat"}, "must have the version of the master"),
        ("2.5.1", {"version": "2.5.1\x1b[31m"}, "must have the version of the master"),
        ("2.5.1", {"version": f"2.{'5' * 9999}"}, "must have the version of the master"),
        ("2.5.1", {"version": "2.5.1", "protocol": PROTOCOL + 1}, f"speaks protocol {PROTOCOL}"),
    ],
)
def test_a_runner_of_another_version_is_refused_by_a_message_that_says_which(
    master: Any, monkeypatch: pytest.MonkeyPatch, mine: str, wrong: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(paceline, "__version__", mine, raising=False)
    found = refused(FakeRunner(master, "box").register(**wrong), 409, "other_version")
    assert told in found
    assert wrong["version"][:5] in found
    assert "\x1b" not in found
    assert len(found) < 999
    assert f"pip install paceline=={mine}" in found
    assert nodes(master) == {}


@pytest.mark.parametrize("version", ["2.4.0", "2.4.9.dev3", "2.5.0", "2.5.2"])
def test_a_runner_one_minor_version_behind_works(
    master: Any, monkeypatch: pytest.MonkeyPatch, join: Callable[..., FakeRunner], version: str
) -> None:
    monkeypatch.setattr(paceline, "__version__", "2.5.1", raising=False)
    box = join("box", version=version)
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    run(master)
    assert box.take() == [1]


def test_a_runner_that_is_too_old_after_an_upgrade_of_the_master_finishes_and_gets_no_more(
    master: Any, monkeypatch: pytest.MonkeyPatch, join: Callable[..., FakeRunner]
) -> None:
    """It is drained with a reason that says what to do, also when it has to register again."""
    box = join("box", 2)
    for _ in range(2):
        master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    run(master)
    assert box.take() == [1, 2]
    monkeypatch.setattr(paceline, "__version__", "0.9.0", raising=False)
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    for step in (box.work, box.register, box.work):
        step()
        run(master)
        assert [one.state for one in attempts(master)] == ["PENDING"] * 2
    assert box.session["session"] == 2
    [waiting] = master.http.get("/queue").json()
    assert waiting["reason"] == "pausing"
    assert "one minor version behind the master, 0.9.0. Hint: pip install" in waiting["detail"]
    assert "version: the runner has Paceline 0.1.0" in nodes(master)["box"]["problem"]
    # One without work is refused, and so is another machine by this name.
    refused(FakeRunner(master, "idle", version="0.1.0").register(), 409, "other_version")
    refused(FakeRunner(master, "box", version="0.1.0", key="k").register(), 409, "other_version")
    # The upgraded runner is another session of the same node, and gets work at once.
    assert box.register(version="0.9.0").status_code == 200
    box.work()
    run(master)
    assert nodes(master)["box"]["problem"] == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a b"},
        {"name": "local"},
        {"pool": ""},
        {"devices": []},
        {"key": 5},
        {"device_memory_bytes": [1, 2]},
        {"device_memory_bytes": [-1]},
        {"device_memory_bytes": [2**63]},
    ],
)
def test_facts_that_cannot_be_are_refused(master: Any, wrong: dict[str, Any]) -> None:
    assert FakeRunner(master, "box").register(**wrong).status_code in (409, 422)
    assert nodes(master) == {}


def test_another_machine_gets_a_name_only_once_its_node_is_lost(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    first = join("box")
    other = FakeRunner(master, "box", key="another key")
    refused(other.register(), 409, "name_taken")
    master.core.nodes.presence.leases.advance(LEASE_S + 1)
    assert nodes(master)["box"]["state"] == "lost"
    assert other.register().status_code == 200
    refused(first.ask(), 404, "unknown_node")
    assert other.work()["wanted"] == []


def test_a_session_ends_when_the_same_runner_registers_again(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner = join("box")
    before = dict(runner.session)
    assert runner.register().status_code == 200
    assert runner.session["session"] == before["session"] + 1
    refused(runner.ask(session=before["session"]), 409, "session_over")
    # A master whose database was restored has an earlier number: the runner registers again.
    refused(runner.ask(session=runner.session["session"] + 1), 404, "unknown_node")
    runner.work()


def test_attempts_go_to_the_fitting_node_with_the_fewest_free_slots(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    large, small = join("large", 4), join("small", 1)
    master.create(searcher={"name": "random", "metric": "loss", "max_trials": 3})
    run(master)
    assert (small.take(), large.take()) == ([1], [2, 3])
    assert [row.slots for row in attempts(master)] == [[0], [0], [1]]


def test_a_launch_says_what_fits_the_node(master: Any, join: Callable[..., FakeRunner]) -> None:
    runner = join("box", 2)
    master.create(environment={"secrets": {"KEY": "value-of-the-key"}})
    run(master)
    launch = runner.work()["launches"][0]
    assert (launch["spec"]["python"], launch["spec"]["num_threads"]) == ("/opt/python", 4)
    assert (launch["info"]["agent_id"], launch["spec"]["home"]) == ("box", None)
    assert launch["secrets"] == {"KEY": "value-of-the-key"}
    assert "value-of-the-key" not in str(launch["spec"]) + str(launch["info"])


def test_a_launch_is_sent_until_the_node_has_it(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner = join("box")
    master.create()
    run(master)
    for _ in range(3):  # as if answers were lost
        assert [launch["spec"]["attempt_id"] for launch in runner.work()["launches"]] == [1]
    runner.attempts = [1]
    work = runner.work()
    assert (work["launches"], work["wanted"]) == ([], [1])


def test_trials_of_a_pool_wait_for_its_nodes_and_hold_up_no_others(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    reply = master.http.post(
        "/experiments",
        json={"config": {"entrypoint": "x", "searcher": {"name": "single", "metric": "l"},
                         "resources": {"pool": "big"}}},
    )  # fmt: skip
    assert "paceline runner --pool big" in refused(reply, 409, "no_such_pool")
    big = join("big", pool="big")
    single = {"name": "single", "metric": "loss"}
    for _ in range(2):
        master.create(searcher=single, resources={"pool": "big"}, hyperparameters={})
    other = join("other")
    master.create(searcher=single, hyperparameters={})
    run(master)
    assert (big.take(), other.take()) == ([1], [2])
    assert attempts(master)[1].trial_id == 3
    [waiting] = master.http.get("/queue").json()
    assert (waiting["trial_id"], waiting["reason"]) == (2, "slots_in_use")


def test_an_attempt_that_its_node_has_no_more_ends_and_is_not_started_there_again(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner = join("box")
    master.create()
    run(master)
    assert runner.take() == [1]
    runner.work()
    # Its disk is gone, and its runner starts anew.
    runner.attempts = []
    runner.register()
    assert runner.work()["launches"] == []
    assert attempts(master)[0].exit["reason"] == "runner_lost"
    run(master)
    assert runner.take() == [2]
    assert [row.number for row in attempts(master)] == [1, 2]


def test_a_node_is_told_once_of_the_end_of_an_attempt(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner = join("box")
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    run(master)
    assert runner.take() == [1]
    before = runner.work()
    run(master)
    assert runner.work() == before
    end = {"reason": "exited", "code": 0, "signal": None, "time": 1.0}
    assert master.attempt(1, "end", **end).status_code == 204
    run(master)
    # A poll that waits for another version than the last one is answered.
    told = runner.work()
    assert (told["version"], told["wanted"]) == (before["version"] + 1, [])
    run(master)
    assert runner.work() == told


def test_a_poll_that_is_overtaken_ends_nothing(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner = join("box")
    master.create()
    run(master)
    assert runner.take() == [1]
    runner.work()
    assert master.attempt(1, "records", batches=[]).status_code == 200
    # Sent before the one above, it arrives now.
    runner.work(number=1, attempts=[], alive=[])
    assert attempts(master)[0].exit is None


def test_a_lost_node_gets_nothing_and_its_attempts_go_on_elsewhere_at_once(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner = join("box")
    master.create()
    run(master)
    assert runner.take() == [1]
    assert master.attempt(1, "records", batches=[]).status_code == 200
    master.core.nodes.presence.leases.advance(LEASE_S + 1)
    other = join("other")
    run(master)
    # The attempt's own runner was heard a moment ago: the node's runner alone is gone.
    assert attempts(master)[0].exit is None
    master.core.leases.advance(LEASE_S + 1)
    run(master)
    assert attempts(master)[0].exit["reason"] == "runner_lost"
    assert master.attempt(1, "records", batches=[]).json()["code"] == "attempt_over"
    run(master)
    assert other.take() == [2]


def test_a_node_that_comes_back_gets_slots_once_nothing_that_was_taken_from_it_is_alive(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner = join("box")
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    run(master)
    assert runner.take() == [1]
    runner.work()
    run(master)
    for leases in (master.core.nodes.presence.leases, master.core.leases):
        leases.advance(LEASE_S + 1)
    run(master)
    work = runner.work()
    assert (work["wanted"], work["strays"]) == ([], True)
    run(master)
    assert len(attempts(master)) == 1
    runner.attempts = []
    assert runner.work()["strays"] is False
    run(master)
    assert runner.take() == [2]


def test_a_node_that_leaves_without_attempts_has_left_at_once_and_may_come_back(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner = join("box", key="one machine")
    runner.work(is_leaving=True, attempts=[3])
    assert nodes(master)["box"]["state"] == "ready"
    runner.work(is_leaving=True)
    assert nodes(master)["box"]["state"] == "left"
    # Another machine may have the name.
    runner = join("box", key="another machine")
    assert nodes(master)["box"]["state"] == "ready"
    runner.work()
    assert nodes(master)["box"]["state"] == "ready"


def test_a_drained_node_gets_nothing_and_what_runs_is_asked_to_leave(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner = join("box", 2)
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    run(master)
    runner.take()
    assert master.http.post("/nodes/box/drain", json={}).status_code == 204
    assert nodes(master)["box"]["state"] == "draining"
    drained = {"num_slots_used": 1, "num_slots_drained": 2, "num_slots_draining": 1}
    [pool] = [one for one in master.http.get("/pools").json() if one["num_slots"]]
    for found in (nodes(master)["box"], pool, master.http.get("/master").json()):
        assert found | drained == found
    assert pool["num_slots"] == 2
    assert attempts(master)[0].preempt_reason == "the node box is drained"
    end = {"reason": "exited", "code": 0, "signal": None, "time": 1.0}
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    assert master.attempt(1, "end", **end).status_code == 204
    run(master)
    assert len(attempts(master)) == 1
    assert nodes(master)["box"]["state"] == "drained"
    assert (
        nodes(master)["box"] | drained | {"num_slots_used": 0, "num_slots_draining": 0}
        == (nodes(master)["box"])
    )
    slots = master.http.get("/slots").json()
    assert [slot["is_drained"] for slot in slots] == [slot["node"] == "box" for slot in slots]
    assert any(slot["node"] == "box" for slot in slots)
    assert master.http.post("/nodes/box/resume").status_code == 204
    run(master)
    assert len(attempts(master)) > 1
    told = refused(master.http.delete("/nodes/box"), 409, "in_use")
    assert "Hint: `paceline runner drain box`, and wait until they have left." in told
    refused(master.http.post("/nodes/nobody/drain", json={}), 404, "not_found")


def test_what_runs_on_a_node_may_end_there(master: Any, join: Callable[..., FakeRunner]) -> None:
    join("box")
    master.create()
    run(master)
    assert master.http.post("/nodes/box/drain", json={"finish": True}).status_code == 204
    assert attempts(master)[0].preempt_reason is None


def test_a_lost_node_is_forgotten_and_registers_again(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner = join("box")
    master.core.nodes.presence.leases.advance(LEASE_S + 1)
    assert master.http.delete("/nodes/box").status_code == 204
    assert nodes(master) == {}
    refused(runner.ask(), 404, "unknown_node")
    first = runner.session["node_id"]
    runner.register()
    assert runner.session["node_id"] > first  # attempts of the first one name it


def test_a_master_that_starts_again_knows_its_nodes_and_what_they_run(
    make_master: Callable[..., Any],
) -> None:
    first = make_master(num_slots=0)
    runner = FakeRunner(first, "box")
    runner.register()
    runner.work()
    first.create()
    run(first)
    assert runner.take() == [1]
    assert first.attempt(1, "records", batches=[]).status_code == 200
    first.close()
    second = make_master(num_slots=0)
    runner.master = second
    assert nodes(second)["box"]["state"] == "away"
    run(second)
    assert [row.exit for row in attempts(second)] == [None]
    work = runner.work()
    assert (work["wanted"], work["launches"]) == ([1], [])
    assert nodes(second)["box"]["state"] == "ready"


def test_a_node_that_has_ended_for_its_starter_is_lost_once_its_connection_is_closed(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    runner, registry = join("box"), master.core.nodes
    node_id = runner.session["node_id"]
    registry.presence.note_ended(node_id)
    assert nodes(master)["box"]["state"] == "ready"
    poll = NodePoll(
        key=runner.facts["key"], session=runner.session["session"], number=runner.number,
        attempts=[], alive=[],
    )  # fmt: skip
    registry.presence.note_cut_off(node_id, poll)
    assert nodes(master)["box"]["state"] == "away"
    registry.presence.note_ended(node_id)
    assert nodes(master)["box"]["state"] == "left"
    # It was not so: it polls.
    runner.work()
    assert nodes(master)["box"]["state"] == "ready"


# ---- a stolen token -----------------------------------------------------------------------


@pytest.fixture
def token_of(master: Any) -> Callable[..., dict[str, str]]:
    """Return a function that makes a token and returns its header."""

    def make(name: str, **more: Any) -> dict[str, str]:
        body = {"name": name, "scope": "runner"} | more
        reply = master.http.post("/tokens", json=body)
        assert reply.status_code == 201, reply.text
        return {"Authorization": f"Bearer {reply.json()['secret']}"}

    return make


def test_the_token_of_one_node_is_of_no_use_for_another(
    master: Any, token_of: Callable[..., dict[str, str]]
) -> None:
    victim, thief = FakeRunner(master, "victim"), FakeRunner(master, "thief")
    victim.headers, thief.headers = token_of("victim"), token_of("thief")
    for runner in (victim, thief):
        assert runner.register().status_code == 200
        runner.work()
    thief.session = victim.session
    refused(thief.ask(key=victim.facts["key"]), 403, "other_token")
    thief.facts |= {"name": "victim"}
    refused(thief.register(), 409, "name_taken")
    thief.facts |= {"name": "victim", "key": victim.facts["key"]}
    refused(thief.register(), 409, "other_token")
    victim.work()


def test_a_runner_token_opens_nothing_of_an_attempt_but_what_its_launch_brings(
    master: Any, token_of: Callable[..., dict[str, str]]
) -> None:
    runner = FakeRunner(master, "box")
    runner.headers = token_of("box")
    runner.register()
    runner.work()
    master.create()
    run(master)
    token = runner.work()["launches"][0]["spec"]["token"]
    for path in ("/attempts/1/records", "/attempts/1/logs", "/attempts/1/end"):
        reply = master.http.post(path, json={}, headers=runner.headers)
        refused(reply, 403, "scope_too_low")
    for path in ("/experiments", "/experiments/1/config", "/tokens", "/nodes", "/trials/1/logs"):
        refused(master.http.get(path, headers=runner.headers), 403, "scope_too_low")
    own = {"Authorization": f"Bearer {token}"}
    assert master.http.post(
        "/attempts/1/records", json={"batches": []}, headers=own
    ).status_code == 200  # fmt: skip
    refused(master.http.post("/attempts/2/end", json={}, headers=own), 403, "scope_too_low")


def test_expired_and_revoked_tokens_of_runners_open_nothing(
    master: Any, token_of: Callable[..., dict[str, str]]
) -> None:
    runner = FakeRunner(master, "box")
    runner.headers = token_of("box")
    runner.register()
    runner.work()
    [row] = [token for token in master.http.get("/tokens").json() if token["name"] == "box"]
    assert master.http.delete(f"/tokens/{row['id']}").status_code == 204
    refused(runner.ask(), 401, "token_revoked")
    refused(runner.register(), 401, "token_revoked")
    expired = FakeRunner(master, "other")
    expired.headers = token_of("short", expires_in_s=0.001)
    refused(expired.register(), 401, "token_expired")
    # A new token takes the node over from one that is of no use any more.
    runner.headers = token_of("next")
    assert runner.register().status_code == 200
    runner.work()


def test_a_token_for_a_node_registers_no_other_name(
    master: Any, token_of: Callable[..., dict[str, str]]
) -> None:
    runner = FakeRunner(master, "evil")
    runner.headers = token_of("for-box", node="box")
    told = refused(runner.register(), 403, "other_node")
    assert "must register as 'box', the only node of its token 'for-box', but got 'evil'" in told
    assert "`--name box`" in told
    assert nodes(master) == {}
    assert runner.register(name="box").status_code == 200


@pytest.mark.parametrize("thief_has", ["the token", "an unbound token"])
def test_the_name_of_a_node_with_a_token_for_it_stays_with_its_machine_until_it_is_forgotten(
    master: Any, token_of: Callable[..., dict[str, str]], thief_has: str
) -> None:
    box, thief = FakeRunner(master, "box"), FakeRunner(master, "box", key="another directory")
    box.headers = token_of("box", node="box")
    thief.headers = box.headers if thief_has == "the token" else token_of("any")
    box.register()
    box.work()
    refused(thief.register(), 409, "name_taken")
    box.work(is_leaving=True)
    told = refused(thief.register(), 409, "name_taken")
    assert "`--dir`" in told
    assert "`paceline runner forget box`" in told
    master.core.nodes.presence.leases.advance(10 * LEASE_S)
    refused(thief.register(), 409, "name_taken")
    # Its own machine comes back.
    assert box.register().status_code == 200
    box.work(is_leaving=True)
    # The directory is lost, and the owner says so.
    assert master.http.delete("/nodes/box").status_code == 204
    box.facts["key"] = "a new directory"
    assert box.register().status_code == 200
    refused(thief.register(), 409, "name_taken")


@pytest.mark.parametrize("token", [{"node": "box"}, {"pool": "default"}])
def test_the_name_stays_with_its_machine_when_the_token_for_it_is_over(
    master: Any, token_of: Callable[..., dict[str, str]], token: dict[str, str]
) -> None:
    box, thief = FakeRunner(master, "box"), FakeRunner(master, "box", key="another directory")
    box.headers = token_of("box", node="box")
    box.register()
    box.work(is_leaving=True)
    [old] = [one for one in master.http.get("/tokens").json() if one["name"] == "box"]
    assert master.http.delete(f"/tokens/{old['id']}").status_code == 204
    thief.headers = token_of("thief", **token)
    refused(thief.register(), 409, "name_taken")
    box.headers = token_of("next", node="box")
    assert box.register().status_code == 200


def test_the_token_for_a_node_is_renewed_while_it_works(
    master: Any, token_of: Callable[..., dict[str, str]]
) -> None:
    box = FakeRunner(master, "box")
    box.headers = token_of("box", node="box")
    box.register()
    box.work()
    box.headers = token_of("next", node="box")
    refused(box.ask(), 403, "other_token")
    assert box.register().status_code == 200
    box.work()


def test_the_token_for_a_node_takes_its_name_from_another_machine_once_that_is_lost(
    master: Any, token_of: Callable[..., dict[str, str]]
) -> None:
    clone, box = FakeRunner(master, "box", key="of a clone"), FakeRunner(master, "box")
    clone.headers, box.headers = token_of("any"), token_of("box", node="box")
    clone.register()
    clone.work()
    told = refused(box.register(), 409, "name_taken")
    assert "revoke its token or `paceline runner drain box`" in told
    assert "`--name`" not in told
    master.core.nodes.presence.leases.advance(LEASE_S + 1)
    assert box.register().status_code == 200
    refused(clone.register(), 409, "name_taken")


@pytest.mark.parametrize(
    ("facts", "where"),
    [
        ({"pool": "other"}, "is in 'other'"),
        ({}, "is in 'default'"),
        ({"labels": {"gpu": "h200"}}, "is in 'other' by its labels"),
    ],
)
def test_a_token_for_a_pool_registers_no_node_in_another_one(
    master: Any, token_of: Callable[..., dict[str, str]], facts: dict[str, Any], where: str
) -> None:
    for name, gpu in (("big", "a100"), ("other", "h200")):
        body = {"policy": "fifo", "labels": {"gpu": gpu}}
        assert master.http.put(f"/pools/{name}", json=body).status_code == 204
    runner = FakeRunner(master, "box", **facts)
    runner.headers = token_of("for-big", pool="big")
    told = refused(runner.register(), 403, "other_pool")
    assert f"must be in 'big', the only pool of its token 'for-big', but {where}." in told
    assert "Hint: start it with `--pool big`" in told
    assert nodes(master) == {}
    # Either way leads into its pool, with any name.
    assert runner.register(pool="big").status_code == 200
    by_labels = FakeRunner(master, "barn", labels={"gpu": "a100"})
    by_labels.headers = runner.headers
    assert by_labels.register().status_code == 200


def test_a_token_for_a_pool_gets_no_name_of_a_lost_node_of_another_pool_and_its_attempts(
    master: Any, token_of: Callable[..., dict[str, str]], join: Callable[..., FakeRunner]
) -> None:
    victim = join("box")
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    run(master)
    assert victim.work()["launches"] != []
    master.core.nodes.presence.leases.advance(LEASE_S + 1)
    thief = FakeRunner(master, "box", key="another key", pool="big")
    thief.headers = token_of("for-big", pool="big")
    told = refused(thief.register(), 409, "name_taken")
    assert "There is a lost node 'box' in the pool 'default'" in told
    thief.headers = token_of("for-box", pool="big", node="box")
    assert "`--name`" not in refused(thief.register(), 409, "name_taken")
    thief.headers = token_of("for-big-too", pool="big")
    # The machine itself may go to the other pool.
    assert thief.register(key=victim.facts["key"]).status_code == 200


def test_a_token_for_the_pool_default_is_not_led_into_another_one_by_labels(
    master: Any, token_of: Callable[..., dict[str, str]]
) -> None:
    body = {"policy": "fifo", "labels": {"gpu": "a100"}}
    assert master.http.put("/pools/big", json=body).status_code == 204
    runner = FakeRunner(master, "box", labels={"gpu": "a100"})
    runner.headers = token_of("for-default", pool="default")
    told = refused(runner.register(), 403, "other_pool")
    assert "is in 'big' by its labels. Hint: start it without the labels of that pool" in told
    assert runner.register(labels={}).status_code == 200


def test_a_token_for_a_pool_holds_when_the_labels_of_pools_change(
    master: Any, token_of: Callable[..., dict[str, str]], join: Callable[..., FakeRunner]
) -> None:
    """What runs there ends there; then the runner is refused, and ends."""
    runner, free = FakeRunner(master, "box", labels={"gpu": "a100"}), join("free")
    runner.headers = token_of("for-default", pool="default")
    assert runner.register().status_code == 200
    runner.work()
    single = {"searcher": {"name": "single", "metric": "loss"}, "hyperparameters": {}}
    for _ in range(2):
        master.create(**single)
    run(master)
    assert (runner.take(), free.take()) in (([1], [2]), ([2], [1]))
    [held] = runner.attempts
    body = {"policy": "fifo", "labels": {"gpu": "a100"}}
    assert master.http.put("/pools/big", json=body).status_code == 204
    slots = {one["node"]: one for one in master.http.get("/slots").json() if one["node"] != "local"}
    assert (slots["box"]["pool"], slots["box"]["is_drained"]) == ("default", True)
    reply = master.http.post(
        "/experiments",
        json={"config": {"entrypoint": "x", "searcher": single["searcher"],
                         "resources": {"pool": "big"}}},
    )  # fmt: skip
    refused(reply, 409, "no_such_pool")
    # As it is started without labels, it may go to both.
    join("big", labels={"gpu": "a100"})
    master.create(**single, resources={"pool": "big"})
    master.create(**single)
    assert runner.work()["wanted"] == [held]
    # As when its connection was lost.
    assert runner.register().status_code == 200
    assert runner.work()["wanted"] == [held]
    end = {"reason": "exited", "code": 0, "signal": None, "time": 1.0}
    assert master.attempt(held, "end", **end).status_code == 204
    run(master)
    runner.attempts = []
    told = refused(runner.ask(), 403, "other_pool")
    assert "but is in 'big' by its labels" in told
    refused(runner.register(), 403, "other_pool")
    run(master)
    placed = {row.trial_id: row.node_id for row in attempts(master) if row.exit is None}
    assert runner.session["node_id"] not in placed.values()
    assert len(placed) == 2
    # The labels are as before, and so is the node.
    assert master.http.delete("/pools/big").status_code == 204
    assert runner.register().status_code == 200
    runner.work()
    run(master)
    assert runner.take() != []


def test_a_node_whose_pool_its_labels_chose_gets_nothing_after_they_choose_no_more(
    master: Any, token_of: Callable[..., dict[str, str]]
) -> None:
    body = {"policy": "fifo", "labels": {"gpu": "a100"}}
    assert master.http.put("/pools/big", json=body).status_code == 204
    runner = FakeRunner(master, "box", labels={"gpu": "a100"})
    runner.headers = token_of("for-big", pool="big")
    assert runner.register().status_code == 200
    runner.work()
    single = {"searcher": {"name": "single", "metric": "loss"}, "hyperparameters": {}}
    master.create(**single, resources={"pool": "big"})
    assert master.http.delete("/pools/big").status_code == 204
    run(master)
    assert attempts(master) == []
    assert "by its labels" not in refused(runner.ask(), 403, "other_pool")


def test_a_poll_of_an_idle_node_asks_the_database_once(
    master: Any,
    join: Callable[..., FakeRunner],
    token_of: Callable[..., dict[str, str]],
    count_reads: Callable[..., Any],
) -> None:
    box = join("box", pool="big")
    box.headers = token_of("big", pool="big")
    box.register()
    version = box.work()["version"]
    with count_reads(master.core.database._reader._engine) as reads:
        answered = box.work(after=version, wait_s=0.05)
    assert answered["version"] == version
    # The other one begins the transaction.
    assert reads.num_statements == 2


def test_lost_nodes_are_forgotten_after_a_while_but_for_those_that_are_drained_or_used(
    master: Any, token_of: Callable[..., dict[str, str]], join: Callable[..., FakeRunner]
) -> None:
    """A node whose token is over is kept for minutes, another one for days.

    One that a token is for is kept as long as that can be used.
    """
    boxes = {}
    for name in ("ended", "away", "drained", "slot", "bound", "over", "here"):
        boxes[name] = FakeRunner(master, name)
        bound = {"node": name} if name in ("bound", "over") else {}
        boxes[name].headers = token_of(name, **bound)
        boxes[name].register()
        boxes[name].work()
    for token in master.http.get("/tokens").json():
        if token["name"] in ("ended", "over"):
            boxes[token["name"]].work(is_leaving=True)
            assert master.http.delete(f"/tokens/{token['id']}").status_code == 204
    assert master.http.post("/nodes/drained/drain", json={}).status_code == 204
    assert master.http.post("/nodes/slot/slots/0/drain", json={}).status_code == 204
    for name in ("away", "drained", "slot", "bound"):
        boxes[name].work(is_leaving=True)
    registry = master.core.nodes

    def later(seconds: float) -> set[str]:
        """Let so much time be over for all, and return the nodes that are listed."""
        master.core.lost_nodes._started_at -= seconds
        for heard in registry.presence._heard.values():
            heard.seen_at -= seconds
        for id_, node in registry._nodes.items():
            assert node.seen_at is not None
            moved = replace(node, registered_at=node.registered_at - seconds)
            registry._nodes[id_] = moved
        master.core.lost_nodes._next_look = 0.0
        master.schedule()
        return set(nodes(master))

    assert later(300) == {"ended", "over", "away", "drained", "slot", "bound", "here"}
    assert later(400) == {"away", "drained", "slot", "bound", "here"}
    assert later(8 * 24 * 3600) == {"drained", "slot", "bound", "here"}


@pytest.mark.parametrize("is_leaving", [True, False])
def test_a_node_whose_attempt_the_system_has_ended_gets_none_until_it_polls(
    is_leaving: bool, master: Any, join: Callable[..., FakeRunner]
) -> None:
    box = join("box", 1)
    master.create()
    run(master)
    [attempt_id] = box.take()
    end = {"reason": "exited", "code": 0, "signal": None, "time": 1.0, "is_leaving": is_leaving}
    assert master.attempt(attempt_id, "end", **end).status_code == 204
    run(master)
    assert len(attempts(master)) == (1 if is_leaving else 2)
    box.attempts = []
    # Had it been told to end, it would say so now.
    box.work()
    run(master)
    assert len(attempts(master)) == 2
    assert box.take() == [2]


def test_a_poll_that_waits_does_not_say_that_a_node_stays_whose_attempt_was_ended(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    box = join("box", 1)
    registry, node_id = master.core.nodes, box.session["node_id"]

    def is_open() -> bool:
        return registry.slots()[-1].is_open

    box.number += 1
    waiting = NodePoll(
        key=box.facts["key"], session=box.session["session"], number=box.number, attempts=[],
        alive=[],
    )  # fmt: skip
    core = master.core
    registry.hear(node_id, waiting, None)
    work_for(core.database, core.changes, registry, node_id, waiting)
    assert is_open()
    registry.presence.doubt(node_id)
    # Its answer is made now; it was sent before the system ended the attempt.
    registry.hear(node_id, waiting, None)
    work_for(core.database, core.changes, registry, node_id, waiting)
    assert not is_open()
    box.work()
    assert is_open()


def test_the_next_master_knows_who_has_left_and_when_others_were_heard(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    gone, back, here = join("gone"), join("back"), join("here")
    gone.work(is_leaving=True)
    back.work(is_leaving=True)
    back.work()
    registry = master.core.nodes
    registry.presence.leases.advance(LEASE_S + 1)
    master.core.lost_nodes._next_look = 0.0
    master.schedule()
    seen = {node.name: registry.seen_at(node.id) for node in registry.all()}
    assert all(seen[node.name] > node.registered_at for node in registry.all())

    def next_master() -> dict[str, tuple[bool, bool, float | None]]:
        nodes = Nodes(master.core.database, "cluster", master.core.tokens, Wakeups())
        present = {one.node_id for one in nodes.slots()}
        return {
            node.name: (
                nodes.presence.has_left(node.id),
                node.id in present,
                nodes.seen_at(node.id),
            )
            for node in nodes.all()
            if nodes.presence.heard_at(node.id) is None
        }

    assert next_master() == {
        "gone": (True, False, seen["gone"]),
        "back": (False, True, seen["back"]),
        "here": (False, True, seen["here"]),
    }
    # Whoever registers again has come back.
    gone.register()
    here.work(is_leaving=True)
    master.core.database.write(lambda _: None).result()
    assert {name: left for name, (left, _, _) in next_master().items()} == {
        "gone": False, "back": False, "here": True,
    }  # fmt: skip


def test_the_name_of_a_node_that_is_forgotten_stays_with_its_attempts(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    box = join("box")
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    run(master)
    [attempt_id] = box.take()
    master.http.post("/experiments/1/kill")
    end = {"reason": "killed", "code": None, "signal": 9, "time": 1.0}
    master.attempt(attempt_id, "end", **end)
    box.attempts = []
    box.work(is_leaving=True)
    assert master.http.delete("/nodes/box").status_code == 204
    [attempt] = master.http.get("/trials/1").json()["attempts"]
    assert [node["name"] for node in attempt["nodes"]] == ["box"]


SINGLE = {"searcher": {"name": "single", "metric": "loss"}, "hyperparameters": {}}


def end(master: Any, runner: FakeRunner, **told: Any) -> int:
    """End the attempt of a node with one slot, and return its number."""
    [attempt_id] = runner.attempts
    body = {"reason": "exited", "code": 1, "signal": None, "time": 1.0, "detail": "no GPU"} | told
    assert master.attempt(attempt_id, "end", **body).status_code == 204
    runner.attempts = []
    runner.work()
    return attempt_id


def trial_of(master: Any, attempt_id: int) -> int:
    return next(row.trial_id for row in attempts(master) if row.id == attempt_id)


def test_a_trial_that_fails_on_a_node_waits_for_another_one(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    bad, good = join("bad"), join("good")
    for _ in range(4):
        master.create(**SINGLE)
    run(master)
    bad.take(), good.take()
    failed = [trial_of(master, end(master, bad))]
    for _ in range(2):
        # The node goes on with others: that it failed may be for the trial's reasons.
        run(master)
        bad.take()
        failed.append(trial_of(master, end(master, bad)))
    assert len(set(failed)) == 3
    run(master)
    assert bad.take() == []
    [first, *_] = queue = master.http.get("/queue").json()
    # By now three trials have failed there, so that it rests.
    assert first["detail"] == "It waits until 1 of 1 slot is free on one node."
    assert {one["reason"] for one in queue[1:]} == {"behind_others"}
    logs = master.http.get(f"/trials/{failed[0]}/logs").text
    assert "The attempt failed on the node 'bad' (exit code 1: no GPU); restart 1 of 5" in logs
    # In their order.
    for expected in sorted(failed):
        end(master, good, code=0, detail=None)
        run(master)
        assert [trial_of(master, id_) for id_ in good.take()] == [expected]
    end(master, good)
    assert master.http.get(f"/trials/{expected}").json()["state"] == "ERROR"


def test_a_trial_that_failed_stays_where_no_other_node_has_room_for_it(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    small, large = join("small"), join("large", 2)
    master.create(**SINGLE, resources={"slots_per_trial": 2})
    for _ in range(2):
        run(master)
        assert small.take() == []
        assert len(large.take()) == 1
        end(master, large)
    assert master.http.get("/trials/1").json()["state"] == "ERROR"


def test_a_start_that_fails_on_a_node_is_tried_once_more_elsewhere(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    nodes_by_name = {"one": join("one"), "two": join("two")}
    master.create(**SINGLE)
    tried = []
    for _ in range(2):
        run(master)
        for name, runner in nodes_by_name.items():
            if runner.take():
                tried.append(name)
                end(master, runner, reason="start_failed", code=None, kind="permanent")
    assert sorted(tried) == ["one", "two"]
    trial = master.http.get("/trials/1").json()
    assert (trial["state"], trial["restarts"]) == ("ERROR", 0)
    assert trial["error"].startswith("The attempt could not start on the node")


def test_a_checkpoint_from_a_node_means_that_the_node_is_good(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    one, two = join("one"), join("two")
    master.create(**SINGLE)
    master.create(**SINGLE)
    run(master)
    one.take(), two.take()
    [attempt_id] = one.attempts
    checkpoint = {
        "type": "checkpoint", "time": 1.0, "uuid": "c1", "steps_completed": 1, "resources": {},
        "metadata": {}, "storage": "/nowhere", "seconds": 0.0, "blocked_seconds": 0.0, "size": 0,
    }  # fmt: skip
    batch = {"generation": 0, "rank": 0, "records": [[0, checkpoint]]}
    assert master.attempt(attempt_id, "records", batches=[batch]).status_code == 200
    end(master, one)
    run(master)
    assert [trial_of(master, id_) for id_ in one.take()] == [trial_of(master, attempt_id)]


@pytest.mark.parametrize("is_known", [False, True])
def test_of_two_machines_that_register_a_name_at_once_one_is_refused(
    master: Any, join: Callable[..., FakeRunner], is_known: bool
) -> None:
    if is_known:
        join("box")
        master.core.nodes.presence.leases.advance(LEASE_S + 1)
    go_on = threading.Event()
    # What waits meanwhile is committed together.
    holding = master.core.database.write(lambda _: go_on.wait(60))
    facts = [
        msgspec.convert(FakeRunner(master, "box", key=key).facts, NodeFacts) for key in ("a", "b")
    ]
    registered = [master.core.nodes.register(one, None) for one in facts]
    go_on.set()
    holding.result(60)
    assert registered[0].result(60).session == 1 + is_known
    with pytest.raises(NodeRefusedError, match="'box' belongs to a runner with another directory"):
        registered[1].result(60)


def test_the_log_tells_which_nodes_come_leave_and_are_lost(
    master: Any, join: Callable[..., FakeRunner], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline._cluster.master.nodes")
    registry = master.core.nodes

    def told() -> list[str]:
        master.core.lost_nodes._next_look = 0.0
        master.schedule()
        texts = [one.getMessage().partition(" It was last heard")[0] for one in caplog.records]
        caplog.clear()
        return texts

    gone, lost = join("gone"), join("lost")
    assert told() == [
        "The node gone registers: pool default, 1 slot(s).",
        "The node lost registers: pool default, 1 slot(s).",
    ]
    gone.work(is_leaving=True)
    assert told() == ["The node gone has left."]
    registry.presence.leases.advance(LEASE_S + 1)
    assert told() == ["The node lost is lost: it gives no sign of life."]
    lost.work()
    assert told() == ["The node lost is back."]
    assert told() == []


def of_storage(place: Path) -> dict[str, Any]:
    return {"checkpoint_storage": {"type": "directory", "path": str(place)}}


def start_with_storages(
    master: Any, join: Callable[..., FakeRunner], first: Path, second: Path, *, number: int = 1
) -> list[int]:
    """Return the first attempts that a node gets: of one trial in each of two storages."""
    runner = join("box", 2)
    single = {"name": "single", "metric": "loss"}
    for place in (first, second):
        master.create(searcher=single, hyperparameters={}, **of_storage(place))
    taken: list[int] = []
    while len(taken) < number:
        run(master)
        taken += runner.take()
    return sorted(taken)


def test_a_storage_that_hangs_keeps_no_other_experiment_waiting_and_is_named(
    hanging_disk: Path,
    tmp_path: Path,
    master: Any,
    join: Callable[..., FakeRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert start_with_storages(master, join, hanging_disk / "a", tmp_path / "b") == [2]
    monkeypatch.setattr(_storage_calls, "_SILENT_S", 0.0)
    problems = master.http.get("/status").json()["problems"]
    assert [text for text in problems if f"{hanging_disk}/a' has not answered for" in text]
    # The attempt gives its slots back, and its trial is tried again.
    run(master)
    first = attempts(master)[0]
    assert (first.state, first.exit["reason"]) == ("ENDED", "start_failed")
    assert "does not answer" in first.exit["detail"]
    assert master.http.get("/trials/1").json()["state"] == "ACTIVE"


def test_a_fifo_in_the_place_of_a_mark_is_replaced(
    tmp_path: Path, master: Any, join: Callable[..., FakeRunner]
) -> None:
    storage = tmp_path / "a"
    storage.mkdir()
    mark = storage / f".paceline-{master.home.cluster_id}"
    os.mkfifo(mark)
    assert start_with_storages(master, join, storage, tmp_path / "b", number=2) == [1, 2]
    assert mark.is_file()


@pytest.mark.parametrize("drained", ["node", "slots"])
def test_a_group_that_waits_for_drained_slots_holds_up_nobody_and_says_why(
    master: Any, join: Callable[..., FakeRunner], drained: str
) -> None:
    left, gone = (join(name, 2, address="10.0.0.1") for name in ("left", "gone"))
    places = ["/nodes/gone"] if drained == "node" else [f"/nodes/gone/slots/{n}" for n in (0, 1)]
    for place in places:
        assert master.http.post(f"{place}/drain", json={}).status_code == 204
    master.create(**SINGLE, resources={"slots_per_trial": 4})
    master.create(**SINGLE, resources={"slots_per_trial": 1})
    run(master)
    [attempt_id] = left.take()
    assert trial_of(master, attempt_id) == 2
    assert gone.take() == []
    [group] = master.http.get("/queue").json()
    assert group["detail"] == (
        "It needs 4 slots, but the pool 'default' has 2 now (2 more are drained)."
    )
    for place in places:
        assert master.http.post(f"{place}/resume", json={}).status_code == 204
    run(master)
    end(master, left, code=0)
    run(master)
    assert len(left.take()) == len(gone.take()) == 1


def resting(master: Any) -> dict[str, bool]:
    """Return whether each node rests, as lists of nodes have it."""
    return {
        node["name"]: node["rests_until"] is not None for node in master.http.get("/nodes").json()
    }


def fail_once(master: Any, runner: FakeRunner, **told: Any) -> int:
    """Let a node take a trial and fail, and return the trial."""
    run(master)
    assert len(runner.take()) == 1
    return trial_of(master, end(master, runner, **told))


def test_a_bad_node_eats_no_search_while_the_good_one_is_away(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    bad, good = join("bad"), join("good")
    good.work(is_leaving=True)
    for _ in range(5):
        master.create(**SINGLE)
    # Each trial fails there once, and waits for the other node; then the node rests.
    failed = [fail_once(master, bad) for _ in range(2)]
    [first, *_] = master.http.get("/queue").json()
    assert first["detail"] == "It failed on a node, and waits for another one, which is away."
    failed.append(fail_once(master, bad))
    assert len(set(failed)) == 3
    run(master)
    assert bad.take() == []
    assert resting(master) == {"bad": True, "good": False}
    # A busy machine has other problems.
    problems = master.http.get("/status").json()["problems"]
    [problem] = [one for one in problems if one.startswith("The node bad rests for ")]
    assert "attempts of 3 trials or more failed there within 60 s" in problem
    details = {one["trial_id"]: one["detail"] for one in master.http.get("/queue").json()}
    assert len(details) == 5
    rests = "Several trials failed on the node that it needs, which rests for "
    assert all(detail.startswith(rests) for detail in details.values())
    good.register()
    good.work()
    for _ in range(5):
        run(master)
        good.take()
        end(master, good, code=0, detail=None)
    states = {trial: master.http.get(f"/trials/{trial}").json()["state"] for trial in details}
    assert set(states.values()) == {"COMPLETED"}, states


@pytest.mark.parametrize("closed", ["drained", "reserved"])
def test_a_trial_that_failed_waits_for_no_node_that_is_away_and_closed_to_it(
    master: Any, join: Callable[..., FakeRunner], closed: str
) -> None:
    bad, away = join("bad"), join("away")
    away.work(is_leaving=True)
    if closed == "drained":
        assert master.http.post("/nodes/away/slots/0/drain", json={}).status_code == 204
    else:
        assert master.http.post("/users", json={"name": "eve"}).status_code in (200, 201)
        times = {"begins_at": time.time() - 1, "ends_at": time.time() + 3600}
        wanted = {"user": "eve", **times}
        reserved = master.http.post("/nodes/away/reservations", json=wanted)
        assert reserved.is_success, reserved.text
    master.create(**SINGLE, max_restarts=3)
    failed = fail_once(master, bad)
    run(master)
    assert [trial_of(master, attempt_id) for attempt_id in bad.take()] == [failed]
    # Nor is it restarted for the sake of such a node.
    end(master, bad)
    assert "the same way as the one before" in master.http.get(f"/trials/{failed}").json()["error"]


def test_nodes_do_not_rest_if_all_of_them_fail(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    """Then the cause is in the code, and its trials end at once."""
    first, second = join("first"), join("second")
    for _ in range(6):
        master.create(**SINGLE)
    for _ in range(12):
        run(master)
        for runner in (first, second):
            if runner.take():
                end(master, runner)
    assert resting(master) == {"first": False, "second": False}
    states = [master.http.get(f"/trials/{trial}").json()["state"] for trial in range(1, 7)]
    assert states == ["ERROR"] * 6


def test_a_trial_that_fails_twice_on_the_only_node_is_given_up(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    only = join("only")
    master.create(**SINGLE)
    fail_once(master, only)
    fail_once(master, only)
    trial = master.http.get("/trials/1").json()
    assert (trial["state"], trial["restarts"]) == ("ERROR", 1)
    assert "the same way as the one before" in trial["error"]


def test_resume_ends_the_rest_of_a_node(master: Any, join: Callable[..., FakeRunner]) -> None:
    bad, good = join("bad"), join("good")
    good.work(is_leaving=True)
    for _ in range(3):
        master.create(**SINGLE)
        fail_once(master, bad)
    run(master)
    assert resting(master)["bad"]
    assert master.http.post("/nodes/bad/resume", json={}).status_code == 204
    assert not resting(master)["bad"]


def test_a_success_ends_the_rest_of_a_node(master: Any, join: Callable[..., FakeRunner]) -> None:
    bad, _ = join("bad", 2), join("good")
    for _ in range(6):
        master.create(**SINGLE)
    run(master)
    bad.take()
    [first, *_] = bad.attempts
    kept = first
    for _ in range(3):
        [attempt_id] = [one for one in bad.attempts if one != kept]
        body = {"reason": "exited", "code": 1, "signal": None, "time": 1.0, "detail": "no GPU"}
        assert master.attempt(attempt_id, "end", **body).status_code == 204
        bad.attempts = [kept]
        bad.work()
        run(master)
        bad.take()
    assert resting(master)["bad"]
    body = {"reason": "exited", "code": 0, "signal": None, "time": 1.0}
    assert master.attempt(kept, "end", **body).status_code == 204
    assert not resting(master)["bad"]


@pytest.mark.long
@pytest.mark.parametrize("what", ["read", "delete", "piece"])
def test_a_storage_that_hangs_is_named_whatever_waits_for_it(
    hanging_disk: Path,
    make_master: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    monkeypatch.setattr(_storage_calls, "_SILENT_S", 0.0)
    master = make_master()
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    master.schedule()
    master.report(1, 0)
    row = {
        "uuid": "one", "trial_id": 1, "experiment_id": 1, "attempt": 1, "steps_completed": 1,
        "state": "COMPLETED", "metadata": {}, "resources": {"model": 1}, "size": 1,
        "storage": str(hanging_disk), "created_at": 1.0,
    }  # fmt: skip

    def move(transaction: Any) -> None:
        experiments = tables.experiments
        config = transaction.connection.scalar(select(experiments.c.config)) | of_storage(
            hanging_disk
        )
        transaction.connection.execute(update(experiments).values(config=config))
        transaction.connection.execute(insert(tables.checkpoints).values(**row))

    master.core.database.write(move).result()
    headers = {"Authorization": f"Bearer {master.core.attempt_tokens.token_of(1)}"}
    piece = "/attempts/1/checkpoints/one/pieces?name=model&offset=0"
    calls: dict[str, Callable[[], Any]] = {
        "read": lambda: master.http.get("/checkpoints/one/files/model", timeout=0.5),
        "delete": lambda: master.http.delete("/checkpoints/one", timeout=0.5),
        "piece": lambda: master.http.get(piece, headers=headers, timeout=0.5),
    }
    with pytest.raises(httpx2.ReadTimeout):
        calls[what]()
    text = f"{str(hanging_disk)!r} has not answered for"
    while not any(text in problem for problem in master.http.get("/status").json()["problems"]):
        time.sleep(0.05)


@pytest.mark.long
def test_requests_that_a_storage_keeps_waiting_keep_no_others_waiting(
    hanging_disk: Path, make_master: Callable[..., Any]
) -> None:
    """There are more of them than threads for other requests."""
    master = make_master()
    single = {"name": "single", "metric": "loss"}
    for number in range(1, 11):
        place = hanging_disk / str(number)
        master.create(searcher=single, hyperparameters={}, **of_storage(place))
        checkpoint = {
            "uuid": f"checkpoint-{number}", "trial_id": number, "experiment_id": number,
            "attempt": 1, "steps_completed": 1, "state": "COMPLETED", "metadata": {},
            "resources": {"model": 1}, "size": 1, "storage": str(place), "created_at": 1.0,
        }  # fmt: skip

        def end(transaction: Any, number: int = number, row: Any = checkpoint) -> None:
            transaction.connection.execute(insert(tables.checkpoints).values(**row))
            for table, column in ((tables.experiments, "id"), (tables.trials, "experiment_id")):
                change = update(table).where(table.c[column] == number)
                transaction.connection.execute(change.values(state="CANCELED", ended_at=1.0))

        master.core.database.write(end).result()
        with pytest.raises(httpx2.ReadTimeout):
            master.http.delete(f"/experiments/{number}", timeout=0.5)
    assert master.create(searcher=single, hyperparameters={}) == 11


def test_a_node_with_a_problem_gets_nothing_until_it_reports_none(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    """A node rests by its own report, which is checked."""
    sick = join("sick")
    sick.work(problem="disk:\x1b[31m  full\n")
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    run(master)
    assert attempts(master) == []
    assert nodes(master)["sick"]["problem"] == "disk: [31m full"
    [waiting] = master.http.get("/queue").json()
    assert "The node sick rests until a check passes: disk: [31m full." in waiting["detail"]
    problems = master.http.get("/status").json()["problems"]
    assert any("The node sick rests" in one for one in problems), f"{problems=}"
    # A stranger's text has a limit.
    assert sick.ask(problem="x" * 501).status_code == 422
    well = join("well")
    run(master)
    assert [one.node_name for one in attempts(master)] == ["well"]
    assert well.take() == [1]
    sick.work()
    master.create(searcher={"name": "single", "metric": "loss"}, hyperparameters={})
    run(master)
    assert [one.node_name for one in attempts(master)] == ["well", "sick"]


@pytest.mark.parametrize("owner", ["ada", "bob"])
def test_a_trial_that_failed_waits_for_an_away_runner_of_its_own_user_only(
    make_master: Any, add_to: Any, owner: str
) -> None:
    master, runners = make_master(0), {}
    for user in ("ada", "bob"):
        add_to(master, user)

    def headers(**token: Any) -> dict[str, str]:
        made = master.http.post("/tokens", json=token)
        assert made.status_code == 201, made.text
        return {"Authorization": f"Bearer {made.json()['secret']}"}

    for name, user in (("bad", "ada"), ("away", owner)):
        runners[name] = FakeRunner(master, name, 1, unix_user=user)
        runners[name].headers = headers(name=name, scope="runner", node=name, user=user)
        assert runners[name].register().status_code == 200
        runners[name].work(is_leaving=name == "away")
    assert master.http.put("/pools/default", json={"own_runners": True}).status_code == 204
    body = {"config": {"name": "x", "entrypoint": "python3 t.py", **SINGLE, "max_restarts": 3}}
    mine = headers(name="mine", scope="submit", user="ada")
    assert master.http.post("/experiments", json=body, headers=mine).status_code == 201
    fail_once(master, runners["bad"])
    run(master)
    assert len(runners["bad"].take()) == (0 if owner == "ada" else 1)


def test_a_node_is_a_users_own_by_its_token_and_its_unix_user(
    make_master: Any, add_to: Any
) -> None:
    """What the runner says of its Unix user alone opens nothing."""
    master = make_master(0)
    add_to(master, "ada")
    assert master.http.put("/pools/default", json={"own_runners": True}).status_code == 204

    def join(name: str, unix_user: str, token_user: str | None) -> FakeRunner:
        body = {"name": name, "scope": "runner", "node": name, "user": token_user}
        made = master.http.post("/tokens", json=body)
        assert made.status_code == 201, made.text
        runner = FakeRunner(master, name, 1, unix_user=unix_user)
        runner.headers = {"Authorization": f"Bearer {made.json()['secret']}"}
        assert runner.register().status_code == 200
        runner.work()
        return runner

    join("claimed", "ada", None)
    join("stolen", "eve", "ada")
    body = {"config": {"name": "x", "entrypoint": "python3 t.py",
                       "searcher": {"name": "single", "metric": "loss"}}}  # fmt: skip
    token = {"name": "ada", "scope": "submit", "user": "ada"}
    secret = master.http.post("/tokens", json=token).json()["secret"]
    headers = {"Authorization": f"Bearer {secret}"}
    assert master.http.post("/experiments", json=body, headers=headers).status_code == 201
    run(master)
    assert attempts(master) == []
    told = "Trials of the pool 'default' start only on runners of their own user: 2 of its 2 nodes"
    [waiting] = master.http.get("/queue").json()
    assert waiting["reason"] == "reserved"
    assert waiting["detail"] == f"{told} are of others than ada."
    own = join("own", "ada", "ada")
    run(master)
    assert own.take() == [1]
    # The node leaves with its user.
    assert master.http.delete("/users/ada").status_code == 204
    assert own.ask().status_code in (401, 403)


def test_a_large_trial_says_that_the_node_for_it_is_away(
    master: Any, join: Callable[..., FakeRunner]
) -> None:
    """While its runner is cut off, and once it is lost; the others do not make up for it."""
    large = join("large", 4)
    join("three", 3), join("one", 1)
    master.create(
        searcher={"name": "single", "metric": "loss"}, hyperparameters={},
        resources={"slots_per_trial": 4},
    )  # fmt: skip
    registry = master.core.nodes
    poll = NodePoll(
        key=large.facts["key"], session=large.session["session"], number=large.number,
        attempts=[], alive=[],
    )  # fmt: skip
    registry.presence.note_cut_off(large.session["node_id"], poll)

    def told() -> str:
        [waiting] = master.http.get("/queue").json()
        assert waiting["estimated_start"] is None
        return str(waiting["detail"])

    assert told().endswith("Away, perhaps for a moment: large."), told()
    registry.presence.leases.advance(LEASE_S + 1)
    join("three", 3), join("one", 1)
    text = told()
    assert "no node has more than 3" in text
    assert "Away, perhaps for a moment: large." in text


def test_a_reservation_of_a_lost_node_keeps_nobody_and_counts_again_when_it_is_back(
    master: Any, join: Callable[..., FakeRunner], add: Callable[..., httpx2.Client]
) -> None:
    """A clock that jumps beyond it, and back, changes nothing of it either."""
    add("ada")
    box = join("box", 2)
    now = time.time()
    body = {"user": "ada", "begins_at": now - 60, "ends_at": now + 3600}
    assert master.http.post("/nodes/box/reservations", json=body).status_code == 201
    single = {"name": "single", "metric": "loss"}
    master.create(searcher=single, hyperparameters={}, resources={"slots_per_trial": 2})

    def told() -> tuple[str, str]:
        [waiting] = master.http.get("/queue").json()
        return waiting["reason"], waiting["detail"]

    assert told()[0] == "reserved"
    with master.core.database.read() as connection:
        for moment, is_closed in ((now, True), (now + 86400, False), (now, True), (0.0, False)):
            cluster = master.core.reconciler.cluster(connection, moment)
            [node] = [one for one in cluster.nodes if one.node_id == box.session["node_id"]]
            assert node.is_closed_to("admin") is is_closed, moment
    master.core.nodes.presence.leases.advance(LEASE_S + 1)
    reason, detail = told()
    assert reason == "too_large"
    assert "Away, perhaps for a moment: box." in detail
    # Another node serves it, while the reserved one is gone.
    other = join("other", 2)
    run(master)
    assert other.take() == [1]
    master.create(searcher=single, hyperparameters={}, resources={"slots_per_trial": 2})
    assert box.register().status_code == 200
    box.work()
    run(master)
    assert len(attempts(master)) == 1
    assert told()[0] == "slots_in_use"
