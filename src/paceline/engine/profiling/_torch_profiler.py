"""Traces of a training by torch's profiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Gets the name of a trace and what writes it to a path.
KeepsTrace = Callable[[str, Callable[[Path], object]], object]


class TraceProfiler:
    """Make, start, step and stop torch's profiler around the batches of a training.

    The schedule counts the batches of the training, also of one that goes on from a checkpoint.

    Args:
        options: The arguments of `torch.profiler.profile`.
        keep_trace: Keeps a trace, unless the options say what to do with it.

    Raises:
        TypeError: The profiler does not take the options.
    """

    def __init__(self, options: dict[str, Any], keep_trace: KeepsTrace) -> None:
        self._options = options
        self._keep_trace = keep_trace
        self._profiler: Any = None
        self._num_batches = 0
        self._make(0)

    @contextmanager
    def running(self, num_batches: int) -> Iterator[None]:
        """Profile within the block, which begins after so many batches."""
        self._num_batches = num_batches
        self._profiler = self._make(num_batches)
        self._profiler.start()
        try:
            yield
        finally:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def step(self, num_batches: int) -> None:
        """Tell the profiler that a batch has ended."""
        self._num_batches = num_batches
        self._profiler.step()

    def _make(self, offset: int) -> Any:
        options = {"on_trace_ready": self._write, **self._options}
        schedule = options.get("schedule")
        if schedule is not None:
            options["schedule"] = lambda step: schedule(step + offset)
        return torch.profiler.profile(**options)

    def _write(self, profiler: Any) -> None:
        name = f"batch_{self._num_batches}.pt.trace.json"
        self._keep_trace(name, lambda path: profiler.export_chrome_trace(str(path)))
