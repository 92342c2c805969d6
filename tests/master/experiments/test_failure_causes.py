"""Failures are the same whichever rank was the first one, whenever and wherever it failed."""

from typing import Any

import pytest

from paceline._cluster.master.experiments.failure_causes import comparable
from paceline.journal import AttemptFinished

MISSING = (
    "exited with code 1 (ModuleNotFoundError: No module named 'nothere'), the first of 8 to fail."
)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (f"Rank 0 {MISSING}", f"Rank 5 {MISSING}", True),
        (f"Node 0 (box-1): Rank 0 {MISSING}", f"Node 1 (box-2): Rank 5 {MISSING}", True),
        ("<Net object at 0x7f12ab>", "<Net object at 0x55cd01>", True),
        ("no answer of 10.0.0.1:40123 in 3.21s", "no answer of 10.0.0.7:51 in 12 ms", True),
        ("at 2026-11-29 18:46:14,123 by pid 12", "at 2026-11-30T07:06:10Z by pid 7", True),
        ("no file '/home/attempts/3/context/x'", "no file '/home/attempts/4/context/x'", True),
        ("CUDA out of memory on cuda:0", "CUDA out of memory on cuda:3", True),
        ("ValueError: failure 0", "ValueError: failure 1", False),
        ("KeyError: 'rank'", "KeyError: 'size'", False),
        ("shape [3, 4] at layer 2", "shape [3, 5] at layer 2", False),
    ],
)
def test_texts_are_compared_without_what_differs_by_chance(
    one: str, other: str, is_same: bool
) -> None:
    assert (comparable(one) == comparable(other)) is is_same


def launch_error(rank: int, what: str = "no such module") -> str:
    return f"Rank {rank} exited with code 1 (ImportError: {what}), the first of 3 to fail."


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # Neither rank has come to the point of telling it itself.
        ({"rank": 0}, {"rank": 2}),
        ({"rank": 2}, {"rank": 1}),
        # Rank 0 tells it if it was the first one, and else what it answers to.
        ({"rank": 0, "own": "ImportError: no such module"}, {"rank": 2}),
        ({"rank": 2, "own": "DistributedPeerError: rank 2"}, {"rank": 0, "own": "ImportError"}),
    ],
)
def test_a_trial_that_fails_twice_the_same_way_on_other_ranks_is_given_up(
    bench: Any, first: dict[str, Any], second: dict[str, Any]
) -> None:
    bench.create("single")
    for told in (first, second):
        attempt_id = bench.start(1)
        if "own" in told:
            bench.send(attempt_id, AttemptFinished(time=1.0, outcome="error", error=told["own"]))
        bench.end(attempt_id, code=1, detail=launch_error(told["rank"]), is_launch_error=True)
    trial = bench.trial(1)
    assert (trial.state, trial.restarts) == ("ERROR", 1)
    assert "the same way as the one before" in trial.error


def test_a_trial_whose_ranks_fail_in_other_ways_goes_on(bench: Any) -> None:
    bench.create("single")
    for rank, what in ((0, "one"), (2, "another")):
        bench.end(bench.start(1), code=1, detail=launch_error(rank, what), is_launch_error=True)
    assert (bench.trial(1).state, bench.trial(1).restarts) == ("ACTIVE", 2)
