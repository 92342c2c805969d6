"""Writing a model as ONNX."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
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


def export_onnx(
    model: nn.Module, inputs: Sequence[Any], path: Path, names: Sequence[str] | None = None
) -> None:
    """Write a model, in the mode for inference.

    Args:
        model: The model.
        inputs: A batch of inputs, which tells shapes and types. The number of samples is left open
            unless the model depends on it.
        path: The file.
        names: The names of what the model returns, in order; torch's by default. What it returns by
            name keeps that.
    """
    # Loading it takes long.
    from torch.export import Dim

    was_training = model.training
    model.eval()
    with torch.no_grad():
        returned = model(*inputs)
    output_names = list(returned) if isinstance(returned, Mapping) else names
    # A name stands for one tensor of the graph: weights keep theirs, inputs give way.
    if model.state_dict().keys() & set(output_names or ()):
        output_names = None
    parameters = [*inspect.signature(model.forward).parameters][: len(inputs)]
    taken = set(parameters) & set(output_names or ())
    input_names = [f"{name}_input" if name in taken else name for name in parameters]
    open_axes = [{0: Dim.AUTO} if isinstance(item, torch.Tensor) else None for item in inputs]
    try:
        with warnings.catch_warnings():
            # torch warns of what it does itself.
            warnings.simplefilter("ignore", FutureWarning)
            torch.onnx.export(
                model,
                tuple(inputs),
                path,
                input_names=input_names if taken else None,
                output_names=output_names,
                dynamo=True,
                dynamic_shapes=tuple(open_axes),
                external_data=False,
                verbose=False,
            )
    finally:
        model.train(was_training)
