"""Whatever interrupts a training, with whatever workers, it ends in the same bits."""

from collections.abc import Callable, Collection
from itertools import product

import pytest

from paceline.testing import Fault, FaultOutcome
from paceline.testing._verify_resume import MIN_REPLAYED_STEPS

# Each starts up to a dozen processes, which takes long beside other work.
pytestmark = pytest.mark.timeout(400)

WORKERS = (1, 2, 3, 4)
PRECISIONS = ("fp32", "bf16")
FAULTS = (
    "kill",
    "preempt",
    "mid-accumulation",
    "epoch edge",
    "during validation",
    "during a checkpoint",
)

# They hold both precisions, and every fault with workers whose sums do not commute; one and two
# workers have their own tests, such as those of `tests/pytorch`. Few workers and few loader
# processes keep them cheap.
QUICK = {
    (3, "fp32", "kill"),
    (3, "bf16", "mid-accumulation"),
    (3, "bf16", "epoch edge"),
    (3, "bf16", "during validation"),
    (3, "bf16", "during a checkpoint"),
    (4, "bf16", "preempt"),
}

Verify = Callable[..., FaultOutcome]


def fault_of(name: str, num_workers: int) -> tuple[Fault, dict[str, str], dict[str, str]]:
    """Return a fault, and the variables of all runs and of the interrupted one.

    There are 27 batches in epochs of 9. Checkpoints come every 6 batches, or every 5 where 18,
    the edge of an epoch, or 20, the edge of a window, must not have one.
    """
    every_five = {"CHECKPOINT_EVERY": "5"}
    if name == "kill":
        return Fault("kill", step=16), {}, {}
    if name == "preempt":
        return Fault("preempt", step=14), {}, {}
    if name == "mid-accumulation":
        # Windows of four: the checkpoints at 10 and 15 and the kill are all in the midst of one.
        return Fault("kill", step=19), {"WINDOW": "4"}, every_five
    if name == "epoch edge":
        # The kill comes at the edge, or training is resumed from a checkpoint there.
        at_edge = num_workers % 2 == 1
        return Fault("kill", step=18 if at_edge else 22), {}, every_five if at_edge else {}
    if name == "during validation":
        # Each rank has two batches in a validation; this is the second one's second.
        return Fault("kill", point="engine.validation", count=4), {}, {}
    return Fault("kill", point="storage.before_manifest", count=3), {}, {}


def cells(quick: Collection[tuple[int, str, str]]) -> pytest.MarkDecorator:
    """Return a parametrization by all combinations, which are slow but for the quick ones."""
    return pytest.mark.parametrize(
        ("num_workers", "precision", "fault_name"),
        [
            pytest.param(*cell, marks=[] if cell in quick else pytest.mark.slow)
            for cell in product(WORKERS, PRECISIONS, FAULTS)
        ],
    )


@cells(QUICK)
def test_interrupted_training_ends_in_the_same_bits(
    verify: Verify, num_workers: int, precision: str, fault_name: str
) -> None:
    cell = (num_workers, precision, fault_name)
    # A quick one with the launcher is in test_dropped_state.py.
    check_cell(verify, *cell, {}, has_launcher=cell not in QUICK)


# A quick one is in tests/pytorch/test_sharding.py.
@cells(())
def test_interrupted_training_of_a_sharded_model_ends_in_the_same_bits(
    verify: Verify, num_workers: int, precision: str, fault_name: str
) -> None:
    check_cell(verify, num_workers, precision, fault_name, {"DATA_PARALLEL": "fsdp"})


# What a sharded model can have besides, each with a kill of either end of the ranks.
@pytest.mark.parametrize(
    ("sharding", "num_workers", "rank"),
    [
        pytest.param("adapters bf16 recomputed meta", 3, 2, marks=pytest.mark.slow),
        *(
            pytest.param(sharding, 4 if sharding == "hybrid" else 3, rank, marks=pytest.mark.slow)
            for sharding in ("adapters", "bf16", "recomputed", "compiled", "meta", "hybrid")
            for rank in (0, 2)
        ),
        pytest.param("adapters bf16 recomputed meta hybrid", 4, 0, marks=pytest.mark.slow),
        pytest.param("recomputed compiled bf16", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_interrupted_training_with_options_of_sharding_ends_in_the_same_bits(
    verify: Verify, sharding: str, num_workers: int, rank: int
) -> None:
    options = {"DATA_PARALLEL": "fsdp", "SHARDING": sharding, "WINDOW": "4"}
    fault = Fault("kill", step=19, rank=rank)
    outcome = verify(num_workers, fault, options, CHECKPOINT_EVERY="5")
    assert outcome.differences == ()
    assert outcome.diverged_at is None
    assert outcome.replayed_steps >= MIN_REPLAYED_STEPS
    assert outcome.resumed_from % 4


def check_cell(
    verify: Verify,
    num_workers: int,
    precision: str,
    fault_name: str,
    options: dict[str, str],
    has_launcher: bool = True,
) -> None:
    fault, own_options, others = fault_of(fault_name, num_workers)
    options = {"PRECISION": precision, **options, **own_options}
    # Augmentation in loader processes and in the process itself resume in different ways.
    loaders = {"LOADERS": "2"} if precision == "fp32" else {}
    outcome = verify(
        num_workers, fault, {**loaders, **options}, has_launcher=has_launcher, **others
    )
    assert outcome.differences == ()
    assert outcome.diverged_at is None
    if fault.kind == "kill":
        assert outcome.replayed_steps >= MIN_REPLAYED_STEPS
    else:
        assert outcome.resumed_from >= outcome.hit_step
    if fault_name == "mid-accumulation":
        assert outcome.resumed_from % 4
        assert outcome.hit_step % 4


def test_quick_cells_hold_both_precisions_and_every_fault_of_three_workers_or_more() -> None:
    assert {precision for _, precision, _ in QUICK} == set(PRECISIONS)
    assert {fault for num_workers, _, fault in QUICK if num_workers >= 3} == set(FAULTS)
    assert len(QUICK) == len(FAULTS)
