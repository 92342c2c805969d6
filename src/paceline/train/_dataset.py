"""The data set that a run was given, as its workers see it."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

if TYPE_CHECKING:
    from paceline.train._loader import PreparedLoader
    from paceline.train._session import RankSession


class WorkerDataset:
    """A data set that the workers of a run share.

    Args:
        data: A map-style or iterable torch data set, or a sequence.
        session: The run.
    """

    def __init__(self, data: Any, session: "RankSession") -> None:
        self.data = data
        self._session = session

    def get_shard(self, rank: int | None = None) -> "DatasetShard":
        """Return a worker's part.

        Args:
            rank: Which worker's; this one's by default.

        Raises:
            ValueError: There is no such worker.
        """
        rank_info = self._session.rank_info
        if rank is None:
            rank = rank_info.rank
        if not 0 <= rank < rank_info.world_size:
            raise ValueError(
                f"`rank` must be from 0 to {rank_info.world_size - 1}, but got {rank!r}."
            )
        return DatasetShard(self.data, self._session, rank)

    def get_split(self) -> "DatasetShard":
        """Return this worker's part."""
        return self.get_shard()


class DatasetShard:
    """One worker's part of a data set: every `world_size`-th sample.

    `to_torch` gives it in batches, by the same rule as any prepared loader.

    Args:
        data: The whole data set.
        session: The run.
        rank: The worker.
    """

    def __init__(self, data: Any, session: "RankSession", rank: int) -> None:
        self._data = data
        self._session = session
        self._rank = rank

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of this part in their order."""
        data, size = self._data, self._session.rank_info.world_size
        if _is_iterable(data):
            return islice(iter(data), self._rank, None, size)
        return (data[index] for index in range(self._rank, len(data), size))

    def __len__(self) -> int:
        """Return the number of samples of this part.

        Raises:
            TypeError: The data set has no length.
        """
        return len(range(self._rank, len(self._data), self._session.rank_info.world_size))

    def to_torch(
        self,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        move_to_device: bool = True,
        **options: Any,
    ) -> "PreparedLoader":
        """Return a loader of this worker's part, in batches.

        Which samples a batch has depends on the seed of the run, the epoch and the number of
        shards alone; a checkpoint within an epoch holds the place.

        Args:
            batch_size: The samples of one worker's batch.
            shuffle: Whether each epoch has a random order of its own.
            move_to_device: Whether batches are moved to this worker's device.
            options: Further options of a torch `DataLoader`.

        Raises:
            ValueError: This is the part of another worker, or there are too few samples.
        """
        if self._rank != self._session.rank_info.rank:
            raise ValueError(
                "`to_torch` gives a worker its own part, but this is the part of rank"
                f" {self._rank} on rank {self._session.rank_info.rank}. Hint: get_shard() without a"
                " rank."
            )
        data = self._data
        if _is_iterable(data) and not isinstance(data, IterableDataset):
            data = _Stream(data)
        loader: DataLoader[Any] = DataLoader(data, batch_size, shuffle=shuffle or None, **options)
        return self._session.prepare_loader(loader, is_moved=move_to_device)


class _Stream(IterableDataset[Any]):
    """An iterable that is no torch data set."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)


def dataset_of(session: "RankSession | None", name: str | None) -> WorkerDataset:
    """Return the data set of a run; see `train.get_dataset`."""
    if session is None:
        raise RuntimeError(
            "`get_dataset` gives what `Trainer.run(dataset=...)` was given, but this process works"
            " for no run. Hint: `if train.in_worker(): ... else: ...`."
        )
    if not session.job.has_dataset:
        raise RuntimeError(
            "`get_dataset` gives what `Trainer.run(dataset=...)` was given, but that got none."
            " Hint: trainer.run(train_func, dataset=my_data_set)."
        )
    data = session.job.dataset
    if isinstance(data, Mapping):
        if name is None and len(data) > 1:
            raise ValueError(
                f"`name` must say which data set is meant, but got None for {sorted(data)}."
            )
        if name is not None and name not in data:
            raise KeyError(f"There is no data set {name!r}, only {sorted(data)}.")
        data = data[name if name is not None else next(iter(data))]
    elif name is not None:
        raise KeyError(f"There is no data set {name!r}, as the run was given a single one.")
    if callable(data) and not isinstance(data, Dataset) and not hasattr(data, "__getitem__"):
        # What is made in the worker need not travel.
        data = data()
    return WorkerDataset(data, session)


def _is_iterable(data: Any) -> bool:
    return isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
