"""Functions that return the data sets of a run in a train function.

Importing this loads no torch.
"""

from typing import Any

from paceline.workers.runs import current_session


def get_dataset(name: str | int | None = None) -> Any:
    """Return the data set that `Trainer.run` was given.

    Args:
        name: Which one, if it was given several: the key of a dictionary, or the number.

    Raises:
        RuntimeError: It was given none, or this is outside of a run.
        KeyError: There is none of this name.
        ValueError: It was given several, and there is no name.
    """
    from paceline.train._worker_datasets import dataset_of

    return dataset_of(current_session(), name)


def get_datasets() -> Any:
    """Return all data sets that `Trainer.run` was given.

    Returns:
        A list of a sequence's data sets, a dictionary of a dictionary's. The folds of a cross
        validation are pairs: what to train on, and what to validate on.

    Raises:
        RuntimeError: It was given none, or this is outside of a run.
    """
    from paceline.train._worker_datasets import datasets_of

    return datasets_of(current_session())


def get_dataset_shard(name: str | int | None = None) -> Any:
    """Return this worker's part of what `get_dataset` returns."""
    return get_dataset(name).get_shard()
