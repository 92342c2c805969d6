"""Exceptions of `paceline.train`.

TrainingFailedError (a RuntimeError)
├── WorkersLostError
├── NotEnoughWorkersError
├── RunDirectoryError
└── IncompleteCheckpointError

All but the last come from the workers, as do ResourcesError (a ValueError) and NodesDifferError (a
RuntimeError).
"""

from typing import Any

from paceline.workers import RunDirectoryError as RunDirectoryError
from paceline.workers import TrainingFailedError


class IncompleteCheckpointError(TrainingFailedError):
    """Raised at the end of a run when ranks have saved unequally many checkpoints.

    `results` is what the run would have returned.
    """

    def __init__(self, message: str, results: Any) -> None:
        super().__init__(message)
        self.results = results
