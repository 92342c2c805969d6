"""One worker's part of a Ray data set, as rows or as batches of tensors."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.engine.train_functions._user_loop import UserLoop
from paceline.workers import RayShards


class RayDataset:
    """One worker's part of a Ray data set.

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

    def __init__(self, own: Any, session: UserLoop, options: dict[str, Any]) -> None:
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


def _next(batches: Iterator[Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    batch = next(batches, None)
    return batch, time.perf_counter() - began


def _num_rows(batch: Any) -> int:
    while isinstance(batch, (Mapping, list, tuple)):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch)
