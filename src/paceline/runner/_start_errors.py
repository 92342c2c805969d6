"""Judging why an attempt could not start: what may pass, what the user has to change, the rest."""

import errno

from paceline.messages.states import ErrorKind, ExitReason

# No space, no inodes or no quota left on a disk; no file descriptors, processes or memory.
_SHORTAGES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ENOMEM,
}
# A disk or a file server that does not answer, or not well.
_DISTURBANCES = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
}
# Python tells by its text alone that the system gave it no thread.
_NO_THREAD = "can't start new thread"


class UnusableConfigError(ValueError):
    """Raised when an attempt cannot start as its configuration says."""


def is_shortage(error: BaseException) -> bool:
    """Tell whether an error, or one that it was raised from, is a shortage that may pass."""
    return any(
        isinstance(cause, MemoryError) or str(cause) == _NO_THREAD or _has_number(cause, _SHORTAGES)
        for cause in _causes(error)
    )


def judge_start(error: BaseException) -> tuple[ExitReason, ErrorKind]:
    """Return why an attempt that failed with an error has not started, and the kind of error."""
    if is_shortage(error):
        return ExitReason.SHORTAGE, ErrorKind.TRANSIENT
    kind = ErrorKind.PERMANENT
    if any(_has_number(cause, _DISTURBANCES) for cause in _causes(error)):
        kind = ErrorKind.TRANSIENT
    elif isinstance(error, UnusableConfigError):
        kind = ErrorKind.USER
    return ExitReason.START_FAILED, kind


def _causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


def _has_number(error: BaseException, numbers: set[int]) -> bool:
    return isinstance(error, OSError) and error.errno in numbers
