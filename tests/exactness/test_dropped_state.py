"""The kit can fail: when any one item of the saved state is dropped, it finds a difference."""

from collections.abc import Callable

import pytest

from paceline.testing import Fault, FaultOutcome

# Each starts up to a dozen processes, which takes long beside other work.
pytestmark = pytest.mark.timeout(400)

WINDOW = {"WINDOW": "4"}
# As in the matrix, so that the straight run is there already.
LOADERS = {"LOADERS": "2", "PRECISION": "fp32"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("item", "num_workers", "options", "expected"),
    [
        ("torch of rank 1", 2, {}, "rank_1.safetensors: random.torch"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                ("optimizer", 1, LOADERS, "optimizer_0.safetensors: state.0.momentum_buffer"),
                ("model", 1, {}, "model_0.safetensors: 0.weight"),
                ("scheduler", 1, {}, "training.json: schedulers[0].last_epoch"),
                ("scaler", 1, {"SCALER": "1"}, "training.json: scaler.scale"),
                ("callback", 1, {}, "training.json: callbacks.count.num_epochs"),
                ("position", 1, {}, "model_0.safetensors: 0.weight"),
                ("order", 1, {}, "model_0.safetensors: 0.weight"),
                ("python", 1, {}, "rank_0.json: random.python[1]"),
                ("numpy", 1, {}, "rank_0.json: random.numpy["),
                ("torch", 1, {}, "rank_0.safetensors: random.torch"),
                ("buffers of rank 1", 2, {}, "rank_1.safetensors: buffers.0.1.running_mean"),
                ("means", 1, {}, "metrics.training: loss"),
                ("reducer", 1, {}, "metrics.training: sum"),
                ("gradients", 1, WINDOW, "model_0.safetensors: 0.weight"),
            ]
        ),
    ],
)
def test_dropped_item_is_found(
    verify: Callable[..., FaultOutcome],
    item: str,
    num_workers: int,
    options: dict[str, str],
    expected: str,
) -> None:
    """The checkpoint lies in the midst of an epoch, of a reporting period or of a window.

    A window of four begins at 12, so that with windows checkpoints come every five batches.
    """
    every = {"CHECKPOINT_EVERY": "5"} if options == WINDOW else {}
    fault = Fault("kill", step=19 if every else 16)
    options = {"PRECISION": "bf16", **options}
    # Only this one of the quick tests of exactness has the launcher.
    has_launcher = item == "torch of rank 1"
    outcome = verify(num_workers, fault, options, has_launcher=has_launcher, DROP=item, **every)
    assert outcome.diverged_at is None
    found = [str(difference) for difference in outcome.differences]
    assert any(one.startswith(expected) for one in found), found
