"""The ranks as a grid: neighbours divide a model by a tensor-parallel plan, others divide data."""

import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.core import DistributedContext
from paceline.engine.parallel._flat_all_reduce import AllReduce
from paceline.engine.parallel._fsdp import make_mesh
from paceline.engine.tensors._optimizer_parameters import parameters_of
from paceline.engine.tensors._sharded_tensors import is_sharded, local_part

T = TypeVar("T")

_DATA, _TENSOR = "data", "tensor"
_REPLICATE, _SHARD = "replicate", "shard"


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
        self._device = device
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
        """What FSDP divides a model over: the groups as a `DeviceMesh`."""
        # One mesh for all models, as its groups cost connections.
        if self.tensor_size == 1:
            return make_mesh(self._device, self._shard_size)
        names = tuple(name for name in self._mesh.mesh_dim_names if name != _TENSOR)
        return self._mesh[names]

    @property
    def all_reduce(self) -> AllReduce | None:
        """What sums gradients over the groups; None for the default, over all ranks."""
        return self._sum_over_groups if self.tensor_size > 1 else None

    def _sum_over_groups(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self._data_group)

    def summed_within(self, total: torch.Tensor) -> torch.Tensor:
        """Return what the groups have summed up, summed over the ranks of this group too."""
        if self.tensor_size > 1:
            total = total.clone()
            dist.all_reduce(total, group=self._tensor_group)
        return total

    def one_per_group(self, shares: Sequence[T]) -> Sequence[T]:
        """Return of the shares of all ranks those of the first rank of each group."""
        return shares[:: self.tensor_size]

    def make_alike(self, model: torch.nn.Module) -> None:
        """Give all ranks the parameters and buffers of the first group; all ranks call it."""
        if self.num_ranks == 1:
            return
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_sharded(tensor):
                dist.broadcast(tensor.detach(), src=0)
            elif self.data_size > 1:
                dist.broadcast(local_part(tensor), group=self._data_group, group_src=0)

    def note_replaced(
        self, parameters: Iterable[torch.nn.Parameter], model: torch.nn.Module
    ) -> None:
        """Note which parameters a plan has replaced, of those that a model had before."""
        present = {id(parameter) for parameter in model.parameters()}
        self._replaced += [weakref.ref(each) for each in parameters if id(each) not in present]

    def check_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module]
    ) -> None:
        """Check that an optimizer steps parameters that models still have.

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
        """Check how a model is divided before it is wrapped; tell whether it is at all.

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
    # One process alone trains whole models, whatever was divided before.
    if num_ranks > 1 and num_ranks % tensor_size:
        fitting = tensor_size * max(num_ranks // tensor_size, 1)
        raise ValueError(
            f"`tensor_parallel_size` must divide the number of ranks, but got {tensor_size} for"
            f" {num_ranks}. Hint: use {fitting} ranks, or another `tensor_parallel_size`."
        )
