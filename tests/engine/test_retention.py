"""Which checkpoints go: neither among the newest nor among the best."""

import pytest

from paceline.engine import Kept, to_delete

# Steps 1 to 5; the score of step 3 is unknown, and those of 2 and 5 are equal.
CHECKPOINTS = [
    Kept(f"c{step}", step, score)
    for step, score in [(1, 0.1), (2, 0.9), (3, None), (4, 0.5), (5, 0.9)]
]


@pytest.mark.parametrize(
    ("keep_latest", "keep_best", "gone"),
    [
        (None, None, []),
        (2, None, [1, 2, 3]),
        (None, 1, [1, 3, 4]),
        (1, 2, [1, 3, 4]),
        (1, 3, [1, 3]),
        (9, None, []),
    ],
)
def test_what_no_rule_keeps_goes(
    keep_latest: int | None, keep_best: int | None, gone: list[int]
) -> None:
    found = to_delete(CHECKPOINTS, keep_latest=keep_latest, keep_best=keep_best)
    assert [kept.steps_completed for kept in found] == gone


def test_newest_is_what_was_stored_last_though_the_run_went_back() -> None:
    went_back = [Kept("old", 10, None), Kept("new", 6, None)]
    assert [kept.uuid for kept in to_delete(went_back, keep_latest=1, keep_best=None)] == ["old"]
