"""Models and optimizers of a train function, made fit for several workers."""

import os
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.engine import DataParallel, ShardUnits, gathered, seed_everything
from paceline.train._packing import packed
from paceline.train._session import LooseSession


def prepare_model(
    session: LooseSession,
    model: torch.nn.Module,
    *,
    is_moved: bool = True,
    data_parallel: DataParallel = DataParallel.FLAT,
    shard_units: ShardUnits = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> torch.nn.Module:
    """Return a model that all ranks train; see `train.prepare_model`.

    Args:
        session: The run.
        model: The model.
        is_moved: Whether it is moved to the worker's device.
        data_parallel: How gradients are summed over the ranks.
        shard_units: With FSDP, which modules are gathered as a whole.
        optimizer: With FSDP, an optimizer that was made of the model's parameters before.

    Raises:
        TypeError: It is no module, or `shard_units` is of another type.
        ValueError: `shard_units` is given without FSDP, or does not suit the model.
    """
    if shard_units is not None and data_parallel is not DataParallel.FSDP:
        raise ValueError(
            f'`shard_units` must be None without `data_parallel="fsdp"`, but got {shard_units!r}.'
        )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"A model must be a torch.nn.Module, but got {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        return model
    if is_moved:
        model.to(session.device)
    if data_parallel is DataParallel.OVERLAPPED:
        return session.gradients.overlap(model)
    if data_parallel is DataParallel.FSDP:
        optimizers = () if optimizer is None else (optimizer,)
        session.gradients.shard(model, shard_units, optimizers)
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
    session.gradients.watch_optimizer(optimizer)
    session.gradients.has_optimizer = True
    _Stepping(session, optimizer).install()
    return optimizer


def backward(session: LooseSession, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
    """Run the backward pass of a loss; see `train.backward`."""
    session.update_scaler()
    if session.scaler is not None:
        if not session.gradients.has_optimizer:
            raise RuntimeError(
                "With the precision fp16 the optimizer must be prepared, as losses are scaled."
                " Hint: optimizer = train.prepare_optimizer(optimizer)."
            )
        session.has_scaled = True
        loss = session.scaler.scale(loss)
    with session.precision.outside_autocast(session.device):
        loss.backward(**options)  # type: ignore[no-untyped-call]  # torch's


def full_state_dict(source: Any) -> Any:
    """Return a state with whole tensors; see `train.full_state_dict`."""
    return gathered(packed(source, allow_pickle=False))


def enable_reproducibility(session: LooseSession, seed: int) -> None:
    """Seed everything and choose deterministic operations; see `train.enable_reproducibility`."""
    session.seed = seed
    seed_everything(seed, session.rank_info.rank)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    # Unlike `use_deterministic_algorithms` this does not load torch's compiler.
    torch.set_deterministic_debug_mode("error")


class _Stepping:
    """The step of an optimizer that a loop takes after each batch.

    The scale is updated once all optimizers have stepped, which the next backward pass shows.
    """

    def __init__(self, session: LooseSession, optimizer: torch.optim.Optimizer) -> None:
        self._session = session
        self._optimizer = optimizer
        self._step = optimizer.step
        self._zero_grad = optimizer.zero_grad
        self._is_stepping = False

    def install(self) -> None:
        """Put these methods in place of the optimizer's; it stays the same object."""
        optimizer = self._optimizer
        for name, own in (("step", self.step), ("zero_grad", self.zero_grad)):
            setattr(optimizer, name, MethodType(_without_self(own), optimizer))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        session = self._session
        session.is_used = True
        if self._is_stepping:
            # The scaler calls this in its turn.
            return self._step(*args, **kwargs)
        if not session.gradients.is_boundary:
            return None
        session.gradients.has_open_gradients = False
        if session.scaler is None:
            return self._step(*args, **kwargs)
        if not session.has_scaled:
            raise RuntimeError(
                "With the precision fp16 losses are scaled, but none was. Hint: call"
                " train.backward(loss) in place of loss.backward()."
            )
        session.is_scaler_update_due = True
        self._is_stepping = True
        try:
            return session.scaler.step(self._optimizer, *args, **kwargs)
        finally:
            self._is_stepping = False

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        gradients = self._session.gradients
        if gradients.frequency == 1 or not gradients.has_open_gradients:
            self._zero_grad(*args, **kwargs)


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function to make a method of, as schedulers wrap methods and bind them anew."""

    def call(_: object, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call
