"""Base class of trackers, which show runs elsewhere, such as in MLflow."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from paceline.core._enums import Outcome

_GROUPS = ("training", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run, as a tracker is told of it.

    Attributes:
        run_id: Its identity, the same in all attempts.
        name: Its name; a trial of a master is named after its experiment and trial.
        run_dir: The run directory.
        config: The hyperparameters.
        attempt: Which attempt it is, from 0.
        tracked_as: What `Tracker.start` has returned in the last attempt, None in the first.
    """

    run_id: str
    name: str
    run_dir: Path
    config: Mapping[str, Any]
    attempt: int
    tracked_as: str | None


class MetricPoint(NamedTuple):
    """A number of one report: a name such as "loss", "validation/loss" or "rank_2/loss"."""

    name: str
    value: float
    step: int
    time: float


class Tracker(ABC):
    """Show runs in another system, such as MLflow; subclasses are what users pass to a trainer.

    Training never waits for a tracker. Its methods are called by one thread, which is not that of
    training, one at a time and in the order start, log, finish. They may block, and may raise: the
    call is then repeated for some time. What is lost in the end is counted.

    To write one, override the abstract methods, set `name`, and import the library in `__init__`,
    so that a library that is missing is an error where the user makes the tracker.

    Args:
        ranks: Whose metrics: a rank, several of them, or None for all. Those of other ranks than 0
            have names such as "rank_2/loss".
        groups: Which groups of metrics; None for all, with those of profiling.
        close_timeout_s: How long the end of a run waits for the tracker, in seconds.

    Attributes:
        name: What the tracker is called in messages and in the run directory.
        num_lost: How many reports and checkpoints the tracker has not taken.

    Raises:
        ValueError: A rank is negative, or the timeout.
    """

    name: ClassVar[str] = "tracker"

    def __init__(
        self,
        ranks: int | Iterable[int] | None = 0,
        *,
        groups: Collection[str] | None = _GROUPS,
        close_timeout_s: float = 10.0,
    ) -> None:
        self.ranks = _as_ranks(ranks)
        self.groups = None if groups is None else frozenset(groups)
        if not close_timeout_s >= 0:
            raise ValueError(f"`close_timeout_s` must be at least 0, but got {close_timeout_s!r}.")
        self.close_timeout_s = close_timeout_s
        self.num_lost = 0
        # A thread that hangs keeps it, so that no other one calls the same object.
        self.turn = threading.Lock()

    @abstractmethod
    def start(self, run: TrackedRun) -> str | None:
        """Begin to show a run, or go on with one that an earlier attempt has begun.

        Args:
            run: The run.

        Returns:
            What the run is called there; the next attempt gets it as `run.tracked_as`.
        """

    @abstractmethod
    def log_metrics(self, points: Sequence[MetricPoint]) -> None:
        """Add points; of a call that is repeated, some may be there already."""

    @abstractmethod
    def log_checkpoints(self, checkpoints: Mapping[str, str], newest: str) -> None:
        """Show which checkpoints there are, in place of those before.

        Args:
            checkpoints: The UUID of each one that exists, with its path or URL, oldest first.
            newest: The UUID of the newest one; it may have been deleted already.
        """

    @abstractmethod
    def finish(self, outcome: Outcome, error: str | None) -> None:
        """End: the run is over, or stopped to go on in a further attempt.

        Args:
            outcome: How it has ended.
            error: The exception that has ended it, as text.
        """

    def abandon(self) -> None:  # noqa: B027  # most have nothing to do
        """Let go of what could keep this process from ending; called while a method hangs."""

    def takes(self, group: str, rank: int) -> bool:
        """Tell whether metrics of a group and rank are wanted."""
        is_rank = self.ranks is None or rank in self.ranks
        return is_rank and (self.groups is None or group in self.groups)


def _as_ranks(ranks: Any) -> frozenset[int] | None:
    if ranks is None:
        return None
    chosen = frozenset([ranks] if isinstance(ranks, int) else ranks)
    if not all(isinstance(rank, int) and rank >= 0 for rank in chosen):
        raise ValueError(f"`ranks` must be ranks of at least 0, but got {ranks!r}.")
    return chosen
