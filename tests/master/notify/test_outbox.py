"""Notices of a channel: counted, sent one message at a time, retried, given up."""

import msgspec
import pytest

from paceline._cluster.master.notify.notices import MAX_AGE_S, Notice
from paceline._cluster.master.notify.notifier import Outbox, Outcome, describe

OK, FAILED = Outcome(), Outcome(failure="HTTP 500")


def notice(number: int = 1, topic: str = "trial_failed", experiment_id: int = 3) -> Notice:
    return Notice(
        topic=topic, level="error", title=f"Trial {number} failed", text="Boom", time=0.0,
        experiment_id=experiment_id, trial_id=number,
    )  # fmt: skip


def test_a_thousand_trials_give_one_message() -> None:
    box = Outbox()
    for number in range(1000):
        box.add(notice(number))
    message = box.take(0.0)
    assert message is not None
    title, text = describe(message, "http://master")
    assert title == "Trial 0 failed, and 999 more"
    assert text.splitlines() == [
        "Trial 0 failed", "Boom", "Trial 1 failed", "Trial 2 failed", "Trial 3 failed",
        "Trial 4 failed", "... and 995 more", "http://master/experiments/3",
    ]  # fmt: skip
    assert len(msgspec.json.encode(box)) < 2000


def test_notices_of_many_experiments_are_limited_and_counted() -> None:
    box = Outbox()
    for number in range(50):
        box.add(notice(experiment_id=number + 1))
    message = box.take(0.0)
    assert message is not None
    assert (len(message.groups), message.num_left_out, message.num_notices) == (20, 30, 50)
    assert describe(message, "")[1].endswith("30 more messages.")


def test_next_message_follows_after_the_pause() -> None:
    box = Outbox()
    box.add(notice(1))
    assert box.take(100.0) is not None
    box.settle(OK, 100.0, pause_s=60.0)
    assert box.due_at is None
    box.add(notice(2))
    box.add(notice(3))
    assert box.take(159.0) is None
    message = box.take(160.0)
    assert message is not None
    assert message.num_notices == 2


def test_message_stays_as_it_is_until_it_is_sent() -> None:
    box = Outbox()
    box.add(notice(1))
    first = box.take(0.0)
    box.add(notice(2))
    box.settle(FAILED, 0.0, 60.0)
    assert box.failure == "HTTP 500"
    # As after a restart of the master.
    box = msgspec.json.decode(msgspec.json.encode(box), type=Outbox)
    assert box.take(0.5) is None
    assert box.take(1.0) == first
    box.settle(OK, 1.0, 60.0)
    assert box.failure is None
    second = box.take(61.0)
    assert second is not None
    assert second.groups[0].notice == notice(2)


def test_pauses_between_tries_grow_up_to_five_minutes() -> None:
    box = Outbox()
    box.add(notice())
    pauses, now = [], 0.0
    for _ in range(12):
        assert box.take(now) is not None
        box.settle(FAILED, now, 60.0)
        pauses.append(box.next_at - now)
        now = box.next_at
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


@pytest.mark.parametrize(("asked_s", "pause_s"), [(120.0, 120.0), (0.0, 1.0), (10.0**9, 3600.0)])
def test_receiver_chooses_the_pause_up_to_an_hour(asked_s: float, pause_s: float) -> None:
    box = Outbox()
    box.add(notice())
    box.take(0.0)
    box.settle(Outcome(failure="HTTP 429", retry_after_s=asked_s), 0.0, 60.0)
    assert box.next_at == pause_s


def test_message_is_given_up_after_a_day() -> None:
    box = Outbox()
    box.add(notice(1))
    box.add(notice(2))
    now = 0.0
    while box.sending or box.waiting:
        assert box.take(now) is not None
        box.settle(FAILED, now, 60.0)
        now = box.next_at
    assert MAX_AGE_S < now < MAX_AGE_S + 900.0
    assert (box.num_dropped, box.failure) == (2, "HTTP 500")
