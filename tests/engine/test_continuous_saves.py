"""When the next one of continuous checkpoints begins."""

import pytest

from paceline.pytorch import _training_checkpoints as _continuous_saves
from paceline.pytorch._training_checkpoints import ContinuousSaves


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(_continuous_saves.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(_continuous_saves.time, "time", lambda: self.now_s + 5000.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_next_one_is_due_at_once_without_a_limit(clock: Clock) -> None:
    saves = ContinuousSaves()
    assert saves.is_due(is_newest_lost=False)
    saves.note_begun()
    saves.note_stored(10**12)
    assert saves.is_due(is_newest_lost=False)


def test_a_checkpoint_uses_its_share_of_the_hour_from_its_beginning(clock: Clock) -> None:
    saves = ContinuousSaves(bytes_per_hour=3600)
    saves.note_begun()
    clock.now_s += 40
    saves.note_stored(100)
    assert not saves.is_due(is_newest_lost=False)
    clock.now_s += 59
    assert not saves.is_due(is_newest_lost=False)
    clock.now_s += 1
    assert saves.is_due(is_newest_lost=False)


def test_checkpoints_for_other_reasons_count_too(clock: Clock) -> None:
    saves = ContinuousSaves(bytes_per_hour=3600)
    for _ in range(2):
        saves.note_begun()
        saves.note_stored(100)
    clock.now_s += 199
    assert not saves.is_due(is_newest_lost=False)
    clock.now_s += 1
    assert saves.is_due(is_newest_lost=False)


def test_a_run_that_goes_on_has_used_what_its_last_checkpoint_took(clock: Clock) -> None:
    saves = ContinuousSaves(bytes_per_hour=3600)
    saves.carry_on(100, clock.now_s + 5000 - 30)
    clock.now_s += 69
    assert not saves.is_due(is_newest_lost=False)
    clock.now_s += 1
    assert saves.is_due(is_newest_lost=False)


def test_next_one_waits_a_minute_after_one_that_was_lost(clock: Clock) -> None:
    saves = ContinuousSaves()
    saves.note_begun()
    for _ in range(2):
        assert not saves.is_due(is_newest_lost=True)
        clock.now_s += 59
        assert not saves.is_due(is_newest_lost=True)
        clock.now_s += 1
        assert saves.is_due(is_newest_lost=True)
        saves.note_begun()
