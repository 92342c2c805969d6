"""How much more memory a process takes for a while than before."""

import os
import threading
from pathlib import Path

import torch
from step_loops import Place

_INTERVAL_S = 0.01


class MemoryPeak:
    """Look at the memory of this process, again and again between `start` and `stop`.

    Args:
        place: Where memory counts besides the host's.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._before = self._highest = self._before_on_gpu = 0

    def start(self) -> None:
        """Begin, from what the process has now; nothing if it has begun."""
        if self._thread is not None:
            return
        self._before = self._highest = _resident_bytes()
        if self._place.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before_on_gpu = torch.cuda.memory_allocated()
        self._is_over.clear()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        """Return by how many bytes "host" and "device" memory rose at most; end."""
        if self._thread is None:
            return {}
        self._is_over.set()
        self._thread.join()
        self._thread = None
        rises = {"host": max(self._highest, _resident_bytes()) - self._before}
        if self._place.is_cuda:
            rises["device"] = torch.cuda.max_memory_allocated() - self._before_on_gpu
        return rises

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            self._highest = max(self._highest, _resident_bytes())


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
