"""A training that was killed ends in the same bits, whatever it computes in."""

import sys
from pathlib import Path

import pytest
import torch

from paceline.data._order_and_random_generators import capture_random_state, restore_random_state
from paceline.testing import Fault, verify_resume

pytestmark = pytest.mark.timeout(400)

ON_GPU_ALONE = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT RUN: needs a GPU, as tests/exactness shows the rest"
)


@pytest.mark.parametrize(
    ("precision", "is_compiled"),
    [
        pytest.param("fp32", False, marks=ON_GPU_ALONE, id="fp32"),
        pytest.param("bf16", False, marks=ON_GPU_ALONE, id="bf16"),
        pytest.param("fp16", False, id="fp16"),
        pytest.param("bf16", True, marks=ON_GPU_ALONE, id="bf16, compiled"),
    ],
)
def test_a_killed_training_ends_in_the_same_bits(
    precision: str, is_compiled: bool, tmp_path: Path
) -> None:
    """Two models and optimizers, a scaler in fp16, dropout, and loader workers that augment."""
    script = Path(__file__).with_name("train.py")
    compiled = {"COMPILED": "1"} if is_compiled else {}
    verdict = verify_resume(
        [sys.executable, str(script)],
        faults=[Fault("kill", step=13)],
        environment={"PRECISION": precision, "OMP_NUM_THREADS": "1", **compiled},
        directory=tmp_path,
        timeout_s=120,
    )
    (outcome,) = verdict.outcomes
    assert outcome.differences == ()
    assert outcome.diverged_at is None
    assert outcome.replayed_steps >= 2
    assert verdict.operations == ()


def test_the_generators_of_the_device_are_put_back(device: torch.device) -> None:
    torch.manual_seed(3)
    torch.rand(5, device=device)
    state = capture_random_state()
    drawn = torch.rand(5, device=device)
    torch.manual_seed(4)
    restore_random_state(state)
    assert torch.equal(torch.rand(5, device=device), drawn)
    assert ("cuda" in state) == (device.type == "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NOT RUN: needs two GPUs")
def test_the_generators_of_all_devices_are_put_back() -> None:
    """One process may use several, as `DataParallel` does."""
    torch.manual_seed(3)
    state = capture_random_state()
    drawn = [torch.rand(5, device=f"cuda:{index}").cpu() for index in (0, 1)]
    torch.manual_seed(4)
    restore_random_state(state)
    again = [torch.rand(5, device=f"cuda:{index}").cpu() for index in (0, 1)]
    assert all(map(torch.equal, drawn, again))
