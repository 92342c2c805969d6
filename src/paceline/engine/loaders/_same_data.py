"""Comparison of the data sets of all ranks, which must split them alike."""

from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, IterableDataset, Subset, SubsetRandomSampler

from paceline.core import DistributedContext


def check_same_data(distributed: DistributedContext, data: Mapping[str, Any]) -> None:
    """Require that data sets or loaders have the same samples on all ranks.

    Lengths and the indices of `torch.utils.data.Subset` are compared, but no sample is read.

    Args:
        distributed: Where the ranks meet; all of them call this.
        data: Names to data sets or loaders; other values are not compared.

    Raises:
        ValueError: They differ; the message names the ranks.
    """
    if distributed.size == 1:
        return
    by_rank = distributed.allgather({name: _digest_of(each) for name, each in data.items()})
    for name in data:
        digests = [digests.get(name) for digests in by_rank]
        usual = Counter(digests).most_common(1)[0][0]
        others = [rank for rank, digest in enumerate(digests) if digest != usual]
        if others:
            same = [rank for rank, digest in enumerate(digests) if digest == usual]
            raise ValueError(
                f"The {name} data must have the same samples on all ranks, as each rank takes its"
                f" part of them, but {_named(others)} split them in another way than"
                f" {_named(same)}. Hint: random_split(..., generator=torch.Generator()"
                ".manual_seed(0)), or indices that do not depend on the rank."
            )


def _digest_of(data: Any) -> str:
    digest = blake2b(digest_size=16)
    _add(digest, data)
    return digest.hexdigest()


def _add(digest: Any, data: Any) -> None:
    sampler = getattr(data, "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):
        _add_indices(digest, sampler.indices)
    if hasattr(data, "dataset"):
        # A loader, or a subset.
        _add(digest, data.dataset)
    if isinstance(data, ConcatDataset):
        for each in data.datasets:
            _add(digest, each)
    if isinstance(data, Subset):
        _add_indices(digest, data.indices)
    elif not isinstance(data, IterableDataset) and hasattr(type(data), "__getitem__"):
        digest.update(str(_length_of(data)).encode())


def _add_indices(digest: Any, indices: Any) -> None:
    try:
        digest.update(np.asarray(indices, dtype=np.int64).tobytes())
    except (TypeError, ValueError):
        # Keys of a mapping.
        digest.update(repr(list(indices)).encode())


def _length_of(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
