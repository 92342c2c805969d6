"""What `paceline.train` raises beside the built-in exceptions.

TrainingFailedError (a RuntimeError)
├── WorkersLostError
├── NotEnoughWorkersError
├── RunDirectoryError
└── IncompleteCheckpointError

ResourcesError (a ValueError) and NodesDifferError (a RuntimeError) come from the workers.
"""

from typing import Any


class TrainingFailedError(RuntimeError):
    """The base of the errors of a run that are no exceptions of the user's code."""


class WorkersLostError(TrainingFailedError):
    """Raised when workers were lost more often than `max_retries` allows.

    `num_losses` counts the losses.
    """

    def __init__(self, message: str, num_losses: int) -> None:
        super().__init__(message)
        self.num_losses = num_losses


class NotEnoughWorkersError(TrainingFailedError):
    """Raised when fewer workers than the least number could run for too long.

    `wanted` is that number, `available` how many could run at last.
    """

    def __init__(self, message: str, wanted: int, available: int) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.available = available


class RunDirectoryError(TrainingFailedError):
    """Raised when a node does not see the run directory of the driver."""


class IncompleteCheckpointError(TrainingFailedError):
    """Raised at the end of a run when ranks have saved unequally many checkpoints.

    `results` is what the run would have returned.
    """

    def __init__(self, message: str, results: Any) -> None:
        super().__init__(message)
        self.results = results
