"""Records that an attempt wrote and that never arrive: counted, and told in the trial's log."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, update

from paceline.journal import AnyRecord, RecordLost, RecordsDropped
from paceline.master.experiments._state_changes import StateChanges
from paceline.master.store import Transaction, tables

Numbered = Sequence[tuple[int, AnyRecord]]

# How many lines a trial's log has on what is lost; the count goes on.
_MAX_TOLD = 20
_MISSING = "damaged or missing in the journal"


def take_lost_records(
    changes: StateChanges,
    transaction: Transaction,
    attempt: Row[Any],
    whose: str,
    mark: int,
    new: Numbered,
) -> None:
    """Count the records that are missing from a journal.

    The numbers of a journal have no gaps. A number that is passed over is a record that is lost,
    and so is one that was sent as lost.

    Args:
        changes: Where the trial's log goes.
        transaction: Everything happens in it, or nothing.
        attempt: The attempt that wrote the journal.
        whose: The rank and the generation, in words.
        mark: The number of the last record that is stored.
        new: The records that follow it, with their numbers.
    """
    texts: list[str] = []
    reasons: list[str] = []
    num_lost = 0
    for first, last in find_record_gaps(mark, [number for number, _ in new]):
        num_lost += last - first + 1
        if first == last:
            texts.append(f"Record {first} of {whose} is lost: its line is {_MISSING}.")
        else:
            text = f"Records {first} to {last} of {whose} are lost: their lines are {_MISSING}."
            texts.append(text)
    for number, record in new:
        if isinstance(record, RecordLost):
            num_lost += 1
            texts.append(f"Record {number} of {whose} is lost: {record.reason}.")
        elif isinstance(record, RecordsDropped):
            # Their numbers are missing before this record, so they are counted.
            reasons.append(
                f"{record.count} reports of {whose} were lost: the disk stayed full for too long."
            )
    if num_lost:
        num_before = _count_lost_records(changes, transaction, attempt, num_lost)
        texts = texts[: max(0, _MAX_TOLD - num_before)]
    for text in texts + reasons:
        changes.note(transaction, attempt.trial_id, attempt.number, "ERROR", text)


def find_record_gaps(mark: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last number of each gap after `mark`."""
    if not numbers or numbers[-1] - mark == len(numbers):
        return []
    befores = [mark, *numbers]
    pairs = zip(befores, numbers, strict=False)
    return [(before + 1, number - 1) for before, number in pairs if number > before + 1]


def _count_lost_records(
    changes: StateChanges, transaction: Transaction, attempt: Row[Any], num_lost: int
) -> int:
    """Add to the counts of the trial and its experiment; return how many the trial had lost."""
    trial = changes.trial(transaction.connection, attempt.trial_id)
    for table, row_id in (
        (tables.trials, trial.id),
        (tables.experiments, trial.experiment_id),
    ):
        transaction.connection.execute(
            update(table)
            .where(table.c.id == row_id)
            .values(num_records_lost=table.c.num_records_lost + num_lost)
        )
    num_before: int = trial.num_records_lost
    return num_before
