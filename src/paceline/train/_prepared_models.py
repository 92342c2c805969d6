"""`accelerate`: performance options for model, loss and optimizer in a single call."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline._base.arguments_and_errors import check_count, one_of
from paceline._training.engine.checkpoints.sharded_tensor_pieces import gathered
from paceline._training.engine.fsdp_and_tensor_parallel import (
    ShardUnits,
    check_shard_size,
    check_whole,
    shard_units_of,
)
from paceline._training.engine.gradient_reduction import DataParallel
from paceline._training.engine.model_preparation import (
    check_shard_precision,
    checkpoint_blocks,
    compile_model,
)
from paceline._training.engine.precision import Precision, compute_in
from paceline._training.engine.verify_steps import StepReplay, check_replay
from paceline.core._exceptions import NotOfferedError
from paceline.data._order_and_random_generators import seed_everything
from paceline.train._rank_checkpoints import packed_without_pickle
from paceline.train._rank_session import LooseSession

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

T = TypeVar("T")


def prepare_model(
    session: LooseSession,
    model: torch.nn.Module,
    *,
    is_moved: bool = True,
    data_parallel: DataParallel = DataParallel.FLAT,
    shard_units: ShardUnits = None,
    shard_precision: "MixedPrecisionPolicy | None" = None,
    shard_size: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> torch.nn.Module:
    """Return a model prepared for training on all ranks; see `train.prepare_model`.

    Args:
        session: The run.
        model: The model.
        is_moved: Whether it is moved to the worker's device.
        data_parallel: How gradients are summed over the ranks.
        shard_units: With FSDP, which modules are gathered as a whole.
        shard_precision: With FSDP, the types of gathered parameters and of sums of gradients.
        shard_size: With FSDP, the number of ranks that hold one copy of a model; None for all.
        optimizer: With FSDP, an optimizer that was made of the model's parameters before.

    Raises:
        TypeError: It is no module, or an option is of another type.
        ValueError: An option of FSDP is given without it, or does not suit the model; or the model
            is divided already.
    """
    given = {"shard_units": shard_units, "shard_precision": shard_precision}
    for name, value in given.items() if data_parallel is not DataParallel.FSDP else ():
        if value is not None:
            raise ValueError(
                f'`{name}` must be None without `data_parallel="fsdp"`, but got {value!r}.'
            )
    check_shard_size(shard_size, data_parallel)
    check_shard_precision(
        shard_precision, has_autocast=session.steps.precision is not Precision.FP32
    )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"A model must be a torch.nn.Module, but got {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        # Such a model sums its gradients by itself.
        return model
    check_whole(model)
    if is_moved:
        model.to(session.device)
    if data_parallel is DataParallel.OVERLAPPED:
        return session.gradients.overlap(model)
    if data_parallel is DataParallel.FSDP:
        optimizers = () if optimizer is None else (optimizer,)
        session.gradients.shard(
            model, shard_units, optimizers, precision=shard_precision, shard_size=shard_size
        )
    else:
        session.gradients.add_model(model)
    return model


def prepare_optimizer(session: LooseSession, optimizer: Any) -> torch.optim.Optimizer:
    """Return an optimizer waiting for complete gradients; see `train.prepare_optimizer`.

    Raises:
        TypeError: It is no torch optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"An optimizer must be a torch.optim.Optimizer, but got {type(optimizer).__name__}."
        )
    session.steps.prepare(optimizer)
    return optimizer


def full_state_dict(source: Any) -> Any:
    """Return a state with whole tensors; see `train.full_state_dict`."""
    return gathered(packed_without_pickle(source, allow_pickle=False))


def enable_reproducibility(session: LooseSession, seed: int) -> None:
    """Seed everything and choose deterministic operations; see `train.enable_reproducibility`."""
    session.seed, session.is_seed_given = seed, True
    seed_everything(seed, session.rank_info.rank)
    # cuBLAS is deterministic only with a work space of fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    # Unlike `use_deterministic_algorithms` this does not load torch's compiler.
    torch.set_deterministic_debug_mode("error")


_STRATEGIES = {
    "auto": DataParallel.FLAT,
    "ddp": DataParallel.OVERLAPPED,
    "flat": DataParallel.FLAT,
    "fsdp": DataParallel.FSDP,
}


def accelerate(
    session: LooseSession,
    parts: Sequence[Any],
    *,
    mixed_precision: bool | str | None,
    precision: str | None,
    strategy: str,
    data_parallel: str | DataParallel | None,
    shard_options: Mapping[str, Any],
    compile_options: bool | Mapping[str, Any],
    is_checkpointing: bool,
    num_accumulated: int,
) -> Any:
    """Prepare model, loss and optimizer; see `train.accelerate`."""
    model, loss, optimizer = _sorted_out(parts)
    chosen = _chosen_precision(mixed_precision, precision, session.device)
    parallel = _chosen_data_parallel(strategy, data_parallel)
    _check_combination(parallel, chosen, num_accumulated)
    if num_accumulated > 1:
        session.gradients.accumulate(num_accumulated)
    if chosen is not Precision.FP32:
        session.steps.use_precision(chosen)
        compute_in(model, chosen, session.device)
    if is_checkpointing:
        checkpoint_blocks(model)
    if compile_options:
        is_sharded, units = parallel is DataParallel.FSDP, shard_options["shard_units"]
        compile_model(model, compile_options, shard_units_of(model, units) if is_sharded else ())
    if isinstance(loss, torch.nn.Module):
        loss.to(session.device)
    model = prepare_model(
        session, model, data_parallel=parallel, optimizer=optimizer, **shard_options
    )
    return model if optimizer is None else (model, prepare_optimizer(session, optimizer))


def _sorted_out(parts: Sequence[Any]) -> tuple[torch.nn.Module, Any, Any]:
    """Return model, loss and optimizer, whatever their order."""
    given = [part for part in parts if part is not None]
    optimizers = [part for part in given if isinstance(part, torch.optim.Optimizer)]
    others = [part for part in given if not isinstance(part, torch.optim.Optimizer)]
    modules = [part for part in others if isinstance(part, torch.nn.Module)]
    losses = [part for part in others if not isinstance(part, torch.nn.Module)]
    # A loss may be a module too; it is the one without parameters, else the one that comes later.
    models = [part for part in modules if any(True for _ in part.parameters())] or modules
    losses += [part for part in modules if part is not models[0]]
    is_clear = models and len(optimizers) <= 1 and len(losses) <= 1 and all(map(callable, losses))
    if not is_clear:
        kinds = ", ".join(type(part).__name__ for part in given)
        raise TypeError(
            "`accelerate` must be given one model, and at most one loss function and one optimizer,"
            f" but got {kinds}."
        )
    return models[0], next(iter(losses), None), next(iter(optimizers), None)


def _chosen_precision(
    mixed_precision: bool | str | None, precision: str | None, device: torch.device
) -> Precision:
    if isinstance(mixed_precision, str):
        mixed = Precision.of(mixed_precision)
    elif mixed_precision:
        # Older GPUs have no fast bfloat16.
        is_half = device.type == "cuda" and not torch.cuda.is_bf16_supported()
        mixed = Precision.FP16 if is_half else Precision.BF16
    else:
        mixed = Precision.FP32
    if precision is None:
        return mixed
    chosen = Precision.of(precision)
    if mixed_precision is not None and (mixed is Precision.FP32) != (chosen is Precision.FP32):
        raise ValueError(
            f"`precision` and `mixed_precision` must agree, but got {precision!r} and"
            f" {mixed_precision!r}. Hint: give one of them."
        )
    return chosen


def _chosen_data_parallel(strategy: str, data_parallel: str | DataParallel | None) -> DataParallel:
    named = _STRATEGIES[one_of(*_STRATEGIES)("strategy", strategy)]
    chosen = named if data_parallel is None else DataParallel.of(data_parallel)
    if strategy != "auto" and chosen is not named:
        raise ValueError(
            f"`data_parallel` and `strategy` must agree, but got {chosen.value!r} and"
            f" {strategy!r}. Hint: give `data_parallel` alone."
        )
    if chosen is DataParallel.HOROVOD:
        raise NotOfferedError(
            '`data_parallel="horovod"` is not offered for train functions. Hint: use the trial'
            ' class (`pytorch.init(data_parallel="horovod")`), or "flat", which computes the same.'
        )
    return chosen


def _check_combination(
    data_parallel: DataParallel, precision: Precision, num_accumulated: int
) -> None:
    check_count("gradient_accumulation", num_accumulated)
    if data_parallel is DataParallel.OVERLAPPED and num_accumulated > 1:
        raise ValueError(
            '`gradient_accumulation` must be 1 with `data_parallel="overlapped"`, but got'
            f' {num_accumulated}. Hint: data_parallel="flat" sums gradients once in a step anyway.'
        )
    if data_parallel is DataParallel.FSDP and precision is Precision.FP16:
        raise ValueError(
            '`precision` must be "fp32" or "bf16" with `data_parallel="fsdp"`, but got "fp16".'
        )


def verify_steps(
    session: LooseSession, compute: Callable[..., T], every: int, on_mismatch: str
) -> Callable[..., T]:
    """Return `compute` with a check; see `train.verify_steps`."""
    if not callable(compute):
        raise TypeError(
            "`verify_steps` must be given a function of forward and backward pass, but got"
            f" {compute!r}. Hint: a loop cannot be run twice; call the function in it."
        )
    check_replay(every, on_mismatch)
    place, num_steps = f"rank {session.rank_info.rank} ({session.device})", count()

    @cache
    def replay() -> StepReplay:
        # Made late: models may be prepared after this function.
        return StepReplay(every, on_mismatch, session.gradients, place, session.alert)

    def checked(*args: Any, **kwargs: Any) -> T:
        number = next(num_steps)
        if replay().is_due(number):
            return replay().run(lambda: compute(*args, **kwargs), number)
        return compute(*args, **kwargs)

    return checked
