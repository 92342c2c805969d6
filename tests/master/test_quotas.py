"""Quotas, shares with past use and reservations, through the API, while trials run."""

import hashlib
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from sqlalchemy import delete, insert, select, update

from paceline._cluster.master.scheduling.pool_policies import DEFAULT_HALF_LIFE_S, faded
from paceline._cluster.master.store import quotas as quotas_module
from paceline._cluster.master.store import tables, user_tables
from paceline._cluster.master.store.quotas import note_use, note_use_of_month
from paceline._cluster.master.upkeep.backup import Backup
from paceline._cluster.master.upkeep.restore import restore

HOUR_S, DAY_S = 3600.0, 86400.0


def start(client: Any, **fields: Any) -> int:
    """Create an experiment with three trials."""
    searcher = {"name": "random", "metric": "loss", "max_trials": 3, "max_concurrent_trials": 0}
    given = {"name": "own", "entrypoint": "python3 t.py", "searcher": searcher, **fields}
    reply = client.post("/experiments", json={"config": given})
    assert reply.status_code == 201, reply.text
    return int(reply.json()["id"])


def set_quota(master: Any, path: str, **limits: Any) -> None:
    reply = master.http.put(f"/quotas/{path}", json=limits)
    assert reply.status_code == 204, reply.text


def running(master: Any) -> list[int]:
    attempts = tables.attempts.c
    with master.core.database.read() as connection:
        query = select(attempts.experiment_id).where(attempts.state != "ENDED")
        return list(connection.execute(query.order_by(attempts.id)).scalars())


def waits(master: Any) -> list[tuple[str, str]]:
    return [(one["reason"], one["detail"]) for one in master.http.get("/queue").json()]


def set_attempts(master: Any, **values: Any) -> None:
    statement = update(tables.attempts).values(**values)
    master.core.database.write(lambda job: job.connection.execute(statement)).result()


def end(master: Any, attempt_id: int, moment: float) -> None:
    body = {"reason": "exited", "code": 0, "signal": None, "time": moment}
    assert master.attempt(attempt_id, "end", **body).status_code == 204


def refused(reply: httpx2.Response, status: int, code: str) -> str:
    assert (reply.status_code, reply.json().get("code")) == (status, code), reply.text
    return str(reply.json()["detail"])


def test_a_quota_of_slots_holds_a_search_that_runs_and_kills_nothing(make_master: Any) -> None:
    master = make_master(4)
    first = start(master.http)
    master.schedule()
    assert running(master) == [first] * 3
    set_quota(master, "user/admin", max_slots=1)
    again = start(master.http)
    master.schedule()
    assert running(master) == [first] * 3
    why = ("quota", "Quota: the user admin may use 1 slot at a time.")
    assert waits(master) == [why] * 3
    set_quota(master, "user/admin", max_slots=4, revision=1)
    master.schedule()
    assert running(master) == [first] * 3 + [again]
    [shown] = master.http.get("/quotas").json()
    assert (shown["num_slots_used"], shown["max_slots"], shown["revision"]) == (4, 4, 2)
    # One of the project holds as well.
    set_quota(master, "project/Default", max_slots=2)
    assert master.http.delete("/quotas/user/admin?revision=2").status_code == 204
    assert waits(master)[0][1] == "Quota: the project Default may use 2 slots at a time."


def test_slot_hours_of_the_month_hold_until_the_next_one(
    make_master: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = make_master(2)
    start(master.http)
    master.schedule()
    # 2026-11-20, in UTC.
    now = 1795132800.0
    monkeypatch.setattr(quotas_module.time, "time", lambda: now)
    set_attempts(master, created_at=now - 3 * HOUR_S)
    set_quota(master, "user/admin", slot_hours=7)
    assert master.http.get("/quotas").json()[0]["slot_hours_used"] == pytest.approx(6)
    assert [reason for reason, _ in waits(master)] == ["slots_in_use"]
    now += HOUR_S
    text = "Quota: the user admin has used up 7 slot hours of 2026-11, until 2026-12-01 UTC."
    assert waits(master) == [("quota", text)]
    # What has ended counts as well; a runner's clock that is ahead adds nothing.
    end(master, 1, now + 30 * DAY_S)
    end(master, 2, now)
    assert master.http.get("/quotas").json()[0]["slot_hours_used"] == pytest.approx(8)
    master.schedule()
    assert running(master) == []
    # A clock that jumps ahead opens the next month, and one that comes back changes nothing.
    now += 20 * DAY_S
    assert master.http.get("/quotas").json()[0]["slot_hours_used"] == 0
    assert [reason for reason, _ in waits(master)][:1] == ["starting"]
    now -= 20 * DAY_S
    assert master.http.get("/quotas").json()[0]["slot_hours_used"] == pytest.approx(8)


def test_media_beyond_a_quota_hold_until_their_experiment_is_deleted(master: Any) -> None:
    number = start(master.http)
    master.schedule()
    digest = hashlib.sha256(b"x" * 100).hexdigest()
    for path in ("a", "b", "a"):
        query = f"digest={digest}&media_type=text/plain"
        put = master.http.put(f"/attempts/1/files/{path}?{query}", content=b"x" * 100)
        assert put.status_code == 204, put.text
    set_quota(master, "project/Default", media_bytes=201)
    [shown] = master.http.get("/quotas").json()
    assert (shown["media_bytes_used"], shown["media_bytes"]) == (200, 201)
    start(master.http)
    assert {reason for reason, _ in waits(master)} != {"quota"}
    set_quota(master, "project/Default", media_bytes=200, revision=1)
    assert {reason for reason, _ in waits(master)} == {"quota"}
    assert "GiB of media and files, until experiments" in waits(master)[0][1]
    master.http.post(f"/experiments/{number}/kill")
    for attempt_id in (1, 2):
        end(master, attempt_id, time.time())
    master.schedule()
    assert master.http.delete(f"/experiments/{number}").status_code == 200
    assert master.http.get("/quotas").json()[0]["media_bytes_used"] == 0
    assert "quota" not in {reason for reason, _ in waits(master)}


def test_what_ended_before_an_upgrade_counts_in_its_month(master: Any) -> None:
    start(master.http)
    master.schedule()
    begin = time.time() - 1.0
    set_attempts(master, created_at=begin, ended_at=begin + 1.0, state="ENDED")

    def fill(transaction: Any) -> None:
        for _ in range(2):
            note_use_of_month(transaction.connection)

    master.core.database.write(fill).result()
    with master.core.database.read() as connection:
        used = connection.execute(select(user_tables.slot_use)).all()
    # Two at the turn of a month.
    assert sum(row.slot_s for row in used) == pytest.approx(2.0, abs=1e-5) or len(used) == 2


def test_checkpoints_beyond_a_quota_hold_until_some_are_deleted(master: Any) -> None:
    start(master.http)
    checkpoint = {
        "uuid": "u", "trial_id": 1, "experiment_id": 1, "attempt": 1, "steps_completed": 1,
        "state": "COMPLETED", "metadata": {}, "resources": {}, "size": 2**30, "storage": "",
        "created_at": 1.0,
    }  # fmt: skip
    statement = insert(tables.checkpoints).values(**checkpoint)
    master.core.database.write(lambda job: job.connection.execute(statement)).result()
    set_quota(master, "project/Default", checkpoint_bytes=2**30)
    text = "Quota: the project Default has used up 1 GiB of checkpoints, until some are deleted."
    assert waits(master) == [("quota", text)] * 3
    gone = update(tables.checkpoints).values(state="DELETED")
    master.core.database.write(lambda job: job.connection.execute(gone)).result()
    assert "quota" not in dict(waits(master))


def test_the_second_of_two_administrators_sees_the_change_of_the_first(
    master: Any, add: Any
) -> None:
    other = add("eve", is_admin=True)
    set_quota(master, "user/eve", max_slots=1)
    text = refused(other.put("/quotas/user/eve", json={"max_slots": 9}), 409, "quota_changed")
    assert "newest revision, 1, but got 0" in text
    refused(other.delete("/quotas/user/eve?revision=7"), 409, "quota_changed")
    assert other.put("/quotas/user/eve", json={"max_slots": 9, "revision": 1}).status_code == 204
    assert master.http.get("/quotas").json()[0]["max_slots"] == 9
    refused(master.http.delete("/quotas/user/bob?revision=1"), 404, "not_found")
    refused(master.http.put("/quotas/user/bob", json={}), 404, "not_found")
    refused(master.http.put("/quotas/project/none", json={}), 404, "not_found")
    for wrong in ({"max_slots": -1}, {"weight": 0}, {"slot_hours": "nan"}, {"weight": 1e300}):
        assert master.http.put("/quotas/user/eve", json=wrong).status_code == 422
    actions = [one["action"] for one in master.http.get("/audit").json()]
    assert actions.count("PUT /quotas/user/eve") >= 2


def test_a_user_sees_own_quotas_alone_and_sets_none(master: Any, add: Any) -> None:
    ada, bob = add("ada"), add("bob", role=None)
    for path in ("user/ada", "user/bob", "project/Default"):
        set_quota(master, path, max_slots=1)
    seen = [
        [one["user"] or one["project"] for one in client.get("/quotas").json()]
        for client in (ada, bob, master.http)
    ]
    assert seen == [["ada", "Default"], ["bob"], ["ada", "bob", "Default"]]
    for client in (ada, bob):
        refused(client.put("/quotas/user/ada", json={"revision": 1}), 403, "scope_too_low")
        refused(client.delete("/quotas/user/ada?revision=1"), 403, "scope_too_low")
        body = {"user": "ada", "begins_at": 0, "ends_at": 2**33}
        refused(client.post("/nodes/local/reservations", json=body), 403, "scope_too_low")


def test_a_removed_users_quota_stays_with_the_trials(master: Any, add: Any) -> None:
    number = start(add("ada"))
    set_quota(master, "user/ada", max_slots=1)
    master.schedule()
    assert master.http.delete("/users/ada").status_code == 204
    master.schedule()
    assert running(master) == [number]
    assert waits(master)[0][1] == "Quota: the user ada may use 1 slot at a time."
    set_quota(master, "user/ada", max_slots=2, revision=1)
    master.schedule()
    assert running(master) == [number] * 2


def test_past_use_is_kept_over_restarts_and_backups_and_decides_who_is_next(
    make_master: Any, add_to: Any, tmp_path: Any
) -> None:
    master = make_master(2)
    pool = {"policy": "fair_share", "half_life_hours": 24}
    assert master.http.put("/pools/default", json=pool).status_code == 204
    ada, bob = add_to(master, "ada"), add_to(master, "bob")
    start(ada)
    master.schedule()
    now = time.time()
    set_attempts(master, created_at=now - 12 * HOUR_S)
    for attempt_id in (1, 2):
        end(master, attempt_id, now)
    first, second = start(ada), start(bob)
    set_quota(master, "user/bob", weight=1.5)
    master.close()
    backup = Backup(master.home.path, tmp_path / "backup")
    with backup.hold():
        backup.make()
    restore(tmp_path / "backup", tmp_path / "again")
    for name in ("home", "again"):
        again = make_master(2, name)
        # Bob's two come before the one that has waited longer.
        again.schedule()
        assert running(again) == [second] * 2, name
        assert again.http.get("/pools").json()[0]["half_life_hours"] == 24
        assert again.http.get("/quotas").json()[0]["weight"] == 1.5
        end(again, 3, time.time())
        again.schedule()
        assert first not in running(again)
        again.close()


@pytest.mark.long
def test_a_reservation_clears_its_node_and_keeps_others_away(master: Any, add: Any) -> None:
    ada = add("ada")
    number = start(master.http)
    master.schedule()
    assert running(master) == [number] * 2
    now = time.time()
    body = {"user": "ada", "begins_at": now + 0.5 * HOUR_S, "ends_at": now + 9 * HOUR_S}
    made = master.http.post("/nodes/local/reservations", json=body)
    assert made.status_code == 201, made.text
    # Soon: those who run go on, no others start.
    master.schedule()
    with master.core.database.read() as connection:
        asked = select(tables.attempts.c.preempt_reason)
        assert set(connection.execute(asked).scalars()) == {None}
    [(reason, why)] = waits(master)
    assert reason == "reserved"
    assert why.startswith("The nodes that it needs are reserved for ada, until 20")
    [node] = ada.get("/nodes?include_local=true").json()
    assert [one["user"] for one in node["reservations"]] == ["ada"]
    # It has begun: they are asked to leave with a checkpoint, as by a drain.
    begun = update(user_tables.reservations).values(begins_at=now - 1.0)
    master.core.database.write(lambda job: job.connection.execute(begun)).result()
    for _ in range(2):
        master.schedule()
    with master.core.database.read() as connection:
        reasons = list(connection.execute(asked).scalars())
    assert reasons == ["its node is reserved for others"] * 2
    own = start(ada)
    for attempt_id in (1, 2):
        end(master, attempt_id, now)
    master.schedule()
    assert running(master) == [own] * 2
    path = f"/nodes/local/reservations/{made.json()['id']}"
    assert master.http.delete(path).status_code == 204
    refused(master.http.delete(path), 404, "not_found")
    assert "reserved" not in dict(waits(master))


def test_reservations_of_a_removed_user_end(master: Any, add: Any) -> None:
    """Nobody could start a trial in such a time."""
    add("ada")
    body = {"user": "ada", "begins_at": 1.0, "ends_at": time.time() + HOUR_S}
    assert master.http.post("/nodes/local/reservations", json=body).status_code == 201
    assert master.http.delete("/users/ada").status_code == 204
    [node] = master.http.get("/nodes?include_local=true").json()
    assert node["reservations"] == []
    number = start(master.http)
    master.schedule()
    assert running(master) == [number] * 2


def test_a_reservation_that_has_begun_lets_in_nobody_of_the_next_one(master: Any, add: Any) -> None:
    add("ada"), add("bob")
    now = time.time()

    def closed_to(moment: float) -> list[bool]:
        with master.core.database.read() as connection:
            [node] = master.core.reconciler.cluster(connection, moment).nodes
        return [node.is_closed_to(user) for user in ("ada", "bob", "admin")]

    for user, begin, end_at in (("ada", 2, 4), ("bob", 4.5, 6), ("bob", 3.9, 6)):
        times = {"begins_at": now + begin * HOUR_S, "ends_at": now + end_at * HOUR_S}
        reply = master.http.post("/nodes/local/reservations", json={"user": user, **times})
        assert reply.status_code == 201, reply.text
    # Before, in the hour before, ada's, both at the same time, bob's, after.
    found = [closed_to(now + hours * HOUR_S) for hours in (0.5, 1.5, 3.5, 3.95, 5, 7)]
    assert found == [
        [False, False, False],
        [False, True, True],
        [False, True, True],
        [False, False, True],
        [True, False, True],
        [False, False, False],
    ]


def test_a_clock_that_jumps_past_a_reservation_and_back_finds_it_again(
    master: Any, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add("ada")
    now = time.time()
    times = {"begins_at": now + 2 * HOUR_S, "ends_at": now + 4 * HOUR_S}
    master.http.post("/nodes/local/reservations", json={"user": "ada", **times})
    number = start(master.http)
    for hours, is_free in ((3.0, False), (9.0, True), (-9.0, True), (3.0, False)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * HOUR_S)
        master.schedule()
        with master.core.database.read() as connection:
            [node] = master.core.reconciler.cluster(connection, time.time()).nodes
        assert node.is_closed_to("admin") is not is_free
        # Who has begun in a time that was free leaves; nobody is let in before.
        preempted = [] if is_free else ["its node is reserved for others"] * len(running(master))
        with master.core.database.read() as connection:
            asked = select(tables.attempts.c.preempt_reason)
            assert [one for one in connection.execute(asked).scalars() if one] == preempted
    assert running(master) == [number] * 2


def test_a_reservation_of_nothing_is_refused(master: Any) -> None:
    body = {"user": "admin", "begins_at": 5, "ends_at": 2**33}
    reserve = master.http.post
    refused(reserve("/nodes/gone/reservations", json=body), 404, "not_found")
    refused(reserve("/nodes/local/reservations", json=body | {"user": "x"}), 404, "not_found")
    for wrong in ({"ends_at": 4}, {"ends_at": 6}, {"begins_at": 2**34}, {"ends_at": 2**39}):
        reply = reserve("/nodes/local/reservations", json=body | wrong)
        refused(reply, 422, "invalid_request")
    assert (
        "1970-01-01 00:00 UTC to 1970-01-01 00:00 UTC"
        in reserve("/nodes/local/reservations", json=body | {"ends_at": 4}).text
    )
    # A clock that is set back before its beginning only delays it, and one set ahead ends it.
    assert reserve("/nodes/local/reservations", json=body).status_code == 201
    for moment, is_closed in ((0.0, True), (time.time(), True), (2.0**33 + 1, False)):
        with master.core.database.read() as connection:
            cluster = master.core.reconciler.cluster(connection, moment)
        assert cluster.nodes[0].is_closed_to("bob") is is_closed


def put_pool(master: Any, **rules: Any) -> None:
    reply = master.http.put("/pools/default", json=rules)
    assert reply.status_code == 204, reply.text


def test_a_quota_of_a_group_counts_all_of_its_members(make_master: Any) -> None:
    """The queue says that it is the group's."""
    master = make_master(4)
    for user in ("ada", "bob"):
        reply = master.http.post("/users", json={"name": user})
        assert reply.status_code == 201, reply.text
        assert master.http.patch(f"/users/{user}", json={"group": "lab"}).status_code == 204
    set_quota(master, "group/lab", max_slots=2)
    ids = [start(master.http) for _ in range(2)]
    for number, user in zip(ids, ("ada", "bob"), strict=True):
        statement = update(tables.experiments).where(tables.experiments.c.id == number)
        change = statement.values(owner=user)
        master.core.database.write(lambda job, c=change: job.connection.execute(c)).result()
    master.schedule()
    assert len(running(master)) == 2
    assert set(waits(master)) == {("quota", "Quota: the group lab may use 2 slots at a time.")}
    [quota] = master.http.get("/quotas").json()
    assert (quota["group"], quota["user"], quota["num_slots_used"]) == ("lab", None, 2)
    set_quota(master, "group/lab", slot_hours=1, revision=1)
    set_attempts(master, created_at=time.time() - HOUR_S)
    assert {one[1][:39] for one in waits(master)} == {"Quota: the group lab has used up 1 slot"}


def test_a_pool_is_open_to_some_users_groups_and_projects(master: Any, add: Any) -> None:
    """Others are refused, and their trials that wait already are told so."""
    ada, eve = add("ada"), add("eve")
    early = start(eve)
    assert refused(master.http.put("/pools/default", json={"open_to": ["@lab"]}), 404, "not_found")
    assert master.http.patch("/users/ada", json={"group": "lab"}).status_code == 204
    put_pool(master, open_to=["@lab", "admin"])
    [pool] = eve.get("/pools").json()
    assert pool["open_to"] == ["@lab", "admin"]
    master.schedule()
    assert running(master) == []
    assert waits(master)[0][1] == "The pool 'default' is not open to eve, by its settings."
    body = {"config": {"name": "x", "entrypoint": "python3 t.py",
                       "searcher": {"name": "single", "metric": "loss"}}}  # fmt: skip
    told = refused(eve.post("/experiments", json=body), 409, "pool_closed")
    assert "must be a pool that is open to 'eve'" in told
    late = start(ada)
    master.schedule()
    assert set(running(master)) == {late}
    put_pool(master, open_to=["project:Default"])
    assert eve.post("/experiments", json=body).status_code == 201
    assert early in {one["experiment_id"] for one in master.http.get("/queue").json()}
    assert "pool_limit" not in dict(waits(master))


def test_only_administrators_of_a_project_exceed_the_best_priority(master: Any, add: Any) -> None:
    """The cap holds for configs and for changes."""
    ada = add("ada")
    put_pool(master, policy="priority", best_priority=30)
    body: dict[str, Any] = {"config": {
        "name": "x", "entrypoint": "python3 t.py", "resources": {"priority": 29},
        "searcher": {"name": "single", "metric": "loss"},
    }}  # fmt: skip
    told = refused(ada.post("/experiments", json=body), 409, "priority_too_high")
    assert "`resources.priority` must be 30 or a less important one" in told
    body["config"]["resources"]["priority"] = 30
    number = ada.post("/experiments", json=body).json()["id"]
    change = f"/experiments/{number}"
    refused(ada.patch(change, json={"priority": 1}), 409, "priority_too_high")
    assert ada.patch(change, json={"priority": 31}).status_code in (200, 204)
    assert master.http.patch(change, json={"priority": 1}).status_code in (200, 204)
    role = master.http.put("/projects/Default/members/ada", json={"role": "admin"})
    assert role.status_code == 204
    assert ada.patch(change, json={"priority": 2}).status_code in (200, 204)


def test_the_best_priority_holds_without_one_and_for_continued_experiments(
    master: Any, add: Any
) -> None:
    """A continued experiment takes another priority or pool, and none named is 42."""
    ada = add("ada")
    body: dict[str, Any] = {"activate": False, "config": {
        "name": "x", "entrypoint": "python3 t.py", "resources": {"priority": 30},
        "searcher": {"name": "single", "metric": "loss"},
    }}  # fmt: skip
    put_pool(master, policy="priority", best_priority=30)
    number = ada.post("/experiments", json=body).json()["id"]
    one = f"/experiments/{number}"
    assert ada.post(f"{one}/kill").json()["state"] == "CANCELED"
    for changed in ({"priority": 1}, {"priority": 1, "pool": "default"}):
        given = {"config": {"resources": changed}}
        refused(ada.post(f"{one}/continue", json=given), 409, "priority_too_high")
    # What an administrator chose stays, also if others continue the experiment.
    assert master.http.post(f"{one}/continue", json=given).status_code == 200
    assert ada.post(f"{one}/kill").json()["state"] == "CANCELED"
    given = {"config": {"entrypoint": "python3 other.py"}}
    assert ada.post(f"{one}/continue", json=given).status_code == 200
    put_pool(master, policy="priority", best_priority=60)
    del body["config"]["resources"]
    assert "but got 42." in refused(ada.post("/experiments", json=body), 409, "priority_too_high")
    # Administrators change what they may not start themselves.
    put_pool(master, policy="priority", open_to=["ada"])
    assert master.http.patch(one, json={"priority": 5}).status_code == 200


def test_nobody_changes_what_runs_as_somebody_else(master: Any, add: Any) -> None:
    """On runners of their own user, trials run as the owner, also if others continue them."""
    ada, eve = add("ada"), add("eve")
    body = {"activate": False, "config": {
        "name": "x", "entrypoint": "python3 t.py", "searcher": {"name": "single", "metric": "loss"},
    }}  # fmt: skip
    one = f"/experiments/{ada.post('/experiments', json=body).json()['id']}"
    assert ada.post(f"{one}/kill").json()["state"] == "CANCELED"
    put_pool(master, own_runners=True)
    given = {"config": {"entrypoint": "python3 mine.py"}}
    told = refused(eve.post(f"{one}/continue", json=given), 409, "other_owner")
    assert "must be 'ada', as whom trials run" in told
    assert eve.post(f"{one}/continue", json={}).status_code == 200
    assert eve.post(f"{one}/kill").json()["state"] == "CANCELED"
    assert ada.post(f"{one}/continue", json=given).status_code == 200


def test_of_equal_users_the_one_is_next_who_had_slots_longest_ago(
    make_master: Any, add_to: Any
) -> None:
    """Not the one whose experiments are older; a clock that was set back changes nothing."""
    master = make_master(1)
    assert master.http.put("/pools/default", json={"policy": "fair_share"}).status_code == 204
    ada, bob = add_to(master, "ada"), add_to(master, "bob")
    single = {"searcher": {"name": "single", "metric": "loss"}}
    first, older, other = start(ada, **single), start(ada, **single), start(bob, **single)
    master.schedule()
    assert running(master) == [first]
    end(master, 1, time.time())
    with master.core.database.read() as connection:
        sharing = master.core.reconciler.cluster(connection, time.time()).sharing
        assert set(sharing.served["default"]) == {"ada"}
        # To a clock of before, that was no turn.
        assert master.core.reconciler.cluster(connection, 1.0).sharing.served["default"] == {}
    master.schedule()
    assert running(master) == [other]
    end(master, 2, time.time())
    master.schedule()
    assert running(master) == [older]


def test_slots_in_a_gap_are_no_turn_but_count_as_use(master: Any) -> None:
    """The use is the same at any later time, and the last turn is that of before."""
    owner = SimpleNamespace(owner="ada", project_id=1)
    now = time.time()

    def fill(transaction: Any, *, is_filler: bool) -> Any:
        connection = transaction.connection
        connection.execute(delete(user_tables.slot_use))
        note_use(connection, owner, None, 2, now - 500, now - 400, is_filler=False)
        note_use(connection, owner, None, 3, now - 300, now - 20, is_filler=is_filler)
        return connection.execute(select(user_tables.slot_use)).one()

    plain, filler = (
        master.core.database.write(partial(fill, is_filler=one)).result() for one in (False, True)
    )
    assert (plain.at, filler.at) == (pytest.approx(now - 20), pytest.approx(now - 400))
    assert plain.slot_s == pytest.approx(filler.slot_s) == pytest.approx(2 * 100 + 3 * 280)
    later = [faded(one.recent_s, one.at, now + 1e5, DEFAULT_HALF_LIFE_S) for one in (plain, filler)]
    assert later[0] == pytest.approx(later[1], rel=1e-9)
