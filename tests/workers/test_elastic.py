"""The number of a group's workers, over random histories of losses and of what is there."""

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline._training.workers.process_pools import LocalPool
from paceline._training.workers.workers import (
    ElasticLimits,
    ElasticSize,
    Form,
    GiveUp,
    GrowthAttempts,
    Wait,
    Workers,
)


def limits(least: int = 2, most: float = 4, **waiting: Any) -> ElasticLimits:
    waiting = {"max_wait_s": 10.0, "first_delay_s": 1.0, "longest_delay_s": 4.0, **waiting}
    return ElasticLimits(least=least, most=most, **waiting)


@pytest.mark.parametrize(("capacity", "num_workers"), [(2, 2), (3, 3), (4, 4), (9, 4)])
def test_group_is_formed_with_as_many_as_there_are(capacity: int, num_workers: int) -> None:
    assert ElasticSize(limits()).decide(capacity, now=7.0) == Form(num_workers)


@pytest.mark.parametrize(
    ("least", "capacity", "num_workers"), [(2, 3, 2), (2, 5, 4), (2, 9, 4), (1, 3, 2), (1, 1, 1)]
)
def test_groups_that_divide_models_are_whole(least: int, capacity: int, num_workers: int) -> None:
    elastic = ElasticSize(limits(least, multiple=2))
    assert elastic.decide(capacity, now=7.0) == Form(num_workers)
    # One more that can run is no reason to start again, two are.
    assert elastic.next_size(num_workers + 1) == (2 if num_workers == 1 else None)
    assert elastic.next_size(4) == (None if num_workers == 4 else 4)


def test_delays_double_until_the_whole_wait_is_over() -> None:
    elastic = ElasticSize(limits())
    now, delays = 100.0, []
    while isinstance(step := elastic.decide(1, now), Wait):
        assert (step.wanted, step.available, step.waited_s) == (2, 1, now - 100)
        delays.append(step.delay_s)
        now += step.delay_s
    assert delays == [1, 2, 4, 3]
    assert step == GiveUp(wanted=2, available=1, waited_s=10.0)


def test_who_asks_early_waits_for_the_rest_unless_workers_have_come() -> None:
    elastic = ElasticSize(limits())
    assert elastic.decide(0, 0.0) == Wait(1.0, 2, 0, 0.0)
    assert elastic.decide(1, 0.25) == Wait(0.75, 2, 1, 0.25, is_new=False)
    assert elastic.decide(2, 0.5) == Form(2)
    elastic.end()
    # The next shortage begins with the first delay and has the whole wait.
    assert elastic.decide(0, 50.0) == Wait(1.0, 2, 0, 0.0)


def test_group_grows_to_what_is_there_and_has_something_to_do() -> None:
    elastic = ElasticSize(limits(2, math.inf))
    assert elastic.next_size(5) is None
    elastic.decide(3, 0.0)
    elastic.num_useful = 6
    assert [elastic.next_size(capacity) for capacity in (1, 3, 5, 9)] == [None, None, 5, 6]
    elastic.end()
    assert elastic.decide(9, 1.0) == Form(6)
    elastic.end()
    # The least number is kept, even if some of them have nothing to do.
    elastic.num_useful = 1
    assert elastic.decide(9, 2.0) == Form(2)


@pytest.mark.parametrize(
    ("size", "num_leaving", "capacity", "expected"),
    [
        ((1, 4), 0, 3, None),
        ((1, 4), 1, 2, 2),
        ((1, 4), 2, 1, 1),
        # Other nodes have room for those that have to leave, and for more.
        ((1, 4), 1, 3, 3),
        ((1, 4), 3, 7, 4),
        # Too few are left, so the loss of the node is waited for.
        ((2, 4), 2, 1, None),
        ((1, 4), 3, 0, None),
        ((3, 3), 1, 2, None),
        # Of a fixed number, all must have room elsewhere.
        ((3, 3), 1, 3, 3),
        ((3, 3), 3, 5, 3),
        ((3, 3), 0, 5, None),
    ],
)
def test_group_goes_on_without_the_workers_that_have_to_leave(
    size: tuple[int, int], num_leaving: int, capacity: int, expected: int | None
) -> None:
    elastic = ElasticSize(limits(*size))
    assert elastic.next_size(capacity, num_leaving) is None
    elastic.decide(3, 0.0)
    assert elastic.next_size(capacity, num_leaving) == expected


def test_attempts_to_grow_wait_longer_after_each_failure() -> None:
    attempts = GrowthAttempts(limits())
    assert attempts.is_due(0.0)
    assert not attempts.is_late(1000.0)
    now, delays = 100.0, []
    for _ in range(4):
        attempts.begin(now)
        attempts.begin(now + 1)
        assert (attempts.is_late(now + 3.9), attempts.is_late(now + 4)) == (False, True)
        now += 4
        delays.append(attempts.fail(now))
        assert not attempts.is_late(now + 1000)
        assert not attempts.is_due(now + delays[-1] - 0.1)
        now += delays[-1]
        assert attempts.is_due(now)
    assert delays == [1, 2, 4, 4]
    attempts.begin(now)
    attempts.succeed()
    assert not attempts.is_late(now + 1000)
    # The next shortage begins with the first delay.
    attempts.begin(now)
    assert attempts.fail(now + 4) == 1


class SharedPlace(LocalPool):
    """Two seats that are told of, of which others may have taken the second one."""

    needs_reservation = True

    def __init__(self) -> None:
        super().__init__(1, threads_per_worker=1)
        self.num_certain = 1
        self.num_cancelled = 0

    def capacity(self) -> int:
        return 2

    def reserve(self, num_workers: int) -> int:
        return min(num_workers, self.num_certain)

    def cancel_reservation(self) -> None:
        self.num_cancelled += 1


class LeavingPlace(LocalPool):
    """Seats that are taken away with notice."""

    def __init__(self, num_seats: int) -> None:
        super().__init__(1, threads_per_worker=1)
        self.num_seats = num_seats
        self.leaving: list[int] = []

    def capacity(self) -> int:
        return self.num_seats

    def leaving_ranks(self) -> list[int]:
        return self.leaving if self.is_alive else []


def test_a_group_grows_only_into_what_is_reserved() -> None:
    place = SharedPlace()
    delays = {"first_delay_s": 1e-3, "longest_delay_s": 1e-3}
    group = Workers(limits(1, 3, **delays), lambda: place, hint="none.")
    group.form()
    try:
        assert place.num_workers == 1
        deadline = time.monotonic() + 60
        while place.num_cancelled < 3 and time.monotonic() < deadline:
            group.prepare_growth()
            assert group.next_size() is None
            time.sleep(1e-3)
        assert place.num_cancelled >= 3
        assert group.is_alive
        place.num_certain = 2
        while group.next_size() is None and time.monotonic() < deadline:
            time.sleep(1e-3)
        assert group.next_size() == 2
        group.end_generation()
        group.form()
        assert place.num_workers == 2
        assert group.next_size() is None
    finally:
        group.stop(force=True)


@pytest.mark.parametrize(
    ("least", "num_seats", "expected"),
    [(1, 1, 1), (1, 2, 2), (2, 1, None), (2, 2, 2)],
    ids=["fewer", "moved", "fixed-without-room", "fixed-and-moved"],
)
def test_a_group_says_once_who_has_to_leave(
    least: int, num_seats: int, expected: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    place = LeavingPlace(2)
    group = Workers(limits(least, 2), lambda: place, hint="none.")
    group.form()
    try:
        assert group.next_size() is None
        place.leaving, place.num_seats = [1], num_seats
        assert [group.next_size(), group.next_size()] == [expected, expected]
        told = [text for text in caplog.messages if "rank(s) 1 will be taken away" in text]
        assert len(told) == 1
        assert f"if at least {least} worker(s) can run" in told[0]
        if expected is not None:
            place.leaving = []
            group.end_generation()
            group.form()
            assert place.num_workers == expected
            assert group.next_size() is None
    finally:
        group.stop(force=True)


@pytest.mark.parametrize(
    ("num_workers", "expected"), [(3, (3, 3)), ((2, 8), (2, 8)), ([4, math.inf], (4, math.inf))]
)
def test_limits_are_a_number_or_a_pair(num_workers: Any, expected: tuple[int, float]) -> None:
    found = ElasticLimits.of(num_workers, max_wait_s=1.0)
    assert ((found.least, found.most), found.max_wait_s) == (expected, 1.0)


@pytest.mark.parametrize(
    ("num_workers", "waiting", "error", "text"),
    [
        ((0, 2), {}, ValueError, "least number of workers must be at least 1 .* got 0 and 2"),
        ((3, 2), {}, ValueError, "not above the most, but got 3 and 2"),
        ((math.inf, math.inf), {}, ValueError, "got inf and inf"),
        ((2, 2.5), {}, TypeError, r"must be an integer, but got 2\.5"),
        ((True, 2), {}, TypeError, "must be an integer, but got True"),
        ((1, 2, 3), {}, TypeError, r"must be an integer, but got \(1, 2, 3\)"),
        ("2", {}, TypeError, "must be an integer, but got '2'"),
        (2, {"max_wait_s": -1.0}, ValueError, r"`max_wait_s` must be at least 0, but got -1\.0"),
        (2, {"first_delay_s": 0.0}, ValueError, "`first_delay_s` must be above 0"),
        (2, {"longest_delay_s": 0.5}, ValueError, r"not above `longest_delay_s`, .* 1\.0 and 0\.5"),
    ],
)
def test_limits_out_of_range_are_refused(
    num_workers: Any, waiting: dict[str, float], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ElasticLimits.of(num_workers, **waiting)


def test_numbers_that_leave_a_part_of_a_group_are_refused() -> None:
    with pytest.raises(ValueError, match="1 or a multiple of 2, but got 2 and 5"):
        limits(2, 5, multiple=2)
    assert limits(2, math.inf, multiple=2).most == math.inf


class Histories(RuleBasedStateMachine):
    """A group whose capacity comes and goes, and whose workers are lost at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = limits(2, 5)
        self.elastic = ElasticSize(self.limits)
        self.capacity = 0
        self.now = 0.0
        self.short_since: float | None = None
        self.has_given_up = False

    @rule(capacity=st.integers(0, 8))
    def lend_or_take_back(self, capacity: int) -> None:
        # Whoever takes back what is in use has the workers lost.
        if capacity < self.elastic.num_workers:
            self.elastic.end()
        self.capacity = capacity

    @rule(num_useful=st.none() | st.integers(1, 8))
    def cut_into_shards(self, num_useful: int | None) -> None:
        self.elastic.num_useful = num_useful

    @rule(elapsed_s=st.floats(0, 5))
    def go_on(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @precondition(lambda self: self.elastic.num_workers)
    @rule()
    def lose(self) -> None:
        self.elastic.end()

    @precondition(lambda self: not self.elastic.num_workers and not self.has_given_up)
    @rule()
    def decide(self) -> None:
        step = self.elastic.decide(self.capacity, self.now)
        if self.capacity >= 2:
            # However long it had to wait, a group that can be formed is, with all that is of use.
            assert step == Form(self.best())
            self.short_since = None
            return
        if self.short_since is None:
            self.short_since = self.now
        waited_s = self.now - self.short_since
        assert (step.wanted, step.available, step.waited_s) == (2, self.capacity, waited_s)
        if isinstance(step, Wait):
            assert 0 < step.delay_s < self.limits.longest_delay_s + 1e-9
            assert step.waited_s + step.delay_s <= self.limits.max_wait_s + 1e-9
        else:
            assert isinstance(step, GiveUp)
            assert waited_s >= self.limits.max_wait_s
            self.has_given_up = True

    @precondition(lambda self: self.elastic.num_workers)
    @rule()
    def commit_a_checkpoint(self) -> None:
        grown = self.elastic.next_size(self.capacity)
        assert grown == (self.best() if self.best() > self.elastic.num_workers else None)
        if grown is not None:
            self.elastic.end()
            assert self.elastic.decide(self.capacity, self.now) == Form(grown)
            assert self.elastic.next_size(self.capacity) is None

    @precondition(lambda self: self.elastic.num_workers)
    @rule(num_leaving=st.integers(1, 5))
    def commit_a_checkpoint_after_a_notice(self, num_leaving: int) -> None:
        present = self.elastic.num_workers
        num_leaving = min(num_leaving, present)
        # The capacity without the leaving ones, of which there may be room for some elsewhere.
        self.capacity -= num_leaving
        next_size = self.elastic.next_size(self.capacity, num_leaving)
        assert next_size == (self.best() if self.capacity >= 2 else None)
        self.elastic.end()
        if next_size is not None:
            assert self.elastic.decide(self.capacity, self.now) == Form(next_size)

    def best(self) -> int:
        return min(self.capacity, 5, max(2, self.elastic.num_useful or 5))

    @invariant()
    def has_a_number_in_range(self) -> None:
        assert self.elastic.num_workers in (0, 2, 3, 4, 5)
        assert self.elastic.num_workers <= self.capacity


Histories.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
test_random_histories = Histories.TestCase


@given(
    least=st.integers(1, 6),
    spread=st.integers(0, 6) | st.just(math.inf),
    capacities=st.lists(st.integers(0, 20), min_size=1, max_size=30),
    first_delay_s=st.floats(0.01, 5),
    longest=st.floats(1, 10),
    max_wait_s=st.floats(0, 100),
)
def test_a_driver_that_sleeps_as_told_ends_in_bounded_time(
    least: int,
    spread: float,
    capacities: list[int],
    first_delay_s: float,
    longest: float,
    max_wait_s: float,
) -> None:
    elastic = ElasticSize(
        limits(
            least,
            least + spread,
            first_delay_s=first_delay_s,
            longest_delay_s=first_delay_s * longest,
            max_wait_s=max_wait_s,
        )
    )
    now, waits = 0.0, 0
    while True:
        capacity = capacities[min(waits, len(capacities) - 1)]
        step = elastic.decide(capacity, now)
        if not isinstance(step, Wait):
            break
        assert capacity < least
        assert step.is_new
        now += step.delay_s
        waits += 1
        assert waits < 20_000
    assert now <= max_wait_s * (1 + 1e-9) + 1e-9
    if isinstance(step, Form):
        assert step.num_workers == min(capacity, least + spread)
    else:
        assert capacity < least
        assert step.waited_s >= max_wait_s
