"""Functions that prepare data, models and optimizers in a train function.

Importing this loads no torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from paceline.engine import DataParallel, PreparedLoader, ShardUnits

from paceline.train._train_functions import session_of_call


def prepare_data_loader(loader: Any, *, move_to_device: bool = True) -> "PreparedLoader":
    """Return a clone of a data loader that yields this worker's part, on its device.

    The loader's batch size is that of one worker. Every option is kept; with `shuffle=True` each
    epoch has an order of its own that depends on the run's seed alone.

    Args:
        loader: A torch `DataLoader`. An iterable data set must be the same on all ranks.
        move_to_device: Whether batches are moved to this worker's device.

    Raises:
        TypeError: `loader` is no torch `DataLoader`.
        ValueError: It has no samples, or fewer than there are workers.
    """
    return session_of_call().prepare_loader(loader, is_moved=move_to_device)


def prepare_model(
    model: "torch.nn.Module",
    *,
    move_to_device: bool = True,
    data_parallel: "str | DataParallel" = "flat",
    shard_units: "ShardUnits" = None,
    shard_precision: "MixedPrecisionPolicy | None" = None,
    shard_size: int | None = None,
) -> "torch.nn.Module":
    """Return a model on this worker's device that is the same on all ranks and trained by all.

    After each backward pass its gradients are averaged over the samples of all ranks, so that
    clipping and the optimizer's step need no change. A model that is wrapped in
    `DistributedDataParallel` already is left to that.

    Args:
        model: The model.
        move_to_device: Whether it is moved to this worker's device.
        data_parallel: How gradients are summed over the ranks: "flat", in one buffer after the
            backward pass; "overlapped", in buckets during it; "fsdp" divides the model among the
            ranks as well. Make the optimizer of what this returns.
        shard_units: With "fsdp", which modules are gathered as a whole: a class or a tuple of
            them, a least number of parameters, or a function of a module. By default the members
            of the outermost sequences.
        shard_precision: With "fsdp", the types in which parameters are gathered and gradients are
            summed, as torch's `MixedPrecisionPolicy`.
        shard_size: With "fsdp", the number of ranks that hold one copy of the model together, which
            must divide the number of ranks. By default all of them.

    Returns:
        The same object, or with "overlapped" a wrapper.

    Raises:
        TypeError: The model is no module, or an option is of another type.
        ValueError: `data_parallel` is unknown, or an option is given without "fsdp" or does not
            suit the model.
        NotOfferedError: The model has DTensors, or is on the meta device.
    """
    from paceline.engine import DataParallel, prepare_model

    return prepare_model(
        session_of_call(begins=True),
        model,
        is_moved=move_to_device,
        data_parallel=DataParallel.of(data_parallel),
        shard_units=shard_units,
        shard_precision=shard_precision,
        shard_size=shard_size,
    )


def prepare_optimizer(optimizer: Any) -> Any:
    """Return an optimizer whose gradients are averaged over all samples, and which scales losses.

    It is the same object. Parameters that belong to no prepared model are averaged from now on as
    well; within an accumulated step, `step` and `zero_grad` wait for its last batch.

    Raises:
        TypeError: It is no torch optimizer.
        ValueError: A model is divided among the ranks, and the optimizer was made before.
    """
    from paceline.engine import prepare_optimizer

    return prepare_optimizer(session_of_call(), optimizer)


def backward(loss: "torch.Tensor", **options: Any) -> None:
    """Run the backward pass of a loss, scaled if the precision needs it.

    Args:
        loss: The mean loss of a batch, a 0-d tensor.
        options: What `torch.Tensor.backward` takes.
    """
    session_of_call().steps.backward(loss, options)


def accelerate(
    model: Any,
    loss: Any = None,
    optimizer: Any = None,
    *,
    mixed_precision: bool | str | None = None,
    precision: str | None = None,
    strategy: str = "auto",
    data_parallel: "str | DataParallel | None" = None,
    shard_units: "ShardUnits" = None,
    shard_precision: "MixedPrecisionPolicy | None" = None,
    shard_size: int | None = None,
    compile: bool | Mapping[str, Any] = False,
    gradient_checkpointing: bool = False,
    gradient_accumulation: int = 1,
) -> Any:
    """Prepare a model, and the optimizer if it is given, with what speeds training up.

    Parameters and optimizers keep their number format. With "fp16" losses must go through
    `train.backward(loss)`, as they are scaled.

    Args:
        model: The model; the first three arguments are told apart by their types.
        loss: The loss function; a module is moved to the device.
        optimizer: The optimizer of the model.
        mixed_precision: Whether the forward pass computes in 16 bits: True for what suits the
            device, or "bf16" or "fp16".
        precision: The same by one name: "fp32", "bf16" or "fp16".
        strategy: The same as `data_parallel`, where "ddp" is "overlapped". "auto" is "flat".
        data_parallel: How gradients are summed: "flat", in one buffer after the backward pass;
            "overlapped", in buckets during it, which suits GPUs; "fsdp" divides the model among
            the ranks as well.
        shard_units: With "fsdp", which modules are gathered as a whole, see `prepare_model`, as for
            `shard_precision` and `shard_size`.
        compile: Whether the model is compiled, or the options of `torch.compile`.
        gradient_checkpointing: Whether blocks are computed again in the backward pass instead of
            kept in memory: by the model's own method if it has one, else for the members of its
            outermost sequences.
        gradient_accumulation: The batches of a step of the optimizer, which must be given or
            prepared. An epoch's last step may have fewer.

    Returns:
        The model to call, or model and optimizer if that is given.

    Raises:
        TypeError: An argument is no model, loss or optimizer.
        ValueError: A value is unknown, or values contradict each other.
    """
    from paceline.engine import accelerate

    return accelerate(
        session_of_call(begins=True),
        (model, loss, optimizer),
        mixed_precision=mixed_precision,
        precision=precision,
        strategy=strategy,
        data_parallel=data_parallel,
        shard_options={
            "shard_units": shard_units,
            "shard_precision": shard_precision,
            "shard_size": shard_size,
        },
        compile_options=compile,
        is_checkpointing=gradient_checkpointing,
        num_accumulated=gradient_accumulation,
    )


def full_state_dict(source: Any) -> Any:
    """Return the state of a model or an optimizer with whole tensors, on the CPU.

    All ranks call it together. It needs memory for the whole state on each rank.

    Args:
        source: A model, an optimizer, or anything else with a `state_dict()`; or a nested state.
    """
    from paceline.engine import full_state_dict

    return full_state_dict(source)


def enable_reproducibility(seed: int = 0) -> None:
    """Seed all generators and the order of data, and choose deterministic operations.

    Ranks draw different numbers. Call it first in the train function.

    Args:
        seed: The seed.
    """
    from paceline.engine import enable_reproducibility

    enable_reproducibility(session_of_call(), seed)
