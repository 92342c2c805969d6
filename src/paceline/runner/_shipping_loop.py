"""A thread that sends what there is, again and again."""

import logging
import threading
from abc import ABC, abstractmethod

from paceline.runner._master_link import MasterBackoff, RefusedByMasterError, UnreachableError

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class ShippingLoop(ABC):
    """Send one kind of thing in a thread of its own, so that it waits for no other.

    Args:
        name: What is sent, for the runner's log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopping = threading.Event()
        self._has_doubts = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def ship_once(self) -> bool:
        """Send what is there, up to one request; False when there was nothing.

        Raises:
            UnreachableError: The master did not answer, or failed.
            RefusedByMasterError: The master refused the request.
        """

    @abstractmethod
    def forget_positions(self) -> None:
        """Ask the master anew what it has; after a failure nobody knows what arrived."""

    def doubt_positions(self) -> None:
        """Have the thread ask the master anew what it has; for any thread."""
        self._has_doubts.set()

    def ship_rest(self) -> None:
        """Send everything that is there; raises like `ship_once`."""
        while self.ship_once():
            pass

    def start(self) -> None:
        """Begin to send; an unreachable master and other trouble only delay."""
        self._thread = threading.Thread(target=self._run, name=f"ship-{self._name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the thread; a request that is on its way is finished first."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        backoff = MasterBackoff()
        trouble = ""
        while not self._stopping.is_set():
            try:
                if self._has_doubts.is_set():
                    self._has_doubts.clear()
                    self.forget_positions()
                has_shipped = self.ship_once()
                backoff.reset()
            except Exception as error:
                if isinstance(error, RefusedByMasterError) and error.is_over:
                    # `MasterFollower` hears it, too, and ends the attempt's processes.
                    logger.error("The %s are not wanted any more: %s", self._name, error)
                    return
                if isinstance(error, UnreachableError):
                    logger.debug("The master is away: %s", error)
                elif str(error) != trouble:
                    logger.exception("The %s cannot be sent now.", self._name)
                    trouble = str(error)
                self.forget_positions()
                self._stopping.wait(backoff.next_s())
                continue
            if not has_shipped:
                self._stopping.wait(_POLL_S)
