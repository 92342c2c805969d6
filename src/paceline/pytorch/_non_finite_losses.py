"""Losses that are not finite, and the layer where they began, found by a rerun of the batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.optimizer_stepper import Stepper
from paceline._training.engine.schedules import Position
from paceline._training.engine.weighted_means import WeightedMeans
from paceline.core._distributed_context import DistributedContext
from paceline.core._exceptions import NonFiniteError
from paceline.data._order_and_random_generators import isolated_randomness
from paceline.data._sharded_loader import ShardedData
from paceline.pytorch._loop_agreement import LoopHooks


class _OriginFound(Exception):
    """Internal signal to end the rerun of a batch."""


def check_losses(
    means: WeightedMeans,
    reduced: Mapping[str, float] | None,
    distributed: DistributedContext,
    hooks: LoopHooks,
    data: ShardedData,
    stepper: Stepper,
    position: Position,
) -> None:
    """Check the training losses since the last check for non-finite values; collective.

    Args:
        means: The training metrics.
        reduced: Their reduced values, if they were reduced just now.
        distributed: Where the ranks meet.
        hooks: The trainer on a shard.
        data: The data of training.
        stepper: The models.
        position: The present position.

    Raises:
        NonFiniteError: One was not, in a step that no gradient scaler has left out, or ten in a row
            were not; the message names the rank, the batch, and the layer if that can be found.
    """
    try:
        means.check_finite(reduced)
    except NonFiniteError as error:
        origin = None
        if error.rank == distributed.rank:
            origin = describe_origin(hooks, data, stepper, position, error.batch)
        # Origin is shared, so that every rank raises the same message.
        origin = distributed.allgather(origin)[error.rank]
        text = (
            f"{error} {origin} Hint: go on from the last checkpoint with a smaller learning rate or"
            " gradient clipping; stop_on_nan=False trains on."
        )
        raise NonFiniteError(text, rank=error.rank, batch=error.batch) from None


def describe_origin(
    hooks: LoopHooks, data: ShardedData, stepper: Stepper, position: Position, batch: int
) -> str:
    """Return in a sentence where a loss of this rank stopped being finite.

    The batch is run once more, as far as to its backward pass.

    Args:
        hooks: The trainer on a shard.
        data: The data of training.
        stepper: The models.
        position: The present position.
        batch: The global batch, which lies before it.
    """
    if stepper.is_divided:
        return "Its layer is not looked for, as ranks divide the model."
    try:
        shards = _shards_again(data, position, batch)
        if shards is None:
            return "The batch is not known any more, so its layer is not either."
        with isolated_randomness(batch), _finite_weights(stepper.models) as are_new:
            weights = " with new weights in place of those that are not finite now" * are_new
            for shard in shards:
                moved = hooks.to_device(shard)
                if not _is_finite(moved):
                    return "Samples of this batch are not finite themselves."
                if layer := _first_layer(hooks, moved, position, stepper.models):
                    return f"Run again{weights}, the first layer to return such values is {layer}."
    except Exception as error:
        # A failed search for the layer must not hide the error that it explains.
        return f"Its layer is not known, as the batch cannot be run again ({error!r})."
    return (
        f"Run again{weights}, all layers return finite values: the loss makes others of them,"
        " or weights had grown too large before."
    )


def _first_layer(
    hooks: LoopHooks, data: Any, position: Position, models: list[torch.nn.Module]
) -> str | None:
    try:
        with _stopping_at_origin(models):
            hooks.train_shard(data, position)
    except _OriginFound as found:
        return str(found) or None
    return None


@contextmanager
def _finite_weights(models: list[torch.nn.Module]) -> Iterator[bool]:
    """Give layers new weights for the block if theirs are not finite; return whether some are.

    By now, the steps since the batch have made most of them so.
    """
    broken = [
        module
        for model in models
        for module in plain_model(model).modules()
        if hasattr(module, "reset_parameters")
        and not all(map(_is_finite, module.parameters(recurse=False)))
    ]
    # Buffers too, as drawing new weights may reset them.
    tensors = [t for m in broken for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    before = [tensor.detach().clone() for tensor in tensors]
    for module in broken:
        draw: Any = module.reset_parameters
        draw()
    try:
        yield bool(broken)
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)


def _shards_again(data: ShardedData, position: Position, batch: int) -> Iterator[Any] | None:
    """Return this rank's shards of an earlier batch, or None if its place is unknown."""
    epoch, index = position.epochs, position.batch_in_epoch - (position.batches - batch)
    order = data.order(epoch)
    while index < 0 and epoch and order is not None:
        epoch, order = epoch - 1, data.order(epoch - 1)
        index += 0 if order is None else order.num_batches
    if order is None or index < 0:
        return None
    return islice(data.iterate(epoch, index), len(order.sizes(index, data.own_shards)))


@contextmanager
def _stopping_at_origin(models: list[torch.nn.Module]) -> Iterator[None]:
    """Stop at the first layer with a non-finite output, or at the backward pass."""

    def stop(*_: Any, **__: Any) -> None:
        raise _OriginFound

    named = [
        (f"model_{index}.{name}" if name else f"model_{index}", module)
        for index, model in enumerate(models)
        for name, module in plain_model(model).named_modules()
    ]
    hooks = [module.register_forward_hook(_looking_at(name)) for name, module in named]
    autograd: Any = torch.autograd
    backward, grad = autograd.backward, autograd.grad
    # Backward passes are replaced: the rerun must not change gradients or step optimizers.
    autograd.backward = autograd.grad = stop
    try:
        yield
    finally:
        autograd.backward, autograd.grad = backward, grad
        for hook in hooks:
            hook.remove()


def _looking_at(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if _is_finite(output):
            return
        raise _OriginFound(f"{name!r} ({type(module).__name__})")

    return look


def _is_finite(value: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    return all(
        bool(torch.isfinite(leaf).all())
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    )
