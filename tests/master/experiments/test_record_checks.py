"""Records that no training process writes, and what a master answers to them."""

import re
from typing import Any

import msgspec
import pytest
from sqlalchemy import event, select

from paceline._base.journal_records import MAX_DEPTH
from paceline._cluster.master.store import tables
from paceline.journal import AlertRaised, CheckpointStored, StatusReported

METRICS = {
    "type": "metrics", "time": 1.0, "group": "training", "steps_completed": 5,
    "metrics": {"loss": 1.0},
}  # fmt: skip
CHECKPOINT = {
    "type": "checkpoint", "time": 1.0, "uuid": "one", "steps_completed": 3, "metadata": {},
    "resources": {"a": 5}, "storage": "/nowhere",
}  # fmt: skip
STARTED = {
    "type": "attempt_started", "time": 1.0, "attempt": 1, "generation": 0, "rank": 0,
    "world_size": 1, "pid": 7, "host": "h", "resumed_from": None, "steps_completed": 0,
}  # fmt: skip
SPENT = {"type": "time_spent", "time": 1.0, "event": "report", "steps_completed": 3, "seconds": {}}
STORE = {"type": "store", "time": 1.0, "storage": "s", "reason": "r"}
STATUS = {"type": "status", "time": 1.0, "status": "s"}
ALERT = {"type": "alert", "time": 1.0, "title": "t", "description": "d", "level": "info"}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (METRICS | {"time": 1e308}, "`time` must be from 0 to"),
        (METRICS | {"time": -1.0}, "`time` must be from 0 to"),
        (METRICS | {"steps_completed": -1}, "`steps_completed` must be from 0 to"),
        (METRICS | {"metrics": nested(MAX_DEPTH + 1)}, "`metrics` must not be nested more than"),
        (METRICS | {"metrics": {"loss": None}}, "`metrics` must have numbers, texts, lists or"),
        (METRICS | {"metrics": {"a": [{"b": None}]}}, "`metrics` must have numbers, texts, lists"),
        (METRICS | {"metrics": {"": 1.0}}, "`metrics` must have names that are not empty"),
        (METRICS | {"metrics": {"$float": "nan"}}, "`metrics` must have names that are not empty"),
        (METRICS | {"metrics": {"a": {"$float": "zz"}}}, "`metrics` must have names that are not"),
        (METRICS | {"validation": {"a": None}}, "`validation` must have numbers, texts, lists"),
        ({"type": "dropped", "time": 1.0, "count": 2**53}, "`count` must be from 0 to 1"),
        (CHECKPOINT | {"metadata": nested(900)}, "`metadata` must not be nested more than"),
        (CHECKPOINT | {"resources": {"a": -5}}, "`resources['a']` must be from 0 to"),
        (CHECKPOINT | {"steps_completed": -5}, "`steps_completed` must be from 0 to"),
        (CHECKPOINT | {"resources": dict.fromkeys("ab", 2**63 - 1)}, "`resources` must be from 0"),
        (STARTED | {"environment": nested(900)}, "`environment` must not be nested more than"),
        (STARTED | {"rank": -1}, "`rank` must be from 0 to"),
        (SPENT | {"seconds": {"lost": -1e308}}, "`seconds['lost']` must be from 0 to"),
        (STORE | {"reason": "x" * 5000}, "`reason` must have at most 4096 characters"),
        (STATUS | {"status": "x" * 70_000}, "`status` must have at most 65536 characters"),
        (ALERT | {"title": "x" * 5000}, "`title` must have at most 4096 characters"),
        (ALERT | {"description": "x" * 5000}, "`description` must have at most 4096 characters"),
        (CHECKPOINT | {"metadata": {"a": "x" * 2**20}}, "`metadata` must have at most 1048576"),
        (STARTED | {"restart_causes": ["x" * 5000]}, "`restart_causes` must have at most 4096"),
        (STARTED | {"restart_causes": ["x"] * 2000}, "`restart_causes` must be from 0 to 1000"),
        (
            {"type": "run_metadata", "time": 1.0, "metadata": nested(900)},
            "`metadata` must not be nested more than",
        ),
    ],
)
def test_records_with_values_that_cannot_be_are_refused(
    master: Any, record: dict[str, Any], reason: str
) -> None:
    master.create(searcher={"name": "single", "metric": "loss"})
    master.schedule()
    reply = master.attempt(1, "records", batches=[batch(0, METRICS, record)])
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_records")
    assert reason in reply.json()["detail"]
    # Nothing of the batch is stored, and what follows is.
    reply = master.attempt(1, "records", batches=[batch(0, METRICS)])
    assert reply.json()["marks"] == [{"generation": 0, "rank": 0, "sequence": 0}]
    for path in ("/experiments", "/trials/1", "/trials/1/checkpoints", "/status"):
        assert master.http.get(path).status_code == 200


@pytest.mark.parametrize(
    "changed", [{"rank": -1}, {"generation": 2**40}, {"records": [[2**62, METRICS]]}]
)
def test_batches_with_numbers_that_cannot_be_are_refused(
    master: Any, changed: dict[str, Any]
) -> None:
    master.create(searcher={"name": "single", "metric": "loss"})
    master.schedule()
    reply = master.attempt(1, "records", batches=[batch(0, METRICS) | changed])
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")


@pytest.mark.parametrize("path", ["logs", "end"])
def test_times_that_cannot_be_are_refused(master: Any, path: str) -> None:
    master.create(searcher={"name": "single", "metric": "loss"})
    master.schedule()
    body: dict[str, Any] = {"entries": [[0, 1e308, 0, "stdout", None, "text"]]}
    if path == "end":
        body = {"reason": "exited", "code": 0, "signal": None, "time": 1e308}
    reply = master.attempt(1, path, **body)
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")


@pytest.mark.parametrize(
    "changed", [{"created": 1e308}, {"hparams": nested(900)}, {"metadata": nested(900)}]
)
def test_runs_with_values_that_cannot_be_are_refused(master: Any, changed: dict[str, Any]) -> None:
    info = {"run_id": "r", "name": "n", "created": 1.0, "checkpoint_storage": "/nowhere"} | changed
    reply = master.http.put("/runs/r", json={"info": info, "path": "/runs/r"})
    assert (reply.status_code, reply.json()["code"]) == (409, "bad_run")
    assert master.http.get("/experiments").json()["items"] == []


def test_what_a_job_says_of_its_store_is_one_line_of_the_status(master: Any) -> None:
    master.create(searcher={"name": "single", "metric": "loss"})
    master.schedule()
    storage = str(master.home.path / "checkpoints")
    said = {"storage": storage, "reason": "r\nAll is well." + "x" * 4000}
    assert master.attempt(1, "records", batches=[batch(0, STORE | said)]).status_code == 200
    problems = master.http.get("/status").json()["problems"]
    (problem,) = (text for text in problems if "waits for its store" in text)
    assert "\n" not in problem
    assert f"waits for its store {storage}, which" in problem
    assert "s: r All is well.x" in problem
    assert len(problem) < 1000


@pytest.mark.parametrize("storage", ["Call 555.", "s3://evil/x", "/nowhere", "s3://a/b?c=d"])
def test_a_job_names_no_storage_that_its_experiment_does_not_have(
    master: Any, storage: str
) -> None:
    master.create(searcher={"name": "single", "metric": "loss"})
    master.schedule()
    record = STORE | {"storage": storage}
    assert master.attempt(1, "records", batches=[batch(0, record)]).status_code == 200
    assert "waits for its store" not in "".join(master.http.get("/status").json()["problems"])


@pytest.mark.parametrize("kind", ["experiment", "run"])
@pytest.mark.parametrize(
    "storage", ["s3://evil/x?endpoint_url=http://127.0.0.1:1", "memory://x", "s3://"]
)
def test_files_in_a_storage_that_cannot_be_are_refused(
    master: Any, storage: str, kind: str
) -> None:
    sent = batch(0, CHECKPOINT | {"storage": storage})
    if kind == "run":
        info = {"run_id": "r", "name": "n", "created": 1.0, "checkpoint_storage": "/nowhere"}
        assert master.http.put("/runs/r", json={"info": info, "path": "/r"}).status_code == 200
        body = {"batches": [sent | {"attempt": 1}], "is_alive": True}
        assert master.http.post("/runs/r/records", json=body).status_code == 200
    else:
        master.create(searcher={"name": "single", "metric": "loss"})
        master.schedule()
        assert master.attempt(1, "records", batches=[sent]).status_code == 200
    reply = master.http.get("/checkpoints/one/files/a")
    code = "other_storage" if kind == "experiment" else "checkpoint_unusable"
    assert (reply.status_code, reply.json()["code"]) == (409, code), reply.text


def batch(first: int, *records: dict[str, Any]) -> dict[str, Any]:
    numbered = [[first + number, record] for number, record in enumerate(records)]
    return {"generation": 0, "rank": 0, "records": numbered}


@pytest.mark.long
def test_many_records_are_stored_in_several_transactions(master: Any) -> None:
    master.create(searcher={"name": "single", "metric": "loss"})
    master.schedule()
    rows: list[int] = []
    database = master.core.database

    def count(_has_events: bool) -> None:
        with database.read() as connection:
            rows.append(len(connection.execute(select(tables.checkpoints.c.uuid)).all()))

    database.on_commit(count)
    sent = batch(0, *(CHECKPOINT | {"uuid": f"c{number}"} for number in range(1200)), STATUS)
    reply = master.attempt(1, "records", batches=[sent | {"after": -1}])
    assert reply.json()["marks"] == [{"generation": 0, "rank": 0, "sequence": 1200}]
    # The last commit tells its listeners after it answers.
    database.write(lambda _transaction: None).result()
    assert [now for now in dict.fromkeys(rows) if now] == [500, 1000, 1200]


def test_no_record_of_a_batch_reads_the_large_columns_of_its_trial(bench: Any) -> None:
    bench.create("single")
    attempt_id = bench.start(1)
    read: list[str] = []
    engine = bench.database._writer_engine
    event.listen(engine, "before_cursor_execute", lambda *given: read.append(given[2]))
    records = [{"uuid": f"c{number}", "steps_completed": number} for number in range(20)]
    bench.send(
        attempt_id,
        *(msgspec.convert(CHECKPOINT | each, CheckpointStored) for each in records),
        *(bench.metrics("validation", step, loss=1.0) for step in range(20, 40)),
        *[msgspec.convert(ALERT, AlertRaised)] * 20,
        *(msgspec.convert(STATUS, StatusReported) for _ in range(20)),
    )
    large = [text for text in read if re.search(r"trials\.(hparams|status|metadata|alerts)", text)]
    assert len(large) == 1
    assert len([text for text in read if "UPDATE trials SET status" in text]) == 1
    assert len(bench.trial(1).alerts) == 20


def test_no_journal_lacks_more_records_than_damage_takes_away(master: Any) -> None:
    master.create(searcher={"name": "single", "metric": "loss"})
    master.schedule()
    reply = master.attempt(1, "records", batches=[batch(2**50, METRICS)])
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_records")
    assert "must lack at most 1000000 records in one place" in reply.json()["detail"]
    assert master.http.get("/trials/1").json()["num_records_lost"] == 0
