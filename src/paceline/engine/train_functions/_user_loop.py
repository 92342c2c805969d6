"""The parts of a training loop of the user's own on one rank."""

import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.engine.gradients._gradient_sync import GradientSync
from paceline.engine.loaders._epoch_order import shards_of_worker
from paceline.engine.loaders._sharded_data import ShardedData
from paceline.engine.train_functions._prepared_loader import PreparedLoader
from paceline.engine.train_functions._prepared_steps import PreparedSteps
from paceline.workers import RankInfo

T = TypeVar("T")

# Checkpoints hold integers below it.
_SEED_LIMIT = 2**63


class UserLoop:
    """What a rank does around a training loop of the user's own: data, gradients and steps.

    Args:
        rank_info: The rank.
        device: Where it computes.
        seed: The seed of the data order.

    Attributes:
        rank_info: As given.
        device: As given.
        gradients: What sums the gradients of prepared models.
        steps: The steps of prepared optimizers.
        seed: As given.
        is_seed_given: Whether the user has asked for this seed.
        seeded_as: The seed of torch's generator before the user's code; another one is the user's.
        num_shards: The shards of a global batch.
        warned_types: Types of batches that could not be moved, as was said.
    """

    def __init__(self, rank_info: RankInfo, device: torch.device, seed: int) -> None:
        self.rank_info = rank_info
        self.device = device
        self.seed = seed
        self.is_seed_given = False
        self.seeded_as = torch.initial_seed()
        self.num_shards = rank_info.world_size
        self.gradients = GradientSync(rank_info.world_size, device)
        self.steps = PreparedSteps(self.gradients, device)
        self._has_begun = False
        self.warned_types: set[type] = set()

    @property
    def is_used(self) -> bool:
        """Whether a training has begun."""
        return self._has_begun or self.steps.is_used

    @property
    def num_busy_ranks(self) -> int:
        """How many ranks have shards of their own; the others stay idle."""
        return min(self.num_shards, self.rank_info.world_size)

    @property
    def num_backwards(self) -> int:
        """How many backward passes of prepared models have ended."""
        return self.gradients.num_backwards

    def prepare_loader(self, loader: Any, *, is_moved: bool = True) -> PreparedLoader:
        """Return this worker's part of a loader."""
        rank_info = self.rank_info

        def make_data(seed: int) -> ShardedData:
            return ShardedData(
                loader,
                num_shards=self.num_shards,
                own_shards=shards_of_worker(self.num_shards, rank_info.rank, rank_info.world_size),
                seed=seed,
                joins_shards=True,
                has_own_seed=not self.is_seed_given,
            )

        seed = self.agreed_seed(self._seed_of(loader), loader)
        return PreparedLoader(loader, make_data, seed, self, is_moved=is_moved)

    def agreed_seed(self, seed: int, loader: Any) -> int:
        """Return the seed of a loader that all ranks have."""
        return seed

    def _seed_of(self, loader: Any) -> int:
        """Return the seed that was asked for, else that of a loader's or the process's generator.

        If nobody has seeded that, it is the seed of the run.
        """
        if self.is_seed_given:
            return self.seed
        generator = getattr(loader, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed() % _SEED_LIMIT
        seed = torch.initial_seed()
        return self.seed if seed == self.seeded_as else seed % _SEED_LIMIT

    # ---- told by loaders -----------------------------------------------------------------

    def open_data(self, make: Callable[[], T], *, was_open: bool) -> T:
        """Return a new iterator over data; making it may draw random numbers."""
        return make()

    def begin_batch(self, num_own: int, num_all: int, *, is_last: bool, wait_s: float) -> None:
        """Note that the function gets a batch."""
        self._has_begun = True
        self.gradients.begin_batch(num_own, num_all, is_last=is_last)

    def end_batch(self, seconds: float) -> None:
        """Note for how long the function has used a batch."""

    def end_data(self) -> None:
        """Note the end of an iteration."""
        self.gradients.end_data()

    def is_training(self, num_backwards_before: int, *, is_first: bool) -> bool:
        """Tell whether the present loop does what all ranks must do together.

        Args:
            num_backwards_before: The backward passes before the loop.
            is_first: Whether the loop has had no batch yet.
        """
        gradients = self.gradients
        if (gradients.models or gradients.optimizers) and not is_first:
            return self.num_backwards > num_backwards_before
        models = gradients.models or _models_wrapped_by_the_user()
        # Of an optimizer alone the model is not known.
        is_training = any(model.training for model in models) if models else gradients.optimizers
        return torch.is_grad_enabled() and bool(is_training)


def _models_wrapped_by_the_user() -> list[torch.nn.Module]:
    """Return the models whose gradients something else than us sums; rarely needed and slow."""
    kinds: tuple[type, ...] = (DistributedDataParallel,)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds += (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    # Not isinstance(), which would wake what is loaded lazily.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
