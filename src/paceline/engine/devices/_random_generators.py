"""Random number generators: seeded together, captured and put back."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline._seeds import mix_seed

_NUMPY_SEED_LIMIT = 2**32


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch (all devices); ranks draw different numbers."""
    mixed = mix_seed(seed, rank) if rank else seed
    random.seed(mixed)
    _seed_torch(mixed)
    if "numpy" in sys.modules or _has_numpy():
        import numpy

        numpy.random.seed(mixed % _NUMPY_SEED_LIMIT)


def _seed_torch(seed: int) -> None:
    if torch.accelerator.current_accelerator() is None:
        # `manual_seed` keeps a stack for each kind of device, in case that one is used later.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def capture_random_state() -> dict[str, Any]:
    """Return the state of all generators of this process: tensors, lists and numbers."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state(),
    }
    if _has_numpy():
        import numpy

        legacy: Any = numpy.random.get_state(legacy=True)
        kind, keys, position, has_gauss, cached = legacy
        state["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    # Where nothing has used a GPU so far, asking for its state would take memory of it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        state["cuda"] = torch.cuda.get_rng_state()
        if others := _other_devices():
            state["cuda_others"] = [torch.cuda.get_rng_state(device) for device in others]
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put back what `capture_random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and _has_numpy():
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state(
            (kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached)
        )
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    if "cuda" in state and is_used:
        torch.cuda.set_rng_state(state["cuda"])
        for device, own in zip(_other_devices(), state.get("cuda_others", ()), strict=False):
            torch.cuda.set_rng_state(own, device)


@contextmanager
def isolated_randomness(seed: int) -> Iterator[None]:
    """Run a block with seeded generators and put the present ones back afterwards."""
    saved = capture_random_state()
    seed_everything(seed)
    try:
        yield
    finally:
        restore_random_state(saved)


class IteratorWithGenerators:
    """Draw items from an iterator that has generators of its own.

    Args:
        source: The iterator.
        seed: The seed of its generators.

    Attributes:
        state: The generators' state before the next item, as `capture_random_state` returns it.
    """

    def __init__(self, source: Iterator[Any], seed: int) -> None:
        self._source = source
        with isolated_randomness(seed):
            self.state: dict[str, Any] | None = capture_random_state()

    def __iter__(self) -> "IteratorWithGenerators":
        return self

    def __next__(self) -> Any:
        outside = capture_random_state()
        if self.state is not None:
            restore_random_state(self.state)
        try:
            return next(self._source)
        finally:
            self.state = capture_random_state()
            restore_random_state(outside)


def _other_devices() -> list[int]:
    """Return the GPUs that this process sees besides its own; one process may use several."""
    own = torch.cuda.current_device()
    return [device for device in range(torch.cuda.device_count()) if device != own]


def _has_numpy() -> bool:
    try:
        import numpy  # noqa: F401  # only whether it is there
    except ImportError:
        return False
    return True
