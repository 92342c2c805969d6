"""Records that never arrive: each is counted once, wherever it stood."""

from typing import Any

import pytest

from paceline._cluster.master.experiments.state_decisions import RefusedError
from paceline._cluster.messages.runner_messages import RecordBatch
from paceline.journal import AttemptFinished, RecordLost, RecordsDropped


def send(bench: Any, attempt_id: int, *numbers: int, rank: int = 0, generation: int = 0) -> None:
    """Send the reports with these numbers of one journal."""
    records = [(n, bench.metrics("training", n + 1, x=n)) for n in numbers]
    batch = RecordBatch(generation=generation, rank=rank, records=records)
    bench.write(lambda t: bench.ingest.store(t, attempt_id, [batch]))


def num_lost(bench: Any) -> tuple[int, int]:
    """Return how many records trial 1 and experiment 1 have lost."""
    return bench.trial(1).num_records_lost, bench.experiment(1).num_records_lost


@pytest.fixture
def attempt(bench: Any) -> int:
    """Return a running attempt of a trial."""
    bench.create("single")
    return int(bench.start(1))


@pytest.mark.parametrize(("rank", "generation"), [(0, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize(
    ("requests", "expected", "named"),
    [
        ([[0, 1, 2]], 0, None),
        ([[1, 2]], 1, "Record 0 of rank"),
        ([[0, 2]], 1, "Record 1 of rank"),
        ([[0], [1], [5], [6]], 3, "Records 2 to 4 of rank"),
        ([[0, 1, 4, 5, 7], [8]], 3, "Record 6 of rank"),
        # Sent again, as after an answer that did not arrive.
        ([[0, 2], [0, 2, 3], [3]], 1, "Record 1 of rank"),
    ],
)
def test_a_gap_in_the_numbers_is_counted_and_named(
    bench: Any, attempt: int, rank: int, generation: int, requests: list[list[int]],
    expected: int, named: str | None,
) -> None:  # fmt: skip
    for numbers in requests:
        send(bench, attempt, *numbers, rank=rank, generation=generation)
    assert num_lost(bench) == (expected, expected)
    notes = bench.notes(1)
    if named is None:
        assert notes == ""
    else:
        assert f"{named} {rank} (generation {generation})" in notes
        assert "damaged or missing" in notes


@pytest.mark.parametrize("rank", [0, 2])
def test_a_record_that_was_set_aside_is_counted_with_its_reason(
    bench: Any, attempt: int, rank: int
) -> None:
    bench.send(attempt, RecordLost(time=1.0, reason="it lies in /here"), rank=rank)
    bench.send_at(attempt, 0, RecordLost(time=1.0, reason="it lies in /here"), rank=rank)
    bench.send(attempt, bench.metrics("training", 1, x=1), rank=rank)
    assert num_lost(bench) == (1, 1)
    assert bench.notes(1) == f"Record 0 of rank {rank} (generation 0) is lost: it lies in /here."


@pytest.mark.parametrize("rank", [0, 2])
def test_reports_that_a_full_disk_dropped_are_counted_once(
    bench: Any, attempt: int, rank: int
) -> None:
    """Their numbers are missing before the journal says why."""
    send(bench, attempt, 0, 1, 4, rank=rank)
    bench.send_at(attempt, 5, RecordsDropped(time=1.0, count=2), rank=rank)
    assert num_lost(bench) == (2, 2)
    assert (
        f"2 reports of rank {rank} (generation 0) were lost: the disk stayed full" in bench.notes(1)
    )


def test_a_flood_of_losses_does_not_flood_the_log(bench: Any, attempt: int) -> None:
    send(bench, attempt, *range(0, 200, 2))
    assert num_lost(bench) == (99, 99)
    assert len(bench.notes(1).splitlines()) == 20


def test_losses_of_several_trials_add_up_and_stay_when_they_end(bench: Any) -> None:
    bench.create("random")
    for trial_id in (1, 2):
        attempt_id = bench.start(trial_id)
        send(bench, attempt_id, 1)
        bench.send_at(attempt_id, 2, AttemptFinished(time=1.0, outcome="completed"))
        bench.end(attempt_id)
        with pytest.raises(RefusedError, match="has ended"):
            send(bench, attempt_id, 9)
    assert [row.num_records_lost for row in bench.trials(1)] == [1, 1, 0]
    assert bench.experiment(1).num_records_lost == 2
    assert bench.trial(1).state == "COMPLETED"


@pytest.mark.parametrize("rank", [0, 2])
def test_records_that_the_master_lacks_are_asked_for_and_no_loss(
    bench: Any, attempt: int, rank: int
) -> None:
    """A database that was lost and made again may have less than its runners were told."""

    def send_after(after: int | None, *numbers: int) -> int:
        records = [(n, bench.metrics("training", n + 1, x=n)) for n in numbers]
        batch = RecordBatch(generation=0, rank=rank, records=records, after=after)
        marks = bench.write(lambda t: bench.ingest.store(t, attempt, [batch]))
        return max((mark.sequence for mark in marks), default=-1)

    assert send_after(-1, 0, 1) == 1
    assert send_after(5, 6, 7) == 1
    assert num_lost(bench) == (0, 0)
    # What follows the mark is all that the journal has: the rest is lost in it.
    assert send_after(1, 2, 4, 6, 7) == 7
    assert num_lost(bench) == (2, 2)
