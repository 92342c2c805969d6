"""Any number of workers up to that of shards trains on the same samples in each step."""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.pytorch import load_weights_from_checkpoint_path

# Each starts up to a dozen processes, which takes long beside other work.
pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent
NUM_STEPS, NUM_SHARDS = 50, 4


class Training:
    """One run, begun and gone on with by any numbers of workers."""

    def __init__(
        self,
        server: Any,
        directory: Path,
        window: int = 1,
        data_parallel: str = "flat",
        sharding: str = "",
    ) -> None:
        self._server = server
        self._directory = directory
        self._window = window
        self._data_parallel = data_parallel
        self._sharding = sharding
        (directory / "samples").mkdir(parents=True)

    def run(self, num_workers: int, preempt_at: int | None = None) -> "Training":
        """Train on, to the end or until some batch of this start."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        variables |= {"SAMPLES": str(self._directory / "samples"), "WINDOW": str(self._window)}
        variables |= {"PACELINE_RESUME": "auto", "OMP_NUM_THREADS": "1"}
        variables |= {"DATA_PARALLEL": self._data_parallel, "SHARDING": self._sharding}
        if preempt_at is not None:
            variables["PACELINE_FAULT"] = f"engine.batch:{preempt_at},signal=TERM"
        done = self._server.run(
            num_workers, HERE / "resize.py", directory=self._directory, environment=variables
        )
        assert done.returncode == 0, done.stdout
        return self

    def samples(self) -> dict[int, list[int]]:
        """Return the sorted samples of each optimizer step."""
        batches: dict[int, list[int]] = defaultdict(list)
        for path in (self._directory / "samples").iterdir():
            for line in path.read_text().splitlines():
                batch, *ids = map(int, line.split())
                batches[batch] += ids
        steps: dict[int, list[int]] = defaultdict(list)
        for batch, ids in batches.items():
            # A rank without a shard in a batch computes another's samples, which count nothing.
            steps[batch // self._window] += {*ids} if self._data_parallel == "fsdp" else ids
        return {step: sorted(ids) for step, ids in sorted(steps.items())}

    def ranks(self) -> set[str]:
        """Return which ranks have trained on anything."""
        paths = (self._directory / "samples").iterdir()
        return {path.stem for path in paths if path.read_text()}

    def parameters(self) -> torch.Tensor:
        """Return all parameters of the last checkpoint in one vector."""
        [run] = (self._directory / "paceline_runs").iterdir()
        last = max(
            (json.loads(path.read_text()) for path in run.glob("checkpoints/*/manifest.json")),
            key=lambda manifest: manifest["metadata"]["steps_completed"],
        )
        assert last["metadata"]["steps_completed"] == NUM_STEPS * self._window
        tensors = load_weights_from_checkpoint_path(run / "checkpoints" / last["uuid"])
        return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


def assert_agree(one: Training, other: Training, *, rtol: float = 1e-9, atol: float = 0.0) -> None:
    assert len(one.samples()) == NUM_STEPS
    assert one.samples() == other.samples()
    torch.testing.assert_close(one.parameters(), other.parameters(), rtol=rtol, atol=atol)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, torch_ranks: Any) -> Any:
    """Return a function that gives the training with one worker."""
    made: dict[int, Training] = {}

    def of_window(window: int) -> Training:
        if window not in made:
            made[window] = Training(torch_ranks, tmp_path_factory.mktemp("alone"), window).run(1)
        return made[window]

    return of_window


@pytest.mark.parametrize(
    ("num_workers", "window"),
    [
        # A quick one of three workers is in the last test.
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
    ],
)
def test_workers_agree_on_samples_and_parameters(
    alone: Any, torch_ranks: Any, tmp_path: Path, num_workers: int, window: int
) -> None:
    several = Training(torch_ranks, tmp_path / "several", window).run(num_workers)
    assert several.ranks() == {f"{rank}-of-{num_workers}" for rank in range(num_workers)}
    assert_agree(alone(window), several)


@pytest.mark.slow
def test_workers_beyond_the_shards_stay_idle(alone: Any, torch_ranks: Any, tmp_path: Path) -> None:
    several = Training(torch_ranks, tmp_path / "several").run(NUM_SHARDS + 1)
    assert several.ranks() == {f"{rank}-of-5" for rank in range(NUM_SHARDS)}
    assert_agree(alone(1), several)


@pytest.mark.slow
def test_training_goes_on_with_other_numbers_of_workers(
    alone: Any, torch_ranks: Any, tmp_path: Path
) -> None:
    resized = Training(torch_ranks, tmp_path / "resized")
    resized.run(4, preempt_at=12).run(2, preempt_at=19).run(3)
    expected = {f"{rank}-of-{size}" for size in (4, 2, 3) for rank in range(size)}
    assert resized.ranks() == expected
    assert_agree(alone(1), resized)


@pytest.mark.long
def test_other_numbers_of_workers_go_on_within_an_accumulated_step(
    alone: Any, torch_ranks: Any, tmp_path: Path
) -> None:
    resized = Training(torch_ranks, tmp_path / "resized", window=2)
    resized.run(3, preempt_at=13).run(2, preempt_at=18).run(3)
    assert resized.ranks() == {f"{rank}-of-{size}" for size in (3, 2) for rank in range(size)}
    assert_agree(alone(2), resized)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 2), (4, 3), (2, 4)])
def test_a_sharded_training_goes_on_with_another_number_of_workers(
    alone: Any, torch_ranks: Any, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    resized = Training(torch_ranks, tmp_path / "resized", data_parallel="fsdp")
    resized.run(sizes[0], preempt_at=17).run(sizes[1])
    assert resized.ranks() == {f"{rank}-of-{size}" for size in sizes for rank in range(size)}
    assert_agree(alone(1), resized)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["recomputed", "hybrid", "recomputed hybrid"])
@pytest.mark.parametrize(("num_workers", "window"), [(2, 1), (3, 1), (3, 2)])
def test_a_training_with_options_of_sharding_goes_on_with_another_number_of_workers(
    alone: Any, torch_ranks: Any, tmp_path: Path, sharding: str, num_workers: int, window: int
) -> None:
    resized = Training(torch_ranks, tmp_path / "resized", window, "fsdp", sharding)
    resized.run(4, preempt_at=17).run(num_workers)
    assert_agree(alone(window), resized)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_training_in_mixed_precision_goes_on_with_another_number_of_workers(
    torch_ranks: Any, tmp_path: Path, num_workers: int
) -> None:
    """Other ranks round other sums, so the parameters agree as far as bf16 goes."""
    straight = Training(torch_ranks, tmp_path / "straight", 1, "fsdp", "bf16").run(4)
    resized = Training(torch_ranks, tmp_path / "resized", 1, "fsdp", "bf16")
    resized.run(4, preempt_at=17).run(num_workers)
    assert_agree(straight, resized, rtol=0.02, atol=0.02)
