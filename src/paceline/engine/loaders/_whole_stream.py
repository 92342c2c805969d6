"""Streams that cannot be read in pieces: each worker reads all, and keeps its own shards."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from paceline._seeds import mix_seed
from paceline.engine.devices._data_to_device import data_length
from paceline.engine.devices._random_generators import IteratorWithGenerators, isolated_randomness


class StreamBatch(NamedTuple):
    """A worker's part of a global batch of a stream.

    Attributes:
        own: The worker's shards.
        sizes: The number of samples of each shard of the global batch.
        stand_in: Returns a shard for a worker that has none.
    """

    own: list[Any]
    sizes: list[int]
    stand_in: Callable[[], Any]


class WholeStream:
    """A stream that is read from its beginning to its end, the same on all workers.

    Args:
        loader: The user's loader.
        num_shards: The shards of a global batch.
        own: The shards of this worker.
        seed: The seed of what is drawn.
    """

    def __init__(
        self, loader: "DataLoader[Any]", *, num_shards: int, own: range, seed: int
    ) -> None:
        self._loader = loader
        self._num_shards = num_shards
        self._own = own
        self._seed = seed
        self._placed: dict[str, Any] | None = None
        self._random: IteratorWithGenerators | None = None

    def iterate(self, epoch: int, start_batch: int, *, seeds_epochs: bool) -> Iterator[list[Any]]:
        """Return all shards of each global batch.

        What the stream draws comes from generators of its own, seeded by (seed, epoch). What lies
        before `start_batch` is read at once and dropped, unless `load_state` has put the stream
        there.

        Args:
            epoch: The epoch.
            start_batch: The first global batch.
            seeds_epochs: Whether each epoch has a seed of its own.
        """
        seed = mix_seed(self._seed, epoch if seeds_epochs else 0)
        set_epoch = getattr(self._loader.dataset, "set_epoch", None)
        if callable(set_epoch) and seeds_epochs:
            set_epoch(epoch)
        with isolated_randomness(seed):
            stream: Iterator[Any] = iter(self._loader)
        self._random = None
        if not self._loader.num_workers:
            stream = self._random = IteratorWithGenerators(stream, seed)
        if self._placed is None:
            for _ in islice(stream, start_batch * self._num_shards):
                pass
        elif self._random is not None and start_batch:
            self._random.state = self._placed["random"]
        self._placed = None
        # Whole global batches are read, so that the stream stands at the same place on all ranks.
        return iter(lambda: list(islice(stream, self._num_shards)), [])

    def with_sizes(self, batches: Iterator[list[Any]]) -> Iterator[StreamBatch]:
        """Yield this worker's part of global batches."""
        own = self._own
        for shards in batches:
            mine = shards[own.start : own.stop]
            yield StreamBatch(mine, list(map(data_length, shards)), partial(_given, shards[0]))

    def own_shards(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """Return this worker's shards of global batches."""
        return (shards[self._own.start : self._own.stop] for shards in batches)

    def state(self) -> Any:
        """Return where the stream stands, or None if it cannot tell."""
        source = self._source()
        if source is None:
            return None
        random = None if self._random is None else self._random.state
        return {"source": source.state_dict(), "random": random}

    def load_state(self, state: Any) -> None:
        """Put the stream where `state` found it."""
        source = self._source()
        if source is not None and state is not None:
            source.load_state_dict(state["source"])
            self._placed = state

    def _source(self) -> Any:
        """Return what knows the place in the stream: a stateful loader, or the data set itself."""
        loader: Any = self._loader
        if hasattr(loader, "state_dict"):
            return loader
        # The copies in a loader's worker processes are out of reach.
        has_state = hasattr(loader.dataset, "state_dict") and not loader.num_workers
        # Hugging Face's streams do not always go on from the place that they tell: not with a
        # buffer or a `map`, and in versions 5.0 and 5.1 not a second time.
        has_state = has_state and not type(loader.dataset).__module__.startswith("datasets.")
        return loader.dataset if has_state else None


def _given(value: Any) -> Any:
    return value
