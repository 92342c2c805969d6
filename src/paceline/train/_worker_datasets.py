"""Data sets of a trainer in its workers."""

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paceline._training.workers.ray.cluster import RayShards
from paceline.data._dataset import Dataset, Fold
from paceline.train._prepared_loader_and_steps import UserLoop
from paceline.train._rank_session import RankSession
from paceline.train._trainer_arguments import (
    given_dataset,
    is_made,
    is_pair,
    is_several,
    made_dataset,
)

if TYPE_CHECKING:
    from paceline.train._prepared_loader_and_steps import PreparedLoader
    from paceline.train._rank_session import RankSession


class RayDataset:
    """Part of a Ray data set read by a worker.

    Args:
        shards: The parts.
        session: The run.
    """

    def __init__(self, shards: RayShards, session: UserLoop) -> None:
        self._session = session
        self._own = shards.of_rank(session.rank_info.rank)

    def get_shard(self, rank: int | None = None) -> "RayDataset":
        """Return this worker's part.

        Args:
            rank: This worker's rank, which is the default.

        Raises:
            ValueError: It is the rank of another worker, whose part is only there.
        """
        own = self._session.rank_info.rank
        if rank not in (None, own):
            raise ValueError(f"`rank` must be this worker's, {own}, but got {rank!r}.")
        return self

    def get_split(self) -> "RayDataset":
        """Return this worker's part."""
        return self

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows of an epoch; all workers must begin each epoch."""
        return iter(self._own.iter_rows())

    def to_torch(
        self, batch_size: int = 1, *, move_to_device: bool = True, **options: Any
    ) -> "RayLoader":
        """Return a loader of this worker's part, in batches.

        Args:
            batch_size: The rows of one worker's batch.
            move_to_device: Whether batches are moved to this worker's device.
            options: Further options of Ray's `iter_torch_batches`, such as
                `local_shuffle_buffer_size` and `collate_fn`.
        """
        device = str(self._session.device) if move_to_device else "cpu"
        options = {"batch_size": batch_size, "device": device, **options}
        if "collate_fn" in options:
            # Ray leaves the batches of a `collate_fn` where that has put them.
            options.pop("device")
        return RayLoader(self._own, self._session, options)


class RayLoader:
    """Loader of batches from a worker's part of a Ray data set; each iteration is an epoch.

    Args:
        own: Ray's iterator over the part.
        session: The run.
        options: Options of `iter_torch_batches`.
    """

    def __init__(self, own: Any, session: UserLoop, options: dict[str, Any]) -> None:
        self._own = own
        self._session = session
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch; all workers must begin each epoch."""
        session = self._session
        batches = session.open_data(
            lambda: iter(self._own.iter_torch_batches(**self._options)), was_open=False
        )
        size = session.rank_info.world_size
        try:
            batch, wait_s = _next(batches)
            while batch is not None:
                # Look-ahead by a batch: `is_last` must be known before the batch is used.
                following, following_wait_s = _next(batches)
                num_own = _num_rows(batch)
                # All parts have equally many rows, so all batches of a step have the same size.
                session.begin_batch(
                    num_own, num_own * size, is_last=following is None, wait_s=wait_s
                )
                began = time.perf_counter()
                yield batch
                session.end_batch(time.perf_counter() - began)
                batch, wait_s = following, following_wait_s
        finally:
            session.end_data()


def _next(batches: Iterator[Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    batch = next(batches, None)
    return batch, time.perf_counter() - began


def _num_rows(batch: Any) -> int:
    while isinstance(batch, (Mapping, list, tuple)):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch)


class WorkerDatasetReader:
    """Reader of a worker's part of the run's data sets.

    Args:
        session: The run.
    """

    def __init__(self, session: "RankSession") -> None:
        self.rank = session.rank_info.rank
        self.world_size = session.rank_info.world_size
        self._session = session

    def prepare(self, loader: Any, *, is_moved: bool) -> "PreparedLoader":
        """Return this worker's part of a loader."""
        return self._session.prepare_loader(loader, is_moved=is_moved)


def dataset_of(session: "RankSession | None", name: str | int | None) -> Any:
    """Return the data set of a run; see `train.get_dataset`."""
    session, data = _given_datasets(session, "get_dataset")
    if not is_several(data):
        if name is not None:
            raise KeyError(f"There is no data set {name!r}, as the run was given a single one.")
        return _read_dataset(session, data)
    names = list(_by_name(data))
    if name is None and len(names) > 1:
        raise ValueError(
            f"`name` must say which data set is meant, but got None for {names}. Hint:"
            " get_datasets() gives all of them."
        )
    if name is not None and name not in names:
        raise KeyError(f"There is no data set {name!r}, only {names}.")
    return _read_dataset(session, _by_name(data)[names[0] if name is None else name])


def datasets_of(session: "RankSession | None") -> Any:
    """Return all data sets of a run; see `train.get_datasets`."""
    session, data = _given_datasets(session, "get_datasets")
    if isinstance(data, Mapping):
        return {name: _read_dataset(session, each) for name, each in data.items()}
    if is_pair(data):
        return _read_dataset(session, data)
    if not isinstance(data, (list, tuple)):
        return [_read_dataset(session, data)]
    return [_read_dataset(session, each) for each in data]


def _given_datasets(session: "RankSession | None", caller: str) -> tuple["RankSession", Any]:
    """Return the session and the data set given to its run; raise RuntimeError without either."""
    if session is None:
        raise RuntimeError(
            f"`{caller}` gives what `Trainer.run(dataset=...)` was given, but this process works"
            " for no run. Hint: `if train.in_worker(): ... else: ...`."
        )
    if session.job.dataset is None:
        raise RuntimeError(
            f"`{caller}` gives what `Trainer.run(dataset=...)` was given, but that got none."
            " Hint: trainer.run(train_func, dataset=my_data_set)."
        )
    return session, _made_dataset(session, session.job.dataset)


def _made_dataset(session: "RankSession", data: Any) -> Any:
    """Return the data, made from the config if given as a function, so no data need travel."""
    if is_made(data):
        data = given_dataset(made_dataset(data, session.job.config))
    return data


def _by_name(data: Any) -> Mapping[Any, Any]:
    if isinstance(data, Mapping):
        return data
    return data._asdict() if isinstance(data, Fold) else dict(enumerate(data))


def _read_dataset(session: "RankSession", data: Any) -> Any:
    """Return a data set, or a pair of data sets, as read by this worker."""
    data = _made_dataset(session, data)
    if isinstance(data, RayShards):
        return RayDataset(data, session)
    if is_pair(data):
        pair = [_read_dataset(session, each) for each in data]
        return Fold(*pair) if isinstance(data, Fold) else tuple(pair)
    return Dataset(data).read_by(WorkerDatasetReader(session))
