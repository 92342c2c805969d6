"""Exceptions of `paceline.core`.

NotOfferedError (a NotImplementedError)
InvalidHP
NonFiniteError (an ArithmeticError)
GivenUpError (a RuntimeError)
DistributedError (a RuntimeError)
├── DistributedTimeoutError (also a TimeoutError)
└── DistributedPeerError
CollectiveMismatchError (a RuntimeError)
"""

from paceline._errors import CollectiveMismatchError as CollectiveMismatchError
from paceline._errors import PicklableError


class NotOfferedError(NotImplementedError):
    """Raised for a value that Paceline knows but does not offer yet."""


class InvalidHP(Exception):
    """Raise inside `with core.init()` when the hyperparameters make no sense together.

    The trial ends as "invalid_hp" without a restart, and the process exits with code 0. An
    experiment whose trials all end so has failed.
    """


class NonFiniteError(PicklableError, ArithmeticError):
    """Raised when the training loss is NaN or infinite, and training is to stop then.

    A trial of a search ends as "diverged", without a restart. `rank` and `batch` tell where it
    began.
    """

    def __init__(self, message: str, *, rank: int = 0, batch: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.batch = batch


class DistributedError(RuntimeError):
    """The base of all errors of a `DistributedContext`."""


class DistributedTimeoutError(DistributedError, TimeoutError):
    """Raised when ranks are missing from a call for longer than the timeout; it names them."""


class DistributedPeerError(DistributedError):
    """Raised when another rank has failed, so that its part of a call will never come.

    `error_type` is the name of that rank's exception, or empty if its connection broke.
    `is_consequence` tells launchers that the other rank's failure came first.
    """

    is_consequence = True

    def __init__(self, message: str, *, error_type: str = "") -> None:
        super().__init__(message)
        self.error_type = error_type


class GivenUpError(RuntimeError):
    """Ends a run that its driver has given up before its end; it can go on later."""


class PreemptedError(SystemExit):
    """Ends a program whose run has made room and can go on later, with exit code 0."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)
