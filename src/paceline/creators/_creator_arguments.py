"""Arguments of a trainer: checks, users' functions by their parameters, orders to workers."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline._base.arguments_and_errors import (
    check_dictionary,
    count,
    integer,
    one_of,
    optional,
    positive,
    wrong,
)
from paceline._training.engine.fsdp_and_tensor_parallel import ShardUnits
from paceline._training.engine.model_preparation import check_shard_precision
from paceline._training.engine.precision import Precision
from paceline._training.workers.processes.rank_environment import RankInfo
from paceline._training.workers.worker_failures import ResourcesError
from paceline.core._exceptions import NotOfferedError
from paceline.core._launcher_place import launched_place

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


BATCH_SIZE = "*batch_size"
"""The key of a config under which creators find the batch size of one worker.

The user's number there is the size over all workers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """Specification of a replica built by each worker; the functions come from the user.

    Attributes:
        config: The argument of each function.
        loader_config: Options of the loaders of data sets; None for the default.
        num_shards: The shards of a global batch, one for each worker that was asked for.
        shard_size: The samples of a shard for data sets.
        precision: "fp32", "fp16" or "bf16".
        use_gpu: True, False, or "auto" for a GPU if there is one.
        backend: "gloo", "nccl", or "auto" for the one that suits the device.
        timeout_s: How long ranks wait for each other, in seconds.
        deals_out: Whether workers share the data; else each has all that its loader gives.
        is_serial: Whether the workers of a node call `data_creator` one after the other.
        seed: The seed of everything.
        data_parallel: "flat" or "fsdp".
        shard_units: With "fsdp", which modules are gathered as a whole.
        shard_precision: With "fsdp", the types of gathered parameters and of sums of gradients.
        stop_on_nan: Whether the default train function stops at a loss that is not finite.
        check_ranks: Whether workers are compared, see `RankCheck`.
        verify_steps: Each batch with a multiple of this number is computed twice; None for none.
        on_mismatch: "stop" or "warn", if the results differ.
    """

    model_creator: Callable[..., Any]
    data_creator: Callable[..., Any]
    optimizer_creator: Callable[..., Any]
    loss_creator: Callable[..., Any] | None
    scheduler_creator: Callable[..., Any] | None
    train_function: Callable[..., Any] | None
    validation_function: Callable[..., Any] | bool | None
    initialization_hook: Callable[..., Any] | None
    scheduler_step_freq: str | None
    config: dict[str, Any]
    loader_config: Mapping[str, Any] | None
    num_shards: int
    shard_size: int
    precision: str
    use_gpu: bool | str
    backend: str
    timeout_s: float
    deals_out: bool
    is_serial: bool
    seed: int
    data_parallel: str = "flat"
    shard_units: ShardUnits = None
    shard_precision: Any = None
    stop_on_nan: bool = True
    check_ranks: bool | tuple[str, ...] = True
    verify_steps: int | None = None
    on_mismatch: str = "stop"


class ReplicaPassOrder(NamedTuple):
    """Order for a single pass.

    Attributes:
        num_steps: How many batches, or None for the rest of the epoch.
        is_profiled: Whether the parts of each step are timed.
        info: The facts for the user's function.
        wants_state: Whether the state after the pass is returned.
        progress_path: The file in which the chief notes how far it is; None for none.
    """

    num_steps: int | None
    is_profiled: bool
    info: dict[str, Any]
    wants_state: bool = False
    progress_path: str | None = None


def check_gpu(*, has_gpu: bool) -> None:
    """Require a GPU for `use_gpu=True`.

    Raises:
        ResourcesError: There is none.
    """
    if not has_gpu:
        raise ResourcesError(
            "With `use_gpu=True` each worker needs a GPU, but there is none. Hint: use_gpu='auto'."
        )


# Parameters available to functions, with the accepted names. Functions without a
# signature get the first six in this order.
_NAMES: Mapping[str, Sequence[str]] = {
    "config": ("config",),
    "models": ("model", "models"),
    "batches": (
        *("train_iterator", "val_iterator", "validation_iterator", "iterator"),
        *("dataloader", "data_loader", "loader", "train_loader", "val_loader"),
        *("validation_loader", "batches"),
    ),
    "criterion": ("criterion", "loss", "loss_fn"),
    "optimizers": ("optimizer", "optimizers"),
    "schedulers": ("scheduler", "schedulers"),
    "info": ("info",),
    "scaler": ("scaler",),
    "device": ("device",),
}
_MEANING = {name: meaning for meaning, names in _NAMES.items() for name in names}
_NUM_BY_ORDER = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class HookWorker(RankInfo):
    """Facts about a worker, for an `initialization_hook` with a parameter.

    Attributes:
        rank: The worker among all.
        world_size: The number of workers.
        local_rank: The worker among its node's workers.
        local_world_size: The number of workers of its node.
        node_rank: The node.
        config: The user's config.
    """

    config: Mapping[str, Any]


class GivenParameters(NamedTuple):
    """Objects available as parameters of train and validation functions."""

    config: dict[str, Any]
    models: Any
    batches: Any
    criterion: Any
    optimizers: Any
    schedulers: Any
    info: dict[str, Any]
    scaler: Any
    device: Any


def check_function(name: str, function: Callable[..., Any]) -> None:
    """Check all required parameters of a function for known names.

    Raises:
        ValueError: One has not.
    """
    for parameter in _parameters(function) or ():
        is_required = parameter.default is parameter.empty
        if is_required and parameter.name not in _MEANING and not _is_variable(parameter):
            raise ValueError(
                f"The parameters of `{name}` must be named after what they get, but"
                f" {parameter.name!r} is none of {', '.join(_MEANING)}. Hint: rename it, or give"
                " it a default."
            )


def call_with(function: Callable[..., Any], given: GivenParameters) -> Any:
    """Call a function with the objects named by its parameters."""
    parameters = _parameters(function)
    if parameters is None:
        # Functions written in C have no signature, so the parameters are positional.
        return function(*given[:_NUM_BY_ORDER])
    values = given._asdict()
    args, kwargs = [], {}
    for parameter in parameters:
        meaning = _MEANING.get(parameter.name)
        if meaning is None or _is_variable(parameter):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            args.append(values[meaning])
        else:
            kwargs[parameter.name] = values[meaning]
    return function(*args, **kwargs)


def call_hook(hook: Callable[..., Any], worker: HookWorker) -> None:
    """Call an initialization hook, with its worker if a parameter is required."""
    takes_worker = any(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
        for parameter in _parameters(hook) or ()
    )
    if takes_worker:
        hook(worker)
    else:
        hook()


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _is_variable(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


_STEP_FREQUENCIES = ("batch", "epoch", "manual")
_DATA_PARALLEL = ("flat", "fsdp")
_DEFAULT_BATCH_SIZE = 16
_LEVELS = {"O0": "fp32", "O1": "fp16", "O2": "fp16", "O3": "fp16"}
# Arguments of other releases, with the replacement for each.
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
    """Refuse unknown arguments, with hints for known foreign names.

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
    """Check for a process working alone, not as a worker of a launcher.

    Raises:
        RuntimeError: It is one of several workers itself.
    """
    if launched_place() is not None:
        raise RuntimeError(
            "A PyTorchTrainer must be made in a process that works alone, but this one was started"
            " as one of several. Hint: start the script once, as it starts its workers itself."
        )


def creator_precision(use_fp16: Any, apex_args: Any) -> str:
    """Return the precision for `use_fp16` and the options of NVIDIA's Apex.

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
    """Return the specification of the replicas, after checks of all arguments.

    Raises:
        TypeError: A value has another type.
        ValueError: A function is missing or cannot be called, or a value is out of range.
    """
    _check_creators(creators, functions)
    check_dictionary("config", config)
    check_dictionary("dataloader_config", loader_config)
    if "batch_size" in (loader_config or {}):
        raise ValueError("`dataloader_config` must not name a batch size. Hint: batch_size=...")
    _check_settings(creators, functions["train_function"], settings)
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
    """Check the arguments of a pass.

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


def _check_settings(
    creators: Mapping[str, Any], function: object, settings: Mapping[str, Any]
) -> None:
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
    one_of("stop", "warn")("on_mismatch", settings["on_mismatch"])
    if optional(count(1))("verify_steps", settings["verify_steps"]) and function is not None:
        raise ValueError(
            "`verify_steps` must be None with a `train_function`, which has a loop of its own, but"
            f" got {settings['verify_steps']}."
        )


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
    """Return the batch size of a single worker."""
    if batch_size is None and name == "batch_size":
        # Perhaps no part is used, as with loaders of the user's own.
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
