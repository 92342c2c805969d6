"""Models divided among the ranks by FSDP2, torch's `fully_shard`; clipping of gradients."""

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union

import torch
import torch.distributed as dist
from torch import nn

from paceline._training.engine.gradient_reduction import AllReduce, DataParallel
from paceline._training.engine.tensor_copies_and_digests import (
    TensorDigests,
    is_sharded,
    local_part,
    parameters_of,
)
from paceline.core._distributed_context import DistributedContext
from paceline.core._exceptions import NotOfferedError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

logger = logging.getLogger(__name__)


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
    """Divide a model's parameters among all ranks, in place; all ranks call together.

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
    # Late import: the module takes a second to import.
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
    """Reduce-scatter for FSDP's gradients: a sum over the ranks, each with its weight."""

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
    """Return a mesh of all ranks; all ranks call together.

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
    """Keep sharded models whole within the block, for calls by a rank without the others.

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
    """Trim torch's record of called units, as the ranks called them unequally often.

    A backward pass gathers the unit that was called before the present one, on all ranks together.
    """
    while len(order) > length:
        order.pop()._post_forward_indices.pop()


def check_shard_size(shard_size: int | None, data_parallel: DataParallel) -> None:
    """Check the number of ranks holding a copy of a model.

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
    """Refuse a train function's or creator's model with DTensors or meta parameters.

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
    """Return the modules gathered as a whole: inner modules first, the model itself last.

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
    """Yield the members, with parameters, of a model's outermost sequences."""
    if isinstance(model, (torch.nn.Sequential, torch.nn.ModuleList)):
        yield from (member for member in model if any(True for _ in member.parameters()))
        return
    for child in model.children():
        yield from sequence_members(child)


def _add_large(module: torch.nn.Module, least: int, found: list[torch.nn.Module]) -> int:
    """Append modules with at least so many parameters; return the count left to the parent."""
    left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    left += sum(_add_large(child, least, found) for child in module.children())
    # Lists have no forward pass for which they could be gathered.
    is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
    if left < least or is_list:
        return left
    found.append(module)
    return 0


def _check_apart(model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError if two units share a parameter, for example a tied weight."""
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


T = TypeVar("T")

_DATA, _TENSOR = "data", "tensor"
_REPLICATE, _SHARD = "replicate", "shard"


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    """Return a digest of tensors in plain memory; empty if one is elsewhere."""
    if not all(type(each.data) is torch.Tensor and each.is_cpu for each in tensors):
        return ""
    digests = TensorDigests()
    for index, tensor in enumerate(tensors):
        digests.add(str(index), tensor)
    return hashlib.sha256(repr(digests.finish()).encode()).hexdigest()


class RankGrid:
    """Place of a rank in its tensor-parallel group, and among these groups.

    A tensor-parallel group is `tensor_size` neighbouring ranks. They hold one model together, as
    the user's plan divides it, and train on the same samples. The groups train on other samples
    each: a rank sums its gradients over the ranks with the same place in the other groups.

    Args:
        distributed: Where the ranks meet.
        device: The device of this rank.
        tensor_size: The ranks of a tensor-parallel group; one process alone has a group of 1.
        shard_size: With FSDP, the number of groups that hold one copy of a model; None for all.

    Attributes:
        rank: The number of this rank.
        num_ranks: The number of all ranks.
        tensor_size: The ranks of this rank's group.
        tensor_rank: The place in the group.
        data_size: The number of groups.
        data_rank: The number of this rank's group.
        tensor_mesh: The group as torch's `DeviceMesh`; None for a group of 1.

    Raises:
        TypeError: `tensor_size` is no integer.
        ValueError: It is below 1 or does not divide the number of ranks; or `shard_size` does not
            divide the number of groups.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        device: torch.device,
        tensor_size: int = 1,
        shard_size: int | None = None,
    ) -> None:
        check_tensor_size(tensor_size, distributed.size)
        self.tensor_size = min(tensor_size, distributed.size)
        self.rank, self.num_ranks = distributed.rank, distributed.size
        self.data_size = distributed.size // self.tensor_size
        self.data_rank, self.tensor_rank = divmod(distributed.rank, self.tensor_size)
        self._distributed, self._device = distributed, device
        self._shard_size = shard_size
        self.tensor_mesh: Any = None
        self._replaced: list[weakref.ref[torch.nn.Parameter]] = []
        if self.tensor_size > 1:
            self._mesh = self._make_mesh()
            self.tensor_mesh = self._mesh[_TENSOR]
            self._tensor_group = self.tensor_mesh.get_group()
            self._data_group = self._make_data_group()

    def _make_mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        num_groups = self.data_size
        shape: tuple[int, ...] = (num_groups, self.tensor_size)
        names: tuple[str, ...] = (_DATA, _TENSOR)
        if self._shard_size is not None and self._shard_size != num_groups:
            num_copies, rest = divmod(num_groups, self._shard_size)
            if rest:
                raise ValueError(
                    "`shard_size` must divide the number of tensor-parallel groups, but got"
                    f" {self._shard_size} for {num_groups}."
                )
            shape = (num_copies, self._shard_size, self.tensor_size)
            names = (_REPLICATE, _SHARD, _TENSOR)
        return init_device_mesh(self._device.type, shape, mesh_dim_names=names)

    def _make_data_group(self) -> Any:
        names = self._mesh.mesh_dim_names
        if names == (_DATA, _TENSOR):
            return self._mesh.get_group(_DATA)
        # All ranks make all groups.
        groups = [
            dist.new_group([*range(place, self.num_ranks, self.tensor_size)])
            for place in range(self.tensor_size)
        ]
        return groups[self.tensor_rank]

    @property
    def first_rank(self) -> int:
        """The first rank of this rank's tensor-parallel group."""
        return self.data_rank * self.tensor_size

    @cached_property
    def shard_mesh(self) -> Any:
        """The mesh for FSDP's division of a model: the tensor-parallel groups as ranks."""
        # Cached mesh for all models: its process groups cost connections.
        if self.tensor_size == 1:
            return make_mesh(self._device, self._shard_size)
        names = tuple(name for name in self._mesh.mesh_dim_names if name != _TENSOR)
        return self._mesh[names]

    @property
    def all_reduce(self) -> AllReduce | None:
        """The function summing gradients over the groups; None for the default over all ranks."""
        return self._sum_over_groups if self.tensor_size > 1 else None

    def _sum_over_groups(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self._data_group)

    def summed_within(self, total: torch.Tensor) -> torch.Tensor:
        """Return a total already summed over the groups, now also summed within this group."""
        if self.tensor_size > 1:
            total = total.clone()
            dist.all_reduce(total, group=self._tensor_group)
        return total

    def one_per_group(self, shares: Sequence[T]) -> Sequence[T]:
        """Return the shares of each group's first rank, of the shares of all ranks."""
        return shares[:: self.tensor_size]

    def make_alike(self, model: torch.nn.Module) -> None:
        """Broadcast the first group's parameters and buffers to all ranks; all ranks call."""
        if self.num_ranks == 1:
            return
        tensors = (*model.parameters(), *model.buffers())
        # Models made with one seed are alike, and memory is read faster than sent.
        by_rank = self._distributed.allgather(_digest(tensors))
        if by_rank[0] and len(set(by_rank)) == 1:
            return
        for tensor in tensors:
            if not is_sharded(tensor):
                dist.broadcast(tensor.detach(), src=0)
            elif self.data_size > 1:
                dist.broadcast(local_part(tensor), group=self._data_group, group_src=0)

    def note_replaced(
        self, parameters: Iterable[torch.nn.Parameter], model: torch.nn.Module
    ) -> None:
        """Note the earlier parameters of a model replaced by a plan."""
        present = {id(parameter) for parameter in model.parameters()}
        self._replaced += [weakref.ref(each) for each in parameters if id(each) not in present]

    def check_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module]
    ) -> None:
        """Refuse an optimizer stepping parameters no longer in any model.

        Raises:
            ValueError: A plan has put others in their place.
        """
        own = set(map(id, parameters_of(optimizer)))
        known = {id(parameter) for model in models for parameter in model.parameters()}
        replaced = {id(reference()) for reference in self._replaced}
        if own & replaced or not own & known:
            raise ValueError(
                "With `tensor_parallel_size` an optimizer must be made of the parameters of a model"
                f" that was divided before, but {type(optimizer).__name__} has parameters that are"
                " in no model. Hint: model = context.wrap_model(model, tensor_plan=plan), then"
                " Optimizer(model.parameters())."
            )

    def check_model(self, model: torch.nn.Module) -> bool:
        """Check a model's division before wrapping; return whether any parameter is divided.

        Raises:
            ValueError: It has a parameter that is a DTensor of other ranks than this group.
        """
        is_divided = False
        for name, parameter in model.named_parameters():
            if not is_sharded(parameter):
                continue
            is_divided = True
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            if self.tensor_size == 1:
                raise ValueError(
                    "The parameters of a model must be plain tensors without"
                    f" `tensor_parallel_size`, but {name!r} is a DTensor over {mesh.size()} rank(s)"
                    f" with placements {parameter.placements}. Hint: pass"  # type: ignore[attr-defined]
                    f" `tensor_parallel_size={mesh.size()}` and divide the model over"
                    " `context.tensor_mesh`, or give its plan as `tensor_plan`. Leave `fully_shard`"
                    ' out: `data_parallel="fsdp"` does that.'
                )
            if mesh != self.tensor_mesh:
                raise ValueError(
                    "The parameters of a model must be divided over `context.tensor_mesh`, which is"
                    f" {self.tensor_mesh}, but {name!r} is divided over {mesh}. Hint:"
                    " parallelize_module(model, context.tensor_mesh, plan), or give the plan as"
                    " `tensor_plan`."
                )
        return is_divided


def check_tensor_size(tensor_size: int, num_ranks: int) -> None:
    """Check how many ranks shall divide a model by a plan.

    Raises:
        TypeError: It is no integer.
        ValueError: It is below 1 or does not divide the number of ranks.
    """
    if not isinstance(tensor_size, int) or isinstance(tensor_size, bool):
        raise TypeError(f"`tensor_parallel_size` must be an integer, but got {tensor_size!r}.")
    if tensor_size < 1:
        raise ValueError(f"`tensor_parallel_size` must be at least 1, but got {tensor_size}.")
    # Single process: trains whole models, whatever the size of earlier groups.
    if num_ranks > 1 and num_ranks % tensor_size:
        fitting = tensor_size * max(num_ranks // tensor_size, 1)
        raise ValueError(
            f"`tensor_parallel_size` must divide the number of ranks, but got {tensor_size} for"
            f" {num_ranks}. Hint: use {fitting} ranks, or another `tensor_parallel_size`."
        )


TensorPlan: TypeAlias = Union[
    "Mapping[str, ParallelStyle]", "ParallelStyle", Callable[[torch.nn.Module, Any], Any], None
]
"""A plan of `parallelize_module`, or a function of a model and a `DeviceMesh` that divides it."""


def apply_plan(model: torch.nn.Module, plan: TensorPlan, grid: RankGrid) -> bool:
    """Divide a model by a plan, in place; return whether the model is divided now.

    All ranks call it. Without tensor-parallel groups, the model stays whole.

    Args:
        model: The model, not divided yet, or by the user over the mesh of the grid.
        plan: The plan.
        grid: The ranks.

    Raises:
        TypeError: `plan` is nothing of the kind.
        ValueError: The model is divided by the user over other ranks, or by both.
    """
    check_plan(plan)
    is_divided = grid.check_model(model)
    if grid.tensor_size == 1:
        return is_divided
    if is_divided and plan is not None:
        raise ValueError(
            "`tensor_plan` must be for a model that is not divided yet, but"
            f" {type(model).__name__} has DTensors. Hint: leave out `tensor_plan`, or"
            " `parallelize_module`."
        )
    before = list(model.parameters())
    if isinstance(plan, Mapping) or _is_style(plan):
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(model, grid.tensor_mesh, plan)  # type: ignore[arg-type]
    elif callable(plan):
        plan(model, grid.tensor_mesh)
    grid.note_replaced(before, model)
    is_divided = grid.check_model(model)
    if not is_divided and grid.rank == 0:
        logger.warning(
            "`tensor_parallel_size=%d` has no effect on %s, as nothing divides it: the ranks of a"
            " group do the same work. Hint: context.wrap_model(model, tensor_plan=plan).",
            grid.tensor_size,
            type(model).__name__,
        )
    return is_divided


def check_plan(plan: Any) -> None:
    """Check a tensor-parallel plan given by a user.

    Raises:
        TypeError: It is no plan.
    """
    if plan is None or _is_style(plan) or (callable(plan) and not isinstance(plan, type)):
        return
    if isinstance(plan, Mapping) and all(
        isinstance(name, str) and _is_style(style) for name, style in plan.items()
    ):
        return
    raise TypeError(
        "`tensor_plan` must map names of modules to styles of torch.distributed.tensor.parallel, or"
        f" be a function of a model and a mesh, but got {plan!r}. Hint:"
        ' {"up": ColwiseParallel(), "down": RowwiseParallel()}.'
    )


def check_tensor_options(tensor_size: int, data_parallel: DataParallel) -> None:
    """Check the method of summing gradients for tensor-parallel models.

    Raises:
        ValueError: They are not.
    """
    if tensor_size > 1 and data_parallel not in (DataParallel.FLAT, DataParallel.FSDP):
        raise ValueError(
            '`data_parallel` must be "flat" or "fsdp" with `tensor_parallel_size`, but got'
            f" {data_parallel.value!r}."
        )


def place_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Have the gradients of divided parameters divided as these are, where torch leaves sums open.

    All ranks of a tensor-parallel group call it.
    """
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None and is_sharded(gradient):
            placements = parameter.placements  # type: ignore[attr-defined]
            if gradient.placements != placements:
                parameter.grad = gradient.redistribute(placements=placements)


def _is_style(value: Any) -> bool:
    # Importing the class takes a second, for nothing where there is none.
    return any(kind.__name__ == "ParallelStyle" for kind in type(value).__mro__)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place to a norm of at most `max_norm`.

    It does what torch's function of this name does, which refuses tensors that are divided over
    different ranks, and divided ones together with others. All ranks call it.

    Args:
        parameters: The parameters, divided or not; a gradient counts once, however many ranks hold
            it.
        max_norm: The largest norm.
        norm_type: The order of the norm, `inf` for the largest value.
        error_if_nonfinite: Whether a norm that is NaN or infinite is an error.

    Returns:
        The norm of all gradients before, a 0-d tensor.

    Raises:
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for parameter in given:
        gradient: Any = parameter.grad
        if gradient is not None:
            mesh = gradient.device_mesh if is_sharded(gradient) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [_norm(members, norm_type) for members in by_mesh.values()]
    # Single norm: equal to torch's result to the last bit.
    total = norms[0] if len(norms) == 1 else torch.zeros(())
    if len(norms) > 1:
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients must be finite, but is {total.item()}."
            " Hint: error_if_nonfinite=False scales by it all the same."
        )
    for members in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(members, max_norm, total)
    return total


def _norm(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the gradient norm of parameters divided over the same ranks."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients, norm_type)
    whole: torch.Tensor = norm.full_tensor() if is_sharded(norm) else norm
    return whole


def clipping(norm: float | None, value: float | None) -> Callable[[Any], Any]:
    """Return a function clipping the gradients of a step by norm and by value.

    Args:
        norm: The largest norm of all of them; None for any.
        value: The largest absolute value in them; None for any.
    """

    def clip(parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        if value is not None:
            # torch clips divided gradients together with others one by one only.
            kinds = {type(each.grad) for each in parameters if each.grad is not None}
            foreach = None if len(kinds) <= 1 else False
            nn.utils.clip_grad_value_(parameters, value, foreach=foreach)
        if norm is not None:
            clip_grad_norm_(parameters, norm)

    return clip
