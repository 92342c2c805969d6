"""`accelerate`: options for speed in one call."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline._argument_checks import check_count, one_of
from paceline.core import NotOfferedError
from paceline.engine.devices._precision import Precision, compute_in
from paceline.engine.models._model_options import checkpoint_blocks, compile_model
from paceline.engine.parallel._data_parallel import DataParallel
from paceline.engine.parallel._fsdp import shard_units_of
from paceline.engine.train_functions._prepared_models import prepare_model, prepare_optimizer
from paceline.engine.train_functions._rank_session import LooseSession

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
        session,
        model,
        data_parallel=parallel,
        optimizer=optimizer,
        **shard_options,
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
