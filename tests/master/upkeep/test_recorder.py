"""Records that a master makes beside its database."""

from pathlib import Path

from sqlalchemy import func, select

from paceline.master.store import ALL, Database, note_experiment, tables
from paceline.master.upkeep._recovery_writer import write_some


def test_experiments_that_are_recorded_whole_come_some_at_a_time(tmp_path: Path) -> None:
    """So that a rest follows each part, and requests are answered meanwhile."""
    (tmp_path / "records").mkdir()
    database = Database(tmp_path / "master.sqlite")

    def num_left() -> int:
        query = select(func.count()).where(tables.unrecorded.c.kind == ALL)
        with database.read() as connection:
            return int(connection.execute(query).scalar_one())

    try:
        for number in range(1, 51):
            database.write(lambda t, n=number: note_experiment(t.connection, n)).result()
        left = [num_left()]
        while write_some(database, tmp_path):
            left.append(num_left())
        assert left == [50, 30, 10, 0]
    finally:
        database.close()
