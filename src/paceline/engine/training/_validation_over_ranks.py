"""Validation over all ranks: batches on every rank, or the whole set on the chief."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import torch

from paceline import faults
from paceline.core import DistributedContext
from paceline.engine.loaders._epoch_order import shards_of_worker
from paceline.engine.loaders._sharded_data import ShardedData
from paceline.engine.metrics._metric_reducers import Reducer
from paceline.engine.metrics._weighted_means import KeySetError
from paceline.engine.optimizer_steps._stepper import Stepper
from paceline.engine.parallel._fsdp import unsharded
from paceline.engine.parallel._rank_grid import RankGrid


def evaluate_batches(
    data: ShardedData,
    evaluate: Callable[[Any, int], object],
    stepper: Stepper,
    distributed: DistributedContext,
    limit: int | None = None,
) -> None:
    """Evaluate this rank's batches of a validation set; all ranks call it.

    Args:
        data: The data in shards.
        evaluate: Takes a batch and its index among those of this rank.
        stepper: What knows the models.
        distributed: Where the ranks meet.
        limit: At most so many batches of this rank; None for all.
    """
    batches = _own_batches(data)
    with ExitStack() as stack:
        if stepper.is_sharded:
            counts = batches_by_rank(data, limit, stepper.grid.data_size)
            batches = _with_whole_models(batches, counts, data, stepper, stack)
        for index, batch in enumerate(batches):
            if limit is not None and index >= limit:
                break
            faults.reach("engine.validation")
            evaluate(batch, index)


def evaluate_on_chief(
    evaluate: Callable[[], Mapping[str, Any]], stepper: Stepper, distributed: DistributedContext
) -> dict[str, Any]:
    """Return what `evaluate` returns on the chief, on all ranks; they all call it.

    The ranks of the chief's tensor-parallel group evaluate with it, as they hold one model.
    """
    metrics: dict[str, Any] = {}
    with ExitStack() as stack:
        if stepper.is_sharded:
            stack.enter_context(unsharded(stepper.models))
        if stepper.grid.data_rank == 0:
            metrics = dict(evaluate())
    timeout_s = distributed.timeout_s
    # The chief may be at it for hours; its death is noticed all the same.
    distributed.timeout_s = math.inf
    try:
        return distributed.broadcast(metrics)
    finally:
        distributed.timeout_s = timeout_s


def _with_whole_models(
    batches: Iterator[Any],
    counts: list[int],
    data: ShardedData,
    stepper: Stepper,
    stack: ExitStack,
) -> Iterator[Any]:
    """Yield the batches; sharded models are whole from where the first rank has none left.

    Until then all ranks gather each unit of a model together.
    """
    if len(set(counts)) > 1 or data.is_iterable:
        yield from islice(batches, min(counts))
        stack.enter_context(unsharded(stepper.models))
    yield from batches


def batches_by_rank(data: ShardedData, limit: int | None, world_size: int) -> list[int]:
    """Return how many batches each rank validates; 0 where nobody can tell in advance.

    Args:
        data: The data.
        limit: At most so many batches of a rank; None for all.
        world_size: The number of ranks that have other samples each.
    """
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
        return chain.from_iterable(data.iterate_stream(agrees=False))
    return data.iterate(0)


class MetricSums:
    """Combine the metrics of batches, each by its reducer.

    Args:
        reducers: One reducer for all metrics, or one per metric.
        grid: Which ranks have the same samples; by default each has others.
    """

    def __init__(
        self, reducers: Reducer | dict[str, Reducer], grid: RankGrid | None = None
    ) -> None:
        self._reducers = reducers
        self._grid = grid
        self._values: dict[str, Any] = {}
        self._weight = 0

    def add(self, metrics: Mapping[str, Any], num_samples: int) -> None:
        """Add one batch.

        Raises:
            KeySetError: The names differ from those of the batches before.
            TypeError: A value is no number, tensor or array; the message names it.
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
            number = _number_of_metric(name, value)
            reducer = self._reducer(name)
            if reducer is Reducer.AVG:
                number = number * num_samples
            held = self._values.get(name)
            self._values[name] = (
                number if held is None else _combine_validation_values(reducer, held, number)
            )
        self._weight += num_samples

    def reduce(self, distributed: DistributedContext) -> dict[str, Any]:
        """Return the metrics over all ranks.

        Raises:
            KeySetError: Ranks hold different names.
            ValueError: There was no batch on any rank.
        """
        own = ({name: float(value) for name, value in self._values.items()}, self._weight)
        by_rank: Sequence[Any] = distributed.allgather(own)
        if self._grid is not None:
            by_rank = self._grid.one_per_group(by_rank)
        shares = [share for share in by_rank if share[0]]
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
                value = _combine_validation_values(reducer, value, values[name])
            reduced[name] = value / total if reducer is Reducer.AVG else value
        return reduced

    def _reducer(self, name: str) -> Reducer:
        return self._reducers[name] if isinstance(self._reducers, dict) else self._reducers


def _number_of_metric(name: str, value: Any) -> Any:
    """Return a number, or the mean of the elements of a tensor or an array."""
    try:
        if not isinstance(value, torch.Tensor):
            if not getattr(value, "shape", ()):
                return float(value)
            value = torch.as_tensor(value)
        return value.detach().double().mean()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`evaluate_batch` must return numbers, tensors or arrays, but {name!r} is"
            f" {value!r:.60} ({type(value).__name__}). Hint: collect other values by"
            " `context.wrap_reducer`."
        ) from error


def _combine_validation_values(reducer: Reducer, left: Any, right: Any) -> Any:
    if reducer in (Reducer.AVG, Reducer.SUM):
        return left + right
    if isinstance(left, float) and isinstance(right, float):
        return max(left, right) if reducer is Reducer.MAX else min(left, right)
    left, right = torch.as_tensor(left), torch.as_tensor(right)
    return torch.maximum(left, right) if reducer is Reducer.MAX else torch.minimum(left, right)
