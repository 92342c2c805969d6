"""Finding workers that are stopped, as by SIGSTOP."""

import threading
import time
from collections.abc import Callable, Sequence

# Programs that use Paceline show that they live every half second.
LEAST_HEARTBEAT_TIMEOUT_S = 1.0
_LONGEST_TICK_S = 1.0


class StoppedWorkerWatch:
    """Look at workers until each has ended, and tell of those that are stopped for long.

    Args:
        timeout_s: How long a worker may be stopped, in seconds.
        ranks: Returns the ranks of the workers that were started and have not ended.
        is_stopped: Tells whether the worker of a rank is stopped.
        on_silence: Gets the rank of a silent worker and what is the matter with it.

    Raises:
        ValueError: `timeout_s` is below a second.
    """

    def __init__(
        self,
        timeout_s: float,
        ranks: Callable[[], Sequence[int]],
        is_stopped: Callable[[int], bool],
        on_silence: Callable[[int, str], object],
    ) -> None:
        if not timeout_s >= LEAST_HEARTBEAT_TIMEOUT_S:
            raise ValueError(
                f"`heartbeat_timeout_s` must be at least {LEAST_HEARTBEAT_TIMEOUT_S:g}, but got"
                f" {timeout_s!r}."
            )
        self._timeout_s = timeout_s
        self._tick_s = min(_LONGEST_TICK_S, timeout_s / 5)
        self._ranks = ranks
        self._is_stopped = is_stopped
        self._on_silence = on_silence
        self._silent_s: dict[int, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-pulse", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._is_over.wait(self._tick_s):
            now = time.monotonic()
            # While this process stood still itself, nobody was late.
            elapsed_s, last = min(now - last, 2 * self._tick_s), now
            for rank in self._ranks():
                self._look(rank, elapsed_s)

    def _look(self, rank: int, elapsed_s: float) -> None:
        if not self._is_stopped(rank):
            self._silent_s[rank] = 0.0
            return
        silent_s = self._silent_s[rank] = self._silent_s.get(rank, 0.0) + elapsed_s
        if silent_s > self._timeout_s:
            text = f"is stopped (SIGSTOP): it gave no sign of life for {silent_s:.3g} s"
            self._on_silence(rank, text)
