"""The shape of every search method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from paceline.search._bracket_views import BracketView
from paceline.search._hyperparameter_space import Space
from paceline.search._inputs_and_operations import Create, ExitReason, Operation
from paceline.search._random_stream import Rng


class TrialMaker:
    """Make trials from a space and a random stream, in the order in which draws are promised."""

    __slots__ = ("_rng", "space")

    def __init__(self, space: Space, rng: Rng) -> None:
        self.space = space
        self._rng = rng

    def sampled(self) -> Create:
        """Make a trial with random hyperparameters."""
        return self._make(self.space.sample(self._rng))

    def at_grid_point(self, index: int) -> Create:
        """Make a trial for a point of the grid."""
        return self._make(self.space.grid_point(index))

    def _make(self, hparams: dict[str, Any]) -> Create:
        return Create(
            request_id=self._rng.request_id(),
            trial_seed=self._rng.trial_seed(),
            hparams=hparams,
        )


class SearchMethod(ABC):
    """Decide which trials to create and which to stop.

    Implementations override all abstract methods. They hold plain state, are called from one
    thread, and may rely on `Search` for this: `start` comes once and first; every request id is
    one that the method created; a trial's report comes neither after its stop nor after its exit;
    a trial exits once.
    """

    @abstractmethod
    def start(self) -> list[Operation]:
        """Return the operations that create the first trials."""

    @abstractmethod
    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Take one validation report of a trial that trains."""

    @abstractmethod
    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        """Take a trial's end; `is_stopped` tells that the method had stopped it before."""

    @abstractmethod
    def num_trials(self, num_invalid: int) -> int:
        """Return how many trials the search counts, with those that it has yet to create.

        `num_invalid` of those created so far had invalid hyperparameters; they do not count.
        """

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""

    @abstractmethod
    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot of a method with the same configuration.

        Raises:
            ValueError: If the snapshot comes from another configuration.
        """

    def trained_share(self, time: float) -> float:
        """Return the part of a trial's full length that ends at `time`.

        It is 0 for methods that do not know how long their trials train.
        """
        return 0.0

    def brackets(self) -> tuple[BracketView, ...]:
        """Return a view of the brackets; methods without rungs have none."""
        return ()


def check_same_setup(name: str, ours: object, theirs: object) -> None:
    """Refuse a snapshot that was taken under another configuration.

    Raises:
        ValueError: If the two differ.
    """
    if ours != theirs:
        raise ValueError(
            f"A search's snapshot must come from the same configuration, where `{name}` is "
            f"{ours!r}, but got {theirs!r}.\n"
            "Hint: restore with the configuration and hyperparameters that the search began with."
        )
