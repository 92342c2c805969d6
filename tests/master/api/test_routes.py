import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from paceline._cluster.master.api import status_and_event_routes as _master_routes
from paceline._cluster.master.store.api_models_from_rows import encode_cursor

EMPTY = hashlib.sha256(b"").hexdigest()


@pytest.fixture
def running(master: Any) -> Any:
    """Return a master with one experiment whose two trials have running attempts 1 and 2."""
    master.create()
    master.schedule()
    for attempt_id in (1, 2):
        master.report(attempt_id, 0)
    return master


def item(http: httpx2.Client, path: str, **query: Any) -> Any:
    reply = http.get(path, params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


# ---- pages -----------------------------------------------------------------------------------


def all_pages(http: httpx2.Client, path: str, **query: Any) -> list[Any]:
    found, cursor = [], None
    while True:
        page = item(http, path, **query | ({"cursor": cursor} if cursor else {}))
        assert 0 < len(page["items"]) <= query["limit"] or cursor is None
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_pages_of_experiments_join_to_the_whole(master: Any, limit: int) -> None:
    for _ in range(7):
        master.create()
    found = all_pages(master.http, "/experiments", limit=limit)
    assert [one["id"] for one in found] == [7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("smaller", "by_metric"), [(True, [3, 2, 4, 1, 5, 6]), (False, [4, 2, 3, 1, 5, 6])]
)
def test_trials_are_listed_by_id_or_by_metric_with_the_unmeasured_last(
    make_master: Any, smaller: bool, limit: int, by_metric: list[int]
) -> None:
    master = make_master(6)
    master.create(
        searcher={
            "name": "random", "metric": "loss", "max_trials": 6, "smaller_is_better": smaller,
        }
    )  # fmt: skip
    master.schedule()
    by_trial = [{"$float": "nan"}, 0.5, 0.1, 0.9]
    for attempt_id, loss in enumerate(by_trial, 1):
        master.report(attempt_id, 0, ("validation", 1, {"loss": loss}))
    path = "/experiments/1/trials"
    found = all_pages(master.http, path, limit=limit)
    assert [one["id"] for one in found] == [1, 2, 3, 4, 5, 6]
    found = all_pages(master.http, path, limit=limit, sort_by="metric")
    assert [one["id"] for one in found] == by_metric
    assert found[-3]["latest_metric"] == {"$float": "nan"}


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_pages_of_metrics_join_to_the_whole(running: Any, limit: int) -> None:
    reports = [("training", step, {"x": step / 2, "n": {"$float": "nan"}}) for step in range(10)]
    running.report(1, 0, *reports)
    found = all_pages(running.http, "/trials/1/metrics", group="training", limit=limit)
    assert [(row["steps_completed"], row["metrics"]) for row in found] == [
        (step, metrics) for _, step, metrics in reports
    ]


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_pages_of_logs_join_to_the_whole(running: Any, limit: int) -> None:
    entries = [[n, float(n), 0, "stdout", "INFO", f"line {n}"] for n in range(8)]
    running.attempt(1, "logs", entries=entries)
    found, after = [], -1
    while page := item(running.http, "/trials/1/logs", after=after, limit=limit):
        found += page["items"]
        if page["next_cursor"] is None:
            break
        after = int(page["next_cursor"])
    assert [line["text"] for line in found] == [f"line {n}" for n in range(8)]
    tail = item(running.http, "/trials/1/logs", tail=3)["items"]
    assert [line["text"] for line in tail] == ["line 5", "line 6", "line 7"]


def test_a_pattern_that_explodes_elsewhere_is_searched_in_linear_time(running: Any) -> None:
    """Each line would take Python's engine more steps than there are atoms."""
    text = "a" * 4000 + "b"
    entries = [[n, float(n), 0, "stdout", None, text + "a" * (n == 7)] for n in range(1000)]
    running.attempt(1, "logs", entries=entries)
    page = item(running.http, "/trials/1/logs", pattern="(A+)+$", tail=10)
    assert [(line["id"] % 2**40, line["found"]) for line in page["items"]] == [(7, [4001, 4002])]
    assert page["num_lines"] == 1000


@pytest.mark.parametrize("pattern", ["(", "a{1000}{1000}", r"(a)\1", "x" * 501])
def test_a_pattern_that_the_engine_does_not_take_is_refused(running: Any, pattern: str) -> None:
    """Broken, too large, and what needs more than linear time."""
    reply = running.http.get("/trials/1/logs", params={"pattern": pattern})
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request"), reply.text
    assert "pattern" in reply.json()["detail"], reply.text


@pytest.mark.parametrize(
    "colors", [[[0, "31m\x1b[2J"]], [[-1, "31"]], [[0, "31"]] * 201, [["0", "31"]], [[0]]]
)
def test_colours_of_a_line_are_numbers_only(running: Any, colors: Any) -> None:
    """A runner cannot send other sequences in the place of colours."""
    entries = [[0, 0.0, 0, "stdout", None, "text", colors]]
    reply = running.http.post("/attempts/1/logs", json={"entries": entries})
    assert reply.status_code == 422, reply.text


@pytest.mark.parametrize(
    "cursor",
    ["é", "=", "a" * 2000, base64.urlsafe_b64encode(b"[" * 20_000).decode(), encode_cursor(True),
     encode_cursor(1, 2), encode_cursor(None), encode_cursor({}), encode_cursor(1.0)],
)  # fmt: skip
def test_a_cursor_made_elsewhere_is_refused(running: Any, cursor: str) -> None:
    for path in ("/experiments", "/experiments/1/trials", "/trials/1/metrics"):
        reply = running.http.get(path, params={"cursor": cursor})
        assert (reply.status_code, reply.json()["code"]) == (400, "invalid_cursor")


@pytest.mark.parametrize("number", [10**30, -(10**30)])
def test_a_cursor_beyond_64_bits_is_no_failure(running: Any, number: int) -> None:
    for path in ("/experiments", "/experiments/1/trials", "/experiments/1/checkpoints"):
        reply = running.http.get(path, params={"cursor": encode_cursor(number)})
        assert reply.status_code in (200, 400, 422)


# ---- experiments -----------------------------------------------------------------------------


def test_an_experiment_goes_through_its_states(running: Any) -> None:
    http = running.http
    assert item(http, "/experiments/1")["state"] == "ACTIVE"
    for action, state in (
        ("pause", "PAUSED"), ("activate", "ACTIVE"), ("cancel", "STOPPING_CANCELED"),
        ("kill", "STOPPING_KILLED"),
    ):  # fmt: skip
        reply = http.post(f"/experiments/1/{action}")
        assert (reply.status_code, reply.json()["state"]) == (200, state)
    reply = http.post("/experiments/1/pause")
    assert (reply.status_code, reply.json()["code"]) == (409, "wrong_state")
    assert item(http, "/experiments", state="STOPPING_KILLED")["items"][0]["num_running"] == 2
    assert item(http, "/experiments", state="PAUSED")["items"] == []


def test_states_are_shown_in_the_words_of_the_command_line(master: Any) -> None:
    master.create()
    master.schedule()
    master.report(1, 0, ("training", 1, {"loss": 0.5}))

    def shown() -> list[str]:
        items = item(master.http, "/experiments/1/trials")["items"][:2]
        assert [one["state"] for one in items] == ["ACTIVE", "ACTIVE"]
        assert item(master.http, "/trials/1")["shown_state"] == items[0]["shown_state"]
        of = item(master.http, "/experiments/1")["shown_state"]
        return [of, *(one["shown_state"] for one in items)]

    assert shown() == ["RUNNING", "RUNNING", "QUEUED"]
    master.http.post("/experiments/1/pause")
    assert shown() == ["PAUSED", "STOPPING", "PAUSED"]


def test_waiting_for_slots_is_no_part_of_how_long_a_trial_runs(master: Any) -> None:
    master.create()
    assert item(master.http, "/trials/1")["started_at"] is None
    master.schedule()
    assert item(master.http, "/trials/1")["started_at"] is None
    master.report(1, 0, ("training", 1, {"loss": 0.5}))
    one, other = item(master.http, "/experiments/1/trials")["items"][:2]
    assert one["started_at"] > one["created_at"]
    assert (one["is_running"], other["is_running"], other["started_at"]) == (True, False, None)


def test_an_attempt_is_followed_to_its_end(running: Any) -> None:
    assert item(running.http, "/master")["num_slots_used"] == 2
    slots = item(running.http, "/slots")
    assert [(slot["id"], slot["trial_id"], slot["attempt_id"]) for slot in slots] == [
        (0, 1, 1), (1, 2, 2),
    ]  # fmt: skip
    running.report(1, 0, ("validation", 5, {"loss": 0.25, "text": "x"}))
    end = {"reason": "exited", "code": 0, "signal": None, "time": 9.0}
    for _ in range(2):
        assert running.attempt(1, "end", **end).status_code == 204
    trial = item(running.http, "/trials/1")
    assert (trial["state"], trial["is_running"], trial["best_metric"]) == ("COMPLETED", False, 0.25)
    assert trial["attempts"][0]["exit"]["reason"] == "exited"
    summary = trial["summary"]["validation"]
    assert summary["loss"] == {
        "count": 1, "last": 0.25, "last_step": 5, "min": 0.25, "max": 0.25, "mean": 0.25,
        "x_axis": None,
    }  # fmt: skip
    assert (summary["text"]["last"], summary["text"]["mean"]) == ("x", None)
    assert item(running.http, "/slots")[0]["trial_id"] is None


def test_records_that_can_never_be_stored_are_refused_and_harm_nobody(running: Any) -> None:
    huge = {"type": "metrics", "time": 0.0, "group": "training", "steps_completed": 1}
    deep: Any = 1.0
    for _ in range(60):
        deep = [deep]
    for record in (
        huge | {"steps_completed": 2**63, "metrics": {"x": 1}},
        huge | {"metrics": {"x": 2**64}},
        huge | {"metrics": {"x": [[[[[deep]]]]]}},
        huge | {"metrics": {"x": {"$float": "many"}}},
        {"type": "dance", "time": 0.0},
    ):
        batch = {"generation": 0, "rank": 0, "records": [[0, record]]}
        reply = running.attempt(1, "records", batches=[batch])
        assert reply.status_code == 422, reply.text
        assert reply.json()["code"] in ("invalid_records", "invalid_request")
    running.report(1, 0, ("training", 1, {"x": deep}))
    assert item(running.http, "/trials/1/metrics", group="training")["items"][0]["metrics"] == {
        "x": deep
    }


def test_reports_that_a_search_judges_are_answered_by_what_is_wanted_since_then(
    master: Any,
) -> None:
    """The second of two trials is stopped at the rung; a runner that missed that asks again."""
    searcher = {
        "name": "async_halving", "metric": "loss", "time_metric": "batches", "max_time": 4,
        "num_rungs": 2, "max_trials": 2, "divisor": 2, "sampler": "random",
    }  # fmt: skip
    master.create(searcher=searcher)
    master.create()
    for _ in range(2):
        master.schedule()

    def answer(attempt_id: int, *reports: tuple[str, float]) -> Any:
        records = [
            [number, {"type": "metrics", "time": 0.0, "group": group, "steps_completed": 2,
                      "metrics": {"loss": loss}}]
            for number, (group, loss) in enumerate(reports)
        ]  # fmt: skip
        batches = [{"generation": 0, "rank": 0, "records": records}] if records else []
        return master.attempt(attempt_id, "records", batches=batches).json()

    assert answer(1, ("training", 1.0))["control"] is None
    first = answer(1, ("training", 1.0), ("validation", 1.0))
    assert not first["control"]["should_preempt"]
    second = answer(2, ("validation", 2.0))
    assert second["control"]["should_preempt"]
    assert second["marks"] == [{"generation": 0, "rank": 0, "sequence": 0}]
    assert answer(2) == second


@pytest.mark.parametrize(
    "config",
    [
        {"name": "\ud800"},
        {"data": {"x": "\ud800"}},
        {"hyperparameters": {"x": "\ud800"}},
        {"hyperparameters": {"x": float("nan")}},
        {"data": {"x": float("inf")}},
    ],
)
def test_values_that_no_database_holds_are_refused(master: Any, config: dict[str, Any]) -> None:
    searcher = {"name": "single", "metric": "loss"}
    body = {"config": {"entrypoint": "true", "searcher": searcher} | config}
    reply = master.http.post(
        "/experiments", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 422, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    assert item(master.http, "/experiments")["items"] == []


# ---- contexts --------------------------------------------------------------------------------


def test_a_context_comes_back_and_may_be_stored_twice(master: Any) -> None:
    body = bytes(range(256)) * 1000
    digest = hashlib.sha256(body).hexdigest()
    for _ in range(2):
        assert master.http.put(f"/contexts/{digest}", content=body).status_code == 204
    assert master.http.get(f"/contexts/{digest}").content == body
    stored = list(master.home.contexts_path.iterdir())
    assert [path.name for path in stored] == [f"{digest}.tar.gz"]
    assert stored[0].stat().st_mode & 0o077 == 0


def test_a_context_with_another_digest_is_refused(master: Any) -> None:
    reply = master.http.put(f"/contexts/{EMPTY}", content=b"not empty")
    assert (reply.status_code, reply.json()["code"]) == (422, "wrong_digest")
    assert list(master.home.contexts_path.iterdir()) == []


def test_a_context_beyond_the_limit_is_refused_before_it_has_all_arrived(master: Any) -> None:
    sent = 0

    def blocks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(200):
            sent += 1
            yield bytes(1024 * 1024)

    try:
        reply = master.http.put(f"/contexts/{EMPTY}", content=blocks())
        assert (reply.status_code, reply.json()["code"]) == (413, "context_too_large")
    except httpx2.WriteError:
        pass  # the server answered and closed while the rest was on its way
    assert sent > 95
    assert list(master.home.contexts_path.iterdir()) == []


def test_an_experiment_needs_its_context_uploaded_before(master: Any) -> None:
    config = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}
    for digest in (EMPTY, "../token", ""):
        body = {"config": config, "context_digest": digest}
        reply = master.http.post("/experiments", json=body)
        assert (reply.status_code, reply.json()["code"]) == (409, "no_context")
    master.http.put(f"/contexts/{EMPTY}", content=b"")
    body = {"config": config, "context_digest": EMPTY}
    assert master.http.post("/experiments", json=body).status_code == 201


# ---- waiting for changes ---------------------------------------------------------------------


def test_control_answers_at_once_when_the_version_is_new(running: Any) -> None:
    control = item(running.http, "/attempts/1/control", after=0, timeout_s=60)
    assert control["version"] == 1
    assert not control["should_preempt"]
    assert control["best_validation"] is None


@pytest.mark.parametrize(
    ("path", "field"),
    [("/experiments/1/pause", "should_preempt"), ("/experiments/1/kill", "should_kill")],
)
def test_a_waiting_control_request_wakes_on_a_change(running: Any, path: str, field: str) -> None:
    """The request would wait for a minute, and the test would run into its time limit."""
    found: list[Any] = []
    waiting = threading.Thread(
        target=lambda: found.append(
            httpx2.get(
                f"{running.url}/attempts/1/control",
                params={"after": 1, "timeout_s": 60},
                headers=running.headers,
                timeout=90,
            ).json()
        )
    )
    waiting.start()
    while not running.core.controls._waiting:
        time.sleep(0.005)
    assert running.http.post(path).status_code == 200
    waiting.join(60)
    assert not waiting.is_alive()
    assert found[0]["version"] > 1
    assert found[0][field]


def test_a_users_kill_gives_no_time_and_that_of_a_master_that_shuts_down_does(running: Any) -> None:
    running.core.database.write(running.core.reconciler._kill_all).result()
    running.http.post("/trials/1/kill")
    controls = [item(running.http, f"/attempts/{attempt_id}/control") for attempt_id in (1, 2)]
    assert [control["should_kill"] for control in controls] == [True, True]
    assert [control["kill_grace_s"] for control in controls] == [0.0, 5.0]
    assert [control["should_preempt"] for control in controls] == [False, False]


def test_control_without_a_change_answers_after_its_time_with_the_old_version(running: Any) -> None:
    control = item(running.http, "/attempts/1/control", after=1, timeout_s=0.05)
    assert control["version"] == 1


@contextmanager
def following(
    master: Any, last_id: str | None = None, **query: Any
) -> Iterator[Iterator[dict[str, Any]]]:
    """Follow events; gives an iterator over them that ends when the server closes the stream."""
    headers = master.headers | ({} if last_id is None else {"last-event-id": last_id})
    with httpx2.stream(
        "GET", f"{master.url}/events", params=query, headers=headers, timeout=60
    ) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert next(lines) == "event: connected"

        def events() -> Iterator[dict[str, Any]]:
            number = None
            for line in lines:
                if line.startswith("id: "):
                    number = int(line[4:])
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    assert event["id"] == number
                    yield event

        yield events()


def test_events_come_in_order_and_resume_from_a_cursor(running: Any) -> None:
    with following(running, after=0) as events:
        first = [next(events) for _ in range(5)]
    assert [event["id"] for event in first] == [1, 2, 3, 4, 5]
    assert first[0]["kind"] == "experiment_state"
    assert [event["kind"] for event in first[1:3]] == ["trial_created"] * 2
    with following(running, after=3) as events:
        assert [next(events) for _ in range(2)] == first[3:]
    with following(running, last_id="4", after=1) as events:
        assert next(events) == first[4]


def test_more_events_than_one_read_takes_all_arrive(running: Any) -> None:
    def emit(transaction: Any) -> None:
        for number in range(1200):
            transaction.emit("progress", 99, number=number)

    running.core.database.write(emit).result()
    with following(running, after=0, experiment_id=99) as events:
        assert [next(events)["data"]["number"] for _ in range(1200)] == list(range(1200))


def test_a_stream_of_one_experiment_shows_life_while_others_change(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else followers would take a busy master for a silent one, and connect again each minute."""
    monkeypatch.setattr(_master_routes, "_KEEP_ALIVE_S", 0.3)
    is_over = threading.Event()

    def change_others() -> None:
        while not is_over.wait(0.02):
            running.core.database.write(lambda transaction: transaction.emit("progress", 98))

    others = threading.Thread(target=change_others)
    others.start()
    try:
        with httpx2.stream(
            "GET", f"{running.url}/events", params={"after": 0, "experiment_id": 99},
            headers=running.headers, timeout=20,
        ) as reply:  # fmt: skip
            lines = (line for line in reply.iter_lines() if line)
            assert [next(lines), next(lines)] == ["event: connected", "event: alive"]
    finally:
        is_over.set()
        others.join()


def test_without_a_cursor_only_what_happens_from_now_on_is_told(running: Any) -> None:
    with following(running) as events:
        running.report(1, 0, ("validation", 1, {"loss": 0.5}))
        event = next(events)
    assert (event["kind"], event["trial_id"]) == ("validation", 1)
    assert event["data"] == {"steps_completed": 1, "metrics": {"loss": 0.5}}


def test_events_of_other_experiments_are_left_out(running: Any) -> None:
    other = running.create(name="other")
    with following(running, after=0, experiment_id=other) as events:
        assert {next(events)["experiment_id"] for _ in range(3)} == {other}


def test_streams_and_waiting_requests_end_when_the_master_closes(running: Any) -> None:
    found: list[Any] = []

    def wait() -> None:
        query = {"after": 1, "timeout_s": 60}
        found.append(
            httpx2.get(
                f"{running.url}/attempts/1/control",
                params=query, headers=running.headers, timeout=90,
            ).json()
        )  # fmt: skip

    waiting = threading.Thread(target=wait)
    with following(running) as events:
        waiting.start()
        while len(running.core.controls._waiting) < 1:
            time.sleep(0.005)
        running.server._stop()
        assert list(events) == []
    waiting.join(60)
    assert found[0]["version"] == 1


def test_a_failure_of_the_master_is_a_problem_too(master: Any) -> None:
    """A file where a directory should be makes the upload of a context fail."""
    contexts = master.home.contexts_path
    contexts.rmdir()
    contexts.write_text("")
    reply = master.http.put(f"/contexts/{EMPTY}", content=b"")
    assert (reply.status_code, reply.json()["code"]) == (500, "internal_error")
    assert reply.headers["content-type"] == "application/problem+json"


@pytest.mark.root
def test_code_for_which_there_is_no_space_is_refused_with_the_reason(
    make_master: Any, make_small_disk: Any, fill_disk: Any, tmp_path: Path
) -> None:
    disk = make_small_disk(size="64k")
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "contexts").symlink_to(disk)
    master = make_master()
    fill_disk(disk)
    body = b"x" * 10_000
    digest = hashlib.sha256(body).hexdigest()
    reply = master.http.put(f"/contexts/{digest}", content=body)
    assert (reply.status_code, reply.json()["code"]) == (503, "storage_unavailable")
    assert "No space left on device" in reply.json()["detail"]
    (disk / "filler").unlink()
    assert master.http.put(f"/contexts/{digest}", content=body).status_code == 204
