"""Comparison of the data sets of all ranks, which must have and split them alike."""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from paceline.core import DistributedContext
from paceline.engine.tensors._tensor_digests import TensorDigests

# Of what lies in memory, so many samples are looked at.
_NUM_SAMPLES = 16


def check_same_data(
    distributed: DistributedContext, data: Mapping[str, Any], *, reads: bool = True
) -> None:
    """Require that data sets or loaders have the same samples on all ranks.

    Args:
        distributed: Where the ranks meet; all of them call this.
        data: Names to data sets or loaders; other values are not compared.
        reads: Whether samples are looked at, see `data_digest`.

    Raises:
        ValueError: They differ; the message names the ranks.
    """
    if distributed.size == 1:
        return
    by_rank = distributed.allgather(
        {name: data_digest(each, reads=reads) for name, each in data.items()}
    )
    for name in data:
        digests = [digests.get(name) for digests in by_rank]
        usual = Counter(digests).most_common(1)[0][0]
        others = [rank for rank, digest in enumerate(digests) if digest != usual]
        if others:
            same = [rank for rank, digest in enumerate(digests) if digest == usual]
            raise ValueError(_difference(f"{name} data", _named(others), _named(same)))


def check_same_as_chief(name: str, own: str, chief: str, rank: int) -> None:
    """Require that a rank has the data of the chief, by the digests of both.

    Raises:
        ValueError: It has others.
    """
    if own != chief:
        raise ValueError(_difference(name, _named([rank]), _named([0])))


def _difference(name: str, others: str, same: str) -> str:
    return (
        f"The {name} must have the same samples on all ranks, as each rank takes its part of them,"
        f" but those of {others} are others than those of {same}. Hint: random_split(...,"
        " generator=torch.Generator().manual_seed(0)); indices, and random numbers in place of"
        " data, that do not depend on the rank; and the whole data set on each rank."
        " check_ranks=False compares nothing."
    )


def data_digest(data: Any, *, reads: bool = True) -> str:
    """Return what differs if two data sets or loaders differ.

    It tells of lengths, of the indices of `torch.utils.data.Subset`, and of a few samples of
    `TensorDataset`, lists and arrays. Nothing that computes samples is asked for any.

    Args:
        data: The data set or loader.
        reads: Whether it tells of samples.
    """
    digest, read = blake2b(digest_size=16), TensorDigests(0)
    samples: list[torch.Tensor] | None = [] if reads else None
    _add(digest, data, samples)
    for number, sample in enumerate(samples or ()):
        read.add(str(number), sample)
    digest.update(repr(read.finish()).encode())
    return digest.hexdigest()


def _add(digest: Any, data: Any, samples: list[torch.Tensor] | None) -> None:
    sampler = getattr(data, "sampler", None)
    if isinstance(sampler, SubsetRandomSampler):
        _add_indices(digest, sampler.indices)
    if hasattr(data, "dataset"):
        # A loader, or a subset.
        _add(digest, data.dataset, samples)
    if isinstance(data, ConcatDataset):
        for each in data.datasets:
            _add(digest, each, samples)
    if isinstance(data, Subset):
        _add_indices(digest, data.indices)
    elif not isinstance(data, IterableDataset) and hasattr(type(data), "__getitem__"):
        digest.update(str(_length_of(data)).encode())
    if samples is not None:
        for rows in _in_memory(data):
            for index in np.linspace(0, len(rows) - 1, min(len(rows), _NUM_SAMPLES)):
                _add_sample(digest, rows[round(index)], samples)


def _in_memory(data: Any) -> Sequence[Any]:
    """Return the parts of a data set whose samples are there, and need not be computed."""
    if isinstance(data, TensorDataset):
        return data.tensors
    is_there = type(data) in (list, tuple) or isinstance(data, (torch.Tensor, np.ndarray))
    return (data,) if is_there else ()


def _add_sample(digest: Any, value: Any, samples: list[torch.Tensor]) -> None:
    """Add a sample; no texts, which may be paths that each machine has for itself."""
    if isinstance(value, torch.Tensor):
        samples.append(value)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, (bool, int, float, np.number)):
        digest.update(repr(value).encode())
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            _add_sample(digest, each, samples)


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
