"""The parts of a training that users register: models, optimizers, schedulers, reducers."""

from functools import cached_property
from typing import Any

import torch

from paceline.core import Context
from paceline.engine.metrics._metric_reducers import ReducerSet
from paceline.engine.optimizer_steps._stepper import Stepper
from paceline.engine.parallel._overlapped_all_reduce import plain_model
from paceline.engine.profiling._torch_profiler import TraceProfiler
from paceline.engine.schedule._lr_scheduler import LRScheduler
from paceline.engine.state._changed_settings import built_settings
from paceline.engine.training._training_loop import TrainingLoop


class RegisteredModels:
    """The registered parts of a training on this rank, which a checkpoint captures.

    Args:
        core: The core context.
        stepper: The models and optimizers.
        seed: The seed.
        num_shards: Into how many shards a global batch is cut; by default one for each rank, or for
            each group of ranks that divide a model by a plan.

    Attributes:
        lr_schedulers: The schedulers, with what their steps count.
        reducers: Metrics that are no averages.
        moves_data: Whether batches are moved to the device.
        warned_types: Types of data that cannot be moved, as far as the user was told of them.
        tracer: What traces the training, if that is wanted.
        loop: The loop, once it was built.
        num_epoch_batches: The batches of the present epoch; None if nobody knows them ahead.
    """

    def __init__(
        self, core: Context, stepper: Stepper, seed: int, num_shards: int | None = None
    ) -> None:
        self.core = core
        self.distributed = core.distributed
        self.device = stepper.device
        self.stepper = stepper
        self.num_shards = num_shards or stepper.grid.data_size
        self.lr_schedulers: list[LRScheduler] = []
        self.reducers = ReducerSet(stepper)
        self.moves_data = True
        self.warned_types: set[type] = set()
        self.tracer: TraceProfiler | None = None
        self.loop: TrainingLoop | None = None
        self.num_epoch_batches: int | None = None
        self._seed = seed

    @property
    def models(self) -> list[torch.nn.Module]:
        """The wrapped models, as they were made."""
        return [plain_model(model) for model in self.stepper.models]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The wrapped optimizers."""
        return self.stepper.optimizers

    @cached_property
    def built(self) -> dict[str, list[Any]]:
        """What the optimizers and schedulers were built with; it must be looked at before use."""
        schedulers = [each.scheduler for each in self.lr_schedulers]
        return built_settings(self.models, self.optimizers, schedulers)

    def get_trial_seed(self) -> int:
        """Return the seed of the trial."""
        return self._seed
