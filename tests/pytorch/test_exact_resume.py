"""A training that was killed or preempted ends in the same bits as one that was not."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

Train = Callable[..., tuple[str, str] | None]


@pytest.mark.parametrize(
    ("num_workers", "loaders", "window", "kill_at", "fault"),
    [
        (1, 0, 1, 44, signal.SIGKILL),
        (1, 2, 3, 44, signal.SIGTERM),
        (3, 2, 1, 20, signal.SIGKILL),
        pytest.param(3, 0, 3, 20, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(3, 0, 1, 20, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(1, 0, 3, 44, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(2, 2, 3, 25, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(4, 0, 1, 15, signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_interrupted_training_ends_in_the_same_bits_as_a_straight_one(
    train: Train,
    tmp_path: Path,
    num_workers: int,
    loaders: int,
    window: int,
    kill_at: int,
    fault: signal.Signals,
) -> None:
    options = {"LOADERS": loaders, "WINDOW": window}
    straight = train(num_workers, **options)
    assert straight is not None
    assert straight[0] == "reached max_length"
    shutil.rmtree(tmp_path / "paceline_runs")
    victim = num_workers - 1 if fault is signal.SIGKILL else 0
    first = train(num_workers, KILL_AT=kill_at, SIGNAL=int(fault), KILL_RANK=victim, **options)
    if fault is signal.SIGKILL:
        assert first is None
    else:
        assert first is not None
        assert first[0] == "preempted"
    assert train(num_workers, RUN="auto", **options) == straight
