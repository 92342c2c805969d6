"""A full disk under the database: what was acknowledged is there, all else is an error."""

from concurrent.futures import wait
from pathlib import Path

import pytest
from sqlalchemy import func, insert, select

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database, Transaction


@pytest.mark.root
def test_full_disk_acknowledges_nothing_that_it_takes_back(small_disk: Path) -> None:
    database = Database(small_disk / "x.sqlite")
    rolled_back = []

    def make_job(number: int) -> object:
        def job(transaction: Transaction) -> int:
            transaction.after_rollback(lambda: rolled_back.append(number))
            transaction.connection.execute(
                insert(tables.meta).values(key=f"job-{number}", value="x" * 20_000)
            )
            return number

        return job

    futures = [database.write(make_job(number)) for number in range(200)]  # type: ignore[arg-type]
    wait(futures)
    failed = {n for n, future in enumerate(futures) if future.exception() is not None}
    assert failed
    assert failed == set(rolled_back)
    with database.read() as connection:
        stored = connection.execute(
            select(func.count()).where(tables.meta.c.key.startswith("job-"))
        ).scalar_one()
    assert stored == 200 - len(failed)
    database.close()
