"""Search methods that stop no trial: grid, random, single."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.search._hyperparameter_space import Space
from paceline.search._search_messages import Create, ExitReason, Operation, Train
from paceline.search._search_method import (
    SearchConfig,
    SearchMethod,
    TrialMaker,
    check_integer,
    check_optional_length,
    check_same_setup,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GridConfig(SearchConfig):
    """Configuration of a grid search: a trial for each point."""

    max_concurrent_trials: int = 16
    """0 runs all trials at once."""
    max_length: int | None = None

    kind: ClassVar[str] = "grid"

    def __post_init__(self) -> None:
        SearchConfig.__post_init__(self)
        check_integer("max_concurrent_trials", self.max_concurrent_trials, least=0)
        check_optional_length(self.max_length)

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method."""
        return GridMethod(
            maker,
            max_concurrent_trials=self.max_concurrent_trials,
            length=self.max_length or 1,
        )

    def num_planned(self, space: Space) -> int:
        """Return the number of grid points."""
        return space.grid_size()


class GridMethod(SearchMethod):
    """Grid search: creates a trial for each grid point, from the last point to the first."""

    def __init__(self, maker: TrialMaker, *, max_concurrent_trials: int, length: int) -> None:
        self._maker = maker
        self._size = maker.space.grid_size()
        self._num_initial = min(self._size, max_concurrent_trials or self._size)
        self._length = length
        self._num_left = self._size

    def start(self) -> list[Operation]:
        """Return the operations to create the first trials."""
        operations: list[Operation] = []
        for _ in range(self._num_initial):
            operations += self._create()
        return operations

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Do nothing: a grid search compares no trials."""
        return []

    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        """Create the next point's trial; the point of a failed trial is not tried again."""
        return self._create() if self._num_left else []

    def num_trials(self, num_invalid: int) -> int:
        """Return the number of grid points without the invalid ones."""
        return self._size - num_invalid

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        return {"size": self._size, "num_left": self._num_left}

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot.

        Raises:
            ValueError: If the snapshot comes from another grid.
        """
        check_same_setup("grid size", self._size, snapshot["size"])
        self._num_left = snapshot["num_left"]

    def _create(self) -> list[Operation]:
        self._num_left -= 1
        create = self._maker.at_grid_point(self._num_left)
        return [create, Train(request_id=create.request_id, length=self._length)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleConfig(SearchConfig):
    """Configuration of a search with a single trial."""

    max_length: int | None = None
    """The trial's length if it works by operations; None stands for 1."""

    kind: ClassVar[str] = "single"

    def __post_init__(self) -> None:
        SearchConfig.__post_init__(self)
        check_optional_length(self.max_length)

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method: a random search for a single trial without a replacement."""
        return RandomMethod(
            maker,
            max_trials=1,
            max_concurrent_trials=1,
            length=self.max_length or 1,
            is_invalid_replaced=False,
        )

    def num_planned(self, space: Space) -> int:
        """Return 1."""
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomConfig(SearchConfig):
    """Train trials with hyperparameters drawn at random."""

    max_trials: int
    max_concurrent_trials: int = 16
    """0 runs all trials at once."""
    max_length: int | None = None

    kind: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        SearchConfig.__post_init__(self)
        check_integer("max_trials", self.max_trials, least=1)
        check_integer("max_concurrent_trials", self.max_concurrent_trials, least=0)
        check_optional_length(self.max_length)

    def make_method(self, maker: TrialMaker) -> SearchMethod:
        """Return the method."""
        return RandomMethod(
            maker,
            max_trials=self.max_trials,
            max_concurrent_trials=self.max_concurrent_trials,
            length=self.max_length or 1,
            is_invalid_replaced=True,
        )

    def num_planned(self, space: Space) -> int:
        """Return the configured number."""
        return self.max_trials


class RandomMethod(SearchMethod):
    """Random search: creates a new random trial whenever a trial ends, up to the total."""

    def __init__(
        self,
        maker: TrialMaker,
        *,
        max_trials: int,
        max_concurrent_trials: int,
        length: int,
        is_invalid_replaced: bool,
    ) -> None:
        self._maker = maker
        self._max_trials = max_trials
        self._planned = max_trials
        self._num_concurrent = max_concurrent_trials
        self._length = length
        self._is_invalid_replaced = is_invalid_replaced
        self._num_counted = 0
        self._num_running = 0

    def start(self) -> list[Operation]:
        """Return the operations to create the first trials."""
        return self._fill()

    def resize(self, max_trials: int) -> list[Operation]:
        """Create more or fewer trials; a single trial stays alone."""
        if not self._is_invalid_replaced:
            return []
        self._max_trials = max_trials
        return self._fill()

    def reported(self, request_id: str, time: float, metric: float) -> list[Operation]:
        """Do nothing: a random search compares no trials."""
        return []

    def exited(self, request_id: str, reason: ExitReason, is_stopped: bool) -> list[Operation]:
        """Create the next trial; a trial with invalid hyperparameters does not count."""
        if reason is ExitReason.INVALID_HP and self._is_invalid_replaced:
            self._num_counted -= 1
        self._num_running -= 1
        return self._create() if self._num_counted < self._max_trials else []

    def num_trials(self, num_invalid: int) -> int:
        """Return the configured number: trials with invalid hyperparameters are replaced."""
        return max(self._max_trials, self._num_counted)

    def snapshot(self) -> dict[str, Any]:
        """Return the method's state as JSON-able data."""
        return {
            "max_trials": self._planned,
            "resized_to": self._max_trials,
            "num_counted": self._num_counted,
            "num_running": self._num_running,
        }

    def load(self, snapshot: dict[str, Any]) -> None:
        """Take the state over from a snapshot.

        Raises:
            ValueError: If the snapshot comes from another configuration.
        """
        check_same_setup("max_trials", self._planned, snapshot["max_trials"])
        self._num_counted = snapshot["num_counted"]
        # Snapshots of earlier versions lack both; their searches ran as many trials as they may.
        self._max_trials = snapshot.get("resized_to", self._planned)
        most = min(self._num_concurrent or self._planned, self._planned)
        self._num_running = snapshot.get("num_running", most)

    def _fill(self) -> list[Operation]:
        operations: list[Operation] = []
        most = self._num_concurrent or self._max_trials
        while self._num_running < most and self._num_counted < self._max_trials:
            operations += self._create()
        return operations

    def _create(self) -> list[Operation]:
        self._num_counted += 1
        self._num_running += 1
        create: Create = self._maker.sampled()
        return [create, Train(request_id=create.request_id, length=self._length)]
