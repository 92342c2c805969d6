"""Closing of workers that have ended, once nothing is left of their processes and output."""

import signal
import threading
import time
from collections.abc import Sequence

from paceline.workers.processes._leftover_processes import end_stray_processes
from paceline.workers.processes._local_worker import LocalWorker
from paceline.workers.processes._output_reader import OutputReader
from paceline.workers.processes._process_facts import living_members, own_children
from paceline.workers.processes._signals import signal_group

# How long what a worker leaves behind may go on: its background processes, mostly cleaners of
# shared memory, and output that they still hold open.
DRAIN_S = 2.0
LOOK_INTERVAL_S = 0.05
_KILL_LOOK_INTERVAL_S = 0.005


class EndedWorkers:
    """Close the workers of a group that have ended; for the thread that reads their output.

    Args:
        workers: All workers of the group, also those that are added later.
        reader: Reads their output.
        lock: Guards the workers.
        adopted_mark: The group's mark if this process adopts what its workers orphan, else None.
    """

    def __init__(
        self,
        workers: Sequence[LocalWorker],
        reader: OutputReader,
        lock: threading.Condition,
        adopted_mark: str | None,
    ) -> None:
        self._workers = workers
        self._reader = reader
        self._lock = lock
        self._adopted_mark = adopted_mark

    def close_due(self, kill_at: float | None) -> None:
        """Close those that have left nothing behind, or for too long.

        Args:
            kill_at: When all are or were killed, on the monotonic clock; None if they are not.
        """
        now = time.monotonic()
        is_killed = kill_at is not None and now >= kill_at
        if self._adopted_mark and is_killed and all(each.exit for each in self._workers):
            # What the killed have orphaned would keep their output open.
            end_stray_processes(self._adopted_mark)
        for worker in self._workers:
            if not worker.is_ending or now < worker.next_look_at:
                continue
            worker.next_look_at = now + LOOK_INTERVAL_S
            has_members = self._has_members(worker)
            if has_members and worker.may_save_its_work:
                continue
            is_overdue = now > worker.exited_at + DRAIN_S
            if is_overdue or not (has_members or worker.open_streams):
                self._close(worker)

    def _has_members(self, worker: LocalWorker) -> bool:
        """Tell whether a worker that has ended has left living processes in its group."""
        if self._adopted_mark:
            # Whoever has no parent any more is a child of this process, or has one below it.
            ended = {other.process.pid for other in self._workers if other.exit is not None}
            children = own_children()
            if children is not None and ended.issuperset(children):
                return False
        return any(map(living_members, worker.process_groups()))

    def _close(self, worker: LocalWorker) -> None:
        for process_group in worker.process_groups():
            signal_group(process_group, signal.SIGKILL)
        deadline = time.monotonic() + DRAIN_S
        # A kill takes effect a moment after it was sent.
        while self._has_members(worker) and time.monotonic() < deadline:
            self._reader.read(_KILL_LOOK_INTERVAL_S)
        # What the dead left in the pipes counts, but a process that got away from the group
        # could go on writing for ever.
        while worker.open_streams and self._reader.read(0.0) and time.monotonic() < deadline:
            pass
        for pipe in list(worker.open_streams):
            self._reader.close_stream(worker, pipe)
        with self._lock:
            worker.close()
