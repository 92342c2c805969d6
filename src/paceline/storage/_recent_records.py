"""Records of ranks that were in a store a moment ago."""

import time

from paceline.storage._manifest import ShardDone

# What removes a checkpoint's objects meanwhile is not seen. So this is short.
_RECENT_S = 1.0
# On Linux, the other clocks stand still while a machine sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class RecentRecords:
    """Keep the records of ranks for a second after they were put or read; for any thread."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], tuple[float, ShardDone]] = {}

    def note(self, uuid: str, done: ShardDone) -> None:
        """Keep a record that is in the store now."""
        now = time.clock_gettime(_CLOCK)
        recent = {key: seen for key, seen in self._seen.copy().items() if now - seen[0] < _RECENT_S}
        self._seen = {**recent, (uuid, done.rank): (now, done)}

    def find(self, uuid: str, rank: int) -> ShardDone | None:
        """Return a rank's record if it was in the store a moment ago."""
        seen_s, done = self._seen.get((uuid, rank), (0.0, None))
        return done if time.clock_gettime(_CLOCK) - seen_s < _RECENT_S else None

    def forget(self, uuid: str) -> None:
        """Forget the records of a checkpoint."""
        self._seen = {key: seen for key, seen in self._seen.copy().items() if key[0] != uuid}
