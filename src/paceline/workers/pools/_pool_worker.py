"""A worker of a pool as its driver's thread sees it."""

import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from paceline.workers._errors import Told
from paceline.workers.pools._channel import ChannelFrame, DriverChannel, FrameKind
from paceline.workers.pools._packed_call import PackedCall
from paceline.workers.pools._pending_call import PendingCall
from paceline.workers.pools._serve_calls import WorkerError
from paceline.workers.pools._thread_progress import Progress
from paceline.workers.pools._watchdog import WatchedRank
from paceline.workers.processes._worker_exit import WorkerExit


class Assignment(NamedTuple):
    """A call and how it travels."""

    call: PendingCall
    packed: PackedCall


class PoolWorker:
    """State of a worker, and its present call.

    `silent_s` is how long nothing was heard of it, in seconds; `progress` is what it told last,
    `outcome` what its program told at its end.
    """

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank = rank
        self.channel = DriverChannel(end)
        self.is_ready = False
        self.silent_s = 0.0
        self.progress = Progress()
        self.exit: WorkerExit | None = None
        self.outcome: dict[str, Any] = {}
        self.error: WorkerError | None = None
        self.current: PendingCall | None = None
        self._packed: PackedCall | None = None
        self._queue: deque[Assignment] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether the worker carries out a call."""
        return self.current is not None and self.error is None and self.exit is None

    @property
    def is_consequence(self) -> bool:
        """Whether the worker's error or end only answers the failure of another one."""
        return any(end is not None and end.is_consequence for end in (self.error, self.exit))

    @property
    def has_failed(self) -> bool:
        """Whether the worker has told an error, or ended by a failure."""
        return self.error is not None or (self.exit is not None and self.exit.is_failure)

    def run_program(self, call: PendingCall) -> None:
        """Note that the worker's program is what a call consists in, which it carries out now."""
        self.current = call

    def take_outcome(self, exit_: WorkerExit) -> WorkerExit:
        """Return how the worker has ended, by what its program has told if it has."""
        if not self.outcome:
            return exit_
        return replace(exit_, finished=True, silence=None, **self.outcome)

    def assign(self, assignment: Assignment) -> None:
        """Let the worker make a call after those that it was assigned before."""
        self._queue.append(assignment)
        if self.current is None:
            self._send_next()

    def take_value(self, body: bytes | bytearray) -> None:
        """Note what the current call returned, and go on with the next."""
        # What it told last was within the call: it may have come to what others wait in since.
        self.progress = Progress()
        if self.current is not None:
            self.current.answer(self.rank, body)
            self._send_next()

    def send_data(self) -> None:
        """Send what of the current call the worker does not reach in shared memory."""
        if self.current is not None and self._packed is not None:
            for segment in self._packed.segments:
                # A view, as nothing is copied.
                body = cast("bytes", segment.view())
                self.channel.send(ChannelFrame(FrameKind.DATA, self.current.number, body))

    def take_error(self, error: WorkerError) -> None:
        """Note what the current call raised; nothing follows it."""
        self.error = error

    def drop_calls(self, error: BaseException) -> None:
        """End by an error what the worker does and was to do."""
        for call in [self.current, *(assignment.call for assignment in self._queue)]:
            if call is not None:
                call.fail(error)
        self._queue.clear()
        self._packed = None

    def told(self) -> Told:
        """Return the error that the worker told, for `told_error`."""
        assert self.error is not None
        return Told(
            rank=self.rank,
            error=self.error.error,
            traceback=self.error.traceback,
            description=f"rank {self.rank} raised {self.error.description}",
        )

    def _send_next(self) -> None:
        # One at a time: what waits can still be called off.
        self.current = self._packed = None
        if self._queue:
            self.current, self._packed = self._queue.popleft()
            self.channel.send(ChannelFrame(FrameKind.CALL, self.current.number, self._packed.head))


def fold_worker_errors(first: PoolWorker, others: Sequence[PoolWorker]) -> list[str]:
    """Return one phrase for each error that other ranks raised after the first one."""
    by_text: dict[str, list[int]] = {}
    phrases = []
    for worker in others:
        if worker.error is not None:
            by_text.setdefault(worker.error.description, []).append(worker.rank)
        elif worker.exit is not None and worker.exit.is_failure:
            phrases.append(worker.exit.describe())
    for text, ranks in by_text.items():
        noun = "rank" if len(ranks) == 1 else "ranks"
        is_same = first.error is not None and text == first.error.description
        what = "the same" if is_same else text
        phrases.append(f"{noun} {', '.join(map(str, ranks))} raised {what}")
    return phrases


def observations_of_workers(call: PendingCall, workers: Sequence[PoolWorker]) -> list[WatchedRank]:
    """Return what is known of all ranks of a call.

    A call of one rank waits for nobody, unless it needs the others: these count as returned then.
    """
    is_alone = len(call.ranks) == 1
    observations = []
    for worker in workers:
        if worker.rank in call.ranks:
            has_returned = call.has_returned(worker.rank) and not worker.is_busy
            observations.append(WatchedRank(worker.rank, has_returned, worker.progress))
        elif is_alone and not worker.is_busy:
            observations.append(WatchedRank(worker.rank, True, Progress(num_collectives=0)))
    return observations
