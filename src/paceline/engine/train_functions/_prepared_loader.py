"""A data loader as a rank of a user's own loop iterates over it."""

import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from paceline.engine.devices._data_to_device import to_device
from paceline.engine.loaders._sharded_data import ShardedData
from paceline.engine.loaders._worker_batches import worker_batches
from paceline.engine.state._data_identity import check_identity

if TYPE_CHECKING:
    from paceline.engine.train_functions._user_loop import UserLoop

logger = logging.getLogger(__name__)


class PreparedLoader:
    """This worker's part of a data loader; what it does not define itself is the user's loader's.

    The k-th iteration is epoch k of the data: with `shuffle=True` its order depends on the seed of
    the run and on k alone. A checkpoint holds the place, also within an epoch.

    Args:
        loader: The user's loader.
        make_data: Returns its samples in shards, in an order that depends on the seed given to it.
        seed: The seed, unless a checkpoint has another one.
        own_loop: The loop that iterates over it.
        is_moved: Whether batches are moved to the worker's device.
    """

    def __init__(
        self,
        loader: Any,
        make_data: Callable[[int], ShardedData],
        seed: int,
        own_loop: "UserLoop",
        *,
        is_moved: bool,
    ) -> None:
        self._loader = loader
        self._make_data = make_data
        self._seed = seed
        self._data = make_data(seed)
        self._own_loop = own_loop
        self._is_moved = is_moved
        self._epoch = 0
        self._next_batch = 0
        self._was_open = False
        # Weak, so that leaving the loop ends the iteration.
        self._current: weakref.ref[Generator[Any, None, None]] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while it is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same for all workers.

        Raises:
            TypeError: The data have no length.
        """
        order = self._data.order(self._epoch)
        if order is None:
            raise TypeError("A prepared loader of an iterable data set has no length.")
        return order.num_batches

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch, or go on in the one that a checkpoint was saved in."""
        # Only one iteration at a time has a place that can be saved.
        self.end_iteration()
        iteration = self._run()
        self._current = weakref.ref(iteration)
        return iteration

    @property
    def is_read_whole(self) -> bool:
        """Whether each worker reads all samples and keeps its own."""
        return self._data.is_read_whole

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of an epoch; needed only to leave the natural order."""
        if epoch != self._epoch:
            self._epoch, self._next_batch, self._was_open = epoch, 0, False

    def end_iteration(self) -> None:
        """End the present iteration, if there is one, as leaving its loop does.

        It is for loops that count batches in place of waiting for the end of the data.
        """
        running = self._current() if self._current is not None else None
        if running is not None:
            running.close()

    # ---- checkpoints ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the place in the data, of which the batch that was given out last is done."""
        return {
            "epoch": self._epoch,
            "batch": self._next_batch,
            "is_open": self._next_batch > 0,
            "seed": self._seed,
            "facts": self._facts(),
            "stream": self._data.stream_state(),
            "seeds_epochs": self._data.seeds_epochs,
            "data": self._data.identity,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned.

        Raises:
            CheckpointMismatchError: The checkpoint lies within an epoch of other data.
        """
        # Earlier versions had that of the run for all loaders.
        seed = state.get("seed", self._own_loop.seed)
        if seed != self._seed:
            self._seed, self._data = seed, self._make_data(seed)
        check_identity(
            state.get("data"),
            self._data.identity,
            is_within_epoch=state["is_open"],
            warn=self._warn,
        )
        self._data.seeds_epochs = state.get("seeds_epochs", False)
        if state["facts"] != self._facts():
            self._warn(
                f"A loader goes on from a checkpoint in which it had {state['facts']}, and now has"
                f" {self._facts()}: its epoch begins anew."
            )
            self._epoch = state["epoch"]
            return
        self._epoch, self._next_batch = state["epoch"], state["batch"]
        self._was_open = state["is_open"]
        self._data.load_stream_state(state["stream"])

    def _warn(self, text: str) -> None:
        if self._own_loop.rank_info.rank == 0:
            logger.warning("%s", text)

    def _facts(self) -> dict[str, Any]:
        num_samples = None if self._data.is_iterable else len(self._loader.dataset)
        return {
            "samples": num_samples,
            "batch_size": self._loader.batch_size,
            "shards": self._data.num_shards,
        }

    # ---- one epoch -----------------------------------------------------------------------

    def _run(self) -> Generator[Any, None, None]:
        # Not before the first batch is asked for: some libraries begin iterations to see whether
        # they can, and these must draw no random numbers.
        start = self._next_batch
        batches = self._own_loop.open_data(
            lambda: worker_batches(self._data, self._epoch, start), was_open=self._was_open
        )
        self._was_open = False
        own_loop, order = self._own_loop, self._data.order(self._epoch)
        last = -1 if order is None else order.num_batches - 1
        num_backwards = own_loop.num_backwards
        try:
            while True:
                began = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    break
                wait_s = time.perf_counter() - began
                is_first = self._next_batch == start
                is_asked = not batch.num_own or own_loop.gradients.has_sharded
                if is_asked and not own_loop.is_training(num_backwards, is_first=is_first):
                    own_loop.gradients.gather_models(batch.num_shards, own_loop.num_shards)
                    if not batch.num_own:
                        # The others have samples left, but do nothing that needs all ranks. They
                        # may yet ask whether this rank has more of a stream.
                        continue
                data = batch.data
                if self._is_moved:
                    data = to_device(data, own_loop.device, own_loop.warned_types)
                is_last = self._next_batch == last
                self._next_batch += 1
                own_loop.begin_batch(batch.num_own, batch.num_all, is_last=is_last, wait_s=wait_s)
                began = time.perf_counter()
                yield data
                own_loop.end_batch(time.perf_counter() - began)
        finally:
            self._epoch += 1
            self._next_batch = 0
            self._current = None
            own_loop.end_data()
