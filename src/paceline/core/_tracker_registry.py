"""The trackers by name: Paceline's own, and those of installed packages."""

from collections.abc import Iterable, Sequence

from paceline._entry_points import loaded_class, offered_points
from paceline.core._tracker import Tracker

ENTRY_POINTS = "paceline.trackers"
"""The group of entry points: the name of each is that of a tracker, its object the class."""

_OWN = {
    "mlflow": "paceline.integrations._mlflow:MLflowTracker",
    "tensorboard": "paceline.integrations._tensorboard:TensorBoardTracker",
    "wandb": "paceline.integrations._wandb:WandbTracker",
}


def tracker_names() -> Sequence[str]:
    """Return the names of all trackers, sorted."""
    return sorted(offered_points(ENTRY_POINTS, _OWN))


def tracker_named(name: str) -> Tracker:
    """Return a new tracker with the options that it has by default.

    Raises:
        ImportError: Its library is not installed.
        TypeError: The package that offers it names something else than a `Tracker`.
        ValueError: Nobody offers one of this name.
    """
    points = offered_points(ENTRY_POINTS, _OWN)
    if name not in points:
        raise ValueError(
            f"A tracker must be {', '.join(sorted(points))}, but got {name!r}. Hint: install the"
            " package that offers it."
        )
    kind: type[Tracker] = loaded_class(points[name], Tracker)
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
