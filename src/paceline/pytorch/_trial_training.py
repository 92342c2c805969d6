"""Training of one trial: what a `PyTorchTrial` gives to the engine's loop."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from paceline.engine import Position, ResumableTraining, ShardedData, TrainingCallbacks, TrainsShard
from paceline.pytorch._pytorch_callback import PyTorchCallback
from paceline.pytorch._pytorch_trial import PyTorchTrial
from paceline.pytorch._resume_checks import facts_changed_on_resume
from paceline.pytorch._trial_checkpoint_facts import trial_checkpoint_facts
from paceline.pytorch._trial_context import PyTorchTrialContext
from paceline.pytorch._trial_validator import Validator

logger = logging.getLogger(__name__)


class TrialTraining(ResumableTraining):
    """A trial in training; it may be run piece by piece.

    Args:
        trial: The trial.
        context: The context that the trial was made with.
        validator: How the trial validates.
    """

    def __init__(
        self, trial: PyTorchTrial, context: PyTorchTrialContext, validator: Validator
    ) -> None:
        callbacks = TrainingCallbacks(trial.build_callbacks(), PyTorchCallback)
        super().__init__(context, callbacks, validates_batches=validator.is_by_batch)
        self._trial = trial
        self._train_batch = trial.train_batch
        self._context = context
        self._validator = validator
        self._has_warned = context.distributed.rank > 0
        validator.keeps_outputs = callbacks.overrides("on_validation_epoch_end")

    def make_loaders(self) -> tuple[Any, Any]:
        """Return the trial's loaders."""
        training = self._trial.build_training_data_loader()
        return training, self._trial.build_validation_data_loader()

    def facts(self) -> dict[str, Any]:
        """Return what rebuilds the trial from a checkpoint."""
        return trial_checkpoint_facts(self._trial, self._context)

    def changed_facts(self, training: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return the hyperparameters that have changed since a checkpoint."""
        return facts_changed_on_resume(training, self._context)

    def run_validation(
        self, data: ShardedData | None, loader: Any, limit: int | None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the metrics of validation data, and this rank's metrics of each batch."""
        return self._validator.run(data, loader, limit)

    # ---- for the loop --------------------------------------------------------------------

    def train_shard(self, data: Any, position: Position) -> Mapping[str, Any]:
        """Train on one shard and return its metrics."""
        self._context.reducers.batch = position.batches
        if self._has_warned or not self.leaves_out_ranks():
            return self._train_shard(data, position.epochs, position.batches)
        before = self._own_numbers()
        metrics = self._train_shard(data, position.epochs, position.batches)
        self._warn_of_own_numbers(before, position)
        return metrics

    def _own_numbers(self) -> dict[str, Any]:
        own_code = getattr(self._trial, "own_code", self._trial)
        return {k: v for k, v in vars(own_code).items() if type(v) in (int, float, bool)}

    def _warn_of_own_numbers(self, before: Mapping[str, Any], position: Position) -> None:
        """Say once what lags on ranks without samples, on which `train_batch` is not called."""
        after = self._own_numbers()
        if changed := [name for name in before if after.get(name) != before[name]]:
            self._has_warned = True
            logger.warning(
                "Batch %d leaves ranks without samples, as the last one of an epoch has too few:"
                " their `train_batch` is not called, so `self.%s` is behind there. Hint:"
                " drop_last=True of the loader, or count by `batch_idx`, which is the same on all"
                " ranks.",
                position.batches,
                changed[0],
            )

    def plain_training(self) -> TrainsShard:
        """Return what trains the next shards: `train_batch` itself, where it needs nothing else."""
        if self._keeps_batches:
            return self._train_shard
        stepper, train_batch = self._context.stepper, self._train_batch
        if stepper.computes_in_fp32:
            return train_batch
        # Made once, as this asks torch for what the device can do.
        autocast = stepper.autocast()

        def train(data: Any, epochs: int, batches: int) -> Any:
            with autocast:
                return train_batch(data, epochs, batches)

        return train

    def metrics_of(self, returned: Any) -> Mapping[str, Any]:
        """Return the metrics that a shard's training returned."""
        if isinstance(returned, torch.Tensor):
            return {"loss": returned}
        if not isinstance(returned, Mapping):
            raise TypeError(
                "`train_batch` must return a dictionary of metrics or a tensor, but returned a"
                f" {type(returned).__name__}."
            )
        return returned

    def _train_shard(self, data: Any, epochs: int, batches: int) -> Mapping[str, Any]:
        if self._context.stepper.computes_in_fp32:
            returned = self._train_batch(data, epochs, batches)
        else:
            with self._context.stepper.autocast():
                returned = self._train_batch(data, epochs, batches)
        metrics = returned if type(returned) is dict else self.metrics_of(returned)
        if self._keeps_batches:
            self._batch_metrics.append(
                {k: v.detach().clone() if hasattr(v, "detach") else v for k, v in metrics.items()}
            )
        return metrics

    def num_samples(self, data: Any) -> int:
        """Return the number of samples of a shard."""
        return self._trial.get_batch_length(data)
