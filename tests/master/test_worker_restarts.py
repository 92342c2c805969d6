"""Restarts of workers within an attempt, through the API."""

from typing import Any

from sqlalchemy import select

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.api_models_from_rows import attempt_views
from paceline._cluster.master.store.database import Database
from paceline._cluster.master.upkeep.rebuild import rebuild_database
from paceline._cluster.master.upkeep.recovery_records import write_some

SINGLE = {"name": "single", "metric": "loss"}
STARTED = {
    "type": "attempt_started", "time": 1.0, "attempt": 1, "world_size": 3, "pid": 1, "host": "box",
    "resumed_from": None, "steps_completed": 0,
}  # fmt: skip
STARTS: list[list[str]] = [
    [],
    ["Rank 0 was ended by SIGKILL.", "Rank 1 exited with code 7."],
    ["Rank 2 raised ValueError: no."],
]


def batches(attempt: int = 1) -> list[dict[str, Any]]:
    """Return what the ranks record at each start."""
    return [
        {
            "generation": generation,
            "rank": rank,
            "records": [
                [0, STARTED | {"attempt": attempt, "generation": generation, "rank": rank} | told]
            ],
        }
        for generation, causes in enumerate(STARTS)
        for rank, told in ((0, {"restart_causes": causes}), (2, {}))
    ]


def attempts(master: Any, trial_id: int = 1) -> list[tuple[int, str | None]]:
    found = master.http.get(f"/trials/{trial_id}").json()["attempts"]
    return [(one["restarts"], one["last_restart_cause"]) for one in found]


def test_an_attempt_tells_how_often_its_workers_were_started_again_and_why(
    make_master: Any,
) -> None:
    master = make_master()
    master.create(searcher=SINGLE, hyperparameters={})
    master.schedule()
    assert attempts(master) == [(0, None)]
    for _ in range(2):
        assert master.attempt(1, "records", batches=batches()).status_code == 200
    told = [(3, "Rank 2 raised ValueError: no.")]
    assert attempts(master) == told
    assert master.http.get("/trials/1").json()["restarts"] == 0
    events = tables.events
    with master.core.database.read() as connection:
        query = select(events.c.data).where(events.c.kind == "workers_restarted")
        restarted = connection.execute(query.order_by(events.c.id)).scalars().all()
    assert restarted == [
        {"number": 1, "restarts": 2, "cause": "Rank 1 exited with code 7."},
        {"number": 1, "restarts": 3, "cause": "Rank 2 raised ValueError: no."},
    ]

    # A database that is made anew has them too.
    master.attempt(1, "end", reason="exited", code=0, signal=None, time=1.0)
    while write_some(master.core.database, master.home.path):
        pass
    for path in master.home.path.glob("master.sqlite*"):
        path.rename(path.with_name(f"old-{path.name}"))
    rebuild_database(master.home.path)
    database = Database(master.home.database_path)
    try:
        with database.read() as connection:
            [attempt] = attempt_views(connection, 1)
    finally:
        database.close()
    assert (attempt.restarts, attempt.last_restart_cause) == told[0]


def test_a_start_of_a_run_without_a_master_tells_what_ended_the_one_before(master: Any) -> None:
    info = {"run_id": "r1", "name": "run", "created": 1.0, "checkpoint_storage": "/c"}
    assert master.http.put("/runs/r1", json={"info": info, "path": "/p"}).status_code == 200
    sent = [{"attempt": 0, **batch} for batch in batches(0)]
    reply = master.http.post("/runs/r1/records", json={"batches": sent, "is_alive": True})
    assert reply.status_code == 200, reply.text
    assert attempts(master) == [(0, None), (2, STARTS[1][-1]), (1, STARTS[2][-1])]
