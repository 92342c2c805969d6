"""What the time of a training went to: cases by hand, and any attempts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._base.journal_records import AttemptTimes, TimeShares, divide_time
from paceline.journal import TimeSpent


def spent(time: float, event: Any, step: int, **seconds: float) -> TimeSpent:
    return TimeSpent(time=time, event=event, steps_completed=step, seconds=seconds)


def attempt(begin: float, end: float | None, *sessions: list[TimeSpent]) -> AttemptTimes:
    return AttemptTimes(created_at=begin, ended_at=end, sessions=sessions)


def told(shares: TimeShares) -> dict[str, float]:
    return {name: seconds for name, seconds in shares.seconds().items() if seconds}


def test_an_undisturbed_training_is_divided_by_its_records() -> None:
    """It waits 10 s for slots, starts in 5 s, and leaves 1 s after its end."""
    session = [
        spent(115.0, "start", 0),
        spent(135.0, "report", 100, data_wait=4.0),
        spent(140.0, "checkpoint", 100, data_wait=4.0, validation=3.0, checkpoint=1.0),
        spent(150.0, "end", 200, data_wait=5.0, validation=3.0, checkpoint=2.0, other=0.5),
    ]
    shares = divide_time(100.0, 151.0, [attempt(110.0, 151.0, session)])
    assert told(shares) == {
        "waiting_s": 10.0, "start_s": 5.0, "training_s": 24.5, "data_wait_s": 5.0,
        "validation_s": 3.0, "checkpoint_s": 2.0, "other_s": 1.5,
    }  # fmt: skip
    assert (shares.total_s, shares.goodput) == (51.0, 24.5 / 41.0)


def test_work_beyond_the_checkpoint_that_the_next_attempt_goes_on_from_is_lost() -> None:
    """Killed at 40, 10 s after its checkpoint, 4 s after its last record."""
    first = [
        spent(10.0, "start", 0),
        spent(30.0, "checkpoint", 100, checkpoint=2.0),
        spent(36.0, "report", 130, checkpoint=2.0, data_wait=1.0),
    ]
    second = [spent(60.0, "start", 100), spent(70.0, "end", 150)]
    attempts = [attempt(0.0, 40.0, first), attempt(50.0, 70.0, second)]
    assert told(divide_time(0.0, 70.0, attempts)) == {
        "start_s": 20.0, "training_s": 28.0, "checkpoint_s": 2.0, "lost_s": 10.0,
        "waiting_s": 10.0,
    }  # fmt: skip


def test_what_lies_between_two_records_is_divided_by_its_steps() -> None:
    """The next attempt goes on from step 25 of 100, as a later checkpoint was damaged."""
    first = [spent(0.0, "start", 0), spent(40.0, "checkpoint", 100, data_wait=20.0)]
    second = [spent(40.0, "start", 25), spent(41.0, "end", 26)]
    attempts = [attempt(0.0, 40.0, first), attempt(40.0, 41.0, second)]
    assert told(divide_time(0.0, 41.0, attempts)) == {
        "lost_s": 30.0, "training_s": 6.0, "data_wait_s": 5.0,
    }  # fmt: skip


def test_a_pause_loses_nothing() -> None:
    """The wait for the last checkpoint comes after its record, at the same step."""
    first = [
        spent(0.0, "start", 0),
        spent(10.0, "checkpoint", 50, checkpoint=1.0),
        spent(13.0, "end", 50, checkpoint=4.0),
    ]
    second = [spent(100.0, "start", 50), spent(110.0, "end", 100)]
    attempts = [attempt(0.0, 13.0, first), attempt(100.0, 110.0, second)]
    assert told(divide_time(0.0, 110.0, attempts)) == {
        "training_s": 19.0, "checkpoint_s": 4.0, "waiting_s": 87.0,
    }  # fmt: skip


def test_a_restart_within_an_attempt_is_a_start() -> None:
    first = [spent(10.0, "start", 0), spent(20.0, "checkpoint", 10), spent(25.0, "report", 15)]
    second = [spent(40.0, "start", 10), spent(50.0, "end", 20)]
    shares = divide_time(0.0, 50.0, [attempt(0.0, 50.0, first, second)])
    assert told(shares) == {"start_s": 25.0, "training_s": 20.0, "lost_s": 5.0}


def test_an_attempt_that_runs_trains_since_its_last_record() -> None:
    session = [spent(10.0, "start", 0), spent(20.0, "report", 10)]
    assert told(divide_time(0.0, 30.0, [attempt(5.0, None, session)])) == {
        "waiting_s": 5.0, "start_s": 5.0, "training_s": 20.0,
    }  # fmt: skip


def test_attempts_without_records_are_undivided_or_never_began() -> None:
    plain = divide_time(0.0, 30.0, [attempt(5.0, 25.0)])
    assert told(plain) == {"waiting_s": 10.0, "undivided_s": 20.0}
    assert plain.goodput is None
    session = [spent(20.0, "start", 0), spent(30.0, "end", 10)]
    failed_once = divide_time(0.0, 30.0, [attempt(0.0, 8.0), attempt(10.0, 30.0, session)])
    assert told(failed_once) == {"start_s": 18.0, "waiting_s": 2.0, "training_s": 10.0}
    assert divide_time(0.0, 0.0, []).goodput is None


seconds = st.floats(0, 1e6, allow_nan=False)
records = st.builds(
    TimeSpent,
    time=seconds,
    event=st.sampled_from(["start", "report", "checkpoint", "end"]),
    steps_completed=st.integers(0, 1000),
    seconds=st.dictionaries(st.sampled_from(["data_wait", "checkpoint", "later"]), seconds),
)
attempts_of_any_clock = st.lists(
    st.builds(
        AttemptTimes,
        created_at=seconds,
        ended_at=st.none() | seconds,
        sessions=st.lists(st.lists(records, max_size=4), max_size=3),
    ),
    max_size=4,
)


@given(began=seconds, length=seconds, attempts=attempts_of_any_clock)
def test_shares_are_never_negative_and_add_up(
    began: float, length: float, attempts: list[AttemptTimes]
) -> None:
    """Also where clocks of several machines contradict each other."""
    shares = divide_time(began, began + length, attempts)
    assert min(shares.seconds().values()) >= 0.0
    assert shares.total_s == pytest.approx(length, abs=1e-6)
    assert shares.goodput is None or 0 <= shares.goodput <= 1


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 50), st.integers(0, 50)), min_size=1),
    st.data(),
)
def test_every_restart_adds_just_what_was_trained_since_its_checkpoint(
    pieces: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """One second a step. Each attempt stores once, then is killed, or in the end completes."""
    clock, step, attempts = 0.0, 0, []
    lost = start = 0
    for number, (start_s, num_kept, num_lost) in enumerate(pieces):
        is_last = number == len(pieces) - 1
        begin, clock = clock, clock + start_s
        session = [spent(clock, "start", step)]
        clock, step = clock + num_kept, step + num_kept
        session.append(spent(clock, "checkpoint", step))
        start += start_s
        if is_last:
            session.append(spent(clock, "end", step))
        else:
            # Whether a record comes shortly before the kill makes no difference.
            clock += num_lost
            lost += num_lost
            if data.draw(st.booleans()):
                session.append(spent(clock, "report", step + num_lost))
        attempts.append(attempt(begin, clock, session))
    shares = divide_time(0.0, clock, attempts)
    assert (shares.lost_s, shares.start_s, shares.training_s) == (lost, start, step)
