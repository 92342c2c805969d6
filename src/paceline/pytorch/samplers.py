"""Samplers for users who build a loader by hand."""

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Sampler

T = TypeVar("T")


class _DerivedSampler(Sampler[T]):
    """Base class of samplers on top of another sampler."""

    def __init__(self, sampler: Any) -> None:
        self._source = sampler

    def __len__(self) -> int:
        return len(self._source)

    @property
    def is_endless(self) -> bool:
        """Whether a pass never ends."""
        return _is_endless(self._source)

    def __getattr__(self, name: str) -> Any:
        # `set_epoch` exists only on top of a sampler that knows epochs: a trainer takes it as the
        # promise that an epoch's order does not depend on how often it was drawn before.
        if name == "set_epoch" and _epoch_setter(self._source) is not None:
            return self._set_epoch
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _set_epoch(self, epoch: int) -> None:
        setter = _epoch_setter(self._source)
        if setter is not None:
            setter(epoch)


class RepeatSampler(_DerivedSampler[T]):
    """Sampler to repeat another sampler for ever; its length is a single pass.

    Args:
        sampler: The sampler to repeat.
    """

    @property
    def is_endless(self) -> bool:
        return True

    def __iter__(self) -> Iterator[T]:
        while True:
            is_empty = True
            for item in self._source:
                is_empty = False
                yield item
            # An empty sampler would be asked for ever.
            if is_empty:
                raise ValueError("A sampler that is repeated must yield something, but is empty.")


class RepeatBatchSampler(RepeatSampler[list[int]]):
    """Batch sampler to repeat another for ever; its length is a single pass."""


class DistributedSampler(_DerivedSampler[T]):
    """Take every `num_workers`-th sample of a sampler, beginning with sample `rank`.

    Args:
        sampler: The sampler to take from.
        num_workers: The number of ranks.
        rank: This process among them, from 0.

    Raises:
        ValueError: There is no such rank.
    """

    def __init__(self, sampler: Any, num_workers: int, rank: int) -> None:
        if num_workers < 1:
            raise ValueError(f"`num_workers` must be at least 1, but got {num_workers}.")
        if not 0 <= rank < num_workers:
            raise ValueError(f"`rank` must be from 0 to {num_workers - 1}, but got {rank}.")
        super().__init__(sampler)
        self._num_workers = num_workers
        self._rank = rank

    def __len__(self) -> int:
        whole, rest = divmod(len(self._source), self._num_workers)
        return whole + (self._rank < rest)

    def __iter__(self) -> Iterator[T]:
        for index, item in enumerate(self._source):
            if index % self._num_workers == self._rank:
                yield item


class DistributedBatchSampler(DistributedSampler[list[int]]):
    """Take every `num_workers`-th batch of a batch sampler, beginning with batch `rank`."""


class SkipSampler(_DerivedSampler[T]):
    """Sampler to skip the first samples of another, once; the length is unchanged.

    Where a pass is shorter than that, the rest is left out of the passes that follow. Later
    passes are whole.

    Args:
        sampler: The sampler to take from.
        skip: How many samples to leave out.

    Raises:
        ValueError: `skip` is negative.
    """

    def __init__(self, sampler: Any, skip: int) -> None:
        if skip < 0:
            raise ValueError(f"`skip` must be at least 0, but got {skip}.")
        super().__init__(sampler)
        self._skip = skip
        self._num_left = skip

    def _set_epoch(self, epoch: int) -> None:
        super()._set_epoch(epoch)
        # Earlier epochs have used up a part of the skipped samples.
        self._num_left = max(0, self._skip - epoch * len(self))

    def __iter__(self) -> Iterator[T]:
        for item in self._source:
            if self._num_left:
                self._num_left -= 1
            else:
                yield item


class SkipBatchSampler(SkipSampler[list[int]]):
    """Leave out the first batches of a batch sampler, once; the length stays the same."""


class ReproducibleShuffleSampler(_DerivedSampler[T]):
    """Shuffle the samples of a sampler by a seed, each pass in another order.

    Pass number n has the same order in every process and after a restart: without `set_epoch`
    passes are counted from 0, with `set_epoch(n)` the next one is pass n.

    Args:
        sampler: The sampler to shuffle; it must end.
        seed: The seed.

    Raises:
        ValueError: `sampler` never ends.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        if _is_endless(sampler):
            raise ValueError(
                "A sampler that is shuffled must end, but this one repeats for ever. Hint: shuffle"
                " first, then repeat."
            )
        super().__init__(sampler)
        self._seed = seed
        self._random = np.random.RandomState(seed)
        self._next_pass = 0
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        Args:
            epoch: The number of the pass, from 0.
        """
        self._set_epoch(epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[T]:
        items = list(self._source)
        # A generator cannot go back, so the draws begin anew.
        if self._epoch < self._next_pass:
            self._random = np.random.RandomState(self._seed)
            self._next_pass = 0
        # Drawn for their effect alone: an epoch's order depends on all draws before it.
        for _ in range(self._next_pass, self._epoch):
            self._random.permutation(len(items))
        order = self._random.permutation(len(items))
        self._epoch = self._next_pass = self._epoch + 1
        return iter([items[index] for index in order])


class ReproducibleShuffleBatchSampler(ReproducibleShuffleSampler[list[int]]):
    """Shuffle the batches of a batch sampler by a seed; each batch keeps its samples."""


def adapt_batch_sampler(
    batch_sampler: Any, *, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
) -> Any:
    """Return a batch sampler of a rank's batches of another sampler, after a skip.

    Args:
        batch_sampler: Any torch batch sampler.
        repeat: Whether to begin again at the end, for ever.
        skip: How many of this rank's batches to leave out, once.
        num_replicas: The number of ranks.
        rank: This process among them, from 0.

    Raises:
        ValueError: `skip` is negative, or there is no such rank.
    """
    if num_replicas != 1 or rank != 0:
        batch_sampler = DistributedBatchSampler(batch_sampler, num_replicas, rank)
    if repeat:
        batch_sampler = RepeatBatchSampler(batch_sampler)
    return SkipBatchSampler(batch_sampler, skip) if skip else batch_sampler


def _is_endless(sampler: Any) -> bool:
    """Return whether a sampler or any sampler below repeats for ever."""
    if getattr(sampler, "is_endless", False):
        return True
    source = getattr(sampler, "sampler", None)
    return source is not None and _is_endless(source)


def _epoch_setter(sampler: Any) -> Any:
    """Return the `set_epoch` of a sampler, or of a `BatchSampler`'s sampler, or None."""
    source = getattr(sampler, "sampler", None)
    return getattr(sampler, "set_epoch", None) or getattr(source, "set_epoch", None)


__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "RepeatBatchSampler",
    "RepeatSampler",
    "ReproducibleShuffleBatchSampler",
    "ReproducibleShuffleSampler",
    "SkipBatchSampler",
    "SkipSampler",
    "adapt_batch_sampler",
]
