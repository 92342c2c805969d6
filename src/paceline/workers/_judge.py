"""What it means for a pool that workers err, die, hang or wait in vain."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.workers._errors import CollectiveMismatchError, WorkerFailedError, told_error
from paceline.workers._leaving import left_error
from paceline.workers._peer import Peer, fold_errors, observations
from paceline.workers._serve import WorkerError
from paceline.workers._spec import WorkerExit
from paceline.workers._watchdog import judge

# What the other ranks get to tell the same error.
_SETTLE_S = 0.2
# What a worker gets to die if its end is what another one's error answers.
_CAUSE_SETTLE_S = 2.0
# What survivors get when a worker was lost: without it they cannot finish anything.
_LOST_GRACE_S = 1.0
# How long a rank waits for one that has returned until that is taken for an error.
_CERTAIN_S = 5.0
_LONGEST_TICK_S = 1.0


class PoolSettings(NamedTuple):
    """How a pool judges its workers; times are in seconds."""

    heartbeat_timeout_s: float
    collective_timeout_s: float
    grace_s: float

    @property
    def tick_s(self) -> float:
        """How often workers show that they live, and the driver looks."""
        return min(_LONGEST_TICK_S, self.heartbeat_timeout_s / 5)


class Sentence(NamedTuple):
    """That all calls end by an error, and all workers within a grace in seconds.

    `wants_stacks` asks for what the workers were at.
    """

    error: BaseException
    grace_s: float
    wants_stacks: bool = False


class Judge:
    """Decides when and by which error a pool's workers end; does no I/O and reads no clock.

    Args:
        peers: The workers, in rank order.
        settings: The times that count.
        is_stopped: Tells whether a rank's process is stopped, as by SIGSTOP.
    """

    def __init__(
        self, peers: Sequence[Peer], settings: PoolSettings, is_stopped: Callable[[int], bool]
    ) -> None:
        self._peers = peers
        self._settings = settings
        self._is_stopped = is_stopped
        self._first_failed: Peer | None = None
        self._settle_at: float | None = None

    @property
    def due(self) -> float | None:
        """When to look next at the latest, if that is known."""
        return self._settle_at

    def note_error(self, peer: Peer, error: WorkerError, now: float) -> Sentence | None:
        """Note what a worker's call raised."""
        peer.take_error(error)
        if error.exit_code is not None:
            return self._lost(self._left(peer, error.description, error.exit_code))
        if self._first_failed is None:
            self._first_failed = peer
            self._settle_at = now + (_CAUSE_SETTLE_S if peer.is_consequence else _SETTLE_S)
        return None

    def note_exit(self, peer: Peer, exit_: WorkerExit) -> Sentence | None:
        """Note that a worker's process has ended."""
        peer.exit = exit_
        if peer.error is not None:
            return None
        if exit_.code == 0 and peer.current is not None:
            return self._lost(self._left(peer, None, 0))
        count = f", the first of {len(self._peers)} to fail" if len(self._peers) > 1 else ""
        text = f"{exit_.describe().replace('rank', 'Rank', 1)}{count}; its output is above."
        return self._lost(WorkerFailedError(text, peer.rank))

    def look(self, now: float, elapsed_s: float) -> Sentence | None:
        """Look at what has become due.

        Args:
            now: The time, in seconds of a monotonic clock.
            elapsed_s: For how long the workers could have given a sign of life since the last look.
        """
        return self._settled(now) or self._silent(elapsed_s) or self._waiting_in_vain()

    def _left(self, peer: Peer, left_by: str | None, exit_code: int) -> WorkerFailedError:
        traceback = "" if peer.error is None else peer.error.traceback
        return left_error(peer.rank, len(self._peers), left_by, exit_code, traceback)

    def _lost(self, error: WorkerFailedError) -> Sentence | None:
        first = self._first_failed
        if first is not None and not first.is_consequence:
            # The error that came first explains it.
            return None
        return Sentence(error, min(_LOST_GRACE_S, self._settings.grace_s))

    def _settled(self, now: float) -> Sentence | None:
        """Judge by the exception of the rank that failed first, once the others had their say."""
        first = self._first_failed
        if first is None or self._settle_at is None:
            return None
        is_over = not first.is_consequence and not any(peer.is_busy for peer in self._peers)
        if now < self._settle_at and not is_over:
            return None
        failed = [peer for peer in self._peers if peer.error is not None]
        cause = min(failed, key=lambda peer: (peer.is_consequence, peer is not first))
        others = fold_errors(cause, [peer for peer in failed if peer is not cause])
        error = told_error(cause.told(), len(self._peers), others)
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
