"""Shipping an attempt's output, line by line and once."""

import logging
import time
from collections.abc import Callable

import msgspec

from paceline.messages.attempts import LogEntry, LogReply, LogRequest
from paceline.runner._attempt_directory import AttemptDirectory
from paceline.runner._master_link import MasterBackoff, MasterLink, RefusedByMasterError, encode
from paceline.runner._output_spool import SpoolReader
from paceline.runner._shipping_loop import ShippingLoop

logger = logging.getLogger(__name__)

_MAX_LINES = 1000
# How often, and for how long, the end of an attempt waits for output that the master cannot store.
_MAX_TRIES = 8
_PATIENCE_S = 10.0


class OutputShipper(ShippingLoop):
    """Send the lines of the output spool; what was not acknowledged is sent again.

    A single line that the master refuses is left out, so that it does not hold up the rest.

    Args:
        directory: The attempt's directory.
        path: Where to send them in the API.
        link: A connection of its own.
        is_first: Whether nothing was ever sent, so that the master need not be asked what it has.
    """

    def __init__(
        self, directory: AttemptDirectory, path: str, link: MasterLink, *, is_first: bool = False
    ) -> None:
        super().__init__("output")
        self._directory = directory
        self._path = path
        self._link = link
        self._spool = SpoolReader(directory.output_path) if is_first else None

    def forget_positions(self) -> None:
        """Ask the master anew what it has; after a failure nobody knows what arrived."""
        self._spool = None

    def ship_once(self) -> bool:
        """Send up to one request; False when there was nothing."""
        if self._spool is None:
            reply = msgspec.json.decode(self._post([]), type=LogReply)
            self._spool = SpoolReader(self._directory.output_path, after=reply.last_sequence)
        entries = self._spool.read(_MAX_LINES)
        if entries:
            self._send(entries)
        return bool(entries)

    def ship_rest_or_tell(self, check_master: Callable[[], None]) -> str | None:
        """Send everything, or say why the master, which works otherwise, does not take it.

        Args:
            check_master: Raises `UnreachableError` where the master takes nothing else either.
        """
        backoff = MasterBackoff()
        deadline = time.monotonic() + _PATIENCE_S
        trouble: Exception | None = None
        for _ in range(_MAX_TRIES):
            try:
                self.ship_rest()
                return None
            except Exception as error:
                trouble = error
            self.forget_positions()
            check_master()
            if time.monotonic() > deadline:
                break
            time.sleep(backoff.next_s())
        kept = self._directory.kept_output_path
        text = f"The attempt's output cannot be stored ({trouble}); it is kept in {str(kept)!r}."
        logger.error("%s", text)
        return text

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _send(self, entries: list[LogEntry]) -> None:
        try:
            self._post(entries)
        except RefusedByMasterError as error:
            if not error.is_about_content:
                raise
            if len(entries) == 1:
                # Not told in the output: that line might be refused as well.
                logger.error("Line %d of the output is left out: %s", entries[0].sequence, error)
                return
            middle = len(entries) // 2
            self._send(entries[:middle])
            self._send(entries[middle:])

    def _post(self, entries: list[LogEntry]) -> bytes:
        return self._link.post(self._path, encode(LogRequest(entries=entries)))
