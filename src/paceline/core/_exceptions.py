"""Exceptions of the core API."""

from paceline._base.exceptions import PicklableError


class NotOfferedError(NotImplementedError):
    """Error for a value known to Paceline but not supported yet."""


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
    """Error for ranks missing from a call for longer than the timeout; the message names them."""


class DistributedPeerError(DistributedError):
    """Error for a call left incomplete because another rank has failed.

    `error_type` is the name of that rank's exception, or empty if its connection broke.
    `is_consequence` tells launchers that the other rank's failure came first.
    """

    is_consequence = True

    def __init__(self, message: str, *, error_type: str = "") -> None:
        super().__init__(message)
        self.error_type = error_type


class GivenUpError(RuntimeError):
    """Exception ending a run abandoned by its driver before its end; the run can resume later."""


class PreemptedError(SystemExit):
    """Exception ending a preempted program with exit code 0; its run can resume later."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)
