"""The state that a driver keeps of its workers between calls, to go on from after a loss.

Workers of this machine write what all of them share into a file in memory, which belongs to the
driver. It is read only when somebody wants it.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline.workers.pools._pickling import NotSendableError, dump, load


class StateFunctions(NamedTuple):
    """How the state of workers is captured and put back.

    Attributes:
        capture: Called in each worker with the path of a file or None; returns the worker's part of
            the state, see `write_part`.
        restore: Called in each worker with the path of a file or None, and the parts in rank order;
            see `read_parts`.
        join: Returns the whole state of its parts.
        split: Returns the parts of a whole state.
    """

    capture: Callable[[str | None], Any]
    restore: Callable[[str | None, list[Any]], None]
    join: Callable[[Sequence[Any]], dict[str, Any]]
    split: Callable[[dict[str, Any]], list[Any]]


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
    """The parts of a state.

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

    def close(self) -> None:
        """Forget the state."""
        if self._file is not None:
            self._file.close()


def read_parts(path: str | None, parts: Sequence[Any]) -> Sequence[Any]:
    """Return the parts of a state, the first of which is in a file if there is one."""
    if path is None:
        return parts
    with open(path, "rb") as file:
        return [load(file), *parts[1:]]


def write_part(part: dict[str, Any], path: str | None) -> dict[str, Any] | None:
    """Return a part of a state; None if it is in the file now.

    Args:
        part: The part.
        path: The file, if there is one.
    """
    if path is None:
        return part
    try:
        with open(path, "wb") as file:
            dump(part, file, what="The state", name="state")
    except (OSError, NotSendableError):
        # Another user's, or no memory is left; what cannot be pickled is told where it is sent.
        return part
    return None
