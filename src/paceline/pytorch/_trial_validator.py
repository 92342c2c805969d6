"""Validating a trial: by the trial's `evaluate_batch`, or by its `evaluate_full_dataset`."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from paceline.engine import MetricSums, ShardedData, evaluate_batches, evaluate_on_chief
from paceline.pytorch._pytorch_trial import PyTorchTrial
from paceline.pytorch._trial_context import PyTorchTrialContext


class Validator:
    """Run a trial's validation.

    Raises:
        ValueError: Neither or both of the evaluate methods are overridden.
    """

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        has_batch = type(trial).evaluate_batch is not PyTorchTrial.evaluate_batch
        has_full = type(trial).evaluate_full_dataset is not PyTorchTrial.evaluate_full_dataset
        if has_batch == has_full:
            found = "both" if has_batch else "neither"
            raise ValueError(
                "A trial must override exactly one of `evaluate_batch` and `evaluate_full_dataset`,"
                f" but {type(trial).__name__} overrides {found}."
            )
        self._trial = trial
        self._context = context
        self.is_by_batch = has_batch
        self.keeps_outputs = True
        self._takes_index = len(inspect.signature(trial.evaluate_batch).parameters) > 1

    def run(
        self, data: ShardedData | None, loader: Any, limit: int | None
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the metrics, the same on every rank, and this rank's metrics of each batch.

        Args:
            data: The data in shards, for `evaluate_batch`.
            loader: The user's loader, for `evaluate_full_dataset`.
            limit: At most so many batches of this rank; None for all.
        """
        with torch.no_grad(), self._context.stepper.autocast():
            if self.is_by_batch:
                assert data is not None
                outputs, sums = self._run_batches(data, limit)
                metrics = sums.reduce(self._context.distributed)
            else:
                outputs = []
                metrics = evaluate_on_chief(
                    lambda: self._trial.evaluate_full_dataset(loader),
                    self._context.stepper,
                    self._context.distributed,
                )
            metrics |= self._context.reducers.reduce(self._context.distributed, for_training=False)
        return metrics, outputs

    def _run_batches(self, data: ShardedData, limit: int | None) -> tuple[list[Any], MetricSums]:
        context = self._context
        sums = MetricSums(self._trial.evaluation_reducer(), context.stepper.grid)
        outputs: list[Any] = []

        def evaluate(batch: Any, index: int) -> None:
            context.reducers.batch = index // len(data.own_shards)
            if context.moves_data:
                batch = context.to_device(batch)
            metrics = self._evaluate(batch, index)
            sums.add(metrics, self._trial.get_batch_length(batch))
            if self.keeps_outputs:
                outputs.append(metrics)

        evaluate_batches(data, evaluate, context.stepper, context.distributed, limit)
        return outputs, sums

    def _evaluate(self, batch: Any, index: int) -> Mapping[str, Any]:
        metrics = (
            self._trial.evaluate_batch(batch, index)
            if self._takes_index
            else self._trial.evaluate_batch(batch)
        )
        if not isinstance(metrics, Mapping):
            raise TypeError(
                "`evaluate_batch` must return a dictionary of metrics, but returned a"
                f' {type(metrics).__name__}. Hint: return {{"validation_loss": value}}.'
            )
        return metrics
