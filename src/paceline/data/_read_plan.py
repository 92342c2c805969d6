"""How a data set is read: its order, its windows, and the part of a worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from paceline._argument_checks import check_count
from paceline.data._partitioned_order import OrderShards, PartitionedOrder
from paceline.data._sample_source import Source

_PIPELINE_OPTIONS = ("length", "window")


class Reader(Protocol):
    """A worker of a run, which reads its part of a data set."""

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
            num_parts: The number of workers; None for that of the run.

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
        """Check that a worker of a run reads its own part.

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
