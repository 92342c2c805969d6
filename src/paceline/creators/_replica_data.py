"""Data loading in shards, from the results of `data_creator`."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.creators._replica_spec import BATCH_SIZE, ReplicaSpec
from paceline.engine import DataPosition, node_data_lock

logger = logging.getLogger(__name__)

_DEFAULT_LOADER_CONFIG = {"num_workers": 2}


class Loaders(NamedTuple):
    """The loaders of a replica."""

    train: "DataLoader[Any]"
    validation: "DataLoader[Any] | None"


class _Batches(IterableDataset[Any]):
    """An iterable of batches, as the data set of a loader."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def make_replica_loaders(spec: ReplicaSpec) -> Loaders:
    """Call `data_creator`, and return loaders of what it returned.

    Raises:
        ValueError: It returned more than two data sets, or none.
        TypeError: It returned something else.
    """
    with node_data_lock() if spec.is_serial else nullcontext():
        made = spec.data_creator(creators_config(spec))
    parts = list(made) if _is_pair(made) else [made]
    if not 1 <= len(parts) <= 2 or parts[0] is None:
        raise ValueError(
            "`data_creator` must return data to train on, and maybe data to validate on, but"
            f" returned {len(parts)} values."
        )
    if spec.loader_config is not None and all(isinstance(p, DataLoader) for p in parts if p):
        logger.warning("`dataloader_config` has no effect, as `data_creator` returns DataLoaders.")
    train = _loader_of(parts[0], spec, is_shuffled=True)
    has_validation = len(parts) == 2 and parts[1] is not None
    validation = _loader_of(parts[1], spec, is_shuffled=False) if has_validation else None
    return Loaders(train, validation)


def creators_config(spec: ReplicaSpec) -> dict[str, Any]:
    """Return the config as creators get it, with the batch size of one worker."""
    if BATCH_SIZE not in spec.config:
        return spec.config
    return {**spec.config, BATCH_SIZE: spec.config[BATCH_SIZE] // spec.num_shards}


def data_position_in(
    loader: "DataLoader[Any]", spec: ReplicaSpec, rank: int, world_size: int
) -> DataPosition:
    """Return the part of a loader's data that a worker has, from the beginning."""
    num_shards = spec.num_shards if spec.deals_out else None
    return DataPosition.in_loader(
        loader, num_shards=num_shards, rank=rank, world_size=world_size, seed=spec.seed
    )


def _is_pair(made: Any) -> bool:
    """Tell whether several data sets were returned, and not a list of batches."""
    is_data = isinstance(made, list) and all(isinstance(p, (Dataset, DataLoader)) for p in made)
    return is_data or isinstance(made, tuple)


def _loader_of(data: Any, spec: ReplicaSpec, *, is_shuffled: bool) -> "DataLoader[Any]":
    if isinstance(data, DataLoader):
        return data
    is_indexed = isinstance(data, Sized) and hasattr(data, "__getitem__")
    is_map = is_indexed and not isinstance(data, (list, Mapping))
    if isinstance(data, IterableDataset):
        return DataLoader(data, **_options(spec))
    if isinstance(data, Dataset) or is_map:
        options = _options(spec)
        if is_shuffled and not {"shuffle", "sampler", "batch_sampler"} & set(options):
            options["shuffle"] = True
        return DataLoader(data, **options)
    if isinstance(data, Iterable):
        return DataLoader(_Batches(data), batch_size=None)
    raise TypeError(
        "`data_creator` must return data sets, DataLoaders or iterables of batches, but returned a"
        f" {type(data).__name__}."
    )


def _options(spec: ReplicaSpec) -> dict[str, Any]:
    config = _DEFAULT_LOADER_CONFIG if spec.loader_config is None else spec.loader_config
    size = {} if "batch_sampler" in config else {"batch_size": spec.shard_size}
    return {**size, **config}
