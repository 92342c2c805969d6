"""What is done to a model before it is trained, and in which order.

Blocks are first made to be computed again in the backward pass, then compiled, then sharded.
Compiled code thus contains the repeated computation, and no communication.
"""

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from paceline.engine.models._frozen_base import FrozenBase, frozen_base
from paceline.engine.models._meta_device import is_on_meta, materialize
from paceline.engine.parallel._fsdp import ShardUnits, sequence_members, shard_model, shard_units_of
from paceline.engine.parallel._rank_grid import RankGrid
from paceline.engine.parallel._tensor_parallel import TensorPlan, apply_plan

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """How a model is trained and stored; `PyTorchTrialContext.wrap_model` describes each.

    Attributes:
        trainable_only: Whether checkpoints leave out what is frozen now; a text names it.
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
        """Apply the options to a model, in place; return what checkpoints leave out of it.

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
            self._shard(model, options)
        if not has_weights:
            has_ranks = self._grid.num_ranks > 1
            materialize(model, self._device, options.init_weights, has_ranks=has_ranks)
            base = frozen_base(model, options.trainable_only)
        if base is not None and is_divided:
            base.note_sharded(model)
        return base

    def _shard(self, model: torch.nn.Module, options: ModelOptions) -> None:
        shard_model(
            model,
            self._device,
            options.shard_units,
            precision=options.shard_precision,
            mesh=self._grid.shard_mesh,
        )


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
    model: torch.nn.Module,
    options: bool | Mapping[str, Any],
    units: Sequence[torch.nn.Module] = (),
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
    they are those of FSDP, or if the module is one of its own, such as `Sequential`.
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
    """Return how often this process has compiled a function again, such as for other shapes.

    Returns:
        "num_recompiles", the count so far; nothing if no function was compiled.
    """
    # torch loads it with the first compilation.
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    counts = None if convert_frame is None else convert_frame.FRAME_COMPILE_COUNTER
    return {"num_recompiles": float(sum(counts.values()) - len(counts))} if counts else {}
