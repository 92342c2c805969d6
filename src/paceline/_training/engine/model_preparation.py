"""Preparation of a model before training, and the order of its steps.

Averages of weights and other untrained models, on ranks without samples of a batch.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
import xxhash

from paceline._training.engine.fsdp_and_tensor_parallel import (
    RankGrid,
    ShardUnits,
    TensorPlan,
    apply_plan,
    sequence_members,
    shard_model,
    shard_units_of,
)
from paceline._training.engine.gradient_reduction import plain_model
from paceline._training.engine.tensor_copies_and_digests import (
    TensorDigests,
    copy_piece,
    is_sharded,
    parameters_of,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


logger = logging.getLogger(__name__)

InitWeights = Callable[[torch.nn.Module], Any] | None


def is_on_meta(model: torch.nn.Module) -> bool:
    """Tell whether a model is on the meta device.

    Raises:
        ValueError: Only a part of the model is.
    """
    names = {name: value.is_meta for name, value in _tensors(model)}
    if any(names.values()) and not all(names.values()):
        on_meta = next(name for name, is_meta in names.items() if is_meta)
        elsewhere = next(name for name, is_meta in names.items() if not is_meta)
        raise ValueError(
            "A model must be on the meta device as a whole or not at all, but"
            f" {on_meta!r} is there and {elsewhere!r} is not."
        )
    return any(names.values())


def materialize(
    model: torch.nn.Module, device: torch.device, init_weights: InitWeights, *, has_ranks: bool
) -> None:
    """Fill a model from the meta device with weights, module by module.

    Each module is whole on each rank while it is initialised, and only its pieces are kept. The
    weights are those that the chief draws, so they do not depend on the number of ranks.

    Args:
        model: The model, sharded or not.
        device: The device for the model.
        init_weights: Called with each module that has parameters or buffers of its own, after its
            `reset_parameters` if it has that. Inner modules come first.
        has_ranks: Whether there are other ranks, which all call this.

    Raises:
        ValueError: Parameters or buffers have no values afterwards.
    """
    model.to_empty(device=device)
    without: list[str] = []
    for name, module in _inner_first(model):
        if any(True for _ in _tensors(module, recurse=False)):
            without += [
                f"{name}.{each}".lstrip(".")
                for each in _initialize(module, device, init_weights, has_ranks=has_ranks)
            ]
    if without:
        raise ValueError(
            "A model on the meta device must have a `reset_parameters` in each module with"
            f" parameters or buffers, or `init_weights` must set them, but {without[0]!r} and"
            f" {len(without) - 1} more have no values. Hint:"
            " context.wrap_model(model, init_weights=function_of_a_module)."
        )


@torch.no_grad()
def _initialize(
    module: torch.nn.Module, device: torch.device, init_weights: InitWeights, *, has_ranks: bool
) -> list[str]:
    """Initialize a module's own tensors; return the names of tensors left without values."""
    sharded = {name: value for name, value in module._parameters.items() if is_sharded(value)}
    for name, parameter in sharded.items():
        assert parameter is not None
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        module._parameters[name] = torch.nn.Parameter(empty, parameter.requires_grad)
    for _, tensor in _tensors(module, recurse=False):
        _mark(tensor)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    if init_weights is not None:
        init_weights(module)
    without = [name for name, tensor in _tensors(module, recurse=False) if _is_marked(tensor)]
    if has_ranks:
        for _, tensor in _tensors(module, recurse=False):
            dist.broadcast(tensor, src=0)
    for name, parameter in sharded.items():
        whole = module._parameters[name]
        module._parameters[name] = parameter
        copy_piece(whole, parameter)
    return without


def _inner_first(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    for child_name, child in module.named_children():
        yield from _inner_first(child, f"{name}.{child_name}".lstrip("."))
    yield name, module


def _tensors(
    module: torch.nn.Module, *, recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=recurse)
    yield from module.named_buffers(recurse=recurse)


def _mark(tensor: torch.Tensor) -> None:
    """Fill a tensor with a value never left everywhere by an initialization."""
    tensor.fill_(_marker(tensor.dtype))


def _is_marked(tensor: torch.Tensor) -> bool:
    marker = _marker(tensor.dtype)
    if tensor.dtype is torch.bool or not tensor.numel():
        return False
    return bool((tensor.isnan() if marker != marker else tensor == marker).all())


def _marker(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return False
    is_number = dtype.is_floating_point or dtype.is_complex
    return float("nan") if is_number else torch.iinfo(dtype).min if dtype.is_signed else 255


class FrozenBase:
    """Frozen parameters of a model as built, known by digests of their contents.

    The digests are those of whole parameters, so that they do not depend on how the model is
    sharded.

    Args:
        model: The model, with all its weights, on its device. All ranks call this if it is sharded.
        name: The base's name in messages, such as the name of a pre-trained model.
    """

    def __init__(self, model: torch.nn.Module, name: str | None) -> None:
        self._name = name
        self._digests = {name: _digest(value) for name, value in _frozen(model).items()}
        # Digests compared by each rank at a checkpoint: no parameter is gathered for them.
        self._pieces = self._digests

    def note_sharded(self, model: torch.nn.Module) -> None:
        """Recompute the digests for this rank's pieces, after the model was sharded."""
        self._pieces = {name: _piece_digest(value) for name, value in _frozen(model).items()}

    def leave_out(self, model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Remove frozen, unchanged parameters from a model's state; return facts about them.

        All ranks call it if the model is sharded.

        Returns:
            The identity that a checkpoint holds in their place.
        """
        # Each time, as a change that is made by way of `.data` leaves no trace.
        parameters = _frozen(model)
        names = [name for name in self._digests if name in parameters and name in state]
        is_same = [self._pieces[name] == _piece_digest(parameters[name]) for name in names]
        if any(is_sharded(parameter) for parameter in parameters.values()):
            is_same = _on_all_ranks(is_same, next(iter(parameters.values())).device)
        same = [name for name, is_so in zip(names, is_same, strict=True) if is_so]
        for name in same:
            del state[name]
        return {"name": self._name, "parameters": {name: self._digests[name] for name in same}}


def frozen_base(model: torch.nn.Module, trainable_only: bool | str) -> FrozenBase | None:
    """Return the base to leave out of a model's checkpoints; None to store the whole model.

    Args:
        model: The model.
        trainable_only: Whether to leave out frozen weights; a text is the base's name.

    Raises:
        TypeError: `trainable_only` is neither.
        ValueError: Nothing is frozen.
    """
    if not isinstance(trainable_only, (bool, str)):
        raise TypeError(
            "`trainable_only` must be True, False or the name of the base, but got"
            f" {trainable_only!r}."
        )
    if trainable_only is False:
        return None
    if all(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "`trainable_only` leaves out frozen parameters, but the model has none. Hint: freeze"
            " the base by `requires_grad_(False)` before `context.wrap_model`."
        )
    return FrozenBase(model, None if trainable_only is True else trainable_only)


def base_problem(model: torch.nn.Module, facts: Mapping[str, Any]) -> str | None:
    """Return the difference between a model's base and a checkpoint's; None if they agree.

    All ranks call it if the model is sharded: they gather one parameter after the other.
    """
    parameters = _parameters(model)
    stored = facts["parameters"]
    lacking = sorted(stored.keys() - parameters.keys())
    if lacking:
        return f"the model here has no parameter {lacking[0]!r} of the base"
    other = [name for name, digest in stored.items() if _digest(parameters[name]) != digest]
    if other:
        return (
            f"{len(other)} of {len(stored)} parameters of the base have other values here, the"
            f" first is {other[0]!r}"
        )
    return None


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return all parameters, tied ones under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _frozen(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in _parameters(model).items() if not value.requires_grad}


def _on_all_ranks(flags: list[bool], device: torch.device) -> list[bool]:
    """Return, for each flag, whether all ranks have set the flag."""
    common = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(common, op=dist.ReduceOp.MIN)
    return [bool(flag) for flag in common.tolist()]


def _digest(parameter: Any) -> str:
    return _digest_of(parameter.full_tensor() if is_sharded(parameter) else parameter)


def _piece_digest(parameter: Any) -> str:
    return _digest_of(parameter.to_local() if is_sharded(parameter) else parameter)


def _digest_of(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    described = f"{tensor.dtype} {list(tensor.shape)}".encode()
    hasher = xxhash.xxh3_128(described)
    hasher.update(content.data)
    return hasher.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """How a model is trained and stored; `PyTorchTrialContext.wrap_model` describes each.

    Attributes:
        trainable_only: Whether checkpoints leave out weights frozen now; a text names it.
        shard_units: With FSDP, which modules are gathered as a whole, see `shard_model`.
        shard_precision: With FSDP, the types of gathered parameters and of sums of gradients.
        gradient_checkpointing: Whether blocks are computed again in the backward pass.
        compile: Whether the model is compiled, or the options of `torch.compile`.
        init_weights: For a model on the meta device, what initialises one module.
        tensor_plan: How a tensor-parallel group divides the model, see `apply_plan`.
    """

    trainable_only: bool | str = False
    shard_units: ShardUnits = None
    shard_precision: "MixedPrecisionPolicy | None" = None
    gradient_checkpointing: bool = False
    compile: bool | Mapping[str, Any] = False
    init_weights: Callable[[torch.nn.Module], Any] | None = None
    tensor_plan: TensorPlan = None


class ModelWrapper:
    """Makes models ready for training, the same on all ranks.

    Args:
        device: The device of this rank.
        grid: The ranks, which all wrap the same models.
        is_sharded: Whether FSDP divides models among them.
    """

    def __init__(self, device: torch.device, grid: RankGrid, *, is_sharded: bool) -> None:
        self._device = device
        self._grid = grid
        self._is_sharded = is_sharded

    def wrap(
        self, model: torch.nn.Module, options: ModelOptions, *, has_autocast: bool
    ) -> FrozenBase | None:
        """Apply the options to a model, in place; return the base left out of its checkpoints.

        Args:
            model: The model.
            options: How it is trained and stored.
            has_autocast: Whether its forward pass is under autocast.

        Raises:
            TypeError: An option is nothing of its kind.
            ValueError: An option does not fit the model or the others; or the model is divided
                over other ranks.
        """
        is_divided = apply_plan(model, options.tensor_plan, self._grid) or self._is_sharded
        check_shard_precision(options.shard_precision, has_autocast=has_autocast)
        has_effect = options.shard_precision is None or self._is_sharded
        if not has_effect and self._grid.rank == 0:
            logger.warning(
                "`shard_precision` has no effect, as the model is not divided: it is trained in"
                ' the types of its parameters. Hint: several ranks with data_parallel="fsdp",'
                ' or precision="bf16".'
            )
        has_weights = not is_on_meta(model)
        if options.gradient_checkpointing:
            checkpoint_blocks(model)
        if options.compile:
            units = shard_units_of(model, options.shard_units) if self._is_sharded else ()
            compile_model(model, options.compile, units)
        if has_weights:
            model.to(self._device)
            self._grid.make_alike(model)
            # The digests of whole parameters, before they are divided.
            base = frozen_base(model, options.trainable_only)
        if self._is_sharded:
            mesh, precision = self._grid.shard_mesh, options.shard_precision
            shard_model(model, self._device, options.shard_units, precision=precision, mesh=mesh)
        if not has_weights:
            has_ranks = self._grid.num_ranks > 1
            materialize(model, self._device, options.init_weights, has_ranks=has_ranks)
            base = frozen_base(model, options.trainable_only)
        if base is not None and is_divided:
            base.note_sharded(model)
        return base


def check_shard_precision(policy: Any, *, has_autocast: bool) -> None:
    """Check a policy for sharded models.

    Raises:
        TypeError: It is no `MixedPrecisionPolicy`.
        ValueError: It asks for fp16, or the forward pass is under autocast.
    """
    if policy is None:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            "`shard_precision` must be a torch.distributed.fsdp.MixedPrecisionPolicy, but got"
            f" {policy!r}. Hint: MixedPrecisionPolicy(param_dtype=torch.bfloat16,"
            " reduce_dtype=torch.float32)."
        )
    if torch.float16 in (policy.param_dtype, policy.reduce_dtype):
        raise ValueError(
            "`shard_precision` must be without torch.float16, as losses are not scaled, but got"
            f" {policy}. Hint: torch.bfloat16."
        )
    if has_autocast:
        raise ValueError(
            '`precision` must be "fp32" with `shard_precision`, but is "bf16". Hint: leave one of'
            " them out."
        )


def checkpoint_blocks(model: torch.nn.Module) -> None:
    """Have blocks computed again in the backward pass instead of kept.

    Raises:
        ValueError: The model has no blocks.
    """
    # Transformers has given it another name.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    own_method = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if callable(own_method):
        own_method()
        return
    blocks = list(sequence_members(model))
    if not blocks:
        raise ValueError(
            "`gradient_checkpointing` needs blocks to compute again: a model with"
            " `gradient_checkpointing_enable()`, or with an nn.Sequential or nn.ModuleList of"
            f" modules that have parameters, but {type(model).__name__} has none."
        )
    for block in blocks:
        forward: Any = functools.partial(
            torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
        )
        block.forward = forward


def compile_model(
    model: torch.nn.Module, options: bool | Mapping[str, Any], units: Sequence[torch.nn.Module] = ()
) -> None:
    """Have a model compiled by `torch.compile`, in place.

    Args:
        model: The model.
        options: The options of `torch.compile`; True for none.
        units: If it is to be sharded, its units. Those without other units inside are compiled one
            by one, as compiled code cannot gather parameters.
    """
    chosen: dict[str, Any] = {} if isinstance(options, bool) else dict(options)
    are_units = {*units}
    for unit in units or [model]:
        if not any(module in are_units for module in unit.modules() if module is not unit):
            forward: Any = _Compiled(unit.forward, chosen)
            unit.forward = forward


class _Compiled:
    """A compiled forward pass.

    `module.compile()` would include the hooks of the module, and torch compiles nothing then if
    they belong to FSDP, or if the module is one of its own, such as `Sequential`.
    """

    def __init__(self, forward: Any, options: Mapping[str, Any]) -> None:
        self._forward = forward
        self._compiled: Callable[..., Any] = torch.compile(forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> Any:
        # A model that is copied or saved as a whole is the user's own again.
        return _same, (self._forward,)


def _same(value: Any) -> Any:
    return value


def compile_counts() -> dict[str, float]:
    """Return the number of recompilations in this process, caused e.g. by new shapes.

    Returns:
        "num_recompiles", the count so far; nothing if no function was compiled.
    """
    # torch loads it with the first compilation.
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    counts = None if convert_frame is None else convert_frame.FRAME_COMPILE_COUNTER
    return {"num_recompiles": float(sum(counts.values()) - len(counts))} if counts else {}


class FollowingModels:
    """Models without an optimizer, watched over a batch without samples for some ranks.

    All ranks make this before the batch and call `share` after it.

    Args:
        models: All models; those that are trained are left alone.
        optimizers: The optimizers.
    """

    def __init__(
        self, models: Iterable[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        trained = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
        self._tensors: dict[str, torch.Tensor] = {}
        for index, model in enumerate(map(plain_model, models)):
            if trained.isdisjoint(map(id, model.parameters())):
                named = chain(model.named_parameters(), model.named_buffers())
                self._tensors |= {f"{index}.{name}": tensor for name, tensor in named}
        self._before = self._digests()

    def share(self, *, is_idle: bool) -> None:
        """Give the chief's tensors that the batch has changed to ranks without samples.

        Args:
            is_idle: Whether this rank is one of them.
        """
        if not self._tensors:
            return
        after, before = self._digests(), self._before
        changed = [name for name, digest in after.items() if digest != before[name]]
        told: list[Any] = [{name: self._tensors[name].detach().cpu() for name in changed}]
        dist.broadcast_object_list(told, src=0)
        if is_idle:
            with torch.no_grad():
                for name, value in told[0].items():
                    self._tensors[name].copy_(value)

    def _digests(self) -> dict[str, str]:
        digests = TensorDigests()
        # Digests of the chief alone show the changes.
        if self._tensors and dist.get_rank() == 0:
            for name, tensor in self._tensors.items():
                digests.add(name, tensor)
        return digests.finish()
