"""The end of a master's process within a limit, whatever its threads wait for."""

import logging
import os
import sys
import threading
import traceback
from contextlib import suppress

from paceline.master._master import Master

logger = logging.getLogger(__name__)

# For the database: it finishes what it has begun.
_CLOSE_DATABASE_S = 2.0


class EndLimit:
    """End this process if it has not ended in time: a storage that a thread waits for may hang.

    What the master has acknowledged is stored by then: it survives any end.

    Args:
        master: The master.
    """

    def __init__(self, master: Master) -> None:
        self._master = master
        self._lock = threading.Lock()
        self._is_over = False

    def set(self, seconds: float) -> None:
        """End the process after so many seconds, unless it has ended or a limit comes earlier."""
        timer = threading.Timer(seconds, self._end, (seconds,))
        timer.name, timer.daemon = "end-limit", True
        timer.start()

    def lift(self) -> None:
        """Let the process go on: the master has ended."""
        with self._lock:
            self._is_over = True

    def _end(self, seconds: float) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            with suppress(Exception):
                logger.error(
                    "The master did not end within %g s of its own, and is ended now. All that it"
                    " has acknowledged is stored. What its threads were at:\n%s",
                    seconds,
                    _describe_threads(),
                )
            is_closed = self._close_database()
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(0 if is_closed else 1)

    def _close_database(self) -> bool:
        """Finish what is being stored, and say that no master listens; False if that hangs."""

        def close() -> None:
            self._master.home.remove_address()
            self._master.database.close()

        closer = threading.Thread(target=close, name="end-limit-close", daemon=True)
        closer.start()
        closer.join(_CLOSE_DATABASE_S)
        return not closer.is_alive()


def _describe_threads() -> str:
    """Return the innermost line of each thread."""
    frames = sys._current_frames()
    lines = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread is not threading.current_thread():
            last = traceback.extract_stack(frame)[-1]
            lines.append(f"  {thread.name}: {last.name} ({last.filename}:{last.lineno})")
    return "\n".join(lines)
