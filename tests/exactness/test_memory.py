"""A training with states in memory, killed at any moment, ends in the same bits.

The test owns the memory, as a launcher that starts its workers again does.
"""

from collections.abc import Callable

import pytest

from paceline._base.run_memory import run_memory
from paceline.testing import Fault, FaultOutcome
from paceline.testing._compare_runs import find_run, read_run_facts

pytestmark = pytest.mark.timeout(400)

Verify = Callable[..., FaultOutcome]

# Ranks, the one that is killed (None for all at once), where, and what is special. A state goes to
# memory with each batch of one rank, and with about every second one of three.
CELLS = [
    (1, 0, "engine.batch:17", {}),
    (1, 0, "storage.before_manifest:15", {"WINDOW": "4"}),
    (3, 0, "engine.batch:23", {"WINDOW": "4"}),
    (3, None, "engine.batch:17", {}),
    (3, 0, "storage.begun:8", {}),
    (3, 0, "storage.before_manifest:8", {}),
    (3, 2, "storage.before_done:8", {}),
    (3, 2, "engine.batch:17", {"DATA_PARALLEL": "fsdp"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "rank", "place", "options"), CELLS)
def test_training_with_states_in_memory_ends_in_the_same_bits(
    verify: Verify, num_workers: int, rank: int | None, place: str, options: dict[str, str]
) -> None:
    point, _, count = place.partition(":")
    options = {"PRECISION": "fp32", "LOADERS": "2"} | options
    fault = Fault("kill", point=point, count=int(count), rank=rank)
    with run_memory(is_wanted=True) as variables:
        outcome = verify(num_workers, fault, options, MEMORY="1", **variables)
    assert outcome.differences == ()
    assert outcome.diverged_at is None
    path = find_run(outcome.directory)
    assert path is not None
    stored, resumed = read_run_facts(path).attempts
    # The last state that was whole in memory, newer than the last stored checkpoint.
    assert stored.checkpoints[-1].steps_completed < resumed.start_step <= outcome.hit_step


# With windows of several batches, the last boundary is the beginning of the window.
SURVIVOR_CELLS = [
    (3, 0, 17, {}),
    (3, 2, 14, {"SCALER": "1", "LOADERS": "2"}),
    (3, 1, 23, {"WINDOW": "4"}),
    (3, 0, 17, {"DATA_PARALLEL": "overlapped", "PRECISION": "bf16"}),
    (2, 1, 15, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "rank", "count", "options"), SURVIVOR_CELLS)
def test_a_training_goes_on_from_the_state_of_a_survivor_in_the_same_bits(
    verify: Verify, num_workers: int, rank: int, count: int, options: dict[str, str]
) -> None:
    fault = Fault("kill", point="engine.batch", count=count, rank=rank)
    options = {"PRECISION": "fp32"} | options
    with run_memory(is_wanted=True) as variables:
        outcome = verify(num_workers, fault, options, SURVIVORS="1", **variables)
    assert outcome.differences == ()
    assert outcome.diverged_at is None
    path = find_run(outcome.directory)
    assert path is not None
    _, resumed = read_run_facts(path).attempts
    assert outcome.hit_step is not None
    # The last sum before the kill may have reached some ranks alone.
    assert outcome.hit_step - int(options.get("WINDOW", "1")) <= resumed.start_step
