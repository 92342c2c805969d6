"""A training with continuous checkpoints, killed at any moment, ends in the same bits.

Which steps have a checkpoint depends on time, so each run is compared with an undisturbed one,
whose checkpoints have a period.
"""

from collections.abc import Callable

import pytest

from paceline.testing import Fault, FaultOutcome

pytestmark = pytest.mark.timeout(400)

Verify = Callable[..., FaultOutcome]

# Ranks, the one that is killed, where, and batches per optimizer step.
CELLS = [
    (3, 2, "engine.batch:17", "1"),
    (3, 0, "engine.batch:17", "1"),
    (3, 0, "engine.batch:22", "4"),
    (3, 2, "engine.batch:22", "4"),
    (3, 0, "storage.before_manifest:2", "1"),
    (3, 2, "storage.after_done:3", "1"),
    (3, 0, "storage.after_done:3", "1"),
    (1, 0, "engine.batch:17", "1"),
    (1, 0, "storage.before_manifest:2", "4"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "rank", "place", "window"), CELLS)
def test_training_with_continuous_checkpoints_ends_in_the_same_bits(
    verify: Verify, num_workers: int, rank: int, place: str, window: str
) -> None:
    point, _, count = place.partition(":")
    options = {"PRECISION": "fp32", "LOADERS": "2"} | ({"WINDOW": window} if window != "1" else {})
    fault = Fault("kill", point=point, count=int(count), rank=rank)
    outcome = verify(num_workers, fault, options, CHECKPOINT_EVERY="continuous")
    assert outcome.differences == ()
    assert outcome.diverged_at is None
    assert 0 < outcome.resumed_from <= outcome.hit_step
