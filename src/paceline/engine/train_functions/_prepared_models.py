"""Models and optimizers of a train function, made fit for several workers."""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.engine.devices._precision import Precision
from paceline.engine.devices._random_generators import seed_everything
from paceline.engine.formats._values_without_pickle import packed_without_pickle
from paceline.engine.models._model_options import check_shard_precision
from paceline.engine.parallel._data_parallel import DataParallel
from paceline.engine.parallel._fsdp import ShardUnits, check_shard_size, check_whole
from paceline.engine.train_functions._rank_session import LooseSession
from paceline.engine.weights._whole_and_sharded_tensors import gathered

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


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
    """Return a model that all ranks train; see `train.prepare_model`.

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
    """Return an optimizer that waits for complete gradients; see `train.prepare_optimizer`.

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
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    # Unlike `use_deterministic_algorithms` this does not load torch's compiler.
    torch.set_deterministic_debug_mode("error")
