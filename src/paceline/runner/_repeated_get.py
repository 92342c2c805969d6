"""Reading from the master until it answers."""

import logging
import time
from collections.abc import Callable

from paceline.runner._master_link import MasterBackoff, MasterLink, UnreachableError

logger = logging.getLogger(__name__)


class RepeatedGet:
    """Requests that are repeated until the master answers, or until nobody wants the answer.

    Args:
        link: A connection to the master.
        what: What is read, for the runner's log.
        is_wanted: Asked before each request.
        tell: Gets each new reason why it cannot be read now.
    """

    def __init__(
        self,
        link: MasterLink,
        what: str,
        is_wanted: Callable[[], bool],
        tell: Callable[[str], object] = logger.warning,
    ) -> None:
        self._link = link
        self._what = what
        self._is_wanted = is_wanted
        self._tell = tell
        # Since the last answer.
        self._told: set[str] = set()

    def get(self, path: str) -> bytes | None:
        """Return what the master has at a path, None if it is not wanted any more.

        Raises:
            RefusedByMasterError: The master refused the request.
        """
        return self._repeat(lambda: self._link.get(path))

    def get_piece(self, path: str, offset: int, size: int) -> bytes | None:
        """Return a piece of what the master has at a path, shorter at its end; like `get`."""
        return self._repeat(lambda: self._link.get_piece(path, offset, size))

    def _repeat(self, get: Callable[[], bytes]) -> bytes | None:
        pauses = MasterBackoff()
        while self._is_wanted():
            try:
                found = get()
                self._told.clear()
                return found
            except UnreachableError as error:
                if str(error) not in self._told:
                    self._told.add(str(error))
                    self._tell(f"The {self._what} cannot be fetched now: {error}")
                time.sleep(pauses.next_s())
        return None
