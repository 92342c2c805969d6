"""Slots that were used, month by month, before and after a deletion."""

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from sqlalchemy import delete, insert, update

from paceline._cluster.master.store import tables
from paceline._cluster.master.store.database import Database, Transaction
from paceline._cluster.master.store.quotas import keep_usage, read_usage
from paceline._cluster.master.store.reach import Reach, acting
from paceline._cluster.messages.master_models import Usage, UsageKey

HOUR = 3600.0
JANUARY = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()
FEBRUARY = datetime(2026, 2, 1, tzinfo=timezone.utc).timestamp()


@pytest.fixture
def add(database: Database) -> Callable[..., int]:
    """Return a function that stores an experiment with one trial and its attempts."""

    def make(*attempts: tuple[float, float | None, int], more: Any = (), **fields: Any) -> int:
        more = dict(more)

        def job(transaction: Transaction) -> int:
            execute = transaction.connection.execute
            known = {"name": "e", "state": "COMPLETED", "config": {}, "warnings": [], "seed": 0}
            values = known | {"created_at": JANUARY} | fields
            made = execute(insert(tables.experiments).values(**values))
            [number] = made.inserted_primary_key or [0]
            trial = {"experiment_id": number, "request_id": "0", "state": "COMPLETED"}
            asked = attempts[0][0] - HOUR
            values = trial | {"id": number, "hparams": {}, "seed": 0, "created_at": asked}
            execute(insert(tables.trials).values(**values))
            for place, (begin, end, slots) in enumerate(attempts, 1):
                execute(
                    insert(tables.attempts).values(
                        trial_id=number, experiment_id=number, number=place, state="ENDED",
                        slots=list(range(slots)), created_at=begin, ended_at=end, **more,
                    )
                )  # fmt: skip
            return int(number)

        return database.write(job).result()

    return make


def used(database: Database, since: str, until: str, *by: UsageKey) -> list[Usage]:
    with database.read() as connection:
        return read_usage(connection, since, until, by or UsageKey)


def rows(found: list[Usage]) -> list[tuple[Any, ...]]:
    return [
        (u.month, u.user, u.project, u.pool, u.slot_hours, u.wait_hours, u.num_trials)
        for u in found
    ]


def test_slots_count_in_the_month_in_which_they_were_held(database: Database, add: Any) -> None:
    over_the_edge = (FEBRUARY - 2 * HOUR, FEBRUARY + 3 * HOUR, 4)
    add((FEBRUARY - 9 * HOUR, FEBRUARY - 8 * HOUR, 1), over_the_edge, owner="ada")
    add((FEBRUARY, FEBRUARY + HOUR, 2), config={"resources": {"pool": "big"}}, owner="bob")
    # It ran without a master, on slots of nobody.
    add((FEBRUARY, FEBRUARY + HOUR, 1), external_id="run")
    january = ("2026-01", "ada", "1", "default", 9.0, 1.0, 1)
    february = [
        ("2026-02", "ada", "1", "default", 12.0, 0.0, 0),
        ("2026-02", "bob", "1", "big", 2.0, 1.0, 1),
    ]
    assert rows(used(database, "2026-01", "2026-01")) == [january]
    assert rows(used(database, "2026-02", "2026-02")) == february
    assert rows(used(database, "2026-01", "2026-03", UsageKey.USER)) == [
        (None, "ada", None, None, 21.0, 1.0, 1),
        (None, "bob", None, None, 2.0, 1.0, 1),
    ]
    assert used(database, "2025-12", "2025-12") == []


def test_gpus_and_lost_work_count_in_slot_hours_of_each_month(database: Database, add: Any) -> None:
    spent = {"training_s": 3 * HOUR, "lost_s": HOUR}
    told = {"num_gpus": 2, "spent": spent}
    first = add((FEBRUARY - 2 * HOUR, FEBRUARY + 2 * HOUR, 4), owner="ada", more=told)
    # A loop of its own tells nothing, so it is no loss; one that runs has its GPUs.
    add((FEBRUARY, FEBRUARY + HOUR, 1), owner="ada", more={"num_gpus": 0})

    def seen() -> list[tuple[float, ...]]:
        return [
            (u.slot_hours, u.gpu_hours, u.training_hours, u.lost_hours, u.known_hours)
            for month in ("2026-01", "2026-02")
            for u in used(database, month, month)
        ]

    before = [(8.0, 4.0, 6.0, 2.0, 8.0), (9.0, 4.0, 6.0, 2.0, 8.0)]
    assert seen() == before

    def job(transaction: Transaction) -> None:
        keep_usage(transaction.connection, first)
        for table in (tables.attempts, tables.trials):
            transaction.connection.execute(delete(table).where(table.c.experiment_id == first))

    database.write(job).result()
    assert [tuple(map(sum, zip(*seen(), strict=True)))] == [
        tuple(map(sum, zip(*before, strict=True)))
    ]
    assert seen() == before


def test_an_attempt_that_runs_counts_until_now(database: Database, add: Any) -> None:
    add((FEBRUARY, None, 1))
    [row] = used(database, "2026-02", "2026-02")
    assert row.slot_hours == 28 * 24


def test_what_deleted_experiments_used_stays(database: Database, add: Any) -> None:
    numbers = [add((FEBRUARY - HOUR, FEBRUARY + HOUR, 3), owner="ada") for _ in range(2)]
    before = rows(used(database, "2026-01", "2026-02"))
    assert before[0][4:] == (6.0, 2.0, 2)

    def job(transaction: Transaction) -> None:
        for number in numbers:
            keep_usage(transaction.connection, number)
            for table in (tables.attempts, tables.trials):
                transaction.connection.execute(delete(table).where(table.c.experiment_id == number))

    database.write(job).result()
    assert rows(used(database, "2026-01", "2026-02")) == before


def test_a_user_sees_what_was_used_in_projects_of_that_user(database: Database, add: Any) -> None:
    add((FEBRUARY, FEBRUARY + HOUR, 1), project_id=2)
    hidden = add((FEBRUARY, FEBRUARY + HOUR, 1), project_id=3)
    database.write(lambda t: keep_usage(t.connection, hidden)).result()
    database.write(
        lambda t: t.connection.execute(update(tables.attempts).values(slots=[0, 1]))
    ).result()
    with acting(Reach("ada", sees=frozenset({2}), changes=frozenset())):
        [row] = used(database, "2026-02", "2026-02")
    assert (row.project, row.slot_hours) == ("2", 2.0)
    assert len(used(database, "2026-02", "2026-02", UsageKey.PROJECT)) == 2
