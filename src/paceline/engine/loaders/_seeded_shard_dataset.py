"""Shards whose random augmentation depends on nothing but the shard."""

from collections.abc import Sequence
from typing import Any

import torch.utils.data

from paceline.engine.devices._random_generators import seed_everything
from paceline.engine.loaders._reading_notes import note_samples


class SeededShard(list[int]):
    """Sample indices of a shard, with the seed of its random augmentation."""

    seed: int

    def __reduce__(self) -> Any:
        return make_seeded_shard, (list(self), self.seed)


def make_seeded_shard(indices: Sequence[int], seed: int) -> SeededShard:
    """Return the indices of a shard with a seed."""
    shard = SeededShard(indices)
    shard.seed = seed
    return shard


class SeededShardDataset(torch.utils.data.Dataset[Any]):
    """A map-style data set whose loader process is seeded anew for every shard.

    What a loader's worker processes draw then depends on the shard alone, not on which worker got
    it or where the epoch was begun. Other attributes are those of the user's data set.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, shard: SeededShard | list[SeededShard]) -> list[Any]:
        if not isinstance(shard, SeededShard):
            return [sample for part in shard for sample in self.__getitems__(part)]
        seed_everything(shard.seed)
        try:
            fetch_all = getattr(self._dataset, "__getitems__", None)
            if fetch_all is not None:
                samples: list[Any] = fetch_all(list(shard))
                return samples
            return [self._dataset[index] for index in shard]
        except Exception as error:
            # The traceback does not leave this process.
            note_samples(error, self._dataset, shard)
            raise

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What a `worker_init_fn` sets, such as an open file, is meant for the user's data set.
        if name == "_dataset":
            super().__setattr__(name, value)
        else:
            setattr(self._dataset, name, value)
