"""Attempts on several nodes, as the master sees them; runners are played by the tests."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

import paceline
from paceline._cluster.master.experiments import failure_causes as _start_delays
from paceline._cluster.master.experiments.attempt_runners import end_runner
from paceline._cluster.master.experiments.attempts import Leases
from paceline._cluster.master.store import tables
from paceline._cluster.messages.runner_messages import PROTOCOL, runner_id
from paceline._cluster.messages.states import ExitReason
from paceline._cluster.runner.attempt_end import make_attempt_end

LEASE_S = 60.0
FAILED = {"reason": "exited", "code": 3, "signal": None, "time": 1.0, "detail": None}


class Group:
    """A master with two nodes of two slots, and a trial that needs both."""

    def __init__(self, master: Any) -> None:
        self.master = master
        self.number = 0
        self.nodes: dict[str, Any] = {}
        for name in ("first", "second"):
            self.register(name, address=f"{name}.lab", host=name)

    def register(self, name: str, **more: str) -> None:
        facts = {
            "name": name, "key": name, "version": paceline.__version__, "protocol": PROTOCOL,
            "python": "/opt/python", "python_version": "3.11.7", "devices": ["cpu"] * 2,
            "device_kind": "CPU", "num_cores": 4, "memory_bytes": 1,
        }  # fmt: skip
        self.nodes[name] = self.master.http.post("/nodes", json=facts | more).json()
        self.poll(name)

    def poll(self, name: str, *attempts: int, **more: Any) -> Any:
        self.number += 1
        node = self.nodes[name]
        body = {
            "key": name, "session": node["session"], "number": self.number,
            "attempts": list(attempts), "alive": list(attempts),
        }  # fmt: skip
        reply = self.master.http.post(f"/nodes/{node['node_id']}/poll", json=body | more)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def submit(self, **resources: Any) -> int:
        number = self.master.create(
            searcher={"name": "single", "metric": "loss"}, hyperparameters={},
            resources={"slots_per_trial": 4, **resources},
        )  # fmt: skip
        self.run()
        return int(number)

    def run(self) -> None:
        self.master.schedule()
        self.master.core.reconciler._watch_attempts()

    def launches(self) -> list[Any]:
        return [self.poll(name)["launches"][0] for name in self.nodes]

    def begin(self, attempt_id: int, member: int, port: int = 0) -> Any:
        query = f"begins=true&member={member}&port={port}"
        return self.master.http.get(f"/attempts/{attempt_id}/control?{query}").json()

    def begin_all(self) -> None:
        self.submit()
        self.launches()
        for member in (0, 1):
            self.begin(1, member, 4000)
        for name in self.nodes:
            self.poll(name, 1)

    def end(self, member: int, **end: Any) -> None:
        reply = self.master.http.post(f"/attempts/1/end?member={member}", json=FAILED | end)
        assert reply.status_code == 204, reply.text

    @property
    def attempts(self) -> list[Any]:
        with self.master.core.database.read() as connection:
            query = select(tables.attempts).order_by(tables.attempts.c.id)
            return list(connection.execute(query))

    @property
    def trial(self) -> Any:
        return self.master.http.get("/trials/1").json()


@pytest.fixture
def group(make_master: Callable[..., Any]) -> Group:
    return Group(make_master(num_slots=0))


def test_each_node_is_told_its_place_and_nothing_starts_before_all_are_there(group: Group) -> None:
    group.submit()
    first, second = group.launches()
    assert [first["spec"]["member"], second["spec"]["member"]] == [0, 1]
    for number, launch in enumerate((first, second)):
        info = launch["info"]
        assert info["container_addrs"] == ["first.lab", "second.lab"]
        assert (info["container_rank"], info["container_slot_counts"]) == (number, [2, 2])
        assert (info["slot_ids"], launch["spec"]["num_members"]) == ([0, 1], 2)
    assert group.begin(1, 1)["meeting_port"] is None
    assert group.attempts[0].state == "PENDING"
    # A runner that was started again has another port.
    assert group.begin(1, 1)["meeting_port"] is None
    assert group.begin(1, 0, 4000)["meeting_port"] == 4000
    assert group.begin(1, 0, 5000)["meeting_port"] == 4000
    assert group.attempts[0].state == "RUNNING"
    assert [node["slots"] for node in group.trial["attempts"][0]["nodes"]] == [[0, 1], [0, 1]]
    assert group.master.http.get("/master").json()["num_slots_used"] == 4


def test_nodes_behind_tunnels_join_no_group_unless_all_are_on_one_machine(
    group: Group,
) -> None:
    """Their loopback address leads to the machine that asks."""
    for name, host in (("first", "one"), ("second", "two")):
        group.register(name, address="127.0.0.1", host=host)
    group.submit()
    assert group.attempts == []
    [waiting] = group.master.http.get("/queue").json()
    assert "Other machines do not reach first (127.0.0.1), second (127.0.0.1)." in waiting["detail"]
    assert "`--address HOST`" in waiting["detail"]
    group.register("second", address="127.0.0.1", host="one")
    group.run()
    assert group.attempts[0].state == "PENDING"


def test_the_first_member_that_fails_ends_the_others_and_is_named(group: Group) -> None:
    group.begin_all()
    group.end(1, detail="Node 1: Rank 2 exited with code 3, the first of 4 to fail")
    assert group.begin(1, 0)["should_kill"]
    assert group.attempts[0].state == "RUNNING"
    group.end(0, reason="killed", code=None, signal=9)
    [attempt] = group.attempts[:1]
    assert (attempt.state, attempt.exit["reason"]) == ("ENDED", "exited")
    cause = "Node 1 (second): Rank 2 exited with code 3, the first of 4 to fail"
    assert attempt.exit["detail"] == cause
    assert group.trial["restarts"] == 1


@pytest.mark.parametrize(
    ("left", "given"), [(("a", "b"), ["a", "b"]), (("a", ""), ["a", ""]), (("", "b"), ["", ""])]
)
def test_each_node_gets_back_what_it_left_in_memory_if_the_reports_of_rank_0_are_there(
    group: Group, left: tuple[str, str], given: list[str]
) -> None:
    group.begin_all()
    group.end(1, memory=left[1])
    group.end(0, reason="killed", code=None, signal=9, memory=left[0])
    group.run()
    for name in group.nodes:
        group.poll(name)
    group.run()
    launches = group.launches()
    assert [launch["spec"]["attempt_id"] for launch in launches] == [2, 2]
    assert [launch["spec"]["memory"] for launch in launches] == given


@pytest.mark.parametrize(
    ("num_reports", "given", "newest"), [(2, ["", "b"], ["a1.g0.r0", 1]), (0, ["", ""], None)]
)
def test_what_is_in_memory_counts_up_to_the_reports_of_a_first_node_that_is_lost(
    group: Group, num_reports: int, given: list[str], newest: Any
) -> None:
    group.begin_all()
    for step in range(num_reports):
        group.master.report(1, step, ("training", step + 1, {"loss": 1.0}))
    group.end(1, memory="b")
    end, core = make_attempt_end(ExitReason.RUNNER_LOST), group.master.core
    core.database.write(
        lambda transaction: end_runner(core.changes, transaction, 1, 0, end, is_lost=True)
    ).result()
    group.run()
    launches = group.launches()
    assert [launch["spec"]["memory"] for launch in launches] == given
    assert [launch["info"].get("newest_report") for launch in launches] == [newest] * 2


@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_node_could_not_say_itself_is_told_by_others(group: Group, is_told: bool) -> None:
    """Before, the error was the name of the node alone."""
    group.begin_all()
    cause = "Rank 0 could not write its reports (No space left on device)"
    group.end(0, detail=None)
    group.end(1, detail=f"Node 0: {cause}" if is_told else None)
    expected = cause if is_told else "it ended with code 3, and could not say why"
    assert group.attempts[0].exit["detail"].startswith(f"Node 0 (first): {expected}")


def test_an_attempt_ends_well_once_all_members_have(group: Group) -> None:
    group.begin_all()
    group.master.report(1, 0, ("validation", 1, {"loss": 1.0}))
    group.end(0, code=0)
    assert not group.begin(1, 1)["should_kill"]
    group.end(1, code=0)
    assert group.trial["state"] == "COMPLETED"


def test_the_loss_of_a_node_counts_for_more_than_what_others_say_then(group: Group) -> None:
    group.begin_all()
    group.end(0, code=1, detail="Node 0: Rank 0 exited with code 1 (connection closed)")
    # It has polled with the attempt before, and comes back without: its disk is gone.
    group.poll("second")
    [attempt, *_] = group.attempts
    assert attempt.exit["reason"] == "runner_lost"
    assert attempt.exit["detail"] == "Node 1 (second): its node has it no more"
    assert (group.trial["restarts"], group.trial["retries"]) == (0, 1)
    group.run()
    assert len(group.attempts) == 2


def test_a_cut_between_the_nodes_costs_no_restart(group: Group) -> None:
    group.begin_all()
    lost = "The launcher of node 1 was lost: it gave no sign of life for 30 s."
    group.end(0, code=137, detail=lost)
    group.end(1, reason="killed", code=None, signal=9)
    [attempt] = group.attempts[:1]
    assert attempt.exit["reason"] == "runner_lost"
    assert attempt.exit["detail"] == f"Node 1 (second): {lost}"
    assert (group.trial["state"], group.trial["restarts"]) == ("ACTIVE", 0)


def test_a_launcher_that_failed_by_itself_costs_a_restart(group: Group) -> None:
    group.begin_all()
    group.end(0, code=137, detail="The launcher of node 1 was lost: the connection ended.")
    group.end(1, code=None, signal=9)
    assert group.attempts[0].exit["reason"] == "exited"
    assert group.trial["restarts"] == 1


def test_a_runner_that_is_killed_costs_no_restart_if_others_tell_of_its_launcher_first(
    group: Group,
) -> None:
    group.begin_all()
    group.end(0, code=137, detail="The launcher of node 1 was lost: its connection was closed.")
    group.end(1, reason="runner_lost", code=None, detail="the runner died")
    [attempt] = group.attempts[:1]
    assert attempt.exit["reason"] == "runner_lost"
    assert attempt.exit["detail"] == "Node 1 (second): the runner died"
    assert (group.trial["state"], group.trial["restarts"]) == ("ACTIVE", 0)


NOT_THERE = (
    "The launchers of all 2 nodes must come within 600 s, but there is none of node 1. Hint: x."
)
NOT_REACHED = "The launcher of node 0 was lost: it was not reached within 600 s: no route (a:1)."
IS_ENDED = {"reason": "killed", "code": None, "signal": 15}


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ((0, {"code": 2, "detail": NOT_THERE}), IS_ENDED),
        ((1, {"code": 137, "detail": NOT_REACHED}), IS_ENDED),
        ((1, {"code": 137, "detail": NOT_REACHED}), {"code": 2, "detail": NOT_THERE}),
    ],
    ids=["first", "second", "both"],
)
def test_nodes_whose_launchers_never_meet_cost_no_restart(
    group: Group, first: tuple[int, dict[str, Any]], other: dict[str, Any]
) -> None:
    group.begin_all()
    member, end = first
    group.end(member, **end)
    group.end(1 - member, **other)
    [attempt] = group.attempts
    assert attempt.exit["reason"] == "not_formed"
    assert attempt.exit["detail"] == f"Node {member} ({['first', 'second'][member]}): " + (
        NOT_REACHED if member else NOT_THERE
    )
    trial = group.trial
    assert (trial["state"], trial["restarts"], trial["retries"]) == ("ACTIVE", 0, 1)


def test_a_node_whose_program_ends_without_a_launcher_is_an_error_of_the_program(
    group: Group,
) -> None:
    group.begin_all()
    group.end(1, code=0)
    group.end(0, code=2, detail=NOT_THERE)
    assert group.attempts[0].exit["reason"] == "exited"
    assert group.trial["restarts"] == 1


def test_a_runner_that_is_silent_or_dies_is_named_by_its_node(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.begin_all()
    monkeypatch.setattr(Leases, "is_over", lambda _self, id_: id_ == runner_id(1, 1))
    group.run()
    group.end(1, reason="runner_lost", code=None)
    group.end(0, **IS_ENDED)
    assert group.attempts[0].exit["detail"] == "Node 1 (second): the runner died"
    notes = "\n".join(line.text for line in group.master.core.logs.read(1))
    assert "The runner of Node 1 (second) gave no sign of life for " in notes
    assert "The attempt was lost (Node 1 (second): the runner died); the trial goes on" in notes


def test_all_members_are_preempted_when_the_runner_of_one_leaves(group: Group) -> None:
    group.begin_all()
    group.poll("second", 1, is_leaving=True)
    assert group.attempts[0].preempt_reason == "the runner of second is stopped"
    assert all(group.begin(1, member)["should_preempt"] for member in (0, 1))


def test_members_do_not_wait_for_one_that_was_preempted_before_it_started(group: Group) -> None:
    group.begin_all()
    group.poll("second", 1, is_leaving=True)
    group.end(0, reason="killed", code=None, detail="not started")
    assert group.begin(1, 1)["should_kill"]
    group.end(1, reason="killed", code=None, signal=15)
    assert group.attempts[0].state == "ENDED"
    assert (group.trial["state"], group.trial["restarts"]) == ("ACTIVE", 0)


def test_slots_are_given_back_if_a_node_does_not_begin(group: Group) -> None:
    group.submit(start_timeout=20.0)
    group.launches()
    group.begin(1, 0, 4000)
    group.master.core.reconciler._waiting_since[1] = 0.0
    group.run()
    assert group.attempts[0].exit["reason"] == "not_formed"
    assert "of its 2 nodes, second did not begin" in group.attempts[0].exit["detail"]
    small = group.master.create(
        searcher={"name": "single", "metric": "loss"}, hyperparameters={},
        resources={"slots_per_trial": 1},
    )  # fmt: skip
    # Its processes must be gone first.
    group.poll("first")
    group.run()
    assert [attempt.experiment_id for attempt in group.attempts[1:]] == [small]
    [waiting] = group.master.http.get("/queue").json()
    assert (waiting["trial_id"], waiting["reason"]) == (1, "pausing")
    assert (group.trial["restarts"], group.trial["retries"]) == (0, 1)


@pytest.mark.parametrize("member", [0, 1])
def test_the_node_that_lacked_something_rests_and_others_are_used(
    group: Group, monkeypatch: pytest.MonkeyPatch, member: int
) -> None:
    monkeypatch.setattr(_start_delays, "_FIRST_PAUSE_S", 60.0)
    group.submit()
    group.launches()
    now = time.time()
    group.end(member, reason="shortage", code=None, time=now, detail="no space left")
    group.end(1 - member, **IS_ENDED, time=now)
    group.register("third", address="third.lab", host="third")
    for name in group.nodes:
        group.poll(name)
    group.run()
    first, second = group.attempts
    short, other = first.members[member]["name"], first.members[1 - member]["name"]
    assert first.exit["detail"] == f"Node {member} ({short}): no space left"
    assert {one["name"] for one in second.members} == {other, "third"}


def test_each_node_counts_its_own_lines_of_output(group: Group) -> None:
    group.begin_all()

    def send(member: int, *numbers: int) -> int:
        entries = [[n, 1.0, member, "stdout", None, f"line {n} of {member}"] for n in numbers]
        path = f"/attempts/1/logs?member={member}"
        return int(group.master.http.post(path, json={"entries": entries}).json()["last_sequence"])

    assert (send(0), send(1)) == (-1, -1)
    assert (send(0, 0, 1, 2), send(1, 0), send(1, 0, 1), send(0, 2, 3)) == (2, 0, 1, 3)
    # As after a start of the master.
    group.master.core.logs._files.clear()
    assert (send(0), send(1)) == (3, 1)
    lines = [line.text for line in group.master.core.logs.read(1) if line.stream == "stdout"]
    assert sorted(lines) == sorted(
        [f"line {n} of 0" for n in range(4)] + [f"line {n} of 1" for n in range(2)]
    )


@pytest.mark.parametrize("member", [2, 9])
def test_a_member_that_there_is_not_is_refused(group: Group, member: int) -> None:
    group.begin_all()
    reply = group.master.http.post(f"/attempts/1/end?member={member}", json=FAILED)
    assert reply.status_code == 404
    assert (
        group.master.http.get(f"/attempts/1/control?begins=true&member={member}").status_code == 404
    )
