"""Validating a trial: batches on all ranks, or the whole set on the chief."""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import torch

from paceline import faults
from paceline.core import DistributedContext
from paceline.engine import KeySetError, ShardedData, shards_of_worker, unsharded
from paceline.pytorch._context import PyTorchTrialContext
from paceline.pytorch._reducers import Reducer
from paceline.pytorch._trial import PyTorchTrial


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

    def run(self, data: ShardedData | None, loader: Any, limit: int | None) -> "ValidationOutcome":
        """Evaluate and return the metrics, the same on every rank.

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
                outputs, metrics = [], self._run_full(loader)
            metrics |= self._context.reducers.reduce(self._context.distributed, for_training=False)
        return ValidationOutcome(metrics, outputs)

    def _run_batches(self, data: ShardedData, limit: int | None) -> tuple[list[Any], "MetricSums"]:
        sums = MetricSums(self._trial.evaluation_reducer())
        outputs: list[Any] = []
        batches = _own_batches(data)
        with ExitStack() as stack:
            if self._context.stepper.is_sharded:
                batches = self._with_whole_models(batches, data, limit, stack)
            for index, batch in enumerate(batches):
                if limit is not None and index >= limit:
                    break
                faults.reach("engine.validation")
                self._context.reducers.batch = index // len(data.own_shards)
                if self._context.moves_data:
                    batch = self._context.to_device(batch)
                metrics = self._evaluate(batch, index)
                sums.add(metrics, self._trial.get_batch_length(batch))
                if self.keeps_outputs:
                    outputs.append(metrics)
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

    def _with_whole_models(
        self, batches: Iterator[Any], data: ShardedData, limit: int | None, stack: ExitStack
    ) -> Iterator[Any]:
        """Yield the batches; sharded models are whole from where the first rank has none left.

        Until then all ranks gather each unit of a model together.
        """
        counts = _batches_by_rank(data, limit, self._context.distributed.size)
        if len(set(counts)) > 1 or data.is_iterable:
            yield from islice(batches, min(counts))
            stack.enter_context(unsharded(self._context.models))
        yield from batches

    def _run_full(self, loader: Any) -> dict[str, Any]:
        distributed = self._context.distributed
        metrics: dict[str, Any] = {}
        with ExitStack() as stack:
            if self._context.stepper.is_sharded:
                stack.enter_context(unsharded(self._context.models))
            if distributed.rank == 0:
                metrics = dict(self._trial.evaluate_full_dataset(loader))
        timeout_s = distributed.timeout_s
        # The chief may be at it for hours; its death is noticed all the same.
        distributed.timeout_s = math.inf
        try:
            return distributed.broadcast(metrics)
        finally:
            distributed.timeout_s = timeout_s


def _batches_by_rank(data: ShardedData, limit: int | None, world_size: int) -> list[int]:
    """Return how many batches each rank validates; 0 where nobody can tell in advance."""
    order = None if data.is_iterable else data.order(0)
    if order is None:
        return [0]
    whole, rest = divmod(len(order.shards), data.num_shards)
    counts = []
    for rank in range(world_size):
        own = shards_of_worker(data.num_shards, rank, world_size)
        count = whole * len(own) + sum(shard < rest for shard in own)
        counts.append(count if limit is None else min(count, limit))
    return counts


def _own_batches(data: ShardedData) -> Iterator[Any]:
    """Return this rank's batches of the whole validation set."""
    if data.is_iterable:
        return chain.from_iterable(data.iterate_stream())
    return data.iterate(0)


class ValidationOutcome:
    """A validation's reduced metrics, and this rank's metrics of each batch."""

    def __init__(self, metrics: dict[str, Any], outputs: list[Any]) -> None:
        self.metrics = metrics
        self.outputs = outputs


class MetricSums:
    """Combine the metrics of batches, each by its reducer.

    Args:
        reducers: One reducer for all metrics, or one per metric.
    """

    def __init__(self, reducers: Reducer | dict[str, Reducer]) -> None:
        self._reducers = reducers
        self._values: dict[str, Any] = {}
        self._weight = 0

    def add(self, metrics: Mapping[str, Any], num_samples: int) -> None:
        """Add one batch.

        Raises:
            KeySetError: The names differ from those of the batches before.
            ValueError: The reducers do not name exactly the metrics.
        """
        if self._values and metrics.keys() != self._values.keys():
            raise KeySetError(
                "All batches must return the same validation metrics, but one returned"
                f" {sorted(metrics)} and those before {sorted(self._values)}."
            )
        if isinstance(self._reducers, dict) and self._reducers.keys() != metrics.keys():
            raise ValueError(
                "`evaluation_reducer` must name exactly the metrics, but names"
                f" {sorted(self._reducers)} while `evaluate_batch` returned {sorted(metrics)}."
            )
        for name, value in metrics.items():
            is_tensor = isinstance(value, torch.Tensor)
            number = value.detach().double().mean() if is_tensor else float(value)
            reducer = self._reducer(name)
            if reducer is Reducer.AVG:
                number = number * num_samples
            held = self._values.get(name)
            self._values[name] = number if held is None else _combine(reducer, held, number)
        self._weight += num_samples

    def reduce(self, distributed: DistributedContext) -> dict[str, Any]:
        """Return the metrics over all ranks.

        Raises:
            KeySetError: Ranks hold different names.
            ValueError: There was no batch on any rank.
        """
        own = ({name: float(value) for name, value in self._values.items()}, self._weight)
        shares = [share for share in distributed.allgather(own) if share[0]]
        if not shares:
            raise ValueError("The validation loader must give at least one batch, but gave none.")
        names = shares[0][0].keys()
        for values, _ in shares:
            if values.keys() != names:
                raise KeySetError(
                    "All ranks must return the same validation metrics, but one returned"
                    f" {sorted(names)} and another {sorted(values)}."
                )
        total = sum(weight for _, weight in shares)
        reduced: dict[str, Any] = {}
        for name in names:
            reducer = self._reducer(name)
            value = shares[0][0][name]
            for values, _ in shares[1:]:
                value = _combine(reducer, value, values[name])
            reduced[name] = value / total if reducer is Reducer.AVG else value
        return reduced

    def _reducer(self, name: str) -> Reducer:
        return self._reducers[name] if isinstance(self._reducers, dict) else self._reducers


def _combine(reducer: Reducer, left: Any, right: Any) -> Any:
    if reducer in (Reducer.AVG, Reducer.SUM):
        return left + right
    if isinstance(left, float) and isinstance(right, float):
        return max(left, right) if reducer is Reducer.MAX else min(left, right)
    left, right = torch.as_tensor(left), torch.as_tensor(right)
    return torch.maximum(left, right) if reducer is Reducer.MAX else torch.minimum(left, right)
