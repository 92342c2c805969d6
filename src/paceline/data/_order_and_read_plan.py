"""The order of samples in pieces, for example row groups of files."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, overload

from paceline._base.arguments_and_errors import check_count, mix_seed
from paceline.data._sample_sources import Numbers, Source

_PIECES, _WINDOW = 0, 1
_WINDOWS_KEPT = 4


class PartitionedOrder:
    """Order of an epoch's samples, cut into a partition for each shard of a global batch.

    Args:
        sizes: The number of samples of each piece, as an array.
        num_partitions: The shards of a global batch.
        window: The number of samples that are mixed with each other; 0 keeps their order, and that
            of the pieces.
        seed: The seed of the run.
        epoch: The epoch.
        expect: Called with the first numbers of the pieces that are in use, and of those that are
            needed next.
        ahead: How many windows are needed next.
    """

    def __init__(
        self,
        sizes: Numbers,
        num_partitions: int,
        *,
        window: int,
        seed: int,
        epoch: int,
        expect: Callable[[Numbers, Numbers], None] | None = None,
        ahead: int = 1,
    ) -> None:
        import numpy as np

        starts = np.cumsum(sizes) - sizes
        if window:
            order = _generator(seed, epoch, _PIECES).permutation(len(sizes))
            starts, sizes = starts[order], sizes[order]
        self._starts, self._sizes = starts, sizes
        self._ends = np.cumsum(sizes)
        self.num_samples = int(self._ends[-1]) if len(sizes) else 0
        self._num_partitions = num_partitions
        self._window = window
        self._span = window or max(1, int(sizes.max(initial=1)))
        self._seed, self._epoch = seed, epoch
        self._expect = expect
        self._ahead = ahead
        # The pieces in use in each partition that this process reads.
        self._in_use: dict[int, Numbers] = {}
        self._kept: OrderedDict[tuple[int, int], Numbers] = OrderedDict()

    def partition_size(self, partition: int) -> int:
        """Return the number of samples of a partition; the first few may have 1 more."""
        whole, rest = divmod(self.num_samples, self._num_partitions)
        return whole + (partition < rest)

    def numbers(self, partition: int, begin: int, end: int) -> list[int]:
        """Return the samples between two places of a partition."""
        found: list[int] = []
        for index in range(begin // self._span, (end - 1) // self._span + 1):
            start = index * self._span
            window = self._window_of(partition, index)
            found += window[max(begin - start, 0) : end - start].tolist()
        return found

    def _window_of(self, partition: int, index: int) -> Numbers:
        key = (partition, index)
        if key not in self._kept:
            firsts, numbers = self._pieces_of(partition, index)
            if self._window:
                generator = _generator(self._seed, self._epoch, _WINDOW, partition, index)
                numbers = numbers[generator.permutation(len(numbers))]
            self._kept[key] = numbers
            if self._expect is not None:
                self._tell(partition, index, firsts)
            # Room for two windows of each partition: a shard may span a window boundary.
            while len(self._kept) > max(_WINDOWS_KEPT, 2 * self._num_partitions):
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _tell(self, partition: int, index: int, firsts: Numbers) -> None:
        import numpy as np

        assert self._expect is not None
        self._in_use[partition] = firsts
        later = [
            self._pieces_of(partition, ahead, only_firsts=True)[0]
            for ahead in range(index + 1, index + 1 + self._ahead)
        ]
        nothing = np.empty(0, np.int64)
        self._expect(np.concatenate(list(self._in_use.values())), np.concatenate([nothing, *later]))

    def _pieces_of(
        self, partition: int, index: int, *, only_firsts: bool = False
    ) -> tuple[Numbers, Numbers]:
        """Return the first sample of each piece of a window, and all its samples in order."""
        import numpy as np

        whole, rest = divmod(self.num_samples, self._num_partitions)
        partition_start = partition * whole + min(partition, rest)
        begin = partition_start + min(index * self._span, self.partition_size(partition))
        end = partition_start + min((index + 1) * self._span, self.partition_size(partition))
        if begin >= end:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first = int(np.searchsorted(self._ends, begin, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        ends = self._ends[first : last + 1]
        begins = ends - self._sizes[first : last + 1]
        low, high = np.maximum(begins, begin), np.minimum(ends, end)
        firsts = self._starts[first : last + 1] + low - begins
        if only_firsts:
            return firsts, firsts
        counts = high - low
        places = np.arange(end - begin) + np.repeat(firsts - (low - begin), counts)
        return firsts, places


class OrderShard(Sequence[int]):
    """Samples of a shard, computed on access."""

    def __init__(self, order: PartitionedOrder, partition: int, begin: int, end: int) -> None:
        self._order = order
        self._place = partition, begin, end

    def __len__(self) -> int:
        _, begin, end = self._place
        return end - begin

    def __iter__(self) -> Iterator[int]:
        return iter(self._order.numbers(*self._place))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._order.numbers(*self._place)[index]


class OrderShards(Sequence[Sequence[int]]):
    """Shards of an epoch: shard s of global batch b has the index b * partitions + s.

    Args:
        order: The samples.
        num_partitions: The shards of a global batch.
        shard_size: The samples of a shard; fewer at the end of a partition.
        drop_last: Whether smaller ones are left out.
        num_shards: How many of the shards there are; None for all.
    """

    def __init__(
        self,
        order: PartitionedOrder,
        num_partitions: int,
        shard_size: int,
        *,
        drop_last: bool,
        num_shards: int | None = None,
    ) -> None:
        self._order = order
        self._num_partitions = num_partitions
        self._size = shard_size
        self._drop_last = drop_last
        whole = sum(
            order.partition_size(partition) // shard_size for partition in range(num_partitions)
        )
        parts = sum(
            order.partition_size(partition) % shard_size > 0 for partition in range(num_partitions)
        )
        total = whole + (0 if drop_last else parts)
        self._num_shards = total if num_shards is None else num_shards

    def __len__(self) -> int:
        return self._num_shards

    @property
    def num_samples(self) -> int:
        """The number of samples in all shards."""
        batches, rest = divmod(self._num_shards, self._num_partitions)
        return sum(
            min(self._order.partition_size(partition), (batches + (partition < rest)) * self._size)
            for partition in range(self._num_partitions)
        )

    def first(self, num_shards: int) -> "OrderShards":
        """Return the first shards."""
        return OrderShards(
            self._order,
            self._num_partitions,
            self._size,
            drop_last=self._drop_last,
            num_shards=num_shards,
        )

    @overload
    def __getitem__(self, index: int) -> Sequence[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sequence[int]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[int] | list[Sequence[int]]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._num_shards))]
        if not 0 <= index < self._num_shards:
            raise IndexError(index)
        batch, partition = divmod(index, self._num_partitions)
        begin = batch * self._size
        end = min(begin + self._size, self._order.partition_size(partition))
        return OrderShard(self._order, partition, begin, end)


def _generator(*parts: int) -> Any:
    """Return a legacy NumPy generator: its numbers are stable across NumPy versions."""
    import numpy as np

    seed = mix_seed(*parts)
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])


_PIPELINE_OPTIONS = ("length", "window")


class Reader(Protocol):
    """Worker of a run, as the reader of its part of a data set."""

    rank: int
    world_size: int

    def prepare(self, loader: Any, *, is_moved: bool) -> Any:
        """Return this worker's part of a torch `DataLoader`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a data set is read.

    Attributes:
        is_shuffled: Whether each epoch has a random order of its own.
        window: How many samples are mixed with each other; None for the source's choice.
        ahead: How many windows are read ahead; None for the source's choice.
        part: The worker whose part this is, and the number of workers.
        reader: The worker that reads.
    """

    is_shuffled: bool = False
    window: int | None = None
    ahead: int | None = None
    part: tuple[int, int] | None = None
    reader: Reader | None = None

    def with_pipeline(self, options: Mapping[str, Any]) -> "Plan":
        """Return the plan with other windows.

        Args:
            options: `length` and `window`; None leaves a setting as it is.

        Raises:
            ValueError: There is no such setting, or a value is negative.
        """
        if unknown := set(options) - set(_PIPELINE_OPTIONS):
            raise ValueError(
                f"`pipeline_args` must be among {list(_PIPELINE_OPTIONS)}, but got"
                f" {sorted(unknown)}."
            )
        for name, value in options.items():
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"`{name}` must be an integer from 0 on, but got {value!r}.")
        ahead, window = options["length"], options.get("window")
        return replace(
            self, ahead=self.ahead if ahead is None else ahead, window=window or self.window
        )

    def shuffled(self, window: int | None) -> "Plan":
        """Return the plan of random orders.

        Raises:
            ValueError: The window is not at least 1.
        """
        if window is not None:
            check_count("window", window)
        return replace(self, is_shuffled=True, window=window or self.window)

    def of_worker(self, rank: int | None, num_parts: int | None) -> "Plan":
        """Return the plan of a worker's part.

        Args:
            rank: The worker; None for the one that reads.
            num_parts: The number of workers; None for the run's number.

        Raises:
            ValueError: There is no such part.
        """
        reader = self.reader
        if rank is None:
            rank = reader.rank if reader else 0
        if num_parts is None:
            num_parts = reader.world_size if reader else 1
        check_count("num_shards", num_parts)
        if not hasattr(rank, "__index__") or not 0 <= rank < num_parts:
            hint = " Hint: `num_shards` is the number of parts." if num_parts == 1 else ""
            raise ValueError(f"`rank` must be from 0 to {num_parts - 1}, but got {rank!r}.{hint}")
        return replace(self, part=(int(rank), num_parts))

    def check_own_part(self) -> None:
        """Check against reading another worker's part.

        Raises:
            ValueError: This is the part of another worker.
        """
        reader, part = self.reader, self.part
        if reader and part not in (None, (reader.rank, reader.world_size)):
            raise ValueError(
                "`to_torch` gives a worker its own part, but this is the part of rank"
                f" {part[0]} on rank {reader.rank}. Hint: get_shard() without a rank."
            )

    def epoch_shards(
        self,
        source: Source,
        num_shards: int,
        shard_size: int,
        *,
        seed: int,
        epoch: int,
        drop_last: bool,
        is_shuffled: bool,
    ) -> Sequence[Sequence[int]] | None:
        """Return the samples of an epoch in shards; None if any order costs the same.

        Args:
            source: The source of the samples.
            num_shards: The shards of a global batch.
            shard_size: The samples of a shard.
            seed: The seed of the run.
            epoch: The epoch.
            drop_last: Whether shards with fewer samples are left out.
            is_shuffled: Whether the order is random.
        """
        sizes = source.chunk_sizes()
        if sizes is None:
            return None
        order = PartitionedOrder(
            sizes,
            num_shards,
            window=(self.window or source.window()) if is_shuffled else 0,
            seed=seed,
            epoch=epoch,
            expect=source.expect,
            ahead=1 if self.ahead is None else self.ahead,
        )
        return OrderShards(order, num_shards, shard_size, drop_last=drop_last)
