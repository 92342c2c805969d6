"""The trackers by name: Paceline's own, and those of installed packages."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.core._tracker import Tracker

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "paceline.trackers"
"""The group of entry points: the name of each is that of a tracker, its object the class."""

_OWN = {
    "mlflow": "_mlflow:MLflowTracker",
    "tensorboard": "_tensorboard:TensorBoardTracker",
    "wandb": "_wandb:WandbTracker",
}


def tracker_names() -> Sequence[str]:
    """Return the names of all trackers, sorted."""
    return sorted(_points())


def tracker_named(name: str) -> Tracker:
    """Return a new tracker with the options that it has by default.

    Raises:
        ImportError: Its library is not installed.
        TypeError: The package that offers it names something else than a `Tracker`.
        ValueError: Nobody offers one of this name.
    """
    points = _points()
    if name not in points:
        raise ValueError(
            f"A tracker must be {', '.join(sorted(points))}, but got {name!r}. Hint: install the"
            " package that offers it."
        )
    kind = points[name].load()
    if not (isinstance(kind, type) and issubclass(kind, Tracker)):
        raise TypeError(
            f"The entry point {name!r} of {ENTRY_POINTS!r} must be a class of `Tracker`, but"
            f" {points[name].value} is {kind!r}."
        )
    return kind()


def as_trackers(trackers: Iterable[Tracker | str] | None) -> list[Tracker]:
    """Return trackers that were given as such or by name.

    Raises:
        ImportError: A library is not installed.
        TypeError: One is neither a `Tracker` nor a name.
        ValueError: A name is unknown.
    """
    if isinstance(trackers, (str, Tracker)):
        trackers = [trackers]
    chosen = []
    for tracker in trackers or ():
        if isinstance(tracker, str):
            tracker = tracker_named(tracker)
        if not isinstance(tracker, Tracker):
            raise TypeError(
                f"`trackers` must be Tracker objects or names, but got {tracker!r}. Hint:"
                ' trackers=["mlflow"].'
            )
        chosen.append(tracker)
    return chosen


def _points() -> "dict[str, EntryPoint]":
    # It takes its time to load, and most scripts have no trackers.
    from importlib.metadata import EntryPoint, entry_points

    own = [
        EntryPoint(name, f"paceline.integrations.{place}", ENTRY_POINTS)
        for name, place in _OWN.items()
    ]
    return {point.name: point for point in [*own, *entry_points(group=ENTRY_POINTS)]}
