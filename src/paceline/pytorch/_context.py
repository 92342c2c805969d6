"""What a trial trains with."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from paceline import core
from paceline.engine import Accumulation, FlatReduction
from paceline.pytorch._data import TorchData, to_device
from paceline.pytorch._reducers import MetricReducer, ReducerSet
from paceline.pytorch._schedulers import LRScheduler

logger = logging.getLogger(__name__)

ClipGrads = Callable[[Iterable[torch.nn.Parameter]], Any]


class PyTorchTrialContext:
    """Wrap models and optimizers, scale losses, step optimizers; made by `pytorch.init()`.

    Args:
        core_context: The core context of this process.
        hparams: The hyperparameters.
        seed: The seed of the trial.
    """

    def __init__(
        self, core_context: core.Context, hparams: Mapping[str, Any] | None, seed: int
    ) -> None:
        self.core = core_context
        self.distributed = core_context.distributed
        self.device = _own_device(self.distributed)
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_schedulers: list[LRScheduler] = []
        self.reducers = ReducerSet()
        self.accumulation = Accumulation()
        self.scaler: Any = None
        self._hparams = hparams
        self._seed = seed
        self._reductions: list[FlatReduction] = []
        self._last_steps: list[tuple[torch.optim.Optimizer, ClipGrads | None, Any]] = []
        self._steps: list[tuple[torch.optim.Optimizer, ClipGrads | None, Any]] = []
        self._is_stop_requested = False
        self._warned_types: set[type] = set()
        self.current_batch: int | None = None
        self.current_epoch: int | None = None

    # ---- wrapping ------------------------------------------------------------------------

    def wrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device, make it the same on all ranks, and have it checkpointed."""
        model.to(self.device)
        if self.distributed.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        self.models.append(model)
        return model

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Have an optimizer checkpointed, and its gradients reduced over the ranks."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.optimizers.append(optimizer)
        self._reductions.append(FlatReduction(parameters))
        return optimizer

    def wrap_lr_scheduler(
        self, lr_scheduler: Any, step_mode: LRScheduler.StepMode, frequency: int = 1
    ) -> Any:
        """Have a scheduler stepped and checkpointed; returns it unchanged.

        Raises:
            ValueError: Its optimizer is not wrapped, or a plateau scheduler is to be stepped
                without a metric.
        """
        optimizer = getattr(lr_scheduler, "optimizer", None)
        if not any(optimizer is known for known in self.optimizers):
            raise ValueError(
                "A scheduler's optimizer must be wrapped first, but it is not. Hint: pass the"
                " optimizer to `context.wrap_optimizer` before it makes the scheduler."
            )
        is_plateau = isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if is_plateau and step_mode is not LRScheduler.StepMode.MANUAL_STEP:
            raise ValueError(
                "ReduceLROnPlateau needs a metric, so its `step_mode` must be MANUAL_STEP, but got"
                f" {step_mode.name}."
            )
        self.lr_schedulers.append(LRScheduler(lr_scheduler, step_mode, frequency))
        return lr_scheduler

    def wrap_scaler(self, scaler: Any) -> Any:
        """Have a gradient scaler checkpointed; pass it to `step_optimizer` and update it."""
        self.scaler = scaler
        return scaler

    def wrap_reducer(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Add a metric that needs more than an average.

        Args:
            reducer: A `MetricReducer`, or a function of the list of all values.
            name: The metric's name; None if the result is a dictionary of several.
            for_training: Whether it is part of training reports.
            for_validation: Whether it is part of validation reports.
        """
        return self.reducers.wrap(
            reducer, name, for_training=for_training, for_validation=for_validation
        )

    # ---- training ------------------------------------------------------------------------

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of a shard's mean loss, weighted by its samples."""
        weight = self.accumulation.weight
        if weight != 1.0:
            loss = loss * weight
        loss.backward(  # type: ignore[no-untyped-call]
            gradient=gradient, retain_graph=retain_graph, create_graph=create_graph
        )

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: ClipGrads | None = None,
        auto_zero_grads: bool = True,
        scaler: Any = None,
    ) -> None:
        """Step an optimizer if its gradients are complete; else do nothing.

        Gradients are complete with the last shard of the last batch of an aggregation window.

        Args:
            optimizer: A wrapped optimizer.
            clip_grads: Called with the optimizer's parameters before the step.
            auto_zero_grads: Whether to clear the gradients afterwards; without it,
                `aggregation_frequency` must be 1.
            scaler: A gradient scaler that scaled the loss.
        """
        if not self.accumulation.is_boundary:
            return
        self._steps.append((optimizer, clip_grads, scaler))
        self._step(optimizer, clip_grads, scaler)
        if auto_zero_grads:
            optimizer.zero_grad()
        elif self.accumulation.frequency > 1:
            raise ValueError(
                "`auto_zero_grads` must be True with `aggregation_frequency` above 1, but is False."
            )

    def step_without_data(self) -> None:
        """Take the steps that the other ranks take, on a rank without samples."""
        for optimizer, clip_grads, scaler in self._last_steps or [
            (optimizer, None, None) for optimizer in self.optimizers
        ]:
            self._steps.append((optimizer, clip_grads, scaler))
            self._step(optimizer, clip_grads, scaler)
            optimizer.zero_grad()

    def finish_batch(self) -> bool:
        """Forget the batch's steps; tell whether there were any."""
        has_stepped = bool(self._steps)
        if has_stepped:
            self.accumulation.num_steps += 1
            self._last_steps, self._steps = self._steps, []
        return has_stepped

    def _step(
        self, optimizer: torch.optim.Optimizer, clip_grads: ClipGrads | None, scaler: Any
    ) -> None:
        if self.distributed.size > 1:
            index = next(i for i, known in enumerate(self.optimizers) if known is optimizer)
            is_first = not self.accumulation.heard
            signal = self.accumulation.signal if is_first else 0.0
            total = float(self._reductions[index].reduce(signal))
            self.accumulation.heard = (self.accumulation.heard or 0.0) + total
            self.accumulation.signal = 0.0
        if clip_grads is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            clip_grads(p for group in optimizer.param_groups for p in group["params"])
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()

    # ---- facts ---------------------------------------------------------------------------

    def to_device(self, data: TorchData) -> TorchData:
        """Return nested data on this rank's device."""
        return to_device(data, self.device, self._warned_types)

    def get_hparams(self) -> dict[str, Any]:
        """Return the hyperparameters.

        Raises:
            ValueError: There are none.
        """
        if self._hparams is None:
            raise ValueError(
                "There are no hyperparameters. Hint: pytorch.init(hparams={...}) sets them."
            )
        return dict(self._hparams)

    def get_hparam(self, name: str) -> Any:
        """Return one hyperparameter.

        Raises:
            KeyError: There is none of this name.
        """
        hparams = self.get_hparams()
        if name not in hparams:
            raise KeyError(f"There is no hyperparameter {name!r}, only {sorted(hparams)}.")
        return hparams[name]

    def get_global_batch_size(self) -> int:
        """Return `hparams["global_batch_size"]`: samples per step over all shards.

        Raises:
            ValueError: It is missing, no integer, or below the number of shards.
        """
        size = (self._hparams or {}).get("global_batch_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < self.distributed.size:
            raise ValueError(
                "`hparams.global_batch_size` must be an integer of at least the number of ranks"
                f" ({self.distributed.size}), but got {size!r}. Hint: pytorch.init(hparams="
                '{"global_batch_size": 32}).'
            )
        return size

    def get_per_slot_batch_size(self) -> int:
        """Return one shard's part of the global batch size, for the data loaders."""
        size = self.get_global_batch_size()
        per_slot, rest = divmod(size, self.distributed.size)
        if rest:
            logger.warning(
                "`global_batch_size` %d is no multiple of %d ranks: %d samples are used per step.",
                size,
                self.distributed.size,
                per_slot * self.distributed.size,
            )
        return per_slot

    def get_trial_seed(self) -> int:
        """Return the seed of the trial."""
        return self._seed

    def get_stop_requested(self) -> bool:
        """Tell whether this rank asked for a stop."""
        return self._is_stop_requested

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Ask to checkpoint and stop after this batch; one rank's word is enough."""
        self._is_stop_requested = bool(stop_requested)

    def current_train_batch(self) -> int:
        """Return the global batch that is being trained, from 0.

        Raises:
            RuntimeError: Training has not begun.
        """
        if self.current_batch is None:
            raise RuntimeError("There is no current batch before training.")
        return self.current_batch

    def current_train_epoch(self) -> int:
        """Return the epoch that is being trained, from 0.

        Raises:
            RuntimeError: Training has not begun.
        """
        if self.current_epoch is None:
            raise RuntimeError("There is no current epoch before training.")
        return self.current_epoch


def _own_device(distributed: core.DistributedContext) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", distributed.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
