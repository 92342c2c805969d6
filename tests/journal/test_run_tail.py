"""Following all journals of a run directory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline._base.journal_reading_and_writing import JournalWriter
from paceline._base.run_directory import JournalKey, RunInfo
from paceline._base.run_tail_and_files import RunTail
from paceline.journal import RunDirectory, StatusReported

Write = Callable[[JournalKey, int], None]
FIRST, FIRST_OTHER, SECOND = JournalKey(0, 0, 0), JournalKey(0, 0, 1), JournalKey(1, 0, 0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Return an empty run directory."""
    info = RunInfo(run_id="r", name="n", created=1.0, checkpoint_storage="/c")
    return RunDirectory.create(tmp_path / "run", info)


@pytest.fixture
def write(run: RunDirectory) -> Write:
    """Return a function that appends so many records to a journal."""
    writers: dict[JournalKey, JournalWriter] = {}

    def append(key: JournalKey, count: int) -> None:
        if key not in writers:
            writers[key] = JournalWriter(run.journal_path(key))
        for _ in range(count):
            writers[key].append(StatusReported(time=1.0, status="s"))

    return append


def numbers(tail: RunTail, max_entries: int = 1000) -> list[tuple[JournalKey, list[int]]]:
    """Return the sequence numbers that are read next."""
    return [(key, [e.sequence for e in entries]) for key, entries in tail.read(max_entries)]


def test_a_run_without_journals_has_nothing_to_read(run: RunDirectory) -> None:
    assert RunTail(run, {}).read() == []


def test_each_call_reads_what_is_new_in_every_journal(run: RunDirectory, write: Write) -> None:
    tail = RunTail(run, {})
    write(FIRST, 2)
    assert numbers(tail) == [(FIRST, [0, 1])]
    assert numbers(tail) == []
    write(FIRST_OTHER, 1)
    write(FIRST, 1)
    assert numbers(tail) == [(FIRST, [2]), (FIRST_OTHER, [0])]


def test_a_later_attempt_waits_for_the_rest_of_an_earlier_one(
    run: RunDirectory, write: Write
) -> None:
    write(FIRST, 3)
    write(SECOND, 3)
    tail = RunTail(run, {})
    assert numbers(tail, 2) == [(FIRST, [0, 1])]
    assert numbers(tail, 2) == [(FIRST, [2]), (SECOND, [0])]
    assert numbers(tail, 2) == [(SECOND, [1, 2])]
    assert numbers(tail, 2) == []


def test_reading_begins_after_the_marks(run: RunDirectory, write: Write) -> None:
    write(FIRST, 3)
    write(FIRST_OTHER, 2)
    assert numbers(RunTail(run, {FIRST: 1})) == [(FIRST, [2]), (FIRST_OTHER, [0, 1])]


def test_an_attempt_is_followed_on_after_nothing_came_for_a_while(
    run: RunDirectory, write: Write
) -> None:
    tail = RunTail(run, {})
    write(FIRST, 1)
    write(SECOND, 1)
    numbers(tail)
    assert numbers(tail) == numbers(tail) == []
    write(SECOND, 1)
    assert numbers(tail) == [(SECOND, [1])]


def test_a_damaged_last_line_is_told_when_the_next_attempt_has_begun_or_nothing_more_comes(
    run: RunDirectory, write: Write
) -> None:
    write(FIRST, 2)
    write(FIRST_OTHER, 3)
    write(SECOND, 2)
    for key in (FIRST_OTHER, SECOND):
        (path,) = run.journal_path(key).iterdir()
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(bytes(data))
    tail = RunTail(run, {})
    assert numbers(tail) == [(FIRST, [0, 1]), (FIRST_OTHER, [0, 1]), (SECOND, [0])]
    assert numbers(tail) == [(FIRST_OTHER, [2])]
    assert [(key, [e.sequence for e in entries]) for key, entries in tail.finish()] == [
        (SECOND, [1])
    ]
    assert (numbers(tail), tail.finish()) == ([], [])
