"""The state that a trainer keeps between passes, to go on from after a loss.

The workers of this machine write what all of them share into a file in memory, which belongs to
the driver. It is read only when somebody wants it: after a loss, or for `state_dict` and `save`.
"""

import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.creators._state import rank_state, whole_state
from paceline.workers import NotSendableError, dump, load

if TYPE_CHECKING:
    from paceline.creators._replica import Replica


class MemoryFile:
    """A file in memory, which is gone when it is closed, and with this process.

    Attributes:
        path: Where processes of the same user on this machine open it.
        close: Frees the memory; may be called again.
    """

    def __init__(self) -> None:
        descriptor = os.memfd_create("paceline_state")
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.close = weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def is_possible() -> bool:
        """Tell whether the system has such files."""
        return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class KeptState:
    """The whole state of a trainer.

    Args:
        parts: That of each rank, in rank order; None for the chief's if that is in the file.
        file: Where the chief's part may be.

    Attributes:
        parts: As given.
        path: The file, if the chief's part is there.
    """

    def __init__(self, parts: Sequence[Any], file: MemoryFile | None = None) -> None:
        self.parts = list(parts)
        self._file = file if parts[0] is None else None
        self.path = None if self._file is None else self._file.path

    def whole(self) -> dict[str, Any]:
        """Return the state."""
        return joined(self.path, self.parts)

    def close(self) -> None:
        """Forget the state."""
        if self._file is not None:
            self._file.close()


def joined(path: str | None, parts: Sequence[Any]) -> dict[str, Any]:
    """Return a whole state of its parts, the first of which is in a file if there is one."""
    if path is not None:
        with open(path, "rb") as file:
            parts = [load(file), *parts[1:]]
    return whole_state(parts)


def rank_part(replica: "Replica", path: str | None) -> dict[str, Any] | None:
    """Return a rank's part of the state; None if the chief could write it to a file.

    Args:
        replica: The rank's.
        path: The file, if there is one.
    """
    part = rank_state(replica)
    if path is None or replica.rank != 0:
        return part
    try:
        with open(path, "wb") as file:
            dump(part, file, what="The state", name="state")
    except (OSError, NotSendableError):
        # Another user's, or no memory is left; what cannot be pickled is told where it is sent.
        return part
    return None
