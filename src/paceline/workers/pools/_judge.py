"""What it means for a pool that workers err, die, hang or wait in vain."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.workers._errors import CollectiveMismatchError, WorkerFailedError, told_error
from paceline.workers.pools._peer import Peer, fold_errors, observations
from paceline.workers.pools._serve import WorkerError
from paceline.workers.pools._watchdog import judge
from paceline.workers.processes._environment import WorkerPlacement
from paceline.workers.processes._leaving import left_error
from paceline.workers.processes._spec import WorkerExit

# What the other ranks get to tell the same error.
_SETTLE_S = 0.2
# What a worker gets to die if its end is what another one's error answers, or answers that.
_CAUSE_SETTLE_S = 2.0
# How long a rank waits for one that has returned until that is taken for an error.
_CERTAIN_S = 5.0
_LONGEST_TICK_S = 1.0


class PoolSettings(NamedTuple):
    """How a pool judges its workers; times are in seconds."""

    heartbeat_timeout_s: float
    collective_timeout_s: float
    grace_s: float
    # What survivors get when a worker was lost: in a pool they cannot finish anything then.
    lost_grace_s: float = 1.0

    @property
    def tick_s(self) -> float:
        """How often workers show that they live, and the driver looks."""
        return min(_LONGEST_TICK_S, self.heartbeat_timeout_s / 5)


class Sentence(NamedTuple):
    """That all calls end by an error, and all workers within a grace in seconds.

    `wants_stacks` asks for what the workers were at. With `is_success` the calls return None.
    """

    error: BaseException
    grace_s: float
    wants_stacks: bool = False
    is_success: bool = False


class RefusedError(Exception):
    """What a pool's workers have ended by if one of them refused the hyperparameters."""


class Judge:
    """Decides when and by which error a pool's workers end; does no I/O and reads no clock.

    Args:
        peers: The workers, in rank order.
        settings: The times that count.
        is_stopped: Tells whether a rank's process is stopped, as by SIGSTOP.
        placement: The place of these workers among those of other nodes; None if there are none.

    Attributes:
        refusal: That a worker has refused the hyperparameters, which decides if it came first.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        settings: PoolSettings,
        is_stopped: Callable[[int], bool],
        placement: WorkerPlacement | None = None,
    ) -> None:
        self._peers = peers
        self._world_size = len(peers) if placement is None else placement.world_size
        self._output = "above"
        if placement is not None and placement.num_nodes > 1:
            self._output = f"in that of the launcher of node {placement.node_rank}"
        self._settings = settings
        self._is_stopped = is_stopped
        self._first_failed: Peer | None = None
        self._settle_at: float | None = None
        self._asked_at: float | None = None
        self.refusal: RefusedError | None = None

    @property
    def due(self) -> float | None:
        """When to look next at the latest, if that is known."""
        return self._settle_at

    def note_error(self, peer: Peer, error: WorkerError, now: float) -> Sentence | None:
        """Note what a worker's call raised."""
        peer.take_error(error)
        if self.refusal is not None:
            return self._refused(now)
        if error.exit_code is not None:
            return self._lost(self._left(peer, error.description, error.exit_code))
        self._note_failed(peer, now)
        return None

    def note_exit(self, peer: Peer, exit_: WorkerExit, now: float) -> Sentence | None:
        """Note that a worker's process has ended."""
        peer.exit = exit_
        if self.refusal is not None:
            return self._refused(now)
        if peer.error is not None:
            return None
        if exit_.code == 0 and peer.current is not None:
            return self._lost(self._left(peer, None, 0))
        if exit_.is_consequence:
            self._note_failed(peer, now)
            return None
        return self._lost(self._ended(peer, exit_))

    def note_refusal(self, peer: Peer, text: str, now: float) -> None:
        """Note that a worker has ended the run of all by `InvalidHP`; the first one counts."""
        first = self._first_failed
        if self.refusal is None and (first is None or first.is_consequence):
            self.refusal = RefusedError(
                f"Rank {peer.rank} refused the hyperparameters (InvalidHP: {text})."
            )
            self._settle_at = now + _CAUSE_SETTLE_S

    def note_request(self, now: float) -> None:
        """Note that the workers were asked to end: those that do nothing from now on are ended."""
        if self._asked_at is None:
            self._asked_at = now

    def look(self, now: float, elapsed_s: float) -> Sentence | None:
        """Look at what has become due.

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

    def _note_failed(self, peer: Peer, now: float) -> None:
        if self._first_failed is None:
            self._first_failed = peer
            self._settle_at = now + (_CAUSE_SETTLE_S if peer.is_consequence else _SETTLE_S)

    def _left(self, peer: Peer, left_by: str | None, exit_code: int) -> WorkerFailedError:
        traceback = "" if peer.error is None else peer.error.traceback
        return left_error(peer.rank, self._world_size, left_by, exit_code, traceback)

    def _ended(self, peer: Peer, exit_: WorkerExit) -> WorkerFailedError:
        """Return the error for a process that has ended."""
        count = f", the first of {self._world_size} to fail" if self._world_size > 1 else ""
        text = (
            f"{exit_.describe().replace('rank', 'Rank', 1)}{count}; its output is {self._output}."
        )
        is_signal = exit_.signal is not None and not exit_.finished
        has_left = exit_.lost_with is None and exit_.silence is None and not is_signal
        return WorkerFailedError(
            text,
            peer.rank,
            exit_code=exit_.code if has_left else None,
            signal=exit_.signal if is_signal else None,
            is_consequence=exit_.is_consequence,
        )

    def _lost(self, error: WorkerFailedError) -> Sentence | None:
        first = self._first_failed
        if first is not None and not first.is_consequence:
            # The error that came first explains it.
            return None
        return Sentence(error, min(self._settings.lost_grace_s, self._settings.grace_s))

    def _refused(self, now: float) -> Sentence | None:
        """End the workers after a refusal, once the others had the time to end by themselves."""
        assert self.refusal is not None
        assert self._settle_at is not None
        if now < self._settle_at and any(peer.is_busy for peer in self._peers):
            return None
        grace_s = min(self._settings.lost_grace_s, self._settings.grace_s)
        return Sentence(self.refusal, grace_s, is_success=True)

    def _settled(self, now: float) -> Sentence | None:
        """Judge by the exception of the rank that failed first, once the others had their say."""
        first = self._first_failed
        if first is None or self._settle_at is None:
            return None
        is_over = not any(peer.is_busy for peer in self._peers) and (
            not first.is_consequence or all(peer.exit for peer in self._peers)
        )
        if now < self._settle_at and not is_over:
            return None
        failed = [peer for peer in self._peers if peer.has_failed]
        cause = min(failed, key=lambda peer: (peer.is_consequence, peer is not first))
        mismatch = self._left_early(cause)
        if mismatch is not None:
            return mismatch
        if cause.error is None:
            assert cause.exit is not None
            self._first_failed = None
            return self._lost(self._ended(cause, cause.exit))
        others = fold_errors(cause, [peer for peer in failed if peer is not cause])
        error = told_error(cause.told(), self._world_size, others)
        return Sentence(error, self._settings.grace_s)

    def _left_early(self, cause: Peer) -> Sentence | None:
        """Judge a broken connection by the programs that have ended well before the others."""
        returned = [peer.rank for peer in self._peers if peer.exit and not peer.exit.is_failure]
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
        return Sentence(error, self._settings.grace_s)

    def _silent(self, elapsed_s: float) -> Sentence | None:
        for peer in self._peers:
            if not peer.is_ready or peer.exit is not None:
                continue
            peer.silent_s += elapsed_s
            if peer.silent_s > self._settings.heartbeat_timeout_s:
                what = "is stopped (SIGSTOP)" if self._is_stopped(peer.rank) else "hangs"
                text = f"Rank {peer.rank} {what}: it gave no sign of life for {peer.silent_s:.3g} s"
                if peer.progress.place:
                    text += f"; before that it was at {peer.progress.place}"
                error = WorkerFailedError(f"{text}.", peer.rank)
                return Sentence(error, 0.0, wants_stacks=True)
        return None

    def _idle_after_request(self, now: float) -> Sentence | None:
        """Judge a worker that was asked to end and has done nothing for its time since."""
        grace_s = self._settings.grace_s
        if self._asked_at is None or now < self._asked_at + grace_s:
            return None
        # Those that wait for it in a collective operation are idle too.
        least_s = max(1.0, grace_s)
        idle = [
            (bool(p.progress.operation), p.rank)
            for p in self._peers
            if p.is_busy and p.progress.idle_s > least_s * (1 + bool(p.progress.operation))
        ]
        if not idle:
            return None
        rank = min(idle)[1]
        peer = next(peer for peer in self._peers if peer.rank == rank)
        text = (
            f"Rank {peer.rank} was asked to end, but has done nothing for"
            f" {peer.progress.idle_s:.3g} s: it {peer.progress.describe()}. The stacks of all"
            " ranks are in the output above."
        )
        return Sentence(WorkerFailedError(text, peer.rank), 0.0, wants_stacks=True)

    def _waiting_in_vain(self) -> Sentence | None:
        certain_s = min(_CERTAIN_S, self._settings.heartbeat_timeout_s)
        for call in {peer.current for peer in self._peers if peer.is_busy}:
            assert call is not None
            seen = observations(call, self._peers)
            verdict = judge(seen, certain_s, self._settings.collective_timeout_s)
            if verdict is None:
                continue
            text = f"{verdict.text} The stacks of all ranks are in the output above."
            error: Exception = WorkerFailedError(text, verdict.rank)
            if verdict.is_certain:
                hint = "Hint: all ranks must make the same calls in the same order."
                error = CollectiveMismatchError(f"{text} {hint}")
            return Sentence(error, 0.0, wants_stacks=True)
        return None
