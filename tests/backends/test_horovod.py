"""Trainings whose gradients Horovod sums: exact resume, preemption, launchers."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BACKEND = "horovod"
pytestmark = [
    pytest.mark.skipif(
        find_spec("horovod") is None,
        reason="NOT TESTED: Horovod is not installed; see `make test-backends`",
    ),
    # A test may wait for two trainings.
    pytest.mark.timeout(900),
]

Check = Callable[[Any, Any, int], None]


@pytest.mark.parametrize(("num_ranks", "fault_rank"), [(2, 0), (2, 1), (3, 2)])
def test_a_training_goes_on_in_the_same_bits_after_a_killed_rank(
    train: Any, check_same: Check, num_ranks: int, fault_rank: int
) -> None:
    killed = train(num_ranks, SHARDS=num_ranks, FAULT_RANK=fault_rank)
    assert f"Rank {fault_rank} was ended by SIGKILL" in killed.output
    straight = train(num_ranks, SHARDS=num_ranks)
    assert "DONE reached max_length 8 HorovodSum" in straight.output
    check_same(straight, killed, num_ranks)


@pytest.mark.parametrize("fault_rank", [0, 1])
def test_a_preempted_training_goes_on_in_the_same_bits(
    train: Any, check_same: Check, tmp_path: Path, fault_rank: int
) -> None:
    preempted = train(2, at=tmp_path, SHARDS=2, FAULT="SIGTERM", FAULT_RANK=fault_rank)
    assert preempted.code == 0, preempted.output
    assert "DONE preempted" in preempted.output
    resumed = train(2, at=tmp_path, SHARDS=2, RESUME=preempted.run_directory)
    check_same(train(2, SHARDS=2), resumed, 2)


@pytest.mark.parametrize("options", [{"BACKEND": "flat"}, {"PLAIN": 1}])
def test_two_ranks_train_as_with_the_flat_reduction(
    train: Any, check_same: Check, options: dict[str, object]
) -> None:
    check_same(train(2, SHARDS=2), train(2, SHARDS=2, **options), 2)


def test_horovodrun_starts_the_same_training(train: Any, check_same: Check) -> None:
    run = str(Path(sys.executable).with_name("horovodrun"))
    started = train(2, launcher=(run, "--gloo", "-np", "2", sys.executable), SHARDS=2)
    check_same(train(2, SHARDS=2), started, 2)


def test_ranks_that_horovod_does_not_know_are_refused(train: Any) -> None:
    start = (sys.executable, "-m", "paceline.launch.torch_distributed", "--nproc-per-node", "2")
    outcome = train(2, launcher=start, SHARDS=2)
    assert outcome.code == 1
    assert "Horovod must know this process as rank 1 of 2, but knows it as rank 0 of 1" in (
        outcome.output
    )


def test_several_nodes_are_refused_by_the_launcher(train: Any) -> None:
    start = (sys.executable, "-m", "paceline.launch.horovod", "--nnodes", "2")
    outcome = train(2, launcher=(*start, "--master-addr", "127.0.0.1"))
    assert outcome.code == 2
    assert "`--nnodes` must be 1 with `paceline.launch.horovod`, but got 2" in outcome.output
