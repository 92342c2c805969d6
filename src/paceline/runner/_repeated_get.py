"""Reading from the master until it answers."""

import logging
import time
from collections.abc import Callable, Mapping

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
        self._told = ""

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> bytes | None:
        """Return what the master has at a path, None if it is not wanted any more.

        Raises:
            RefusedByMasterError: The master refused the request.
        """
        pauses = MasterBackoff()
        while self._is_wanted():
            try:
                return self._link.get(path, headers=headers)
            except UnreachableError as error:
                if str(error) != self._told:
                    self._told = str(error)
                    self._tell(f"The {self._what} cannot be fetched now: {error}")
                time.sleep(pauses.next_s())
        return None
