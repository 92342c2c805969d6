"""Checks of the data loaders that a train function prepares."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from paceline.engine.loaders._sharded_data import num_samples_of
from paceline.engine.train_functions._prepared_loader import PreparedLoader

if TYPE_CHECKING:
    from paceline.workers import RankInfo

logger = logging.getLogger(__name__)


def check_loader(loader: Any) -> None:
    """Refuse what is no data loader.

    Raises:
        TypeError: `loader` is no torch `DataLoader`.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            "`prepare_data_loader` must be given a torch.utils.data.DataLoader, but got"
            f" {type(loader).__name__}."
        )


def warn_of_whole_reads(loader: PreparedLoader, rank_info: "RankInfo") -> None:
    """Say that all workers read all of what cannot be split."""
    if loader.is_read_whole and rank_info.world_size > 1 and rank_info.rank == 0:
        logger.warning(
            "This stream cannot be split before it is read: each of the %d workers reads all of it"
            " and keeps its own batches. A resume reads it again. Hint: use paceline.data.read()"
            " for files, or a stream with at least one shard for each worker (`num_shards` and"
            " `shard()`, as those of Hugging Face have).",
            rank_info.world_size,
        )


def check_enough_samples(loader: Any, num_workers: int) -> None:
    """Refuse data of which some worker would never get any.

    Raises:
        TypeError: The data set has no length, and is no stream.
        ValueError: There are fewer samples than workers.
    """
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return
    num_samples = num_samples_of(loader.dataset)
    if num_samples < num_workers:
        hint = "use fewer workers."
        if not num_samples:
            hint = "are the files empty, or did a filter keep none?"
        raise ValueError(
            f"The data set must have at least one sample for each of the {num_workers} workers,"
            f" but has {num_samples}. Hint: {hint}"
        )
