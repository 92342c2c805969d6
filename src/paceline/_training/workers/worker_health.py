"""Failure detector of a pool, and the driver's view of each worker."""

import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from paceline._base.exceptions import CollectiveMismatchError
from paceline._training.workers import worker_failures as failures
from paceline._training.workers.channels import ChannelFrame, DriverChannel, FrameKind
from paceline._training.workers.pickled_calls import PackedCall, left_error
from paceline._training.workers.processes.rank_environment import NodeLayout
from paceline._training.workers.serve_calls import WorkerError
from paceline._training.workers.stuck_ranks import HangWatch, Progress, WatchedRank
from paceline._training.workers.worker_pools import PendingCall


class Assignment(NamedTuple):
    """Call assigned to a worker, with its packed form."""

    call: PendingCall
    packed: PackedCall


class PoolWorker:
    """State of a worker, and its present call.

    `silent_s` is the time since its last sign of life, in seconds; `progress` is its last message,
    `outcome` the message of its program at the end.
    """

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank = rank
        self.channel = DriverChannel(end)
        self.is_ready = False
        self.silent_s = 0.0
        self.progress = Progress()
        self.exit: failures.WorkerExit | None = None
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
        """Whether the worker's error or exit is only a consequence of another rank's failure."""
        return any(end is not None and end.is_consequence for end in (self.error, self.exit))

    @property
    def has_failed(self) -> bool:
        """Whether the worker has reported an error, or ended by a failure."""
        return self.error is not None or (self.exit is not None and self.exit.is_failure)

    def run_program(self, call: PendingCall) -> None:
        """Note the worker's own program as its current call."""
        self.current = call

    def take_outcome(self, exit_: failures.WorkerExit) -> failures.WorkerExit:
        """Return a worker's exit, completed by its program's own report if there is any."""
        if not self.outcome:
            return exit_
        return replace(exit_, finished=True, silence=None, **self.outcome)

    def assign(self, assignment: Assignment) -> None:
        """Queue a call for the worker, after its earlier calls."""
        self._queue.append(assignment)
        if self.current is None:
            self._send_next()

    def take_value(self, body: bytes | bytearray) -> None:
        """Record the value of the current call, and send the next call."""
        # Progress is reset: the last report may predate a collective operation others wait in.
        self.progress = Progress()
        if self.current is not None:
            self.current.answer(self.rank, body)
            self._send_next()

    def send_data(self) -> None:
        """Send the current call's segments to a worker without access to the shared memory."""
        if self.current is not None and self._packed is not None:
            for segment in self._packed.segments:
                # A view, as nothing is copied.
                body = cast("bytes", segment.view())
                self.channel.send(ChannelFrame(FrameKind.DATA, self.current.number, body))

    def drop_calls(self, error: BaseException) -> None:
        """Fail the worker's current and queued calls with an error."""
        for call in [self.current, *(assignment.call for assignment in self._queue)]:
            if call is not None:
                call.fail(error)
        self._queue.clear()
        self._packed = None

    def told(self) -> failures.Told:
        """Return the error reported by the worker, for `told_error`."""
        assert self.error is not None
        return failures.Told(
            rank=self.rank,
            error=self.error.error,
            traceback=self.error.traceback,
            description=f"rank {self.rank} raised {self.error.description}",
        )

    def _send_next(self) -> None:
        # Calls are sent one at a time: queued calls can still be cancelled.
        self.current = self._packed = None
        if self._queue:
            self.current, self._packed = self._queue.popleft()
            self.channel.send(ChannelFrame(FrameKind.CALL, self.current.number, self._packed.head))


def fold_worker_errors(first: PoolWorker, others: Sequence[PoolWorker]) -> list[str]:
    """Return a phrase for each error raised by other ranks after the first."""
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


def worker_observations(call: PendingCall, workers: Sequence[PoolWorker]) -> list[WatchedRank]:
    """Return the known state of all ranks of a call.

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


# Time for the other ranks to report the same error, in seconds.
_SETTLE_S = 0.2
# Time to wait for the cause when the first failure only answers another worker's end, in seconds:
# at least, and at most while a worker may still turn out to be the cause. Its node may be busy or
# far, and a rank on a full disk tries for 10 s to store its end.
CAUSE_SETTLE_S, LONGEST_CAUSE_S = 2.0, 15.0
_CAUSE_LOOK_S = 0.2
_LONGEST_TICK_S = 1.0


class PoolSettings(NamedTuple):
    """Settings of the failure detector; times are in seconds."""

    heartbeat_timeout_s: float
    collective_timeout_s: float
    grace_s: float
    # Grace of survivors after a lost worker, in seconds: in a pool they cannot finish anything.
    lost_grace_s: float = 1.0

    @property
    def tick_s(self) -> float:
        """Interval between heartbeats, and between looks of the driver, in seconds."""
        return min(_LONGEST_TICK_S, self.heartbeat_timeout_s / 5)


class PoolEnd(NamedTuple):
    """Decision to end all calls with an error, and all workers within a grace in seconds.

    `wants_stacks` asks for the workers' stacks. With `is_success` the calls return None.
    """

    error: BaseException
    grace_s: float
    wants_stacks: bool = False
    is_success: bool = False


class HyperparametersRefusedError(Exception):
    """Error of a pool after a worker refused the hyperparameters."""


class FailureDetector:
    """Detector of failures: chooses time and error of a pool's end, without I/O and clock.

    Args:
        workers: The workers, in rank order.
        settings: The times that count.
        is_stopped: Returns whether a rank's process is stopped, as by SIGSTOP.
        layout: The place of these workers among those of other nodes; None if there are none.

    Attributes:
        refusal: That a worker has refused the hyperparameters, which decides if it came first.
    """

    def __init__(
        self,
        workers: Sequence[PoolWorker],
        settings: PoolSettings,
        is_stopped: Callable[[int], bool],
        layout: NodeLayout | None = None,
    ) -> None:
        self._workers = workers
        self._world_size = len(workers) if layout is None else layout.world_size
        self._output = "above"
        if layout is not None and layout.num_nodes > 1:
            self._output = f"in that of the launcher of node {layout.node_rank}"
        self._settings = settings
        self._is_stopped = is_stopped
        self._first_failed: PoolWorker | None = None
        self._settle_at: float | None = None
        self._settle_limit = 0.0
        self._asked_at: float | None = None
        # Hang watch with all ranks only: waits for ranks of other nodes are seen by node 0 alone.
        is_whole = self._world_size == len(workers)
        timeouts = settings.heartbeat_timeout_s, settings.collective_timeout_s
        self._hangs = HangWatch(*timeouts) if is_whole else None
        self.refusal: HyperparametersRefusedError | None = None

    @property
    def due(self) -> float | None:
        """Latest time of the next look, or None if unknown."""
        return self._settle_at

    def note_error(self, worker: PoolWorker, error: WorkerError, now: float) -> PoolEnd | None:
        """Note the error of a worker's call; return an end of the pool, if due."""
        worker.error = error
        if self.refusal is not None:
            return self._refused(now)
        if error.exit_code is not None:
            return self._lost(self._left(worker, error.description, error.exit_code))
        self._note_failed(worker, now)
        return None

    def note_exit(
        self, worker: PoolWorker, exit_: failures.WorkerExit, now: float
    ) -> PoolEnd | None:
        """Note the end of a worker's process; return an end of the pool, if due."""
        worker.exit = exit_
        if self.refusal is not None:
            return self._refused(now)
        if worker.error is not None:
            return None
        if exit_.code == 0 and worker.current is not None:
            return self._lost(self._left(worker, None, 0))
        if exit_.is_consequence:
            self._note_failed(worker, now)
            return None
        return self._lost(self._ended(worker, exit_))

    def note_refusal(self, worker: PoolWorker, text: str, now: float) -> None:
        """Note a worker's `InvalidHP`, an end of the run for all ranks; the first counts."""
        first = self._first_failed
        if self.refusal is None and (first is None or first.is_consequence):
            self.refusal = HyperparametersRefusedError(
                f"Rank {worker.rank} refused the hyperparameters (InvalidHP: {text})."
            )
            self._settle_at = now + CAUSE_SETTLE_S

    def note_request(self, now: float) -> None:
        """Note a request to end: workers idle from now on are ended after the grace."""
        if self._asked_at is None:
            self._asked_at = now

    def look(self, now: float, elapsed_s: float) -> PoolEnd | None:
        """Return an end of the pool if due: by refusal, failure, silence, a hang or idleness.

        Args:
            now: The time, in seconds of a monotonic clock.
            elapsed_s: For how long the workers could have given a sign of life since the last look.
        """
        if self.refusal is not None:
            return self._refused(now)
        return (
            self._settled(now)
            or self._silent(elapsed_s)
            or self._waiting_in_vain()
            or self._idle_after_request(now)
        )

    def notice(self) -> str | None:
        """Return ranks that wait long in a collective operation, and for whom, now and then."""
        return None if self._hangs is None else self._hangs.notice(self._calls())

    def _note_failed(self, worker: PoolWorker, now: float) -> None:
        if self._first_failed is None:
            self._first_failed = worker
            self._settle_at = now + (CAUSE_SETTLE_S if worker.is_consequence else _SETTLE_S)
            self._settle_limit = now + LONGEST_CAUSE_S

    def _left(
        self, worker: PoolWorker, left_by: str | None, exit_code: int
    ) -> failures.WorkerFailedError:
        traceback = "" if worker.error is None else worker.error.traceback
        return left_error(worker.rank, self._world_size, left_by, exit_code, traceback)

    def _ended(self, worker: PoolWorker, exit_: failures.WorkerExit) -> failures.WorkerFailedError:
        """Return the error for an ended process."""
        count = f", the first of {self._world_size} to fail" if self._world_size > 1 else ""
        what = exit_.describe().replace("rank", "Rank", 1)
        text = f"{what}{count}{failures.OUTPUT_IS}{self._output}."
        is_signal = exit_.signal is not None and not exit_.finished
        has_left = exit_.lost_with is None and exit_.silence is None and not is_signal
        return failures.WorkerFailedError(
            text,
            worker.rank,
            exit_code=exit_.code if has_left else None,
            signal=exit_.signal if is_signal else None,
            is_consequence=exit_.is_consequence,
        )

    def _lost(self, error: failures.WorkerFailedError) -> PoolEnd | None:
        first = self._first_failed
        if first is not None and not first.is_consequence:
            # The error that came first explains it.
            return None
        return PoolEnd(error, min(self._settings.lost_grace_s, self._settings.grace_s))

    def _refused(self, now: float) -> PoolEnd | None:
        """End the workers after a refusal, once the others had the time to end by themselves."""
        assert self.refusal is not None
        assert self._settle_at is not None
        if now < self._settle_at and any(worker.is_busy for worker in self._workers):
            return None
        grace_s = min(self._settings.lost_grace_s, self._settings.grace_s)
        return PoolEnd(self.refusal, grace_s, is_success=True)

    def _settled(self, now: float) -> PoolEnd | None:
        """Judge by the first failure with a cause of its own, after time for other reports."""
        first = self._first_failed
        if first is None or self._settle_at is None:
            return None
        is_over = not any(worker.is_busy for worker in self._workers) and (
            not first.is_consequence or all(worker.exit for worker in self._workers)
        )
        if now < self._settle_at and not is_over:
            return None
        failed = [worker for worker in self._workers if worker.has_failed]
        # Failures with a cause of their own come before consequences, then the first to fail.
        cause = min(failed, key=lambda worker: (worker.is_consequence, worker is not first))
        if cause.is_consequence and now < self._settle_limit and self._is_cause_to_come():
            self._settle_at = min(now + _CAUSE_LOOK_S, self._settle_limit)
            return None
        mismatch = self._left_early(cause)
        if mismatch is not None:
            return mismatch
        if cause.error is None:
            assert cause.exit is not None
            self._first_failed = None
            return self._lost(self._ended(cause, cause.exit))
        others = fold_worker_errors(cause, [worker for worker in failed if worker is not cause])
        error = failures.told_error(cause.told(), self._world_size, others)
        return PoolEnd(error, self._settings.grace_s)

    def _is_cause_to_come(self) -> bool:
        """Tell whether a worker is at work, or may be dead with its end not reported yet."""
        return any(
            worker.is_busy or not worker.channel.is_open or worker.silent_s >= self._settings.tick_s
            for worker in self._workers
            if worker.exit is None and not worker.has_failed
        )

    def _left_early(self, cause: PoolWorker) -> PoolEnd | None:
        """Return a mismatch for a broken connection if programs have returned earlier."""
        returned = [
            worker.rank for worker in self._workers if worker.exit and not worker.exit.is_failure
        ]
        if not returned or not cause.is_consequence:
            return None
        assert cause.exit is not None
        ranks = ", ".join(map(str, returned))
        has = "rank {} has" if len(returned) == 1 else "ranks {} have"
        error = CollectiveMismatchError(
            f"Rank {cause.rank} waited for others in a collective operation, but"
            f" {has.format(ranks)} returned without: {cause.exit.error}. Hint: all ranks must make"
            " the same calls in the same order; the stacks are in the output above."
        )
        return PoolEnd(error, self._settings.grace_s)

    def _silent(self, elapsed_s: float) -> PoolEnd | None:
        for worker in self._workers:
            if worker.exit is not None:
                continue
            if not worker.is_ready and not self._is_stopped(worker.rank):
                # Workers that are not ready still start, or do not use Paceline.
                worker.silent_s = 0.0
                continue
            worker.silent_s += elapsed_s
            if worker.silent_s > self._settings.heartbeat_timeout_s:
                what = "is stopped (SIGSTOP)" if self._is_stopped(worker.rank) else "hangs"
                silent = f"{worker.silent_s:.3g} s"
                text = f"Rank {worker.rank} {what}: it gave no sign of life for {silent}"
                if worker.progress.place:
                    text += f"; before that it was at {worker.progress.place}"
                error = failures.WorkerFailedError(f"{text}.", worker.rank)
                return PoolEnd(error, 0.0, wants_stacks=True)
        return None

    def _idle_after_request(self, now: float) -> PoolEnd | None:
        """Return an end of the pool if a worker was idle for its grace after the request."""
        grace_s = self._settings.grace_s
        if self._asked_at is None or now < self._asked_at + grace_s:
            return None
        # Ranks in a collective operation get twice the time: they may wait for the idle one.
        least_s = max(1.0, grace_s)
        idle = [
            (bool(p.progress.operation), p.rank)
            for p in self._workers
            if p.is_busy and p.progress.idle_s > least_s * (1 + bool(p.progress.operation))
        ]
        if not idle:
            return None
        rank = min(idle)[1]
        worker = next(worker for worker in self._workers if worker.rank == rank)
        text = (
            f"Rank {worker.rank} was asked to end, but has done nothing for"
            f" {worker.progress.idle_s:.3g} s: it {worker.progress.describe()}. The stacks of all"
            " ranks are in the output above."
        )
        return PoolEnd(failures.WorkerFailedError(text, worker.rank), 0.0, wants_stacks=True)

    def _waiting_in_vain(self) -> PoolEnd | None:
        error = None if self._hangs is None else self._hangs.look(self._calls())
        return None if error is None else PoolEnd(error, 0.0, wants_stacks=True)

    def _calls(self) -> list[list[WatchedRank]]:
        calls = {worker.current for worker in self._workers if worker.is_busy}
        return [worker_observations(call, self._workers) for call in calls if call is not None]
