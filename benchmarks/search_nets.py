"""Train the small networks whose validation losses `make bench-search` looks up.

Usage: python benchmarks/search_nets.py [FILE]. Every combination of `AXES` is trained on three sets
of scikit-learn, less than a minute on one core. The table is `search_nets.npz`, float16.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

TABLE = Path(__file__).with_name("search_nets.npz")
EPOCHS = 30
# The axes of the table in their order, after that of the sets.
AXES: dict[str, tuple[float, ...]] = {
    "width": (8, 48),
    "depth": (1, 2),
    "batch_size": (32, 128),
    "lr": tuple(float(f"{10 ** (-3.5 + index * 0.4):.3g}") for index in range(10)),
    "momentum": (0.0, 0.9),
    "decay": (1e-5, 1e-2),
}
SHAPES, TOGETHER = ("width", "depth", "batch_size"), ("lr", "momentum", "decay")
SETS = ("digits", "cancer", "noisy digits")
# A loss beyond it counts as it: diverged networks differ in nothing that matters.
WORST = 10.0


def rows_of(name: str) -> tuple[torch.Tensor, ...]:
    """Return inputs and labels to train with, then those to validate with."""
    import torch
    from sklearn.datasets import load_breast_cancer, load_digits

    loaded = load_breast_cancer() if name == "cancer" else load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(loaded.target))
    x, y = loaded.data[order], loaded.target[order]
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    num = {"digits": 500, "cancer": 300, "noisy digits": 500}[name]
    if name == "noisy digits":
        wrong = rng.random(num) < 0.3
        y[:num][wrong] = rng.integers(0, 10, wrong.sum())
    inputs, labels = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    return inputs[:num], labels[:num], inputs[num : 2 * num], labels[num : 2 * num]


def train(
    rows: tuple[torch.Tensor, ...], width: int, depth: int, batch_size: int, *, num_nets: int = 0
) -> NDArray[np.float64]:
    """Train the networks of one shape side by side; return losses by network and epoch."""
    import torch

    torch.manual_seed(width * 1000 + depth * 100 + batch_size)
    combined = torch.tensor(list(itertools.product(*(AXES[name] for name in TOGETHER))))
    lr, momentum, decay = combined[: num_nets or None].float().T
    x, y, x_val, y_val = rows
    sizes = [x.shape[1], *[width] * depth, int(y.max()) + 1]
    weights = []
    for ins, outs in itertools.pairwise(sizes):
        first = torch.randn(ins, outs) * (2 / ins) ** 0.5
        weights += [first.repeat(len(lr), 1, 1), torch.zeros(len(lr), 1, outs)]
    for weight in weights:
        weight.requires_grad_()
    speeds = [torch.zeros_like(weight) for weight in weights]

    def losses(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = inputs.expand(len(lr), -1, -1)
        for index in range(0, len(weights), 2):
            hidden = torch.baddbmm(weights[index + 1], hidden, weights[index])
            if index + 2 < len(weights):
                hidden = hidden.relu()
        logs = hidden.log_softmax(-1)
        return -logs[:, torch.arange(len(labels)), labels].mean(1)

    curves = []
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(y)).split(batch_size):
            gradients = torch.autograd.grad(losses(x[chosen], y[chosen]).sum(), weights)
            with torch.no_grad():
                for weight, speed, gradient in zip(weights, speeds, gradients, strict=True):
                    shape = (-1, 1, 1)
                    speed.mul_(momentum.view(shape)).add_(gradient + decay.view(shape) * weight)
                    weight.sub_(lr.view(shape) * speed)
        with torch.no_grad():
            found = losses(x_val, y_val)
        curves.append(torch.nan_to_num(found, WORST, WORST).clamp(max=WORST))
    return torch.stack(curves, 1).double().numpy()


def main() -> None:
    """Train all networks, and measure the time of an epoch of one network of each shape."""
    import torch

    torch.set_num_threads(1)
    losses, seconds = [], []
    for name in SETS:
        rows = rows_of(name)
        for shape in itertools.product(*(map(int, AXES[name]) for name in SHAPES)):
            losses.append(train(rows, *shape))
            begun = time.process_time()
            train(rows, *shape, num_nets=1)
            seconds.append((time.process_time() - begun) / EPOCHS)
            print(name, shape, f"{time.process_time():.0f} s", file=sys.stderr, flush=True)
    lengths = [len(values) for values in AXES.values()]
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TABLE
    np.savez_compressed(
        path,
        losses=np.array(losses, np.float16).reshape(len(SETS), *lengths, EPOCHS),
        seconds=np.array(seconds, np.float32).reshape(len(SETS), *lengths[: len(SHAPES)]),
    )


if __name__ == "__main__":
    main()
