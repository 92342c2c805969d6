"""Tensor-parallel models: the plan, as torch's `parallelize_module` takes it, and gradients."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import torch

from paceline.engine.parallel._data_parallel import DataParallel
from paceline.engine.parallel._rank_grid import RankGrid
from paceline.engine.tensors._sharded_tensors import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

logger = logging.getLogger(__name__)

TensorPlan: TypeAlias = Union[
    "Mapping[str, ParallelStyle]", "ParallelStyle", Callable[[torch.nn.Module, Any], Any], None
]
"""A plan of `parallelize_module`, or a function of a model and a `DeviceMesh` that divides it."""


def apply_plan(model: torch.nn.Module, plan: TensorPlan, grid: RankGrid) -> bool:
    """Divide a model by a plan, in place; tell whether it is divided now.

    All ranks call it. Without tensor-parallel groups, the model stays whole.

    Args:
        model: The model, not divided yet, or by the user over the mesh of the grid.
        plan: The plan.
        grid: The ranks.

    Raises:
        TypeError: `plan` is nothing of the kind.
        ValueError: The model is divided by the user over other ranks, or by both.
    """
    check_plan(plan)
    is_divided = grid.check_model(model)
    if grid.tensor_size == 1:
        return is_divided
    if is_divided and plan is not None:
        raise ValueError(
            "`tensor_plan` must be for a model that is not divided yet, but"
            f" {type(model).__name__} has DTensors. Hint: leave out `tensor_plan`, or"
            " `parallelize_module`."
        )
    before = list(model.parameters())
    if isinstance(plan, Mapping) or _is_style(plan):
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(model, grid.tensor_mesh, plan)  # type: ignore[arg-type]
    elif callable(plan):
        plan(model, grid.tensor_mesh)
    grid.note_replaced(before, model)
    is_divided = grid.check_model(model)
    if not is_divided and grid.rank == 0:
        logger.warning(
            "`tensor_parallel_size=%d` has no effect on %s, as nothing divides it: the ranks of a"
            " group do the same work. Hint: context.wrap_model(model, tensor_plan=plan).",
            grid.tensor_size,
            type(model).__name__,
        )
    return is_divided


def check_plan(plan: Any) -> None:
    """Check what a user gives as a plan.

    Raises:
        TypeError: It is no plan.
    """
    if plan is None or _is_style(plan) or (callable(plan) and not isinstance(plan, type)):
        return
    if isinstance(plan, Mapping) and all(
        isinstance(name, str) and _is_style(style) for name, style in plan.items()
    ):
        return
    raise TypeError(
        "`tensor_plan` must map names of modules to styles of torch.distributed.tensor.parallel, or"
        f" be a function of a model and a mesh, but got {plan!r}. Hint:"
        ' {"up": ColwiseParallel(), "down": RowwiseParallel()}.'
    )


def check_tensor_options(tensor_size: int, data_parallel: DataParallel) -> None:
    """Check that gradients are summed in a way that divided models have.

    Raises:
        ValueError: They are not.
    """
    if tensor_size > 1 and data_parallel not in (DataParallel.FLAT, DataParallel.FSDP):
        raise ValueError(
            '`data_parallel` must be "flat" or "fsdp" with `tensor_parallel_size`, but got'
            f" {data_parallel.value!r}."
        )


def place_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have the gradients of divided parameters divided as these are, where torch leaves sums open.

    All ranks of a tensor-parallel group call it.
    """
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None and is_sharded(gradient):
            placements = parameter.placements  # type: ignore[attr-defined]
            if gradient.placements != placements:
                parameter.grad = gradient.redistribute(placements=placements)


def _is_style(value: Any) -> bool:
    # Importing the class takes a second, for nothing where there is none.
    return any(kind.__name__ == "ParallelStyle" for kind in type(value).__mro__)
