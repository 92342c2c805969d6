"""Checks of a trainer's arguments before any worker starts."""

import logging
from collections.abc import Mapping
from typing import Any

from paceline._argument_checks import (
    check_dictionary,
    count,
    integer,
    one_of,
    optional,
    positive,
    wrong,
)
from paceline.core import NotOfferedError, launched_place
from paceline.creators._function_parameters import check_function
from paceline.creators._replica_spec import BATCH_SIZE, ReplicaSpec
from paceline.engine import Precision, check_shard_precision

logger = logging.getLogger(__name__)

_STEP_FREQUENCIES = ("batch", "epoch", "manual")
_DATA_PARALLEL = ("flat", "fsdp")
_DEFAULT_BATCH_SIZE = 16
_LEVELS = {"O0": "fp32", "O1": "fp16", "O2": "fp16", "O3": "fp16"}
# What users of other releases may give, and what to give instead.
_OTHER_NAMES = {
    "data_loader_args": "give `dataloader_config`, or return DataLoaders from `data_creator`",
    "training_operator_cls": "give `train_function` and `validation_function`",
    "use_local": "workers are processes of their own always; leave it out",
    "wrap_ddp": "gradients are summed over all workers always; leave it out",
}

_NOT_OFFERED = {
    "compile": "compile the model in `model_creator`",
    "gradient_checkpointing": "use torch.utils.checkpoint in the model's `forward`",
    "shard_size": "all workers hold one copy together",
    "tensor_parallel_size": "use the trial class",
    "tensor_plan": "use the trial class",
    "trainable_only": "use the trial class",
}


def check_creator_names(unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that there are not.

    Raises:
        DeprecationWarning: One belongs to another release of the original; the message says what
            takes its place.
        NotOfferedError: One belongs to other front doors.
        TypeError: One is unknown.
    """
    for name in unknown:
        if name in _OTHER_NAMES:
            raise DeprecationWarning(f"`{name}` is not taken. Hint: {_OTHER_NAMES[name]}.")
        if name in _NOT_OFFERED:
            raise NotOfferedError(
                f"`{name}` is not offered for creators. Hint: {_NOT_OFFERED[name]}."
            )
        raise TypeError(f"`PyTorchTrainer` has no argument {name!r}.")


def chosen_num_workers(num_replicas: Any, num_workers: Any) -> int:
    """Return how many workers to start.

    Raises:
        TypeError: Both are given, or one is no integer.
        ValueError: It is below 1.
    """
    if num_workers is not None and num_replicas != 1:
        raise TypeError("`num_replicas` and `num_workers` are the same: give one of them.")
    name, value = "num_replicas", num_replicas
    if num_workers is not None:
        name, value = "num_workers", num_workers
    if integer(name, value) < 1:
        raise ValueError(wrong(name, "greater than 0", value))
    return int(value)


def check_creators_alone() -> None:
    """Check that this process works alone.

    Raises:
        RuntimeError: It is one of several workers itself.
    """
    if launched_place() is not None:
        raise RuntimeError(
            "A PyTorchTrainer must be made in a process that works alone, but this one was started"
            " as one of several. Hint: start the script once, as it starts its workers itself."
        )


def precision_of_creators(use_fp16: Any, apex_args: Any) -> str:
    """Return the precision for the flag, and for what NVIDIA's Apex would be told.

    Raises:
        ValueError: A value is unknown.
    """
    if use_fp16 not in (True, False, "apex", "bf16"):
        raise ValueError(f"`use_fp16` must be True, False or 'bf16', but got {use_fp16!r}.")
    check_dictionary("apex_args", apex_args, ValueError)
    args = dict(apex_args or {})
    if not use_fp16:
        if args:
            logger.warning("`apex_args` has no effect without `use_fp16=True`.")
        return Precision.FP32.value
    level, verbosity = args.pop("opt_level", "O1"), args.pop("verbosity", 1)
    num_losses = args.pop("num_losses", 1)
    one_of(*_LEVELS)("apex_args['opt_level']", level)
    precision = "bf16" if use_fp16 == "bf16" else _LEVELS[level]
    if level in ("O2", "O3"):
        logger.warning(
            "The level %r of `apex_args` has no counterpart: parameters stay in float32, and torch"
            " chooses for each operation what it computes in, as with 'O1'.",
            level,
        )
    if num_losses != 1:
        logger.warning(
            "`apex_args['num_losses']` has no counterpart: one scale serves %r losses.", num_losses
        )
    if args:
        logger.warning("`apex_args` has entries without a counterpart: %s.", ", ".join(args))
    if verbosity:
        logger.info("Training in %s by torch.autocast.", precision)
    return precision


def make_replica_spec(
    *,
    creators: Mapping[str, Any],
    functions: Mapping[str, Any],
    config: Any,
    loader_config: Any,
    num_workers: int,
    batch_size: Any,
    precision: str,
    settings: Mapping[str, Any],
) -> ReplicaSpec:
    """Return what workers are told to make.

    Raises:
        TypeError: A value has another type.
        ValueError: A function is missing or cannot be called, or a value is out of range.
    """
    _check_creators(creators, functions)
    check_dictionary("config", config)
    check_dictionary("dataloader_config", loader_config)
    if "batch_size" in (loader_config or {}):
        raise ValueError("`dataloader_config` must not name a batch size. Hint: batch_size=...")
    _check_settings(creators, settings)
    mode = settings.get("data_parallel", "flat")
    given = {name: settings.get(name) for name in ("shard_units", "shard_precision")}
    _check_data_parallel(mode, given, precision)
    if config and BATCH_SIZE in config:
        _shard_size(config[BATCH_SIZE], num_workers, f"config[{BATCH_SIZE!r}]")
    return ReplicaSpec(
        **creators,
        **functions,
        config=config or {},
        loader_config=None if loader_config is None else dict(loader_config),
        num_shards=num_workers,
        shard_size=_shard_size(batch_size, num_workers, "batch_size"),
        precision=precision,
        **settings,
    )


def check_pass_arguments(num_steps: Any, max_retries: Any = 0, info: Any = None) -> None:
    """Check what a pass is asked for.

    Raises:
        TypeError: A value has another type.
        ValueError: A number is negative.
    """
    optional(count(0))("num_steps", num_steps)
    count(0)("max_retries", max_retries)
    check_dictionary("info", info)


def _check_creators(creators: Mapping[str, Any], functions: Mapping[str, Any]) -> None:
    for name, creator in creators.items():
        is_optional = name in ("loss_creator", "scheduler_creator") and creator is None
        if not is_optional and not callable(creator):
            raise ValueError(
                f"`{name}` must be a function of the config, but got {creator!r}. Hint: hand over"
                " the function itself, not what it returns."
            )
    for name, function in functions.items():
        is_off = function is None or (name == "validation_function" and function is False)
        if not is_off and not callable(function):
            raise ValueError(f"`{name}` must be a function, but got {function!r}.")
        if not is_off and name != "initialization_hook":
            check_function(name, function)
    if creators["loss_creator"] is None and functions["train_function"] is None:
        raise ValueError(
            "`loss_creator` must be given, but is None: the default train function needs a loss."
            " Hint: loss_creator=nn.MSELoss, or a `train_function` of your own."
        )


def _check_settings(creators: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    frequency = settings["scheduler_step_freq"]
    names = ", ".join(map(repr, _STEP_FREQUENCIES))
    if frequency is None and creators["scheduler_creator"] is not None:
        raise ValueError(
            f"`scheduler_step_freq` must be one of {names} with a `scheduler_creator`, but is None."
        )
    optional(one_of(*_STEP_FREQUENCIES))("scheduler_step_freq", frequency)
    one_of("auto", "gloo", "nccl")("backend", settings["backend"])
    if settings["use_gpu"] not in (True, False, "auto"):
        raise ValueError(
            f"`use_gpu` must be True, False or 'auto', but got {settings['use_gpu']!r}."
        )
    positive("timeout_s", settings["timeout_s"])


def _check_data_parallel(data_parallel: Any, given: Mapping[str, Any], precision: str) -> None:
    if data_parallel not in _DATA_PARALLEL:
        names = " or ".join(map(repr, _DATA_PARALLEL))
        raise ValueError(f"`data_parallel` must be {names}, but got {data_parallel!r}.")
    if data_parallel == "fsdp" and precision == "fp16":
        raise ValueError(
            '`use_fp16` must be False or "bf16" with `data_parallel="fsdp"`, but asks for fp16.'
        )
    for name, value in given.items() if data_parallel != "fsdp" else ():
        if value is not None:
            raise ValueError(
                f'`{name}` must be None without `data_parallel="fsdp"`, but got {value!r}.'
            )
    check_shard_precision(given["shard_precision"], has_autocast=precision != "fp32")


def _shard_size(batch_size: Any, num_workers: int, name: str) -> int:
    """Return the batch size of one worker."""
    if batch_size is None and name == "batch_size":
        # Perhaps nothing of it is used, as with loaders of the user's own.
        return max(_DEFAULT_BATCH_SIZE // num_workers, 1)
    if integer(name, batch_size) < num_workers:
        raise ValueError(
            f"`{name}` must be at least the number of workers ({num_workers}), as each gets a part"
            f" of a batch, but got {batch_size}."
        )
    size = int(batch_size // num_workers)
    if batch_size % num_workers:
        logger.warning(
            "`%s` is %d in place of %d, to give each of %d workers equally many samples.",
            name,
            size * num_workers,
            batch_size,
            num_workers,
        )
    return size
