"""How much disk a home takes, measured in the background, as there may be many files."""

import os
import shutil
import threading
import time
from pathlib import Path

_MAX_AGE_S = 600.0
_DIRECTORIES = ("logs", "contexts", "attempts")


class HomeSizes:
    """The bytes of the parts of a home; the directories' are up to ten minutes old."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._measured_at = -_MAX_AGE_S
        self._is_measuring = False
        self._sizes: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """Return bytes by part; the directories are missing until they were measured once."""
        with self._lock:
            is_due = time.monotonic() - self._measured_at >= _MAX_AGE_S
            if is_due and not self._is_measuring:
                self._is_measuring = True
                threading.Thread(target=self._measure, name="home-sizes", daemon=True).start()
            found = dict(self._sizes)
        for name, suffix in (("database", ""), ("write_ahead_log", "-wal")):
            path = self._home / f"master.sqlite{suffix}"
            found[name] = path.stat().st_size if path.exists() else 0
        return found

    def free_bytes(self) -> int:
        """Return how many bytes are free on the home's disk."""
        return shutil.disk_usage(self._home).free

    def _measure(self) -> None:
        try:
            sizes = {name: _bytes_below(f"{self._home}/{name}") for name in _DIRECTORIES}
        finally:
            with self._lock:
                self._is_measuring = False
                self._measured_at = time.monotonic()
        with self._lock:
            self._sizes = sizes


def _bytes_below(directory: str) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(f"{root}/{name}").st_size
            except OSError:
                # Gone meanwhile.
                continue
    return total
