"""One process of a local group."""

import os
import signal
import time
from contextlib import suppress
from typing import IO

from paceline.workers.processes._leftover_processes import marked_process_groups
from paceline.workers.processes._output_lines import LineSplitter
from paceline.workers.processes._process_facts import children_that_handle, read_process
from paceline.workers.processes._process_start import ProcessHandle
from paceline.workers.processes._signals import STACKS_SIGNAL, signal_group
from paceline.workers.processes._worker_exit import WorkerExit
from paceline.workers.processes._worker_spec import WorkerProcess, WorkerSpec


class LocalWorker:
    """A started worker: its process, its streams and its end.

    The group's lock guards all but `open_streams`, which belongs to the supervising thread.
    """

    def __init__(self, spec: WorkerSpec, handle: ProcessHandle, group_id: str = "") -> None:
        facts = read_process(handle.pid)
        self.spec = spec
        self._group_id = group_id
        self.handle = handle
        self.process = WorkerProcess(
            rank=spec.rank,
            pid=handle.pid,
            pgid=handle.pid,
            start_time=facts.start_time if facts else 0.0,
        )
        self.open_streams: dict[IO[bytes], LineSplitter] = {}
        self.sent_signals: set[int] = set()
        self.exit: WorkerExit | None = None
        self.silence: str | None = None
        self.exited_at = 0.0
        self.next_look_at = 0.0
        self.is_closed = False

    @property
    def is_ending(self) -> bool:
        """Whether the process has ended and what it left behind has not been dealt with."""
        return self.exit is not None and not self.is_closed

    @property
    def may_save_its_work(self) -> bool:
        """Whether what a shell started is still answering a signal that ended the shell."""
        # A system that ends a job, such as Slurm, signals all of its processes by itself.
        was_ended = self.exit is not None and self.exit.signal == signal.SIGTERM
        is_asked = was_ended or bool(self.sent_signals)
        is_killed = signal.SIGKILL in self.sent_signals
        return is_asked and not is_killed and self.spec.signals_whole_group

    def send(self, signum: int) -> None:
        """Send a signal, if the worker has not ended."""
        # Until it is closed the process stays a zombie, so nothing else can have got its id.
        if self.is_closed:
            return
        self.sent_signals.add(signum)
        if self.spec.signals_whole_group or signum == signal.SIGKILL:
            for process_group in self.process_groups():
                signal_group(process_group, signum)
        elif self.exit is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)
            if signum == STACKS_SIGNAL:
                # Processes of a data loader tell what they read, if they were forked.
                for pid in children_that_handle(self.process.pid, signum):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signum)

    def process_groups(self) -> set[int]:
        """Return the process groups that the worker's processes are in."""
        others = marked_process_groups(self._group_id) if self.spec.changes_session else set()
        return {self.process.pgid} | others

    def close(self) -> None:
        """Reap the process; its id is free after that."""
        self.is_closed = True
        self.handle.reap()


def await_exit(worker: LocalWorker) -> WorkerExit:
    """Wait until a worker's process has ended, and return how."""
    code, signum = worker.handle.await_end()
    return WorkerExit(
        rank=worker.spec.rank,
        code=code,
        signal=signum,
        time=time.time(),
        # What the group ended itself has not failed first, unless it was ended for its silence.
        is_consequence=signum in worker.sent_signals and worker.silence is None,
        silence=worker.silence,
    )
