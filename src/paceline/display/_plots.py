"""Pictures of a training's history."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def _figure_of_history(num_rows: int) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Plots need matplotlib, but it is not installed. Hint: pip install 'paceline[plot]'"
        ) from error
    # Without pyplot there is no window and no state that other figures share.
    figure = Figure(figsize=(8, 3 * num_rows), layout="constrained")
    return figure, list(figure.subplots(num_rows, squeeze=False)[:, 0])


def plot_history(
    path: Path, rows: Sequence[tuple[str, Mapping[str, Sequence[float]]]], x_label: str
) -> None:
    """Draw curves below each other into a PNG file.

    Args:
        path: The file.
        rows: The label of each picture's axis, and its curves by name.
        x_label: The label of the common axis.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure, axes = _figure_of_history(len(rows))
    for axis, (label, curves) in zip(axes, rows, strict=True):
        for name, values in curves.items():
            if len(values):
                axis.plot(range(len(values)), values, label=name, marker="." * (len(values) < 100))
        axis.set_ylabel(label)
        axis.grid(visible=True)
        if axis.lines:
            axis.legend()
    axes[-1].set_xlabel(x_label)
    figure.savefig(path)
