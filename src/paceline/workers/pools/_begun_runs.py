"""Which runs the workers of a generation have begun, as they have told; the driver's side."""

from collections.abc import Mapping

_RESUME_VARIABLE = "PACELINE_RESUME"


class BegunRuns:
    """The runs that the workers have begun, or have gone on with.

    Attributes:
        num_checkpoints: How many checkpoints they have committed.
    """

    def __init__(self) -> None:
        self.num_checkpoints = 0
        self._is_completed: dict[str, bool] = {}

    def note(self, event: str, path: str, rank: int) -> None:
        """Note what a worker has told; see `_reporting.tell`."""
        if event == "run":
            self._is_completed.setdefault(path, False)
        elif event == "checkpoint":
            self.num_checkpoints += 1
        elif event == "completed" and rank == 0:
            self._is_completed[path] = True

    @property
    def have_begun(self) -> bool:
        """Whether the workers have begun to record a run."""
        return bool(self._is_completed)

    @property
    def are_completed(self) -> bool:
        """Whether there is a run, and all of them have come to their end."""
        return bool(self._is_completed) and all(self._is_completed.values())

    def resume_variables(self) -> Mapping[str, str]:
        """Return the variables that have the next workers go on from the last checkpoints.

        A script with one run is told its directory, so that no other job's run of the same name
        can be meant. One with several finds each by its name.
        """
        paths = list(self._is_completed)
        if not paths:
            return {}
        value = paths[0] if len(paths) == 1 else "auto"
        return {_RESUME_VARIABLE: value}
