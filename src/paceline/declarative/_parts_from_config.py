"""Checks of a whole config, and construction of parts from the config."""

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, ReduceLROnPlateau

from paceline import core, pytorch
from paceline._training.engine.checkpoints.export_weights import require_onnx
from paceline._training.engine.devices import join_ranks
from paceline._training.engine.gradient_accumulation import clipping
from paceline._training.engine.gradient_reduction import join_horovod
from paceline._training.engine.optimizer_stepper import ClipGrads
from paceline.declarative._config_classes import ParallelizationConfig, TrainingConfig
from paceline.declarative._losses import LossPlan, MarginLoss, Prediction
from paceline.pytorch._fit_arguments import searched_length, searcher_of

logger = logging.getLogger(__name__)

_LOSSES_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss, MarginLoss)
# Default schedule: start of the rise as a share of the rate, and its duration in epochs.
_CYCLE_START, _CYCLE_EPOCHS = 0.1, 6
# How earlier scripts name a part of the model.
_OLD_PATH = re.compile(r"self\.get_model_object\(\)\.([\w.]+)\.parameters\(\)")
_STEP_MODES = {
    "batch": pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH,
    "step": pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP,
    "epoch": pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH,
}


def predictions_of(configs: TrainingConfig) -> tuple[Prediction, ...]:
    """Return the named predictions.

    Raises:
        ValueError: They are given twice, and differently.
    """
    pairs, names = configs.pred_names_and_types, configs.pred_names
    if pairs is None:
        losses = configs.loss_function
        found = []
        for index, name in enumerate(names or ()):
            loss = losses[min(index, len(losses) - 1)] if isinstance(losses, tuple) else losses
            kind = "cls" if isinstance(loss, _LOSSES_OF_CLASSES) else "regr"
            found.append(Prediction(name, kind))
        return tuple(found)
    if names is not None and names != tuple(name for name, _ in pairs):
        raise ValueError(
            f"`pred_names` must name those of `pred_names_and_types` {pairs!r}, but got {names!r}."
            " Hint: leave one of them out."
        )
    return tuple(Prediction(*pair) for pair in pairs)


def losses_of(configs: TrainingConfig, predictions: Sequence[Prediction]) -> LossPlan:
    """Return the loss computation of a batch; see `LossPlan`."""
    return LossPlan(
        configs.loss_function,
        configs.loss_weights,
        predictions,
        has_labels=configs.data_label_separation_index is not None,
        losses_of_classes=_LOSSES_OF_CLASSES,
    )


def require_fields(configs: TrainingConfig) -> None:
    """Refuse a config with missing fields or mutually exclusive settings.

    Raises:
        ValueError: The message names every field.
        ModuleNotFoundError: A package for ONNX is not installed.
    """
    problems = []
    if configs.model_class is None:
        problems.append("`model_class` is missing")
    if configs.pred_names is None and configs.pred_names_and_types is None:
        problems.append("`pred_names` is missing")
    has_pair = configs.training_dataset is not None and configs.validation_dataset is not None
    if configs.dataset is None and not has_pair:
        given = [
            name
            for name in ("training_dataset", "validation_dataset")
            if getattr(configs, name) is not None
        ]
        also = f" beside `{given[0]}`" if given else ""
        problems.append(f"`dataset`, or both of a split data set, is missing{also}")
    if configs.checkpoint_dir is not None and configs.pretrained_model_path is not None:
        problems.append(
            f"`checkpoint_dir` {configs.checkpoint_dir!r} and `pretrained_model_path`"
            f" {configs.pretrained_model_path!r} exclude each other"
        )
    if configs.load_pretrained_encoder_only and configs.pretrained_model_path is None:
        problems.append("`load_pretrained_encoder_only` needs `pretrained_model_path`")
    if configs.load_pretrained_classifier and not configs.load_pretrained_encoder_only:
        problems.append(
            "`load_pretrained_classifier` has no effect without `load_pretrained_encoder_only`"
        )
    problems += _parallel_problems_of(configs.parallelization_params, saves_onnx=configs.save_onnx)
    if problems:
        raise ValueError(f"The config must be complete, but {'; '.join(problems)}.")
    if configs.save_onnx:
        require_onnx()


def _parallel_problems_of(parallel: ParallelizationConfig, *, saves_onnx: bool) -> list[str]:
    """Return the conflicts among the options for several processes."""
    problems = []
    if parallel.data_parallel != "fsdp":
        problems += [
            f'`{name}` has no effect without `data_parallel="fsdp"`'
            for name in ("shard_units", "shard_precision", "shard_size")
            if getattr(parallel, name) is not None
        ]
    if parallel.data_parallel == "fsdp" and saves_onnx:
        problems.append('`save_onnx` and `data_parallel="fsdp"` exclude each other')
    if parallel.tensor_parallel_size > 1 and saves_onnx:
        problems.append("`save_onnx` and `tensor_parallel_size` exclude each other")
    return problems


def check_config_arguments(configs: TrainingConfig) -> None:
    """Check the arguments for model, optimizer and scheduler against their signatures.

    Raises:
        TypeError: One does not; the message names the argument.
    """
    _check_call("model_params", configs.model_class, configs.model_params.values())
    _check_call("optimizer_params", configs.optimizer, configs.optimizer_params, 1, {"lr": 1.0})
    has_default = configs.scheduler is CyclicLR and not configs.scheduler_params
    if configs.scheduler is not None and not has_default:
        _check_call("scheduler_params", configs.scheduler, configs.scheduler_params, 1)


def _check_call(
    field: str,
    kind: Callable[..., Any],
    given: Mapping[str, Any],
    num_positional: int = 0,
    more: Mapping[str, Any] | None = None,
) -> None:
    try:
        inspect.signature(kind).bind(*[None] * num_positional, **(more or {}), **given)
    except TypeError as error:
        taken = ", ".join([*inspect.signature(kind).parameters][num_positional:])
        raise TypeError(
            f"`{field}` must be arguments of {kind.__qualname__} ({taken}), but got"
            f" {dict(given)!r}: {error}."
        ) from error
    except ValueError:
        # Nothing is known about an object without a signature.
        return


def precision_of(configs: TrainingConfig) -> str | None:
    """Return the number format of the forward pass, or None for the experiment's."""
    return configs.mixed_precision_type if configs.automatic_mixed_precision else None


def recorded_fields(configs: TrainingConfig) -> dict[str, Any]:
    """Return the fields to record as hyperparameters of a run: the plain fields."""
    fields = {**configs.values(), "model_params": configs.model_params.values()}
    # Paths of input and output do not define a run, and its seed is recorded anyway.
    left_out = (
        "loss_function", "checkpoint_dir", "checkpoint_storage", "pretrained_model_path",
        "model_save_dir", "random_seed",
    )  # fmt: skip
    return {
        name: value.__name__ if isinstance(value, type) else value
        for name, value in fields.items()
        if isinstance(value, (bool, int, float, str, dict, tuple, type)) and name not in left_out
    }


def make_optimizer(
    configs: TrainingConfig,
    model: nn.Module,
    encoder: nn.Module | None,
    rate: float,
    scale: float,
) -> torch.optim.Optimizer:
    """Return the optimizer.

    Args:
        configs: The training.
        model: The model on its device.
        encoder: The part that is not to be trained, if there is one.
        rate: The learning rate.
        scale: The factor of the learning rates of parameter groups.

    Raises:
        ValueError: A parameter group names no part of the model.
    """
    parameters: Iterable[Any]
    if configs.multi_optimizer_param_dicts is not None:
        parameters = [
            _parameter_group(model, group, scale) for group in configs.multi_optimizer_param_dicts
        ]
    elif encoder is not None:
        parameters = _head_parameters(model, encoder)
    else:
        parameters = model.parameters()
    optimizer: torch.optim.Optimizer = configs.optimizer(
        parameters, lr=rate, **configs.optimizer_params
    )
    return optimizer


def _parameter_group(model: nn.Module, group: Mapping[str, Any], scale: float) -> dict[str, Any]:
    path = group["params"]
    old = _OLD_PATH.fullmatch(path)
    name = path if old is None else old[1]
    try:
        found: Any = model.get_submodule(name)
    except AttributeError:
        # A parameter of the model itself is no module.
        found = getattr(model, name, None)
    if isinstance(found, nn.Module):
        parameters = list(found.parameters())
    elif isinstance(found, nn.Parameter):
        parameters = [found]
    else:
        raise ValueError(
            f"`multi_optimizer_param_dicts` must name parts of the model, but {path!r} is none of"
            f" {', '.join(child for child, _ in model.named_children())}."
        )
    rate = {"lr": group["lr"] * scale} if "lr" in group else {}
    return {**group, **rate, "params": parameters}


def _head_parameters(model: nn.Module, encoder: nn.Module) -> list[nn.Parameter]:
    own: Any = getattr(model, "get_head_parameters", None)
    if own is not None:
        return list(own())
    encoded = {id(parameter) for parameter in encoder.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in encoded]


def make_scheduler(
    configs: TrainingConfig,
    optimizer: torch.optim.Optimizer,
    iterations_per_epoch: int,
    context: pytorch.PyTorchTrialContext,
) -> Any:
    """Return the scheduler, registered for the engine's steps and checkpoints.

    Args:
        configs: The training.
        optimizer: Whose rates it sets.
        iterations_per_epoch: Batches of an epoch.
        context: The engine's context.
    """
    is_default = configs.scheduler is CyclicLR and not configs.scheduler_params
    if is_default:
        # Each group rises to its own rate.
        rates = [group["lr"] for group in optimizer.param_groups]
        per_epoch = {
            "batch": iterations_per_epoch,
            "step": math.ceil(iterations_per_epoch / configs.accumulation_steps),
            "epoch": 1,
        }
        scheduler: Any = CyclicLR(
            optimizer,
            base_lr=[_CYCLE_START * rate for rate in rates],
            max_lr=rates,
            step_size_up=_CYCLE_EPOCHS * per_epoch[configs.scheduler_step],
            mode="triangular2",
            cycle_momentum=False,
        )
    else:
        scheduler = configs.scheduler(optimizer, **configs.scheduler_params)
    return context.wrap_lr_scheduler(scheduler, scheduler_step_mode(configs, scheduler))


def scheduler_step_mode(configs: TrainingConfig, scheduler: Any) -> pytorch.LRScheduler.StepMode:
    """Return the step mode of a scheduler: manual for a plateau scheduler."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return pytorch.LRScheduler.StepMode.MANUAL_STEP
    return _STEP_MODES[configs.scheduler_step]


def mixed_precision_policy_of(parallel: ParallelizationConfig) -> Any:
    """Return torch's policy for the types of sharded models, or None."""
    if parallel.shard_precision is None:
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy

    given = parallel.shard_precision
    return MixedPrecisionPolicy(
        **{
            key: getattr(torch, each) if isinstance(each, str) else each
            for key, each in given.items()
        }
    )


def clipping_of(configs: TrainingConfig) -> ClipGrads | None:
    """Return the gradient clipping function, or None."""
    norm, value = configs.gradient_clip_norm, configs.gradient_clip_value
    if norm is None and value is None:
        return None

    return clipping(norm, value)


def num_epochs_of(config: Mapping[str, Any], num_epochs: int) -> int:
    """Return the number of epochs: the experiment's searcher's, else the config's.

    Args:
        config: The experiment's config; empty without one.
        num_epochs: The number in the training's config.
    """
    length = searched_length(searcher_of(config))
    if length is None:
        return num_epochs
    if not isinstance(length, pytorch.Epoch):
        logger.warning(
            "The searcher's length %r is no number of epochs: %d epochs are trained.",
            length,
            num_epochs,
        )
        return num_epochs
    if length.length != num_epochs:
        logger.info(
            "The searcher's %d epochs are trained instead of %d.", length.length, num_epochs
        )
    return length.length


def num_launched_for_config(*, is_single: bool) -> int:
    """Return how many processes were started together.

    Args:
        is_single: Whether there is to be only one.

    Raises:
        ValueError: There is to be one, but there are several.
    """
    place = core.launched_place()
    size = 1 if place is None else place.size
    if dist.is_initialized():
        size = dist.get_world_size()
    if is_single and size > 1:
        starter = "" if place is None else f" that {place.launcher} has started"
        raise ValueError(
            f"`parallelization_type` must be 'multi_node' for the {size} processes{starter}, but is"
            " 'single_node'. Hint:"
            " parallelization_params=ParallelizationConfig(parallelization_type='multi_node')."
        )
    return size


def join_config_ranks(configs: TrainingConfig) -> core.DistributedContext | None:
    """Return this process's place, after meeting the others; None for a process alone."""
    is_by_horovod = configs.parallelization_params.data_parallel == "horovod"
    distributed = join_horovod(None) if is_by_horovod else None
    return join_ranks(distributed, torch.device("cpu") if configs.cpu_only else None)


def check_config_place(given: tuple[int | None, int | None], rank: int, size: int) -> None:
    """Refuse a rank or number of processes different from this process's own.

    Args:
        given: The script's values; None for each that it leaves out.
        rank: This process among all.
        size: The number of all processes.

    Raises:
        ValueError: They differ.
    """
    for name, value, found in zip(("rank", "num_processes"), given, (rank, size), strict=True):
        if value is not None and value != found:
            raise ValueError(
                f"`{name}` must be that of the process group, {found}, but got {value}. Hint: leave"
                " it out, and start the processes by a launcher or torch.distributed."
            )
