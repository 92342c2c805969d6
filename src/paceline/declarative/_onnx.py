"""Writing a model as ONNX."""

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
                f"`save_onnx` needs {name}, but it is not installed. Hint: pip install onnx"
                " onnxscript"
            )


def export_onnx(model: nn.Module, inputs: Sequence[Any], path: Path) -> None:
    """Write a model, in the mode for inference.

    Args:
        model: The model.
        inputs: A batch of inputs, which tells shapes and types.
        path: The file.
    """
    was_training = model.training
    model.eval()
    try:
        torch.onnx.export(model, tuple(inputs), path, dynamo=True, verbose=False)
    finally:
        model.train(was_training)
