"""Telling what the machine lacks for a moment from what is wrong for good."""

import errno

# No space, no inodes or no quota left on a disk; no file descriptors, processes or memory.
_SHORTAGES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ENOMEM,
}
# Python tells by its text alone that the system gave it no thread.
_NO_THREAD = "can't start new thread"


def is_shortage(error: BaseException) -> bool:
    """Tell whether an error, or one that it was raised from, is a shortage that may pass."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or str(cause) == _NO_THREAD:
            return True
        if isinstance(cause, OSError) and cause.errno in _SHORTAGES:
            return True
        cause = cause.__cause__
    return False
