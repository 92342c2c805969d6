"""Kept and lost training of attempts, from the records of their trainers to `GET /usage`."""

import time
from typing import Any

import pytest
from sqlalchemy import update

from paceline._cluster.master.store import tables


def spent(event: str, moment: float, steps: int, **seconds: float) -> dict[str, Any]:
    return {
        "type": "time_spent", "time": moment, "event": event, "steps_completed": steps,
        "seconds": seconds,
    }  # fmt: skip


def began(master: Any, attempt_id: int, moment: float) -> None:
    """Have an attempt be launched at another time."""
    attempts = tables.attempts
    statement = update(attempts).where(attempts.c.id == attempt_id).values(created_at=moment)
    master.core.database.write(lambda job: job.connection.execute(statement)).result()


def end(master: Any, attempt_id: int, moment: float, code: int) -> None:
    body = {"reason": "exited", "code": code, "signal": None, "time": moment}
    assert master.attempt(attempt_id, "end", **body).status_code == 204


def usage(master: Any) -> dict[str, float]:
    rows = master.http.get("/usage?by=user&since=2020-01").json()
    return {name: sum(row[name] for row in rows) * 3600 for name in rows[0] if "hours" in name}


def test_work_after_the_last_checkpoint_is_lost_and_work_to_the_end_is_not(
    make_master: Any,
) -> None:
    master = make_master(1)
    number = master.create(
        searcher={"name": "single", "metric": "loss"}, max_restarts=1, hyperparameters={}
    )
    master.schedule()
    begin = time.time() - 1000
    began(master, 1, begin)
    records = [
        spent("start", begin + 10, 0),
        spent("checkpoint", begin + 50, 4, validation=10.0),
        spent("report", begin + 90, 8, validation=10.0),
    ]
    batch = {"generation": 0, "rank": 0, "records": list(enumerate(records))}
    assert master.attempt(1, "records", batches=[batch]).status_code == 200
    assert usage(master)["known_hours"] == 0
    end(master, 1, begin + 100, 1)
    # 40 s until the checkpoint, of which 10 s validated; then 40 s of steps, and 10 s to the crash.
    found = usage(master)
    assert found["training_hours"] == pytest.approx(30, abs=1)
    assert found["lost_hours"] == pytest.approx(50, abs=1)
    assert found["known_hours"] == pytest.approx(100, abs=1)
    assert found["gpu_hours"] == 0
    master.schedule()
    assert len(master.http.get("/trials/1").json()["attempts"]) == 2
    began(master, 2, begin + 100)
    records = [spent("start", begin + 110, 4), spent("end", begin + 150, 8)]
    batch["records"] = list(enumerate(records))
    assert master.attempt(2, "records", batches=[batch]).status_code == 200
    before = usage(master)
    end(master, 2, begin + 160, 0)
    after = usage(master)
    assert after["lost_hours"] == pytest.approx(before["lost_hours"], abs=1)
    assert after["training_hours"] - before["training_hours"] == pytest.approx(40, abs=1)
    # What a deleted experiment used stays.
    assert master.http.get(f"/experiments/{number}").json()["state"] == "COMPLETED"
    assert master.http.delete(f"/experiments/{number}").status_code == 200
    assert usage(master) == pytest.approx(after, abs=1)
