"""Writing a model as ONNX."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn


def require_onnx() -> None:
    """Refuse to go on without the packages that the export needs.

    Raises:
        ModuleNotFoundError: One is not installed.
    """
    for name in ("onnx", "onnxscript"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(
                f"`save_onnx` needs {name}, but it is not installed. Hint: pip install"
                " 'paceline[onnx]'"
            )


def export_onnx(model: nn.Module, inputs: Sequence[Any], path: Path) -> None:
    """Write a model, in the mode for inference.

    Args:
        model: The model.
        inputs: A batch of inputs, which tells shapes and types. The number of samples is left open
            unless the model depends on it.
        path: The file.
    """
    # Loading it takes long.
    from torch.export import Dim

    was_training = model.training
    model.eval()
    open_axes = [{0: Dim.AUTO} if isinstance(item, torch.Tensor) else None for item in inputs]
    try:
        with warnings.catch_warnings():
            # torch warns of what it does itself.
            warnings.simplefilter("ignore", FutureWarning)
            torch.onnx.export(
                model,
                tuple(inputs),
                path,
                dynamo=True,
                dynamic_shapes=tuple(open_axes),
                external_data=False,
                verbose=False,
            )
    finally:
        model.train(was_training)
