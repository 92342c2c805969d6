"""Models whose parameters are divided among the ranks: FSDP2, torch's `fully_shard`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from paceline.core import NotOfferedError
from paceline.engine.parallel._data_parallel import DataParallel
from paceline.engine.tensors._sharded_tensors import is_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

ShardUnits: TypeAlias = (
    type[torch.nn.Module]
    | tuple[type[torch.nn.Module], ...]
    | int
    | Callable[[torch.nn.Module], bool]
    | None
)
"""Which modules are gathered as a whole: classes, a least number of parameters, or a function."""


def shard_model(
    model: torch.nn.Module,
    device: torch.device,
    units: ShardUnits,
    weight: Callable[[], float] | None = None,
    *,
    precision: "MixedPrecisionPolicy | None" = None,
    mesh: Any = None,
) -> None:
    """Divide the parameters of a model among all ranks, in place; all ranks call it.

    A unit is gathered for its forward and its backward pass, and let go of after each. Gradients
    are summed over the ranks, not averaged, as losses are weighted.

    Args:
        model: The model, on its device and the same on all ranks, or on the meta device.
        device: The device.
        units: Which modules are units, besides the model itself; None for the members of its
            outermost sequences (`Sequential`, `ModuleList`).
        weight: Returns what this rank's gradients count in the present backward pass; None if its
            losses are weighted already.
        precision: The types of gathered parameters and of sums of gradients; the parameters' own
            by default.
        mesh: The ranks, see `make_mesh`; by default all of them hold one copy together.

    Raises:
        TypeError: `units` is nothing of the kind.
        ValueError: Two units share a parameter.
        RuntimeError: torch is too old.
    """
    # It takes a second to import.
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise RuntimeError(
            '`data_parallel="fsdp"` needs a torch whose FSDP can sum gradients without dividing'
            f" them, but torch {torch.__version__} is installed. Hint: pip install --upgrade torch."
        )
    chosen = shard_units_of(model, units)
    mesh = mesh or make_mesh(device)
    options: dict[str, Any] = {} if precision is None else {"mp_policy": precision}
    for unit in chosen:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, **options)
    for unit in chosen:
        assert isinstance(unit, FSDPModule)
        # A plain sum: to divide by 1 asks for an operation that gloo does not have.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if weight is not None:
            unit.set_custom_reduce_scatter(_WeightedReduceScatter(weight))  # type: ignore[arg-type]


class _WeightedReduceScatter:
    """What FSDP sums gradients over the ranks by: a sum in which each rank has its weight."""

    def __init__(self, weight: Callable[[], float]) -> None:
        self._weight = weight

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for a sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sum gradients, and keep this rank's piece of the sum."""
        weight = self._weight()
        if weight != 1.0:
            input_tensor *= weight
        # Newer releases of torch warn of the older name.
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def make_mesh(device: torch.device, shard_size: int | None = None) -> Any:
    """Return all ranks as a mesh; all ranks call it.

    Args:
        device: The device of this rank.
        shard_size: The number of ranks that hold one copy of a model together; None for all.

    Returns:
        A mesh of one dimension, or with several copies of two: the copies, and the ranks of each.

    Raises:
        ValueError: The number of ranks is no multiple of `shard_size`.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    world: Any = dist.group.WORLD
    num_ranks = world.size()
    if shard_size is None or shard_size == num_ranks:
        return DeviceMesh.from_group(world, device.type)
    num_copies, rest = divmod(num_ranks, shard_size)
    if rest:
        raise ValueError(
            f"`shard_size` must divide the number of ranks, but got {shard_size} for {num_ranks}."
            f" Hint: use {shard_size * max(num_copies, 1)} ranks, or leave `shard_size` out."
        )
    shape, names = (num_copies, shard_size), ("replicate", "shard")
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


@contextmanager
def unsharded(models: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Have sharded models whole on each rank, which may then call them apart from the others.

    All ranks enter and leave it. Parameters must not change within.
    """
    from torch.distributed.fsdp import FSDPModule

    roots = [model for model in models if isinstance(model, FSDPModule)]
    units = [unit for root in roots for unit in root.modules() if isinstance(unit, FSDPModule)]
    contexts = [root._get_fsdp_state()._comm_ctx for root in roots]
    # There is no record before the first pass.
    lengths = [len(getattr(context, "post_forward_order", ())) for context in contexts]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
        for context, length in zip(contexts, lengths, strict=True):
            _forget_forward_passes(getattr(context, "post_forward_order", []), length)


def _forget_forward_passes(order: list[Any], length: int) -> None:
    """Shorten torch's record of the units that were called, as ranks called them unequally often.

    A backward pass gathers the unit that was called before the present one, on all ranks together.
    """
    while len(order) > length:
        order.pop()._post_forward_indices.pop()


def check_shard_size(shard_size: int | None, data_parallel: DataParallel) -> None:
    """Check how many ranks shall hold one copy of a model.

    Raises:
        ValueError: It is no number of at least 2, or models are not sharded.
    """
    if shard_size is None:
        return
    if not isinstance(shard_size, int) or isinstance(shard_size, bool) or shard_size < 2:
        raise ValueError(
            f"`shard_size` must be an integer of at least 2, but got {shard_size!r}. Hint: leave it"
            " out to divide a model among all ranks."
        )
    if data_parallel is not DataParallel.FSDP:
        raise ValueError(
            '`shard_size` must be used with `data_parallel="fsdp"`, but that is'
            f" {data_parallel.value!r}."
        )


def check_whole(model: torch.nn.Module) -> None:
    """Check that a model of a train function or of creators is neither divided nor without memory.

    Raises:
        NotOfferedError: A parameter is a DTensor, or on the meta device.
    """
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise NotOfferedError(
                "Tensor parallelism is not offered for train functions and creators, but"
                f" {name!r} is a DTensor."
                " Hint: leave `parallelize_module` and `fully_shard` out;"
                ' `data_parallel="fsdp"` divides models. The trial class takes a tensor-parallel'
                " plan: pytorch.init(tensor_parallel_size=...)."
            )
        if parameter.is_meta:
            raise NotOfferedError(
                "Models on the meta device are not offered for train functions and creators, but"
                f" {name!r} is there. Hint: make the model on the CPU, or use the trial class."
            )


def shard_units_of(model: torch.nn.Module, units: ShardUnits) -> list[torch.nn.Module]:
    """Return the modules of a model that are gathered as a whole: inner ones first, itself last.

    Args:
        model: The model.
        units: Which modules, besides the model itself; None for the members of its outermost
            sequences (`Sequential`, `ModuleList`).

    Raises:
        TypeError: `units` is nothing of the kind.
        ValueError: Two units share a parameter.
    """
    chosen = [*_units_within(model, units), model]
    _check_apart(model, chosen)
    return chosen


def _units_within(model: torch.nn.Module, units: ShardUnits) -> list[torch.nn.Module]:
    if units is None:
        return list(sequence_members(model))
    if isinstance(units, bool) or not (isinstance(units, (int, tuple)) or callable(units)):
        raise TypeError(
            "`shard_units` must be a module class, a tuple of classes, a number of parameters, or a"
            f" function that takes a module, but got {units!r}."
        )
    found: list[torch.nn.Module] = []
    if isinstance(units, int):
        _add_large(model, units, found)
        return [unit for unit in found if unit is not model]
    is_class = isinstance(units, (type, tuple))
    for module in model.modules():
        is_unit = isinstance(module, units) if is_class else units(module)  # type: ignore
        if is_unit and module is not model:
            found.insert(0, module)
    return found


def sequence_members(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the members of the outermost sequences of a model that have parameters."""
    if isinstance(model, (torch.nn.Sequential, torch.nn.ModuleList)):
        yield from (member for member in model if any(True for _ in member.parameters()))
        return
    for child in model.children():
        yield from sequence_members(child)


def _add_large(module: torch.nn.Module, least: int, found: list[torch.nn.Module]) -> int:
    """Add the modules with so many parameters of their own; return what is left for the next."""
    left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    left += sum(_add_large(child, least, found) for child in module.children())
    # Lists have no forward pass for which they could be gathered.
    is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
    if left < least or is_list:
        return left
    found.append(module)
    return 0


def _check_apart(model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:
    """Check that no parameter would be in two units, such as a tied weight."""
    is_unit = {id(unit) for unit in units}
    owners: dict[int, tuple[torch.nn.Module, str]] = {}

    def visit(module: torch.nn.Module, unit: torch.nn.Module, prefix: str) -> None:
        unit = module if id(module) in is_unit else unit
        for name, parameter in module.named_parameters(recurse=False):
            owner, first = owners.setdefault(id(parameter), (unit, prefix + name))
            if owner is not unit:
                raise ValueError(
                    f"Parameters that are shared must be in one unit of `shard_units`, but"
                    f" {first!r} and {prefix + name!r} are one parameter in two. Hint: choose"
                    " units that contain both or neither."
                )
        for name, child in module.named_children():
            visit(child, unit, f"{prefix}{name}.")

    visit(model, model, "")
