"""What the time of a training went to, from the records of its attempts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import inf

from paceline.journal._journal_records import TimeSpent


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptTimes:
    """When an attempt was there, and what its chief recorded of its time.

    Attributes:
        created_at: When it was launched, in seconds since the epoch.
        ended_at: When it ended; None while it runs.
        sessions: The records of each of its chief's journals, oldest first; those of a restart
            within the attempt are a journal of their own.
    """

    created_at: float
    ended_at: float | None
    sessions: Sequence[Sequence[TimeSpent]]


@dataclass(kw_only=True, slots=True)
class TimeShares:
    """Seconds by what they went to; they add up to the whole time.

    Attributes:
        training_s: Steps whose result was kept: forward and backward pass, optimizer.
        data_wait_s: The devices were idle, as they waited for data.
        validation_s: Validation.
        checkpoint_s: Training stood still while a checkpoint was stored.
        lost_s: Work after the last checkpoint before a stop; it was lost, and done once more where
            the training went on.
        start_s: From the launch of a process to its first step: imports, restoring, restarts.
        other_s: What a script does between and after its trainings.
        undivided_s: Attempts that do not tell what they do, such as loops of one's own.
        waiting_s: No process was there: queued, paused, or before a restart.
    """

    training_s: float = 0.0
    data_wait_s: float = 0.0
    validation_s: float = 0.0
    checkpoint_s: float = 0.0
    lost_s: float = 0.0
    start_s: float = 0.0
    other_s: float = 0.0
    undivided_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole time."""
        return sum(self.seconds().values())

    @property
    def goodput(self) -> float | None:
        """The fraction of the time with processes that trained, None if that is not known."""
        used_s = self.total_s - self.waiting_s
        return None if self.undivided_s or used_s <= 0 else self.training_s / used_s

    def seconds(self) -> dict[str, float]:
        """Return the seconds by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a share."""
        setattr(self, name, getattr(self, name) + seconds)


_SHARES = ("data_wait", "validation", "checkpoint", "other", "lost")


def divide_time(began: float, until: float, attempts: Sequence[AttemptTimes]) -> TimeShares:
    """Divide the time from `began` to `until` by what it went to.

    Work is lost from the checkpoint on from which the next session went on. Clocks of several
    machines may differ: what lies outside of its attempt is moved to its bounds.

    Args:
        began: When the training was asked for, in seconds since the epoch.
        until: When it ended, or now.
        attempts: Its attempts, oldest first.
    """
    shares, clock = TimeShares(), began
    all_sessions = [session for attempt in attempts for session in attempt.sessions if session]
    next_starts = iter([*(session[0].steps_completed for session in all_sessions[1:]), None])
    for attempt in attempts:
        begin = min(max(attempt.created_at, clock), max(until, clock))
        end = until if attempt.ended_at is None else min(attempt.ended_at, until)
        end = max(end, begin)
        shares.waiting_s += begin - clock
        sessions = [session for session in attempt.sessions if session]
        if sessions:
            starts = [next(next_starts) for _ in sessions]
            is_running = attempt.ended_at is None
            _divide_attempt(shares, begin, end, sessions, starts, is_running=is_running)
        else:
            # Of a trainer's attempts, one without records has never come to train.
            shares.add("start_s" if all_sessions else "undivided_s", end - begin)
        clock = end
    shares.waiting_s += max(until - clock, 0.0)
    return shares


def _divide_attempt(
    shares: TimeShares,
    begin: float,
    end: float,
    sessions: Sequence[Sequence[TimeSpent]],
    next_starts: Sequence[int | None],
    *,
    is_running: bool,
) -> None:
    clock = begin
    for session, next_start in zip(sessions, next_starts, strict=True):
        first = min(max(session[0].time, clock), end)
        shares.start_s += first - clock
        clock = first
        kept_steps = inf if next_start is None else next_start
        for earlier, later in zip(session, session[1:], strict=False):
            time = min(max(later.time, clock), end)
            _divide_piece(shares, time - clock, earlier, later, kept_steps)
            clock = time
    last = sessions[-1][-1]
    if last.event == "end":
        shares.other_s += end - clock
    else:
        shares.add("training_s" if is_running else "lost_s", end - clock)


def _divide_piece(
    shares: TimeShares, seconds: float, earlier: TimeSpent, later: TimeSpent, kept_steps: float
) -> None:
    """Divide the time between two records."""
    lost_s = seconds * _lost_fraction(earlier.steps_completed, later.steps_completed, kept_steps)
    shares.lost_s += lost_s
    kept_s = left_s = seconds - lost_s
    for name, spent_s in _spent_between(earlier, later):
        share_s = min(spent_s * (kept_s / seconds if seconds else 0.0), left_s)
        shares.add(f"{name}_s", share_s)
        left_s -= share_s
    shares.training_s += left_s


def _spent_between(earlier: TimeSpent, later: TimeSpent) -> Iterator[tuple[str, float]]:
    for name in _SHARES:
        yield name, max(later.seconds.get(name, 0.0) - earlier.seconds.get(name, 0.0), 0.0)


def _lost_fraction(earlier: int, later: int, kept_steps: float) -> float:
    """Return which part of the way from one step to another lies beyond the steps kept."""
    if later <= kept_steps:
        return 0.0
    return 1.0 if earlier >= kept_steps else (later - kept_steps) / (later - earlier)
