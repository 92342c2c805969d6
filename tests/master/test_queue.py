"""Pools, priorities, the order of experiments and drained slots, through the API."""

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from sqlalchemy import select, update

from paceline._cluster.master.api import status_and_event_routes as _master_routes
from paceline._cluster.master.store import tables
from paceline._cluster.messages.states import ErrorKind, ExitReason
from paceline.cli import _experiment_follower
from paceline.client import ApiError, Client

SINGLE = {"name": "single", "metric": "loss"}


def create(master: Any, **resources: Any) -> int:
    return int(master.create(searcher=SINGLE, hyperparameters={}, resources=resources))


def set_pool(master: Any, name: str = "default", **settings: Any) -> None:
    reply = master.http.put(f"/pools/{name}", json=settings)
    assert reply.status_code == 204, reply.text


def queue(master: Any) -> list[tuple[int, str]]:
    return [(one["experiment_id"], one["reason"]) for one in master.http.get("/queue").json()]


def entries(master: Any) -> dict[int, dict[str, Any]]:
    return {one["experiment_id"]: one for one in master.http.get("/queue").json()}


def attempts(master: Any) -> list[Any]:
    with master.core.database.read() as connection:
        query = select(tables.attempts).order_by(tables.attempts.c.id)
        return list(connection.execute(query))


def running(master: Any) -> list[int]:
    return [one.experiment_id for one in attempts(master) if one.state != "ENDED"]


def leave(master: Any, attempt_id: int) -> None:
    """Let an attempt see that it must leave, and exit with 0."""
    record = {"type": "preemption_acknowledged", "time": 1.0}
    batch = {"generation": 0, "rank": 0, "records": [[0, record]]}
    reply = master.attempt(attempt_id, "records", batches=[batch])
    assert reply.status_code == 200, reply.text
    end(master, attempt_id)


def end(master: Any, attempt_id: int, **changed: Any) -> None:
    body = {"reason": "exited", "code": 0, "signal": None, "time": 1.0} | changed
    assert master.attempt(attempt_id, "end", **body).status_code == 204


def refused(reply: httpx2.Response, status: int, code: str) -> str:
    assert (reply.status_code, reply.json().get("code")) == (status, code), reply.text
    return str(reply.json()["detail"])


def test_who_follows_an_experiment_that_waits_is_told_why_once(
    master: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_master_routes, "_KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(_experiment_follower, "_WAIT_S", 0.1)
    create(master, slots_per_trial=2)
    second = create(master)
    master.schedule()
    with Client(master.url.removesuffix("/api/v1"), master.home.token) as client:
        follower = _experiment_follower.ExperimentFollower(client.get_experiment(second), client)
        following = threading.Thread(target=follower.follow)
        following.start()
        while following.is_alive() and not follower._told_wait:
            time.sleep(0.01)
        time.sleep(0.5)
        assert master.http.post(f"/experiments/{second}/kill").status_code < 300
        master.schedule()
        following.join(60)
    assert not following.is_alive()
    told = [line for line in capsys.readouterr().out.splitlines() if "waits" in line]
    assert told == ["      trial 2 waits: It waits until 1 of 2 slots is free."]


def test_a_more_important_experiment_takes_the_slots_of_the_youngest_and_gives_them_back(
    master: Any,
) -> None:
    set_pool(master, policy="priority")
    low = create(master, priority=90)
    other = create(master, priority=90)
    master.schedule()
    assert running(master) == [low, other]
    high = create(master, priority=10)
    assert entries(master)[high]["reason"] == "preempting"
    master.schedule()
    assert [one.preempt_reason for one in attempts(master)] == [
        None, f"makes room for experiment {high}, which is more important",
    ]  # fmt: skip
    # The same again changes nothing.
    master.schedule()
    assert len(attempts(master)) == 2
    assert attempts(master)[0].preempt_reason is None
    leave(master, 2)
    master.schedule()
    assert running(master) == [low, high]
    assert queue(master) == [(other, "slots_in_use")]
    assert entries(master)[other]["priority"] == 90
    ids = {one["trial_id"] for one in entries(master).values()}
    assert [master.http.get(f"/queue?trial_id={one}").json() for one in (*ids, 77)] == [
        [entries(master)[other]], []
    ]  # fmt: skip
    end(master, 3)
    master.schedule()
    assert running(master) == [low, other]


def test_an_experiment_that_becomes_more_important_goes_first(master: Any) -> None:
    set_pool(master, policy="priority")
    ids = [create(master) for _ in range(4)]
    master.schedule()
    reply = master.http.patch(f"/experiments/{ids[3]}", json={"priority": 1})
    assert reply.status_code == 200, reply.text
    assert queue(master) == [(ids[3], "preempting"), (ids[2], "slots_in_use")]
    master.http.post(f"/experiments/{ids[0]}/kill")
    end(master, 1)
    told = refused(
        master.http.patch(f"/experiments/{ids[0]}", json={"priority": 1}), 409, "not_scheduled"
    )
    assert "CANCELED" in told or "STOPPING" in told
    assert master.http.patch(f"/experiments/{ids[1]}", json={"priority": 0}).status_code == 422


def test_slots_are_shared_by_weight_and_a_newcomer_gets_its_share(make_master: Any) -> None:
    master = make_master(num_slots=4)
    set_pool(master, policy="fair_share")
    first = master.create(searcher={"name": "random", "metric": "loss", "max_trials": 8})
    master.schedule()
    assert running(master) == [first] * 4
    second = master.create(
        searcher={"name": "random", "metric": "loss", "max_trials": 8}, resources={"weight": 3}
    )
    master.schedule()
    leaving = [one.id for one in attempts(master) if one.preempt_reason is not None]
    assert leaving == [2, 3, 4]
    told = attempts(master)[1].preempt_reason
    assert told == f"makes room for experiment {second}, which has less than its share of the slots"
    for attempt_id in leaving:
        leave(master, attempt_id)
    master.schedule()
    assert sorted(running(master)) == [first, second, second, second]
    number = len(attempts(master))
    master.schedule()
    assert len(attempts(master)) == number
    assert entries(master)[second]["weight"] == 3.0


def test_the_order_is_edited_and_told(make_master: Any) -> None:
    master = make_master(num_slots=1)
    ids = [create(master) for _ in range(4)]
    master.schedule()
    assert [one for one, _ in queue(master)] == ids[1:]

    def move(**body: Any) -> httpx2.Response:
        reply: httpx2.Response = master.http.post("/queue/move", json=body)
        return reply

    assert move(experiment_id=ids[3], to="front").status_code == 204
    assert [one for one, _ in queue(master)] == [ids[3], ids[1], ids[2]]
    assert move(experiment_id=ids[3], behind=ids[1]).status_code == 204
    assert move(experiment_id=ids[2], ahead_of=ids[3]).status_code == 204
    assert [one for one, _ in queue(master)] == [ids[1], ids[2], ids[3]]
    assert move(experiment_id=ids[1], to="end").status_code == 204
    told = entries(master)
    assert [(one, told[one]["num_ahead"]) for one in (ids[2], ids[3], ids[1])] == [
        (ids[2], 0), (ids[3], 1), (ids[1], 2),
    ]  # fmt: skip
    assert told[ids[3]]["behind_experiment_id"] == ids[2]
    assert told[ids[3]]["detail"] == (
        f"Trial {told[ids[2]]['trial_id']} of experiment {ids[2]} comes before it and waits for"
        " 1 slot."
    )
    end(master, 1)
    master.schedule()
    assert running(master) == [ids[2]]
    refused(move(experiment_id=ids[1], ahead_of=ids[1]), 409, "same_experiment")
    refused(move(experiment_id=ids[0], ahead_of=ids[1]), 409, "not_scheduled")
    refused(move(experiment_id=99, ahead_of=ids[1]), 404, "not_found")
    refused(move(experiment_id=ids[1]), 422, "invalid_request")
    refused(move(experiment_id=ids[1], ahead_of=ids[3], to="end"), 422, "invalid_request")


def test_a_pool_has_a_limit_and_takes_in_nodes_by_their_labels(
    make_master: Callable[..., Any],
) -> None:
    master = make_master(num_slots=3)
    set_pool(master, max_slots=2)
    ids = [create(master) for _ in range(3)]
    master.schedule()
    assert running(master) == ids[:2]
    assert entries(master)[ids[2]]["detail"] == "The pool 'default' may use 2 slots at a time."
    [pool] = master.http.get("/pools").json()
    assert (pool["name"], pool["max_slots"], pool["num_slots"], pool["num_slots_used"]) == (
        "default", 2, 3, 2,
    )  # fmt: skip
    assert master.http.delete("/pools/default").status_code == 204
    refused(master.http.delete("/pools/default"), 404, "not_found")
    master.schedule()
    assert running(master) == ids
    assert master.http.put("/pools/a b", json={}).status_code == 422
    assert master.http.put("/pools/x", json={"policy": "best"}).status_code == 422
    assert master.http.put("/pools/x", json={"max_slots": 0}).status_code == 422


def test_a_drained_slot_is_left_and_taken_back(master: Any) -> None:
    first, second = create(master), create(master)
    master.schedule()
    assert master.http.post("/nodes/local/slots/1/drain", json={}).status_code == 204
    assert [one.preempt_reason for one in attempts(master)] == [
        None, "the slot 1 of the node local is drained",
    ]  # fmt: skip
    leave(master, 2)
    master.schedule()
    assert running(master) == [first]
    shown = master.http.get("/slots").json()
    assert [one["is_drained"] for one in shown] == [False, True]
    # The numbers that were there before count all slots.
    counts = {
        "num_slots": 2, "num_slots_used": 1, "num_slots_drained": 1, "num_slots_draining": 0,
    }  # fmt: skip
    for found in (master.http.get("/pools").json()[0], master.http.get("/master").json()):
        assert found | counts == found
    assert entries(master)[second]["reason"] == "slots_in_use"
    assert entries(master)[second]["detail"] == "It waits until 1 of 1 slot is free."
    assert master.http.post("/nodes/local/slots/1/resume").status_code == 204
    master.schedule()
    assert running(master) == [first, second]
    # What runs may end there.
    body = {"finish": True}
    assert master.http.post("/nodes/local/slots/0/drain", json=body).status_code == 204
    assert master.http.post("/nodes/local/slots/0/drain", json=body).status_code == 204
    assert attempts(master)[0].preempt_reason is None
    told = refused(master.http.post("/nodes/local/slots/2/drain", json={}), 404, "not_found")
    assert "must have the slot 2, but has 2" in told
    refused(master.http.post("/nodes/nobody/slots/0/drain", json={}), 404, "not_found")


def test_the_node_of_the_master_is_drained_and_taken_back(master: Any) -> None:
    create(master, slots_per_trial=1)
    master.schedule()
    assert master.http.post("/nodes/local/drain", json={}).status_code == 204
    assert attempts(master)[0].preempt_reason == "the node local is drained"
    leave(master, 1)
    master.schedule()
    assert running(master) == []
    assert [one["is_drained"] for one in master.http.get("/slots").json()] == [True, True]
    # It had said that one of 2 slots must be free.
    [entry] = master.http.get("/queue").json()
    assert entry["detail"].startswith("All slots of the pool 'default' are drained, or")
    assert master.http.post("/nodes/local/resume").status_code == 204
    master.schedule()
    assert running(master) == [1]


def test_a_master_that_starts_again_keeps_priorities_order_pools_and_drained_slots(
    make_master: Callable[..., Any],
) -> None:
    master = make_master()
    set_pool(master, policy="priority", max_slots=5, labels={"a": "b"})
    ids = [create(master) for _ in range(5)]
    master.http.patch(f"/experiments/{ids[4]}", json={"priority": 7, "weight": 2.5})
    master.http.post("/queue/move", json={"experiment_id": ids[3], "ahead_of": ids[0]})
    master.http.post("/nodes/local/slots/0/drain", json={})
    before = [(one["experiment_id"], one["priority"]) for one in master.http.get("/queue").json()]
    assert before == [(ids[4], 7), (ids[3], 42), (ids[0], 42), (ids[1], 42), (ids[2], 42)]
    pools, slots = master.http.get("/pools").json(), master.http.get("/slots").json()
    master.close()
    again = make_master()
    after = [(one["experiment_id"], one["priority"]) for one in again.http.get("/queue").json()]
    assert after == before
    assert (again.http.get("/pools").json(), again.http.get("/slots").json()) == (pools, slots)
    assert slots[0]["is_drained"]


def test_a_shortage_on_one_node_holds_up_no_other(make_master: Callable[..., Any]) -> None:
    master = make_master(num_slots=1)
    facts = {
        "name": "box", "key": "k", "version": master.core.version, "protocol": 1,
        "python": "/p", "python_version": "3.11", "devices": ["cpu"], "device_kind": "CPU",
        "num_cores": 1, "memory_bytes": 1,
    }  # fmt: skip
    from paceline._cluster.messages.runner_messages import PROTOCOL

    session = master.http.post("/nodes", json=facts | {"protocol": PROTOCOL}).json()
    poll = {
        "key": "k", "session": session["session"], "number": 1, "attempts": [], "alive": [],
    }  # fmt: skip
    path = f"/nodes/{session['node_id']}/poll"
    assert master.http.post(path, json=poll).status_code == 200
    first, second, third = create(master), create(master), create(master)
    master.schedule()
    placed = {one.experiment_id: one.node_id for one in attempts(master)}
    assert placed == {first: None, second: session["node_id"]}
    import time

    end(
        master, 1, reason=ExitReason.SHORTAGE.value, code=None, time=time.time(),
        kind=ErrorKind.TRANSIENT.value, detail="no space",
    )  # fmt: skip
    master.schedule()
    # The master's machine rests; its trial and the third one wait for the other node.
    assert running(master) == [second]
    assert queue(master) == [(first, "slots_in_use"), (third, "behind_others")]
    end(master, 2)
    master.schedule()
    assert running(master) == [first]
    assert attempts(master)[-1].node_id == session["node_id"]


@pytest.mark.parametrize("policy", ["fifo", "priority", "fair_share"])
def test_a_pool_tells_how_many_more_slots_it_could_use(make_master: Any, policy: str) -> None:
    master = make_master(num_slots=2)
    set_pool(master, policy=policy)
    for _ in range(4):
        create(master)
    # Its own limit keeps one of its two trials from slots.
    master.create(resources={"max_slots": 1})
    master.schedule()
    needs = master.core.reconciler.pool_needs()
    assert {pool: sorted(need.sizes) for pool, need in needs.items()} == {"default": [1, 1, 1]}


def test_the_sdk_sets_priorities_and_weights_and_moves_experiments(master: Any) -> None:
    set_pool(master, policy="priority")
    ids = [create(master) for _ in range(4)]
    with Client(f"http://127.0.0.1:{master.port}", master.home.token) as client:
        client.get_experiment(ids[3]).set_priority(1)
        client.get_experiment(ids[2]).set_weight(2.5)
        client.move_in_queue(ids[1], ahead_of=ids[0])
        assert [one.experiment_id for one in client.queue()] == [ids[3], ids[1], ids[0], ids[2]]
        with pytest.raises(ApiError, match="`priority` must be at most 99"):
            client.get_experiment(ids[0]).set_priority(100)
    with master.core.database.read() as connection:
        experiments = tables.experiments.c
        query = select(experiments.weight).where(experiments.id == ids[2])
        assert connection.execute(query).scalar_one() == 2.5


@pytest.mark.parametrize("policy", ["fifo", "priority", "fair_share"])
def test_a_pass_over_many_experiments_asks_the_database_no_more_often(
    make_master: Any, count_reads: Callable[..., Any], policy: str
) -> None:
    master = make_master(num_slots=3)
    set_pool(master, policy=policy)
    for _ in range(2):
        create(master, slots_per_trial=2)
    master.schedule()

    def num_statements() -> int:
        with count_reads(master.core.database._writer_engine) as reads:
            master.schedule()
        return int(reads.num_statements)

    numbers = []
    for _ in range(2):
        # The log of requests is written some time after the answers, maybe during a pass.
        numbers.append(min(num_statements() for _ in range(5)))
        for _ in range(5):
            create(master, slots_per_trial=2)
    assert len(running(master)) == 1
    assert numbers[1] == numbers[0]


def test_the_most_slots_of_an_experiment_are_changed_while_it_waits(make_master: Any) -> None:
    master = make_master(num_slots=4)
    search = {"name": "random", "metric": "loss", "max_trials": 4, "max_concurrent_trials": 0}
    number = master.create(searcher=search, resources={"max_slots": 1})
    master.schedule()
    assert running(master) == [number]

    def set_most(max_slots: int) -> httpx2.Response:
        reply: httpx2.Response = master.http.patch(
            f"/experiments/{number}", json={"max_slots": max_slots}
        )
        master.schedule()
        return reply

    assert set_most(2).status_code == 200
    assert running(master) == [number] * 2
    # Fewer than there are take none away.
    set_most(1)
    assert running(master) == [number] * 2
    assert entries(master)[number]["reason"] == "max_slots"
    set_most(0)
    assert running(master) == [number] * 4
    large = create(master, slots_per_trial=3)
    reply = master.http.patch(f"/experiments/{large}", json={"max_slots": 2})
    assert "must be at least 3" in refused(reply, 409, "too_few_slots")
    assert master.http.patch(f"/experiments/{large}", json={"max_slots": -1}).status_code == 422
    with Client(f"http://127.0.0.1:{master.port}", master.home.token) as client:
        client.get_experiment(large).set_max_slots(3).set_max_slots(None)


def test_the_queue_estimates_starts_by_the_progress_of_what_runs(make_master: Any) -> None:
    """Without progress there is no estimate; half of the work took as long as the other half."""
    master = make_master(num_slots=1)
    ids = [create(master) for _ in range(3)]
    master.schedule()
    assert {one["estimated_start"] for one in entries(master).values()} == {None}

    def change(transaction: Any) -> None:
        for table, values in (
            (tables.trials, {"progress": 0.5}),
            (tables.attempts, {"created_at": time.time() - 1000}),
        ):
            transaction.connection.execute(update(table).where(table.c.id == 1).values(**values))

    master.core.database.write(change).result()
    begin = time.time()
    found = {one: entry["estimated_start"] for one, entry in entries(master).items()}
    assert begin + 999 <= found[ids[1]] <= time.time() + 1001, f"{found=}"
    # How long the next one takes is not known.
    assert found[ids[2]] is None


def test_a_job_with_a_tiny_progress_gives_others_no_time_that_no_clock_has(
    make_master: Any,
) -> None:
    """The command line of whoever waits in the queue would end with an error."""
    master = make_master(num_slots=1)
    ids = [create(master) for _ in range(2)]
    master.schedule()
    tiny = update(tables.trials).where(tables.trials.c.id == 1).values(progress=1e-300)
    master.core.database.write(lambda job: job.connection.execute(tiny)).result()
    found = entries(master)[ids[1]]["estimated_start"]
    assert found is None, f"{found=}"


def test_interactive_trials_come_first_in_the_hours_of_a_pool(
    make_master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue says so; the hours are kept over a restart, and a clock that jumps changes both."""
    master = make_master(2)
    hours = "09:00-18:00 mon-fri Europe/Berlin"
    for wrong in ("9 to 5", "09:00-18:00 Nowhere/Else"):
        told = refused(
            master.http.put("/pools/default", json={"interactive_first": wrong}),
            422, "invalid_request",
        )  # fmt: skip
        assert told.startswith("`interactive_first` must"), told
    put = master.http.put("/pools/default", json={"interactive_first": hours})
    assert put.status_code == 204, put.text
    again = make_master(2)
    [pool] = again.http.get("/pools").json()
    assert pool["interactive_first"] == hours
    master = again
    # A Wednesday at 11:00 there, and the evening.
    now = 1796205600.0
    monkeypatch.setattr(time, "time", lambda: now)
    create(master)
    master.schedule()
    create(master, slots_per_trial=2)
    mine = create(master, slots_per_trial=2, interactive=True)
    queue = [(one["experiment_id"], one["detail"]) for one in master.http.get("/queue").json()]
    assert [one for one, _ in queue][:2] == [mine, 2]
    assert queue[1][1].endswith(f"Interactive trials come first: {hours}.")
    now += 8 * 3600
    queue = [(one["experiment_id"], one["detail"]) for one in master.http.get("/queue").json()]
    assert [one for one, _ in queue][:2] == [2, mine]
    assert "Interactive" not in queue[1][1]
