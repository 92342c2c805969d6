"""Outcome of a run: compares the outcomes of all ranks and records failures."""

import logging
from collections.abc import Sequence

from paceline.train._errors import IncompleteCheckpointError
from paceline.train._results import Results
from paceline.workers.runs import RankOutcome

logger = logging.getLogger(__name__)


def check_saves(outcomes: Sequence[RankOutcome], num_lacking: int, results: Results) -> None:
    """Require that all ranks have saved equally many checkpoints, and stored them.

    Args:
        outcomes: What came of the run on each rank.
        num_lacking: How many checkpoints lack parts, though all ranks have saved them.
        results: What the run would have returned.

    Raises:
        IncompleteCheckpointError: They have not.
    """
    counts = [outcome.num_saves for outcome in outcomes]
    most, least = max(counts), min(counts)
    if num_lacking > 0:
        raise IncompleteCheckpointError(
            "All ranks must store their parts of each checkpoint in one storage, but"
            f" {num_lacking} checkpoint(s) lack parts, or one before does. Hint: see the output"
            " of the ranks: an error of `save_checkpoint` must not be passed over, and all machines"
            " must see the storage. The values that were returned are in this error's `results`.",
            results,
        )
    if most == least:
        return
    few = ", ".join(
        f"rank {rank} has made {count}" for rank, count in enumerate(counts) if count < most
    )
    raise IncompleteCheckpointError(
        f"All ranks must call `save_checkpoint` equally often, but {few} of {most} calls:"
        f" {most - least} checkpoint(s) do not exist. Hint: call it on every rank; only the"
        " chief's state is stored. The values that were returned are in this error's"
        " `results`.",
        results,
    )


def warn_of_reports(outcomes: Sequence[RankOutcome]) -> None:
    """Log a warning if the ranks that reported did so unequally often."""
    counts = {rank: o.num_reports for rank, o in enumerate(outcomes) if o.num_reports}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
        logger.warning("The ranks have reported unequally often: %s.", told)


def warn_of_tuples(values: Sequence[object]) -> None:
    """Log a hint if the values of all ranks can be mistaken for those of one tuple."""
    if len(values) > 1 and all(isinstance(v, tuple) and len(v) == len(values) for v in values):
        logger.warning(
            "`run` returns one value per rank: here %d tuples of %d values each. Hint:"
            " `trainer.run(...)[0]` is the tuple of rank 0.",
            len(values),
            len(values),
        )
