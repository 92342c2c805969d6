"""Data sets of Ray Data, which Ray splits to the workers of a run on its cluster."""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paceline.workers.remote._ray_cluster import import_ray, join_ray

if TYPE_CHECKING:
    from paceline.engine._rank_session import RankSession

logger = logging.getLogger(__name__)


def is_ray_dataset(value: Any) -> bool:
    """Tell whether a value is a data set of Ray Data; this loads nothing."""
    data = sys.modules.get("ray.data")
    return data is not None and isinstance(value, data.Dataset)


class RayShards:
    """Parts of a Ray data set, one for each worker of a generation.

    The parts have equally many rows. The driver keeps this object until the workers have ended, as
    Ray ends what reads the data when nobody refers to it.

    Args:
        dataset: The data set.
        num_workers: How many workers there are.
    """

    def __init__(self, dataset: Any, num_workers: int) -> None:
        ray = import_ray()
        self._iterators: Any = dataset.streaming_split(num_workers, equal=True)
        self._pickled = [ray.cloudpickle.dumps(each) for each in self._iterators]
        context = ray.get_runtime_context()
        self._address, self._namespace = context.gcs_address, context.namespace

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterators": None}

    def of_rank(self, rank: int) -> Any:
        """Return a rank's part in this process, which is connected to Ray for that."""
        return join_ray(self._address, self._namespace).cloudpickle.loads(self._pickled[rank])


class RayDataset:
    """One worker's part of a Ray data set.

    Args:
        shards: The parts.
        session: The run.
    """

    def __init__(self, shards: RayShards, session: "RankSession") -> None:
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
        """Yield the rows of an epoch. All workers must begin it."""
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
            # Ray moves only what it has made itself.
            options.pop("device")
        return RayLoader(self._own, self._session, options)


class RayLoader:
    """Batches of one worker's part of a Ray data set; each iteration is an epoch.

    Args:
        own: Ray's iterator over the part.
        session: The run.
        options: Options of `iter_torch_batches`.
    """

    def __init__(self, own: Any, session: "RankSession", options: dict[str, Any]) -> None:
        self._own = own
        self._session = session
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch. All workers must begin it."""
        session = self._session
        batches = session.open_data(
            lambda: iter(self._own.iter_torch_batches(**self._options)), was_open=False
        )
        size = session.rank_info.world_size
        try:
            batch, wait_s = _next(batches)
            while batch is not None:
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


def dealt(data: Any, num_workers: int) -> Any:
    """Return what a run was given, with each Ray data set split to the workers."""
    if is_ray_dataset(data):
        return RayShards(data, num_workers)
    if isinstance(data, Mapping):
        return {name: dealt(each, num_workers) for name, each in data.items()}
    if isinstance(data, (list, tuple)) and _has_ray_data(data):
        parts = [dealt(each, num_workers) for each in data]
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    return data


def check_ray_data(data: Any, cluster: str) -> None:
    """Check that the workers can read the Ray data sets of a run, and say what is different.

    Raises:
        TypeError: The workers are not on a Ray cluster.
    """
    if not _has_ray_data(data):
        return
    if cluster != "ray":
        raise TypeError(
            "A Ray data set must be read by workers on its Ray cluster, but those of this trainer"
            ' are on this machine without Ray. Hint: Trainer(cluster="ray"); or'
            " `dataset.write_parquet(path)` and `paceline.data.read(path)`, which also has an exact"
            " order; or `dataset.take_all()` if it is small."
        )
    logger.warning(
        "Ray splits this data set: its order can differ from run to run, each worker gets equally"
        " many rows, so that up to one row per worker is left out, and a run that goes on from a"
        " checkpoint begins its epoch anew. Hint: `paceline.data.read` has an exact order."
    )


def _has_ray_data(data: Any) -> bool:
    if isinstance(data, Mapping):
        return any(map(_has_ray_data, data.values()))
    if isinstance(data, (list, tuple)):
        # Samples can be many, and none of them is a data set then.
        return bool(data) and any(map(_has_ray_data, data[:2]))
    return is_ray_dataset(data)


def _next(batches: Iterator[Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    batch = next(batches, None)
    return batch, time.perf_counter() - began


def _num_rows(batch: Any) -> int:
    while isinstance(batch, (Mapping, list, tuple)):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch)
