"""What a rank of a user's own loop alone knows, in a checkpoint that the loop saves itself."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from paceline.engine.devices._random_generators import capture_random_state, restore_random_state
from paceline.engine.gradients._accumulated_window import has_stored_tensors
from paceline.engine.state._buffers_and_gradients import restore_generators
from paceline.engine.state._models_and_optimizers import ModelsAndOptimizers
from paceline.engine.train_functions._prepared_loader import PreparedLoader
from paceline.engine.train_functions._user_loop import UserLoop

T = TypeVar("T")


class StoredRanks(Protocol):
    """A checkpoint with what each rank alone knew."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The checkpoint's metadata."""

    def of_rank(self, rank: int) -> dict[str, Any] | None:
        """Return what a rank alone knew, or None if there was no such rank."""


class RankState:
    """The generators, gradients, scale and place in the data of a rank.

    Models and optimizers are not in here: the loop stores them, and puts them back before it goes
    on. So this is put back as late as possible: when the loop asks for data, or for it.

    Args:
        own_loop: The loop.
    """

    def __init__(self, own_loop: UserLoop) -> None:
        self._loop = own_loop
        self._loaders: list[PreparedLoader] = []
        self._loader_states: list[dict[str, Any]] = []
        self._stored: StoredRanks | None = None
        self._own: dict[str, Any] | None = None
        self._is_random_due = False

    def capture(self) -> dict[str, Any]:
        """Return the state."""
        return {
            **self._objects().own_state(),
            "loaders": [loader.state() for loader in self._loaders],
            "gradients": self._loop.gradients.state(),
            "scaler": self._loop.steps.state(),
        }

    def take_up(self, stored: StoredRanks) -> Mapping[str, Any]:
        """Go on from a checkpoint, and return the state that this rank takes up."""
        rank_info = self._loop.rank_info
        own, chief = stored.of_rank(rank_info.rank), stored.of_rank(0)
        # Who was not there goes on where the chief was.
        some = own or chief or {}
        self._stored = stored
        # The place in the data is the same for all ranks, and for any number of them.
        self._loader_states = some.get("loaders", [])
        for index, loader in enumerate(self._loaders):
            self._place_loader(loader, index)
        sizes = (rank_info.world_size, self._loop.num_busy_ranks)
        if own is not None and stored.metadata["world_size"] in sizes:
            self._own = own
        elif chief is not None:
            self._own = {**chief, "random": None}
        self._is_random_due = True
        return some

    def add_loader(self, loader: PreparedLoader) -> None:
        """Put a loader in the place where a checkpoint has it, and capture it from now on."""
        self._place_loader(loader, len(self._loaders))
        self._loaders.append(loader)

    def open_data(self, make: Callable[[], T], *, was_open: bool) -> T:
        """Return a new iterator over data, with the generators as the checkpoint has them.

        Making one draws random numbers: where the checkpoint was saved within the iteration, that
        was before it, and else it is yet to come.
        """
        if was_open:
            before = None if self._is_random_due else capture_random_state()
            iterator = make()
            if before is None:
                self._put_back()
            else:
                # They were put back by `restore_random_state()`.
                restore_random_state(before)
            return iterator
        self.restore_random_state()
        return make()

    def restore_random_state(self) -> None:
        """Put back the generators of the checkpoint that was loaded, unless they are."""
        if self._is_random_due:
            self._put_back()
            self._is_random_due = False

    def begin_batch(self) -> None:
        """Note that the loop has gone on."""
        self._is_random_due = False

    def _objects(self) -> ModelsAndOptimizers:
        # Prepared gradients have weights besides.
        loop = self._loop
        return ModelsAndOptimizers(rank=loop.rank_info.rank, models=loop.gradients.models)

    def _open_gradients(self, own: Mapping[str, Any], stored: StoredRanks) -> Any:
        """Return this rank's gradients within an accumulated step, which others may have begun."""
        loop, gradients = self._loop, self._loop.gradients
        state, stored_size = own["gradients"], stored.metadata["world_size"]
        sizes = (loop.rank_info.world_size, loop.num_busy_ranks)
        # An idle rank has stored none.
        has_own = loop.rank_info.rank < stored_size
        is_same = has_own and stored_size in sizes and not gradients.has_sharded
        if state is None or (is_same and not has_stored_tensors(state)):
            return state
        states = [(stored.of_rank(rank) or own)["gradients"] for rank in range(stored_size)]
        return gradients.shared_out(states, loop.rank_info.rank)

    def _place_loader(self, loader: PreparedLoader, index: int) -> None:
        if index < len(self._loader_states):
            loader.load_state(self._loader_states[index])

    def _put_back(self) -> None:
        """Put back what this rank alone knew; the generators last."""
        own, loop = self._own, self._loop
        assert self._stored is not None
        if own is not None:
            self._objects().load_own_state(own)
            loop.gradients.load_state(self._open_gradients(own, self._stored))
            loop.steps.load_state(own["scaler"])
        restore_generators(
            own and own["random"],
            seed=loop.seed,
            num_steps=self._stored.metadata["steps_completed"],
            rank=loop.rank_info.rank,
        )
